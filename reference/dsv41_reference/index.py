"""Indexer: which compressed entries each query attends."""

import torch

from .cache import in_range, read_rows
from .norm_rope import rotate
from .numerics import bf16, matmul, narrow, wide
from .quant import from_mxfp4, to_mxfp4

_BLOCK = 256  # queries scored at a time, to bound the scores in memory


def index_query(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, values: torch.Tensor, scale: torch.Tensor
) -> None:
    """Reference of ``dsv41.ops.index_query``."""
    q, code = to_mxfp4(bf16(rotate(x, cos, sin)))
    values.copy_(q)
    scale.copy_(code)


def topk_mask(score: torch.Tensor, k: int) -> torch.Tensor:
    """bool [rows, n]: the k largest of each row; -inf and NaN never, equal scores by the lower index."""
    score = torch.where(score.isnan(), -torch.inf, score)
    allowed = score > -torch.inf
    if score.shape[1] <= k:
        return allowed
    edge = score.topk(k, -1).values[:, -1:]
    above = score > edge
    equal = allowed & (score == edge)
    return above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def mask_to_ids(mask: torch.Tensor, ids: torch.Tensor) -> None:
    """Write the set columns of each row of ``mask`` [rows, n] ascending into ``ids`` [rows, k], then -1."""
    ids.fill_(-1)
    row, column = mask.nonzero(as_tuple=True)
    rank = mask.cumsum(-1)[row, column] - 1
    ids[row, rank] = column.to(ids.dtype)


def topk(scores: torch.Tensor, lens: torch.Tensor, ids: torch.Tensor, scratch: torch.Tensor) -> None:
    """Reference of ``dsv41.ops.topk``."""
    visible = torch.arange(scores.shape[1], device=scores.device) < lens[:, None]
    mask_to_ids(topk_mask(torch.where(visible, scores, -torch.inf), ids.shape[1]), ids)


def index_scores(
    q: torch.Tensor, q_scale: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """sum_h w[t, h] * relu(<q[t, h], key[j]>) as f32 [num_tokens, n].

    Args:
        q: [num_tokens, heads, dim/2] packed E2M1, q_scale: [num_tokens, heads, dim/32] codes.
        head_weights: [num_tokens, heads] f32, keys: [n, dim] f32.
    """
    tokens, heads = head_weights.shape
    dots = matmul(from_mxfp4(q, q_scale).flatten(0, 1), keys).view(tokens, heads, -1).clamp(min=0)
    return narrow((wide(head_weights)[:, None, :] @ dots)[:, 0], torch.float32)


def candidate_mask(score: torch.Tensor, visible: torch.Tensor, block_size: int, blocks: int) -> torch.Tensor:
    """bool [rows, ceil(n / block_size)]: the best blocks by their best visible score, the newest one pinned.

    Args:
        score: [rows, n], -inf where not visible; visible: [rows] how many entries each query sees.
    """
    score = torch.where(score.isnan(), -torch.inf, score)
    padding = -score.shape[1] % block_size
    best = (
        torch.nn.functional.pad(score, (0, padding), value=-torch.inf).unflatten(1, (-1, block_size)).amax(-1)
    )
    newest = (visible.long() - 1).clamp(min=0) // block_size
    pinned = torch.arange(best.shape[1], device=score.device) == newest[:, None]
    best = torch.where(pinned & (visible > 0)[:, None], torch.inf, best)
    return topk_mask(best, blocks)


def index_topk(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    head_weights: torch.Tensor,
    request_ids: torch.Tensor,
    visible: torch.Tensor,
    keys: torch.Tensor,
    layout: str,
    page_table: torch.Tensor,
    candidates: torch.Tensor | None,
    block_size: int,
    ids: torch.Tensor,
    new_candidates: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.index_topk``."""
    dim, page_size = q.shape[2] * 2, keys.shape[1]
    ids.fill_(-1)
    new_candidates.fill_(-1)
    for request in request_ids.unique().tolist():
        rows = (request_ids == request).nonzero()[:, 0]
        # What the table has no room for, and a request that it does not have, is not visible.
        known = 0 <= request < page_table.shape[0]
        count = min(int(visible[rows].max()), page_table.shape[1] * page_size) if known else 0
        if count <= 0:
            continue
        entries = torch.arange(count, device=q.device)
        page = page_table[request, entries // page_size].long()
        slots = torch.where(page >= 0, page * page_size + entries % page_size, -1)
        slots = torch.where(in_range(keys, slots), slots, -1)
        stored = read_rows(keys, layout, dim, slots)
        for block in rows.split(_BLOCK):
            seen = visible[block]
            score = index_scores(q[block], q_scale[block], head_weights[block], stored)
            score = torch.where((entries < seen[:, None]) & (slots >= 0), score, -torch.inf)
            if new_candidates.shape[1]:
                chosen = torch.full(
                    (len(block), new_candidates.shape[1]), -1, dtype=ids.dtype, device=q.device
                )
                mask_to_ids(candidate_mask(score, seen, block_size, new_candidates.shape[1]), chosen)
                new_candidates[block] = chosen
            if candidates is not None:
                kept = torch.zeros(
                    (len(block), -(-count // block_size) + 1), dtype=torch.bool, device=q.device
                )
                named = candidates[block].long() + 1
                kept.scatter_(1, torch.where(named < kept.shape[1], named, 0).clamp(min=0), True)  # 0: none
                score = torch.where(
                    kept[:, 1:].repeat_interleave(block_size, 1)[:, :count], score, -torch.inf
                )
            chosen = torch.full((len(block), ids.shape[1]), -1, dtype=ids.dtype, device=q.device)
            mask_to_ids(topk_mask(score, ids.shape[1]), chosen)
            ids[block] = chosen
