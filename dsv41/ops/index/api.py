"""Indexer: query preparation and the choice of compressed entries."""

from typing import Any

import torch

from ..._op import Kernel, Op, check, check_sizes, check_tensor, check_values, output, workspace
from ...cache import PagedKV
from ...formats import MXFP4
from ..norm_rope.api import check_rope_table
from ..quant.api import quantised_output

GRID = 264  # blocks of the CUDA kernels, two a multiprocessor of Hopper; the result does not depend on it
MOST, MOST_BLOCKS = 512, 2048  # entries and blocks that they choose for a query at most
ROOM, BLOCK_ROOM = 768, 2560  # what a list in the scratch holds of each: some more, which saves passes


def rows_together(num_tokens: int, publish: bool, restrict: bool) -> int:
    """Queries that share a pass over the keys where they belong to one request. Depends on sizes only."""
    if restrict or num_tokens <= 128:
        return 1
    return 4 if publish else 6


def _lists(num_tokens: int, publish: bool) -> int:
    """Lists in the scratch: two a block and query of a group."""
    together = rows_together(num_tokens, publish, False)
    return 2 * together * GRID // (1 if together == 1 else 2)


def topk_scratch(num_rows: int) -> int:
    """Bytes of scratch that ``topk`` needs on an accelerator: 3.2 MB, whatever the sizes."""
    check_sizes("topk_scratch", num_rows=num_rows)
    return 2 * GRID * (8 * ROOM + 4)


def index_topk_scratch(num_tokens: int, num_candidates: int = 0) -> int:
    """Bytes of scratch that ``index_topk`` needs on an accelerator, a pure function of the sizes.

    9.8 MB at most, 28.2 MB when blocks are published; the context does not matter.
    """
    check_sizes("index_topk_scratch", num_tokens=num_tokens, num_candidates=num_candidates)
    room = ROOM + (BLOCK_ROOM if num_candidates else 0)
    return _lists(num_tokens, num_candidates > 0) * (8 * room + 8)


def _query_hopper(x: Any, cos: Any, sin: Any, values: Any, scale: Any) -> str | None:
    if x.shape[2] % 32 or cos.shape[1] % 4 or x.data_ptr() % 16 or x.stride(0) % 8 or x.stride(1) % 8:
        return "heads 16 bytes apart, widths a multiple of 32, RoPE on a multiple of 8"
    return None if values.is_contiguous() and scale.is_contiguous() else "contiguous values and scale"


def _topk_hopper(scores: Any, lens: Any, ids: Any, *rest: Any) -> str | None:
    return None if ids.shape[1] <= MOST else f"k up to {MOST}, got {ids.shape[1]}"


def _hopper(
    q: Any, q_scale: Any, weights: Any, requests: Any, visible: Any, keys: Any, layout: Any, table: Any,
    candidates: Any, block_size: Any, ids: Any, blocks: Any, scratch: Any,
) -> str | None:  # fmt: skip
    if q.shape[2] != 64 or q.shape[1] > 32:
        return f"up to 32 heads of width 128, got {q.shape[1]} of {2 * q.shape[2]}"
    if layout not in ("mxfp4", "fp8"):
        return f"mxfp4 or fp8 keys, got {layout}"
    if keys.shape[1] % 4 or keys.stride(0) % 16 or keys.data_ptr() % 16:
        return (
            f"pages of a multiple of 4 keys, 16 bytes apart, got {keys.shape[1]} and {keys.stride(0)} bytes"
        )
    if ids.shape[1] > MOST or blocks.shape[1] > MOST_BLOCKS:
        return f"top_k up to {MOST} and num_candidates up to {MOST_BLOCKS}"
    blocked = candidates is not None or blocks.shape[1] > 0
    if blocked and (block_size not in (4, 8) or keys.shape[1] % block_size):
        return f"candidate blocks of 4 or 8 within a page, got {block_size} and {keys.shape[1]}"
    tensors = (
        q,
        q_scale,
        weights,
        requests,
        visible,
        ids,
        blocks,
        *(() if candidates is None else (candidates,)),
    )
    return (
        None if all(x.is_contiguous() for x in tensors) else "contiguous tensors beside keys and page table"
    )


def _sm100(
    q: Any, q_scale: Any, weights: Any, requests: Any, visible: Any, keys: Any, layout: Any, *rest: Any
) -> str | None:
    if layout != "mxfp4":
        return f"mxfp4 keys, got {layout}"
    if q.data_ptr() % 8 or q_scale.data_ptr() % 4:
        return "queries at a multiple of 8 bytes, their scales of 4"
    return _hopper(q, q_scale, weights, requests, visible, keys, layout, *rest)


def _ascend(
    q: Any, q_scale: Any, weights: Any, requests: Any, visible: Any, keys: Any, layout: str, table: Any,
    candidates: Any, block_size: int, ids: Any, blocks: Any, scratch: Any,
) -> str | None:  # fmt: skip
    if q.shape[2] % 32 or 128 % q.shape[1]:
        return f"1 to 128 heads, a power of two, of a multiple of 64, got {q.shape[1]} of {2 * q.shape[2]}"
    if layout not in ("mxfp4", "fp8"):
        return f"mxfp4 or fp8 keys, got {layout}"
    if ids.shape[1] > MOST_BLOCKS or blocks.shape[1] > MOST_BLOCKS:
        return f"top_k and num_candidates up to {MOST_BLOCKS}, got {ids.shape[1]} and {blocks.shape[1]}"
    if 128 % block_size and (candidates is not None or blocks.shape[1]):
        return f"candidate blocks of a power of two up to 128, got {block_size}"
    given = [x for x in (q, q_scale, weights, requests, visible, candidates) if x is not None]
    return None if all(x.is_contiguous() for x in given) else "contiguous tensors beside keys and page table"


def _deepgemm(
    q: Any, q_scale: Any, weights: Any, requests: Any, visible: Any, keys: Any, layout: str, page_table: Any,
    candidates: Any, block_size: int, ids: Any, blocks: Any, scratch: Any,
) -> str | None:  # fmt: skip
    if layout != "mxfp4" or keys.shape[1] != 64 or not keys.is_contiguous():
        return f"contiguous pages of 64 mxfp4 keys, got {layout}, pages of {keys.shape[1]}, {keys.stride()}"
    if not keys.shape[0] or ids.shape[1] > MOST:
        return f"at least one page and top_k up to {MOST}, got {keys.shape[0]} and {ids.shape[1]}"
    if q.shape[1] not in (32, 64) or q.shape[2] != 64:
        return f"32 or 64 heads of width 128, got {q.shape[1]} of {2 * q.shape[2]}"
    if candidates is not None or blocks.shape[1]:
        return "no candidate blocks"
    return None


_QUERY = Op(
    "index_query(Tensor x, Tensor cos, Tensor sin, Tensor(a!) values, Tensor(b!) scale) -> ()",
    reference="dsv41_reference.index:index_query",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), supports=_query_hopper),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu")),
    ),
)
_TOPK = Op(
    "topk(Tensor scores, Tensor lens, Tensor(a!) ids, Tensor(b!) scratch) -> ()",
    reference="dsv41_reference.index:topk",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), supports=_topk_hopper),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu")),
    ),
)
_INDEX_TOPK = Op(
    "index_topk(Tensor q, Tensor q_scale, Tensor head_weights, Tensor request_ids, Tensor visible,"
    " Tensor keys, str layout, Tensor page_table, Tensor? candidates, int block_size, Tensor(a!) ids,"
    " Tensor(b!) new_candidates, Tensor(c!) scratch) -> ()",
    reference="dsv41_reference.index:index_topk",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), archs=(90,), supports=_hopper),
        Kernel("deepgemm_cuda", "cuda", needs=("deep_gemm",), archs=(100, 103), supports=_deepgemm),
        Kernel("tilelang_sm100_cuda", "cuda", needs=("tilelang",), archs=(100, 103), supports=_sm100),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=_ascend),
    ),
)


def index_query(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, out: MXFP4 | None = None) -> MXFP4:
    """Rotate and quantise index queries.

        out = MXFP4 of RoPE(x), rounded to bf16 in between

    Args:
        x: [num_tokens, index_heads, index_dim] bf16.
        cos: [num_tokens, rope_dim/2] f32.
        sin: [num_tokens, rope_dim/2] f32.
        out: MXFP4 view to write into: values [num_tokens, index_heads, index_dim/2] uint8.

    Returns:
        MXFP4; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.index.index_query
    """
    name = "index_query"
    check_tensor(name, "x", x, (None, None, None), torch.bfloat16)
    tokens, heads, dim = x.shape
    check(dim % 32 == 0, name, "x: [num_tokens, index_heads, index_dim], index_dim a multiple of 32", x)
    check_rope_table(name, cos, sin, tokens, dim, x)
    out = quantised_output(name, MXFP4, out, (tokens, heads, dim), x)
    _QUERY(x, cos, sin, *out.flat())
    return out


def topk(
    scores: torch.Tensor,
    lens: torch.Tensor,
    *,
    k: int,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """The k largest of each row's first ``lens`` scores, as ascending indices.

    Args:
        scores: [num_rows, n] f32.
        lens: [num_rows] int32, how many scores of each row count; below 0 is 0.
        k: indices a row.
        out: [num_rows, k] int32 to write into.
        scratch: [n] uint8, at least ``topk_scratch(...)`` bytes; contents need no preparation.

    Returns:
        [num_rows, k] int32, ascending, padded with -1. Equal scores go to the lower index; NaN and -inf are
        never chosen.

    Contract: no host sync on accelerators; graph-safe; allocates only what is None; the same bits on every
        run.
    Reference: dsv41_reference.index.topk
    """
    check_tensor("topk", "scores", scores, (None, None), torch.float32)
    check_tensor("topk", "lens", lens, (scores.shape[0],), torch.int32, like=scores)
    check_sizes("topk", 1, k=k)
    out = output("topk", out, (scores.shape[0], k), torch.int32, scores)
    _TOPK(scores, lens, out, workspace("topk", scratch, topk_scratch(scores.shape[0]), scores))
    return out


def index_topk(
    q: MXFP4,
    head_weights: torch.Tensor,
    request_ids: torch.Tensor,
    visible: torch.Tensor,
    keys: PagedKV,
    page_table: torch.Tensor,
    *,
    top_k: int,
    candidates: torch.Tensor | None = None,
    num_candidates: int = 0,
    block_size: int = 1,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score every visible entry and keep the best ``top_k`` of each query.

        score[t, j] = sum_h head_weights[t, h] * relu(<q[t, h], key[j]>), f32

    Args:
        q: MXFP4: values [num_tokens, index_heads, index_dim/2] uint8.
        head_weights: [num_tokens, index_heads] f32.
        request_ids: [num_tokens] int32, rows of the page table; -1 is a padding row.
        visible: [num_tokens] int32, how many entries of its request each query sees: (position + 1) // ratio;
            below 0 is 0.
        keys: PagedKV of index keys.
        page_table: [num_requests, max_pages] int32, pages of each request in order, -1 where none is held.
        top_k: entries a query.
        candidates: [num_tokens, n] int32, blocks of entries that this selection is restricted to, distinct,
            ascending, -1 padded.
        num_candidates: when positive, also publish each query's best blocks: the largest score of a block
            ranks it, and the block of the query's newest entry is always in. Not restricted by
            ``candidates``.
        block_size: entries a block.
        out: [num_tokens, top_k] int32 to write into.
        scratch: [n] uint8, at least ``index_topk_scratch(...)`` bytes; contents need no preparation.

    Returns:
        ids [num_tokens, top_k] int32 within the request, ascending, -1 padded: all visible entries when there
        are no more than top_k; ties to the lower entry; NaN never chosen. And the published blocks
        [num_tokens, num_candidates] int32, ascending, -1 padded.

    Contract: no host sync on accelerators; graph-safe; allocates only what is None; the same bits on every
        run.
    Reference: dsv41_reference.index.index_topk
    """
    name = "index_topk"
    check(
        isinstance(q, MXFP4) and q.values.dim() == 3,
        name,
        "q: MXFP4 [num_tokens, index_heads, index_dim/2]",
        q,
    )
    check(isinstance(keys, PagedKV), name, "keys: PagedKV", keys)
    tokens, heads, half = q.values.shape
    check(keys.record.dim == 2 * half, name, f"keys: records of width {2 * half}", keys.record)
    check(q.values.device == keys.pages.device, name, f"q on {keys.pages.device}", f"{q.values.device}")
    check_tensor(name, "head_weights", head_weights, (tokens, heads), torch.float32, like=q.values)
    check_tensor(name, "request_ids", request_ids, (tokens,), torch.int32, like=q.values)
    check_tensor(name, "visible", visible, (tokens,), torch.int32, like=q.values)
    check_tensor(name, "page_table", page_table, (None, None), torch.int32, like=q.values)
    check_sizes(name, 1, top_k=top_k, block_size=block_size)
    check_sizes(name, num_candidates=num_candidates)
    if candidates is not None:
        check_tensor(name, "candidates", candidates, (tokens, None), torch.int32, like=q.values)
    if check_values() and tokens:
        room = page_table.shape[1] * keys.page_size
        seen = visible.where(request_ids >= 0, 0)
        t, most = int(seen.argmax()), int(seen.max())
        got = f"{most} (token {t}, request {int(request_ids[t])})"
        check(most <= room, name, f"visible: at most {room} (the page table)", got)
        rows = page_table.shape[0]
        check(int(request_ids.max()) < rows, name, f"request_ids: below {rows}", int(request_ids.max()))
        good = int(page_table.max()) < keys.pages.shape[0] if page_table.numel() else True
        check(good, name, f"page_table: pages below {keys.pages.shape[0]}", page_table)
    out = output(name, out, (tokens, top_k), torch.int32, q.values)
    published = output(name, None, (tokens, num_candidates), torch.int32, q.values)
    flat = (*q.flat(), head_weights, request_ids, visible, keys.pages, keys.record.layout, page_table)
    scratch = workspace(name, scratch, index_topk_scratch(tokens, num_candidates), q.values)
    _INDEX_TOPK(*flat, candidates, block_size, out, published, scratch)
    return out, published
