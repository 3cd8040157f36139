"""Quantising, RMSNorm and RoPE kernels equal the reference: in the emulator, on a GPU as launched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41 import ops, use
from dsv41.formats import E8M0, MXFP8
from dsv41.ops._tilelang import device_source
from dsv41.ops.norm_rope.api import rms_norm, rms_norm_quantize, rope
from tests.ops.rows import same
from tests.tools import triton_interp
from tests.tools.cuda_emu import SHARED, available, emulate

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
emulated = pytest.mark.skipif(not available(), reason="needs g++")
on_gpu = pytest.mark.skipif(HERE.type == "cpu", reason="needs a GPU")
ROOT = Path(ops.__file__).parent
QUANT = device_source(ROOT / "quant" / "quantize.cuh")
NORM = device_source(ROOT / "quant" / "quantize.cuh", ROOT / "norm_rope" / "norm_rope.cuh")
FORMATS = {"mxfp8": (0, 32), "mxfp4": (1, 32), "nvfp4": (2, 16)}


def hard_rows(count: int, width: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Rows whose blocks have every size, ties of the formats, zeros, infinities and NaN of both signs."""
    x = torch.randn(count, width) * torch.exp2(torch.randint(-30, 30, (count, width // 16, 1))).expand(
        -1, -1, 16
    ).reshape(count, width)
    tie = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 17.0, 19.0, 31.0, 416.0, 432.0, 448.0, 480.0, 1.0]
    )
    if count > 2:
        x[1] = tie.repeat(width // 16) * torch.tensor([1.0, -1.0]).repeat(width // 2)
        x[2] = 0
        x[0, 3], x[0, width - 1] = torch.nan, -torch.nan
    if count > 4:
        x[3, ::7] = torch.inf
        x[4] = torch.exp2(torch.linspace(-126, 126, width))
        x[4, 5] = -torch.inf
    return x.to(dtype)


def empty_like_reference(
    kind: str, count: int, width: int, padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a format as rows of wider ones, when padded."""
    packed = width if kind == "mxfp8" else width // 2
    groups = width // FORMATS[kind][1]
    values = torch.zeros(count, packed + 8 * padding, dtype=torch.uint8)[:, :packed]
    return values, torch.zeros(count, groups + padding, dtype=torch.uint8)[:, :groups]


def expected(kind: str, x: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    view = getattr(ops, f"quantize_{kind}")(x, floor=floor)
    return view.values.view(torch.uint8), view.scale.view(torch.uint8)


def emulate_rows(
    kind: str, x: torch.Tensor, floor: float, unroll: int = 1, source: str = QUANT, padding: int = 0
):
    """(values, scale) of the device function, launched as tilelang_cuda.py does."""
    count, width = x.shape
    values, scale = empty_like_reference(kind, count, width, padding)
    chunks = count * width // 8
    call = f"quantize::rows<{FORMATS[kind][0]}, {str(x.dtype == BF16).lower()}, {width}, {unroll}>"
    args = [x, x.stride(0), count, floor, values, values.stride(0), scale, scale.stride(0)]
    emulate(source, call, args, grid=-(-chunks // (256 * unroll)), threads=256)
    return values, scale


@emulated
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("kind", FORMATS)
def test_quantise_in_the_emulator(kind: str, dtype: torch.dtype) -> None:
    x = hard_rows(7, 96, dtype)
    for floor in (0.02, 0.5):
        got, want = emulate_rows(kind, x, floor), expected(kind, x, floor)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    strided = hard_rows(9, 128, dtype)[:, 32:]
    got, want = emulate_rows(kind, strided, 0.02, unroll=2, padding=1), expected(kind, strided, 0.02)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.skipif(not triton_interp.available(), reason="needs triton")
def test_triton_in_the_interpreter() -> None:
    kernels = triton_interp.interpret("dsv41.ops.quant.triton_cuda")
    for kind in FORMATS:
        for x in (
            hard_rows(7, 96),
            hard_rows(3, 64, torch.float32),
            hard_rows(9, 112)[:, 15:111],
            hard_rows(0, 32),
        ):
            values, scale = empty_like_reference(kind, *x.shape, padding=1)
            getattr(kernels, f"quantize_{kind}")(x, 0.02, values, scale)
            want = expected(kind, x, 0.02)
            assert torch.equal(values, want[0]) and torch.equal(scale, want[1])
    x, weight = (4 * torch.randn(6, 192)).to(BF16), torch.rand(6)
    x[1, 5] = torch.nan
    for w, round_bf16 in ((None, True), (weight, False)):
        values, scale = empty_like_reference("mxfp8", 6, 96)
        kernels.swiglu_quantize(x, w, 5.0, round_bf16, values, scale)
        want = ops.swiglu_quantize(x, limit=5.0, weight=w, round_bf16=round_bf16)
        close_codes((values, scale), (want.values.view(torch.uint8), want.scale.view(torch.uint8)))


FAULTS = {
    "scale rounds down": ("((bits & 0x7FFFFF) > mantissa)", "0"),
    "NaN in the maximum": ("m = fmaxf(m, fabsf(v[i]))", "m = fmaxf(m, v[i] == v[i] ? fabsf(v[i]) : 1e30f)"),
    "a lane short": ("x < LANES", "x < LANES / 2"),
    "no saturation": ("fminf(fabsf(y), 6.0f)", "fabsf(y)"),
    "sign lost": (">> 31 << 3", ">> 31 << 4"),
    "ties away": ("(22u << 23)", "(21u << 23)"),
    "next row": ("c / CHUNKS * x_stride", "c / CHUNKS * (x_stride + 1)"),
}


@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_quantise_are_seen(fault: str) -> None:
    old, new = FAULTS[fault]
    assert old in QUANT
    wrong = False
    for kind in FORMATS:
        x = hard_rows(7, 96)
        try:
            got, want = emulate_rows(kind, x, 0.02, source=QUANT.replace(old, new)), expected(kind, x, 0.02)
            wrong |= not (torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]))
        except AssertionError:
            wrong = True
    assert wrong


def close_codes(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Scales equal and values equal but for one code in a thousand that differs by one."""
    assert torch.equal(got[1], want[1])
    a, b = got[0].int(), want[0].int()
    assert (a - b).abs().max() <= 1 and (a != b).float().mean() <= 1e-3


@emulated
@pytest.mark.parametrize("round_bf16", [True, False])
def test_swiglu_in_the_emulator(round_bf16: bool) -> None:
    count, inter = 6, 96
    x = (4 * torch.randn(count, 2 * inter)).to(BF16)
    x[1, 5], x[2, inter + 7], x[3, 0] = torch.nan, torch.nan, -torch.inf
    for weight in (None, torch.rand(count)):
        values, scale = empty_like_reference("mxfp8", count, inter)
        call = f"quantize::swiglu_rows<{inter}, {str(round_bf16).lower()}, 2>"
        args = [
            x,
            x.stride(0),
            count,
            0 if weight is None else weight,
            5.0,
            1e-4,
            values,
            inter,
            scale,
            inter // 32,
        ]
        emulate(QUANT, call, args, grid=1, threads=256)
        want = ops.swiglu_quantize(x, limit=5.0, weight=weight, round_bf16=round_bf16)
        good = torch.ones(count, inter, dtype=torch.bool)
        nan = want.values.float().isnan()
        assert torch.equal(values.view(torch.float8_e4m3fn).float().isnan(), nan)
        good &= ~nan
        close_codes(
            (values[good], scale), (want.values.view(torch.uint8)[good], want.scale.view(torch.uint8))
        )


def emulate_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, quantized: bool, source: str = NORM):
    count, width = x.shape
    warps = -(-width // 1024)
    out = torch.zeros(count, width, dtype=BF16)
    values, scale = empty_like_reference("mxfp8", count, width)
    call = f"norm_rope::rms_norm<{width}, {warps}, {str(quantized).lower()}>"
    args = [x, x.stride(0), weight, count, eps, out, width, 1e-4, values, width, scale, width // 32, SHARED]
    grid, threads = (-(-count // 4), 128) if warps == 1 else (count, 32 * warps)
    emulate(source, call, args, grid=grid, threads=threads, shared_bytes=128)
    return out, values, scale


def assert_norm(got: torch.Tensor, want: torch.Tensor) -> None:
    """bf16 results of sums in another order: one unit apart at most, and that rarely."""
    a, b = got.view(torch.int16).int(), want.view(torch.int16).int()
    number = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert (a - b)[number].abs().max() <= 1 and (a != b)[number].float().mean() <= 0.01


@emulated
@pytest.mark.parametrize("width", [128, 96, 2304])
def test_rms_norm_in_the_emulator(width: int) -> None:
    x, weight = torch.randn(5, width + 32).to(BF16)[:, 32:], torch.randn(width).to(BF16)
    x[2, 7], x[3] = torch.nan, 0
    out, values, scale = emulate_norm(x, weight, 1e-20, True)
    assert_norm(out, rms_norm(x, weight, eps=1e-20))
    want = ops.quantize_mxfp8(out)  # the fused result is that of the rounded rows
    assert same(values, want.values.view(torch.uint8)) and same(scale, want.scale.view(torch.uint8))
    plain, untouched, _ = emulate_norm(x, weight, 1e-20, False)
    assert same(plain, out) and not untouched.any()


@emulated
def test_a_missing_barrier_of_rms_norm_is_seen() -> None:
    x, weight = torch.randn(2, 2304).to(BF16), torch.ones(2304, dtype=BF16)
    with pytest.raises(AssertionError, match=r"barrier|never written"):
        emulate_norm(x, weight, 1e-20, False, NORM.replace("    __syncthreads();\n", ""))


@emulated
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_rope_in_the_emulator(in_place: bool, inverse: bool) -> None:
    tokens, heads, dim, pairs = 5, 3, 64, 16
    x = torch.randn(tokens, heads, dim + 8).to(BF16)[..., :dim]
    angle = torch.randn(tokens, pairs) * 9
    cos, sin = angle.cos(), angle.sin()
    want = rope(x, cos, sin, inverse=inverse)
    out = x if in_place else torch.zeros(tokens, heads, dim, dtype=BF16)
    args = [x, x.stride(0), x.stride(1), tokens, heads, cos, pairs, sin, pairs, int(inverse)]
    args += [out, out.stride(0), out.stride(1)]
    call = f"norm_rope::rope<{dim}, {pairs}, {str(in_place).lower()}>"
    emulate(NORM, call, args, grid=1, threads=256)
    assert torch.equal(out, want)


def test_the_fused_norm_is_the_composition() -> None:
    x, weight, norm = torch.randn(4, 64).to(BF16), torch.randn(64).to(BF16), torch.zeros(4, 64, dtype=BF16)
    out = rms_norm_quantize(x, weight, eps=1e-20, norm=norm)
    want = ops.quantize_mxfp8(rms_norm(x, weight, eps=1e-20))
    assert same(out.values, want.values) and same(out.scale, want.scale)
    assert same(norm, rms_norm(x, weight, eps=1e-20))
    with pytest.raises(ValueError, match="rms_norm_quantize: expected x"):
        rms_norm_quantize(torch.zeros(1, 40, dtype=BF16), torch.zeros(40, dtype=BF16), eps=1e-20)
    given = MXFP8(torch.zeros_like(out.values), torch.zeros(4, 2, dtype=torch.uint8).view(E8M0))
    assert rms_norm_quantize(x, weight, eps=1e-20, out=given) is given and same(given.values, want.values)


# ---- on a GPU ----


def on_device(call: Callable[..., Any], kernel: str, *args: Any, **options: Any) -> Any:
    moved = [a.to(HERE) if isinstance(a, torch.Tensor) else a for a in args]
    kept = {k: v.to(HERE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with use(kernel, call):
        return call(*moved, **kept)


@on_gpu
@pytest.mark.parametrize("kernel", ["tilelang_cuda", "triton_cuda"])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 4096])
def test_quantise_on_the_gpu(count: int, kernel: str) -> None:
    for kind in FORMATS:
        for dtype, width in ((BF16, 5120), (torch.float32, 1280), (BF16, 96)):
            x = hard_rows(count, width, dtype)
            got = on_device(getattr(ops, f"quantize_{kind}"), kernel, x)
            want = getattr(ops, f"quantize_{kind}")(x)
            assert same(got.values.cpu(), want.values) and same(got.scale.cpu(), want.scale), (kind, width)
    x, weight = (4 * torch.randn(count, 4608)).to(BF16), torch.rand(count)
    if count:
        for round_bf16 in (True, False):
            got = on_device(ops.swiglu_quantize, kernel, x, limit=10.0, weight=weight, round_bf16=round_bf16)
            want = ops.swiglu_quantize(x, limit=10.0, weight=weight, round_bf16=round_bf16)
            pair = [(v.values.cpu().view(torch.uint8), v.scale.cpu().view(torch.uint8)) for v in (got, want)]
            close_codes(*pair)


@on_gpu
@pytest.mark.parametrize("count", [0, 1, 7, 64, 4096])
def test_norm_and_rope_on_the_gpu(count: int) -> None:
    kernel = "tilelang_cuda"
    for width in (5120, 1280, 512, 128):
        x, weight = torch.randn(count, width).to(BF16), torch.randn(width).to(BF16)
        got = on_device(ops.rms_norm, kernel, x, weight, eps=1e-20)
        if count:
            assert_norm(got.cpu(), rms_norm(x, weight, eps=1e-20))
        fused, composed = (
            on_device(ops.rms_norm_quantize, kernel, x, weight, eps=1e-20),
            ops.quantize_mxfp8(got.cpu()),
        )
        assert same(fused.values.cpu(), composed.values) and same(fused.scale.cpu(), composed.scale)
    heads = 64 if count < 1000 else 2
    x, angle = torch.randn(count, heads, 512).to(BF16), torch.randn(count, 32)
    for inverse in (False, True):
        got = on_device(ops.rope, kernel, x, angle.cos(), angle.sin(), inverse=inverse)
        assert same(got.cpu(), rope(x, angle.cos(), angle.sin(), inverse=inverse))
