"""Ascend kernels run from the Ascend C that TileLang emits, on a CPU, and equal the reference.

What the emulation assumes and does not see is said in tests/tools/ascend_emu.
"""

from typing import Any

import pytest
import torch
from dsv41_reference.index import index_query as reference

from dsv41 import ops
from tests.ops.rows import same
from tests.ops.test_rows_kernels import assert_norm, close_codes, empty_like_reference, expected, hard_rows
from tests.tools import ascend_emu
from tests.tools.ascend_emu import EmulationError, emulated

pytest.importorskip("tilelang")
if not ascend_emu.available():
    pytest.skip("needs g++", allow_module_level=True)

BF16, U8 = torch.bfloat16, torch.uint8
QUANT, NORM = "dsv41.ops.quant.tilelang_npu", "dsv41.ops.norm_rope.tilelang_npu"
EVERY = pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.emulates(f"quantize_{k}")) for k in ("mxfp8", "mxfp4", "nvfp4")],
)


@EVERY
def test_quantise(kind: str) -> None:
    with emulated(QUANT) as npu:
        for x in (hard_rows(7, 96), hard_rows(70, 128)[:, 32:], hard_rows(0, 96)):
            values, scale = empty_like_reference(kind, *x.shape, padding=1)
            getattr(npu, f"quantize_{kind}")(x, 0.02, values, scale)
            want = expected(kind, x, 0.02)
            assert torch.equal(values, want[0]) and torch.equal(scale, want[1])


def test_quantise_float32() -> None:
    x = hard_rows(5, 96, torch.float32)
    with emulated(QUANT) as npu:
        values, scale = empty_like_reference("mxfp8", *x.shape)
        npu.quantize_mxfp8(x, 0.02, values, scale)
    want = expected("mxfp8", x, 0.02)
    assert torch.equal(values, want[0]) and torch.equal(scale, want[1])


@pytest.mark.emulates("swiglu_quantize")
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_quantize(weighted: bool) -> None:
    x, weight = (4 * torch.randn(6, 192)).to(BF16), torch.rand(6) if weighted else None
    x[1, 5], x[2, 96 + 7], x[3, 0] = torch.nan, torch.nan, -torch.inf
    values, scale = empty_like_reference("mxfp8", 6, 96)
    with emulated(QUANT) as npu:
        npu.swiglu_quantize(x, weight, 5.0, not weighted, values, scale)
    want = ops.swiglu_quantize(x, limit=5.0, weight=weight, round_bf16=not weighted)
    nan = want.values.float().isnan()
    assert torch.equal(values.view(torch.float8_e4m3fn).float().isnan(), nan)
    close_codes((values[~nan], scale), (want.values.view(U8)[~nan], want.scale.view(U8)))


@pytest.mark.emulates("rms_norm_quantize")
@pytest.mark.parametrize(
    "width, eps",  # of the rows' size, and none
    [pytest.param(96, 0.7, marks=pytest.mark.emulates("rms_norm")), (2304, 1e-20)],
)
def test_rms_norm(width: int, eps: float) -> None:
    x, weight = torch.randn(5, width + 32).to(BF16)[:, 32:], torch.randn(width).to(BF16)
    x[2, 7], x[3] = torch.nan, 0
    out, norm = torch.zeros(5, width, dtype=BF16), torch.zeros(5, width, dtype=BF16)
    values, scale = empty_like_reference("mxfp8", 5, width)
    with emulated(NORM) as npu:
        npu.rms_norm_quantize(x, weight, eps, 1e-4, norm, values, scale)
        if width == 96:
            npu.rms_norm(x, weight, eps, out)
            assert same(out, norm)
            alone = torch.zeros_like(values)
            npu.rms_norm_quantize(x, weight, eps, 1e-4, None, alone, scale)
            assert same(alone, values)
    assert_norm(norm, ops.rms_norm(x, weight, eps=eps))
    want = ops.quantize_mxfp8(norm)  # the fused result is that of the rounded rows
    assert same(values, want.values.view(U8)) and same(scale, want.scale.view(U8))


@pytest.mark.emulates("rope")
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_rope(in_place: bool, inverse: bool) -> None:
    x, angle = torch.randn(40, 3, 64 + 8).to(BF16)[..., :64], torch.randn(40, 16) * 9
    want = ops.rope(x, angle.cos(), angle.sin(), inverse=inverse)
    out = x if in_place else torch.zeros(40, 3, 64, dtype=BF16)
    with emulated(NORM) as npu:
        npu.rope(x, angle.cos(), angle.sin(), inverse, out)
    assert same(out.contiguous(), want)


@pytest.mark.emulates("index_query")
def test_index_query() -> None:
    x, angle = torch.randn(70, 4, 128 + 8).to(BF16)[..., :128], torch.randn(70, 32) * 9
    x[3] = 0
    values, scale = torch.zeros(70, 4, 64, dtype=U8), torch.zeros(70, 4, 4, dtype=U8)
    with emulated("dsv41.ops.index.tilelang_npu") as npu:
        npu.index_query(x, angle.cos(), angle.sin(), values, scale)
    want = torch.zeros_like(values), torch.zeros_like(scale)
    reference(x, angle.cos(), angle.sin(), *want)
    assert torch.equal(values, want[0]) and torch.equal(scale, want[1])


@pytest.mark.emulates("topk")
def test_topk() -> None:
    """Ties by the lower index, zeros of both signs, NaN and -inf never, rows that are short or empty."""
    scores = torch.randn(6, 1000 + 3)[:, :1000]
    scores[1] = scores[1].round()
    scores[2, ::3], scores[2, 1::3] = -0.0, 0.0
    scores[3, 5:900], scores[3, 950] = -torch.inf, torch.nan
    scores[4, 7] = torch.inf
    lens = torch.tensor([1000, 1000, 1000, 990, 70, 0], dtype=torch.int32)
    ids = torch.full((6, 64), 99, dtype=torch.int32)
    with emulated("dsv41.ops.index.tilelang_npu") as npu:
        npu.topk(scores, lens, ids, torch.empty(0, dtype=U8))
    assert torch.equal(ids, ops.topk(scores, lens, k=64))


@pytest.mark.emulates("apply_token_bitmask")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_apply_token_bitmask(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 9000 + 8).to(dtype)[:, :9000]
    mask = torch.randint(-(2**31), 2**31 - 1, (3, 283), dtype=torch.int32)[:, :282]
    want = ops.apply_token_bitmask(logits.clone(), mask)
    with emulated("dsv41.ops.verify.tilelang_npu") as npu:
        npu.apply_token_bitmask(logits, mask)
    assert torch.equal(logits, want)


def broken(module: str, old: str, new: str) -> Any:
    """`emulated` with a mistake planted into the emitted Ascend C."""

    def edit(source: str) -> str:
        assert old in source, source
        return source.replace(old, new)

    return emulated(module, edit)


# Planted in what the compiler emits: a wrong constant, index, byte count, a lost wait, a lost row.
FAULTS = {
    "scale rounds down": ("6291456", "8388607"),
    "next block's scale": ("((uint8_t)code)", "((uint8_t)(code + 1))"),
    "wrong row": ("* ((int64_t)x_stride)", "* ((int64_t)x_stride + 1)"),
    "short copy": (", 1, 192, 0,", ", 1, 160, 0,"),
    "wait without notification": ("asc_sync_notify(PIPE_MTE2, PIPE_V", "asc_sync_notify(PIPE_MTE2, PIPE_S"),
    "past the rows": (">> 6)", ">> 5)"),
    "sign": ("& 128", "& 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_quantise_are_seen(fault: str) -> None:
    x = hard_rows(7, 96)
    values, scale = empty_like_reference("mxfp8", *x.shape)
    want = expected("mxfp8", x, 0.02)
    wrong = False
    try:
        with broken(QUANT, *FAULTS[fault]) as npu:
            npu.quantize_mxfp8(x, 0.02, values, scale)
        wrong = not (torch.equal(values, want[0]) and torch.equal(scale, want[1]))
    except EmulationError:
        wrong = True
    assert wrong


def test_a_missing_barrier_is_seen() -> None:
    x, weight = torch.randn(2, 96).to(BF16), torch.ones(96, dtype=BF16)
    values, scale = empty_like_reference("mxfp8", 2, 96)
    with (
        broken(NORM, "asc_syncthreads();", "") as npu,
        pytest.raises(EmulationError, match=r"barrier|never written"),
    ):
        npu.rms_norm_quantize(x, weight, 1e-20, 1e-4, None, values, scale)
