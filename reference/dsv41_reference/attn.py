"""Sparse attention over cache records: a window set and a compressed set in one softmax with one sink."""

import torch

from .cache import read_rows
from .numerics import bf16, matmul, narrow, wide

_BLOCK = (
    64  # queries attended at a time: they share one dense product over the records that any of them reads
)


def _gather(
    pages: torch.Tensor, layout: str, dim: int, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Records that a block of queries reads, [n, dim], and which query reads which, bool [queries, n]."""
    slots, column = ids.unique(return_inverse=True)
    mask = torch.zeros((len(ids), len(slots)), dtype=torch.bool, device=ids.device)
    mask.scatter_(1, column, True)
    return read_rows(pages, layout, dim, slots), mask & (slots >= 0)


def attend(
    q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [rows, heads, dim] over kv [n, dim] (keys and values) where mask [rows, n] is set.

    The sink is one more logit of the softmax with no value; it is not multiplied by the scale. Numerator terms
    are rounded to bf16, the denominator's are not.

    Returns:
        out [rows, heads, dim] and log-sum-exp over the keys alone [rows, heads], in the accumulation dtype.
        A row that reads nothing is 0 and -inf; a row that reads a non-finite record is NaN, and no other row.
    """
    rows, heads, _ = q.shape
    bad = ~kv.isfinite().all(-1)
    kv = torch.where(bad[:, None], 0, kv)
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
    out = torch.where(denominator[..., None] > 0, values / denominator[..., None], 0)
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
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.sparse_attn``."""
    dim = q.shape[2]
    for start in range(0, len(q), _BLOCK):
        rows = slice(start, start + _BLOCK)
        kv, mask = _gather(window, window_layout, dim, window_ids[rows])
        if compressed is not None and compressed_ids is not None:
            more_kv, more_mask = _gather(compressed, compressed_layout, dim, compressed_ids[rows])
            kv, mask = torch.cat([kv, more_kv]), torch.cat([mask, more_mask], 1)
        block, block_lse = attend(q[rows], kv, mask, sink, scale)
        out[rows] = bf16(block)
        if lse.numel():
            lse[rows] = narrow(block_lse, lse.dtype)
