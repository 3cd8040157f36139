"""Engram on Ascend: hash, lookup in device memory, gate."""

import math

import tilelang.ascend.language as T
import torch

from ..._op import compiled
from .._ascend import CORES, THREADS, build, e4m3_value, even_threads


@compiled
def _hash(layers, orders, heads, token_dtype, position_dtype, back_dtype):
    """A thread a token; ``back_dtype`` is None where there is no lookback."""
    count, requests, vocab = T.dynamic("count"), T.dynamic("requests"), T.dynamic("vocab")
    back_rows, back_stride, out_token, out_layer = (
        T.dynamic(n) for n in ("back_rows", "back_stride", "out_token", "out_layer")
    )
    columns = (orders - 1) * heads

    @T.prim_func
    def hash_rows(
        tokens: T.Tensor((count,), token_dtype),
        positions: T.Tensor((count,), position_dtype),
        cu: T.Tensor((requests,), T.int32),
        lookback: T.StridedTensor((back_rows, orders - 1), (back_stride, 1), back_dtype or T.int32),
        classes: T.Tensor((vocab,), T.int32),
        multipliers: T.Tensor((layers, orders), T.int64),
        primes: T.Tensor((layers, columns), T.int64),
        offsets: T.Tensor((layers, columns), T.int64),
        pad_token: T.int32,
        image_token: T.int32,
        mask_dead: T.int32,
        out: T.StridedTensor((count, layers, columns), (out_token, out_layer, 1), T.int32),
    ):
        with T.Kernel(CORES) as core:
            for part in T.serial(T.ceildiv(count - core * THREADS, CORES * THREADS)):
                with T.SimtVF(threads=THREADS):
                    class_ids = T.alloc_local((orders,), T.int64)
                    for t in T.Parallel(THREADS):
                        row = (part * CORES + core) * THREADS + t
                        if row < count:
                            # The request of a row: the first that ends after it.
                            request = T.alloc_var(T.int32)
                            request = 0
                            for r in T.serial(requests - 1):
                                request = request + T.cast(cu[r + 1] <= row, T.int32)
                            used = request < requests - 1
                            first = cu[T.min(request, requests - 1)]
                            blocked = T.alloc_var(T.int32)
                            blocked = 0
                            dead = T.alloc_var(T.int32)
                            dead = 0
                            for k in T.serial(orders):
                                token = T.alloc_var(T.int64)
                                token = T.int64(-1)
                                exists = T.alloc_var(T.int32)
                                exists = T.cast(used & (positions[row] >= k), T.int32)
                                if exists != 0:
                                    if row - first >= k:
                                        token = T.cast(tokens[row - k], T.int64)
                                    else:
                                        if back_dtype is not None:
                                            old = row - first - k + orders - 1
                                            token = T.cast(lookback[request, old], T.int64)
                                known = (token >= 0) & (token < vocab) & (token != image_token)
                                if known:
                                    class_ids[k] = T.cast(classes[T.cast(token, T.int32)], T.int64)
                                else:
                                    blocked = 1
                                if blocked != 0:
                                    class_ids[k] = T.cast(classes[pad_token], T.int64)
                                if k == 0:
                                    dead = T.if_then_else(mask_dead != 0, blocked, 1 - exists)
                            for layer in T.serial(layers):
                                mixed = T.alloc_var(T.int64)
                                mixed = class_ids[0] * multipliers[layer, 0]
                                for k in T.serial(orders - 1):
                                    mixed = mixed ^ (class_ids[k + 1] * multipliers[layer, k + 1])
                                    for h in T.serial(heads):
                                        c = k * heads + h
                                        found = T.truncmod(mixed, primes[layer, c]) + offsets[layer, c]
                                        out[row, layer, c] = T.if_then_else(
                                            dead != 0, -1, T.cast(found, T.int32)
                                        )

    return build(hash_rows)


@compiled
def _lookup(columns, width):
    """A thread a block of 32 values."""
    count, table_rows, rows_stride, out_stride = (
        T.dynamic(n) for n in ("count", "table_rows", "rows_stride", "out_stride")
    )
    blocks = width // 32

    @T.prim_func
    def lookup_rows(
        rows: T.StridedTensor((count, columns), (rows_stride, 1), T.int32),
        values: T.Tensor((table_rows, width), T.uint8),
        scale: T.Tensor((table_rows, blocks), T.uint8),
        out: T.StridedTensor((count, columns * width), (out_stride, 1), T.bfloat16),
    ):
        with T.Kernel(CORES) as core:
            result = T.alloc_shared((columns * width,), T.bfloat16)
            for step in T.Pipelined(T.ceildiv(count - core, CORES), num_stages=2):
                token = step * CORES + core
                with T.SimtVF(threads=THREADS):
                    for b in T.Parallel(columns * blocks):
                        row = T.alloc_var(T.int32)
                        row = rows[token, b // blocks]
                        if (row >= 0) & (row < table_rows):
                            code = T.cast(scale[row, b % blocks], T.int32)
                            # 2^(code - 127): the smallest is subnormal, 255 is NaN.
                            bits = T.if_then_else(
                                code == 255, 0x7FC00000, T.if_then_else(code == 0, 0x00400000, code << 23)
                            )
                            factor = T.reinterpret(bits, T.float32)
                            for i in T.serial(32):
                                byte = T.cast(values[row, b % blocks * 32 + i], T.int32)
                                result[b * 32 + i] = T.cast(e4m3_value(byte) * factor, T.bfloat16)
                        else:
                            for i in T.serial(32):
                                result[b * 32 + i] = T.cast(T.float32(0), T.bfloat16)
                T.copy(result, out[token, 0])

    return build(lookup_rows)


def gated(u):
    """sigmoid(copysign(sqrt(max(|u|, 1e-6)), u)); the comparison lets a NaN pass."""
    size = T.abs(u)
    steep = T.sqrt(T.if_then_else(size < T.float32(1e-6), T.float32(1e-6), size))
    negative = T.reinterpret(u, T.int32) < 0
    return T.float32(1) / (T.float32(1) + T.exp(T.if_then_else(negative, steep, -steep)))


@compiled
def _gate(streams, hidden, masked):
    count = T.dynamic("count")
    x_token, x_stream, kv_stride, q_stride, k_stride, out_token, out_stream = (
        T.dynamic(n)
        for n in ("x_token", "x_stream", "kv_stride", "q_stride", "k_stride", "out_token", "out_stream")
    )
    root = math.sqrt(hidden)

    @T.prim_func
    def gate_rows(
        x: T.StridedTensor((count, streams, hidden), (x_token, x_stream, 1), T.bfloat16),
        kv: T.StridedTensor((count, (streams + 1) * hidden), (kv_stride, 1), T.bfloat16),
        q_weight: T.StridedTensor((streams, hidden), (q_stride, 1), T.bfloat16),
        k_weight: T.StridedTensor((streams, hidden), (k_stride, 1), T.bfloat16),
        dead: T.Tensor((count if masked else streams,), T.uint8 if masked else T.bfloat16),
        eps: T.float32,
        out: T.StridedTensor((count, streams, hidden), (out_token, out_stream, 1), T.bfloat16),
    ):
        with T.Kernel(CORES) as core:
            stream_in = T.alloc_shared((hidden,), T.bfloat16)
            key = T.alloc_shared((hidden,), T.bfloat16)
            value = T.alloc_shared((hidden,), T.bfloat16)
            q = T.alloc_shared((hidden,), T.bfloat16)
            k = T.alloc_shared((hidden,), T.bfloat16)
            result = T.alloc_shared((hidden,), T.bfloat16)
            for step in T.Pipelined(T.ceildiv(count * streams - core, CORES), num_stages=2):
                token = (step * CORES + core) // streams
                stream = (step * CORES + core) % streams
                T.copy(x[token, stream, 0], stream_in)
                T.copy(kv[token, stream * hidden], key)
                T.copy(kv[token, streams * hidden], value)
                T.copy(q_weight[stream, 0], q)
                T.copy(k_weight[stream, 0], k)
                with T.SimtVF(threads=even_threads(hidden)):
                    product = T.alloc_fragment((hidden,), T.float32)
                    squares = T.alloc_fragment((hidden,), T.float32)
                    key_squares = T.alloc_fragment((hidden,), T.float32)
                    dot = T.alloc_fragment((1,), T.float32)
                    x_size = T.alloc_fragment((1,), T.float32)
                    key_size = T.alloc_fragment((1,), T.float32)
                    for i in T.Parallel(hidden):
                        a = T.cast(stream_in[i], T.float32)
                        b = T.cast(key[i], T.float32)
                        weight = T.cast(q[i], T.float32) * T.cast(k[i], T.float32)
                        product[i] = a * weight * b
                        squares[i] = a * a
                        key_squares[i] = b * b
                    T.reduce_sum(product, dot, dim=0)
                    T.reduce_sum(squares, x_size, dim=0)
                    T.reduce_sum(key_squares, key_size, dim=0)
                    for i in T.Parallel(hidden):
                        unit = T.sqrt(x_size[0] / T.float32(hidden) + eps) * T.sqrt(
                            key_size[0] / T.float32(hidden) + eps
                        )
                        g = gated(dot[0] / unit / T.float32(root))
                        opened = T.cast(
                            T.cast(stream_in[i], T.float32) + g * T.cast(value[i], T.float32), T.bfloat16
                        )
                        if masked:
                            result[i] = T.if_then_else(dead[token] != 0, stream_in[i], opened)
                        else:
                            result[i] = opened
                T.copy(result, out[token, stream, 0])

    return build(gate_rows)


def variants(cfg):
    """Hash, lookup and gate of a configuration with Engram."""
    engram = cfg.engram
    if engram is None:
        return
    for dtype in ("int32", "int64"):
        for back in (None, dtype):
            yield _hash, (len(engram.layers), engram.max_ngram, engram.num_heads, dtype, "int32", back)
    yield _lookup, (engram.columns, engram.head_dim)
    for masked in (False, True):
        yield _gate, (cfg.num_streams, cfg.hidden, masked)


def _name(x):
    return str(x.dtype).removeprefix("torch.")


def engram_hash(
    tokens, positions, cu_seqlens, lookback, token_classes, multipliers, primes, offsets, pad_token,
    image_token, mask_dead, out,
):  # fmt: skip
    """Launch of ``dsv41.ops.engram_hash``."""
    if not out.numel():
        return
    layers, orders = multipliers.shape
    if cu_seqlens.shape[0] < 2:
        out.fill_(-1)
        return
    back = lookback is not None and lookback.numel() > 0
    given = lookback if back else token_classes[None, : orders - 1]  # no lookback: not read
    _hash(
        layers, orders, primes.shape[1] // (orders - 1), _name(tokens), _name(positions),
        _name(lookback) if back else None,
    )(
        tokens, positions, cu_seqlens, given, token_classes, multipliers, primes, offsets, pad_token,
        image_token, int(mask_dead), out,
    )  # fmt: skip


def engram_lookup(rows, values, scale, out):
    """Launch of ``dsv41.ops.engram_lookup``."""
    if not values.shape[0]:
        out.zero_()
    elif out.numel():
        _lookup(rows.shape[1], values.shape[1])(rows, values.view(torch.uint8), scale.view(torch.uint8), out)


def engram_gate(x, kv, q_weight, k_weight, dead, eps, out):
    """Launch of ``dsv41.ops.engram_gate``."""
    if x.numel():
        masked = dead is not None
        given = dead.view(torch.uint8) if masked else q_weight[0, : x.shape[1]]  # none: not read
        _gate(*x.shape[1:], masked)(x, kv, q_weight, k_weight, given, eps, out)
