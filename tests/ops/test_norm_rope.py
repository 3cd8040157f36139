"""RMSNorm and RoPE against loops in Python."""

import math

import pytest
import torch
from dsv41_reference import accumulate
from dsv41_reference.rope import rope_table
from hypothesis import given
from hypothesis import strategies as st

from dsv41 import ops
from tests.ops.rows import assert_nan_stays, assert_refused, assert_rows_independent, same

BF16 = torch.bfloat16


def test_rms_norm_closed_form() -> None:
    x, weight = torch.randn(3, 40).to(BF16), torch.randn(40).to(BF16)
    with accumulate(torch.float64):
        got = ops.rms_norm(x, weight, eps=0.25)
    for r in range(3):
        row = x[r].double().tolist()
        size = math.sqrt(sum(v * v for v in row) / 40 + 0.25)
        want = torch.tensor([w * (v / size) for v, w in zip(row, weight.double().tolist(), strict=True)])
        assert torch.equal(got[r], want.to(BF16))


def test_tiny_rows_are_normalised() -> None:
    """With an epsilon of 1e-20 a row of 1e-5 comes out of size one; a usual 1e-6 would swallow it."""
    x = torch.full((1, 64), 1e-5).to(BF16)
    assert torch.equal(ops.rms_norm(x, torch.ones(64, dtype=BF16), eps=1e-20), torch.ones(1, 64, dtype=BF16))
    assert (ops.rms_norm(0 * x, torch.ones(64, dtype=BF16), eps=1e-20) == 0).all()


@given(st.integers(-8, 8))
def test_norm_does_not_see_the_size(shift: int) -> None:
    x, weight = torch.randn(2, 64).to(BF16), torch.ones(64, dtype=BF16)
    with accumulate(torch.float64):
        assert torch.equal(ops.rms_norm(x * 2.0**shift, weight, eps=0.0), ops.rms_norm(x, weight, eps=0.0))


def test_rope_closed_form() -> None:
    """Interleaved pairs of the last dimensions, every head alike; the others pass untouched."""
    x = torch.randn(3, 2, 12).to(BF16)
    angle = torch.tensor([[0.3, 1.0, 2.0], [0.0, 0.5, -1.0], [3.0, 0.1, 0.2]])
    cos, sin = angle.cos(), angle.sin()
    for inverse in (False, True):
        with accumulate(torch.float64):
            got = ops.rope(x, cos, sin, inverse=inverse)
        assert torch.equal(got[..., :6], x[..., :6])
        for t in range(3):
            for h in range(2):
                for i in range(3):
                    a, b = x[t, h, 6 + 2 * i].item(), x[t, h, 7 + 2 * i].item()
                    c, s = cos[t, i].item(), sin[t, i].item() * (-1 if inverse else 1)
                    want = torch.tensor([a * c - b * s, b * c + a * s]).to(BF16)
                    assert torch.equal(got[t, h, 6 + 2 * i : 8 + 2 * i], want)


def test_rope_is_in_place_when_asked() -> None:
    x = torch.randn(4, 3, 16).to(BF16)
    cos, sin = rope_table(torch.arange(4), 8, 100.0)
    want = ops.rope(x, cos, sin)
    assert ops.rope(x, cos, sin, out=x) is x and torch.equal(x, want)


def test_scores_depend_on_distance_only() -> None:
    """What RoPE is for: with exact quarter turns, moving query and key together changes no product."""
    q, k = torch.randint(-4, 5, (2, 1, 1, 8)).to(BF16)

    def turned(x: torch.Tensor, quarter: int) -> torch.Tensor:
        cos = torch.full((1, 4), (1.0, 0.0, -1.0, 0.0)[quarter % 4])
        sin = torch.full((1, 4), (0.0, 1.0, 0.0, -1.0)[quarter % 4])
        return ops.rope(x, cos, sin).float()

    for p in range(4):
        for move in range(4):
            near = (turned(q, p) * turned(k, 0)).sum()
            assert near == (turned(q, p + move) * turned(k, move)).sum()


def test_rows() -> None:
    x, weight = torch.randn(5, 32).to(BF16), torch.randn(32).to(BF16)
    assert_rows_independent(lambda r: ops.rms_norm(x[r], weight, eps=1e-20), 5)
    assert_nan_stays(lambda x: ops.rms_norm(x, weight, eps=1e-20), x)
    heads, (cos, sin) = x.view(5, 2, 16), rope_table(torch.arange(5) * 1000, 8, 10_000.0)
    assert_rows_independent(lambda r: ops.rope(heads[r], cos[r], sin[r]), 5)
    assert_nan_stays(lambda x: ops.rope(x, cos, sin), heads)
    wide = torch.randn(5, 64).to(BF16)
    assert same(
        ops.rms_norm(wide[:, :32], weight, eps=1.0), ops.rms_norm(wide[:, :32].clone(), weight, eps=1.0)
    )


X, W, H = torch.zeros(2, 8, dtype=BF16), torch.zeros(8, dtype=BF16), torch.zeros(2, 1, 8, dtype=BF16)
COS = torch.ones(2, 4)
ERRORS = {
    "norm x": (
        lambda: ops.rms_norm(X.float(), W, eps=0.0),
        r"rms_norm: expected x: \[\*, \*\] bfloat16, got",
    ),
    "norm weight": (lambda: ops.rms_norm(X, W[:4], eps=0.0), r"weight: \[8\] bfloat16, got \[4\] bfloat16"),
    "norm out": (lambda: ops.rms_norm(X, W, eps=0.0, out=X[:1]), r"out: \[2, 8\] bfloat16, got \[1, 8\]"),
    "norm device": (lambda: ops.rms_norm(X, W.to("meta"), eps=0.0), r"weight on cpu, got meta"),
    "rope x": (lambda: ops.rope(X, COS, COS), r"rope: expected x: \[\*, \*, \*\] bfloat16, got \[2, 8\]"),
    "rope cos": (lambda: ops.rope(H, COS[:1], COS), r"cos: \[2, \*\] float32, got \[1, 4\]"),
    "rope sin": (lambda: ops.rope(H, COS, COS[:, :2]), r"sin: \[2, 4\] float32, got \[2, 2\]"),
    "rope width": (lambda: ops.rope(H, *[torch.ones(2, 5)] * 2), r"cos: at most 4 angles, got \[2, 5\]"),
    "rope out": (lambda: ops.rope(H, COS, COS, out=H.float()), r"out: \[2, 1, 8\] bfloat16, got"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])
