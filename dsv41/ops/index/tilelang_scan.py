"""What the scans of Hopper and of SM100 share: kernels around their device functions, and the launches."""

import tilelang.language as T
import torch

from .api import GRID

FORMATS = {"mxfp4": 0, "fp8": 1, "scaled": 2}  # `Format` of index_plan.cuh
HEADS, MERGE_THREADS = 32, 512


def scan_threads(together: int) -> int:
    """Threads of a scan."""
    return 256 if together == 1 else 512


def shared_bytes(layout: str, together: int, publish: bool) -> int:
    """At least `sizeof(Shared)` of index_plan.cuh, which asserts it."""
    one = together == 1
    values = 128 if layout == "fp8" else 64
    stages = (2 if one else 4) * (2 if layout == "fp8" or (publish and not one) else 3 if publish else 4)
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


def scan_program(text, layout, together, publish, restrict, select):
    """The kernel around a scan; ``text`` has its device function."""
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

    return index_scan


def merge_program(text, together, publish, restrict):
    """The kernel around a merge."""
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

    return index_merge


def front(x: torch.Tensor) -> torch.Tensor:
    """The first bytes of a strided tensor: its address, without its shape."""
    return x.as_strided((min(16, x.numel()),), (1,))


def launch(
    scan,
    merge,
    q,
    q_scale,
    weights,
    requests,
    visible,
    pages,
    table,
    candidates,
    block_size,
    ids,
    blocks,
    scratch,
    *,
    select=True,
    together=1,
):
    """One scan and, with ``select``, one merge; without, ``ids`` is [num_tokens, n] f32 for all scores.

    Args:
        scan: ``scan(together, publish, restrict, select)`` is the compiled scan.
        merge: ``merge(together, publish, restrict)`` is the compiled merge.
    """
    num_blocks = blocks.shape[1]
    restrict, publish = candidates is not None, num_blocks > 0
    grid = GRID // (1 if together == 1 else 2)
    named = candidates.shape[1] if restrict else 0
    few = (table.shape[0], table.shape[1])
    flat_ids = ids.view(-1).view(torch.int32)
    spare = visible
    flat_blocks = blocks.view(-1) if publish else spare
    scan(together, publish, restrict, select)(
        q,
        q_scale,
        weights,
        requests,
        visible,
        front(pages),
        front(table),
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
        merge(together, publish, restrict)(
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
    launch,
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
    """``dsv41.ops.index_topk`` by ``launch``: of everything, of the candidates, or of both, one by one."""
    if q.shape[0] == 0:
        return
    if page_table.numel() == 0 or keys.numel() == 0:
        ids.fill_(-1)
        new_candidates.fill_(-1)
        return
    few = (q, q_scale, head_weights, request_ids, visible, keys, layout, page_table)
    if candidates is None or new_candidates.shape[1]:
        launch(*few, None, block_size, ids, new_candidates, scratch)
    if candidates is not None and candidates.shape[1]:
        launch(*few, candidates, block_size, ids, new_candidates[:, :0], scratch)
    elif candidates is not None:
        ids.fill_(-1)
