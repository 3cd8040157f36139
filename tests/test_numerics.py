"""Accumulation and rounding of the reference."""

import math

import pytest
import torch
from dsv41_reference import accumulate, keep_weights, numerics
from dsv41_reference.linear import block_linear
from hypothesis import given
from hypothesis import strategies as st

from dsv41 import formats

F64 = torch.float64


def heavy_tailed(rows: int, width: int, seed: int) -> torch.Tensor:
    """Values whose exponents spread over about 60 bits."""
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn((rows, width), generator=draw, dtype=F64)
    return normal * torch.exp2(20 * torch.randn((rows, width), generator=draw, dtype=F64))


def test_row_at_a_time_does_not_depend_on_the_batch() -> None:
    """Where plain float64 may: another row count is another kernel of the matrix library."""
    x, w = heavy_tailed(37, 512, 0), heavy_tailed(64, 512, 1)
    with accumulate(F64, row_at_a_time=True):
        whole = numerics.matmul(x, w)
        norms = numerics.mean_square(x)
        for rows in (slice(0, 1), slice(5, 9), slice(30, 37)):
            assert torch.equal(numerics.matmul(x[rows], w), whole[rows])
            assert torch.equal(numerics.mean_square(x[rows]), norms[rows])


def test_products_of_stored_formats_do_not_depend_on_the_batch() -> None:
    x, w = torch.randn(33, 1280).bfloat16(), torch.randn(96, 1280).bfloat16()
    with accumulate(F64):
        whole = numerics.matmul(x, w)
        assert torch.equal(torch.cat([numerics.matmul(r, w) for r in x.split(1)]), whole)
    exact = torch.tensor([math.fsum(r) for r in (x[:1].double() * w.double()).tolist()], dtype=F64)
    assert torch.equal(whole[0], exact)


def test_elementary_functions_do_not_depend_on_position() -> None:
    x = torch.randn(41, dtype=torch.float32) * 8
    for f in (numerics.sigmoid, numerics.silu, numerics.softplus):
        assert torch.equal(torch.cat([f(v) for v in x.split(1)]), f(x))
    assert torch.allclose(numerics.softplus(x), torch.nn.functional.softplus(x))
    assert numerics.softplus(torch.tensor([21.0, 1000.0])).tolist() == [21.0, 1000.0]
    assert numerics.sigmoid(torch.tensor([-1e4, 1e4])).tolist() == [0.0, 1.0]


@given(st.integers(0x0080, 0x7F00), st.sampled_from([0.0, 1e-12, -1e-12, 1e-9, -1e-9, 3e-8]), st.booleans())
def test_rounding_from_float64_is_single(bits: int, relative: float, negative: bool) -> None:
    """Around the midpoint of two bfloat16 neighbours, nearer than float32 can tell."""
    low, high = torch.tensor([bits, bits + 1], dtype=torch.int16).view(torch.bfloat16).double().tolist()
    x = (low + high) / 2 * (1 + relative)
    even = low if bits % 2 == 0 else high
    want = even if relative == 0 else (low if relative < 0 else high)
    sign = -1.0 if negative else 1.0
    got = numerics.narrow(torch.tensor([sign * x, 1.0], dtype=F64), torch.bfloat16)
    assert got.tolist() == [sign * want, 1.0]


def test_rounding_from_float64_to_e4m3_is_single() -> None:
    codes = torch.arange(0, 0x7E, dtype=torch.uint8)
    low = codes.view(torch.float8_e4m3fn).double()
    high = (codes + 1).view(torch.float8_e4m3fn).double()
    middle = (low + high) / 2
    even = torch.where(codes % 2 == 0, low, high)
    for shift, want in ((0.0, even), (1e-13, high), (-1e-13, low)):
        assert torch.equal(numerics.narrow(middle * (1 + shift), torch.float8_e4m3fn).double(), want)


def test_rounding_keeps_infinities_and_nan() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e300, -1e300], dtype=F64)
    got = numerics.narrow(x, torch.bfloat16).tolist()
    assert got[:2] == [math.inf, -math.inf] and math.isnan(got[2])


def test_another_accumulator_is_refused_and_contexts_nest() -> None:
    with pytest.raises(
        ValueError, match=r"accumulate: expected dtype: float32 or float64, got torch\.float16"
    ):
        numerics.accumulate(torch.float16).__enter__()
    assert numerics.accumulator() == torch.float32
    with accumulate(F64):
        with accumulate(torch.float32):
            assert numerics.accumulator() == torch.float32
        assert numerics.accumulator() == F64


def test_kept_weights_give_the_same_results_and_only_inside() -> None:
    w = formats.quantize_mxfp8(torch.randn(64, 64), tile_rows=32)
    x = formats.quantize_mxfp8(torch.randn(5, 64))
    want, got = torch.empty(5, 64, dtype=torch.bfloat16), torch.empty(5, 64, dtype=torch.bfloat16)
    scratch = torch.empty(0, dtype=torch.uint8)
    block_linear(*x.flat(), *w.flat(), "exact", want, scratch)
    with keep_weights():
        for _ in range(2):
            block_linear(*x.flat(), *w.flat(), "exact", got, scratch)
            assert torch.equal(got, want)
    w.values.view(torch.uint8).bitwise_xor_(0x80)
    block_linear(*x.flat(), *w.flat(), "exact", got, scratch)
    assert torch.equal(got, -want)
