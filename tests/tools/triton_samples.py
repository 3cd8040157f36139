"""Small Triton kernels for the test of the interpreter's corrections."""

import triton
import triton.language as tl


@triton.jit
def casts(x, bf, e4m3, e5m2, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    v = tl.load(x + at)
    tl.store(bf + at, v.to(tl.bfloat16))
    tl.store(e4m3 + at, v.to(tl.float8e4nv))
    tl.store(e5m2 + at, v.to(tl.float8e5))


@triton.jit
def dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + i[:, None] * K + k[None, :])
    y = tl.load(b + j[None, :] * K + k[:, None])
    tl.store(c + i[:, None] * N + j[None, :], tl.dot(x, y))


@triton.jit
def row_max(x, out, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.max(v, 0))
    tl.store(out + 1, tl.sum(tl.maximum(v, 0.0), 0))
