"""Rows between ranks: which go where, the records that travel, and the sum when they are back."""

import torch

from .numerics import accumulator, bf16, wide

HEADER = 16  # bytes of a record in front of the values: weight f32, local slot int32, eight spare


def exchange_plan(
    slots: torch.Tensor,
    num_ranks: int,
    slots_per_rank: int,
    capacity: int,
    place: torch.Tensor,
    source: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.exchange_plan``: a stable sort of the pairs by rank."""
    flat = slots.flatten().long()
    valid = (flat >= 0) & (flat < num_ranks * slots_per_rank)
    rank = torch.where(valid, flat // slots_per_rank, num_ranks)
    order = rank.argsort(stable=True)
    total = torch.zeros(num_ranks + 1, dtype=torch.int64, device=flat.device)
    total.scatter_add_(0, rank, torch.ones_like(rank))
    first = total.cumsum(0) - total
    begin = capacity * torch.arange(num_ranks + 1, device=flat.device) if capacity else first
    ranked = rank[order]
    nth = torch.arange(len(flat), device=flat.device) - first[ranked]
    sent = (ranked < num_ranks) & (nth < capacity if capacity else True)
    row = torch.where(sent, begin[ranked] + nth, -1)
    place.view(-1)[order] = row.to(torch.int32)
    source.fill_(-1)
    source[row[sent]] = order[sent].to(torch.int32)
    counts.copy_(total[:num_ranks])


def exchange_pack(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weights: torch.Tensor,
    slots: torch.Tensor,
    source: torch.Tensor,
    slots_per_rank: int,
    records: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.exchange_pack``."""
    hidden = x.shape[1]
    records.zero_()
    records[:, 4:8] = torch.full((1,), -1, dtype=torch.int32, device=x.device).view(torch.uint8)
    row = (source >= 0).nonzero()[:, 0]
    pair = source[row].long()
    token = pair // slots.shape[1]
    local = (slots.flatten()[pair] % slots_per_rank).to(torch.int32)
    parts = weights.flatten()[pair], local, x[token], x_scale[token]
    at = 0
    for part, width in zip(parts, (4, 4, hidden, hidden // 32), strict=True):
        records[row, at : at + width] = part.contiguous().view(torch.uint8).view(len(row), width)
        at += width if at != 4 else HEADER - 4


def exchange_pack_fixed(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weights: torch.Tensor,
    slots: torch.Tensor,
    num_ranks: int,
    slots_per_rank: int,
    capacity: int,
    place: torch.Tensor,
    lost: torch.Tensor,
    records: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.exchange_pack_fixed``: plan and pack."""
    source = torch.empty(len(records), dtype=torch.int32, device=x.device)
    counts = torch.empty_like(lost)
    exchange_plan(slots, num_ranks, slots_per_rank, capacity, place, source, counts)
    exchange_pack(x, x_scale, weights, slots, source, slots_per_rank, records)
    lost += (counts - capacity).clamp(min=0)


def exchange_unpack(
    records: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.exchange_unpack``."""
    hidden, rows = values.shape[1], len(records)
    for out, at, width in (
        (weights, 0, 4),
        (slots, 4, 4),
        (values, HEADER, hidden),
        (scale, HEADER + hidden, hidden // 32),
    ):
        part = records[:, at : at + width].contiguous()
        out.view(torch.uint8).view(rows, width).copy_(part)


def exchange_combine(
    rows: torch.Tensor, place: torch.Tensor, shared: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Reference of ``dsv41.ops.exchange_combine``: the end of ``mxfp4_moe``, over rows that travelled."""
    total = torch.zeros(out.shape, dtype=accumulator(), device=out.device)
    for column in range(place.shape[1]):
        at = place[:, column].long()
        if len(rows):
            total += torch.where(at[:, None] >= 0, wide(rows[at.clamp(min=0)]), 0)
    out.copy_(bf16(total if shared is None else total + wide(shared)))
