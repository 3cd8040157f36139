"""Engram with Triton, for every GPU: hash, lookup in device memory or in pinned host memory, gate."""

import torch
import triton
import triton.language as tl

TOKENS = 32  # a program of the hash
LOOKUPS = 8  # table rows a program of the lookup has in flight
SORTED = 16384  # lookups in host memory that are worth sorting
GATED = 8  # tokens a program of the gate: they share the weights of a stream


@triton.jit(do_not_specialize=["count", "requests", "steps", "pad_token", "image_token", "vocab"])
def _hash(
    tokens, positions, cu, lookback, lookback_stride, classes, multipliers, primes, offsets, out, out_stride,
    out_layer, count, requests, steps, vocab, pad_token, image_token,
    LAYERS: tl.constexpr, ORDERS: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr,
    BACK: tl.constexpr, MASK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = row < count
    # The request of a row: how many requests end at or before it.
    low, high = tl.zeros([TOKENS], tl.int32), tl.zeros([TOKENS], tl.int32) + requests
    for _ in range(steps):
        middle = (low + high) // 2
        ended = (tl.load(cu + 1 + middle, low < high, other=0) <= row) & (low < high)
        low = tl.where(ended, middle + 1, low)
        high = tl.where(ended, high, middle)
    request = tl.minimum(low, requests - 1)
    place = row - tl.load(cu + request, live, other=0)
    position = tl.load(positions + row, live, other=0).to(tl.int64)
    used = live & (row < tl.load(cu + requests))
    pad = tl.load(classes + pad_token).to(tl.int64)
    head = tl.arange(0, PADDED)
    for layer in tl.static_range(LAYERS):
        blocked = row < 0
        dead = row < 0
        mixed = tl.zeros([TOKENS], tl.int64)
        for k in tl.static_range(ORDERS):
            exists = used & (position >= k)
            new = place >= k
            token = tl.load(tokens + row - k, exists & new, other=-1).to(tl.int64)
            if BACK:
                old = lookback + request.to(tl.int64) * lookback_stride + place - k + ORDERS - 1
                token = tl.where(new, token, tl.load(old, exists & (place < k), other=-1).to(tl.int64))
            known = exists & (token >= 0) & (token < vocab) & (token != image_token)
            blocked = blocked | (known == 0)
            if k == 0:
                dead = blocked if MASK else exists == 0
            class_id = tl.load(classes + token, known, other=0).to(tl.int64)
            term = tl.where(blocked, pad, class_id) * tl.load(multipliers + layer * ORDERS + k)
            mixed = mixed ^ term
            if k > 0:
                column = (k - 1) * HEADS + head
                at = layer * (ORDERS - 1) * HEADS + column
                there = head < HEADS
                prime = tl.load(primes + at, there, other=1)
                offset = tl.load(offsets + at, there, other=0)
                found = (mixed[:, None] % prime[None] + offset[None]).to(tl.int32)
                found = tl.where(dead[:, None], -1, found)
                to = out + row.to(tl.int64)[:, None] * out_stride + layer * out_layer + column[None]
                tl.store(to, found, live[:, None] & there[None])


@triton.jit(do_not_specialize=["count", "table_rows", "ordered"])
def _lookup(
    rows, rows_stride, order, ordered, values, codes, out, out_stride, count, table_rows,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * LOOKUPS + tl.arange(0, LOOKUPS)
    live = item < count
    if ordered != 0:
        item = tl.load(order + item, live, other=0).to(tl.int32)
    token, column = (item // COLUMNS).to(tl.int64), item % COLUMNS
    row = tl.load(rows + token * rows_stride + column, live, other=-1)
    there = (row >= 0) & (row < table_rows)
    at = row.to(tl.int64)
    block, lane = tl.arange(0, BLOCKS), tl.arange(0, 32)
    inside = block < WIDTH // 32
    known = there[:, None] & inside[None]
    code = tl.load(codes + at[:, None] * (WIDTH // 32) + block[None], known, other=0).to(tl.int32)
    # 2^(code - 127): the smallest is subnormal, 255 is NaN.
    bits = tl.where(code == 255, 0x7FC00000, tl.where(code == 0, 0x00400000, code << 23))
    scale = bits.to(tl.float32, bitcast=True)
    column_in = block[None, :, None] * 32 + lane[None, None, :]
    byte = tl.load(values + at[:, None, None] * WIDTH + column_in, known[:, :, None], other=0)
    value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, :, None]
    value = tl.where(there[:, None, None], value, 0.0).to(tl.bfloat16)
    to = out + (token * out_stride + column * WIDTH)[:, None, None] + column_in
    tl.store(to, value, live[:, None, None] & inside[None, :, None])


@triton.jit
def _row(x, first, LAST: tl.constexpr, SIZE: tl.constexpr):
    """``SIZE`` values of a row from ``first``, zeros from ``LAST``."""
    column = first + tl.arange(0, SIZE)
    return tl.load(x + column, column < LAST, other=0.0)


@triton.jit
def _gated(u):
    """sigmoid(copysign(sqrt(max(|u|, 1e-6)), u)); comparisons let a NaN pass, where a maximum would not."""
    size = tl.abs(u)
    steep = tl.sqrt_rn(tl.where(size < 1e-6, 1e-6, size))
    negative = u.to(tl.int32, bitcast=True) < 0
    one = tl.full([1], 1.0, tl.float32)
    return tl.div_rn(one, 1.0 + tl.exp(tl.where(negative, steep, -steep)))


@triton.jit
def _unit(square, eps, HIDDEN: tl.constexpr):
    one = tl.full([1], 1.0, tl.float32)
    return tl.div_rn(one, tl.sqrt_rn(one * (square / HIDDEN + eps)))


@triton.jit(do_not_specialize=["count"])
def _gate(
    x, x_stride, x_stream, kv, kv_stride, q_weight, q_stride, k_weight, k_stride, dead, eps, root, out,
    out_stride, out_stream, count,
    HIDDEN: tl.constexpr, STREAMS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    GATED: tl.constexpr, DEAD: tl.constexpr,
):  # fmt: skip
    # A row is a power of two and the rest: padding it to one power of two would waste the registers.
    stream = tl.program_id(0)
    q, k = q_weight + stream * q_stride, k_weight + stream * k_stride
    weight = _row(q, 0, HIDDEN, HEAD).to(tl.float32) * _row(k, 0, HIDDEN, HEAD).to(tl.float32)
    weight2 = _row(q, HEAD, HIDDEN, TAIL).to(tl.float32) * _row(k, HEAD, HIDDEN, TAIL).to(tl.float32)
    first = tl.program_id(1) * GATED
    for row in range(first, tl.minimum(first + GATED, count)):
        at = tl.cast(row, tl.int64)
        from_x = x + at * x_stride + stream * x_stream
        from_kv = kv + at * kv_stride
        from_key, from_value = from_kv + stream * HIDDEN, from_kv + STREAMS * HIDDEN
        stored, stored2 = _row(from_x, 0, HIDDEN, HEAD), _row(from_x, HEAD, HIDDEN, TAIL)
        key = _row(from_key, 0, HIDDEN, HEAD).to(tl.float32)
        key2 = _row(from_key, HEAD, HIDDEN, TAIL).to(tl.float32)
        value, value2 = _row(from_value, 0, HIDDEN, HEAD), _row(from_value, HEAD, HIDDEN, TAIL)
        wide, wide2 = stored.to(tl.float32), stored2.to(tl.float32)
        x_unit = _unit(tl.sum(wide * wide, 0) + tl.sum(wide2 * wide2, 0), eps, HIDDEN)
        key_unit = _unit(tl.sum(key * key, 0) + tl.sum(key2 * key2, 0), eps, HIDDEN)
        product = tl.sum(wide * weight * key, 0) + tl.sum(wide2 * weight2 * key2, 0)
        gate = _gated(product * (x_unit * key_unit) / root)
        result = (wide + gate * value.to(tl.float32)).to(tl.bfloat16)
        result2 = (wide2 + gate * value2.to(tl.float32)).to(tl.bfloat16)
        if DEAD:
            closed = tl.load(dead + at) != 0
            result, result2 = tl.where(closed, stored, result), tl.where(closed, stored2, result2)
        to = out + at * out_stride + stream * out_stream
        tl.store(to + tl.arange(0, HEAD), result, tl.arange(0, HEAD) < HIDDEN)
        tl.store(to + HEAD + tl.arange(0, TAIL), result2, HEAD + tl.arange(0, TAIL) < HIDDEN)


def _cut(hidden):
    """A row as a power of two and what covers the rest."""
    head = max(32, 1 << (hidden.bit_length() - 1))
    return {"HEAD": head, "TAIL": max(32, triton.next_power_of_2(hidden - head) if hidden > head else 0)}


def engram_hash(
    tokens, positions, cu_seqlens, lookback, token_classes, multipliers, primes, offsets, pad_token,
    image_token, mask_dead, out,
):  # fmt: skip
    """Launch of ``dsv41.ops.engram_hash``."""
    count, layers, columns = out.shape
    requests, orders = cu_seqlens.shape[0] - 1, multipliers.shape[1]
    if not count * layers * columns:
        return
    if not requests:
        out.fill_(-1)
        return
    heads = columns // (orders - 1)
    _hash[(triton.cdiv(count, TOKENS),)](
        tokens, positions, cu_seqlens, tokens if lookback is None else lookback,
        0 if lookback is None else lookback.stride(0), token_classes, multipliers, primes, offsets,
        out, out.stride(0), out.stride(1), count, requests, requests.bit_length(), token_classes.shape[0],
        pad_token, image_token,
        LAYERS=layers, ORDERS=orders, HEADS=heads, PADDED=triton.next_power_of_2(heads),
        BACK=lookback is not None, MASK=mask_dead, TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip


def engram_lookup(rows, values, scale, out):
    """Launch of ``dsv41.ops.engram_lookup``. ``values`` and ``scale`` may be pinned host memory."""
    count, columns = rows.shape
    width = values.shape[1]
    if not count * columns * width:
        return
    items, blocks = count * columns, triton.next_power_of_2(width // 32)
    # Many rows of host memory are read in the order of their addresses: at random, each waits for the
    # translation of its address, which neighbours share.
    ordered = values.device != rows.device and items >= SORTED
    order = rows.flatten().sort().indices if ordered else rows.new_empty(0, dtype=torch.int64)
    _lookup[(triton.cdiv(items, LOOKUPS),)](
        rows, rows.stride(0), order, int(ordered), values.view(torch.uint8), scale, out, out.stride(0), items,
        values.shape[0],
        COLUMNS=columns, WIDTH=width, BLOCKS=blocks, LOOKUPS=LOOKUPS, num_warps=4,
    )  # fmt: skip


def engram_gate(x, kv, q_weight, k_weight, dead, eps, out):
    """Launch of ``dsv41.ops.engram_gate``."""
    count, streams, hidden = x.shape
    if not count * streams * hidden:
        return
    gated = GATED if count >= 1024 else 1
    _gate[(streams, triton.cdiv(count, gated))](
        x, x.stride(0), x.stride(1), kv, kv.stride(0), q_weight, q_weight.stride(0), k_weight,
        k_weight.stride(0), x if dead is None else dead.view(torch.uint8), eps, hidden**0.5,
        out, out.stride(0), out.stride(1), count,
        HIDDEN=hidden, STREAMS=streams, **_cut(hidden), GATED=gated, DEAD=dead is not None, num_warps=8,
    )  # fmt: skip


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time."""
    engram = cfg.engram
    names = {"tokens": "*i64", "positions": "*i32", "cu": "*i32", "lookback": "*i32"}
    names |= {"lookback_stride": "i64", "classes": "*i32", "multipliers": "*i64", "primes": "*i64"}
    names |= {"offsets": "*i64", "out": "*i32", "out_stride": "i64", "out_layer": "i64", "count": "i32"}
    names |= {"requests": "i32", "steps": "i32", "vocab": "i32", "pad_token": "i32", "image_token": "i32"}
    sizes = {"LAYERS": len(engram.layers), "ORDERS": engram.max_ngram, "HEADS": engram.num_heads}
    sizes |= {"PADDED": triton.next_power_of_2(engram.num_heads), "BACK": True, "MASK": True}
    sizes |= {"TOKENS": TOKENS}
    yield _hash, (names, sizes)
    names = {"rows": "*i32", "rows_stride": "i64", "order": "*i64", "ordered": "i32", "values": "*u8"}
    names |= {"codes": "*u8", "out": "*bf16", "out_stride": "i64", "count": "i32", "table_rows": "i64"}
    sizes = {"COLUMNS": engram.columns, "WIDTH": engram.head_dim, "LOOKUPS": LOOKUPS}
    yield _lookup, (names, {**sizes, "BLOCKS": triton.next_power_of_2(engram.head_dim // 32)})
    names = {"x": "*bf16", "x_stride": "i64", "x_stream": "i64", "kv": "*bf16", "kv_stride": "i64"}
    names |= {"q_weight": "*bf16", "q_stride": "i64", "k_weight": "*bf16", "k_stride": "i64", "dead": "*u8"}
    names |= {"eps": "fp32", "root": "fp32", "out": "*bf16", "out_stride": "i64", "out_stream": "i64"}
    sizes = {"HIDDEN": cfg.hidden, "STREAMS": cfg.num_streams, **_cut(cfg.hidden)}
    for gated in (1, GATED):
        yield _gate, ({**names, "count": "i32"}, {**sizes, "GATED": gated, "DEAD": True}, {"num_warps": 8})
