"""Sparse attention for what the Hopper kernel does not take: any width, every record; simple, not fast."""

import triton
import triton.language as tl

KEYS = 16
LAYOUTS = ("mxfp8", "nvfp4", "mxfp4", "v4", "fp8", "bf16")


@triton.jit
def _two_to(power):
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(byte):
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = tl.where(
        exponent == 0,
        mantissa.to(tl.float32) * 0.001953125,
        (mantissa + 8).to(tl.float32) * _two_to(exponent - 10),
    )
    size = tl.where((byte & 127) == 127, float("nan"), size)
    return tl.where(byte >= 128, -size, size)


@triton.jit
def _e2m1(code):
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = tl.where(
        exponent == 0, mantissa.to(tl.float32) * 0.5, (mantissa + 2).to(tl.float32) * _two_to(exponent - 2)
    )
    return tl.where(code >= 8, -size, size)


@triton.jit
def _e8m0(byte):
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _bf16(at, mask):
    low, high = tl.load(at, mask, 0).to(tl.int32), tl.load(at + 1, mask, 0).to(tl.int32)
    return ((low | high << 8) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _read(page, at, d, mask, page_size, dim: tl.constexpr, layout: tl.constexpr):
    """Values of records [n, 1] ``at`` of ``page`` at columns ``d`` [1, m]."""
    if layout == "mxfp8":
        row = page + at * (dim + dim // 32)
        scale = _e8m0(tl.load(row + dim + d // 32, mask, 127).to(tl.int32))
        return _e4m3(tl.load(row + d, mask, 0).to(tl.int32)) * scale
    elif layout == "nvfp4":
        row = page + at * (dim // 2 + dim // 16)
        scale = _e4m3(tl.load(row + dim // 2 + d // 16, mask, 0).to(tl.int32))
        return _e2m1((tl.load(row + d // 2, mask, 0).to(tl.int32) >> (d % 2 * 4)) & 15) * scale
    elif layout == "mxfp4":
        scale = page + page_size * (dim // 2) + at * (dim // 32) + d // 32
        byte = tl.load(page + at * (dim // 2) + d // 2, mask, 0).to(tl.int32)
        return _e2m1((byte >> (d % 2 * 4)) & 15) * _e8m0(tl.load(scale, mask, 127).to(tl.int32))
    elif layout == "v4":
        plain, row = d < dim - 64, page + at * (dim + 64)
        scale = tl.load(page + page_size * (dim + 64) + at * 8 + d // 64, mask & plain, 127).to(tl.int32)
        value = _e4m3(tl.load(row + d, mask & plain, 0).to(tl.int32)) * _e8m0(scale)
        return tl.where(plain, value, _bf16(row + dim - 64 + (d - (dim - 64)) * 2, mask & (d >= dim - 64)))
    elif layout == "fp8":
        scale = page + page_size * dim + at * 4
        bits = tl.load(scale, at >= 0, 0).to(tl.int32)
        for i in tl.static_range(1, 4):
            bits |= tl.load(scale + i, at >= 0, 0).to(tl.int32) << (8 * i)
        return _e4m3(tl.load(page + at * dim + d, mask, 0).to(tl.int32)) * bits.to(tl.float32, bitcast=True)
    else:
        return _bf16(page + at * (2 * dim) + d * 2, mask)


@triton.jit
def _round_bf16(x):
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x != x, x, near.to(tl.float32, bitcast=True))


@triton.jit
def _scores(
    q, ids, at, count, pages, stride, page_size, slots, scale, d, dim: tl.constexpr, layout: tl.constexpr
):
    """Scores of a block of keys (-inf where there is none), its records, how many values are not finite."""
    slot = tl.load(ids + at, at < count, -1)
    held = (slot >= 0) & (slot < slots)
    slot = tl.where(held, slot, 0)
    page = pages + (slot // page_size).to(tl.int64)[:, None] * stride
    mask = held[:, None] & (d < dim)[None, :]
    kv = _read(page, (slot % page_size).to(tl.int64)[:, None], d[None, :], mask, page_size, dim, layout)
    kv = tl.where(mask, kv, 0.0)
    finite = tl.abs(kv) < float("inf")
    bad = tl.sum(tl.sum(tl.where(finite, 0, 1), 1), 0)
    kv = tl.where(finite, kv, 0.0)
    return tl.where(held, tl.sum(q[None, :] * kv, 1) * scale, float("-inf")), kv, bad


@triton.jit
def _attend(
    q, q_row, q_head, heads, window, window_stride, window_page, window_slots, window_ids, window_ids_row,
    window_count, compressed, compressed_stride, compressed_page, compressed_slots, compressed_ids,
    compressed_ids_row, compressed_count, sink, cos, cos_row, sin, sin_row, pairs, scale, out,
    out_row, out_head, lse,
    dim: tl.constexpr, width: tl.constexpr, window_layout: tl.constexpr, compressed_layout: tl.constexpr,
    has_sink: tl.constexpr, has_angles: tl.constexpr, has_lse: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0) % heads
    d, block = tl.arange(0, width), tl.arange(0, keys)
    x = tl.load(q + row * q_row + head * q_head + d, d < dim, 0.0).to(tl.float32)
    near, far = window_ids + row * window_ids_row, compressed_ids + row * compressed_ids_row
    # The maximum first, so that every weight is rounded as the reference rounds it.
    top, bad = tl.full((), float("-inf"), tl.float32), 0
    for at in range(0, window_count, keys):
        z, _, more = _scores(
            x, near, at + block, window_count, window, window_stride, window_page, window_slots, scale, d,
            dim, window_layout,
        )  # fmt: skip
        top, bad = tl.maximum(top, tl.max(z, 0)), bad + more
    for at in range(0, compressed_count, keys):
        z, _, more = _scores(
            x, far, at + block, compressed_count, compressed, compressed_stride, compressed_page,
            compressed_slots, scale, d, dim, compressed_layout,
        )  # fmt: skip
        top, bad = tl.maximum(top, tl.max(z, 0)), bad + more
    logit = tl.load(sink + head).to(tl.float32) if has_sink else tl.full((), float("-inf"), tl.float32)
    top = tl.maximum(top, tl.where(logit == float("inf"), float("-inf"), logit))
    top = tl.where(top == float("-inf"), 0.0, top)
    total, value = tl.full((), 0.0, tl.float32), tl.zeros((width,), tl.float32)
    for at in range(0, window_count, keys):
        z, kv, _ = _scores(
            x, near, at + block, window_count, window, window_stride, window_page, window_slots, scale, d,
            dim, window_layout,
        )  # fmt: skip
        e = tl.exp(z - top)
        total, value = total + tl.sum(e, 0), value + tl.sum(_round_bf16(e)[:, None] * kv, 0)
    for at in range(0, compressed_count, keys):
        z, kv, _ = _scores(
            x, far, at + block, compressed_count, compressed, compressed_stride, compressed_page,
            compressed_slots, scale, d, dim, compressed_layout,
        )  # fmt: skip
        e = tl.exp(z - top)
        total, value = total + tl.sum(e, 0), value + tl.sum(_round_bf16(e)[:, None] * kv, 0)
    total = tl.where(bad > 0, float("nan"), total)
    denominator = total + tl.exp(logit - top)
    result = tl.where(denominator == 0, 0.0, value / denominator)
    result = _round_bf16(result)
    if has_angles:
        a, b = tl.split(tl.reshape(result, (width // 2, 2)))
        at = tl.arange(0, width // 2) - (dim // 2 - pairs)
        turned = (at >= 0) & (at < pairs)
        c, s = tl.load(cos + row * cos_row + at, turned, 1.0), tl.load(sin + row * sin_row + at, turned, 0.0)
        x, y = a * c + b * s, b * c - a * s
        result = tl.reshape(tl.join(tl.where(turned, x, a), tl.where(turned, y, b)), (width,))
        result = _round_bf16(result)
    tl.store(out + row * out_row + head * out_head + d, result.to(tl.bfloat16), d < dim)
    if has_lse:
        empty = total == 0
        tl.store(
            lse + row * heads + head,
            tl.where(empty, float("-inf"), tl.log(tl.where(empty, 1.0, total)) + top),
        )


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time; Triton builds by itself otherwise."""
    own = ["q_row", "q_head", "out_row", "out_head", "cos_row", "sin_row"]
    sets = [f"{s}_{part}" for s in ("window", "compressed") for part in ("stride", "ids_row")]
    counts = [f"{s}_{part}" for s in ("window", "compressed") for part in ("page", "slots", "count")]
    types = dict.fromkeys((*own, *sets), "i64") | dict.fromkeys((*counts, "heads", "pairs"), "i32")
    types |= {"q": "*bf16", "out": "*bf16", "window": "*u8", "compressed": "*u8", "scale": "fp32"}
    types |= {"window_ids": "*i32", "compressed_ids": "*i32"}
    types |= dict.fromkeys(("sink", "cos", "sin", "lse"), "*fp32")
    flags = {"has_sink": True, "has_angles": True, "has_lse": False, "keys": KEYS}
    widths = {"dim": cfg.head_dim, "width": triton.next_power_of_2(cfg.head_dim)}
    for layout in ("nvfp4", "mxfp8"):  # entries of a layer, and a layer without (its window stands in)
        layouts = {"window_layout": "mxfp8", "compressed_layout": layout}
        yield _attend, (types, {**widths, **layouts, **flags})


def sparse_attn(
    q, window, window_layout, window_ids, compressed, compressed_layout, compressed_ids, sink, cos,
    sin, scale, num_splits, out, lse, scratch,
):  # fmt: skip
    """Launch of ``dsv41.ops.sparse_attn``: a program a row and head; nothing is split."""
    rows, heads, dim = q.shape
    if rows == 0:
        return
    if compressed is None:
        compressed, compressed_layout, compressed_ids = window, window_layout, window_ids[:, :0]
    sets = []
    for pages, ids in ((window, window_ids), (compressed, compressed_ids)):
        sets += [pages, pages.stride(0), max(pages.shape[1], 1), pages.shape[0] * pages.shape[1]]
        sets += [ids, ids.stride(0), ids.shape[1]]
    has_lse, turns = lse.numel() > 0, cos is not None
    angles = (cos, cos.stride(0), sin, sin.stride(0), cos.shape[1]) if turns else (q, 0, q, 0, 0)
    _attend[(rows * heads,)](
        q, q.stride(0), q.stride(1), heads, *sets, q if sink is None else sink, *angles, scale,
        out, out.stride(0), out.stride(1), lse if has_lse else q,
        dim, triton.next_power_of_2(dim), window_layout, compressed_layout, sink is not None, turns,
        has_lse, KEYS,
    )  # fmt: skip
