"""mHC with Triton: four streams, for every GPU with bf16 tensor cores.

The mixing weights are f32 and stay so: a weight is three bf16 numbers of 8 bits, which hold all its 24, and a
stream is bf16 as it is, so each product on the tensor cores is exact and only the sums round, in f32.

One pass over the streams (`_streams`) does all that needs them: expand, write back, products with the mixing
weights, squares, collapse. A second launch (`_finish`) makes coefficients of the products and norms the
collapsed rows. A program of the first owns all streams of some columns, so that expanding needs nobody else.
Columns are added in the same order for every number of tokens: chunks into a group, groups into the total.
"""

import torch
import triton
import triton.language as tl

from .api import CHUNK, ROWS, WIDTH, parts

TOKENS = 4  # tokens that a program of `_finish` makes coefficients of


@triton.jit
def _weighted(x, w, total):
    """total + x @ w.T with the f32 weights w [outputs, columns] in three bf16 parts, the smallest first."""
    high = w.to(tl.bfloat16)
    rest = w - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    total = tl.dot(x, tl.trans(low), total)
    total = tl.dot(x, tl.trans(middle), total)
    return tl.dot(x, tl.trans(high), total)


@triton.jit(do_not_specialize=["count"])
def _streams(
    y, y_stride, x, x_stride, post, comb, pre, fn, out, out_stride, h, partial, count,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    EXPAND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    live = row < count
    at = row.to(tl.int64)
    slot = tl.arange(0, WIDTH)
    # Weights in the order comb, pre, post: the matrix then is the first half of a token's sums.
    output = tl.where(slot < 16, slot + 8, slot - 16)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for i in range(INNER):
        column = (part * INNER + i) * CHUNK + tl.arange(0, CHUNK)
        inside = column < HIDDEN
        mask = live[:, None] & inside[None]
        from_x = x + (at * x_stride)[:, None] + column[None]
        from_fn = fn + output[:, None] * (4 * HIDDEN) + column[None]
        known = (slot < 24)[:, None] & inside[None]
        products = tl.zeros([ROWS, WIDTH], tl.float32)
        size = tl.zeros([ROWS], tl.float32)
        if EXPAND:
            x0 = tl.load(from_x, mask, other=0.0).to(tl.float32)
            x1 = tl.load(from_x + HIDDEN, mask, other=0.0).to(tl.float32)
            x2 = tl.load(from_x + 2 * HIDDEN, mask, other=0.0).to(tl.float32)
            x3 = tl.load(from_x + 3 * HIDDEN, mask, other=0.0).to(tl.float32)
            new = tl.load(y + (at * y_stride)[:, None] + column[None], mask, other=0.0).to(tl.float32)
            collapsed = tl.zeros([ROWS, CHUNK], tl.float32)
        for k in tl.static_range(4):
            if EXPAND:
                c = comb + at * 16 + k
                value = tl.load(c, live, other=0.0)[:, None] * x0
                value += tl.load(c + 4, live, other=0.0)[:, None] * x1
                value += tl.load(c + 8, live, other=0.0)[:, None] * x2
                value += tl.load(c + 12, live, other=0.0)[:, None] * x3
                value += tl.load(post + at * 4 + k, live, other=0.0)[:, None] * new
                stream = value.to(tl.bfloat16)
                tl.store(out + (at * out_stride)[:, None] + k * HIDDEN + column[None], stream, mask)
                wide = stream.to(tl.float32)
                collapsed += tl.load(pre + at * 4 + k, live, other=0.0)[:, None] * wide
            else:
                stream = tl.load(from_x + k * HIDDEN, mask, other=0.0)
                wide = stream.to(tl.float32)
            w = tl.load(from_fn + k * HIDDEN, known, other=0.0)
            products = _weighted(stream, w, products)
            size += tl.sum(wide * wide, 1)
        if EXPAND:
            tl.store(h + (at * HIDDEN)[:, None] + column[None], collapsed.to(tl.bfloat16), mask)
        total += products
        squares += size
    sums = tl.where(slot[None] == 24, squares[:, None], total)
    tl.store(partial + (part * count + at)[:, None] * WIDTH + slot[None], sums, live[:, None])


@triton.jit
def _coefficients(
    partial, base, scale, norm_eps, eps, iters, pre, post, comb, count, block,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr,
    PADDED: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row = block * TOKENS + tl.arange(0, TOKENS)
    live = row < count
    slot = tl.arange(0, WIDTH)
    # All groups side by side, and the parts of each in order; so that the loads do not wait for each other.
    group = tl.arange(0, PADDED)
    mask = live[:, None, None] & (group < GROUPS)[None, :, None]
    groups = tl.zeros([TOKENS, PADDED, WIDTH], tl.float32)
    for i in tl.static_range(INNER):
        at = (group * INNER + i)[None].to(tl.int64) * count + row[:, None]
        groups += tl.load(partial + at[:, :, None] * WIDTH + slot[None, None], mask, other=0.0)
    sums = tl.sum(groups, 1)
    matrix, vectors = tl.split(tl.permute(tl.reshape(sums, (TOKENS, 2, 16)), (0, 2, 1)))
    lane = tl.arange(0, 16)
    square = tl.sum(tl.where(lane[None] == 8, vectors, 0.0), 1) / (4 * HIDDEN) + norm_eps
    one = tl.full([TOKENS], 1.0, tl.float32)
    unit = tl.div_rn(one, tl.sqrt_rn(square))
    part = tl.load(scale + lane // 4, lane < 8, other=0.0)
    bias = tl.load(base + lane, lane < 8, other=0.0)
    z = vectors * unit[:, None] * part[None] + bias[None]
    gate = tl.div_rn(tl.full(z.shape, 1.0, tl.float32), 1.0 + tl.exp(-z))
    at = row.to(tl.int64)[:, None] * 4 + lane[None] % 4
    tl.store(pre + at, gate + eps, live[:, None] & (lane < 4)[None])
    tl.store(post + at, 2.0 * gate, live[:, None] & ((lane >= 4) & (lane < 8))[None])

    z = matrix * unit[:, None] * tl.load(scale + 2) + tl.load(base + 8 + lane)[None]
    c = tl.reshape(z, (TOKENS, 4, 4))
    # A NaN is dropped by the maximum and spoils its row through the sum all the same.
    c = tl.exp(c - tl.max(c, 2)[:, :, None])
    c = _divide(c, tl.sum(c, 2)[:, :, None]) + eps
    c = _divide(c, tl.sum(c, 1)[:, None, :] + eps)
    for _ in range(iters - 1):
        c = _divide(c, tl.sum(c, 2)[:, :, None] + eps)
        c = _divide(c, tl.sum(c, 1)[:, None, :] + eps)
    at = row.to(tl.int64)[:, None] * 16 + lane[None]
    tl.store(comb + at, tl.reshape(c, (TOKENS, 16)), live[:, None])


@triton.jit
def _divide(c, by):
    return c * tl.div_rn(tl.full(by.shape, 1.0, tl.float32), by)


@triton.jit
def _normed(
    h, weight, eps, floor, norm, values, codes, row,
    HIDDEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 32 + tl.arange(0, 32)[None]
    inside = column < HIDDEN
    at = row.to(tl.int64) * HIDDEN
    x = tl.load(h + at + column, inside, other=0.0).to(tl.float32)
    square = tl.sum(tl.sum(x * x, 1), 0) / HIDDEN + eps
    one = tl.full([1], 1.0, tl.float32)
    unit = tl.div_rn(one, tl.sqrt_rn(one * square))
    w = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    rounded = (w * (x * unit[None])).to(tl.bfloat16)
    tl.store(norm + at + column, rounded, inside)
    v = rounded.to(tl.float32)
    amax = tl.maximum(tl.max(tl.where(v == v, tl.abs(v), 0.0), 1), floor)
    bits = amax.to(tl.int32, bitcast=True)
    code = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # the power of two >= amax / 448
    code = tl.minimum(tl.maximum(code, 1), 254)
    tl.store(codes + row.to(tl.int64) * (HIDDEN // 32) + block, code.to(tl.uint8), block < HIDDEN // 32)
    undo = tl.where(code == 254, 0x00400000, (254 - code) << 23).to(tl.float32, bitcast=True)
    q = v * undo[:, None]
    small = tl.minimum(tl.maximum(tl.where(q == q, q, 0.0), -448.0), 448.0).to(tl.float8e4nv)
    byte = tl.where(q == q, small.to(tl.uint8, bitcast=True), 0x7F).to(tl.int32)
    byte = (byte & 0x7F) | (v.to(tl.int32, bitcast=True) >> 24 & 0x80)
    tl.store(values + at + column, byte.to(tl.uint8), inside)


@triton.jit(do_not_specialize=["count", "iters"])
def _finish(
    partial, base, scale, norm_eps, eps, iters, pre, post, comb, count,
    h, weight, floor, norm, values, codes,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr,
    PADDED: tl.constexpr, INNER: tl.constexpr, BLOCKS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    mixing = tl.cdiv(count, TOKENS)
    program = tl.program_id(0)
    if program < mixing:
        _coefficients(
            partial, base, scale, norm_eps, eps, iters, pre, post, comb, count, program,
            HIDDEN, WIDTH, TOKENS, GROUPS, PADDED, INNER,
        )  # fmt: skip
    if NORM:  # noqa: SIM102
        if program >= mixing:
            _normed(h, weight, norm_eps, floor, norm, values, codes, program - mixing, HIDDEN, BLOCKS)


@triton.jit
def _norm(h, weight, eps, floor, norm, values, codes, HIDDEN: tl.constexpr, BLOCKS: tl.constexpr):
    _normed(h, weight, eps, floor, norm, values, codes, tl.program_id(0), HIDDEN, BLOCKS)


@triton.jit
def _collapse(
    x, x_stride, x_stream, pre, pre_stride, out, out_stride, HIDDEN: tl.constexpr, STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(STREAMS):
        value = tl.load(x + row * x_stride + s * x_stream + column, mask, other=0.0).to(tl.float32)
        total += tl.load(pre + row * pre_stride + s) * value
    tl.store(out + row * out_stride + column, total.to(tl.bfloat16), mask)


@triton.jit
def _expand(
    y, y_stride, x, x_stride, x_stream, post, post_stride, comb, comb_stride, comb_row, out, out_stride,
    out_stream, HIDDEN: tl.constexpr, STREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    new = tl.load(y + row * y_stride + column, mask, other=0.0).to(tl.float32)
    for k in tl.static_range(STREAMS):
        total = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(STREAMS):
            value = tl.load(x + row * x_stride + j * x_stream + column, mask, other=0.0).to(tl.float32)
            total += tl.load(comb + row * comb_stride + j * comb_row + k) * value
        total += tl.load(post + row * post_stride + k) * new
        tl.store(out + row * out_stride + k * out_stream + column, total.to(tl.bfloat16), mask)


def _groups(number, inner):
    return {"GROUPS": number // inner, "PADDED": triton.next_power_of_2(number // inner), "INNER": inner}


def _launch_streams(y, x, post, comb, pre, fn, out, h, partial, expand):
    count, _, hidden = x.shape
    number, inner, _ = parts(count, hidden)
    _streams[(triton.cdiv(count, ROWS), number)](
        y, y.stride(0), x, x.stride(0), post, comb, pre, fn, out, out.stride(0), h, partial, count,
        HIDDEN=hidden, ROWS=ROWS, CHUNK=CHUNK, WIDTH=WIDTH, INNER=inner, EXPAND=expand, num_warps=8,
        num_stages=2,
    )  # fmt: skip


def mhc_mixes(x, fn, base, scale, norm_eps, eps, iters, pre, post, comb, scratch):
    """Launches of ``dsv41.ops.mhc_mixes``."""
    count, _, hidden = x.shape
    if not count:
        return
    _launch_streams(x, x, post, comb, pre, fn, x, x, scratch, False)
    number, _, inner = parts(count, hidden)
    _finish[(triton.cdiv(count, TOKENS),)](
        scratch, base, scale, norm_eps, eps, iters, pre, post, comb, count, x, x, 0.0, x, x, x,
        HIDDEN=hidden, WIDTH=WIDTH, TOKENS=TOKENS, **_groups(number, inner), BLOCKS=1, NORM=False,
        num_warps=4,
    )  # fmt: skip


def mhc_boundary(
    y, x, post, comb, pre, fn, base, scale, weight, norm_eps, eps, iters, floor,
    out, next_pre, next_post, next_comb, norm, values, codes, scratch,
):  # fmt: skip
    """Launches of ``dsv41.ops.mhc_boundary``; the collapsed rows wait in ``norm``."""
    count, _, hidden = x.shape
    if not count:
        return
    if not len(next_pre):  # without the mixes
        mhc_expand(y, x, post, comb, out)
        mhc_collapse(out, pre, norm)
        _norm[(count,)](
            norm, weight, norm_eps, floor, norm, values.view(torch.uint8), codes,
            HIDDEN=hidden, BLOCKS=triton.next_power_of_2(hidden // 32), num_warps=4,
        )  # fmt: skip
        return
    _launch_streams(y, x, post, comb, pre, fn, out, norm, scratch, True)
    number, _, inner = parts(count, hidden)
    _finish[(triton.cdiv(count, TOKENS) + count,)](
        scratch, base, scale, norm_eps, eps, iters, next_pre, next_post, next_comb, count,
        norm, weight, floor, norm, values.view(torch.uint8), codes,
        HIDDEN=hidden, WIDTH=WIDTH, TOKENS=TOKENS, **_groups(number, inner),
        BLOCKS=triton.next_power_of_2(hidden // 32), NORM=True, num_warps=4,
    )  # fmt: skip


def _block(hidden):
    return min(1024, triton.next_power_of_2(hidden))


def mhc_collapse(x, pre, out):
    """Launch of ``dsv41.ops.mhc_collapse``."""
    count, streams, hidden = x.shape
    if count * hidden:
        _collapse[(count, triton.cdiv(hidden, _block(hidden)))](
            x, x.stride(0), x.stride(1), pre, pre.stride(0), out, out.stride(0),
            HIDDEN=hidden, STREAMS=streams, BLOCK=_block(hidden), num_warps=4,
        )  # fmt: skip


def mhc_expand(y, x, post, comb, out):
    """Launch of ``dsv41.ops.mhc_expand``."""
    count, streams, hidden = x.shape
    if count * hidden:
        _expand[(count, triton.cdiv(hidden, _block(hidden)))](
            y, y.stride(0), x, x.stride(0), x.stride(1), post, post.stride(0), comb, comb.stride(0),
            comb.stride(1), out, out.stride(0), out.stride(1),
            HIDDEN=hidden, STREAMS=streams, BLOCK=_block(hidden), num_warps=4,
        )  # fmt: skip


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time."""
    hidden, block = cfg.hidden, _block(cfg.hidden)
    for tokens in (64, 4096):
        number, inner, of_group = parts(tokens, hidden)
        for expand in (False, True):
            names = {"y": "*bf16", "y_stride": "i64", "x": "*bf16", "x_stride": "i64", "post": "*fp32"}
            names |= {"comb": "*fp32", "pre": "*fp32", "fn": "*fp32", "out": "*bf16", "out_stride": "i64"}
            names |= {"h": "*bf16", "partial": "*fp32", "count": "i32"}
            sizes = {"HIDDEN": hidden, "ROWS": ROWS, "CHUNK": CHUNK, "WIDTH": WIDTH, "INNER": inner}
            yield _streams, (names, {**sizes, "EXPAND": expand}, {"num_warps": 8, "num_stages": 2})
            names = {"partial": "*fp32", "base": "*fp32", "scale": "*fp32", "norm_eps": "fp32", "eps": "fp32"}
            names |= {"iters": "i32", "pre": "*fp32", "post": "*fp32", "comb": "*fp32", "count": "i32"}
            names |= {"h": "*bf16", "weight": "*bf16", "floor": "fp32", "norm": "*bf16", "values": "*u8"}
            names |= {"codes": "*u8"}
            sizes = {"HIDDEN": hidden, "WIDTH": WIDTH, "TOKENS": TOKENS, **_groups(number, of_group)}
            sizes |= {"BLOCKS": triton.next_power_of_2(hidden // 32), "NORM": expand}
            yield _finish, (names, sizes)
    names = {"h": "*bf16", "weight": "*bf16", "eps": "fp32", "floor": "fp32", "norm": "*bf16"}
    names |= {"values": "*u8", "codes": "*u8"}
    yield _norm, (names, {"HIDDEN": hidden, "BLOCKS": triton.next_power_of_2(hidden // 32)})
    shape = {"HIDDEN": hidden, "STREAMS": cfg.num_streams, "BLOCK": block}
    names = {"x": "*bf16", "x_stride": "i64", "x_stream": "i64", "pre": "*fp32", "pre_stride": "i64"}
    yield _collapse, ({**names, "out": "*bf16", "out_stride": "i64"}, shape)
    names = {"y": "*bf16", "y_stride": "i64", "x": "*bf16", "x_stride": "i64", "x_stream": "i64"}
    names |= {"post": "*fp32", "post_stride": "i64", "comb": "*fp32", "comb_stride": "i64", "comb_row": "i64"}
    yield _expand, ({**names, "out": "*bf16", "out_stride": "i64", "out_stream": "i64"}, shape)
