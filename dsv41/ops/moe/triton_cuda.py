"""MXFP4 experts with Triton: any sizes that are multiples of 32, weights as the checkpoint stores them.

The portable path, for models that the Hopper kernel does not take (`.tiny()`) and other GPUs: weights are
decoded in every product again, both operands to bf16, which is exact. One tile of tokens for every call, so
that a row's bits do not depend on the other rows.
"""

import torch
import triton
import triton.language as tl

from ..._op import split_scratch
from .._triton import block_amax, power, scale_code, undo_scale
from .api import scratch_parts

ROWS, COLUMNS = 64, 64  # a tile of a product
CHUNK = 1024  # assignments that are counted at a time
FLOOR = tl.constexpr(1e-4)  # of `quantize_mxfp8`


@triton.jit
def _group(ids, assignments, experts, begins, order, CHUNK: tl.constexpr):
    """First position of each expert and, a position, its assignment (token * top_k + column), in order."""
    e = tl.program_id(0)
    below, mine = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32)
    for start in range(0, assignments, CHUNK):
        at = start + tl.arange(0, CHUNK)
        id = tl.load(ids + at, at < assignments, other=-1)
        below += ((id >= 0) & (id < e)).to(tl.int32)
        mine += (id == e).to(tl.int32)
    position = tl.sum(below, 0)
    tl.store(begins + e, position)
    tl.store(begins + experts, position + tl.sum(mine, 0), e == experts - 1)
    for start in range(0, assignments, CHUNK):
        at = start + tl.arange(0, CHUNK)
        here = (tl.load(ids + at, at < assignments, other=-1) == e).to(tl.int32)
        tl.store(order + position + tl.cumsum(here, 0) - here, at, here != 0)
        position += tl.sum(here, 0)


@triton.jit
def _weights(w, scale, row, live, k, K: tl.constexpr):
    """Rows of E2M1 codes from element k on, 32 of each, with their scale, as bf16."""
    at = w + (row * (K // 2))[:, None] + (k // 2 + tl.arange(0, 16))[None]
    byte = tl.load(at, live[:, None], other=0).to(tl.int32)
    code = tl.reshape(tl.join(byte & 15, byte >> 4), (row.shape[0], 32))
    size = code & 7
    value = tl.where(size < 2, 0.5 * size, ((size + 252) << 22).to(tl.float32, bitcast=True))
    by = power(tl.load(scale + row * (K // 32) + k // 32, live, other=127).to(tl.int32))
    return (tl.where(code < 8, value, -value) * by[:, None]).to(tl.bfloat16)


@triton.jit
def _gate_up(
    x, x_stride, x_scale, scale_stride, order, begins, weights, w, w_scale, out, top_k, limit,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first product of an expert's tokens, SwiGLU, and its MXFP8 values as bf16, by position."""
    e, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, w_row = column < INTER, tl.program_id(0).to(tl.int64) * 2 * INTER + column
    end, lane = tl.load(begins + e + 1), tl.arange(0, ROWS)
    for start in range(tl.load(begins + e) + tl.program_id(2) * ROWS, end, tl.num_programs(2) * ROWS):
        used = start + lane < end
        assignment = tl.load(order + start + lane, used, other=0)
        token = (assignment // top_k).to(tl.int64)
        gate, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, HIDDEN, 32):
            at = x + (token * x_stride)[:, None] + (k + tl.arange(0, 32))[None]
            a = tl.load(at, used[:, None], other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            by = power(tl.load(x_scale + token * scale_stride + k // 32, used, other=127).to(tl.int32))
            a = (a * by[:, None]).to(tl.bfloat16)
            gate = tl.dot(a, tl.trans(_weights(w, w_scale, w_row, live, k, HIDDEN)), gate)
            up = tl.dot(a, tl.trans(_weights(w, w_scale, w_row + INTER, live, k, HIDDEN)), up)
        g, u = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
        g = tl.where(g > limit, limit, g)  # comparisons let a NaN pass
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        y = tl.div_rn(g, 1.0 + tl.exp(-g)) * u * tl.load(weights + assignment, used, other=0.0)[:, None]
        blocks = tl.reshape(y.to(tl.bfloat16).to(tl.float32), (ROWS * (COLUMNS // 32), 32))
        code = scale_code(block_amax(blocks, FLOOR), 8, 0x600000)
        e4m3 = (blocks * undo_scale(code)[:, None]).to(tl.float8e4nv)
        y = tl.reshape(e4m3.to(tl.float32) * power(code)[:, None], (ROWS, COLUMNS))
        to = out + ((start + lane).to(tl.int64) * INTER)[:, None] + column[None]
        tl.store(to, y.to(tl.bfloat16), used[:, None] & live[None])


@triton.jit
def _down(
    y, order, begins, w, w_scale, out,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The second product, by assignment."""
    e, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, w_row = column < HIDDEN, tl.program_id(0).to(tl.int64) * HIDDEN + column
    end, lane = tl.load(begins + e + 1), tl.arange(0, ROWS)
    for start in range(tl.load(begins + e) + tl.program_id(2) * ROWS, end, tl.num_programs(2) * ROWS):
        used = start + lane < end
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, INTER, 32):
            at = y + ((start + lane).to(tl.int64) * INTER)[:, None] + (k + tl.arange(0, 32))[None]
            a = tl.load(at, used[:, None], other=0.0)
            total = tl.dot(a, tl.trans(_weights(w, w_scale, w_row, live, k, INTER)), total)
        assignment = tl.load(order + start + lane, used, other=0).to(tl.int64)
        to = out + (assignment * HIDDEN)[:, None] + column[None]
        tl.store(to, total.to(tl.bfloat16), used[:, None] & live[None])


@triton.jit
def _combine(ids, parts, shared, out, top_k, experts, hidden, SHARED: tl.constexpr, COLUMNS: tl.constexpr):
    """A token's experts in top-k order, and the shared one."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, total = column < hidden, tl.zeros((COLUMNS,), tl.float32)
    for k in range(top_k):
        id = tl.load(ids + token * top_k + k)
        part = parts + (token * top_k + k) * hidden + column
        total += tl.load(part, live & (id >= 0) & (id < experts), other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * hidden + column, live, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(tl.bfloat16), live)


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time; Triton builds by itself otherwise."""
    sizes = {"HIDDEN": cfg.hidden, "INTER": cfg.inter, "ROWS": ROWS, "COLUMNS": COLUMNS}
    grouped = {"ids": "*i32", "assignments": "i32", "experts": "i32", "begins": "*i32", "order": "*i32"}
    yield _group, (grouped, {"CHUNK": CHUNK})
    first = {
        "x": "*u8", "x_stride": "i64", "x_scale": "*u8", "scale_stride": "i64", "order": "*i32",
        "begins": "*i32", "weights": "*fp32", "w": "*u8", "w_scale": "*u8", "out": "*bf16", "top_k": "i32",
        "limit": "fp32",
    }  # fmt: skip
    yield _gate_up, (first, sizes)
    second = {"y": "*bf16", "order": "*i32", "begins": "*i32", "w": "*u8", "w_scale": "*u8", "out": "*bf16"}
    yield _down, (second, sizes)
    sums = {
        "ids": "*i32", "parts": "*bf16", "shared": "*bf16", "out": "*bf16", "top_k": "i32", "experts": "i32",
        "hidden": "i32",
    }  # fmt: skip
    yield _combine, (sums, {"SHARED": True, "COLUMNS": CHUNK})


def mxfp4_moe(
    x, x_scale, expert_ids, expert_weights, w13, w13_scale, w2, w2_scale, layout, limit, shared, out, scratch
):
    """Launches for ``dsv41.ops.mxfp4_moe``."""
    (tokens, top_k), experts = expert_ids.shape, w13.shape[0]
    if tokens == 0:
        return
    hidden, inter = out.shape[1], w13.shape[1] // 2
    parts = scratch_parts(tokens, top_k, experts, hidden, inter)
    begins, order, *_, inner, _, assigned = split_scratch(scratch, parts)
    sizes = {"HIDDEN": hidden, "INTER": inter, "ROWS": ROWS, "COLUMNS": COLUMNS}
    tiles = min(triton.cdiv(tokens, ROWS), 16)  # of an expert's tokens at a time
    x = x.view(torch.uint8)
    _group[(experts,)](expert_ids, tokens * top_k, experts, begins, order, CHUNK=CHUNK)
    _gate_up[(experts, triton.cdiv(inter, COLUMNS), tiles)](
        x, x.stride(0), x_scale, x_scale.stride(0), order, begins, expert_weights, w13, w13_scale, inner,
        top_k, limit, **sizes,
    )  # fmt: skip
    _down[(experts, triton.cdiv(hidden, COLUMNS), tiles)](
        inner, order, begins, w2, w2_scale, assigned, **sizes
    )
    extra = out if shared is None else shared
    _combine[(tokens, triton.cdiv(hidden, CHUNK))](
        expert_ids, assigned, extra, out, top_k, experts, hidden, SHARED=shared is not None, COLUMNS=CHUNK
    )
