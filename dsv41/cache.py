"""Cache records and paged views over the caller's memory.

The byte layouts are one table (`Record`); a `PagedKV` is a tensor of pages that the caller owns plus the
layout of its records. Entries are addressed by slot, ``page * page_size + offset``; slot -1 is "none".
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from dsv41_reference import cache as _reference

from ._op import check, check_sizes, check_tensor, check_values

LAYOUTS = ("mxfp8", "nvfp4", "mxfp4", "v4", "fp8", "bf16")


@dataclass(frozen=True)
class Record:
    """How one vector of ``dim`` values is stored.

    =========  =============  =================================================================
    layout     bytes          content
    =========  =============  =================================================================
    mxfp8      528            512 E4M3, 16 UE8M0 (per 32); token after token
    nvfp4      288            256 E2M1 pairs, 32 E4M3 scales (per 16); token after token
    mxfp4      68 (dim 128)   64 E2M1 pairs, 4 UE8M0; a page: all values, then all scales
    v4         584            448 E4M3, 64 bf16, 7 UE8M0 (per 64), a zero; split as mxfp4
    fp8        132 (dim 128)  128 E4M3, one f32 scale; split as mxfp4
    bf16       1024           plain rows
    =========  =============  =================================================================

    Bytes are of the real widths: dim 512, index keys dim 128.

    Older builds of other engines stored 528- and 288-byte records split by page: the same size, not the same
    bytes. They have no tag here and cannot be read by mistake.
    """

    layout: str
    dim: int

    def __post_init__(self) -> None:
        known = isinstance(self.layout, str) and self.layout in LAYOUTS
        check(known, "Record", f"layout: one of {', '.join(LAYOUTS)}", self.layout)
        check_sizes("Record", 1, 2**31 - 1, dim=self.dim)
        multiple = {"mxfp8": 32, "nvfp4": 16, "mxfp4": 32, "v4": 64, "fp8": 1, "bf16": 1}[self.layout]
        least = 128 if self.layout == "v4" else 1
        good = self.dim % multiple == 0 and self.dim >= least
        check(good, "Record", f"dim: a multiple of {multiple}, at least {least}, for {self.layout}", self.dim)

    @property
    def bytes(self) -> int:
        """Bytes of one record, scales included."""
        values, scales, _ = _reference.record_bytes(self.layout, self.dim)
        return values + scales


@dataclass(frozen=True)
class PagedKV:
    """Pages of records in the caller's memory.

    Args:
        pages: [num_pages, page_size, record.bytes] uint8. The page stride (``pages.stride(0)``, bytes) is
            free: several caches may be strided views of one allocation. The two inner dimensions are
                contiguous.
        record: layout and width of the records.
    """

    pages: torch.Tensor
    record: Record

    def __post_init__(self) -> None:
        p = self.pages
        check(isinstance(self.record, Record), "PagedKV", "record: Record", self.record)
        check(isinstance(p, torch.Tensor), "PagedKV", "pages: a tensor", p)
        width = self.record.bytes
        good = p.dim() == 3 and p.dtype == torch.uint8 and p.shape[2] == width
        check(good, "PagedKV", f"pages: [num_pages, page_size, {width}] uint8 ({self.record.layout})", p)
        strides = (p.stride(1) == width or p.shape[1] == 1) and p.stride(2) == 1
        check(strides, "PagedKV", f"pages: contiguous within a page, strides (*, {width}, 1)", p.stride())
        apart = p.shape[0] < 2 or p.stride(0) >= p.shape[1] * width
        check(apart, "PagedKV", f"a page stride of at least {p.shape[1] * width} bytes", p.stride(0))
        check(p.shape[0] * p.shape[1] < 2**31, "PagedKV", "fewer than 2^31 slots (ids are int32)", p)

    @property
    def page_size(self) -> int:
        """Records a page."""
        return self.pages.shape[1]

    @property
    def num_slots(self) -> int:
        """Records that fit; slots count from 0."""
        return self.pages.shape[0] * self.pages.shape[1]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Records at ``slots`` [N] (int) as f32 [N, dim]; zeros where the slot is negative. For tests and
        tools.
        """
        check_tensor("PagedKV.read", "slots", slots, (None,), torch.int32, torch.int64, like=self.pages)
        return _reference.read_rows(self.pages, self.record.layout, self.record.dim, slots)


def page_slots(
    entry_ids: torch.Tensor, request_ids: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots of entries counted within their request.

    Args:
        entry_ids: [num_tokens, n] int, -1 for none.
        request_ids: [num_tokens] int, rows of the table; -1 for none.
        page_table: [num_requests, max_pages] int32, -1 where no page is held.
        page_size: entries a page.

    Returns:
        [num_tokens, n] int32; -1 for none, and for entries that no page holds.

    Contract: no host sync; any device.
    """
    name, whole = "page_slots", (torch.int32, torch.int64)
    check_tensor(name, "page_table", page_table, (None, None), *whole)
    check_tensor(name, "request_ids", request_ids, (None,), *whole, like=page_table)
    check_tensor(name, "entry_ids", entry_ids, (len(request_ids), None), *whole, like=page_table)
    check_sizes(name, 1, page_size=page_size)
    if check_values() and page_table.numel():
        most = int(page_table.max())
        check((most + 1) * page_size <= 2**31, name, "slots of 31 bits", f"page {most} of {page_size}")
    return PageRows.of(request_ids, page_table).slots(entry_ids, page_size)


class PageRows(NamedTuple):
    """What `page_slots` needs of the requests of a step's rows, for several calls.

    table: the page table with one row and one column of -1 more; at index -1 too, there look all that have no
        request or no page.
    rows: [num_tokens, 1] int64, rows of it.
    """

    table: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def of(request_ids: torch.Tensor, page_table: torch.Tensor) -> "PageRows":
        """Of [num_tokens] int requests, -1 for none."""
        table = torch.nn.functional.pad(page_table, (0, 1, 0, 1), value=-1)
        return PageRows(table, request_ids.clamp(-1, page_table.shape[0])[:, None].long())

    def slots(self, entry_ids: torch.Tensor, page_size: int) -> torch.Tensor:
        """As `page_slots`."""
        # Written as int64: an index of another type would be copied into one.
        page = torch.empty(entry_ids.shape, dtype=torch.int64, device=entry_ids.device)
        torch.div(entry_ids, page_size, rounding_mode="floor", out=page)
        number = self.table[self.rows, page.clamp_(-1, self.table.shape[1] - 1)]
        return torch.add(entry_ids % page_size, number, alpha=page_size).clamp_(min=-1).to(torch.int32)
