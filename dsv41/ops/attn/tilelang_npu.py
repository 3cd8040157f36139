"""sparse_attn on Ascend: a token a cube core, whose vector core decodes records and takes the softmax.

Emulated, never run. Keys pass twice: once for the maximum and the sum of a row, once for its
values, so that nothing is rescaled on the way and the sums stay in the cube core. Keys are decoded to bf16,
and their products are taken at that rate.
"""

import tilelang.ascend.language as T

from ..._op import compiled
from .._ascend import THREADS, build, e4m3_value
from .._ascend.tilelang_cube import CORES, e2m1_value, power
from ..norm_rope.api import rope

KEYS = 32  # of a step: what the unified buffer has room for


def record_bytes(layout, dim):
    """Of the two layouts that V4.1 attends over."""
    return dim + dim // 32 if layout == "mxfp8" else dim // 2 + dim // 16


def pair(pages, page, record, layout, dim, j):
    """Values 2 j and 2 j + 1 of the record of a page."""
    if layout == "mxfp8":
        scale = power(T.cast(pages[page, record, dim + j // 16], T.int32))
        low = e4m3_value(T.cast(pages[page, record, 2 * j], T.int32))
        high = e4m3_value(T.cast(pages[page, record, 2 * j + 1], T.int32))
    else:
        scale = e4m3_value(T.cast(pages[page, record, dim // 2 + j // 8], T.int32))
        byte = T.cast(pages[page, record, j], T.int32)
        low, high = e2m1_value(byte), e2m1_value(byte >> 4)
    return low * scale, high * scale


@compiled
def _attend(heads, dim, near, near_layout, far, far_layout):
    """``far`` 0: no compressed entries. Pages may have any number of records: a prefill's has its rows."""
    rows, near_pages, near_page, near_stride, far_pages, far_page, far_stride = (
        T.dynamic(n)
        for n in ("rows", "near_pages", "near_page", "near_stride", "far_pages", "far_page", "far_stride")
    )
    near_bytes, far_bytes = record_bytes(near_layout, dim), record_bytes(far_layout, dim)
    tiles = -(-(near + far) // KEYS)

    @T.prim_func
    def attention(
        q: T.Tensor((rows, heads, dim), T.bfloat16),
        window: T.StridedTensor((near_pages, near_page, near_bytes), (near_stride, near_bytes, 1), T.uint8),
        window_ids: T.Tensor((rows, near), T.int32),
        compressed: T.StridedTensor((far_pages, far_page, far_bytes), (far_stride, far_bytes, 1), T.uint8),
        compressed_ids: T.Tensor((rows, far or near), T.int32),
        sink: T.Tensor((heads,), T.float32),
        scale: T.float32,
        out: T.Tensor((rows, heads, dim), T.bfloat16),
    ):
        with T.MixedKernel(CORES, sids=1) as (core, _):
            queries = T.alloc_l1((heads, dim), T.bfloat16)
            key_tile = T.alloc_l1((KEYS, dim), T.bfloat16)
            value_tile = T.alloc_l1((dim, KEYS), T.bfloat16)
            weight_tile = T.alloc_l1((heads, KEYS), T.bfloat16)
            products = T.alloc_l0c((heads, KEYS), T.float32)
            total = T.alloc_l0c((heads, dim), T.float32)
            slots = T.alloc_shared((KEYS,), T.int32)
            page = T.alloc_shared((KEYS,), T.int32)  # where each record lies: found once
            record = T.alloc_shared((KEYS,), T.int32)
            keys = T.alloc_shared((KEYS, dim), T.bfloat16)
            values = T.alloc_shared((dim, KEYS), T.bfloat16)  # the cube core multiplies by rows only
            scores = T.alloc_shared((heads, KEYS), T.float32)
            weights = T.alloc_shared((heads, KEYS), T.bfloat16)
            top = T.alloc_shared((heads,), T.float32)
            mass = T.alloc_shared((heads,), T.float32)
            for step in T.serial(T.ceildiv(rows - core, CORES)):
                row = step * CORES + core
                T.copy(q[row, 0:heads, 0:dim], queries)
                with T.SimtVF(threads=THREADS):
                    for h in T.Parallel(heads):
                        top[h] = sink[h]
                        mass[h] = T.float32(1)
                for t in T.serial(2 * tiles):
                    with T.SimtVF(threads=THREADS):
                        for i in T.Parallel(KEYS):
                            n = t % tiles * KEYS + i
                            slot = T.alloc_var(T.int32)
                            size = T.alloc_var(T.int32)  # of the page
                            slot = window_ids[row, T.min(n, near - 1)]
                            size = near_page
                            if far:  # noqa: SIM102
                                if n >= near:
                                    size = far_page
                                    slot = compressed_ids[row, T.max(T.min(n - near, far - 1), 0)]
                            if (near + far) % KEYS:  # noqa: SIM102
                                if n >= near + far:
                                    slot = T.int32(-1)
                            slots[i] = slot
                            page[i] = slot // size
                            record[i] = slot % size
                        for i, j in T.Parallel(KEYS, dim // 2):
                            low = T.alloc_var(T.float32)
                            high = T.alloc_var(T.float32)
                            low = T.float32(0)
                            high = T.float32(0)
                            if slots[i] >= 0:
                                if t % tiles * KEYS + i < near:
                                    both = pair(window, page[i], record[i], near_layout, dim, j)
                                    low = both[0]
                                    high = both[1]
                                elif far:
                                    both = pair(compressed, page[i], record[i], far_layout, dim, j)
                                    low = both[0]
                                    high = both[1]
                            keys[i, 2 * j] = T.cast(low, T.bfloat16)
                            keys[i, 2 * j + 1] = T.cast(high, T.bfloat16)
                    T.copy(keys, key_tile)
                    T.gemm(queries, key_tile, products, transpose_B=True, clear_accum=True)
                    T.copy(products, scores)
                    if t < tiles:
                        with T.SimtVF(threads=THREADS):
                            for h in T.Parallel(heads):
                                larger = T.alloc_var(T.float32)
                                larger = top[h]
                                for i in T.serial(KEYS):
                                    z = scores[h, i] * scale
                                    scores[h, i] = z
                                    if (slots[i] >= 0) & (z > larger):
                                        larger = z
                                sum_ = T.alloc_var(T.float32)
                                sum_ = mass[h]
                                if top[h] < larger:  # both may be an infinite sink
                                    sum_ = mass[h] * T.exp(top[h] - larger)
                                for i in T.serial(KEYS):
                                    if slots[i] >= 0:
                                        sum_ = sum_ + T.exp(scores[h, i] - larger)
                                top[h] = larger
                                mass[h] = sum_
                    else:
                        with T.SimtVF(threads=THREADS):
                            for h, i in T.Parallel(heads, KEYS):
                                e = T.alloc_var(T.float32)
                                e = T.float32(0)
                                if slots[i] >= 0:
                                    e = T.exp(scores[h, i] * scale - top[h]) / mass[h]
                                weights[h, i] = T.cast(e, T.bfloat16)
                            for j, i in T.Parallel(dim, KEYS):
                                values[j, i] = keys[i, j]
                        T.copy(weights, weight_tile)
                        T.copy(values, value_tile)
                        T.gemm(weight_tile, value_tile, total, transpose_B=True, clear_accum=t == tiles)
                T.copy(total, out[row, 0:heads, 0:dim])

    return build(attention)


def variants(cfg):
    """Layers with compressed entries and without, and the drafter with its own rows behind the window."""
    for far in ((cfg.index_top_k, "nvfp4"), (0, "mxfp8"), (cfg.draft.block_size, "mxfp8")):
        yield _attend, (cfg.num_heads, cfg.head_dim, cfg.window, "mxfp8", *far)


def sparse_attn(
    q, window, window_layout, window_ids, compressed, compressed_layout, compressed_ids, sink, cos, sin,
    scale, num_splits, out, lse, scratch,
):  # fmt: skip
    """Launch of ``dsv41.ops.sparse_attn``; `_ascend` in api.py says what it takes."""
    if not q.numel():
        return
    given, far = (window, window_ids), (0, window_layout)  # no compressed entries: not read
    if compressed is not None and compressed_ids.shape[1]:
        given, far = (compressed, compressed_ids), (compressed_ids.shape[1], compressed_layout)
    _attend(q.shape[1], q.shape[2], window_ids.shape[1], window_layout, *far)(
        q, window, window_ids, *given, sink, scale, out
    )
    if cos is not None:
        rope(out, cos, sin, inverse=True, out=out)
