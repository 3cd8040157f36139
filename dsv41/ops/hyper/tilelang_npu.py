"""mHC on Ascend, on vector cores: a token a step; for the mixes some tokens, which share the weights.

A boundary is the four steps one after the other: on this device nothing is known yet about what fusing them
would save.
"""

import tilelang.ascend.language as T

from ..._op import compiled
from .._ascend import CORES, THREADS, build, larger
from ..norm_rope import api as norm

TOKENS = 8  # that share a pass over the mixing weights
STREAMS, OUTPUTS = 4, 24  # what the mixes are built for: pre, post and a matrix of four streams


@compiled
def _collapse(streams, hidden):
    count, x_token, x_stream, pre_stride, out_stride = (
        T.dynamic(n) for n in ("count", "x_token", "x_stream", "pre_stride", "out_stride")
    )

    @T.prim_func
    def collapse(
        x: T.StridedTensor((count, streams, hidden), (x_token, x_stream, 1), T.bfloat16),
        pre: T.StridedTensor((count, streams), (pre_stride, 1), T.float32),
        out: T.StridedTensor((count, hidden), (out_stride, 1), T.bfloat16),
    ):
        with T.Kernel(CORES) as core:
            rows = T.alloc_shared((streams, hidden), T.bfloat16)
            result = T.alloc_shared((hidden,), T.bfloat16)
            for step in T.Pipelined(T.ceildiv(count - core, CORES), num_stages=2):
                token = step * CORES + core
                T.copy(x[token, 0:streams, 0:hidden], rows)
                with T.SimtVF(threads=THREADS):
                    for i in T.Parallel(hidden):
                        total = T.alloc_var(T.float32)
                        total = T.float32(0)
                        for s in T.serial(streams):
                            total = total + pre[token, s] * T.cast(rows[s, i], T.float32)
                        result[i] = T.cast(total, T.bfloat16)
                T.copy(result, out[token, 0])

    return build(collapse)


@compiled
def _expand(streams, hidden):
    count, y_stride, x_token, x_stream = (T.dynamic(n) for n in ("count", "y_stride", "x_token", "x_stream"))
    post_stride, comb_token, comb_row, out_token, out_stream = (
        T.dynamic(n) for n in ("post_stride", "comb_token", "comb_row", "out_token", "out_stream")
    )

    @T.prim_func
    def expand(
        y: T.StridedTensor((count, hidden), (y_stride, 1), T.bfloat16),
        x: T.StridedTensor((count, streams, hidden), (x_token, x_stream, 1), T.bfloat16),
        post: T.StridedTensor((count, streams), (post_stride, 1), T.float32),
        comb: T.StridedTensor((count, streams, streams), (comb_token, comb_row, 1), T.float32),
        out: T.StridedTensor((count, streams, hidden), (out_token, out_stream, 1), T.bfloat16),
    ):
        with T.Kernel(CORES) as core:
            new = T.alloc_shared((hidden,), T.bfloat16)
            rows = T.alloc_shared((streams, hidden), T.bfloat16)
            result = T.alloc_shared((streams, hidden), T.bfloat16)
            for step in T.Pipelined(T.ceildiv(count - core, CORES), num_stages=2):
                token = step * CORES + core
                T.copy(y[token, 0], new)
                T.copy(x[token, 0:streams, 0:hidden], rows)
                with T.SimtVF(threads=THREADS):
                    for i in T.Parallel(hidden):
                        for k in T.serial(streams):
                            total = T.alloc_var(T.float32)
                            total = T.float32(0)
                            for j in T.serial(streams):
                                total = total + comb[token, j, k] * T.cast(rows[j, i], T.float32)
                            total = total + post[token, k] * T.cast(new[i], T.float32)
                            result[k, i] = T.cast(total, T.bfloat16)
                T.copy(result, out[token, 0:streams, 0:hidden])

    return build(expand)


def sigmoid(z):
    return T.float32(1) / (T.float32(1) + T.exp(-z))


@compiled
def _mixes(hidden):
    count = T.dynamic("count")
    width = STREAMS * hidden
    part = next(n for n in (512, 256, 128, 64, 32) if width % n == 0)
    sums = OUTPUTS + 1  # the last is of squares

    @T.prim_func
    def mixes(
        x: T.Tensor((count, width), T.bfloat16),
        fn: T.Tensor((OUTPUTS, width), T.float32),
        base: T.Tensor((OUTPUTS,), T.float32),
        scale: T.Tensor((3,), T.float32),
        norm_eps: T.float32,
        eps: T.float32,
        iters: T.int32,
        pre: T.Tensor((count, STREAMS), T.float32),
        post: T.Tensor((count, STREAMS), T.float32),
        comb: T.Tensor((count, STREAMS * STREAMS), T.float32),
    ):
        with T.Kernel(CORES) as core:
            rows = T.alloc_shared((TOKENS, part), T.bfloat16)
            weights = T.alloc_shared((OUTPUTS, part), T.float32)
            total = T.alloc_shared((TOKENS, sums), T.float32)
            for step in T.serial(T.ceildiv(count - core * TOKENS, CORES * TOKENS)):
                first = (step * CORES + core) * TOKENS
                with T.SimtVF(threads=THREADS):
                    for p in T.Parallel(TOKENS * sums):
                        total[p // sums, p % sums] = T.float32(0)
                for c in T.Pipelined(width // part, num_stages=2):
                    T.copy(fn[0:OUTPUTS, c * part : (c + 1) * part], weights)
                    # Rows past the end are the last one again: their sums are not used.
                    for t in T.serial(TOKENS):
                        token = T.min(first + t, count - 1)
                        T.copy(x[token, c * part : (c + 1) * part], rows[t, 0:part])
                    with T.SimtVF(threads=THREADS):
                        for p in T.Parallel(TOKENS * sums):
                            t = p // sums
                            o = p % sums
                            partial = T.alloc_var(T.float32)
                            partial = T.float32(0)
                            for i in T.serial(part):
                                value = T.cast(rows[t, i], T.float32)
                                by = T.if_then_else(o < OUTPUTS, weights[T.min(o, OUTPUTS - 1), i], value)
                                partial = partial + value * by
                            total[t, o] = total[t, o] + partial
                with T.SimtVF(threads=32):
                    matrix = T.alloc_local((STREAMS * STREAMS,), T.float32)
                    for t in T.Parallel(TOKENS):
                        if first + t < count:
                            square = total[t, OUTPUTS] / T.float32(width) + norm_eps
                            unit = T.float32(1) / T.sqrt(square)
                            for s in T.serial(STREAMS):
                                z = total[t, s] * unit * scale[0] + base[s]
                                pre[first + t, s] = sigmoid(z) + eps
                                z2 = total[t, STREAMS + s] * unit * scale[1] + base[STREAMS + s]
                                post[first + t, s] = T.float32(2) * sigmoid(z2)
                            # Softmax over rows, then columns and rows in turn (Sinkhorn).
                            for r in T.serial(STREAMS):
                                top = T.alloc_var(T.float32)
                                top = -T.infinity(T.float32)
                                for q in T.serial(STREAMS):
                                    o = 2 * STREAMS + r * STREAMS + q
                                    matrix[r * STREAMS + q] = total[t, o] * unit * scale[2] + base[o]
                                    top = larger(top, matrix[r * STREAMS + q])
                                norm1 = T.alloc_var(T.float32)
                                norm1 = T.float32(0)
                                for q in T.serial(STREAMS):
                                    matrix[r * STREAMS + q] = T.exp(matrix[r * STREAMS + q] - top)
                                    norm1 = norm1 + matrix[r * STREAMS + q]
                                for q in T.serial(STREAMS):
                                    matrix[r * STREAMS + q] = matrix[r * STREAMS + q] / norm1 + eps
                            for turn in T.serial(2 * iters - 1):
                                # Even turns divide columns, odd ones rows: an entry's line is r, its place q.
                                for r in T.serial(STREAMS):
                                    norm2 = T.alloc_var(T.float32)
                                    norm2 = eps
                                    for q in T.serial(STREAMS):
                                        at = T.if_then_else(turn % 2 == 0, q * STREAMS + r, r * STREAMS + q)
                                        norm2 = norm2 + matrix[at]
                                    for q in T.serial(STREAMS):
                                        at2 = T.if_then_else(turn % 2 == 0, q * STREAMS + r, r * STREAMS + q)
                                        matrix[at2] = matrix[at2] / norm2
                            for m in T.serial(STREAMS * STREAMS):
                                comb[first + t, m] = matrix[m]

    return build(mixes)


def variants(cfg):
    """The three kernels of every sub-layer."""
    yield _mixes, (cfg.hidden,)
    yield _collapse, (cfg.num_streams, cfg.hidden)
    yield _expand, (cfg.num_streams, cfg.hidden)


def mhc_mixes(x, fn, base, scale, norm_eps, eps, iters, pre, post, comb, scratch):
    """Launch of ``dsv41.ops.mhc_mixes``; needs no scratch."""
    if x.numel():
        _mixes(x.shape[2])(x.flatten(1), fn, base, scale, norm_eps, eps, iters, pre, post, comb.flatten(1))


def mhc_collapse(x, pre, out):
    """Launch of ``dsv41.ops.mhc_collapse``."""
    if x.numel():
        _collapse(*x.shape[1:])(x, pre, out)


def mhc_expand(y, x, post, comb, out):
    """Launch of ``dsv41.ops.mhc_expand``."""
    if x.numel():
        _expand(*x.shape[1:])(y, x, post, comb, out)


def mhc_boundary(
    y, x, post, comb, pre, fn, base, scale, weight, norm_eps, eps, iters, floor,
    out, next_pre, next_post, next_comb, normed, values, codes, scratch,
):  # fmt: skip
    """Launches of ``dsv41.ops.mhc_boundary``."""
    mhc_expand(y, x, post, comb, out)
    if len(next_pre) == len(x):
        mhc_mixes(out, fn, base, scale, norm_eps, eps, iters, next_pre, next_post, next_comb, scratch)
    mhc_collapse(out, pre, normed)
    norm.NORM_QUANTIZE.load("tilelang_npu")(normed, weight, norm_eps, floor, normed, values, codes)
