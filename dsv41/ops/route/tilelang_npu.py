"""The router and the map to physical experts on Ascend."""

import tilelang.ascend.language as T
import torch

from ..._op import compiled
from .._ascend import CORES, THREADS, build, is_nan, smaller


@compiled
def _route(experts, k, images):
    count, stride, ids_stride, weights_stride = (
        T.dynamic(n) for n in ("count", "stride", "ids_stride", "weights_stride")
    )

    @T.prim_func
    def route(
        logits: T.StridedTensor((count, experts), (stride, 1), T.float32),
        bias: T.Tensor((experts,), T.float32),
        image_bias: T.Tensor((experts,), T.float32),
        image: T.Tensor((count if images else experts,), T.uint8 if images else T.float32),
        temperature: T.float32,
        scale: T.float32,
        ids: T.StridedTensor((count, k), (ids_stride, 1), T.int32),
        weights: T.StridedTensor((count, k), (weights_stride, 1), T.float32),
    ):
        with T.Kernel(CORES) as core:
            affinity = T.alloc_shared((experts,), T.float32)
            key = T.alloc_shared((experts,), T.int32)
            chosen = T.alloc_shared((k,), T.float32)
            for step in T.serial(T.ceildiv(count - core, CORES)):
                token = step * CORES + core
                with T.SimtVF(threads=THREADS):
                    for e in T.Parallel(experts):
                        z = logits[token, e] / temperature
                        soft = T.if_then_else(z > T.float32(20), z, T.log1p(T.exp(smaller(z, T.float32(20)))))
                        affinity[e] = T.sqrt(soft)
                        added = T.alloc_var(T.float32)
                        added = bias[e]
                        if images:  # noqa: SIM102
                            if image[token] != 0:
                                added = image_bias[e]
                        # An integer in the order of the score: a negative number's other bits turn.
                        score = T.alloc_var(T.float32)
                        score = affinity[e] + added
                        bits = T.reinterpret(score, T.int32)
                        order = T.if_then_else(bits < 0, bits ^ 0x7FFFFFFF, bits)
                        key[e] = T.if_then_else(is_nan(score), 0x7FFFFFFF, order)  # NaN is the largest
                    for e in T.Parallel(experts):
                        rank = T.alloc_var(T.int32)
                        rank = 0
                        for o in T.serial(experts):
                            before = (key[o] > key[e]) | ((key[o] == key[e]) & (o < e))
                            rank = rank + T.cast(before, T.int32)
                        if rank < k:
                            ids[token, rank] = e
                            chosen[rank] = affinity[e]
                    for i in T.Parallel(k):
                        total = T.alloc_var(T.float32)
                        total = T.float32(0)
                        for j in T.serial(k):
                            total = total + chosen[j]
                        weights[token, i] = chosen[i] / (total + T.float32(1e-20)) * scale

    return build(route)


def mixed(x, shift, factor):
    """A round of the hash in `dsv41_reference.route.mix`, on uint32."""
    return (x ^ (x >> T.uint32(shift))) * T.uint32(factor)


@compiled
def _physical(experts, entries, top_k):
    count, stride, table_stride, out_stride = (
        T.dynamic(n) for n in ("count", "stride", "table_stride", "out_stride")
    )

    @T.prim_func
    def physical(
        expert_ids: T.StridedTensor((count, top_k), (stride, 1), T.int32),
        table: T.StridedTensor((experts, entries), (table_stride, 1), T.int16),
        source: T.uint32,
        step: T.Tensor((1,), T.int64),
        out: T.StridedTensor((count, top_k), (out_stride, 1), T.int32),
    ):
        with T.Kernel(CORES) as core:
            total = count * top_k
            for part in T.serial(T.ceildiv(total - core * THREADS, CORES * THREADS)):
                with T.SimtVF(threads=THREADS):
                    for t in T.Parallel(THREADS):
                        i = (part * CORES + core) * THREADS + t
                        if i < total:
                            expert = T.alloc_var(T.int32)
                            expert = expert_ids[i // top_k, i % top_k]
                            slot = T.alloc_var(T.int32)
                            slot = -1
                            if (expert >= 0) & (expert < experts):
                                earlier = T.alloc_var(T.uint32)
                                earlier = T.uint32(0)
                                for j in T.serial(i):
                                    same = expert_ids[j // top_k, j % top_k] == expert
                                    earlier = earlier + T.cast(same, T.uint32)
                                x = T.alloc_var(T.uint32)
                                x = source * T.uint32(0x9E3779B1)
                                x = x + T.cast(expert, T.uint32) * T.uint32(0x85EBCA77)
                                x = x + T.cast(step[0], T.uint32) * T.uint32(0xC2B2AE3D)
                                x = mixed(x, 16, 0x7FEB352D)
                                x = mixed(x, 15, 0x846CA68B)
                                x = x ^ (x >> T.uint32(16))
                                at = T.cast((earlier + x) & T.uint32(entries - 1), T.int32)
                                slot = T.cast(table[expert, at], T.int32)
                            out[i // top_k, i % top_k] = slot

    return build(physical)


def variants(cfg):
    """The router of the target and of the drafter; the map's sizes come with a placement."""
    for k in sorted({cfg.top_k, cfg.draft.top_k}):
        for images in (False, True):
            yield _route, (cfg.num_experts, k, images)


def topk_route(logits, bias, image_bias, image, temperature, scale, ids, weights):
    """Launch of ``dsv41.ops.topk_route``."""
    if logits.numel():
        images = image is not None
        _route(logits.shape[1], ids.shape[1], images)(
            logits, bias, image_bias if images else bias, image.view(torch.uint8) if images else bias,
            temperature, scale, ids, weights,
        )  # fmt: skip


def physical_experts(expert_ids, table, source, step, out):
    """Launch of ``dsv41.ops.physical_experts``."""
    if expert_ids.numel():
        _physical(*table.shape, expert_ids.shape[1])(expert_ids, table, source, step, out)
