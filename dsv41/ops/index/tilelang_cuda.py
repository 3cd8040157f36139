"""Index scores and the selection on Hopper: one pass over the keys, lists of candidates, and their merge."""

from pathlib import Path

import tilelang.language as T

from ..._op import compiled
from .._tilelang import arch_of, build, device_source
from . import tilelang_scan
from .api import GRID, rows_together
from .tilelang_scan import MERGE_BYTES, MERGE_THREADS, front

HERE = Path(__file__).parent
ARCH = "sm_90a"
HOPPER_ONLY = ("_scan", "_merge")  # what scores with wgmma and goes with it; the others are for any
THREADS = 256


def source(*files: str, widths: tuple[int, ...] = ()) -> str:
    """The text of a kernel of this family."""
    paths = [HERE / "select.cuh", *(HERE / file for file in files)]
    return device_source(*paths, wgmma={"e4m3_rs": widths} if widths else None)


def query_source() -> str:
    """The text of the query kernel."""
    return device_source(HERE.parent / "quant" / "quantize.cuh", HERE / "query.cuh")


def scan_source(together):
    """The text of scans and merges for so many queries at once."""
    files = ("index_plan.cuh", "index_score.cuh", "index_topk.cuh")
    return source(*files, widths=(32 if together == 1 else 64,))


@compiled
def _scan(layout, together, publish, restrict, select, arch):
    text = scan_source(together)
    return build(tilelang_scan.scan_program(text, layout, together, publish, restrict, select), arch)


@compiled
def _merge(together, publish, restrict, arch):
    return build(tilelang_scan.merge_program(scan_source(together), together, publish, restrict), arch)


TOPK_BYTES = 4096 * 8 + 4 * 2048 * 4 + 6656


@compiled
def _topk_scan(arch):
    text = source("topk.cuh")
    rows, some, chosen, room = (T.dynamic(n) for n in ("rows", "some", "chosen", "room"))

    @T.prim_func
    def topk_scan(
        scores: T.Tensor((some,), T.float32),
        lens: T.Tensor((rows,), T.int32),
        ids: T.Tensor((chosen,), T.int32),
        scratch: T.Tensor((room,), T.uint8),
        width: T.int32,
        stride: T.int64,
        k: T.int32,
        grid: T.int32,
    ):
        with T.Kernel(grid, threads=THREADS) as _:
            T.import_source(text)
            T.annotate_min_blocks_per_sm(2)
            shared = T.alloc_shared((TOPK_BYTES,), T.uint8)
            T.pdl_trigger()  # the merge may be launched
            T.call_extern(
                "handle",
                f"topk_rows::scan<{TOPK_BYTES}>",
                scores.access_ptr("r"),
                lens.access_ptr("r"),
                ids.access_ptr("w"),
                scratch.access_ptr("rw"),
                rows,
                width,
                stride,
                k,
                grid,
                shared.access_ptr("rw"),
            )

    return build(topk_scan, arch)


@compiled
def _topk_merge(arch):
    text = source("topk.cuh")
    rows, chosen, room = (T.dynamic(n) for n in ("rows", "chosen", "room"))

    @T.prim_func
    def topk_merge(
        lens: T.Tensor((rows,), T.int32),
        ids: T.Tensor((chosen,), T.int32),
        scratch: T.Tensor((room,), T.uint8),
        width: T.int32,
        k: T.int32,
        grid: T.int32,
    ):
        with T.Kernel(grid, threads=MERGE_THREADS) as _:
            T.import_source(text)
            shared = T.alloc_shared((MERGE_BYTES,), T.uint8)
            T.call_extern(
                "handle",
                f"topk_rows::merge<{MERGE_BYTES}>",
                lens.access_ptr("r"),
                ids.access_ptr("w"),
                scratch.access_ptr("rw"),
                rows,
                width,
                k,
                grid,
                shared.access_ptr("rw"),
            )
            T.pdl_sync()  # launched while the scan runs, whose end the function waits for

    return build(topk_merge, arch)


@compiled
def _query(dim, pairs, arch):
    text = query_source()
    a, b, c, d, e = (T.dynamic(n) for n in ["a", "b", "c", "d", "e"])

    @T.prim_func
    def query_rows(
        x: T.Tensor((a,), T.bfloat16),
        cos: T.Tensor((b,), T.float32),
        sin: T.Tensor((c,), T.float32),
        values: T.Tensor((d,), T.uint8),
        scale: T.Tensor((e,), T.uint8),
        x_token: T.int64,
        x_head: T.int64,
        cos_stride: T.int64,
        sin_stride: T.int64,
        tokens: T.int32,
        heads: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as _:
            T.import_source(text)
            T.call_extern(
                "handle",
                f"index_query::prepare<{dim}, {pairs}>",
                x.access_ptr("r"),
                x_token,
                x_head,
                cos.access_ptr("r"),
                sin.access_ptr("r"),
                cos_stride,
                sin_stride,
                tokens,
                heads,
                values.access_ptr("w"),
                scale.access_ptr("w"),
            )

    return build(query_rows, arch)


def variants(cfg):
    """Every build that a model of this configuration needs."""
    yield _query, (cfg.index_dim, cfg.rope_dim // 2, ARCH)
    yield _topk_scan, (ARCH,)
    yield _topk_merge, (ARCH,)
    for together, publish, restrict in (
        (1, False, False),
        (6, False, False),
        (1, True, False),
        (4, True, False),
        (1, False, True),
    ):
        yield _scan, ("mxfp4", together, publish, restrict, True, ARCH)
        yield _merge, (together, publish, restrict, ARCH)


def index_query(x, cos, sin, values, scale):
    """Launches for ``dsv41.ops.index_query``."""
    tokens, heads, dim = x.shape
    if x.numel() == 0:
        return
    blocks = -(-tokens * heads * (dim // 8) // THREADS)
    _query(dim, cos.shape[1], arch_of(x))(
        front(x),
        front(cos),
        front(sin),
        values.view(-1),
        scale.view(-1),
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        sin.stride(0),
        tokens,
        heads,
        blocks,
    )


def topk(scores, lens, ids, scratch):
    """Launches for ``dsv41.ops.topk``."""
    rows, width = scores.shape
    k = ids.shape[1]
    if rows == 0:
        return
    if width == 0:
        ids.fill_(-1)
        return
    _topk_scan(arch_of(ids))(front(scores), lens, ids.view(-1), scratch, width, scores.stride(0), k, GRID)
    _topk_merge(arch_of(ids))(lens, ids.view(-1), scratch, width, k, GRID)


def launch(
    q,
    q_scale,
    weights,
    requests,
    visible,
    pages,
    layout,
    table,
    candidates,
    block_size,
    ids,
    blocks,
    scratch,
    *,
    select=True,
    together=None,
):
    """`tilelang_scan.launch` with Hopper's kernels, for as many queries at once as suits the sizes."""
    together = together or rows_together(len(q), blocks.shape[1] > 0, candidates is not None)
    tilelang_scan.launch(
        lambda *flags: _scan(layout, *flags, ARCH), lambda *flags: _merge(*flags, ARCH),
        q, q_scale, weights, requests, visible, pages, table, candidates, block_size, ids, blocks, scratch,
        select=select, together=together,
    )  # fmt: skip


def index_topk(*args):
    """Launches for ``dsv41.ops.index_topk``."""
    tilelang_scan.index_topk(launch, *args)
