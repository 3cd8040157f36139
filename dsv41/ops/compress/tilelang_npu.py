"""The compressor and the writers of every cache on Ascend."""

import tilelang.ascend.language as T
from dsv41_reference.cache import record_bytes

from ..._op import compiled
from .._ascend import (
    CORES,
    THREADS,
    build,
    e2m1,
    e4m3,
    e4m3_value,
    even_threads,
    larger,
    magnitude,
    ue8m0,
    undo,
)

FLOORS = {"mxfp8": 1e-4, "v4": 1e-4, "fp8": 1e-4, "mxfp4": 6 * 2.0**-126, "nvfp4": 6 * 2.0**-9}
PAGE = 64  # entries of a page that `variants` names; any other is compiled when it is met
V4_ROPE = 64  # values that a v4 record keeps as bf16


@compiled
def _write(layout, dim, normed, round_rope, pairs, page_size):
    count, x_stride, cos_stride, sin_stride, num_pages, page_stride = (
        T.dynamic(n) for n in ("count", "x_stride", "cos_stride", "sin_stride", "num_pages", "page_stride")
    )
    num_values, num_scales, split = record_bytes(layout, dim)
    page_bytes = page_size * (num_values + num_scales)
    block = {"nvfp4": 16, "v4": 64, "fp8": dim, "bf16": dim}.get(layout, 32)
    blocks = (dim - V4_ROPE if layout == "v4" else dim) // block
    shift, mantissa = (2, 0x400000) if layout == "mxfp4" else (8, 0x600000)
    rotated = dim - 2 * pairs
    floor = FLOORS.get(layout, 0.0)

    @T.prim_func
    def write_records(
        x: T.StridedTensor((count, dim), (x_stride, 1), T.bfloat16),
        norm_weight: T.Tensor((dim,), T.bfloat16),
        eps: T.float32,
        cos: T.StridedTensor((count, pairs), (cos_stride, 1), T.float32),
        sin: T.StridedTensor((count, pairs), (sin_stride, 1), T.float32),
        slots: T.Tensor((count,), T.int32),
        pages: T.StridedTensor((num_pages, page_bytes), (page_stride, 1), T.uint8),
    ):
        with T.Kernel(CORES) as core:
            row = T.alloc_shared((dim,), T.float32)
            values = T.alloc_shared((num_values,), T.uint8)
            scales = T.alloc_shared((max(num_scales, 32),), T.uint8)
            for step in T.serial(T.ceildiv(count - core, CORES)):
                token = step * CORES + core
                slot = slots[token]
                if (slot >= 0) & (slot < num_pages * page_size):
                    with T.SimtVF(threads=even_threads(dim)):
                        unit = T.alloc_fragment((1,), T.float32)
                        if normed:
                            square = T.alloc_fragment((dim,), T.float32)
                            for i in T.Parallel(dim):
                                square[i] = T.cast(x[token, i], T.float32) * T.cast(x[token, i], T.float32)
                            T.reduce_sum(square, unit, dim=0)
                        for i in T.Parallel(dim):
                            value = T.alloc_var(T.float32)
                            value = T.cast(x[token, i], T.float32)
                            if normed:
                                value = value * (T.float32(1) / T.sqrt(unit[0] / T.float32(dim) + eps))
                                value = T.cast(norm_weight[i], T.float32) * value
                                value = T.cast(T.cast(value, T.bfloat16), T.float32)
                            row[i] = value
                        for p in T.Parallel(pairs):
                            a = T.alloc_var(T.float32)
                            b = T.alloc_var(T.float32)
                            a = row[rotated + 2 * p]
                            b = row[rotated + 2 * p + 1]
                            turned = T.alloc_var(T.float32)
                            turned2 = T.alloc_var(T.float32)
                            turned = a * cos[token, p] - b * sin[token, p]
                            turned2 = b * cos[token, p] + a * sin[token, p]
                            if round_rope:
                                turned = T.cast(T.cast(turned, T.bfloat16), T.float32)
                                turned2 = T.cast(T.cast(turned2, T.bfloat16), T.float32)
                            row[rotated + 2 * p] = turned
                            row[rotated + 2 * p + 1] = turned2
                        if layout == "bf16":
                            for i in T.Parallel(dim):
                                bits = T.reinterpret(T.cast(row[i], T.bfloat16), T.uint16)
                                values[2 * i] = T.cast(bits & T.uint16(0xFF), T.uint8)
                                values[2 * i + 1] = T.cast(bits >> T.uint16(8), T.uint8)
                        else:
                            for g in T.Parallel(blocks):
                                amax = T.alloc_var(T.float32)
                                amax = T.float32(floor)
                                for i in T.serial(block):
                                    amax = larger(amax, magnitude(row[g * block + i]))
                                if layout == "nvfp4":
                                    scales[g] = e4m3(amax / T.float32(6))
                                    by = e4m3_value(T.cast(scales[g], T.int32))
                                    for i in T.serial(block // 2):
                                        low = e2m1(row[g * block + 2 * i] / by)
                                        high = e2m1(row[g * block + 2 * i + 1] / by)
                                        values[g * block // 2 + i] = T.cast(low | high << 4, T.uint8)
                                else:
                                    code = ue8m0(amax, shift, mantissa)
                                    if layout == "fp8":  # the power of two itself, as a float
                                        for i in T.serial(4):
                                            scales[i] = T.cast(code << 23 >> 8 * i & 0xFF, T.uint8)
                                    else:
                                        scales[g] = T.cast(code, T.uint8)
                                    if layout == "mxfp4":
                                        for i in T.serial(block // 2):
                                            low = e2m1(row[g * block + 2 * i] * undo(code))
                                            high = e2m1(row[g * block + 2 * i + 1] * undo(code))
                                            values[g * block // 2 + i] = T.cast(low | high << 4, T.uint8)
                                    else:
                                        for i in T.serial(block):
                                            values[g * block + i] = e4m3(row[g * block + i] * undo(code))
                            if layout == "v4":
                                for i in T.Parallel(V4_ROPE):
                                    bits = T.reinterpret(T.cast(row[dim - V4_ROPE + i], T.bfloat16), T.uint16)
                                    values[dim - V4_ROPE + 2 * i] = T.cast(bits & T.uint16(0xFF), T.uint8)
                                    values[dim - V4_ROPE + 2 * i + 1] = T.cast(bits >> T.uint16(8), T.uint8)
                                for i in T.Parallel(num_scales - blocks):
                                    scales[blocks + i] = T.uint8(0)
                    page = slot // page_size
                    place = slot % page_size
                    if split:
                        T.copy(values, pages[page, place * num_values])
                        T.copy(
                            scales[0:num_scales],
                            pages[page, page_size * num_values + place * num_scales],
                        )
                    else:
                        T.copy(values, pages[page, place * (num_values + num_scales)])
                        if num_scales:
                            T.copy(
                                scales[0:num_scales],
                                pages[page, place * (num_values + num_scales) + num_values],
                            )

    return build(write_records)


@compiled
def _copy(record, source_size, page_size):
    count, num_pages, page_stride = (T.dynamic(n) for n in ("count", "num_pages", "page_stride"))
    from_pages, from_stride = T.dynamic("from_pages"), T.dynamic("from_stride")

    @T.prim_func
    def copy_rows(
        source: T.StridedTensor((from_pages, source_size * record), (from_stride, 1), T.uint8),
        source_slots: T.Tensor((count,), T.int32),
        slots: T.Tensor((count,), T.int32),
        pages: T.StridedTensor((num_pages, page_size * record), (page_stride, 1), T.uint8),
    ):
        with T.Kernel(CORES) as core:
            row = T.alloc_shared((record,), T.uint8)
            for step in T.serial(T.ceildiv(count - core, CORES)):
                origin = source_slots[step * CORES + core]
                slot = slots[step * CORES + core]
                known = (origin >= 0) & (origin < from_pages * source_size)
                if known & (slot >= 0) & (slot < num_pages * page_size):
                    T.copy(source[origin // source_size, origin % source_size * record], row)
                    T.copy(row, pages[slot // page_size, slot % page_size * record])

    return build(copy_rows)


@compiled
def _pairs(dim):
    """The pooled rows; the ring is read, and written by `_carry` after all of them."""
    count, stride, requests, ring, request_stride, slot_stride, out_stride = (
        T.dynamic(n)
        for n in ("count", "stride", "requests", "ring", "request_stride", "slot_stride", "out_stride")
    )

    @T.prim_func
    def compress_rows(
        kv_gate: T.StridedTensor((count, 2 * dim), (stride, 1), T.float32),
        request_ids: T.Tensor((count,), T.int32),
        positions: T.Tensor((count,), T.int32),
        carry: T.StridedTensor((requests, ring, 2 * dim), (request_stride, slot_stride, 1), T.float32),
        out: T.StridedTensor((count, dim), (out_stride, 1), T.bfloat16),
    ):
        with T.Kernel(CORES) as core:
            for step in T.serial(T.ceildiv(count - core, CORES)):
                row = step * CORES + core
                request = request_ids[row]
                position = positions[row]
                closing = (request >= 0) & (request < requests) & (position % 2 == 1)
                inside = T.alloc_var(T.int32)
                inside = 0
                if row > 0:
                    inside = T.cast(request_ids[row - 1] == request, T.int32)
                with T.SimtVF(threads=THREADS):
                    for i in T.Parallel(dim):
                        result = T.alloc_var(T.float32)
                        result = T.float32(0)
                        if closing:
                            kv = T.alloc_var(T.float32)
                            gate = T.alloc_var(T.float32)
                            if inside != 0:
                                kv = kv_gate[row - 1, i]
                                gate = kv_gate[row - 1, dim + i]
                            else:
                                kv = carry[request, (position - 1) % ring, i]
                                gate = carry[request, (position - 1) % ring, dim + i]
                            # A NaN of either gate reaches the sum through its own exponential.
                            top = larger(gate, kv_gate[row, dim + i])
                            first = T.exp(gate - top)
                            second = T.exp(kv_gate[row, dim + i] - top)
                            result = (first * kv + second * kv_gate[row, i]) / (first + second)
                        out[row, i] = T.cast(result, T.bfloat16)

    return build(compress_rows)


@compiled
def _carry(width):
    count, stride, requests, ring, request_stride, slot_stride = (
        T.dynamic(n) for n in ("count", "stride", "requests", "ring", "request_stride", "slot_stride")
    )

    @T.prim_func
    def carry_rows(
        kv_gate: T.StridedTensor((count, width), (stride, 1), T.float32),
        request_ids: T.Tensor((count,), T.int32),
        positions: T.Tensor((count,), T.int32),
        carry: T.StridedTensor((requests, ring, width), (request_stride, slot_stride, 1), T.float32),
    ):
        with T.Kernel(CORES) as core:
            kept = T.alloc_shared((width,), T.float32)
            for step in T.serial(T.ceildiv(count - core, CORES)):
                row = step * CORES + core
                request = request_ids[row]
                # Of the rows that share a ring slot only the last writes.
                last = T.alloc_var(T.int32)
                last = 1
                if row + ring < count:
                    last = T.cast(request_ids[row + ring] != request, T.int32)
                if (last != 0) & (request >= 0) & (request < requests):
                    T.copy(kv_gate[row, 0], kept)
                    T.copy(kept, carry[request, positions[row] % ring, 0])

    return build(carry_rows)


def variants(cfg):
    """Every build that a model of this configuration needs, with pages of 64 entries."""
    pairs = cfg.rope_dim // 2
    yield _write, ("mxfp8", cfg.head_dim, True, True, pairs, PAGE)
    yield _write, ("nvfp4", cfg.head_dim, False, cfg.round_compressed_rope, pairs, PAGE)
    yield _write, ("mxfp4", cfg.index_dim, True, True, pairs, PAGE)
    for layout in ("v4", "fp8", "bf16"):
        yield _write, (layout, cfg.head_dim, False, True, pairs, PAGE)
    for layout in ("mxfp8", "nvfp4"):
        yield _copy, (sum(record_bytes(layout, cfg.head_dim)[:2]), PAGE, PAGE)
    yield _pairs, (cfg.head_dim,)
    yield _carry, (2 * cfg.head_dim,)


def write_cache(x, norm_weight, eps, cos, sin, slots, round_rope, layout, pages):
    """Launch of ``dsv41.ops.write_cache``."""
    if x.numel() and pages.numel():
        normed = norm_weight is not None
        _write(layout, x.shape[1], normed, round_rope, cos.shape[1], pages.shape[1])(
            x, norm_weight if normed else x[0], eps, cos, sin, slots, pages.flatten(1)
        )


def copy_records(source, source_slots, slots, pages):
    """Launch of ``dsv41.ops.copy_records``."""
    if slots.numel() and pages.numel() and source.numel():
        _copy(pages.shape[2], source.shape[1], pages.shape[1])(
            source.flatten(1), source_slots, slots, pages.flatten(1)
        )


def compress_pairs(kv_gate, request_ids, positions, carry, out):
    """Launches of ``dsv41.ops.compress_pairs``."""
    if kv_gate.numel():
        _pairs(out.shape[1])(kv_gate, request_ids, positions, carry, out)
        _carry(kv_gate.shape[1])(kv_gate, request_ids, positions, carry)
