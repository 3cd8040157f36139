"""Sampling, chain and coupled verification and bitmasks with Triton, for every GPU.

A row of logits is cut into chunks, a program each: their maxima first, then a race of exponentials in each,
then the winner of all. Noise is a function of the token, so nothing depends on the cut.
"""

import torch
import triton
import triton.language as tl

CHUNK = 4096  # tokens a program
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
def _uniform(word):
    return tl.minimum(
        word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994039535522
    )


@triton.jit
def _log_exponential(word):
    """log of a unit exponential from a 32-bit word: log(-log1p(-u))."""
    u = _uniform(word)
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


@triton.jit(do_not_specialize=["num_rows"])
def _laws(
    logits, stride, bitmask, words, cu, num_rows, vocab, temperatures, tops, sums, keys,
    PER: tl.constexpr, FLAT: tl.constexpr, MASK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of every chunk of every row: the maximum, the first token of it, the sum of exponentials below it.

    Nobody asks for rows that a request does not have, nor for laws of greedy drafts.
    """
    item, chunk = tl.program_id(0), tl.program_id(1)
    row = item.to(tl.int64)
    temperature = tl.load(temperatures + item // PER)
    asked = temperature > 0
    if not FLAT:
        request, k, row = _row_of(item, cu, num_rows, PER)
        asked = k < tl.load(cu + request + 1).to(tl.int32) - tl.load(cu + request).to(tl.int32)
    if asked:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        z = _masked(logits, stride, bitmask, words, row, token, vocab, MASK)
        top = tl.max(z, 0)
        key = tl.max(_order(z) * 4294967296 + (4294967295 - token.to(tl.int64)), 0)
        at = item * tl.num_programs(1) + chunk
        tl.store(tops + at, tl.where(tl.max((z != z).to(tl.int32), 0) != 0, float("nan"), top))
        tl.store(keys + at, key)
        total = 0.0
        if temperature > 0:
            low = tl.where(top > -float("inf"), top, 0.0)
            e = tl.exp(tl.div_rn(z - low, tl.full(z.shape, 1.0, tl.float32) * temperature))
            total = tl.sum(e, 0)
        tl.store(sums + at, total)


@triton.jit
def _law(tops, sums, keys, item, temperature, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """(largest logit, log of the sum of exponentials below it, its first token, whether there is a law)."""
    top, lawful = _lawful(tops, item, temperature, CHUNKS, PADDED)
    chunk = tl.arange(0, PADDED)
    there = chunk < CHUNKS
    high = tl.load(tops + item * CHUNKS + chunk, there, other=-float("inf"))
    positive = tl.where(temperature > 0, temperature, 1.0)
    share = tl.exp((high - top) / positive) * tl.load(sums + item * CHUNKS + chunk, there, other=0.0)
    total = tl.log(tl.sum(tl.where(high > -float("inf"), share, 0.0), 0))
    best = tl.max(tl.load(keys + item * CHUNKS + chunk, there, other=-9223372036854775807), 0)
    return top, tl.where(temperature > 0, total, 0.0), 4294967295 - (best & 4294967295), lawful


@triton.jit
def _log_law(z, token, top, total, first, temperature):
    """Log-probabilities of tokens with logits z: one-hot at ``first`` when greedy."""
    greedy = tl.where(token == first, 0.0, -float("inf"))
    positive = tl.full(z.shape, 1.0, tl.float32) * tl.where(temperature > 0, temperature, 1.0)
    return tl.where(temperature > 0, tl.div_rn(z - top, positive) - total, greedy)


@triton.jit
def _one_logit(logits, stride, bitmask, words, row, token, vocab, MASK: tl.constexpr):
    return tl.sum(_masked(logits, stride, bitmask, words, row, token + tl.arange(0, 1), vocab, MASK), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _accept(
    logits, stride, bitmask, words, cu, num_rows, vocab, drafts, drafts_stride, draft_logits, draft_stride,
    temperatures, draft_temperatures, tops, sums, keys, draft_tops, draft_sums, draft_keys, seeds, uids,
    positions, kept_out, fell_out, sound_out,
    BLOCK: tl.constexpr, DRAWN: tl.constexpr, MASK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    at = request.to(tl.int64)
    begin = tl.load(cu + request).to(tl.int32)
    rows = tl.minimum(tl.maximum(tl.load(cu + request + 1).to(tl.int32) - begin, 0), BLOCK + 1)
    temperature, draft_temperature = tl.load(temperatures + request), tl.load(draft_temperatures + request)
    seed, uid, position = tl.load(seeds + request), tl.load(uids + request), tl.load(positions + request)
    running = rows > 0
    kept, fell, sound = 0, rows < 0, rows < 0
    for k in tl.static_range(BLOCK + 1):
        item = request * (BLOCK + 1) + k
        top, total, first, lawful = _law(tops, sums, keys, item, temperature, CHUNKS, PADDED)
        stays, tested = rows < 0, rows < 0
        if k < BLOCK:
            x = tl.load(drafts + at * drafts_stride + k).to(tl.int64)
            token = tl.minimum(tl.maximum(x, 0), vocab - 1)
            row = tl.minimum(tl.maximum(begin + k, 0), num_rows - 1).to(tl.int64)
            z = _one_logit(logits, stride, bitmask, words, row, token, vocab, MASK)
            one = tl.zeros([1], tl.float32)
            log_p = tl.sum(_log_law(one + z, token, top, total, first, temperature), 0)
            log_q, drawn = 0.0, rows >= 0
            if DRAWN:
                if draft_temperature > 0:
                    other = request * BLOCK + k
                    q_top, q_total, q_first, drawn = _law(
                        draft_tops, draft_sums, draft_keys, other, draft_temperature, CHUNKS, PADDED
                    )
                    z = _one_logit(
                        draft_logits, draft_stride, bitmask, words, other.to(tl.int64), token, vocab, False
                    )
                    log_q = tl.sum(_log_law(one + z, token, q_top, q_total, q_first, draft_temperature), 0)
                elif draft_temperature <= 0:
                    drawn = rows >= 0
                else:
                    drawn = rows < 0  # NaN
            usable = (k < rows - 1) & (x == token) & lawful & drawn & (log_q > -float("inf"))
            w, _, _, _ = _philox(
                tl.zeros([1], tl.uint32), tl.zeros([1], tl.uint32) + position.to(tl.uint32),
                tl.zeros([1], tl.uint32) + uid.to(tl.uint32),
                tl.zeros([1], tl.uint32) + (1 | (k << 8) | (((uid >> 32) & 0xFFFF) << 16)).to(tl.uint32),
                tl.zeros([1], tl.uint32) + seed.to(tl.uint32),
                tl.zeros([1], tl.uint32) + (seed >> 32).to(tl.uint32),
            )  # fmt: skip
            ratio = tl.minimum(log_p - log_q, 0.0)
            passed = tl.sum((tl.log(_uniform(w)) < ratio).to(tl.int32), 0) != 0
            tested = running & usable
            stays = tested & passed
        ends = running & (stays == 0)
        fell = fell | (ends & tested)
        sound = sound | (ends & lawful)
        kept += stays.to(tl.int32)
        running = stays
    tl.store(kept_out + request, kept)
    tl.store(fell_out + request, fell.to(tl.int32))
    tl.store(sound_out + request, sound.to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])
def _residual(
    logits, stride, bitmask, words, cu, num_rows, vocab, drafts, drafts_stride, draft_logits, draft_stride,
    temperatures, draft_temperatures, tops, sums, keys, draft_tops, draft_sums, draft_keys, seeds, uids,
    positions, kept_in, fell_in, sound_in, winners,
    BLOCK: tl.constexpr, DRAWN: tl.constexpr, MASK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """The race for the token behind the drafts that stay: winners of p, and of max(p - q, 0)."""
    request, chunk = tl.program_id(0), tl.program_id(1)
    at = request.to(tl.int64)
    kept, fell = tl.load(kept_in + request), tl.load(fell_in + request)
    place = winners + (at * CHUNKS + chunk) * 2
    none: tl.constexpr = -9223372036854775807
    tl.store(place, none)
    tl.store(place + 1, none)
    temperature = tl.load(temperatures + request)
    sound, hot, item = tl.load(sound_in + request) != 0, temperature > 0, request * (BLOCK + 1) + kept
    if sound & (hot == 0) & (chunk == 0):  # no race
        _, _, first, _ = _law(tops, sums, keys, item, temperature, CHUNKS, PADDED)
        tl.store(place, 4294967295 - first)
    if sound & hot:
        top, total, first, _ = _law(tops, sums, keys, item, temperature, CHUNKS, PADDED)
        row = tl.minimum(tl.maximum(tl.load(cu + request).to(tl.int32) + kept, 0), num_rows - 1).to(tl.int64)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        z = _masked(logits, stride, bitmask, words, row, token, vocab, MASK)
        log_p = _log_law(z, token, top, total, first, temperature)
        position = tl.load(positions + request) + 1 + kept
        noise = _log_exponential(
            _words(
                chunk * CHUNK, tl.load(seeds + request), tl.load(uids + request), position,
                tl.zeros([], tl.int64), 2, CHUNK // 4,
            )
        )  # fmt: skip
        behind = 4294967295 - token.to(tl.int64)
        tl.store(place, tl.max(_order(log_p - noise) * 4294967296 + behind, 0))
        if fell != 0:
            x = tl.load(drafts + at * drafts_stride + kept).to(tl.int64)
            log_q = tl.where(token == x, 0.0, -float("inf"))
            if DRAWN:
                draft_temperature = tl.load(draft_temperatures + request)
                if draft_temperature > 0:
                    other = request * BLOCK + kept
                    q_top, q_total, q_first, _ = _law(
                        draft_tops, draft_sums, draft_keys, other, draft_temperature, CHUNKS, PADDED
                    )
                    z = _masked(
                        draft_logits, draft_stride, bitmask, words, other.to(tl.int64), token, vocab, False
                    )
                    log_q = _log_law(z, token, q_top, q_total, q_first, draft_temperature)
            above = log_q < log_p
            gap = tl.where(above, log_q - log_p, -1.0)
            e = tl.exp(gap)
            # e - 1 over log e, which has the same rounding in it, keeps the digits when q is close to p.
            near = tl.div_rn((1.0 - e) * gap, tl.where((e == 1.0) | (e == 0.0), 1.0, tl.log(e)))
            lost = tl.where(e == 1.0, -gap, tl.where(gap > -0.6931472, near, 1.0 - e))
            score = log_p + tl.log(lost) - noise
            key = _order(score) * 4294967296 + behind
            tl.store(place + 1, tl.max(tl.where(above, key, none), 0))


@triton.jit
def _emit(
    winners, kept_in, fell_in, sound_in, cu, drafts, drafts_stride, tokens, tokens_stride, num_emitted,
    status,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    at = request.to(tl.int64)
    none: tl.constexpr = -9223372036854775807
    chunk = tl.arange(0, PADDED)
    place = winners + (at * CHUNKS + chunk) * 2
    plain = tl.max(tl.load(place, chunk < CHUNKS, other=none), 0)
    rest = tl.max(tl.load(place + 1, chunk < CHUNKS, other=none), 0)
    # With rounding the residual of a draft that fell can be empty though p is not.
    best = tl.where((tl.load(fell_in + request) != 0) & (rest != none), rest, plain)
    kept, sound = tl.load(kept_in + request), tl.load(sound_in + request)
    slot = tl.arange(0, SLOTS)
    text = tl.load(drafts + at * drafts_stride + slot, slot < kept, other=-1).to(tl.int64)
    text = tl.where((slot == kept) & (sound != 0), 4294967295 - (best & 4294967295), text)
    tl.store(tokens + at * tokens_stride + slot, text, slot < BLOCK + 1)
    tl.store(num_emitted + request, kept + sound)
    some = tl.load(cu + request + 1) > tl.load(cu + request)
    tl.store(status + request, (some & (sound == 0)).to(tl.int32))


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
    """Launches of ``dsv41.ops.verify_drafts``, modes ``coupled`` and ``chain``."""
    requests, block = draft_tokens.shape
    if not requests:
        return
    if not target_logits.shape[0]:
        tokens.fill_(-1)
        num_emitted.zero_()
        status.zero_()
        return
    if rule == "chain":
        _chain(
            target_logits, cu_logits, draft_tokens, draft_logits, temperature, draft_temperature, bitmask,
            seeds, uids, positions, tokens, num_emitted, status,
        )  # fmt: skip
        return
    law = (bitmask, temperature, seeds, uids, positions, None, 1, STREAMS["emit"])
    keys, sizes = _draw(target_logits, cu_logits, block + 1, requests * (block + 1), *law)
    _coupled[(requests,)](
        keys, cu_logits, draft_tokens, draft_tokens.stride(0), target_logits.shape[1], tokens,
        tokens.stride(0), num_emitted, status,
        BLOCK=block, SLOTS=triton.next_power_of_2(block + 1), **sizes, num_warps=1,
    )  # fmt: skip


def _chain(
    logits, cu, drafts, draft_logits, temperature, draft_temperature, bitmask, seeds, uids, positions, tokens,
    num_emitted, status,
):  # fmt: skip
    (requests, block), (num_rows, vocab) = drafts.shape, logits.shape
    chunks, sizes = _chunks(vocab)
    drawn, given = draft_logits is not None, bitmask is not None
    mask, words = (bitmask, bitmask.stride(0)) if given else (cu, 0)

    def laws(x, per, flat, at, masked):
        kinds = (torch.float32, torch.float32, torch.int64)
        made = [torch.empty((requests * per, chunks), dtype=kind, device=logits.device) for kind in kinds]
        _laws[(requests * per, chunks)](
            x, x.stride(-2), mask, words, cu, num_rows, vocab, at, *made,
            PER=per, FLAT=flat, MASK=masked, CHUNK=CHUNK, num_warps=8,
        )  # fmt: skip
        return made

    of_target = laws(logits, block + 1, False, temperature, given)
    if drawn:
        draft_logits = draft_logits.flatten(0, 1)
        of_draft = laws(draft_logits, block, True, draft_temperature, False)
    else:
        draft_logits, of_draft = logits, of_target
    kept, fell, sound = torch.empty((3, requests), dtype=torch.int32, device=logits.device)
    winners = torch.empty((requests, chunks, 2), dtype=torch.int64, device=logits.device)
    common = (
        logits, logits.stride(0), mask, words, cu, num_rows, vocab, drafts, drafts.stride(0), draft_logits,
        draft_logits.stride(0), temperature, draft_temperature, *of_target, *of_draft, seeds, uids, positions,
        kept, fell, sound,
    )  # fmt: skip
    flags = {"BLOCK": block, "DRAWN": drawn, "MASK": given, **sizes}
    _accept[(requests,)](*common, **flags, num_warps=1)
    _residual[(requests, chunks)](*common, winners, **flags, CHUNK=CHUNK, num_warps=8)
    _emit[(requests,)](
        winners, kept, fell, sound, cu, drafts, drafts.stride(0), tokens, tokens.stride(0), num_emitted,
        status, BLOCK=block, SLOTS=triton.next_power_of_2(block + 1), **sizes, num_warps=1,
    )  # fmt: skip


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
    laws = {**rows, "temperatures": "*fp32", "sums": "*fp32", "keys": "*i64"}
    for per, flat in ((block + 1, False), (block, True)):
        flags = {"PER": per, "FLAT": flat, "MASK": not flat, "CHUNK": CHUNK}
        yield _laws, (laws, flags, {"num_warps": 8})
    names = {k: v for k, v in rows.items() if k != "tops"}
    names |= {"drafts": "*i64", "drafts_stride": "i64", "draft_logits": "*fp32", "draft_stride": "i64"}
    names |= {"temperatures": "*fp32", "draft_temperatures": "*fp32", "tops": "*fp32", "sums": "*fp32"}
    names |= {"keys": "*i64", "draft_tops": "*fp32", "draft_sums": "*fp32", "draft_keys": "*i64"}
    names |= {"seeds": "*i64", "uids": "*i64", "positions": "*i64"}
    results, flags = ("kept", "fell", "sound"), {"BLOCK": block, "DRAWN": True, "MASK": True, **sizes}
    of_accept = {**names, **{f"{name}_out": "*i32" for name in results}}
    yield _accept, (of_accept, flags, {"num_warps": 1})
    read = {f"{name}_in": "*i32" for name in results}
    yield _residual, ({**names, **read, "winners": "*i64"}, {**flags, "CHUNK": CHUNK}, {"num_warps": 8})
    names = {"winners": "*i64", **read, "cu": "*i32", "drafts": "*i64", "drafts_stride": "i64"}
    names |= {"tokens": "*i64", "tokens_stride": "i64", "num_emitted": "*i32", "status": "*i32"}
    yield _emit, (names, {**slots, **sizes}, {"num_warps": 1})
    names = {"logits": "*fp32", "stride": "i64", "bitmask": "*i32", "words": "i64", "vocab": "i32"}
    yield _forbid, (names, {"CHUNK": CHUNK})
