"""Quantising rows with Triton, for every GPU that has E4M3 conversions: any alignment and any floor."""

import torch
import triton
import triton.language as tl

from .._triton import block_amax, scale_code, undo_scale

BLOCKS = 64  # blocks of a format a program

_MXFP8, _MXFP4, _NVFP4 = (tl.constexpr(i) for i in range(3))


@triton.jit
def _e4m3(y, x):
    """E4M3 bytes of y with the signs of x, of a NaN too."""
    code = (
        tl.minimum(tl.maximum(tl.where(y == y, y, 0.0), -448.0), 448.0)
        .to(tl.float8e4nv)
        .to(tl.uint8, bitcast=True)
    )
    code = tl.where(y == y, code, 0x7F).to(tl.int32)
    return ((code & 0x7F) | (x.to(tl.int32, bitcast=True) >> 24 & 0x80)).to(tl.uint8)


@triton.jit
def _e2m1(y, x):
    """Codes of y on the E2M1 grid with the signs of x: adding 2^(e + 22) rounds to steps of 2^(e - 1)."""
    a = tl.minimum(tl.abs(tl.where(y == y, y, 0.0)), 6.0)
    binade = tl.maximum(a, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    magic = binade + (22 << 23)
    steps = (a + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - magic
    return (steps + (binade >> 22) - 254) | (x.to(tl.int32, bitcast=True) >> 28 & 8)


@triton.jit
def _store(
    x,
    floor,
    row,
    block,
    mask,
    values,
    values_stride,
    scale,
    scale_stride,
    FORM: tl.constexpr,
    LOG: tl.constexpr,
):
    SIZE: tl.constexpr = 1 << LOG
    amax = block_amax(x, floor)
    if FORM == _NVFP4:
        quotient = tl.minimum(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), 448.0)
        e4m3 = quotient.to(tl.float8e4nv)
        code = e4m3.to(tl.uint8, bitcast=True)
        y = tl.div_rn(x, tl.broadcast_to(e4m3.to(tl.float32)[:, None], x.shape))
    else:
        shift: tl.constexpr = 8 if FORM == _MXFP8 else 2
        mantissa: tl.constexpr = 0x600000 if FORM == _MXFP8 else 0x400000
        wide = scale_code(amax, shift, mantissa)
        y = x * undo_scale(wide)[:, None]
        code = wide.to(tl.uint8)
    tl.store(scale + row * scale_stride + block, code, mask)
    if FORM == _MXFP8:
        at = values + (row * values_stride + block * SIZE)[:, None] + tl.arange(0, SIZE)[None]
        tl.store(at, _e4m3(y, x), mask[:, None])
    else:
        low, high = tl.split(tl.reshape(_e2m1(y, x), (x.shape[0], SIZE // 2, 2)))
        at = values + (row * values_stride + block * (SIZE // 2))[:, None] + tl.arange(0, SIZE // 2)[None]
        tl.store(at, (low | high << 4).to(tl.uint8), mask[:, None])


@triton.jit
def _rows(
    x, x_stride, count, per_row, floor, values, values_stride, scale, scale_stride,
    FORM: tl.constexpr, LOG: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = 1 << LOG
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row, block = (number // per_row).to(tl.int64), number % per_row
    mask = row < count
    at = x + (row * x_stride + block * SIZE)[:, None] + tl.arange(0, SIZE)[None]
    v = tl.load(at, mask[:, None], other=0.0).to(tl.float32)
    _store(v, floor, row, block, mask, values, values_stride, scale, scale_stride, FORM, LOG)


@triton.jit
def _swiglu_rows(
    x, x_stride, count, inter, weight, limit, floor, values, values_stride, scale, scale_stride,
    WEIGHTED: tl.constexpr, ROUND: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    per_row = inter // 32
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row, block = (number // per_row).to(tl.int64), number % per_row
    mask = row < count
    at = x + (row * x_stride + block * 32)[:, None] + tl.arange(0, 32)[None]
    g = tl.load(at, mask[:, None], other=0.0).to(tl.float32)
    u = tl.load(at + inter, mask[:, None], other=0.0).to(tl.float32)
    g = tl.where(g > limit, limit, g)  # comparisons let a NaN pass
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    y = tl.div_rn(g, 1.0 + tl.exp(-g)) * u
    if WEIGHTED:
        y *= tl.load(weight + row, mask, other=0.0)[:, None]
    if ROUND:
        y = y.to(tl.bfloat16).to(tl.float32)
    _store(y, floor, row, block, mask, values, values_stride, scale, scale_stride, _MXFP8, 5)


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time; Triton builds by itself otherwise."""
    rows = {
        "x": "*bf16", "x_stride": "i64", "count": "i32", "per_row": "i32", "floor": "fp32",
        "values": "*u8", "values_stride": "i64", "scale": "*u8", "scale_stride": "i64",
    }  # fmt: skip
    for form in range(3):
        yield _rows, (rows, {"FORM": form, "LOG": 4 if form == 2 else 5, "BLOCKS": BLOCKS})
    swiglu = {
        "x": "*bf16", "x_stride": "i64", "count": "i32", "inter": "i32", "weight": "*fp32", "limit": "fp32",
        "floor": "fp32", "values": "*u8", "values_stride": "i64", "scale": "*u8", "scale_stride": "i64",
    }  # fmt: skip
    yield _swiglu_rows, (swiglu, {"WEIGHTED": True, "ROUND": True, "BLOCKS": BLOCKS})


def _bytes(x):
    return x.view(torch.uint8)


def _launch(form, log, x, floor, values, scale):
    count, width = x.shape
    per_row = width >> log
    if count * per_row == 0:
        return
    values, scale = _bytes(values), _bytes(scale)
    _rows[(triton.cdiv(count * per_row, BLOCKS),)](
        x, x.stride(0), count, per_row, floor, values, values.stride(0), scale, scale.stride(0),
        FORM=form, LOG=log, BLOCKS=BLOCKS,
    )  # fmt: skip


def quantize_mxfp8(x, floor, values, scale):
    """Launch of ``dsv41.ops.quantize_mxfp8``."""
    _launch(0, 5, x, floor, values, scale)


def quantize_mxfp4(x, floor, values, scale):
    """Launch of ``dsv41.ops.quantize_mxfp4``."""
    _launch(1, 5, x, floor, values, scale)


def quantize_nvfp4(x, floor, values, scale):
    """Launch of ``dsv41.ops.quantize_nvfp4``."""
    _launch(2, 4, x, floor, values, scale)


def swiglu_quantize(gate_up, weight, limit, round_bf16, values, scale):
    """Launch of ``dsv41.ops.swiglu_quantize``."""
    count, inter = values.shape
    if count * inter == 0:
        return
    values, scale = _bytes(values), _bytes(scale)
    _swiglu_rows[(triton.cdiv(count * inter // 32, BLOCKS),)](
        gate_up, gate_up.stride(0), count, inter, gate_up if weight is None else weight, limit, 1e-4,
        values, values.stride(0), scale, scale.stride(0),
        WEIGHTED=weight is not None, ROUND=round_bf16, BLOCKS=BLOCKS,
    )  # fmt: skip
