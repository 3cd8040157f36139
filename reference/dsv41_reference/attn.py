"""Sparse attention over cache records: a window set and a compressed set in one softmax with one sink."""

import torch

from .cache import read_rows
from .norm_rope import rotate
from .numerics import bf16, matmul, narrow, wide

# Queries attended at a time share one dense product over the records that any of them reads: more of them
# waste products, fewer waste calls.
_BLOCK = 16


def read_selected(
    pages: torch.Tensor, layout: str, dim: int, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The records that any query reads, each decoded once.

    Args:
        ids: [num_tokens, n] slots, -1 for none.

    Returns:
        records [m, dim] in the accumulation dtype, and for every id its row there, [num_tokens, n], -1 for
        none.
    """
    ids = torch.where(ids < pages.shape[0] * pages.shape[1], ids, -1)  # past the cache: none
    slots, rows = ids.unique(return_inverse=True)
    none = int((slots < 0).sum())
    return wide(read_rows(pages, layout, dim, slots[none:])), (rows - none).clamp(min=-1)


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    bad: torch.Tensor,
    mask: torch.Tensor,
    sink: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [rows, heads, dim] over kv [n, dim] (keys and values) where mask [rows, n] is set.

    The sink is one more logit of the softmax with no value; it is not multiplied by the scale. Numerator
    terms are rounded to bf16, the denominator's are not. Records marked ``bad`` [n] are zeros here and stand
    for NaN.

    Returns:
        out [rows, heads, dim] and log-sum-exp over the keys alone [rows, heads], in the accumulation dtype.
        A row that reads nothing is 0 and -inf; a row that reads a bad record is NaN, and no other row.
    """
    rows, heads, _ = q.shape
    z = matmul(q.flatten(0, 1), kv).view(rows, heads, -1) * scale
    z = torch.where(mask[:, None], z, -torch.inf)
    z_top = z.amax(-1) if z.shape[-1] else z.new_full((rows, heads), -torch.inf)
    logit = wide(sink).expand(rows, heads) if sink is not None else torch.full_like(z_top, -torch.inf)
    top = torch.maximum(z_top, torch.where(logit == torch.inf, -torch.inf, logit))
    top = torch.where(top == -torch.inf, 0, top)
    e = torch.exp(z - top[..., None])
    total = e.sum(-1)
    denominator = total + torch.exp(logit - top)
    values = matmul(bf16(e).flatten(0, 1), kv.T).view(rows, heads, -1)
    out = torch.where(denominator[..., None] == 0, 0, values / denominator[..., None])
    lse = torch.log(total) + top
    spoiled = (mask & bad).any(-1)[:, None]
    return torch.where(spoiled[..., None], torch.nan, out), torch.where(spoiled, torch.nan, lse)


def sparse_attn(
    q: torch.Tensor,
    window: torch.Tensor,
    window_layout: str,
    window_ids: torch.Tensor,
    compressed: torch.Tensor | None,
    compressed_layout: str,
    compressed_ids: torch.Tensor | None,
    sink: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    scale: float,
    num_splits: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.sparse_attn``; needs no scratch and splits nothing."""
    dim = q.shape[2]
    kv, rows = read_selected(window, window_layout, dim, window_ids)
    if compressed is not None and compressed_ids is not None:
        more, more_rows = read_selected(compressed, compressed_layout, dim, compressed_ids)
        rows = torch.cat([rows, torch.where(more_rows >= 0, more_rows + len(kv), -1)], 1)
        kv = torch.cat([kv, more])
    bad = ~kv.isfinite().all(-1)
    kv = torch.where(bad[:, None], 0, kv)
    for start in range(0, len(q), _BLOCK):
        block = slice(start, start + _BLOCK)
        used, column = rows[block].unique(return_inverse=True)
        mask = torch.zeros((len(column), len(used)), dtype=torch.bool, device=q.device)
        mask.scatter_(1, column, True)
        mask &= used >= 0
        at = used.clamp(min=0)
        if not len(kv):
            at, mask = at[:0], mask[:, :0]
        result, result_lse = attend(q[block], kv[at], bad[at], mask, sink, scale)
        result = bf16(result)
        if cos is not None and sin is not None:
            result = bf16(rotate(result, cos[block], sin[block], inverse=True))
        out[block] = result
        if lse.numel():
            lse[block] = narrow(result_lse, lse.dtype)
