"""Quantising rows on Ascend: a thread takes a whole block of the format."""

import tilelang.ascend.language as T
import torch

from ..._op import compiled
from .._ascend import CORES, THREADS, build, e2m1, e4m3, e4m3_value, larger, magnitude, smaller, ue8m0, undo

# Per format: values of a block, values a byte, and where the range of an element ends (see `ue8m0`).
FORMATS = {"mxfp8": (32, 1, 8, 0x600000), "mxfp4": (32, 2, 2, 0x400000), "nvfp4": (16, 2, 0, 0)}
FLOOR = 1e-4  # of swiglu_quantize


@compiled
def _rows(form, dtype, width):
    count, x_stride, values_stride, scale_stride = (
        T.dynamic(n) for n in ("count", "x_stride", "values_stride", "scale_stride")
    )
    block, per_byte, shift, mantissa = FORMATS[form]
    nvfp4 = form == "nvfp4"

    @T.prim_func
    def quantize_rows(
        x: T.StridedTensor((count, width), (x_stride, 1), dtype),
        floor: T.float32,
        values: T.StridedTensor((count, width // per_byte), (values_stride, 1), T.uint8),
        scale: T.StridedTensor((count, width // block), (scale_stride, 1), T.uint8),
    ):
        with T.Kernel(CORES) as core:
            row_in = T.alloc_shared((width,), dtype)
            row_out = T.alloc_shared((width // per_byte,), T.uint8)
            codes = T.alloc_shared((width // block,), T.uint8)
            for step in T.Pipelined(T.ceildiv(count - core, CORES), num_stages=2):
                row = step * CORES + core
                T.copy(x[row, 0], row_in)
                with T.SimtVF(threads=THREADS):
                    for b in T.Parallel(width // block):
                        amax = T.alloc_var(T.float32)
                        amax = floor
                        for i in T.serial(block):
                            amax = larger(amax, magnitude(T.cast(row_in[b * block + i], T.float32)))
                        if nvfp4:
                            codes[b] = e4m3(amax / T.float32(6.0))
                            by = e4m3_value(T.cast(codes[b], T.int32))
                            for i in T.serial(block // 2):
                                low = e2m1(T.cast(row_in[b * block + 2 * i], T.float32) / by)
                                high = e2m1(T.cast(row_in[b * block + 2 * i + 1], T.float32) / by)
                                row_out[b * block // 2 + i] = T.cast(low | high << 4, T.uint8)
                        else:
                            code = ue8m0(amax, shift, mantissa)
                            codes[b] = T.cast(code, T.uint8)
                            factor = undo(code)
                            if per_byte == 1:
                                for i in T.serial(block):
                                    at = b * block + i
                                    row_out[at] = e4m3(T.cast(row_in[at], T.float32) * factor)
                            else:
                                for i in T.serial(block // 2):
                                    low = e2m1(T.cast(row_in[b * block + 2 * i], T.float32) * factor)
                                    high = e2m1(T.cast(row_in[b * block + 2 * i + 1], T.float32) * factor)
                                    row_out[b * block // 2 + i] = T.cast(low | high << 4, T.uint8)
                T.copy(row_out, values[row, 0])
                T.copy(codes, scale[row, 0])

    return build(quantize_rows)


@compiled
def _swiglu(inter, weighted, round_bf16):
    count, x_stride, weight_stride, values_stride, scale_stride = (
        T.dynamic(n) for n in ("count", "x_stride", "weight_stride", "values_stride", "scale_stride")
    )

    @T.prim_func
    def swiglu_rows(
        gate_up: T.StridedTensor((count, 2 * inter), (x_stride, 1), T.bfloat16),
        weight: T.StridedTensor((count,), (weight_stride,), T.float32 if weighted else T.bfloat16),
        limit: T.float32,
        values: T.StridedTensor((count, inter), (values_stride, 1), T.uint8),
        scale: T.StridedTensor((count, inter // 32), (scale_stride, 1), T.uint8),
    ):
        with T.Kernel(CORES) as core:
            row_in = T.alloc_shared((2 * inter,), T.bfloat16)
            product = T.alloc_shared((inter,), T.float32)
            row_out = T.alloc_shared((inter,), T.uint8)
            codes = T.alloc_shared((inter // 32,), T.uint8)
            for step in T.Pipelined(T.ceildiv(count - core, CORES), num_stages=2):
                row = step * CORES + core
                T.copy(gate_up[row, 0], row_in)
                with T.SimtVF(threads=THREADS):
                    for i in T.Parallel(inter):
                        # A NaN passes the limits, as it does in the reference.
                        gate = smaller(T.cast(row_in[i], T.float32), limit)
                        up = larger(smaller(T.cast(row_in[inter + i], T.float32), limit), -limit)
                        y = T.alloc_var(T.float32)
                        y = gate / (T.float32(1) + T.exp(-gate)) * up
                        if weighted:
                            y = y * weight[row]
                        if round_bf16:
                            y = T.cast(T.cast(y, T.bfloat16), T.float32)
                        product[i] = y
                    for b in T.Parallel(inter // 32):
                        amax = T.alloc_var(T.float32)
                        amax = T.float32(FLOOR)
                        for i in T.serial(32):
                            amax = larger(amax, magnitude(product[b * 32 + i]))
                        code = ue8m0(amax, 8, 0x600000)
                        codes[b] = T.cast(code, T.uint8)
                        factor = undo(code)
                        for i in T.serial(32):
                            row_out[b * 32 + i] = e4m3(product[b * 32 + i] * factor)
                T.copy(row_out, values[row, 0])
                T.copy(codes, scale[row, 0])

    return build(swiglu_rows)


def variants(cfg):
    """Activations of every linear, the records of the caches, SwiGLU in both orders of rounding."""
    attention = cfg.o_groups * cfg.o_rank
    for width in sorted({cfg.hidden, cfg.q_rank, cfg.inter, attention, cfg.num_heads * cfg.head_dim}):
        yield _rows, ("mxfp8", "bfloat16", width)
    for width in sorted({cfg.head_dim, cfg.index_dim}):
        yield _rows, ("mxfp4", "bfloat16", width)
        yield _rows, ("nvfp4", "bfloat16", width)
    for weighted in (True, False):
        for round_bf16 in (True, False):
            yield _swiglu, (cfg.inter, weighted, round_bf16)


def _launch(form, x, floor, values, scale):
    if x.numel():
        kernel = _rows(form, str(x.dtype).removeprefix("torch."), x.shape[1])
        kernel(x, floor, values.view(torch.uint8), scale.view(torch.uint8))


def quantize_mxfp8(x, floor, values, scale):
    """Launch of ``dsv41.ops.quantize_mxfp8``."""
    _launch("mxfp8", x, floor, values, scale)


def quantize_mxfp4(x, floor, values, scale):
    """Launch of ``dsv41.ops.quantize_mxfp4``."""
    _launch("mxfp4", x, floor, values, scale)


def quantize_nvfp4(x, floor, values, scale):
    """Launch of ``dsv41.ops.quantize_nvfp4``."""
    _launch("nvfp4", x, floor, values, scale)


def swiglu_quantize(gate_up, weight, limit, round_bf16, values, scale):
    """Launch of ``dsv41.ops.swiglu_quantize``."""
    if values.numel():
        kernel = _swiglu(values.shape[1], weight is not None, round_bf16)
        given = gate_up[:, 0] if weight is None else weight  # no weight: not read
        kernel(gate_up, given, limit, values.view(torch.uint8), scale.view(torch.uint8))
