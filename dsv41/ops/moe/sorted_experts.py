"""Experts as two products over rows sorted by expert, for kernels that take tiles of one expert each.

Rows of an expert start at a multiple of the tile, so that buffers have room for every expert's padding: no
size is read from the device. PyTorch's operators sort, spread and add; they allocate what they need.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..quant import api as quant


def sorted_rows(expert_ids: torch.Tensor, experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each assignment's row goes, and the expert of every row (-1: padding).

    An assignment without a valid expert goes to the last row, which no expert has.
    """
    flat = expert_ids.flatten().long()
    valid = (flat >= 0) & (flat < experts)
    bucket = torch.where(valid, flat, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, bucket, torch.ones_like(bucket))
    padded = (counts[:experts] + tile - 1) // tile * tile
    ends = padded.cumsum(0)
    order = bucket.argsort(stable=True)
    before = counts.cumsum(0) - counts  # assignments of the experts before, without padding
    rank = torch.empty_like(flat)
    rank[order] = torch.arange(len(flat), device=flat.device) - before[bucket[order]]
    rows = (len(flat) + experts * (tile - 1)) // tile * tile + tile
    starts = torch.cat([ends - padded, ends.new_full((1,), rows - 1)])
    place = torch.where(valid, starts[bucket] + rank, rows - 1)
    index = torch.arange(rows, device=flat.device)
    owner = torch.searchsorted(ends, index, right=True)
    live = index < torch.cat([ends - padded + counts[:experts], ends.new_zeros(1)])[owner]
    return place, torch.where(live, owner, -1).int()


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def run(product: Product, tile: int, args: tuple[Any, ...]) -> None:
    """``mxfp4_moe`` by ``product(rows, codes, weights, weight codes, owner of every row, out)``."""
    x, x_scale, expert_ids, expert_weights, w13, w13_scale, w2, w2_scale, _, limit, shared, out, _ = args
    tokens, top_k = expert_ids.shape
    place, owner = sorted_rows(expert_ids, len(w13), tile)
    token = torch.arange(tokens, device=x.device).repeat_interleave(top_k)

    def spread(rows: torch.Tensor) -> torch.Tensor:
        """Rows of assignments at their places, zeros between them."""
        made = rows.new_zeros((len(owner), *rows.shape[1:]))
        return made.index_copy_(0, place, rows)

    def multiply(
        rows: torch.Tensor, codes: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        made = torch.empty((len(owner), weights.shape[1]), dtype=torch.bfloat16, device=x.device)
        product(rows, codes, weights, scale, owner, made)
        return made

    rows = spread(x.view(torch.uint8)[token]).view(x.dtype)
    gate_up = multiply(rows, spread(x_scale.view(torch.uint8)[token]), w13, w13_scale)
    # Rows of padding hold whatever the product left there: their weight is 0, and nobody reads them.
    inner = quant.swiglu_quantize(gate_up, limit=limit, weight=spread(expert_weights.flatten()))
    y = multiply(inner.values, inner.scale.view(torch.uint8), w2, w2_scale)
    parts = torch.where((owner[place] >= 0)[:, None], y[place], 0).unflatten(0, (tokens, top_k))
    total = parts[:, 0].float()
    for k in range(1, top_k):  # in top-k order, as the reference adds
        total += parts[:, k].float()
    out.copy_(total if shared is None else total + shared.float())
