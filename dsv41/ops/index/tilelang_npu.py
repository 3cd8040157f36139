"""Index queries on Ascend vector cores."""

import tilelang.ascend.language as T
import torch

from ..._op import compiled
from .._ascend import CORES, THREADS, build, e2m1, larger, magnitude, ue8m0, undo

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


def variants(cfg):
    """Queries of the indexer."""
    yield _query, (cfg.index_heads, cfg.index_dim, cfg.rope_dim // 2)


def index_query(x, cos, sin, values, scale):
    """Launch of ``dsv41.ops.index_query``."""
    if x.numel():
        _query(*x.shape[1:], cos.shape[1])(
            x, cos, sin, values.view(torch.uint8).flatten(1), scale.view(torch.uint8).flatten(1)
        )
