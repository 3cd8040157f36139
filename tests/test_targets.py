"""Three targets from one API: what each would run, and what a machine that nobody built for is told."""

import subprocess
import sys

import pytest

from dsv41 import Target, V41FlashConfig, doctor, support, warm
from dsv41._op import Unsupported, ops

SM100, NPU = support.TARGETS["CUDA SM100"], support.TARGETS["Ascend 950"]
NOBODY = [Target("cuda", 80), Target("cuda", 120), Target("cuda"), Target("rocm"), Target("xpu")]


@pytest.mark.parametrize(
    "op, sm100, npu",
    [
        ("rms_norm", "tilelang_cuda", "tilelang_npu"),
        ("write_cache", "tilelang_cuda", "tilelang_npu"),
        ("quantize_mxfp8", "tilelang_cuda", "tilelang_npu"),
        ("mhc_boundary", "triton_cuda", "tilelang_npu"),
        ("block_linear", "deepgemm_cuda", "tilelang_npu"),
        ("mxfp4_moe", "deepgemm_cuda", "tilelang_npu"),
        ("sparse_attn", "flashmla_cuda", "tilelang_npu"),
        ("index_topk", "deepgemm_cuda", "tilelang_npu"),
        ("exchange_pack", "triton_cuda", None),
        ("verify_drafts", "triton_cuda", "torch_npu"),
    ],
)
def test_selection(op: str, sm100: str, npu: str | None) -> None:
    assert ops()[op].select(SM100) == sm100
    if npu:
        assert ops()[op].select(NPU) == npu
    else:
        with pytest.raises(Unsupported, match="built for cuda"):
            ops()[op].select(NPU)


def test_without_libraries_sm100_has_kernels_of_its_own() -> None:
    bare = Target("cuda", 100, frozenset({"tilelang", "nvcc", "triton"}))
    assert ops()["block_linear"].select(bare) == "tilelang_sm100_cuda"
    assert ops()["mxfp4_moe"].select(bare) == "tilelang_sm100_cuda"
    assert ops()["grouped_linear"].select(bare) == "tilelang_sm100_cuda"
    assert ops()["index_topk"].select(bare) == "tilelang_sm100_cuda"
    assert ops()["sparse_attn"].select(bare) == "tilelang_sm100_cuda"


@pytest.mark.parametrize("target", NOBODY, ids=str)
def test_nobody_built_for_it(target: Target) -> None:
    """Every op says why none of its kernels takes it, the portable ones too."""
    for op in ops().values():
        with pytest.raises(Unsupported) as told:
            op.select(target)
        lines = str(told.value).splitlines()
        assert len(lines) == 2 + len(op.kernels) and str(target) in lines[0]
        for kernel, line in zip(op.kernels, lines[1:], strict=False):
            assert line.split()[0] == kernel.name and len(line.split()) > 1


def test_what_is_compiled_ahead_is_for_the_target() -> None:
    cfg = V41FlashConfig()
    for target, arch in ((SM100, "sm_100a"), (support.TARGETS["CUDA SM90"], "sm_90a"), (NPU, None)):
        builds = warm.variants(cfg, target)
        found = {a for _, args in builds for a in args if str(a).startswith("sm_")}
        assert found == ({arch} if arch else set()) and len(builds) > 10
        names = {f"{builder.__module__}.{builder.__name__}" for builder, _ in builds}
        assert ("dsv41.ops.index.tilelang_cuda._scan" in names) == (arch == "sm_90a")


def test_importing_everything_needs_no_target() -> None:
    code = "import dsv41, dsv41.ops, dsv41.layers; assert not dsv41.ops.rms_norm is None"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", [SM100, NPU], ids=str)
def test_doctor_says_what_would_run(target: Target) -> None:
    rows = {row["op"]: row for row in doctor.diagnose(target)}
    assert rows.keys() == ops().keys()
    for row in rows.values():
        assert row["kernel"] or row["refused"]


def test_every_blank_has_a_reason() -> None:
    """What the words of a cell claim is held against the tests in `test_support_claims.py`."""
    for name, op in ops().items():
        for label, target in support.TARGETS.items():
            assert support.cell(name, target) != "-", f"{name} on {label}: no kernel and no reason"
        has_npu = any(kernel.device == "npu" for kernel in op.kernels)
        assert has_npu != (name in support.MISSING), f"{name}: a kernel and a reason for none"


def test_counts() -> None:
    for numbers in support.counts().values():
        assert sum(numbers.values()) == len(ops())
    assert f"{support.counts()['Ascend 950']['emulated']} emulated" in support.count_line()
    assert support.count_line() in support.support_table() and "Of " not in support.support_table("moe")
    assert support.counts()["Ascend 950"]["none"] == len(support.MISSING)
    assert support.counts()["Ascend 950"]["emulated"] >= 22
    assert support.counts()["CUDA SM100"]["none"] == 0
