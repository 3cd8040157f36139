"""What the Triton kernel files share: the scales of the block formats."""

import triton
import triton.language as tl


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
