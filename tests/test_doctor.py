"""The doctor says for any target what would run and why, on a machine without an accelerator too."""

import json
import re

import pytest
import torch

from dsv41 import V41FlashConfig, doctor, support
from dsv41.__main__ import main
from dsv41._op import Target, ops


def test_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    text = capsys.readouterr().out
    assert all(name in text for name in ops()) and "torch" in text and "dsv41" in text
    if not torch.cuda.is_available():
        assert code == 0 and "no accelerator" in text and "NONE" not in text


@pytest.mark.parametrize("target", ["cuda:90", "cuda:100", "cuda:75", "npu", "cpu"])
def test_made_up_targets(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", target, "--json", "--installed"]) == 0
    rows = json.loads(capsys.readouterr().out)["targets"][f"asked for: {target}"]
    assert [row["op"] for row in rows] == sorted(ops())
    chosen = {row["op"]: row["kernel"] for row in rows}
    if target == "cpu":
        assert set(chosen.values()) == {"torch"}
    if target == "cuda:90":
        assert chosen["mxfp4_moe"] == "tilelang_cuda" and None not in chosen.values()
    if target == "cuda:75":
        bare = [row for row in rows if row["kernel"] is None]
        assert bare and all("built for" in reason for row in bare for reason in row["refused"].values())
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
    assert main(["doctor", "--target", target]) == 0
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
    target = Target("cuda", 90, frozenset({"tilelang", "triton"}))
    fits, narrow = (
        {row["op"]: row for row in doctor.diagnose(target, cfg)}
        for cfg in (V41FlashConfig.mini(), V41FlashConfig.mini(inter=96))
    )
    assert fits["mxfp4_moe"]["kernel"] == fits["sparse_attn"]["kernel"] == "tilelang_cuda"
    assert narrow["mxfp4_moe"]["kernel"] != "tilelang_cuda"
    assert "inter of 128" in narrow["mxfp4_moe"]["refused"]["tilelang_cuda"]


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


@pytest.mark.parametrize("target", ["cuda", "cuda:x", "tpu", "cpu:1", ""])
def test_bad_target(target: str) -> None:
    with pytest.raises(SystemExit, match="doctor: expected target: cpu, npu or cuda"):
        main(["doctor", "--target", target])
