"""Engram tables spread over the hosts of several ranks, read by remote access through DeepEP."""

from collections.abc import Sequence
from typing import Any

import torch

from .._op import check, check_tensor, check_values
from ..formats import E4M3, E8M0
from ..ops.engram import engram_lookup
from .engram import EngramStore


class RemoteEngramStore(EngramStore):
    """One layer's table in the buffers of all ranks. Made by `spread`.

    Args:
        buffer: a ``deep_ep.ElasticBuffer`` that holds this rank's share.
        num_rows: rows of the layer's table.
        head_dim: values a row.
        first: number of the table's first row in the buffers.
    """

    def __init__(self, buffer: Any, num_rows: int, head_dim: int, first: int):
        self.buffer, self.num_rows, self.head_dim, self.first = buffer, num_rows, head_dim, first

    def lookup(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        name = "EngramStore.lookup"
        check_tensor(name, "rows", rows, (None, None), torch.int32)
        if check_values() and rows.numel():
            most = int(rows.max())
            check(most < self.num_rows, name, f"rows: below {self.num_rows}", most)
        if not rows.numel():
            shape = (rows.shape[0], rows.shape[1] * self.head_dim)
            return rows.new_empty(shape, dtype=torch.bfloat16) if out is None else out
        # The library knows no row that is not there: it fetches the first, and the lookup reads zeros.
        wanted = (rows.clamp(min=0) + self.first).contiguous()
        values, packs = self.buffer.engram_fetch(wanted)()
        values = values.reshape(-1, self.head_dim)  # in the buffer, until the next fetch
        codes = packs.contiguous().view(torch.uint8).view(values.shape[0], -1)
        place = torch.arange(values.shape[0], dtype=torch.int32, device=rows.device).view_as(rows)
        return engram_lookup(torch.where(rows >= 0, place, -1), values, codes.view(E8M0), out=out)


def share_rows(num_rows: int, ranks: int) -> int:
    """Rows that every rank holds: all shares are equal, the last ones padded."""
    return -(-num_rows // ranks)


def spread(
    buffer: Any,
    tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device | str = "cuda",
) -> list[RemoteEngramStore]:
    """Write this rank's share of the tables into its buffer; every rank calls it at once.

        size = deep_ep.ElasticBuffer.get_engram_storage_size_hint(share_rows(rows of all tables, ranks),
            head_dim, most tokens * columns, torch.float8_e4m3fn)
        buffer = deep_ep.ElasticBuffer(group, num_bytes=sum(size), num_cpu_bytes=size[1], ...)
        for layer, store in zip(cfg.engram.layers, spread(buffer, tables)):
            model.attach_engram(layer, store)

    Args:
        buffer: a ``deep_ep.ElasticBuffer`` with host memory for a share. Ranks hold runs of rows of the
            tables laid one behind the other: 24.6 GB each with 8 ranks.
        tables: of each layer values [num_rows, head_dim] float8_e4m3fn and scale [num_rows, head_dim/32]
            float8_e8m0fnu, on a host: mapped files do. Only this rank's rows of the values are read, and all
            scales: the library keeps those on every device (6.1 GB).
        device: that the share passes through; the library copies from there.

    Returns:
        A store a table.

    Errors: ValueError for tables of different widths, or one that is no multiple of 128. Adapter: tested
        against a stand-in, never run; DeepEP calls this part of it experimental.
    """
    name, total = "spread", sum(len(values) for values, _ in tables)
    check(len(tables) > 0, name, "at least one table", "none")
    width = tables[0][0].shape[-1]
    check(width % 128 == 0, name, "head_dim: a multiple of 128", width)
    for values, scale in tables:
        check_tensor(name, "values", values, (None, width), E4M3)
        check_tensor(name, "scale", scale, (len(values), width // 32), E8M0)
    each = share_rows(total, buffer.num_ranks)
    begin = buffer.rank_idx * each
    own = torch.zeros((each, width), dtype=torch.uint8, device=device)
    codes = torch.zeros((each * buffer.num_ranks, width // 32), dtype=torch.uint8, device=device)
    stores, first = [], 0
    for values, scale in tables:
        rows = len(values)
        codes[first : first + rows].copy_(scale.view(torch.uint8))
        low, high = max(first, begin), min(first + rows, begin + each)
        if low < high:
            own[low - begin : high - begin].copy_(values[low - first : high - first].view(torch.uint8))
        stores.append(RemoteEngramStore(buffer, rows, width, first))
        first += rows
    buffer.engram_write(own.view(E4M3), sf=codes.view(torch.int32))
    return stores
