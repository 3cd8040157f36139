"""What the Triton kernel files share: the scales of the block formats, and rows with coarser ones."""

import triton
import triton.language as tl

ROWS = 16  # of a program


@triton.jit
def block_amax(x, floor):
    """The largest magnitude of each block, at least the floor; a NaN does not count."""
    a = tl.abs(x)
    return tl.maximum(tl.max(tl.where(a == a, a, 0.0), 1), floor)


@triton.jit
def scale_code(amax, SHIFT: tl.constexpr, MANTISSA: tl.constexpr):
    """The code of the smallest power of two >= amax / limit, by integer arithmetic."""
    bits = amax.to(tl.int32, bitcast=True)
    code = (bits >> 23) - SHIFT + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)
    return tl.minimum(tl.maximum(code, 1), 254)


@triton.jit
def undo_scale(code):
    """2^(127 - code), of codes 1 to 254."""
    return tl.where(code == 254, 0x00400000, (254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def power(code):
    """2^(code - 127), of codes 0 to 254."""
    return tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def _coarsen(x, x_scale, count, k, values, scale, scale_stride, ROWS: tl.constexpr):
    row, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    used, four, wide = row < count, tl.arange(0, 4), row.to(tl.int64)
    codes = x_scale + (wide * (k // 32) + group * 4)[:, None] + four[None]
    code = tl.load(codes, used[:, None], other=0).to(tl.int32)
    top = tl.max(code, 1)
    by = (tl.maximum(127 + code - top[:, None], 0) << 23).to(tl.float32, bitcast=True)
    at = (wide * k + group * 128)[:, None, None] + (four * 32)[None, :, None] + tl.arange(0, 32)[None, None]
    v = tl.load(x + at, used[:, None, None], other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    folded = (v * by[:, :, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(values + at, folded, used[:, None, None])
    tl.store(scale + group.to(tl.int64) * scale_stride + row, power(top), used)


def coarsen_rows(x, x_scale, values, scale):
    """MXFP8 rows, bytes and codes, to a scale a 128 values, the largest of four.

    Args:
        values: bytes of x's shape to write into.
        scale: [k / 128, tokens or more] f32 to write into.
    """
    tokens, k = x.shape
    grid = (triton.cdiv(tokens, ROWS), k // 128)
    _coarsen[grid](x, x_scale, tokens, k, values, scale, scale.stride(0), ROWS=ROWS)  # pyright: ignore[reportArgumentType]
