"""The Markov bias and the budget's split with Triton, for every GPU with bf16 tensor cores.

The Markov head is read once. The split is decided by every program, in the same bits: none waits for another.
"""

import triton
import triton.language as tl

PAIRS = 16384  # of rows and places that a program of the split compares
ROWS, COLUMNS = 64, 128  # of logits a program; always the same, so that a row's sums do not see the others


@triton.jit(do_not_specialize=["count"])
def _bias(
    logits, stride, embeds, embeds_stride, weight, weight_stride, count, vocab,
    RANK: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, there = row < count, column < vocab
    at, to = row.to(tl.int64)[:, None], column.to(tl.int64)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, RANK, PART):
        k = first + tl.arange(0, PART)
        inside = (k < RANK)[None]
        e = tl.load(embeds + at * embeds_stride + k[None], live[:, None] & inside, other=0.0)
        w = tl.load(weight + to * weight_stride + k[None], there[:, None] & inside, other=0.0)
        total = tl.dot(e, tl.trans(w), total)
    mask = live[:, None] & there[None]
    place = logits + at * stride + column[None]
    old = tl.load(place, mask, other=0.0)
    tl.store(place, old + total, mask)


@triton.jit
def _flush(x):
    return tl.where(x < 1.1754943508222875e-38, 0.0, x)


@triton.jit
def _owners(ends, item):
    """How many rows end at or before each item: all comparisons at once, a search would wait for loads."""
    return tl.sum((ends[None] <= item[:, None]).to(tl.int32), 1)


@triton.jit
def _at(values, row, owner):
    return tl.sum(tl.where(row[None] == owner[:, None], values[None], 0), 1)


# One build for a number of requests, wherever the tensors lie: `prepare` cannot know their alignment.
_ANYWHERE = [
    *("confidence", "lo", "hi", "base", "bonus", "start", "weights", "budget", "num_requests", "rotation"),
    *("lengths", "cu_q", "cu_logits", "token_request_ids", "positions", "logits_ids", "stats"),
]


@triton.jit(
    do_not_specialize=["stride", "max_tokens", "max_logits"], do_not_specialize_on_alignment=_ANYWHERE
)
def _split(
    confidence, stride, lo, hi, base, bonus, start, weights, budget, num_requests, rotation, lengths, cu_q,
    cu_logits, token_request_ids, positions, logits_ids, stats, max_tokens, max_logits,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    # Every program decides the split, which is little, and writes it, in the same bits; then a part of the
    # layout of its own. So nobody waits for anybody.
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there = row < COUNT
    requests = tl.load(num_requests).to(tl.int64)
    live = there & (row < requests)
    emits = live & (tl.load(bonus + row, there, other=0) != 0)
    cap = tl.load(hi + row, there, other=0).to(tl.int64)
    cap = tl.where(emits, tl.minimum(tl.maximum(cap, 0), BLOCK), 0)
    floor = tl.minimum(tl.maximum(tl.load(lo + row, there, other=0).to(tl.int64), 0), cap)

    product = tl.full([ROWS], 1.0, tl.float32)
    a = tl.zeros([ROWS, COLUMNS], tl.float32)
    invalid = tl.zeros([ROWS], tl.int64)
    for j in tl.static_range(BLOCK):
        c = tl.load(confidence + row.to(tl.int64) * stride + j, there, other=0.0)
        bad = (tl.abs(c) < float("inf")) == 0
        c = tl.minimum(tl.maximum(tl.where(bad, 0.0, c), 0.0), 1.0)
        product = _flush(product * c)
        a = tl.where((column == j)[None], product[:, None], a)
        invalid += (bad & (j < cap)).to(tl.int64)
    w = tl.load(weights + row, there, other=0.0)
    w = tl.where((w > 0) & (w < float("inf")), w, 0.0)
    key = _flush(w[:, None] * a).to(tl.int32, bitcast=True).to(tl.int64)
    cycle = tl.maximum(requests, 1)
    turn = ((row + tl.load(rotation).to(tl.int64)) % cycle + cycle) % cycle
    order = turn[:, None] * BLOCK + column[None]
    slots: tl.constexpr = COUNT * BLOCK
    candidate = (column[None] >= floor[:, None]) & (column[None] < cap[:, None])
    rank = tl.where(candidate, key * slots + (slots - 1 - order), -1)
    wanted = tl.maximum(tl.load(budget).to(tl.int64) - tl.sum(floor, 0), 0)
    wanted = tl.minimum(wanted, tl.sum(tl.sum(candidate.to(tl.int64), 1), 0))
    # The wanted-th largest, bit by bit: a count of 32 bits is one instruction a warp.
    flat = tl.reshape(rank, (ROWS * COLUMNS,), can_reorder=True)
    last = tl.zeros([], tl.int64)
    unit = tl.full([], 1, tl.int64)
    for i in range(BITS):
        larger = last + (unit << (BITS - 1 - i))
        last = tl.where(tl.sum((flat >= larger).to(tl.int32), 0) >= wanted, larger, last)
    taken = candidate & (rank >= last) & (wanted > 0)
    drafts = floor + tl.sum(taken.to(tl.int64), 1)

    own = tl.maximum(tl.load(base + row, there, other=0).to(tl.int64), emits.to(tl.int64))
    tokens = tl.where(live, tl.maximum(own, 0) + drafts, 0)
    tokens = tokens.to(tl.int32)
    ends_q = tl.cumsum(tokens, 0)
    ends_logits = tl.cumsum((emits.to(tl.int64) + drafts).to(tl.int32), 0)
    tl.store(lengths + row, drafts.to(tl.int32), there)
    tl.store(cu_q + 1 + row, ends_q, there)
    tl.store(cu_logits + 1 + row, ends_logits, there)
    tl.store(cu_q, 0)
    tl.store(cu_logits, 0)
    program = tl.program_id(0)
    if program == 0:
        admitted = column[None] < drafts[:, None]
        mass = tl.where(admitted, (a * 16777216.0).to(tl.int64), 0)
        tl.store(stats, tl.sum(tokens.to(tl.int64), 0))
        tl.store(stats + 1, tl.sum(emits.to(tl.int64) + drafts, 0))
        tl.store(stats + 2, tl.sum(drafts, 0))
        tl.store(stats + 3, tl.sum(invalid, 0))
        tl.store(stats + 4, tl.sum(tl.sum(mass, 1), 0))

    token = program * TOKENS + tl.arange(0, TOKENS)
    inside = token < max_tokens
    owner = _owners(ends_q, token)
    owned = inside & (owner < COUNT)
    first = tl.load(start + owner, owned, other=0).to(tl.int64)
    begin = _at(ends_q - tokens, row, owner)
    tl.store(token_request_ids + token, tl.where(owned, owner, -1), inside)
    tl.store(positions + token, tl.where(owned, first + token - begin, 0), inside)
    inside = token < max_logits
    owner = _owners(ends_logits, token)
    owned = inside & (owner < COUNT)
    place = _at(ends_q - ends_logits, row, owner) + token
    tl.store(logits_ids + token, tl.where(owned, place, -1), inside)


def _part(rank):
    return min(64, max(16, triton.next_power_of_2(rank)))


def markov_bias(logits, embeds, weight):
    """Launch of ``dsv41.ops.markov_bias``."""
    count, vocab = logits.shape
    rank = weight.shape[1]
    if not count * vocab * rank:
        return
    _bias[(triton.cdiv(count, ROWS), triton.cdiv(vocab, COLUMNS))](
        logits, logits.stride(0), embeds, embeds.stride(0), weight, weight.stride(0), count, vocab,
        RANK=rank, PART=_part(rank), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8, num_stages=3,
    )  # fmt: skip


def split_budget_ragged(
    confidence, lo, hi, base, bonus, start, weights, budget, num_requests, rotation, lengths, cu_q, cu_logits,
    token_request_ids, positions, logits_ids, stats,
):  # fmt: skip
    """Launch of ``dsv41.ops.split_budget_ragged``."""
    max_tokens, max_logits = positions.shape[0], logits_ids.shape[0]
    sizes = _split_sizes(*confidence.shape)
    _split[(max(1, triton.cdiv(max(max_tokens, max_logits), sizes["TOKENS"])),)](
        confidence, confidence.stride(0), lo, hi, base, bonus, start, weights, budget, num_requests, rotation,
        lengths, cu_q, cu_logits, token_request_ids, positions, logits_ids, stats, max_tokens, max_logits,
        **sizes, num_warps=8,
    )  # fmt: skip


def _split_sizes(rows, block):
    sizes = {"COUNT": rows, "BLOCK": block, "ROWS": triton.next_power_of_2(rows)}
    sizes |= {"COLUMNS": triton.next_power_of_2(block), "TOKENS": max(16, PAIRS // sizes["ROWS"])}
    return {**sizes, "BITS": 31 + (rows * block).bit_length()}


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time."""
    names = {"logits": "*fp32", "stride": "i64", "embeds": "*bf16", "embeds_stride": "i64", "weight": "*bf16"}
    names |= {"weight_stride": "i64", "count": "i32", "vocab": "i32"}
    rank = cfg.draft.markov_rank
    sizes = {"RANK": rank, "PART": _part(rank), "ROWS": ROWS, "COLUMNS": COLUMNS}
    yield _bias, (names, sizes, {"num_warps": 8, "num_stages": 3})
    names = {"confidence": "*fp32", "stride": "i64", "lo": "*i32", "hi": "*i32", "base": "*i32"}
    names |= {"bonus": "*i32", "start": "*i64", "weights": "*fp32", "budget": "*i32", "num_requests": "*i32"}
    names |= {"rotation": "*i32", "lengths": "*i32", "cu_q": "*i32", "cu_logits": "*i32"}
    names |= {"token_request_ids": "*i32", "positions": "*i64", "logits_ids": "*i32", "stats": "*i64"}
    names |= {"max_tokens": "i32", "max_logits": "i32"}
    yield _split, (names, _split_sizes(256, cfg.draft.block_size), {"num_warps": 8})
