"""The local parts of an exchange with Triton: a program a rank, a row or a token."""

import torch
import triton
import triton.language as tl

CHUNK = 2048  # pairs that a program of `exchange_plan` looks at together
HEADER_WORDS = 4


@triton.jit(do_not_specialize=["count"])
def _plan(
    slots, count, place, source, counts,
    RANKS: tl.constexpr, PER_RANK: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(0)  # one program more takes the pairs that go nowhere
    nowhere, known = rank == RANKS, rank < RANKS
    begin, total = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    if CAPACITY == 0:
        for at in range(0, count, CHUNK):
            pair = at + tl.arange(0, CHUNK)
            slot = tl.load(slots + pair, pair < count, other=-1)
            begin += tl.sum(((slot >= 0) & (slot < rank * PER_RANK)).to(tl.int32), 0)
    else:
        begin = rank * CAPACITY
    for at in range(0, count, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        slot = tl.load(slots + pair, pair < count, other=-1)
        absent = ((slot < 0) | (slot >= RANKS * PER_RANK)) & (pair < count)
        mine = ((slot >= rank * PER_RANK) & (slot < rank * PER_RANK + PER_RANK) & known).to(tl.int32)
        nth = total + tl.cumsum(mine, 0) - mine
        fits = mine != 0
        if CAPACITY > 0:
            fits = fits & (nth < CAPACITY)
        row = tl.where(fits, begin + nth, -1)
        tl.store(place + pair, row, (mine != 0) | (absent & nowhere))
        tl.store(source + row, pair, fits)
        total += tl.sum(mine, 0)
    if CAPACITY > 0:
        for at in range(0, CAPACITY, CHUNK):
            row = at + tl.arange(0, CHUNK)
            tl.store(source + begin + row, -1, (row >= total) & (row < CAPACITY) & known)
    else:
        for at in range(0, count, CHUNK):  # rows behind the last pair
            row = at + tl.arange(0, CHUNK)
            tl.store(source + row, -1, (row >= begin) & (row < count) & nowhere)
    tl.store(counts + rank, total.to(tl.int64), known)


@triton.jit
def _pack(
    x, x_stride, scale, scale_stride, weights, slots, source, records,
    TOP_K: tl.constexpr, PER_RANK: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr,
    RECORD: tl.constexpr, PADDED: tl.constexpr, PADDED_SCALES: tl.constexpr, HEADER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(source + row)
    used = pair >= 0
    token = tl.where(used, pair // TOP_K, 0).to(tl.int64)
    slot = tl.load(slots + pair, used, other=0)
    weight = tl.load(weights + pair, used, other=0.0)
    out = records + row * RECORD
    tl.store(out, weight.to(tl.int32, bitcast=True))
    tl.store(out + 1, tl.where(used, slot % PER_RANK, -1))
    lane = tl.arange(0, PADDED)
    there = (lane < WORDS) & used
    tl.store(out + HEADER + lane, tl.load(x + token * x_stride + lane, there), there)
    lane = tl.arange(0, PADDED_SCALES)
    there = (lane < SCALES) & used
    tl.store(out + HEADER + WORDS + lane, tl.load(scale + token * scale_stride + lane, there), there)


@triton.jit(do_not_specialize=["pairs"])
def _pack_fixed(
    x, x_stride, scale, scale_stride, weights, slots, pairs, place, lost, records,
    TOP_K: tl.constexpr, RANKS: tl.constexpr, PER_RANK: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr,
    PADDED: tl.constexpr, PADDED_SCALES: tl.constexpr, HEADER: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    earlier = tl.full([], 0, tl.int32)
    if pair < pairs:
        # The row is loaded before its place is known: both loads are on their way together.
        token = (pair // TOP_K).to(tl.int64)
        lane, few = tl.arange(0, PADDED), tl.arange(0, PADDED_SCALES)
        values = tl.load(x + token * x_stride + lane, lane < WORDS)
        scales = tl.load(scale + token * scale_stride + few, few < SCALES)
        weight, slot = tl.load(weights + pair), tl.load(slots + pair)
        first = slot // PER_RANK * PER_RANK
        for at in range(0, pair, CHUNK):
            other = at + tl.arange(0, CHUNK)
            there = tl.load(slots + other, other < pair, other=-1)
            earlier += tl.sum(((there >= first) & (there < first + PER_RANK)).to(tl.int32), 0)
        fits = (slot >= 0) & (slot < RANKS * PER_RANK) & (earlier < CAPACITY)
        row = slot // PER_RANK * CAPACITY + earlier
        tl.store(place + pair, tl.where(fits, row, -1))
        out = records + row.to(tl.int64) * RECORD
        tl.store(out, weight.to(tl.int32, bitcast=True), fits)
        tl.store(out + 1, slot % PER_RANK, fits)
        tl.store(out + HEADER + lane, values, (lane < WORDS) & fits)
        tl.store(out + HEADER + WORDS + few, scales, (few < SCALES) & fits)
    else:  # a rank: rows that stay unused
        rank = pair - pairs
        for at in range(0, pairs, CHUNK):
            other = at + tl.arange(0, CHUNK)
            there = tl.load(slots + other, other < pairs, other=-1)
            earlier += tl.sum(((there >= rank * PER_RANK) & (there < (rank + 1) * PER_RANK)).to(tl.int32), 0)
        past = tl.maximum(earlier - CAPACITY, 0).to(tl.int64)
        tl.store(lost + rank, tl.load(lost + rank) + past)
        for at in range(0, CAPACITY, CHUNK):
            row = at + tl.arange(0, CHUNK)
            out = records + (rank * CAPACITY + row).to(tl.int64) * RECORD
            unused = (row >= earlier) & (row < CAPACITY)
            tl.store(out, 0, unused)
            tl.store(out + 1, -1, unused)


@triton.jit
def _unpack(
    records, values, scale, slots, weights,
    WORDS: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr,
    PADDED: tl.constexpr, PADDED_SCALES: tl.constexpr, HEADER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    record = records + row * RECORD
    tl.store(weights + row, tl.load(record))
    tl.store(slots + row, tl.load(record + 1))
    lane = tl.arange(0, PADDED)
    there = lane < WORDS
    tl.store(values + row * WORDS + lane, tl.load(record + HEADER + lane, there), there)
    lane = tl.arange(0, PADDED_SCALES)
    there = lane < SCALES
    tl.store(scale + row * SCALES + lane, tl.load(record + HEADER + WORDS + lane, there), there)


@triton.jit
def _combine(
    rows, rows_stride, place, shared, shared_stride, out, out_stride,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = lane < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        at = tl.load(place + token * TOP_K + k).to(tl.int64)
        total += tl.load(rows + at * rows_stride + lane, there & (at >= 0), other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * shared_stride + lane, there, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + lane, total.to(tl.bfloat16), there)


def exchange_plan(slots, num_ranks, slots_per_rank, capacity, place, source, counts):
    """Launch of ``dsv41.ops.exchange_plan``."""
    wide = 4 if slots.numel() > CHUNK else 1  # a program looks at all pairs, one chunk after the other
    _plan[(num_ranks + 1,)](
        slots, slots.numel(), place, source, counts, RANKS=num_ranks, PER_RANK=slots_per_rank,
        CAPACITY=capacity, CHUNK=wide * CHUNK, num_warps=wide * 4,
    )  # fmt: skip


def _sizes(hidden):
    words, scales = hidden // 4, hidden // 128
    return {
        "WORDS": words, "SCALES": scales, "PADDED": triton.next_power_of_2(words),
        "PADDED_SCALES": triton.next_power_of_2(scales), "HEADER": HEADER_WORDS,
    }  # fmt: skip


def exchange_pack(x, x_scale, weights, slots, source, slots_per_rank, records):
    """Launch of ``dsv41.ops.exchange_pack``."""
    if not len(source):
        return
    values, scale = x.view(torch.int32), x_scale.view(torch.int32)
    _pack[(len(source),)](
        values, values.stride(0), scale, scale.stride(0), weights, slots, source, records.view(torch.int32),
        TOP_K=slots.shape[1], PER_RANK=slots_per_rank, RECORD=records.shape[1] // 4, **_sizes(x.shape[1]),
        num_warps=4,
    )  # fmt: skip


def exchange_pack_fixed(
    x, x_scale, weights, slots, num_ranks, slots_per_rank, capacity, place, lost, records
):
    """Launch of ``dsv41.ops.exchange_pack_fixed``."""
    values, scale, pairs = x.view(torch.int32), x_scale.view(torch.int32), slots.numel()
    _pack_fixed[(pairs + num_ranks,)](
        values, values.stride(0), scale, scale.stride(0), weights, slots, pairs, place, lost,
        records.view(torch.int32), TOP_K=slots.shape[1], RANKS=num_ranks, PER_RANK=slots_per_rank,
        CAPACITY=capacity, CHUNK=min(CHUNK, max(64, triton.next_power_of_2(pairs))),
        RECORD=records.shape[1] // 4, **_sizes(x.shape[1]), num_warps=4,
    )  # fmt: skip


def exchange_unpack(records, values, scale, slots, weights):
    """Launch of ``dsv41.ops.exchange_unpack``."""
    if not len(records):
        return
    _unpack[(len(records),)](
        records.view(torch.int32), values.view(torch.int32), scale.view(torch.int32), slots,
        weights.view(torch.int32), RECORD=records.shape[1] // 4, **_sizes(values.shape[1]), num_warps=4,
    )  # fmt: skip


def exchange_combine(rows, place, shared, out):
    """Launch of ``dsv41.ops.exchange_combine``."""
    tokens, hidden = out.shape
    if not tokens:
        return
    block = min(1024, triton.next_power_of_2(hidden))
    extra = out if shared is None else shared
    _combine[(tokens, triton.cdiv(hidden, block))](
        rows, rows.stride(0), place, extra, extra.stride(0), out, out.stride(0),
        HIDDEN=hidden, TOP_K=place.shape[1], SHARED=shared is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time."""
    names = {"slots": "*i32", "count": "i32", "place": "*i32", "source": "*i32", "counts": "*i64"}
    for capacity, chunk in ((0, 4 * CHUNK), (128, CHUNK)):
        yield _plan, (names, {"RANKS": 8, "PER_RANK": 49, "CAPACITY": capacity, "CHUNK": chunk})
    sizes = _sizes(cfg.hidden)
    record = (16 + cfg.hidden + cfg.hidden // 32 + 15) // 16 * 4
    names = {"x": "*i32", "x_stride": "i64", "scale": "*i32", "scale_stride": "i64", "weights": "*fp32"}
    names |= {"slots": "*i32", "source": "*i32", "records": "*i32"}
    yield _pack, (names, {"TOP_K": cfg.top_k, "PER_RANK": 49, "RECORD": record, **sizes})
    names = {"x": "*i32", "x_stride": "i64", "scale": "*i32", "scale_stride": "i64", "weights": "*fp32"}
    names |= {"slots": "*i32", "pairs": "i32", "place": "*i32", "lost": "*i64", "records": "*i32"}
    fixed = {"TOP_K": cfg.top_k, "RANKS": 8, "PER_RANK": 49, "CAPACITY": 128, "CHUNK": 512}
    yield _pack_fixed, (names, {**fixed, "RECORD": record, **sizes})
    names = {"records": "*i32", "values": "*i32", "scale": "*i32", "slots": "*i32", "weights": "*i32"}
    yield _unpack, (names, {"RECORD": record, **sizes})
    names = {"rows": "*bf16", "rows_stride": "i64", "place": "*i32", "shared": "*bf16"}
    names |= {"shared_stride": "i64", "out": "*bf16", "out_stride": "i64"}
    for shared in (False, True):
        yield _combine, (names, {"HIDDEN": cfg.hidden, "TOP_K": cfg.top_k, "SHARED": shared, "BLOCK": 1024})
