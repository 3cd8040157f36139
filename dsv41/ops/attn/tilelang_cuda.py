"""Sparse attention on Hopper: records decoded beside the tensor cores that use them (sparse_attn.cuh).

Both kernels may be launched before what is in front of them has ended, and wait for that there (`pdl_sync`).
"""

from pathlib import Path

import tilelang.language as T
import torch

from ..._op import compiled
from .._tilelang import HERE, build, device_source
from .api import CLUSTERS

BLOCKS = 132  # blocks of the persistent kernel; any number is right
THREADS = 512
SHARED_BYTES = 230400  # sizeof(Shared) in tiles.cuh and the padding of its alignment
FILES = ("records", "tiles", "output", "sparse_attn", "combine")
NUMBERS = {"mxfp8": 0, "nvfp4": 1, "v4": 2, "bf16": 3}  # enum Layout


def _source() -> str:
    files = (Path(__file__).parent / f"{name}.cuh" for name in FILES)
    return device_source(HERE / "hopper_cluster.cuh", *files, wgmma={"bf16_ss": (64,), "bf16_rs_t": (128,)})


@compiled
def _attend(window_layout, compressed_layout, cluster, arch):
    source = _source()
    call = f"sparse_attn::attend<{NUMBERS[window_layout]}, {NUMBERS[compressed_layout]}, {cluster}>"

    @T.prim_func
    def sparse_attn(
        anchor: T.Tensor((16,), T.uint8),  # any memory of the device: tells the runtime device and stream
        q: T.int64,
        q_row: T.int64,
        q_head: T.int64,
        rows: T.int32,
        heads: T.int32,
        window: T.int64,
        window_stride: T.int64,
        window_page: T.int32,
        window_slots: T.int32,
        window_ids: T.int64,
        window_ids_stride: T.int64,
        window_count: T.int32,
        compressed: T.int64,
        compressed_stride: T.int64,
        compressed_page: T.int32,
        compressed_slots: T.int32,
        compressed_ids: T.int64,
        compressed_ids_stride: T.int64,
        compressed_count: T.int32,
        sink: T.int64,
        cos: T.int64,
        cos_row: T.int64,
        sin: T.int64,
        sin_row: T.int64,
        scale: T.float32,
        splits: T.int32,
        out_row: T.int64,
        out_head: T.int64,
        lse: T.int64,
        scratch: T.int64,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS, cluster_dims=cluster if cluster > 1 else None) as _:
            T.import_source(source)
            T.pdl_sync()
            T.pdl_trigger()
            shared = T.alloc_shared((SHARED_BYTES,), T.uint8)
            T.call_extern(
                "handle", call, q, q_row, q_head, rows, heads,
                window, window_stride, window_page, window_slots, window_ids, window_ids_stride, window_count,
                compressed, compressed_stride, compressed_page, compressed_slots,
                compressed_ids, compressed_ids_stride, compressed_count,
                sink, cos, cos_row, sin, sin_row, scale, splits,
                anchor.access_ptr("w"), out_row, out_head, lse, scratch, shared.access_ptr("rw"),
            )  # fmt: skip

    return build(sparse_attn, arch)


@compiled
def _combine(arch):
    source = _source()

    @T.prim_func
    def combine(
        anchor: T.Tensor((16,), T.uint8),
        scratch: T.int64,
        rows: T.int32,
        heads: T.int32,
        splits: T.int32,
        sink: T.int64,
        cos: T.int64,
        cos_row: T.int64,
        sin: T.int64,
        sin_row: T.int64,
        out_row: T.int64,
        out_head: T.int64,
        lse: T.int64,
    ):
        with T.Kernel(rows * heads, threads=128) as _:
            T.import_source(source)
            T.pdl_sync()
            T.call_extern(
                "handle", "sparse_attn::combine", scratch, rows, heads, splits, sink,
                cos, cos_row, sin, sin_row, anchor.access_ptr("w"), out_row, out_head, lse,
            )  # fmt: skip

    return build(combine, arch)


def variants(cfg):
    """The window records with compressed entries (also: without any), and the drafter's two sets of rows."""
    for layouts, clusters in CLUSTERS.items():
        for cluster in (1, *clusters):
            yield _attend, (*layouts, cluster, "sm_90a")
    yield _combine, ("sm_90a",)


def sparse_attn(
    q, window, window_layout, window_ids, compressed, compressed_layout, compressed_ids, sink, cos,
    sin, scale, num_splits, out, lse, scratch,
):  # fmt: skip
    """Launch of ``dsv41.ops.sparse_attn``."""
    rows, heads, _ = q.shape
    if rows == 0:
        return
    if compressed is None:
        compressed, compressed_layout, compressed_ids = window, "nvfp4", window_ids[:, :0]
    sets = []
    for pages, ids in ((window, window_ids), (compressed, compressed_ids)):
        count, page, record = pages.shape
        stride = pages.stride(0) if count > 1 else page * record  # of a single page it means nothing
        sets += [pages.data_ptr(), max(stride, 1), max(page, 1), count * page]
        sets += [ids.data_ptr(), ids.stride(0), ids.shape[1]]
    sink_at = 0 if sink is None else sink.data_ptr()
    angles = [0, 0, 0, 0] if cos is None else [cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0)]
    lse_at = lse.data_ptr() if lse.numel() else 0
    anchor = out.view(torch.uint8).as_strided((16,), (1,))
    cluster = num_splits if num_splits in CLUSTERS.get((window_layout, compressed_layout), ()) else 1
    items = rows * -(-heads // 64) * num_splits
    # A cluster takes one row; without clusters, blocks go on from row to row.
    blocks = min(items, BLOCKS) if cluster == 1 else items
    _attend(window_layout, compressed_layout, cluster, "sm_90a")(
        anchor, q.data_ptr(), q.stride(0), q.stride(1), rows, heads, *sets, sink_at, *angles, scale,
        num_splits, out.stride(0), out.stride(1), lse_at, scratch.data_ptr(), blocks,
    )  # fmt: skip
    if num_splits > cluster:
        _combine("sm_90a")(
            anchor, scratch.data_ptr(), rows, heads, num_splits, sink_at, *angles,
            out.stride(0), out.stride(1), lse_at,
        )  # fmt: skip
