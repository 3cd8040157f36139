"""Engram rows of other ranks through a stand-in for DeepEP's buffer: shares, numbering, what it is given."""

from typing import Any

import pytest
import torch

from dsv41.formats import E4M3, E8M0
from dsv41.layers.engram import MemoryEngramStore
from dsv41.layers.engram_remote import share_rows, spread
from tests.ops.rows import assert_refused, same

WIDTH, COLUMNS = 128, 3


class Buffer:
    """Holds what each rank wrote; a fetch reads the owner's share and refuses what the library would."""

    def __init__(self, shares: list[Any], rank: int):
        self.shares, self.rank_idx, self.num_ranks = shares, rank, len(shares)

    def engram_write(self, storage: torch.Tensor, sf: torch.Tensor | None = None) -> None:
        assert storage.dtype == E4M3 and storage.is_contiguous() and sf is not None and sf.is_contiguous()
        assert sf.dtype == torch.int32 and len(sf) == len(storage) * self.num_ranks
        self.shares[self.rank_idx], self.sf = storage, sf

    def engram_fetch(self, indices: torch.Tensor) -> Any:
        assert indices.dtype == torch.int32 and indices.is_contiguous() and int(indices.min()) >= 0
        each, flat = len(self.shares[0]), indices.flatten().long()
        data = torch.stack([self.shares[i // each].view(torch.uint8)[i % each] for i in flat.tolist()])
        return lambda: (data.view(E4M3).view(len(indices), -1), self.sf[flat].view(len(indices), -1))


def make_table(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.randint(110, 140, (rows, WIDTH // 32), dtype=torch.uint8)
    return torch.randn(rows, WIDTH).to(E4M3), scale.view(E8M0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_of_every_rank_are_those_of_the_table(ranks: int) -> None:
    """Two tables one behind the other, shares that end inside them, padding behind the last."""
    tables, shares = [make_table(11), make_table(12)], [None] * ranks
    stores = [spread(Buffer(shares, rank), tables, "cpu") for rank in range(ranks)]
    assert {len(share) for share in shares} == {share_rows(23, ranks)}  # pyright: ignore[reportArgumentType]
    for index, (values, scale) in enumerate(tables):
        rows = torch.randint(-1, len(values), (9, COLUMNS), dtype=torch.int32)
        rows[0], rows[1, 0], rows[1, 1] = -1, 0, len(values) - 1
        want = MemoryEngramStore(values, scale).lookup(rows)
        for store in stores:
            assert same(store[index].lookup(rows), want)
            out = torch.full_like(want, torch.nan)
            assert store[index].lookup(rows, out) is out and same(out, want)
            assert store[index].lookup(rows[:0]).shape == (0, COLUMNS * WIDTH)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, (values, scale) = Buffer([None], 0), make_table(7)
    (store,) = spread(buffer, [(values, scale)], "cpu")
    assert_refused(lambda: spread(buffer, []), "spread: expected at least one table, got none")
    narrow = (values[:, :64].contiguous(), scale[:, :2].contiguous())
    assert_refused(lambda: spread(buffer, [narrow]), "head_dim: a multiple of 128, got 64")
    assert_refused(lambda: spread(buffer, [(values, scale[:6])]), r"scale: \[7, 4\] float8_e8m0fnu")
    assert_refused(lambda: store.lookup(torch.zeros(2, 3)), r"rows: \[\*, \*\] int32")
    monkeypatch.setenv("DSV41_CHECK", "1")
    rows = torch.full((1, COLUMNS), 7, dtype=torch.int32)
    assert_refused(lambda: store.lookup(rows), "rows: below 7, got 7")
