"""Expert choice with Triton, for every GPU: a warp a token; for copies of experts a program an expert."""

import torch
import triton
import triton.language as tl

CHUNK = 2048  # pairs that a program of `physical_experts` looks at together


@triton.jit
def _exp(x):
    """e^x to a unit or two of the last place for x <= 88, from the quick base-two exponential."""
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4  # ln 2 in a short part, times n exact, and the rest
    return tl.exp2(r * 1.4426950408889634) * tl.exp2(n)


@triton.jit
def _softplus(x):
    """log(1 + e^x), linear above 20. Dividing by (1 + e) - 1 takes back what the addition rounded away."""
    e = _exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * tl.div_rn(e, tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, tl.where(x == x, small, x))


@triton.jit
def _affinity(x, temperature, UNIT: tl.constexpr):
    if not UNIT:
        x = tl.div_rn(x, tl.full(x.shape, temperature, tl.float32))
    return tl.sqrt_rn(_softplus(x))


@triton.jit
def _route(
    logits, stride, bias, image_bias, image, temperature, scale, ids, ids_stride, weights, weights_stride,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    IMAGES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PADDED)
    there = lane < EXPERTS
    x = tl.load(logits + row * stride + lane, there, other=0.0)
    beta = tl.load(bias + lane, there, other=0.0)
    if IMAGES:
        other = tl.load(image_bias + lane, there, other=0.0)
        beta = tl.where(tl.load(image + row) != 0, other, beta)
    score = _affinity(x, temperature, UNIT) + beta
    # An integer that orders like the scores; NaN comes first, as in a stable sort. Ties go to the lower id:
    # a second reduction, which is cheaper than one of 64 bits.
    bits = tl.where(score == score, score, float("inf")).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    lowest: tl.constexpr = -(2**31)
    key = tl.where(there, tl.where(score == score, tl.maximum(bits, lowest + 1), 0x7FFFFFFF), lowest)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        first = tl.min(tl.where(key == best, lane, PADDED), 0)
        chosen = tl.where(slot == k, first, chosen)
        key = tl.where(lane == first, lowest, key)
    # The weights again from the chosen logits: a few lanes' work instead of a sum an expert.
    share = _affinity(tl.load(logits + row * stride + chosen), temperature, UNIT)
    total = tl.sum(tl.where(slot < TOP_K, share, 0.0), 0)
    share = tl.div_rn(share, tl.full(share.shape, total + 1e-20, tl.float32)) * scale
    tl.store(ids + row * ids_stride + slot, chosen, slot < TOP_K)
    tl.store(weights + row * weights_stride + slot, share, slot < TOP_K)


@triton.jit(do_not_specialize=["count", "source"])
def _physical(
    ids, ids_stride, count, table, table_stride, source, step, out, out_stride,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, ENTRIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    known = expert < EXPERTS  # one program more writes -1 where the id is no expert
    now = tl.load(step).to(tl.uint32)
    first = tl.full([], 0, tl.uint32) + source.to(tl.uint32) * 0x9E3779B1
    x = first + expert.to(tl.uint32) * 0x85EBCA77 + now * 0xC2B2AE3D
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    start = (x & (ENTRIES - 1)).to(tl.int32)
    earlier = 0
    for begin in range(0, count, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        row, column = (pair // TOP_K).to(tl.int64), pair % TOP_K
        e = tl.load(ids + row * ids_stride + column, pair < count, other=-2)
        absent = ((e < 0) | (e >= EXPERTS)) & (pair < count)
        mine = ((e == expert) & known).to(tl.int32)
        nth = earlier + tl.cumsum(mine, 0) - mine
        slot = tl.load(table + expert * table_stride + ((start + nth) & (ENTRIES - 1)), mine != 0, other=-1)
        where = out + row * out_stride + column
        tl.store(where, slot.to(tl.int32), (mine != 0) | (absent & (not known)))
        earlier += tl.sum(mine, 0)


def topk_route(logits, bias, image_bias, image, temperature, scale, ids, weights):
    """Launch of ``dsv41.ops.topk_route``."""
    count, experts = logits.shape
    if not count:
        return
    top_k = ids.shape[1]
    given = image is not None and image_bias is not None
    _route[(count,)](
        logits, logits.stride(0), bias, image_bias if given else bias,
        image.view(torch.uint8) if given else ids, temperature, scale,
        ids, ids.stride(0), weights, weights.stride(0),
        EXPERTS=experts, PADDED=triton.next_power_of_2(experts), TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k), IMAGES=given, UNIT=temperature == 1, num_warps=1,
    )  # fmt: skip


def physical_experts(expert_ids, table, source, step, out):
    """Launch of ``dsv41.ops.physical_experts``."""
    rows, top_k = expert_ids.shape
    if not rows * top_k:
        return
    _physical[(table.shape[0] + 1,)](
        expert_ids, expert_ids.stride(0), rows * top_k, table, table.stride(0), source, step,
        out, out.stride(0),
        TOP_K=top_k, EXPERTS=table.shape[0], ENTRIES=table.shape[1], CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time."""
    for experts, top_k in ((cfg.num_experts, cfg.top_k), (cfg.draft.num_experts, cfg.draft.top_k)):
        names = {"logits": "*fp32", "stride": "i64", "bias": "*fp32", "image_bias": "*fp32", "image": "*u8"}
        names |= {"temperature": "fp32", "scale": "fp32", "ids": "*i32", "ids_stride": "i64"}
        names |= {"weights": "*fp32", "weights_stride": "i64"}
        slots, padded = triton.next_power_of_2(top_k), triton.next_power_of_2(experts)
        constants = {"EXPERTS": experts, "PADDED": padded, "TOP_K": top_k, "SLOTS": slots, "IMAGES": True}
        constants |= {"UNIT": cfg.route_temperature == 1}
        yield _route, (names, constants)
        names = {"ids": "*i32", "ids_stride": "i64", "count": "i32", "table": "*i16"}
        names |= {"table_stride": "i64", "source": "i32"}
        names |= {"step": "*i64", "out": "*i32", "out_stride": "i64"}
        yield _physical, (names, {"TOP_K": top_k, "EXPERTS": experts, "ENTRIES": 64, "CHUNK": CHUNK})
