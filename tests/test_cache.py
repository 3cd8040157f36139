"""Cache records and pages: bytes where they belong, nothing read that was not written."""

import zlib
from typing import Any

import numpy as np
import pytest
import torch
from dsv41_reference.cache import decode, encode, read_rows, record_bytes, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import ops
from dsv41.cache import LAYOUTS, PagedKV, Record, page_slots
from dsv41.formats import quantize_mxfp4, quantize_mxfp8, quantize_nvfp4
from tests.ops.rows import assert_refused, same
from tests.test_formats import golden, lcg

BF16 = torch.bfloat16
BYTES = {"mxfp8": 528, "nvfp4": 288, "mxfp4": 68, "v4": 584, "fp8": 132, "bf16": 1024}
DIMS = {"mxfp8": 512, "nvfp4": 512, "mxfp4": 128, "v4": 512, "fp8": 128, "bf16": 512}
NAN = 0xFF  # a byte that is NaN as E4M3, as a scale, and in bf16


def empty(layout: str, pages: int, size: int, gap: int = 0, dim: int | None = None) -> PagedKV:
    """Pages full of NaN bytes, ``gap`` bytes apart."""
    record = Record(layout, DIMS[layout] if dim is None else dim)
    pool = torch.full((pages, size * record.bytes + gap), NAN, dtype=torch.uint8)
    return PagedKV(pool[:, : size * record.bytes].unflatten(1, (size, record.bytes)), record)


def store(cache: PagedKV, slots: list[int], x: torch.Tensor) -> None:
    still = torch.ones(len(x), 1), torch.zeros(len(x), 1)
    ops.write_cache(x, *still, torch.tensor(slots, dtype=torch.int32), cache)


def quantised(layout: str, x: torch.Tensor) -> torch.Tensor:
    """What a record gives back, from the formats alone."""
    if layout == "mxfp8":
        return quantize_mxfp8(x).dequantize(torch.float32)
    if layout == "nvfp4":
        return quantize_nvfp4(x).dequantize(torch.float32)
    if layout == "mxfp4":
        return quantize_mxfp4(x).dequantize(torch.float32)
    if layout == "bf16":
        return x.float()
    parts, width = (x[:, :-64].unflatten(1, (-1, 64)), 448) if layout == "v4" else (x[:, None], 128)
    top = parts.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    scale = top.log2().ceil().exp2()  # bf16 maxima are far enough from the edges
    values = (parts.float() / scale).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([values.flatten(1), x[:, width:].float()], 1)


def rows(layout: str, count: int) -> torch.Tensor:
    return (torch.randn(count, DIMS[layout]) * torch.logspace(-2, 2, count)[:, None]).to(BF16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_store_then_load_is_quantise_then_dequantise(layout: str) -> None:
    assert Record(layout, DIMS[layout]).bytes == BYTES[layout]
    cache, x = empty(layout, 3, 4), rows(layout, 6)
    slots = [7, 0, 11, 4, 5, 2]
    store(cache, slots, x)
    assert torch.equal(cache.read(torch.tensor(slots)), quantised(layout, x))
    assert cache.num_slots == 12 and cache.page_size == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_encode_and_decode(layout: str) -> None:
    x = rows(layout, 5)
    values, scales = encode(layout, x)
    assert (values.shape[1], scales.shape[1]) == record_bytes(layout, DIMS[layout])[:2]
    back = decode(layout, values, scales)
    assert torch.equal(back, quantised(layout, x))
    again = encode(layout, back.to(BF16))
    if layout != "nvfp4":  # its scale follows the largest element, which the element's rounding may move
        assert torch.equal(decode(layout, *again), back)
    assert encode(layout, x[:0])[0].shape == (0, values.shape[1])


GOLDEN = {
    "mxfp8": (golden("G23")["528"], 11, 4.0, 32),
    "nvfp4": (golden("G23")["288"], 11, 4.0, 128),
    "v4": (golden("G23")["584"], 11, 4.0, 32),
    "mxfp4": (golden("G24"), 13, 2.0, 128),
}
PLACES = {
    "mxfp8": golden("G25")["528 page(32) tok5 data/scale"],
    "nvfp4": golden("G25")["288 page(128) tok5"],
    "v4": golden("G25")["V4 584 page (32 tok): tok5 data/scale"],
    "mxfp4": golden("G25")["indexer page(128) tok5 data/scale"],
}


@pytest.mark.parametrize("layout", GOLDEN)
def test_golden_pages(layout: str) -> None:
    """The golden record as token 5 of page 1: its bytes lie where the layout says, no other moves."""
    want, seed, amplitude, size = GOLDEN[layout]
    cache = empty(layout, 2, size)
    store(cache, [size + 5], torch.tensor(lcg(DIMS[layout], seed, amplitude))[None].to(BF16))
    page, (data, scale) = cache.pages[1].flatten(), PLACES[layout]
    values, scales, _ = record_bytes(layout, DIMS[layout])
    stored, codes = page[data : data + values], page[scale : scale + scales]
    assert stored[:8].numpy().tobytes().hex() == want["head"]
    assert codes.numpy().tobytes().hex() == want["scales"]
    whole = stored if "crc32_data" in want else torch.cat([stored, codes])
    assert f"{zlib.crc32(whole.numpy().tobytes()):08x}" == want.get("crc32_data", want.get("crc32"))
    touched = torch.zeros(len(page), dtype=torch.bool)
    touched[data : data + values] = touched[scale : scale + scales] = True
    assert (page[~touched] == NAN).all() and (cache.pages[0] == NAN).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=15)
@given(st.data())
def test_pages_in_any_order_and_at_any_stride(layout: str, data: st.DataObject) -> None:
    """Paged equals contiguous: pages permuted together with the page table, and any bytes between pages."""
    size, count = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.integers(1, 4))
    check_paging(
        layout, size, data.draw(st.permutations(range(count))), data.draw(st.sampled_from([0, 16, 64, 1000]))
    )


def check_paging(layout: str, size: int, order: list[int], gap: int) -> None:
    count = size * len(order)
    x = rows(layout, count)
    entries = torch.arange(count, dtype=torch.int32)[None]
    table = torch.tensor([order], dtype=torch.int32)
    slots = page_slots(entries, torch.zeros(1, dtype=torch.int32), table, size)[0]
    flat, paged = empty(layout, 1, count), empty(layout, len(order), size, gap)
    store(flat, entries[0].tolist(), x)
    store(paged, slots.tolist(), x)
    assert torch.equal(paged.read(slots), flat.read(entries[0]))
    if gap:
        pool = paged.pages.as_strided(
            (len(order), gap), (paged.pages.stride(0), 1), size * paged.record.bytes
        )
        assert (pool[:-1] == NAN).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slot_minus_one(layout: str) -> None:
    """Writes nothing, reads as zeros, and a NaN that lies where it would point does not show."""
    cache, x = empty(layout, 2, 4), rows(layout, 3)
    store(cache, [-1, 3, -1], x)
    write_rows(cache.pages, layout, torch.tensor([-1, 3, -1]), x)
    assert (cache.pages[1] == NAN).all()
    got = cache.read(torch.tensor([-1, 3, -1, -7]))
    assert (got[[0, 2, 3]] == 0).all() and torch.equal(got[1], quantised(layout, x[1:2])[0])
    assert cache.read(torch.tensor([], dtype=torch.int64)).shape == (0, DIMS[layout])


@pytest.mark.parametrize("layout", ["mxfp8", "nvfp4", "mxfp4", "v4", "fp8"])
def test_unread_bytes_never_show(layout: str) -> None:
    """Everything around a record is NaN: neighbours, the page's tail, pages of others."""
    cache, x = empty(layout, 3, 4, gap=32), rows(layout, 1)
    store(cache, [6], x)
    assert torch.equal(cache.read(torch.tensor([6])), quantised(layout, x))
    if layout != "mxfp4":
        assert cache.read(torch.tensor([5, 7, 0])).isnan().any(1).all()


def test_a_scale_belongs_to_its_token() -> None:
    """Tokens whose scales differ by position: a record read by another layout's rule would show."""
    for layout in LAYOUTS:
        cache = empty(layout, 1, 8)
        x = torch.full((8, DIMS[layout]), 1.5) * 2.0 ** torch.arange(8)[:, None]  # exact in every format
        store(cache, list(range(8)), x.to(BF16))
        assert torch.equal(cache.read(torch.arange(8)), x)


def test_page_slots_by_hand() -> None:
    table = torch.tensor([[4, 0, -1], [2, -1, 7]], dtype=torch.int32)
    entries = torch.tensor([[0, 3, 4, 9, 11, 12, -1], [1, 5, 8, 11, 99, 0, -1]], dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        got = page_slots(entries.to(dtype), torch.tensor([0, 1], dtype=dtype), table, 4)
        assert got.tolist() == [[16, 19, 0, -1, -1, -1, -1], [9, -1, 28, 31, -1, 8, -1]]
        assert got.dtype == torch.int32
    nobody = page_slots(entries, torch.tensor([-1, -1], dtype=torch.int32), table, 4)
    assert (nobody == -1).all()
    for shape in ((0, 3), (2, 0)):
        none = page_slots(entries, torch.tensor([0, 1]), torch.zeros(shape, dtype=torch.int32), 4)
        assert (none == -1).all() and none.shape == entries.shape


def test_large_slot_numbers_stay_exact() -> None:
    """Bytes past 2^31: slots are int32, addresses are not. The pool is virtual memory, hardly touched."""
    record, size = Record("v4", 512), 64
    pages = 2**31 // (size * record.bytes) + 2
    cache = PagedKV(torch.from_numpy(np.zeros((pages, size, record.bytes), np.uint8)), record)
    slot, x = cache.num_slots - 1, rows("v4", 1)
    assert slot * record.bytes > 2**31
    write_rows(cache.pages, "v4", torch.tensor([slot], dtype=torch.int32), x)
    got = read_rows(cache.pages, "v4", 512, torch.tensor([slot], dtype=torch.int32))
    assert torch.equal(got, quantised("v4", x))


P = torch.zeros(2, 4, 33, dtype=torch.uint8)
R32 = Record("mxfp8", 32)
ERRORS: dict[str, Any] = {
    "layout": (lambda: Record("fp6", 32), "Record: expected layout: one of .*, got fp6"),
    "dim": (lambda: Record("mxfp8", 48), "dim: a multiple of 32, at least 1, for mxfp8, got 48"),
    "v4 dim": (lambda: Record("v4", 64), "dim: a multiple of 64, at least 128, for v4, got 64"),
    "bytes": (lambda: PagedKV(P[..., :32], R32), r"pages: \[num_pages, page_size, 33\] uint8 \(mxfp8\), got"),
    "dtype": (lambda: PagedKV(P.float(), R32), r"PagedKV: expected pages: .*, got \[2, 4, 33\] float32"),
    "strides": (
        lambda: PagedKV(P[:, ::2], R32),
        r"pages: contiguous within a page, strides \(\*, 33, 1\), got",
    ),
    "page stride": (
        lambda: PagedKV(P[:1].expand(2, 4, 33), R32),
        "a page stride of at least 132 bytes, got 0",
    ),
    "slots": (
        lambda: PagedKV(torch.empty((2**21, 1024, 33), dtype=torch.uint8, device="meta"), R32),
        r"fewer than 2\^31 slots",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])


def test_copying_records_keeps_their_bytes() -> None:
    source, into = empty("nvfp4", 2, 4), empty("nvfp4", 3, 2, gap=7)
    store(source, [0, 1, 5], rows("nvfp4", 3))
    ops.copy_records(
        source, torch.tensor([5, 0], dtype=torch.int32), into, torch.tensor([3, 4], dtype=torch.int32)
    )
    assert same(into.pages[1, 1], source.pages[1, 1]) and same(into.pages[2, 0], source.pages[0, 0])
    assert (into.pages[0] == NAN).all()
