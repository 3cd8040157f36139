"""Quantising rows on Hopper: eight values a thread (quantize.cuh), bound by memory."""

from pathlib import Path

import tilelang.language as T
import torch

from ..._op import compiled
from .._tilelang import arch_of, build, device_source

SOURCE = Path(__file__).parent / "quantize.cuh"
ARCH = "sm_90a"
THREADS = 256
FORMATS = {"mxfp8": 0, "mxfp4": 1, "nvfp4": 2}
ONE_WAVE = 132 * 2048  # up to so many threads every chunk of eight values gets its own


def unrolled(chunks: int) -> int:
    """Chunks a thread. Any number gives the same bits: blocks of a format do not see each other."""
    return 1 if chunks <= ONE_WAVE else 2


@compiled
def _rows(form, bf16, width, unroll, arch):
    source = device_source(SOURCE)
    call = f"quantize::rows<{FORMATS[form]}, {str(bf16).lower()}, {width}, {unroll}>"

    @T.prim_func
    def quantize_rows(
        values: T.Tensor(
            (16,), T.uint8
        ),  # the start of the rows; a tensor tells the runtime device and stream
        x: T.int64,
        x_stride: T.int64,
        count: T.int32,
        floor: T.float32,
        values_stride: T.int64,
        scale: T.int64,
        scale_stride: T.int64,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as _:
            T.import_source(source)
            T.pdl_sync()
            T.pdl_trigger()
            T.call_extern(
                "handle", call, x, x_stride, count, floor, values.access_ptr("w"), values_stride,
                scale, scale_stride,
            )  # fmt: skip

    return build(quantize_rows, arch)


@compiled
def _swiglu(inter, round_bf16, unroll, arch):
    source = device_source(SOURCE)
    call = f"quantize::swiglu_rows<{inter}, {str(round_bf16).lower()}, {unroll}>"

    @T.prim_func
    def swiglu_rows(
        values: T.Tensor((16,), T.uint8),
        x: T.int64,
        x_stride: T.int64,
        count: T.int32,
        weight: T.int64,
        limit: T.float32,
        floor: T.float32,
        values_stride: T.int64,
        scale: T.int64,
        scale_stride: T.int64,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as _:
            T.import_source(source)
            T.pdl_sync()
            T.pdl_trigger()
            T.call_extern(
                "handle", call, x, x_stride, count, weight, limit, floor, values.access_ptr("w"),
                values_stride, scale, scale_stride,
            )  # fmt: skip

    return build(swiglu_rows, arch)


def widths(cfg):
    """Row lengths of the operands that a layer, Engram or the drafter quantises."""
    attention = cfg.o_groups * cfg.o_rank
    others = cfg.engram.width, len(cfg.draft.target_layers) * cfg.hidden
    return sorted({cfg.hidden, cfg.q_rank, cfg.inter, attention, cfg.num_heads * cfg.head_dim, *others})


def variants(cfg):
    """Activations of every linear, the records of the caches, SwiGLU in both orders of rounding."""
    for unroll in (1, 2):
        for width in widths(cfg):
            yield _rows, ("mxfp8", True, width, unroll, ARCH)
        for width in {cfg.head_dim, cfg.index_dim}:
            yield _rows, ("mxfp4", True, width, unroll, ARCH)
            yield _rows, ("nvfp4", True, width, unroll, ARCH)
        for round_bf16 in (True, False):
            yield _swiglu, (cfg.inter, round_bf16, unroll, ARCH)


def launch_rows(form, x, floor, values, scale):
    """One of the three formats."""
    count, width = x.shape
    if count == 0 or width == 0:
        return
    chunks = count * width // 8
    unroll = unrolled(chunks)
    _rows(form, x.dtype == torch.bfloat16, width, unroll, arch_of(values))(
        values.view(torch.uint8).as_strided((16,), (1,)), x.data_ptr(), x.stride(0), count, floor,
        values.stride(0), scale.data_ptr(), scale.stride(0), -(-chunks // (THREADS * unroll)),
    )  # fmt: skip


def quantize_mxfp8(x, floor, values, scale):
    """Launch of ``dsv41.ops.quantize_mxfp8``."""
    launch_rows("mxfp8", x, floor, values, scale)


def quantize_mxfp4(x, floor, values, scale):
    """Launch of ``dsv41.ops.quantize_mxfp4``."""
    launch_rows("mxfp4", x, floor, values, scale)


def quantize_nvfp4(x, floor, values, scale):
    """Launch of ``dsv41.ops.quantize_nvfp4``."""
    launch_rows("nvfp4", x, floor, values, scale)


def swiglu_quantize(gate_up, weight, limit, round_bf16, values, scale):
    """Launch of ``dsv41.ops.swiglu_quantize``."""
    count, inter = values.shape
    if count == 0 or inter == 0:
        return
    chunks = count * inter // 8
    unroll = unrolled(chunks)
    _swiglu(inter, round_bf16, unroll, arch_of(values))(
        values.view(torch.uint8).as_strided((16,), (1,)), gate_up.data_ptr(), gate_up.stride(0), count,
        0 if weight is None else weight.data_ptr(), limit, 1e-4,
        values.stride(0), scale.data_ptr(), scale.stride(0), -(-chunks // (THREADS * unroll)),
    )  # fmt: skip
