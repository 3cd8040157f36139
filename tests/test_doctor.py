"""The doctor says for any target what would run and why, on a machine without an accelerator too."""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from dsv41 import V41FlashConfig, doctor, support
from dsv41.__main__ import main
from dsv41._op import Target, _installed, _target, compiler_found, ops


def test_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    text = capsys.readouterr().out
    assert all(name in text for name in ops()) and "torch" in text and "dsv41" in text
    if not torch.cuda.is_available():
        assert code == 0 and "no accelerator" in text and "NONE" not in text


@pytest.mark.parametrize(
    "target", ["cuda:90", "cuda:100", "cuda:75", "cuda:80", "cuda:120", "rocm", "npu", "cpu"]
)
def test_made_up_targets(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--target", target, "--json", "--installed"])
    assert status == (target not in ("cpu", "cuda:90", "cuda:100"))  # on Ascend there is no exchange
    rows = json.loads(capsys.readouterr().out)["targets"][f"asked for: {target}"]
    assert [row["op"] for row in rows] == sorted(ops())
    chosen = {row["op"]: row["kernel"] for row in rows}
    if target == "cpu":
        assert set(chosen.values()) == {"torch"}
    if target == "cuda:90":
        assert chosen["mxfp4_moe"] == "tilelang_cuda" and None not in chosen.values()
    if target in ("cuda:75", "cuda:80", "cuda:120", "rocm"):
        assert set(chosen.values()) == {None}
        for row in rows:
            assert row["refused"].keys() == {kernel.name for kernel in ops()[row["op"]].kernels}
            assert all(reason.startswith("built for") for reason in row["refused"].values())
    if target == "cuda:100":  # the libraries of SM100 count as installed as well
        assert chosen["index_topk"] == "deepgemm_cuda" and None not in chosen.values()
    if target == "npu":
        bare = {row["op"] for row in rows if row["kernel"] is None}
        assert bare == set(support.MISSING)
    assert "torch" not in chosen.values() or target == "cpu"  # an accelerator never falls to the reference


@pytest.mark.parametrize("target", ["cuda:100", "npu"])
def test_columns_stand_apart_and_every_blank_has_its_reason(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", "--target", target])
    lines = capsys.readouterr().out.split(f"asked for: {target}\n\n")[1].splitlines()[: len(ops())]
    assert [line.split()[0] for line in lines] == sorted(ops())
    starts = {re.match(r"\S+ +", line).end() for line in lines}  # pyright: ignore[reportOptionalMemberAccess]
    assert len(starts) == 1, "the second column"
    for line in lines:
        assert line[: next(iter(starts))].endswith("  ")
        kernel, _, reason = line[next(iter(starts)) :].partition("  ")
        assert " " not in kernel and (kernel != "NONE" or reason.strip())
    if target == "npu":
        assert "no exchange for Ascend" in next(line for line in lines if line.startswith("exchange_pack"))


def test_the_calls_of_a_model() -> None:
    """Shapes and layouts are asked for as well: experts that the Hopper kernel does not fit have another."""
    target = Target("cuda", 90, frozenset({"tilelang", "triton", "nvcc"}))
    fits, narrow = (
        {row["op"]: row for row in doctor.diagnose(target, cfg)}
        for cfg in (V41FlashConfig.mini(), V41FlashConfig.mini(inter=96))
    )
    assert fits["mxfp4_moe"]["kernel"] == fits["sparse_attn"]["kernel"] == "tilelang_cuda"
    assert narrow["mxfp4_moe"]["kernel"] != "tilelang_cuda"
    assert "inter of 128" in narrow["mxfp4_moe"]["refused"]["tilelang_cuda"]


def test_ascend_takes_every_call_of_the_released_model() -> None:
    rows = doctor.diagnose(support.TARGETS["Ascend 950"], V41FlashConfig.flash())
    assert "sparse_attn" in {row["op"] for row in rows} and None not in {row["kernel"] for row in rows}


def test_what_is_missing_and_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Target("cuda", 90, packages=frozenset({"triton"}))
    assert [line.split()[0] for line in doctor.missing(bare)] == ["tilelang", "nvcc"]
    assert "dsv41[cuda]" in doctor.missing(bare)[0]
    assert doctor.missing(Target("cpu")) == []
    monkeypatch.setattr(doctor, "present_targets", lambda: {"made up": bare})
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "package 'tilelang' is not installed" in text and "missing: tilelang" in text
    assert "dsv41.use('torch')" in text


def test_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """1 when an op has no kernel on the target that was asked for; ops between ranks can be left out."""
    asked = ["doctor", "--target", "npu", "--installed"]
    assert main(asked) == 1 and "no exchange for Ascend" in capsys.readouterr().out
    assert main([*asked, "--one-rank"]) == 0 and "exchange" not in capsys.readouterr().out
    monkeypatch.setattr(ops()["index_topk"], "kernels", ops()["index_topk"].kernels[:2])
    assert main([*asked, "--one-rank", "--json"]) == 1
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "exit status: 0 when every op has a kernel" in " ".join(capsys.readouterr().out.split())


def test_nobody_built_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Every candidate of every op is named with its reason."""
    assert main(["doctor", "--target", "rocm"]) == 1
    lines = capsys.readouterr().out.split("asked for: rocm\n\n")[1].splitlines()[: len(ops())]
    for line in lines:
        op = ops()[line.split()[0]]
        assert "NONE" in line and all(f"{k.name}: built for {k.device}" in line for k in op.kernels), line


def test_an_amd_gpu_is_no_sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch says "cuda" and capability 9.0 of a GPU that CUDA kernels cannot run on."""
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert _target.__wrapped__("cuda", 0) == Target("rocm")
    monkeypatch.setattr(torch.version, "hip", None)
    assert _target.__wrapped__("cuda", 0) == Target("cuda", 90)


ODD = [
    "cuda",
    "cuda:x",
    "tpu",
    "cpu:1",
    "cpu:",
    "",
    "cuda:0",
    "cuda:1000",
    "cuda:" + "9" * 5000,
    "cuda:٩٠",
    "cuda:-90",
]


@pytest.mark.parametrize("target", ODD, ids=lambda t: t[:12])
def test_bad_target(target: str) -> None:
    with pytest.raises(SystemExit, match="doctor: expected target: cpu, npu, rocm or cuda"):
        main(["doctor", "--target", target])


def test_installed_is_of_a_target() -> None:
    with pytest.raises(SystemExit, match="doctor: expected --target with --installed, got --installed alone"):
        main(["doctor", "--installed"])


def test_a_machine_without_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels that are compiled with it say so, unless they were compiled before; Triton has its own."""
    bare = Target("cuda", 90, frozenset({"tilelang", "triton"}))
    assert ops()["quantize_mxfp8"].select(bare) == "triton_cuda"
    assert dict(ops()["rope"].explain(bare))["tilelang_cuda"] == "program 'nvcc' is not installed"
    ascend = dict(ops()["rope"].explain(Target("npu", None, frozenset({"tilelang", "torch_npu"}))))
    assert ascend["tilelang_npu"] is None

    def find(name: str) -> object:
        if name.startswith("nvidia"):
            raise ModuleNotFoundError("no package nvidia")
        return object()

    home = types.SimpleNamespace(CUDA_HOME=str(tmp_path), TILELANG_CACHE_DIR=str(tmp_path))
    monkeypatch.setitem(sys.modules, "tilelang.env", types.SimpleNamespace(env=home))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", find)
    found = _installed.__wrapped__
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert not found("nvcc") and not compiler_found()
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
        assert found("nvcc") and not compiler_found()
        home.CUDA_HOME = ""
        assert not found("nvcc")
        (tmp_path / "executable.so").touch()
        assert found("nvcc") and not compiler_found()
