"""RMSNorm (also fused with MXFP8 quantisation) and rotary embedding on Hopper (norm_rope.cuh)."""

from pathlib import Path

import tilelang.language as T
import torch

from ..._op import compiled
from .._tilelang import arch_of, build, device_source
from .api import warps

HERE = Path(__file__).parent
ARCH = "sm_90a"
ROPE_THREADS = 256


def source():
    """The text of both kernels."""
    return device_source(HERE.parent / "quant" / "quantize.cuh", HERE / "norm_rope.cuh")


@compiled
def _rms_norm(width, quantized, arch):
    text, w = source(), warps(width)
    call = f"norm_rope::rms_norm<{width}, {w}, {str(quantized).lower()}>"

    @T.prim_func
    def rms_norm_rows(
        anchor: T.Tensor((16,), T.uint8),  # start of `values`, or any memory: tells the runtime the device
        x: T.int64,
        x_stride: T.int64,
        weight: T.int64,
        count: T.int32,
        eps: T.float32,
        out: T.int64,
        out_stride: T.int64,
        floor: T.float32,
        values_stride: T.int64,
        scale: T.int64,
        scale_stride: T.int64,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=32 * max(w, 4 if w == 1 else w)) as _:
            T.import_source(text)
            T.pdl_sync()
            T.pdl_trigger()
            shared = T.alloc_shared((128,), T.uint8)
            T.call_extern(
                "handle", call, x, x_stride, weight, count, eps, out, out_stride, floor,
                anchor.access_ptr("w"), values_stride, scale, scale_stride, shared.access_ptr("rw"),
            )  # fmt: skip

    return build(rms_norm_rows, arch)


@compiled
def _rope(dim, pairs, in_place, arch):
    text = source()
    call = f"norm_rope::rope<{dim}, {pairs}, {str(in_place).lower()}>"

    @T.prim_func
    def rope_rows(
        out: T.Tensor((8,), T.bfloat16),  # the start of the rows
        x: T.int64,
        x_token: T.int64,
        x_head: T.int64,
        tokens: T.int32,
        heads: T.int32,
        cos: T.int64,
        cos_stride: T.int64,
        sin: T.int64,
        sin_stride: T.int64,
        inverse: T.int32,
        out_token: T.int64,
        out_head: T.int64,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=ROPE_THREADS) as _:
            T.import_source(text)
            T.pdl_sync()
            T.pdl_trigger()
            T.call_extern(
                "handle", call, x, x_token, x_head, tokens, heads, cos, cos_stride, sin, sin_stride, inverse,
                out.access_ptr("w"), out_token, out_head,
            )  # fmt: skip

    return build(rope_rows, arch)


def variants(cfg):
    """Norms of the hidden state, the latent query, heads and index keys; RoPE of heads and index queries."""
    for width in sorted({cfg.hidden, cfg.q_rank, cfg.head_dim, cfg.index_dim}):
        yield _rms_norm, (width, False, ARCH)
        yield _rms_norm, (width, True, ARCH)
    for dim in sorted({cfg.head_dim, cfg.index_dim}):
        for in_place in (False, True):
            yield _rope, (dim, cfg.rope_dim // 2, in_place, ARCH)


def _blocks(width, count):
    return -(-count // 4) if warps(width) == 1 else count


def rms_norm(x, weight, eps, out):
    """Launch of ``dsv41.ops.rms_norm``."""
    count, width = x.shape
    if count == 0:
        return
    _rms_norm(width, False, arch_of(x))(
        out.view(torch.uint8).as_strided((16,), (1,)), x.data_ptr(), x.stride(0), weight.data_ptr(), count,
        eps, out.data_ptr(), out.stride(0), 0.0, 0, 0, 0, _blocks(width, count),
    )  # fmt: skip


def rms_norm_quantize(x, weight, eps, floor, norm, values, scale):
    """Launch of ``dsv41.ops.rms_norm_quantize``."""
    count, width = x.shape
    if count == 0:
        return
    at, stride = (0, 0) if norm is None else (norm.data_ptr(), norm.stride(0))
    _rms_norm(width, True, arch_of(x))(
        values.view(torch.uint8).as_strided((16,), (1,)), x.data_ptr(), x.stride(0), weight.data_ptr(), count,
        eps, at, stride, floor, values.stride(0), scale.data_ptr(), scale.stride(0), _blocks(width, count),
    )  # fmt: skip


def rope(x, cos, sin, inverse, out):
    """Launch of ``dsv41.ops.rope``."""
    tokens, heads, dim = x.shape
    if tokens * heads == 0:
        return
    pairs = cos.shape[1]
    in_place = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
    chunks = tokens * heads * ((2 * pairs if in_place else dim) // 8)
    if chunks == 0:
        return
    _rope(dim, pairs, in_place, arch_of(x))(
        out.as_strided((8,), (1,)), x.data_ptr(), x.stride(0), x.stride(1), tokens, heads,
        cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0), int(inverse),
        out.stride(0), out.stride(1), -(-chunks // ROPE_THREADS),
    )  # fmt: skip
