"""Cache writers, record copies and the compressor's pairs on Hopper (records.cuh)."""

from pathlib import Path

import tilelang.language as T
import torch

from ..._op import compiled
from .._tilelang import arch_of, build, device_source

HERE = Path(__file__).parent
ARCH = "sm_90a"
LAYOUTS = ("mxfp8", "nvfp4", "mxfp4", "v4", "fp8", "bf16")  # as the enum of records.cuh
WARPS = 4  # rows a block


def source() -> str:
    """The text of all kernels of this family."""
    return device_source(HERE.parent / "quant" / "quantize.cuh", HERE / "records.cuh")


def write_name(layout: str, dim: int, norm: bool, rounded: bool, pairs: int) -> str:
    """The device function of a writer."""
    norm_text, round_text = str(norm).lower(), str(rounded).lower()
    return f"records::write<{LAYOUTS.index(layout)}, {dim}, {norm_text}, {round_text}, {pairs}>"


@compiled
def _write(layout, dim, norm, rounded, pairs, arch):
    text, name = source(), write_name(layout, dim, norm, rounded, pairs)
    count = T.dynamic("count")
    a, b, c, d, e = (T.dynamic(n) for n in ["a", "b", "c", "d", "e"])

    @T.prim_func
    def write_records(
        x: T.Tensor((a,), T.bfloat16),
        weight: T.Tensor((b,), T.bfloat16),
        cos: T.Tensor((c,), T.float32),
        sin: T.Tensor((d,), T.float32),
        slots: T.Tensor((count,), T.int32),
        pages: T.Tensor((e,), T.uint8),
        x_stride: T.int64,
        eps: T.float32,
        cos_stride: T.int64,
        sin_stride: T.int64,
        page_stride: T.int64,
        page_size: T.int32,
        num_pages: T.int32,
    ):
        with T.Kernel(T.ceildiv(count, WARPS), threads=32 * WARPS) as _:
            T.import_source(text)
            T.pdl_sync()
            T.pdl_trigger()
            T.call_extern(
                "handle",
                name,
                x.access_ptr("r"),
                x_stride,
                weight.access_ptr("r"),
                eps,
                cos.access_ptr("r"),
                sin.access_ptr("r"),
                cos_stride,
                sin_stride,
                slots.access_ptr("r"),
                count,
                pages.access_ptr("w"),
                page_stride,
                page_size,
                num_pages,
            )

    return build(write_records, arch)


@compiled
def _copy(arch):
    text = source()
    count, a, b = (T.dynamic(n) for n in ("count", "a", "b"))

    @T.prim_func
    def copy_rows(
        source_pages: T.Tensor((a,), T.uint8),
        source_slots: T.Tensor((count,), T.int32),
        slots: T.Tensor((count,), T.int32),
        pages: T.Tensor((b,), T.uint8),
        source_stride: T.int64,
        source_size: T.int32,
        source_count: T.int32,
        page_stride: T.int64,
        page_size: T.int32,
        num_pages: T.int32,
        record: T.int32,
    ):
        with T.Kernel(T.ceildiv(count, WARPS), threads=32 * WARPS) as _:
            T.import_source(text)
            T.pdl_sync()
            T.pdl_trigger()
            T.call_extern(
                "handle",
                "records::copy",
                source_pages.access_ptr("r"),
                source_stride,
                source_size,
                source_count,
                source_slots.access_ptr("r"),
                slots.access_ptr("r"),
                count,
                pages.access_ptr("w"),
                page_stride,
                page_size,
                num_pages,
                record,
            )

    return build(copy_rows, arch)


@compiled
def _pairs(arch):
    text = source()
    count, a, b, c = (T.dynamic(n) for n in ("count", "a", "b", "c"))

    @T.prim_func
    def compress_rows(
        rows: T.Tensor((a,), T.float32),
        requests: T.Tensor((count,), T.int32),
        positions: T.Tensor((count,), T.int32),
        carry: T.Tensor((b,), T.float32),
        out: T.Tensor((c,), T.bfloat16),
        row_stride: T.int64,
        request_stride: T.int64,
        slot_stride: T.int64,
        num_requests: T.int32,
        ring: T.int32,
        out_stride: T.int64,
        dim: T.int32,
    ):
        with T.Kernel(count, threads=128) as _:
            T.import_source(text)
            T.pdl_sync()
            T.pdl_trigger()
            T.call_extern(
                "handle",
                "records::pairs",
                rows.access_ptr("r"),
                row_stride,
                requests.access_ptr("r"),
                positions.access_ptr("r"),
                count,
                carry.access_ptr("rw"),
                request_stride,
                slot_stride,
                num_requests,
                ring,
                out.access_ptr("w"),
                out_stride,
                dim,
            )

    return build(compress_rows, arch)


def variants(cfg):
    """Every build that a model of this configuration needs."""
    pairs = cfg.rope_dim // 2
    yield _write, ("mxfp8", cfg.head_dim, True, True, pairs, ARCH)
    yield _write, ("nvfp4", cfg.head_dim, False, cfg.round_compressed_rope, pairs, ARCH)
    yield _write, ("mxfp4", cfg.index_dim, True, True, pairs, ARCH)
    yield _copy, (ARCH,)
    yield _pairs, (ARCH,)


def _front(x: torch.Tensor) -> torch.Tensor:
    """The first elements of a strided tensor: its address, without its shape."""
    return x.as_strided((min(16, x.numel()),), (1,))


def write_cache(x, norm_weight, eps, cos, sin, slots, round_rope, layout, pages):
    """Launches for ``dsv41.ops.write_cache``."""
    if x.shape[0] == 0 or pages.numel() == 0:
        return
    norm, pairs = norm_weight is not None, cos.shape[1]
    _write(layout, x.shape[1], norm, round_rope, pairs, arch_of(x))(
        _front(x),
        _front(norm_weight if norm else x),
        _front(cos),
        _front(sin),
        slots,
        _front(pages),
        x.stride(0),
        eps,
        cos.stride(0),
        sin.stride(0),
        pages.stride(0),
        pages.shape[1],
        pages.shape[0],
    )


def copy_records(source, source_slots, slots, pages):
    """Launches for ``dsv41.ops.copy_records``."""
    if slots.shape[0] == 0 or pages.numel() == 0 or source.numel() == 0:
        return
    _copy(arch_of(pages))(
        _front(source),
        source_slots,
        slots,
        _front(pages),
        source.stride(0),
        source.shape[1],
        source.shape[0],
        pages.stride(0),
        pages.shape[1],
        pages.shape[0],
        pages.shape[2],
    )


def compress_pairs(kv_gate, request_ids, positions, carry, out):
    """Launches for ``dsv41.ops.compress_pairs``."""
    if kv_gate.shape[0] == 0:
        return
    _pairs(arch_of(out))(
        _front(kv_gate),
        request_ids,
        positions,
        _front(carry),
        _front(out),
        kv_gate.stride(0),
        carry.stride(0),
        carry.stride(1),
        carry.shape[0],
        carry.shape[1],
        out.stride(0),
        out.shape[1],
    )
