"""Sampling, coupled verification, the budget's split and bitmasks with Triton, for every GPU.

A row of logits is cut into chunks, a program each: their maxima first, then a race of exponentials in each,
then the winner of all. Noise is a function of the token, so nothing depends on the cut.
"""

import torch
import triton
import triton.language as tl

CHUNK = 4096  # tokens a program
TOKENS = 512  # of the layout a program of the split writes
STREAMS = {"draft": 0, "emit": 2}


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32 with ten rounds: four uint32 words of a uint32 counter and key."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32)), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32)), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _log_exponential(word):
    """log of a unit exponential from a 32-bit word: log(-log1p(-u))."""
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994039535522)
    v = 1.0 - u
    # Dividing by (1 - u) - 1 takes back what that subtraction rounded away.
    minus = tl.where(v == 1.0, u, tl.log(v) * tl.div_rn(u, tl.where(v == 1.0, 1.0, v - 1.0)))
    return tl.log(minus)


@triton.jit
def _words(first, seed, uid, position, column, STREAM: tl.constexpr, GROUPS: tl.constexpr):
    """Random words of tokens ``first`` (a multiple of 4) and the 4 * GROUPS - 1 behind it."""
    zero = tl.zeros([GROUPS], tl.uint32)
    c0 = (first // 4 + tl.arange(0, GROUPS)).to(tl.uint32)
    tag = STREAM | ((column & 0xFF) << 8) | (((uid >> 32) & 0xFFFF) << 16)
    w0, w1, w2, w3 = _philox(
        c0, zero + position.to(tl.uint32), zero + uid.to(tl.uint32), zero + tag.to(tl.uint32),
        zero + seed.to(tl.uint32), zero + (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (4 * GROUPS,))


@triton.jit
def _row_of(item, cu, num_rows, PER: tl.constexpr):
    """(request, number in it, row of the logits) of an item: rows are 1, or up to PER, a request."""
    request, k, row = item, 0, item
    if PER > 1:
        request, k = item // PER, item % PER
        row = tl.minimum(tl.maximum(tl.load(cu + request).to(tl.int32) + k, 0), num_rows - 1)
    return request, k, row.to(tl.int64)


@triton.jit
def _masked(logits, stride, bitmask, words, row, token, vocab, MASK: tl.constexpr):
    """Logits of tokens in f32, -inf past the vocabulary and where the bitmask forbids."""
    there = token < vocab
    z = tl.load(logits + row * stride + token, there, other=0.0).to(tl.float32)
    if MASK:
        word = tl.load(bitmask + row * words + token // 32, there, other=0)
        there = there & (((word >> (token % 32)) & 1) != 0)
    return tl.where(there, z, -float("inf"))


@triton.jit
def _order(z):
    """int64 that orders as the f32."""
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit(do_not_specialize=["num_rows"])
def _tops(
    logits, stride, bitmask, words, cu, num_rows, vocab, tops, PER: tl.constexpr, MASK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    item, chunk = tl.program_id(0), tl.program_id(1)
    _, _, row = _row_of(item, cu, num_rows, PER)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    z = _masked(logits, stride, bitmask, words, row, token, vocab, MASK)
    top = tl.max(z, 0)
    top = tl.where(tl.max((z != z).to(tl.int32), 0) != 0, float("nan"), top)
    tl.store(tops + item * tl.num_programs(1) + chunk, top)


@triton.jit
def _lawful(tops, item, temperature, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """(largest logit, whether the row has a law)."""
    chunk = tl.arange(0, PADDED)
    all_tops = tl.load(tops + item * CHUNKS + chunk, chunk < CHUNKS, other=-float("inf"))
    top = tl.max(all_tops, 0)
    spoiled = tl.max((all_tops != all_tops).to(tl.int32), 0) != 0
    finite = (top > -float("inf")) & (top < float("inf")) & (spoiled == 0)
    return top, finite & (temperature < float("inf"))


@triton.jit(do_not_specialize=["num_rows"])
def _race(
    logits, stride, bitmask, words, cu, num_rows, vocab, tops, temperatures, seeds, uids, positions, columns,
    keys, PER: tl.constexpr, MASK: tl.constexpr, SHIFT: tl.constexpr, STREAM: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    item, chunk = tl.program_id(0), tl.program_id(1)
    request, k, row = _row_of(item, cu, num_rows, PER)
    temperature = tl.load(temperatures + request)
    top, lawful = _lawful(tops, item, temperature, CHUNKS, PADDED)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    z = _masked(logits, stride, bitmask, words, row, token, vocab, MASK)
    if temperature > 0:
        column = 0
        if COLUMNS:
            column = tl.load(columns + request)
        position = tl.load(positions + request) + SHIFT + k
        seed, uid = tl.load(seeds + request), tl.load(uids + request)
        column = tl.zeros([], tl.int64) + column
        words_of = _words(chunk * CHUNK, seed, uid, position, column, STREAM, CHUNK // 4)
        z = tl.div_rn(z - top, tl.full(z.shape, 1.0, tl.float32) * temperature) - _log_exponential(words_of)
    key = _order(z) * 4294967296 + (4294967295 - token.to(tl.int64))
    # An item without a law is told by -2^63 in every chunk: no number has a key that low.
    tl.store(keys + item * CHUNKS + chunk, tl.where(lawful, tl.max(key, 0), -9223372036854775807))


@triton.jit
def _winner(keys, item, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """(token, whether there is one)."""
    chunk = tl.arange(0, PADDED)
    none: tl.constexpr = -9223372036854775807
    best = tl.max(tl.load(keys + item * CHUNKS + chunk, chunk < CHUNKS, other=none), 0)
    return 4294967295 - (best & 4294967295), best != none


@triton.jit
def _pick(keys, out, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    item = tl.program_id(0)
    token, lawful = _winner(keys, item, CHUNKS, PADDED)
    tl.store(out + item, tl.where(lawful, token, -1))


@triton.jit
def _coupled(
    keys, cu, drafts, drafts_stride, vocab, tokens, tokens_stride, num_emitted, status,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    at = request.to(tl.int64)
    rows = tl.load(cu + request + 1).to(tl.int32) - tl.load(cu + request).to(tl.int32)
    rows = tl.minimum(tl.maximum(rows, 0), BLOCK + 1)
    slot = tl.arange(0, SLOTS)
    text = tl.full([SLOTS], -1, tl.int64)
    running = rows > 0
    kept = 0
    sound = rows < 0
    for k in tl.static_range(BLOCK + 1):
        y, lawful = _winner(keys, request * (BLOCK + 1) + k, CHUNKS, PADDED)
        stays = rows < 0
        if k < BLOCK:
            x = tl.load(drafts + at * drafts_stride + k).to(tl.int64)
            stays = running & (k < rows - 1) & lawful & (x == y) & (x >= 0) & (x < vocab)
        # The first row whose draft does not stay emits its own token.
        ends = running & (stays == 0)
        text = tl.where((slot == k) & (stays | (ends & lawful)), y, text)
        sound = sound | (ends & lawful)
        kept += stays.to(tl.int32)
        running = stays
    tl.store(tokens + at * tokens_stride + slot, text, slot < BLOCK + 1)
    tl.store(num_emitted + request, kept + sound.to(tl.int32))
    tl.store(status + request, ((rows > 0) & (sound == 0)).to(tl.int32))


@triton.jit
def _flush(x):
    return tl.where(x < 1.1754943508222875e-38, 0.0, x)


@triton.jit
def _owners(cu, item, rows, STEPS: tl.constexpr):
    """How many rows end at or before each item."""
    low, high = item * 0, item * 0 + rows
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        ended = (tl.load(cu + 1 + middle, low < high, other=0) <= item) & (low < high)
        low = tl.where(ended, middle + 1, low)
        high = tl.where(ended, high, middle)
    return low


@triton.jit(do_not_specialize=["max_tokens", "max_logits"])
def _split(
    confidence, stride, lo, hi, base, bonus, start, weights, budget, num_requests, rotation, lengths, cu_q,
    cu_logits, token_request_ids, positions, logits_ids, stats, max_tokens, max_logits,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIGITS: tl.constexpr,
    STEPS: tl.constexpr, TOKENS: tl.constexpr,
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
    # The wanted-th largest, two bits at a time; three counts of up to 2^20 travel in one sum.
    last = tl.zeros([], tl.int64)
    unit = tl.full([], 1, tl.int64)
    for i in range(DIGITS):
        step = unit << (2 * (DIGITS - 1 - i))
        at_least = (rank >= last + step).to(tl.int64) + ((rank >= last + 2 * step).to(tl.int64) << 20)
        at_least += (rank >= last + 3 * step).to(tl.int64) << 40
        counts = tl.sum(tl.sum(at_least, 1), 0)
        digit = ((counts & 0xFFFFF) >= wanted).to(tl.int64) + ((counts >> 20 & 0xFFFFF) >= wanted).to(
            tl.int64
        )
        last += step * (digit + ((counts >> 40) >= wanted).to(tl.int64))
    taken = candidate & (rank >= last) & (wanted > 0)
    drafts = floor + tl.sum(taken.to(tl.int64), 1)

    own = tl.maximum(tl.load(base + row, there, other=0).to(tl.int64), emits.to(tl.int64))
    tokens = tl.where(live, tl.maximum(own, 0) + drafts, 0)
    ends_q = tl.cumsum(tokens, 0)
    ends_logits = tl.cumsum(emits.to(tl.int64) + drafts, 0)
    tl.store(lengths + row, drafts.to(tl.int32), there)
    tl.store(cu_q + 1 + row, ends_q.to(tl.int32), there)
    tl.store(cu_logits + 1 + row, ends_logits.to(tl.int32), there)
    tl.store(cu_q, 0)
    tl.store(cu_logits, 0)
    program = tl.program_id(0)
    if program == 0:
        admitted = column[None] < drafts[:, None]
        mass = tl.where(admitted, (a * 16777216.0).to(tl.int64), 0)
        tl.store(stats, tl.sum(tokens, 0))
        tl.store(stats + 1, tl.sum(emits.to(tl.int64) + drafts, 0))
        tl.store(stats + 2, tl.sum(drafts, 0))
        tl.store(stats + 3, tl.sum(invalid, 0))
        tl.store(stats + 4, tl.sum(tl.sum(mass, 1), 0))
    tl.debug_barrier()

    token = program * TOKENS + tl.arange(0, TOKENS)
    inside = token < max_tokens
    owner = _owners(cu_q, token, COUNT, STEPS)
    owned = inside & (owner < COUNT)
    first = tl.load(start + owner, owned, other=0).to(tl.int64)
    begin = tl.load(cu_q + owner, owned, other=0)
    tl.store(token_request_ids + token, tl.where(owned, owner, -1), inside)
    tl.store(positions + token, tl.where(owned, first + token - begin, 0), inside)
    inside = token < max_logits
    owner = _owners(cu_logits, token, COUNT, STEPS)
    owned = inside & (owner < COUNT)
    place = tl.load(cu_q + 1 + owner, owned, other=0) - tl.load(cu_logits + 1 + owner, owned, other=0) + token
    tl.store(logits_ids + token, tl.where(owned, place, -1), inside)


@triton.jit
def _forbid(logits, stride, bitmask, words, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    there = token < vocab
    word = tl.load(bitmask + row * words + token // 32, there, other=-1)
    low = tl.full([CHUNK], -float("inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * stride + token, low, there & (((word >> (token % 32)) & 1) == 0))


def _chunks(vocab):
    chunks = triton.cdiv(vocab, CHUNK)
    return chunks, {"CHUNKS": chunks, "PADDED": triton.next_power_of_2(chunks)}


def _draw(logits, cu, per, items, bitmask, temperature, seeds, uids, positions, columns, shift, stream):
    """Keys [items, chunks] int64 of the race in every chunk."""
    num_rows, vocab = logits.shape
    chunks, sizes = _chunks(vocab)
    tops = torch.empty((items, chunks), dtype=torch.float32, device=logits.device)
    keys = torch.empty((items, chunks), dtype=torch.int64, device=logits.device)
    mask, grid = logits if bitmask is None else bitmask, (items, chunks)
    words = 0 if bitmask is None else bitmask.stride(0)
    given = bitmask is not None
    _tops[grid](
        logits, logits.stride(0), mask, words, cu, num_rows, vocab, tops,
        PER=per, MASK=given, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    _race[grid](
        logits, logits.stride(0), mask, words, cu, num_rows, vocab, tops, temperature, seeds, uids, positions,
        seeds if columns is None else columns, keys,
        PER=per, MASK=given, SHIFT=shift, STREAM=stream, COLUMNS=columns is not None, CHUNK=CHUNK, **sizes,
        num_warps=8,
    )  # fmt: skip
    return keys, sizes


def sample_tokens(
    logits, temperature, top_k, top_p, bitmask, seeds, uids, positions, columns, stream, tokens
):  # fmt: skip
    """Launches of ``dsv41.ops.sample_tokens``."""
    items = logits.shape[0]
    if not items:
        return
    law = (bitmask, temperature, seeds, uids, positions, columns, 0, STREAMS[stream])
    keys, sizes = _draw(logits, logits, 1, items, *law)
    _pick[(items,)](keys, tokens, **sizes, num_warps=1)


def verify_drafts(
    target_logits, cu_logits, draft_tokens, draft_logits, temperature, draft_temperature, top_k, top_p,
    bitmask, seeds, uids, positions, rule, tokens, num_emitted, status,
):  # fmt: skip
    """Launches of ``dsv41.ops.verify_drafts``, mode ``coupled``."""
    requests, block = draft_tokens.shape
    if not requests:
        return
    if not target_logits.shape[0]:
        tokens.fill_(-1)
        num_emitted.zero_()
        status.zero_()
        return
    law = (bitmask, temperature, seeds, uids, positions, None, 1, STREAMS["emit"])
    keys, sizes = _draw(target_logits, cu_logits, block + 1, requests * (block + 1), *law)
    _coupled[(requests,)](
        keys, cu_logits, draft_tokens, draft_tokens.stride(0), target_logits.shape[1], tokens,
        tokens.stride(0), num_emitted, status,
        BLOCK=block, SLOTS=triton.next_power_of_2(block + 1), **sizes, num_warps=1,
    )  # fmt: skip


def split_budget_ragged(
    confidence, lo, hi, base, bonus, start, weights, budget, num_requests, rotation, lengths, cu_q, cu_logits,
    token_request_ids, positions, logits_ids, stats,
):  # fmt: skip
    """Launch of ``dsv41.ops.split_budget_ragged``."""
    max_tokens, max_logits = positions.shape[0], logits_ids.shape[0]
    _split[(max(1, triton.cdiv(max(max_tokens, max_logits), TOKENS)),)](
        confidence, confidence.stride(0), lo, hi, base, bonus, start, weights, budget, num_requests, rotation,
        lengths, cu_q, cu_logits, token_request_ids, positions, logits_ids, stats, max_tokens, max_logits,
        **_split_sizes(*confidence.shape), num_warps=8,
    )  # fmt: skip


def _split_sizes(rows, block):
    sizes = {"COUNT": rows, "BLOCK": block, "ROWS": triton.next_power_of_2(rows)}
    sizes |= {"COLUMNS": triton.next_power_of_2(block), "STEPS": rows.bit_length(), "TOKENS": TOKENS}
    return {**sizes, "DIGITS": (31 + (rows * block).bit_length() + 1) // 2}


def apply_token_bitmask(logits, bitmask):
    """Launch of ``dsv41.ops.apply_token_bitmask``."""
    rows, vocab = logits.shape
    if not rows * vocab:
        return
    words = 0 if bitmask.shape[0] == 1 else bitmask.stride(0)
    grid = (rows, triton.cdiv(vocab, CHUNK))
    _forbid[grid](logits, logits.stride(0), bitmask, words, vocab, CHUNK=CHUNK, num_warps=4)


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time."""
    block = cfg.draft.block_size
    sizes = _chunks(cfg.vocab_size)[1]
    rows = {"logits": "*fp32", "stride": "i64", "bitmask": "*i32", "words": "i64", "cu": "*i32"}
    rows |= {"num_rows": "i32", "vocab": "i32", "tops": "*fp32"}
    law = {"temperatures": "*fp32", "seeds": "*i64", "uids": "*i64", "positions": "*i64", "columns": "*i32"}
    for per, stream in ((1, "draft"), (1, "emit"), (block + 1, "emit")):
        flags = {"PER": per, "MASK": True, "CHUNK": CHUNK}
        if stream == "emit":
            yield _tops, (rows, flags, {"num_warps": 8})
        shift = {"SHIFT": int(per > 1), "STREAM": STREAMS[stream], "COLUMNS": per == 1}
        yield _race, ({**rows, **law, "keys": "*i64"}, {**flags, **shift, **sizes}, {"num_warps": 8})
    yield _pick, ({"keys": "*i64", "out": "*i64"}, sizes, {"num_warps": 1})
    names = {"keys": "*i64", "cu": "*i32", "drafts": "*i64", "drafts_stride": "i64", "vocab": "i32"}
    names |= {"tokens": "*i64", "tokens_stride": "i64", "num_emitted": "*i32", "status": "*i32"}
    slots = {"BLOCK": block, "SLOTS": triton.next_power_of_2(block + 1)}
    yield _coupled, (names, {**slots, **sizes}, {"num_warps": 1})
    names = {"confidence": "*fp32", "stride": "i64", "lo": "*i32", "hi": "*i32", "base": "*i32"}
    names |= {"bonus": "*i32", "start": "*i64", "weights": "*fp32", "budget": "*i32", "num_requests": "*i32"}
    names |= {"rotation": "*i32", "lengths": "*i32", "cu_q": "*i32", "cu_logits": "*i32"}
    names |= {"token_request_ids": "*i32", "positions": "*i64", "logits_ids": "*i32", "stats": "*i64"}
    names |= {"max_tokens": "i32", "max_logits": "i32"}
    yield _split, (names, _split_sizes(256, block), {"num_warps": 8})
    names = {"logits": "*fp32", "stride": "i64", "bitmask": "*i32", "words": "i64", "vocab": "i32"}
    yield _forbid, (names, {"CHUNK": CHUNK})
