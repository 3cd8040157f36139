"""The Hopper cache writers: the bits of the reference, in the emulator on a CPU, through the ops on a GPU."""

from typing import Any

import pytest
import torch
from dsv41_reference import cache as ref_cache
from dsv41_reference import compress as ref_compress
from dsv41_reference.rope import rope_table

from dsv41 import ops
from dsv41.cache import PagedKV, Record
from tests.tools import cuda_emu

tilelang_cuda: Any = pytest.importorskip("dsv41.ops.compress.tilelang_cuda")
GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not (GPU or cuda_emu.available()), reason="neither a Hopper GPU nor g++")
DEVICE = "cuda" if GPU else "cpu"
BF16, PAGE = torch.bfloat16, 4


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def strided(pool: torch.Tensor, pages: int, record: int) -> torch.Tensor:
    """Pages with a gap between them."""
    return pool.as_strided((pages, PAGE, record), (PAGE * record + 32, record, 1))


def writing(layout: str, dim: int, norm: bool) -> tuple[Any, ...]:
    """(x, weight, cos, sin, slots, width, random bytes): rows of all sizes, zero and infinite; slots
    in three pages, -1, and one beyond them.
    """
    rows = 7
    x = torch.randn(rows, dim + 8).to(BF16)[:, :dim]
    x[1] *= 1000
    x[2] = 0
    x[5] *= 1e-4
    if not norm:
        x[4, 5] = torch.inf
    weight = torch.randn(dim).to(BF16) if norm else None
    cos, sin = rope_table(torch.arange(rows) * 1000 + 3, 64, 160_000.0, 16.0)
    width = Record(layout, dim).bytes
    before = torch.randint(0, 256, (3, PAGE * width + 32), dtype=torch.uint8)
    return x, weight, cos, sin, ints(5, -1, 0, 11, 2, 12, 9), width, before


@pytest.mark.parametrize(
    ("layout", "dim", "norm", "rounded"),
    [
        ("mxfp8", 512, True, True),
        ("nvfp4", 512, False, True),
        ("nvfp4", 512, False, False),
        ("mxfp4", 128, True, True),
        ("v4", 512, True, True),
        ("fp8", 128, True, True),
        ("bf16", 512, False, True),
    ],
)
def test_write_cache(layout: str, dim: int, norm: bool, rounded: bool) -> None:
    """Every byte of the pool: records at their slots, nothing at -1, beyond the pool, or in the gaps."""
    x, weight, cos, sin, slots, width, before = writing(layout, dim, norm)
    want, got = before.clone(), before.clone().to(DEVICE)
    ref_cache.write_cache(x, weight, 1e-6, cos, sin, slots, rounded, layout, strided(want, 3, width))
    pages = strided(got, 3, width)
    if GPU:
        keys: dict[str, Any] = {"norm_weight": weight.to(DEVICE), "eps": 1e-6} if weight is not None else {}
        a, b, c, d = (y.to(DEVICE) for y in (x, cos, sin, slots))
        ops.write_cache(a, b, c, d, PagedKV(pages, Record(layout, dim)), round_rope=rounded, **keys)
    else:
        few = [x, x.stride(0), weight, 1e-6, cos, sin, cos.stride(0), sin.stride(0), slots, len(x)]
        name = tilelang_cuda.write_name(layout, dim, norm, rounded, 32)
        where = [pages, pages.stride(0), PAGE, 3]
        cuda_emu.emulate(tilelang_cuda.source(), name, [*few, *where], grid=2, threads=128)
    assert torch.equal(got.cpu(), want)
    assert not torch.equal(want, before)


@pytest.mark.parametrize("trial", range(12))
def test_pairs(trial: int) -> None:
    """Random requests, cuts and ring sizes: the carry to the bit, the pooled rows to one rounding of exp."""
    dim, slots, requests = 8, int(torch.randint(1, 9, ())), 3
    ids: list[int] = []
    positions: list[int] = []
    for r in torch.randperm(requests).tolist():
        n, start = int(torch.randint(0, 12, ())), int(torch.randint(0, 20, ()))
        ids += [r] * n + [-1] * (trial % 2)
        positions += [*range(start, start + n)] + [5] * (trial % 2)
    ids.append(7)  # a request that is not there
    positions.append(3)
    rows, carry = torch.randn(len(ids), 2 * dim), torch.randn(requests, slots, 2 * dim)
    got_carry, got = (
        carry.clone().to(DEVICE),
        torch.full((len(ids), dim), torch.nan, dtype=BF16, device=DEVICE),
    )
    want = torch.empty(len(ids), dim, dtype=BF16)
    ref_compress.compress_pairs(rows, ints(*ids), ints(*positions), carry, want)
    if GPU:
        a, b, c = (y.to(DEVICE) for y in (rows, ints(*ids), ints(*positions)))
        ops.compress_pairs(a, b, c, got_carry, out=got)
    else:
        strides = [got_carry.stride(0), got_carry.stride(1), requests, slots]
        few = [rows, rows.stride(0), ints(*ids), ints(*positions), len(ids), got_carry, *strides]
        cuda_emu.emulate(
            tilelang_cuda.source(),
            "records::pairs",
            [*few, got, got.stride(0), dim],
            grid=len(ids),
            threads=128,
        )
    assert torch.equal(got_carry.cpu(), carry)
    torch.testing.assert_close(got.cpu(), want, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("width", [528, 34])
def test_copy_records(width: int) -> None:
    a = torch.randint(0, 256, (2, 4, width), dtype=torch.uint8)
    want = torch.randint(0, 256, (3, 3, width), dtype=torch.uint8)
    got = want.clone().to(DEVICE)
    origin, at = ints(7, 0, -1, 3, 8), ints(5, 1, 2, -1, 0)
    ref_cache.copy_records(a, origin, at, want)
    if GPU:
        tilelang_cuda.copy_records(a.to(DEVICE), origin.to(DEVICE), at.to(DEVICE), got)
    else:
        few = [a, a.stride(0), 4, 2, origin, at, 5, got, got.stride(0), 3, 3, width]
        cuda_emu.emulate(tilelang_cuda.source(), "records::copy", few, grid=2, threads=128)
    assert torch.equal(got.cpu(), want)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("layout", ["mxfp8", "nvfp4", "mxfp4"])
def test_pool_past_4_gib_in_a_graph(layout: str) -> None:
    """Pages of one allocation more than 2^32 bytes apart; the graph sees other rows and slots each time."""
    dim = 128 if layout == "mxfp4" else 512
    record, rows, stride = Record(layout, dim), 6, (1 << 30) + 4096
    pool = torch.full((5 * stride,), 0xEE, dtype=torch.uint8, device=DEVICE)
    far = PagedKV(pool.as_strided((5, PAGE, record.bytes), (stride, record.bytes, 1)), record)
    near = PagedKV(torch.full((5, PAGE, record.bytes), 0xEE, dtype=torch.uint8, device=DEVICE), record)
    x, slots = torch.randn(rows, dim, device=DEVICE).to(BF16), ints(19, -1, 0, 7, 16, 4).to(DEVICE)
    cos, sin = (y.to(DEVICE) for y in rope_table(torch.arange(rows) * 1000 + 3, 64, 160_000.0, 16.0))

    def step() -> None:
        ops.write_cache(x, cos, sin, slots, far)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ops.write_cache(x, cos, sin, slots, near)
    for shift in range(3):
        slots.copy_(torch.where(slots.roll(shift) < 0, -1, (slots.roll(shift) + 1) % 20))
        x.copy_(torch.randn_like(x, dtype=torch.float32))
        graph.replay()
        ops.write_cache(x, cos, sin, slots, near)
        assert torch.equal(far.pages, near.pages)
    between = pool.as_strided((4, 64), (stride, 1), PAGE * record.bytes)
    assert (between == 0xEE).all()
