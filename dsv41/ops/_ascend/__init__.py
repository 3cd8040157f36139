"""What the Ascend kernel files share: compiling, the grid, and the arithmetic of the number formats.

All vector kernels have one form: a core takes rows ``core, core + CORES, ...``; a row is copied to the
unified buffer while the row before is computed (`T.Pipelined`), the arithmetic is scalar code of SIMT
threads, and the result is copied back. No hardware is at hand: the SIMT form says in plain C++ what it
computes, so that the tests can run the emitted Ascend C on a host (tests/tools/ascend_emu). Nothing here
was timed.

`max` and `min` of Ascend C are only used where no NaN can be: what they do with one is not documented; the
compiler takes ``x != x`` for false and may turn comparisons around: `is_nan` and `not_finite` look at bits.
Functions on expressions are plain Python: they write the expression into the kernel that calls them.
"""

from typing import Any

import tilelang
import tilelang.ascend.language as T

CORES = 64  # vector cores of an Ascend 950: two beside each of 32 cube cores
THREADS = 256


def build(func: Any) -> Any:
    """A TileLang program compiled for an Ascend 950; needs CANN's compiler."""
    return tilelang.compile(func, target="asc")


def even_threads(width: int) -> int:
    """How many threads sum a row: `T.reduce_sum` wants the same number of values in each."""
    return next(n for n in (256, 128, 64, 32, 16, 8, 4, 2, 1) if width % n == 0)


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers; ``a`` when ``b`` is NaN."""
    return T.if_then_else(b > a, b, a)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers; ``a`` when ``b`` is NaN."""
    return T.if_then_else(b < a, b, a)


def is_nan(x: Any) -> Any:
    """Whether a float is NaN."""
    return (T.reinterpret(x, T.int32) & 0x7FFFFFFF) > 0x7F800000


def not_finite(x: Any) -> Any:
    """Whether a float is NaN or infinite."""
    return (T.reinterpret(x, T.int32) & 0x7FFFFFFF) >= 0x7F800000


def magnitude(x: Any) -> Any:
    """|x| by its bits."""
    return T.reinterpret(T.reinterpret(x, T.int32) & 0x7FFFFFFF, T.float32)


def ue8m0(amax: Any, shift: int, mantissa: int) -> Any:
    """int32 code of the smallest power of two that brings ``amax`` (>= 0) within range.

    Args:
        shift, mantissa: exponent and mantissa bits of the range: 8, 0x600000 for E4M3; 2, 0x400000 for E2M1.
    """
    bits = T.reinterpret(amax, T.int32)
    code = (bits >> 23) - shift + T.cast((bits & 0x7FFFFF) > mantissa, T.int32)
    return T.max(1, T.min(254, code))


def undo(code: Any) -> Any:
    """2^(127 - code), the exact multiplier that undoes a UE8M0 scale; ``code`` in [1, 254]."""
    # 254 - 254 = 0 are the bits of 0; 2^-127 is subnormal.
    return T.reinterpret(T.if_then_else(code == 254, 0x00400000, (254 - code) << 23), T.float32)


def e2m1(x: Any) -> Any:
    """int32 code of a float: nearest even, saturating at 6, sign in bit 3; NaN gives 0."""
    m = magnitude(x)
    steps = [m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5.0]
    code = T.cast(steps[0], T.int32)
    for step in steps[1:]:
        code = code + T.cast(step, T.int32)
    return code | (T.reinterpret(x, T.int32) >> 28 & 8)


def e4m3(x: Any) -> Any:
    """The byte of a float as E4M3: nearest even, saturating at 448; the sign of a NaN too."""
    sign = T.cast(T.reinterpret(x, T.int32) >> 24 & 0x80, T.uint8)
    return T.reinterpret(T.cast(x, T.float8_e4m3fn), T.uint8) | sign


def e4m3_value(code: Any) -> Any:
    """The float of an E4M3 byte (as int32)."""
    # Its exponent and mantissa in a float's place, 2^120 too small: exact for subnormal codes too.
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = T.reinterpret(bits, T.float32) * 2.0**120
    return T.if_then_else((code & 0x7F) == 0x7F, T.reinterpret(bits | 0x7F800000, T.float32), value)
