"""Sparse attention on SM100: both products on tcgen05, scores and sums in tensor memory. Emulated, never run.

    scores[key, head] = <record, q>        values[column, head] = sum over keys of record * weight

A tile of 128 keys fills the 128 rows of a product; heads are its columns. Records are decoded once, a key by
a thread, which then holds the scores of its key. A block takes a query, up to 64 heads and a part of the
keys; heads past the last repeat it, in what is written too.
"""

import tilelang.language as T
import torch

from ..._op import compiled
from .._tilelang import arch_of, build

KEYS, HEADS, WIDTH = 128, 64, 512  # of a tile; a block has a thread a key
SLICES = WIDTH // 128  # of columns: products of 128 rows
HALF = HEADS // 2  # heads of which a thread gives its numbers away at a time


@T.macro
def put(numbers, largest, keys, thread, column):
    """Sixteen columns of a thread's key; the largest numbers so far, as bits: NaN is above infinity."""
    for i in T.unroll(16):
        largest[i] = T.max(largest[i], T.reinterpret(numbers[i], T.int32) & 0x7FFFFFFF)
    for i in T.vectorized(8):
        keys[thread, column + i] = T.cast(numbers[i], T.bfloat16)
    for i in T.vectorized(8):
        keys[thread, column + 8 + i] = T.cast(numbers[8 + i], T.bfloat16)


@T.macro
def take_mxfp8(values, codes, first, held, largest, keys, thread):
    """A record of 32 pieces of E4M3 and one of powers of two, a byte for 32 values."""
    raw, numbers = T.alloc_local((16,), T.float8_e4m3fn), T.alloc_local((16,), T.float32)
    for group in T.serial(4):
        for part in T.unroll(4):  # so many loads under way
            block = group * 4 + part
            power = T.cast(T.if_then_else(held, codes[first + 32, block], T.uint8(0)), T.int32)
            scale = T.reinterpret(T.if_then_else(power == 0, 0x400000, power << 23), T.float32)
            for half in T.unroll(2):
                for i in T.vectorized(16):
                    raw[i] = T.if_then_else(held, values[first + block * 2 + half, i], T.float8_e4m3fn(0))
                for i in T.vectorized(16):
                    numbers[i] = T.cast(raw[i], T.float32) * scale
                put(numbers, largest, keys, thread, block * 32 + half * 16)


@T.macro
def take_nvfp4(values, codes, first, held, largest, keys, thread):
    """A record of 16 pieces of pairs of E2M1 and two of E4M3 scales, one for 16 values."""
    pairs, numbers = T.alloc_local((16,), T.uint8), T.alloc_local((16,), T.float32)
    for group in T.serial(4):
        for part in T.unroll(4):
            piece = group * 4 + part
            for i in T.vectorized(16):
                pairs[i] = T.if_then_else(held, codes[first + piece, i], T.uint8(0))
            for half in T.unroll(2):
                place = piece * 2 + half
                code = T.if_then_else(held, values[first + 16 + place // 16, place % 16], T.float8_e4m3fn(0))
                scale = T.cast(code, T.float32)
                for i in T.unroll(8):
                    pair = T.cast(pairs[half * 8 + i], T.uint32)
                    # In the place of a float's lowest exponents, so subnormal codes are right: times 2^126.
                    low = T.reinterpret((pair & 7) << 22 | (pair & 8) << 28, T.float32)
                    high = T.reinterpret((pair & 0x70) << 18 | (pair & 0x80) << 24, T.float32)
                    numbers[2 * i] = low * T.float32(2.0**126) * scale
                    numbers[2 * i + 1] = high * T.float32(2.0**126) * scale
                put(numbers, largest, keys, thread, piece * 32 + half * 16)


TAKE = {"mxfp8": (33, take_mxfp8), "nvfp4": (18, take_nvfp4)}  # pieces of a record, and what decodes it


@T.macro
def take(layout, values, codes, stride, page, slots, ids, count, row, tile, keys, marks):
    """A thread decodes one key, zeros if there is none, and marks it: 0 none, 1 held, 2 not finite."""
    thread = T.get_thread_binding()
    at = tile * KEYS + thread
    slot = ids[row, T.min(at, count - 1)]
    held = (at < count) & (slot >= 0) & (slot < slots)
    pieces, decode = TAKE[layout]
    first = T.alloc_var(T.int64)
    first = T.cast(slot // page, T.int64) * stride + slot % page * pieces
    largest = T.alloc_local((16,), T.int32)
    for i in T.vectorized(16):
        largest[i] = 0
    decode(values, codes, first, held, largest, keys, thread)
    for i in T.unroll(1, 16):
        largest[0] = T.max(largest[0], largest[i])
    marks[thread] = T.if_then_else(largest[0] >= 0x7F800000, 2, T.cast(held, T.int32))


@T.macro
def over_keys(add, numbers, stage, parts):
    """parts[warp, head]: the sum, or the maximum, of a warp's 32 keys; the warp's rows are its own."""
    thread = T.get_thread_binding()
    lane, warp = thread % 32, thread // 32
    for half in T.unroll(2):
        for i, h in T.Parallel(KEYS, HALF):
            stage[i, h ^ i % 32] = numbers[i, half * HALF + h]  # so that neither way banks meet
        T.sync_threads()
        made = T.alloc_var(T.float32)
        made = stage[warp * 32, lane]
        for k in T.serial(1, 32):
            other = stage[warp * 32 + k, lane ^ k]
            made = made + other if add else T.max(made, other)
        parts[warp, half * HALF + lane] = made
        T.sync_threads()


@T.macro
def weight_of_all(held, top, sink, has_sink, head, whole):
    """What the weights of all keys and of the sink come to, relative to the maximum; 0 has no maximum."""
    logit = T.alloc_var(T.float32)
    logit = -T.infinity(T.float32)
    if has_sink > 0:
        logit = sink[head]
    whole[0] = held + T.exp(logit - top)


def attention(near_layout, far_layout):
    """The program of a block: a query, up to 64 heads, a part of the keys. Caches, q and out are in pieces of
    16 bytes, `near` the window and `far` the compressed entries. With several parts to a query it writes sums
    [rows, splits, heads, WIDTH] to ``scratch``, and behind them pairs: maximum, and weight relative to it.
    """
    pieces = [T.dynamic(f"{name}_pieces", T.int64) for name in ("q", "near", "far", "out")]
    steps = [T.dynamic(f"{name}_step", T.int64) for name in ("near", "far", "cos", "sin")]
    sizes = [T.dynamic(f"{name}_ids{end}") for name in ("near", "far") for end in ("", "_count")]
    angles, pairs, sinks, sums = (T.dynamic(name) for name in ("angles", "pairs", "sinks", "sums"))
    partial = T.dynamic("partial", T.int64)

    @T.prim_func
    def sparse_attn(
        rows: T.int32,
        heads: T.int32,
        splits: T.int32,
        scale: T.float32,
        q: T.Tensor((pieces[0], 8), T.bfloat16),
        q_row: T.int64,
        q_head: T.int64,
        near_values: T.Tensor((pieces[1], 16), T.float8_e4m3fn),
        near_codes: T.Tensor((pieces[1], 16), T.uint8),
        near_stride: T.int64,
        near_page: T.int32,
        near_slots: T.int32,
        near_ids: T.StridedTensor((sizes[0], sizes[1]), (steps[0], 1), T.int32),
        near_count: T.int32,
        far_values: T.Tensor((pieces[2], 16), T.float8_e4m3fn),
        far_codes: T.Tensor((pieces[2], 16), T.uint8),
        far_stride: T.int64,
        far_page: T.int32,
        far_slots: T.int32,
        far_ids: T.StridedTensor((sizes[2], sizes[3]), (steps[1], 1), T.int32),
        far_count: T.int32,
        sink: T.Tensor((sinks,), T.float32),
        has_sink: T.int32,
        cos: T.StridedTensor((angles, pairs), (steps[2], 1), T.float32),
        sin: T.StridedTensor((angles, pairs), (steps[3], 1), T.float32),
        turns: T.int32,
        out: T.Tensor((pieces[3], 8), T.bfloat16),
        out_row: T.int64,
        out_head: T.int64,
        lse: T.Tensor((sums,), T.float32),
        has_lse: T.int32,
        scratch: T.Tensor((partial,), T.float32),
    ):
        with T.Kernel(rows * splits, T.ceildiv(heads, HEADS), threads=KEYS) as (item, head_tile):
            queries = T.alloc_shared((HEADS, WIDTH), T.bfloat16)  # in the end the results
            keys = T.alloc_shared((KEYS, WIDTH), T.bfloat16)
            weights = T.alloc_shared((KEYS, HEADS), T.bfloat16)
            stage = T.alloc_shared((KEYS, HALF), T.float32)
            parts = T.alloc_shared((KEYS // 32, HEADS), T.float32)
            marks = T.alloc_shared((KEYS,), T.int32)
            base = T.alloc_shared((HEADS,), T.float32)
            factor = T.alloc_shared((HEADS,), T.float32)
            scores = T.alloc_tmem([KEYS, 2 * HEADS], T.float32)  # behind them what a key weighed so far
            total = T.alloc_tmem([128, SLICES * HEADS], T.float32)
            z = T.alloc_fragment((KEYS, HEADS), T.float32)
            mass = T.alloc_fragment((KEYS, HEADS), T.float32)
            scored = T.alloc_barrier([1])
            added = T.alloc_barrier([1])
            thread = T.get_thread_binding()
            row, split = item // splits, item % splits
            first_head = head_tile * HEADS
            own = T.min(first_head + thread % HEADS, heads - 1)
            top = T.alloc_var(T.float32)  # of head `own`, in the first threads
            top = -T.infinity(T.float32)
            T.clear(mass)
            T.copy(mass, scores[:, HEADS : 2 * HEADS])
            for e in T.serial(HEADS // 2):
                head, piece = 2 * e + thread // 64, thread % 64
                place = row * q_row + T.min(first_head + head, heads - 1) * q_head + piece
                for i in T.vectorized(8):
                    queries[head, piece * 8 + i] = q[place, i]
            near_tiles = T.ceildiv(near_count, KEYS)
            tiles = near_tiles + T.ceildiv(far_count, KEYS)
            begin, end = split * tiles // splits, (split + 1) * tiles // splits
            for tile in T.serial(begin, end):
                if tile < near_tiles:
                    take(
                        near_layout, near_values, near_codes, near_stride, near_page, near_slots, near_ids,
                        near_count, row, tile, keys, marks,
                    )  # fmt: skip
                else:
                    take(
                        far_layout, far_values, far_codes, far_stride, far_page, far_slots, far_ids,
                        far_count, row, tile - near_tiles, keys, marks,
                    )  # fmt: skip
                T.fence_proxy_async()
                T.sync_threads()
                if thread < 32:
                    T.tcgen05_gemm(
                        keys, queries, scores[:, 0:HEADS], transpose_B=True, mbar=scored, clear_accum=True
                    )
                T.mbarrier_wait_parity(scored[0], (tile - begin) & 1)
                T.tcgen05_after_thread_sync()
                T.copy(scores[:, 0:HEADS], z)
                for i, h in T.Parallel(KEYS, HEADS):
                    known = T.if_then_else(marks[i] > 1, T.cast(float("nan"), T.float32), z[i, h] * scale)
                    z[i, h] = T.if_then_else(marks[i] > 0, known, -T.infinity(T.float32))
                over_keys(False, z, stage, parts)
                if thread < HEADS:
                    old = T.alloc_var(T.float32)
                    old = top
                    for warp in T.unroll(KEYS // 32):
                        top = T.max(top, parts[warp, thread])
                    none = top == -T.infinity(T.float32)
                    base[thread] = T.if_then_else(none, T.float32(0), top)
                    factor[thread] = T.if_then_else(none, T.float32(1), T.exp(old - top))
                T.sync_threads()
                for i, h in T.Parallel(KEYS, HEADS):
                    z[i, h] = T.exp(z[i, h] - base[h])
                T.copy(scores[:, HEADS : 2 * HEADS], mass)
                for i, h in T.Parallel(KEYS, HEADS):
                    mass[i, h] = mass[i, h] * factor[h] + z[i, h]
                T.copy(mass, scores[:, HEADS : 2 * HEADS])
                for i, h in T.Parallel(KEYS, HEADS):
                    weights[i, h] = T.cast(z[i, h], T.bfloat16)
                if tile > begin:
                    for j in T.unroll(SLICES):
                        T.copy(total[:, j * HEADS : j * HEADS + HEADS], z)
                        for i, h in T.Parallel(KEYS, HEADS):
                            z[i, h] = z[i, h] * factor[h]
                        T.copy(z, total[:, j * HEADS : j * HEADS + HEADS])
                T.fence_proxy_async()
                T.sync_threads()
                if thread < 32:
                    for j in T.unroll(SLICES):
                        T.tcgen05_gemm(
                            keys[:, j * 128 : j * 128 + 128],
                            weights,
                            total[:, j * HEADS : j * HEADS + HEADS],
                            transpose_A=True,
                            mbar=None,
                            clear_accum=tile == begin,
                        )
                    T.tcgen05_mma_arrive(added)
                T.mbarrier_wait_parity(added[0], (tile - begin) & 1)
                T.tcgen05_after_thread_sync()
            T.copy(scores[:, HEADS : 2 * HEADS], mass)
            over_keys(True, mass, stage, parts)
            part = T.cast(item, T.int64) * heads
            if thread < HEADS:
                held = T.alloc_var(T.float32)
                held = T.float32(0)
                for warp in T.unroll(KEYS // 32):
                    held = held + parts[warp, thread]
                if splits > 1:
                    pair = T.cast(rows, T.int64) * splits * heads * WIDTH + 2 * (part + own)
                    scratch[pair] = top
                    scratch[pair + 1] = held
                else:
                    whole = T.alloc_local((1,), T.float32)
                    largest = T.if_then_else(held == 0, T.float32(0), top)
                    weight_of_all(held, largest, sink, has_sink, own, whole)
                    factor[thread] = T.if_then_else(whole[0] == 0, T.float32(0), 1 / whole[0])
                    if has_lse > 0:
                        lse[row * heads + own] = T.log(held) + largest
            T.sync_threads()
            for j in T.unroll(SLICES):
                if begin < end:
                    T.copy(total[:, j * HEADS : j * HEADS + HEADS], z)
                else:
                    T.clear(z)
                if splits > 1:
                    for i, h in T.Parallel(128, HEADS):
                        at = (part + T.min(first_head + h, heads - 1)) * WIDTH + j * 128 + i
                        scratch[at] = z[i, h]
                else:
                    for i, h in T.Parallel(128, HEADS):
                        queries[h, j * 128 + i] = T.cast(z[i, h] * factor[h], T.bfloat16)
            T.sync_threads()  # nobody reads tensor memory any more: it is given back at the end
            if splits == 1:
                if turns > 0:
                    for e in T.serial(HEADS // 4):
                        head, turn = 4 * e + thread // 32, thread % 32
                        column = WIDTH - 64 + 2 * turn
                        x = T.cast(queries[head, column], T.float32)
                        y = T.cast(queries[head, column + 1], T.float32)
                        c, s = cos[row, turn], sin[row, turn]
                        queries[head, column] = T.cast(x * c + y * s, T.bfloat16)
                        queries[head, column + 1] = T.cast(y * c - x * s, T.bfloat16)
                    T.sync_threads()
                for e in T.serial(HEADS // 2):
                    head, piece = 2 * e + thread // 64, thread % 64
                    place = row * out_row + T.min(first_head + head, heads - 1) * out_head + piece
                    for i in T.vectorized(8):
                        out[place, i] = queries[head, piece * 8 + i]

    return sparse_attn


def combination():
    """The program that adds up the parts of a row's head; a thread has four columns."""
    out_pieces, partial = T.dynamic("out_pieces", T.int64), T.dynamic("partial", T.int64)
    cos_step, sin_step = T.dynamic("cos_step", T.int64), T.dynamic("sin_step", T.int64)
    angles, pairs, sinks, sums = (T.dynamic(name) for name in ("angles", "pairs", "sinks", "sums"))

    @T.prim_func
    def combine(
        rows: T.int32,
        heads: T.int32,
        splits: T.int32,
        sink: T.Tensor((sinks,), T.float32),
        has_sink: T.int32,
        cos: T.StridedTensor((angles, pairs), (cos_step, 1), T.float32),
        sin: T.StridedTensor((angles, pairs), (sin_step, 1), T.float32),
        turns: T.int32,
        out: T.Tensor((out_pieces, 8), T.bfloat16),
        out_row: T.int64,
        out_head: T.int64,
        lse: T.Tensor((sums,), T.float32),
        has_lse: T.int32,
        scratch: T.Tensor((partial,), T.float32),
    ):
        with T.Kernel(rows, heads, threads=128) as (row, head):
            thread = T.get_thread_binding()
            values, whole = T.alloc_local((4,), T.float32), T.alloc_local((1,), T.float32)
            first = T.cast(row, T.int64) * splits * heads + head
            pair = T.cast(rows, T.int64) * splits * heads * WIDTH + 2 * first
            top, held = T.alloc_var(T.float32), T.alloc_var(T.float32)
            top = -T.infinity(T.float32)
            held = T.float32(0)
            for split in T.serial(splits):
                top = T.max(top, scratch[pair + 2 * heads * split])
            top = T.if_then_else(top == -T.infinity(T.float32), T.float32(0), top)
            for i in T.vectorized(4):
                values[i] = 0
            for split in T.serial(splits):
                factor = T.exp(scratch[pair + 2 * heads * split] - top)
                held = held + scratch[pair + 2 * heads * split + 1] * factor
                at = (first + heads * split) * WIDTH + thread * 4
                for i in T.vectorized(4):
                    values[i] = values[i] + scratch[at + i] * factor
            weight_of_all(held, top, sink, has_sink, head, whole)
            share = T.if_then_else(whole[0] == 0, T.float32(0), 1 / whole[0])
            for i in T.vectorized(4):
                values[i] = T.cast(T.cast(values[i] * share, T.bfloat16), T.float32)
            if turns > 0:
                for i in T.unroll(2):
                    turn = thread * 2 + i - (WIDTH - 64) // 2
                    turned = turn >= 0
                    c = T.if_then_else(turned, cos[row, T.max(turn, 0)], T.float32(1))
                    s = T.if_then_else(turned, sin[row, T.max(turn, 0)], T.float32(0))
                    x, y = T.alloc_var(T.float32), T.alloc_var(T.float32)
                    x = values[2 * i]
                    y = values[2 * i + 1]
                    values[2 * i] = x * c + y * s
                    values[2 * i + 1] = y * c - x * s
            place = row * out_row + head * out_head + thread // 2
            for i in T.vectorized(4):
                out[place, thread % 2 * 4 + i] = T.cast(values[i], T.bfloat16)
            if has_lse > 0:  # noqa: SIM102
                if thread < 32:
                    lse[row * heads + head] = T.log(held) + top

    return combine


# Barriers are written out, so that what is emulated is what is compiled; indices are made in range.
AS_WRITTEN = {"TL_DISABLE_THREAD_STORAGE_SYNC": True, "TL_DISABLE_SAFE_MEMORY_ACCESS": True}


@compiled
def _attend(near_layout, far_layout, arch):
    return build(attention(near_layout, far_layout), arch, **AS_WRITTEN)


@compiled
def _combine(arch):
    return build(combination(), arch, **AS_WRITTEN)


def variants(cfg):
    """Window records with compressed entries (also: without any), and the drafter's two sets of rows."""
    yield _attend, ("mxfp8", "nvfp4", "sm_100a")
    yield _attend, ("mxfp8", "mxfp8", "sm_100a")
    yield _combine, ("sm_100a",)


def _pieces(x):
    """Memory as pieces of 16 bytes from where a tensor [n, m, k] begins, and its two steps in pieces."""
    per = 16 // x.element_size()
    steps = [stride if size > 1 else 0 for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True)]
    last = sum((size - 1) * step for size, step in zip(x.shape[:2], steps, strict=True)) + x.shape[2]
    return x.as_strided((last // per, per), (per, 1)), [step // per for step in steps]


def sparse_attn(
    q, window, window_layout, window_ids, compressed, compressed_layout, compressed_ids, sink, cos, sin,
    scale, num_splits, out, lse, scratch,
):  # fmt: skip
    """Launches of ``dsv41.ops.sparse_attn``; `_sm100` in api.py says what it takes."""
    rows, heads, _ = q.shape
    if rows == 0:
        return
    unread = out.as_strided((2, 8), (8, 1)).view(torch.uint8)  # in place of what is not there

    def given(x, kind, dims=1):
        return x if x is not None and x.numel() else unread.view(kind)[(0,) * (2 - dims)]

    sets = []
    for pages, ids in ((window, window_ids), (compressed, compressed_ids)):
        codes, stride, page, slots, count = unread, 0, 1, 0, 0
        if pages is not None and pages.numel():
            (codes, (stride, _)), page = _pieces(pages), pages.shape[1]
            slots, count = pages.shape[0] * page, ids.shape[1]
        ids = given(ids, torch.int32, 2)
        sets += [codes.view(torch.float8_e4m3fn), codes, stride, page, slots, ids, count]
    (queries, q_steps), (results, out_steps) = _pieces(q), _pieces(out)
    end = (
        given(sink, torch.float32), int(sink is not None),
        given(cos, torch.float32, 2), given(sin, torch.float32, 2), int(cos is not None),
        results, *out_steps, given(lse.view(-1), torch.float32), int(lse.numel() > 0),
        (scratch if num_splits > 1 else unread.view(-1)).view(torch.float32),
    )  # fmt: skip
    _attend(window_layout, compressed_layout or "nvfp4", arch_of(q))(
        rows, heads, num_splits, scale, queries, *q_steps, *sets, *end
    )
    if num_splits > 1:
        _combine(arch_of(q))(rows, heads, num_splits, *end)
