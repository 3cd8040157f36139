"""Ascend cache writers and compressor, run from the emitted Ascend C: the cases of the Hopper ones."""

from typing import Any

import pytest
import torch
from dsv41_reference import cache as ref_cache
from dsv41_reference import compress as ref_compress

from tests.ops.test_compress_hopper import BF16, ints, strided, writing
from tests.tools import ascend_emu
from tests.tools.ascend_emu import emulated

pytest.importorskip("tilelang")
if not ascend_emu.available():
    pytest.skip("needs g++", allow_module_level=True)

COMPRESS = "dsv41.ops.compress.tilelang_npu"


@pytest.mark.emulates("write_cache")
@pytest.mark.parametrize(
    ("layout", "dim", "norm", "rounded"),
    [
        ("mxfp8", 512, True, True),
        ("nvfp4", 512, False, False),
        ("mxfp4", 128, True, True),
        ("v4", 512, True, True),
        ("fp8", 128, True, True),
        ("bf16", 64, False, True),
    ],
)
def test_write_cache(layout: str, dim: int, norm: bool, rounded: bool) -> None:
    """Every byte of the pool: records at their slots, nothing at -1, beyond the pool, or in the gaps."""
    x, weight, cos, sin, slots, width, before = writing(layout, dim, norm)
    want, got = before.clone(), before.clone()
    ref_cache.write_cache(x, weight, 1e-6, cos, sin, slots, rounded, layout, strided(want, 3, width))
    with emulated(COMPRESS) as npu:
        npu.write_cache(x, weight, 1e-6, cos, sin, slots, rounded, layout, strided(got, 3, width))
    assert torch.equal(got, want) and not torch.equal(want, before)


@pytest.mark.emulates("compress_pairs")
def test_pairs() -> None:
    """Random requests, cuts and ring sizes: the carry to the bit, the pooled rows to one rounding of exp."""
    with emulated(COMPRESS) as npu:
        for trial in range(12):
            check_pairs(npu, trial)


def check_pairs(npu: Any, trial: int) -> None:
    dim, requests = 8, 3
    slots = int(torch.randint(1, 9, ()))
    ids: list[int] = []
    positions: list[int] = []
    for r in torch.randperm(requests).tolist():
        n, start = int(torch.randint(0, 12, ())), int(torch.randint(0, 20, ()))
        ids += [r] * n + [-1] * (trial % 2)
        positions += [*range(start, start + n)] + [5] * (trial % 2)
    ids.append(7)  # a request that is not there
    positions.append(3)
    rows, carry = torch.randn(len(ids), 2 * dim), torch.randn(requests, slots, 2 * dim)
    got_carry, got = carry.clone(), torch.full((len(ids), dim), torch.nan, dtype=BF16)
    want = torch.empty(len(ids), dim, dtype=BF16)
    ref_compress.compress_pairs(rows, ints(*ids), ints(*positions), carry, want)
    npu.compress_pairs(rows, ints(*ids), ints(*positions), got_carry, got)
    assert torch.equal(got_carry, carry)
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-6)


@pytest.mark.emulates("copy_records")
def test_copy_records() -> None:
    a = torch.randint(0, 256, (2, 4, 528), dtype=torch.uint8)
    want = torch.randint(0, 256, (3, 3, 528), dtype=torch.uint8)
    got = want.clone()
    origin, at = ints(7, 0, -1, 3, 8), ints(5, 1, 2, -1, 0)
    ref_cache.copy_records(a, origin, at, want)
    with emulated(COMPRESS) as npu:
        npu.copy_records(a, origin, at, got)
    assert torch.equal(got, want)
