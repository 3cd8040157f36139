"""The rotary tables against the specification's check values."""

import math

import pytest
import torch
from dsv41_reference.rope import rope_frequencies, rope_table

YARN = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_positions": 65_536}
CHECK = {
    0: 1.0,
    14: 5.2868563e-3,
    15: 3.6355386e-3,
    16: 2.2656250e-3,
    20: 2.9697778e-4,
    24: 1.9531250e-5,
    25: 5.3723127e-6,
    31: 5.6805290e-7,
}


def test_yarn_frequencies_have_the_check_values():
    frequencies = rope_frequencies(64, 160_000.0, **YARN)
    assert frequencies.dtype == torch.float32 and frequencies.shape == (32,)
    for i, value in CHECK.items():
        assert frequencies[i].item() == pytest.approx(value, rel=5e-7), i


def test_yarn_leaves_fast_pairs_and_divides_slow_ones():
    plain, yarn = rope_frequencies(64, 160_000.0), rope_frequencies(64, 160_000.0, **YARN)
    torch.testing.assert_close(yarn[:16], plain[:16], rtol=0, atol=0)
    torch.testing.assert_close(yarn[25:], plain[25:] / 16, rtol=0, atol=0)
    # Width 8: the ramp runs from pair 1 to pair 4, past the last pair.
    narrow = rope_frequencies(8, 160_000.0, **YARN) / rope_frequencies(8, 160_000.0)
    torch.testing.assert_close(narrow, torch.tensor([1.0, 1.0, 1 - 15 / 48, 1 - 30 / 48]), rtol=1e-6, atol=0)


def test_a_ramp_of_no_width_is_a_step():
    frequencies = rope_frequencies(8, 1e4, factor=2.0, beta_fast=1.0, beta_slow=1.0, original_positions=6)
    assert frequencies.isfinite().all() and frequencies[0] == 1


def test_plain_table_is_float32_from_the_angle_on():
    positions = torch.tensor([0, 1, 127, 65_535])
    cos, sin = rope_table(positions, 64, 10_000.0)
    assert cos.shape == sin.shape == (4, 32) and cos.dtype == sin.dtype == torch.float32
    assert cos[0].eq(1).all() and sin[0].eq(0).all()
    angle = positions.float()[:, None] * rope_frequencies(64, 10_000.0)
    torch.testing.assert_close(cos.double(), angle.double().cos(), rtol=0, atol=1e-7)
    assert cos[1, 0].item() == pytest.approx(math.cos(1.0), abs=1e-7)


@pytest.mark.parametrize("dim", [8, 64])
def test_a_row_does_not_depend_on_its_neighbours(dim):
    positions = torch.arange(3000)
    cos, sin = rope_table(positions, dim, 160_000.0, **YARN)
    for start, stop in ((0, 1), (7, 8), (1023, 1030), (2999, 3000)):
        part = rope_table(positions[start:stop], dim, 160_000.0, **YARN)
        assert torch.equal(part[0], cos[start:stop]) and torch.equal(part[1], sin[start:stop])


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="rope_frequencies: expected dim: positive and even, got 7"):
        rope_frequencies(7, 1e4)
