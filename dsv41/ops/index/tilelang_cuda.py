"""Index scores and the selection on Hopper: one pass over the keys, lists of candidates, and their merge."""

from pathlib import Path

import tilelang.language as T
import torch

from ..._op import compiled
from .._tilelang import arch_of, build, device_source
from .api import GRID, rows_together

HERE = Path(__file__).parent
ARCH = "sm_90a"
HOPPER_ONLY = ("_scan", "_merge")  # what scores with wgmma and goes with it; the others are for any
FORMATS = {"mxfp4": 0, "fp8": 1}
HEADS, THREADS, MERGE_THREADS = 32, 256, 512


def source(*files: str, widths: tuple[int, ...] = ()) -> str:
    """The text of a kernel of this family."""
    paths = [HERE / "select.cuh", *(HERE / file for file in files)]
    return device_source(*paths, wgmma={"e4m3_rs": widths} if widths else None)


def query_source() -> str:
    """The text of the query kernel."""
    return device_source(HERE.parent / "quant" / "quantize.cuh", HERE / "query.cuh")


def scan_threads(together: int) -> int:
    """Threads of a scan."""
    return 256 if together == 1 else 512


def shared_bytes(layout: str, together: int, publish: bool) -> int:
    """At least `sizeof(Shared)` of index_topk.cuh, which asserts it."""
    one = together == 1
    values = 64 if layout == "mxfp4" else 128
    stages = (2 if one else 4) * (2 if layout != "mxfp4" or (publish and not one) else 3 if publish else 4)
    tile, cap, blocks = (128, 2048, 4096) if one else (64, 1536 if publish else 2048, 3072)
    queries = together * (HEADS * 128 + cap * 8 + HEADS * 8 + 96 + (blocks * 8 if publish else 0))
    padding, work = (0, 5120) if one else (HEADS * 128 + 256, 4 * 5120)
    return queries + padding + stages * (tile * values + tile * 5 + 16) + work + 1024


MERGE_BYTES = 8192 * 8 + 6656  # at least `sizeof(MergeShared)`


def scan_call(layout: str, together: int, publish: bool, restrict: bool, select: bool = True) -> str:
    """The device function of a scan."""
    flags = ", ".join(str(flag).lower() for flag in (publish, restrict, select))
    size = shared_bytes(layout, together, publish)
    return f"index_topk::scan<{FORMATS[layout]}, {together}, {flags}, {size}>"


def merge_call(together: int, publish: bool, restrict: bool) -> str:
    """The device function of a merge."""
    flags = ", ".join(str(flag).lower() for flag in (publish, restrict))
    return f"index_topk::merge<{together}, {flags}, {MERGE_BYTES}>"


@compiled
def _scan(layout, together, publish, restrict, select, arch):
    text = source("index_score.cuh", "index_topk.cuh", widths=(32 if together == 1 else 64,))
    call = scan_call(layout, together, publish, restrict, select)
    size = shared_bytes(layout, together, publish)
    tokens, heads = T.dynamic("tokens"), T.dynamic("heads")
    q_bytes, chosen, k, blocks = (T.dynamic(n) for n in "qckb")
    some, room = T.dynamic("some"), T.dynamic("room")

    @T.prim_func
    def index_scan(
        q: T.Tensor((tokens, heads, 64), T.uint8),
        q_scale: T.Tensor((tokens, heads, 4), T.uint8),
        weights: T.Tensor((tokens, heads), T.float32),
        requests: T.Tensor((tokens,), T.int32),
        visible: T.Tensor((tokens,), T.int32),
        pages: T.Tensor((some,), T.uint8),
        table: T.Tensor((q_bytes,), T.int32),
        candidates: T.Tensor((chosen,), T.int32),
        ids: T.Tensor((k,), T.int32),
        new_blocks: T.Tensor((blocks,), T.int32),
        scratch: T.Tensor((room,), T.uint8),
        num_requests: T.int32,
        table_width: T.int32,
        table_stride: T.int32,
        page_size: T.int32,
        num_pages: T.int32,
        page_stride: T.int64,
        num_candidates: T.int32,
        num_blocks: T.int32,
        block_size: T.int32,
        top_k: T.int32,
        grid: T.int32,
    ):
        with T.Kernel(grid, threads=scan_threads(together)) as _:
            T.import_source(text)
            T.annotate_min_blocks_per_sm(2 if together == 1 else 1)
            shared = T.alloc_shared((size,), T.uint8)
            T.pdl_trigger()  # the merge may be launched
            T.call_extern(
                "handle",
                call,
                q.access_ptr("r"),
                q_scale.access_ptr("r"),
                weights.access_ptr("r"),
                requests.access_ptr("r"),
                visible.access_ptr("r"),
                pages.access_ptr("r"),
                table.access_ptr("r"),
                candidates.access_ptr("r"),
                ids.access_ptr("w"),
                new_blocks.access_ptr("w"),
                scratch.access_ptr("rw"),
                tokens,
                heads,
                num_requests,
                table_width,
                table_stride,
                page_size,
                num_pages,
                page_stride,
                num_candidates,
                num_blocks,
                block_size,
                top_k,
                grid,
                shared.access_ptr("rw"),
            )

    return build(index_scan, arch)


@compiled
def _merge(together, publish, restrict, arch):
    text = source("index_score.cuh", "index_topk.cuh", widths=(32 if together == 1 else 64,))
    call = merge_call(together, publish, restrict)
    tokens, k, blocks, room = (T.dynamic(n) for n in ("tokens", "k", "b", "room"))

    @T.prim_func
    def index_merge(
        requests: T.Tensor((tokens,), T.int32),
        visible: T.Tensor((tokens,), T.int32),
        ids: T.Tensor((k,), T.int32),
        new_blocks: T.Tensor((blocks,), T.int32),
        scratch: T.Tensor((room,), T.uint8),
        num_requests: T.int32,
        table_width: T.int32,
        page_size: T.int32,
        num_candidates: T.int32,
        num_blocks: T.int32,
        block_size: T.int32,
        top_k: T.int32,
        grid: T.int32,
    ):
        with T.Kernel(grid, together, threads=MERGE_THREADS) as (_, _member):
            T.import_source(text)
            shared = T.alloc_shared((MERGE_BYTES,), T.uint8)
            T.call_extern(
                "handle",
                call,
                requests.access_ptr("r"),
                visible.access_ptr("r"),
                ids.access_ptr("w"),
                new_blocks.access_ptr("w"),
                scratch.access_ptr("rw"),
                tokens,
                num_requests,
                table_width,
                page_size,
                num_candidates,
                num_blocks,
                block_size,
                top_k,
                grid,
                shared.access_ptr("rw"),
            )
            T.pdl_sync()  # launched while the scan runs, whose end the function waits for

    return build(index_merge, arch)


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


def _front(x: torch.Tensor) -> torch.Tensor:
    """The first bytes of a strided tensor: its address, without its shape."""
    return x.as_strided((min(16, x.numel()),), (1,))


def index_query(x, cos, sin, values, scale):
    """Launches for ``dsv41.ops.index_query``."""
    tokens, heads, dim = x.shape
    if x.numel() == 0:
        return
    blocks = -(-tokens * heads * (dim // 8) // THREADS)
    _query(dim, cos.shape[1], arch_of(x))(
        _front(x),
        _front(cos),
        _front(sin),
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
    _topk_scan(arch_of(ids))(_front(scores), lens, ids.view(-1), scratch, width, scores.stride(0), k, GRID)
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
    """One scan and, with ``select``, one merge; without, ``ids`` is [num_tokens, n] f32 for all scores."""
    tokens, num_blocks = q.shape[0], blocks.shape[1]
    restrict, publish = candidates is not None, num_blocks > 0
    together = together or rows_together(tokens, publish, restrict)
    grid = GRID // (1 if together == 1 else 2)
    named = candidates.shape[1] if restrict else 0
    few = (table.shape[0], table.shape[1])
    flat_ids = ids.view(-1).view(torch.int32)
    spare = visible
    flat_blocks = blocks.view(-1) if publish else spare
    _scan(layout, together, publish, restrict, select, ARCH)(
        q,
        q_scale,
        weights,
        requests,
        visible,
        _front(pages),
        _front(table),
        candidates.view(-1) if restrict else spare,
        flat_ids,
        flat_blocks,
        scratch,
        *few,
        table.stride(0),
        pages.shape[1],
        pages.shape[0],
        pages.stride(0),
        named,
        num_blocks,
        block_size,
        ids.shape[1],
        grid,
    )
    if select:
        _merge(together, publish, restrict, ARCH)(
            requests,
            visible,
            flat_ids,
            flat_blocks,
            scratch,
            *few,
            pages.shape[1],
            named,
            num_blocks,
            block_size,
            ids.shape[1],
            grid,
        )


def index_topk(
    q,
    q_scale,
    head_weights,
    request_ids,
    visible,
    keys,
    layout,
    page_table,
    candidates,
    block_size,
    ids,
    new_candidates,
    scratch,
):
    """Launches for ``dsv41.ops.index_topk``."""
    if q.shape[0] == 0:
        return
    if page_table.numel() == 0 or keys.numel() == 0 or (candidates is not None and candidates.shape[1] == 0):
        ids.fill_(-1)
    few = (q, q_scale, head_weights, request_ids, visible, keys, layout, page_table)
    if page_table.numel() == 0 or keys.numel() == 0:
        new_candidates.fill_(-1)
        return
    if candidates is not None and new_candidates.shape[1]:
        launch(*few, None, block_size, ids, new_candidates, scratch)
    if candidates is None:
        launch(*few, None, block_size, ids, new_candidates, scratch)
    elif candidates.shape[1]:
        launch(*few, candidates, block_size, ids, new_candidates[:, :0], scratch)
