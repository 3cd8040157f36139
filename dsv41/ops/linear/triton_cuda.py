"""Plain bf16 linears with Triton: the bits of a row do not depend on how many others there are.

A library's product picks its tiles, and with them the order of its sums, by the number of rows. Here k is
summed in shares whose size depends on the weights alone, each by the tensor cores from its first value to its
last, and the shares are added in order in f32. Whether one program walks through all shares or one a share,
and how many tokens a tile has, changes no bit. Weights are the first operand, so that a tile of few tokens is
small.
"""

import triton
import triton.language as tl

from ..._op import split_scratch
from .api import TOKEN_TILES, linear_parts, linear_tile, share_of

STEP = 64  # k of one load
SUMS = 1024  # elements that a program of the second pass adds
_COMPILED: set[tuple[object, ...]] = set()


@triton.jit(do_not_specialize=["tokens", "features"])
def _product(
    x, x_stride, w, w_stride, out, out_stride, sums, tokens, features, k, share,
    SPLIT: tl.constexpr, WHOLE: tl.constexpr, FEATURES: tl.constexpr, TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """A tile of the result; with SPLIT, of one share of k, as f32, into ``sums``."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)  # tiles of the same weights run together
    row = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    kept, lane = (row < features)[:, None] & (token < tokens)[None], tl.arange(0, STEP)
    # Rows past the end read the last row: no mask in the loop, and what they give is not stored.
    a = w + (tl.minimum(row, features - 1).to(tl.int64) * w_stride)[:, None] + lane[None]
    b = x + (tl.minimum(token, tokens - 1).to(tl.int64) * x_stride)[None] + lane[:, None]
    begin = tl.program_id(2) * share if SPLIT else 0
    end = tl.minimum(begin + share, k) if SPLIT else k
    total = tl.zeros((FEATURES, TOKENS), tl.float32)
    for start in range(begin, end, share):
        part = tl.zeros((FEATURES, TOKENS), tl.float32)
        for step in range(start, tl.minimum(start + share, k), STEP):
            at = tl.multiple_of(step, STEP)
            if WHOLE:
                part = tl.dot(tl.load(a + at), tl.load(b + at), part)
            else:
                inside = at + lane < k
                left = tl.load(a + at, inside[None], other=0.0)
                part = tl.dot(left, tl.load(b + at, inside[:, None], other=0.0), part)
        total += part
    if SPLIT:
        to = sums + (tl.program_id(2).to(tl.int64) * tokens + token)[None] * features + row[:, None]
        tl.store(to, total, kept)
    else:
        to = out + (token.to(tl.int64) * out_stride)[None] + row[:, None]
        tl.store(to, total.to(out.dtype.element_ty), kept)


@triton.jit(do_not_specialize=["tokens", "features", "shares"])
def _sum(sums, out, out_stride, tokens, features, shares, SUMS: tl.constexpr):
    at = tl.program_id(0) * SUMS + tl.arange(0, SUMS)
    size = tokens * features
    total = tl.zeros((SUMS,), tl.float32)
    for share in range(shares):
        total += tl.load(sums + share * size.to(tl.int64) + at, at < size, other=0.0)
    to = out + (at // features).to(tl.int64) * out_stride + at % features
    tl.store(to, total.to(out.dtype.element_ty), at < size)


def linear(x, w, out, scratch):
    """Launches of ``dsv41.ops.linear``."""
    (tokens, k), features = x.shape, w.shape[0]
    if 0 in (tokens, features, k):
        out.zero_()
        return
    rows, columns, split = linear_tile(tokens, features, k)
    share = share_of(features, k)
    shares = triton.cdiv(k, share)
    (sums,) = split_scratch(scratch, linear_parts(tokens, features, k))
    args = (x, x.stride(0), w, w.stride(0), out, out.stride(0), sums, tokens, features, k, share)
    fixed = {"WHOLE": k % STEP == 0, "FEATURES": rows, "STEP": STEP}
    sizes = (x.stride(0), w.stride(0), out.stride(0), k, share, *(t.data_ptr() for t in (x, w, out, sums)))
    kind = (x.device, out.dtype, rows, *((n % 16, n == 1) for n in sizes))  # what Triton compiles anew for
    if kind not in _COMPILED:  # with every tile of tokens: no later call of these weights compiles
        for each, parts in ((c, s) for c in TOKEN_TILES for s in (False, True)):
            _product.warmup(*args, **fixed, **_tile(rows, each, parts), grid=(1,))
        _sum.warmup(sums, out, out.stride(0), tokens, features, shares, SUMS=SUMS, grid=(1,))
        _COMPILED.add(kind)
    grid = (triton.cdiv(tokens, columns), triton.cdiv(features, rows), shares if split else 1)
    _product[grid](*args, **fixed, **_tile(rows, columns, split))
    if split:
        programs = (triton.cdiv(tokens * features, SUMS),)
        _sum[programs](sums, out, out.stride(0), tokens, features, shares, SUMS=SUMS)


def _tile(rows, columns, split):
    warps = 8 if rows * columns >= 128 * 128 else 4
    return {"SPLIT": split, "TOKENS": columns, "num_warps": warps, "num_stages": 4}


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time; Triton builds by itself otherwise."""
    names = {"x": "*bf16", "x_stride": "i64", "w": "*bf16", "w_stride": "i64", "out": "*fp32"}
    names |= {
        "out_stride": "i64",
        "sums": "*fp32",
        "tokens": "i32",
        "features": "i32",
        "k": "i32",
        "share": "i32",
    }
    for features, split in ((cfg.num_experts, True), (cfg.vocab_size, False)):
        rows, *_ = linear_tile(1, features, cfg.hidden)
        constants = {"WHOLE": True, "FEATURES": rows, "STEP": STEP}
        constants |= {"SPLIT": split, "TOKENS": TOKEN_TILES[0]}
        yield _product, (names, constants)
    names = {
        "sums": "*fp32",
        "out": "*fp32",
        "out_stride": "i64",
        "tokens": "i32",
        "features": "i32",
        "shares": "i32",
    }
    yield _sum, (names, {"SUMS": SUMS})
