"""Index queries and the choice of the largest scores on Ascend vector cores."""

import tilelang.ascend.language as T
import torch

from ..._op import compiled
from .._ascend import CORES, THREADS, build, e2m1, is_nan, larger, magnitude, ue8m0, undo

FLOOR = 6 * 2.0**-126


@compiled
def _query(heads, dim, pairs):
    count, x_token, x_head, cos_stride, sin_stride, values_token, scale_token = (
        T.dynamic(n)
        for n in ("count", "x_token", "x_head", "cos_stride", "sin_stride", "values_token", "scale_token")
    )
    plain, blocks = dim - 2 * pairs, dim // 32

    @T.prim_func
    def query_rows(
        x: T.StridedTensor((count, heads, dim), (x_token, x_head, 1), T.bfloat16),
        cos: T.StridedTensor((count, pairs), (cos_stride, 1), T.float32),
        sin: T.StridedTensor((count, pairs), (sin_stride, 1), T.float32),
        values: T.StridedTensor((count, heads * dim // 2), (values_token, 1), T.uint8),
        scale: T.StridedTensor((count, heads * blocks), (scale_token, 1), T.uint8),
    ):
        with T.Kernel(CORES) as core:
            rows = T.alloc_shared((heads, dim), T.bfloat16)
            turned = T.alloc_shared((heads, dim), T.bfloat16)
            packed = T.alloc_shared((heads * dim // 2,), T.uint8)
            codes = T.alloc_shared((heads * blocks,), T.uint8)
            for step in T.Pipelined(T.ceildiv(count - core, CORES), num_stages=2):
                token = step * CORES + core
                T.copy(x[token, 0:heads, 0:dim], rows)
                with T.SimtVF(threads=THREADS):
                    for h, i in T.Parallel(heads, plain):
                        turned[h, i] = rows[h, i]
                    for h, p in T.Parallel(heads, pairs):
                        a = T.cast(rows[h, plain + 2 * p], T.float32)
                        b = T.cast(rows[h, plain + 2 * p + 1], T.float32)
                        c = cos[token, p]
                        s = sin[token, p]
                        turned[h, plain + 2 * p] = T.cast(a * c - b * s, T.bfloat16)
                        turned[h, plain + 2 * p + 1] = T.cast(b * c + a * s, T.bfloat16)
                    for g in T.Parallel(heads * blocks):
                        h = g // blocks
                        first = g % blocks * 32
                        amax = T.alloc_var(T.float32)
                        amax = T.float32(FLOOR)
                        for i in T.serial(32):
                            amax = larger(amax, magnitude(T.cast(turned[h, first + i], T.float32)))
                        code = ue8m0(amax, 2, 0x400000)
                        codes[g] = T.cast(code, T.uint8)
                        for i in T.serial(16):
                            low = e2m1(T.cast(turned[h, first + 2 * i], T.float32) * undo(code))
                            high = e2m1(T.cast(turned[h, first + 2 * i + 1], T.float32) * undo(code))
                            packed[g * 16 + i] = T.cast(low | high << 4, T.uint8)
                T.copy(packed, values[token, 0])
                T.copy(codes, scale[token, 0])

    return build(query_rows)


def order(x):
    """uint32 keys in the order of floats, equal for zeros of both signs; 0 for what is never chosen."""
    bits = T.reinterpret(x, T.uint32)
    negative = bits >= T.uint32(0x80000000)
    key = T.if_then_else(negative, ~bits, bits | T.uint32(0x80000000))
    key = T.if_then_else(x == T.float32(0), T.uint32(0x80000000), key)
    return T.if_then_else(is_nan(x) | (bits == T.uint32(0xFF800000)), T.uint32(0), key)


@compiled
def _topk(k):
    """The k-th largest key, a bit a pass; then every thread writes what it keeps of its share, in order."""
    count, width, stride, ids_stride = (T.dynamic(n) for n in ("count", "width", "stride", "ids_stride"))

    @T.prim_func
    def topk_rows(
        scores: T.StridedTensor((count, width), (stride, 1), T.float32),
        lens: T.Tensor((count,), T.int32),
        ids: T.StridedTensor((count, k), (ids_stride, 1), T.int32),
    ):
        with T.Kernel(CORES) as core:
            above = T.alloc_shared((THREADS,), T.int32)
            equal = T.alloc_shared((THREADS,), T.int32)
            for step in T.serial(T.ceildiv(count - core, CORES)):
                row = step * CORES + core
                length = T.max(0, T.min(lens[row], width))
                share = T.ceildiv(length, THREADS)
                with T.SimtVF(threads=THREADS):
                    found = T.alloc_fragment((THREADS,), T.int32)
                    total = T.alloc_fragment((1,), T.int32)
                    edge = T.alloc_local((1,), T.uint32)  # the largest that k keys reach
                    edge[0] = T.uint32(0)
                    for bit in T.serial(32):
                        for t in T.Parallel(THREADS):
                            reached = T.alloc_var(T.int32)
                            reached = 0
                            trial = edge[0] | (T.uint32(1) << T.cast(31 - bit, T.uint32))
                            for i in T.serial(share):
                                if t * share + i < length:
                                    value = T.alloc_var(T.float32)
                                    value = scores[row, t * share + i]
                                    key = order(value)
                                    reached = reached + T.cast(key >= trial, T.int32)
                            found[t] = reached
                        T.reduce_sum(found, total, dim=0)
                        if total[0] >= k:
                            edge[0] = edge[0] | (T.uint32(1) << T.cast(31 - bit, T.uint32))
                    if edge[0] == T.uint32(0):  # fewer than k: all that may be chosen
                        edge[0] = T.uint32(1)
                    for t in T.Parallel(THREADS):
                        more = T.alloc_var(T.int32)
                        same = T.alloc_var(T.int32)
                        more = 0
                        same = 0
                        for i in T.serial(share):
                            if t * share + i < length:
                                value = T.alloc_var(T.float32)
                                value = scores[row, t * share + i]
                                key = order(value)
                                more = more + T.cast(key > edge[0], T.int32)
                                same = same + T.cast(key == edge[0], T.int32)
                        above[t] = more
                        equal[t] = same
                    for t in T.Parallel(THREADS):
                        room = T.alloc_var(T.int32)  # of keys at the edge, the lowest indices first
                        place = T.alloc_var(T.int32)
                        kept = T.alloc_var(T.int32)
                        room = k
                        for o in T.serial(THREADS):
                            room = room - above[o]
                        place = 0
                        kept = 0
                        for o in T.serial(t):
                            taken = T.alloc_var(T.int32)
                            taken = T.min(equal[o], T.max(room - kept, 0))
                            kept = kept + taken
                            place = place + above[o] + taken
                        for i in T.serial(share):
                            if t * share + i < length:
                                value = T.alloc_var(T.float32)
                                value = scores[row, t * share + i]
                                key = order(value)
                                if (key > edge[0]) | ((key == edge[0]) & (kept < room)):
                                    kept = kept + T.cast(key == edge[0], T.int32)
                                    ids[row, place] = t * share + i
                                    place = place + 1
                        if t == THREADS - 1:
                            for i in T.serial(k):
                                if i >= place:
                                    ids[row, i] = -1

    return build(topk_rows)


def variants(cfg):
    """Queries of the indexer, and its choice."""
    yield _query, (cfg.index_heads, cfg.index_dim, cfg.rope_dim // 2)
    yield _topk, (cfg.index_top_k,)


def index_query(x, cos, sin, values, scale):
    """Launch of ``dsv41.ops.index_query``."""
    if x.numel():
        _query(*x.shape[1:], cos.shape[1])(
            x, cos, sin, values.view(torch.uint8).flatten(1), scale.view(torch.uint8).flatten(1)
        )


def topk(scores, lens, ids, scratch):
    """Launch of ``dsv41.ops.topk``; needs no scratch."""
    if ids.numel():
        _topk(ids.shape[1])(scores, lens, ids)
