"""The router against a loop in Python."""

import math
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from hypothesis import given
from hypothesis import strategies as st

from dsv41 import ops
from tests.ops.rows import assert_nan_stays, assert_refused, assert_rows_independent


def by_hand(
    logits: list[float], bias: list[float], top_k: int, scale: float, temperature: float = 1.0
) -> tuple[list[int], list[float]]:
    a = []
    for z in logits:
        z /= temperature
        a.append(math.sqrt(z if z > 20 else math.log1p(math.exp(z))))
    order = sorted(range(len(a)), key=lambda e: (-(a[e] + bias[e]), e))[:top_k]
    total = sum(a[e] for e in order) + 1e-20
    return order, [a[e] / total * scale for e in order]


def test_closed_form() -> None:
    logits, bias = torch.randn(9, 12) * 8, torch.randn(12)
    logits[0, 3] = 30.0  # in the linear part
    with accumulate(torch.float64):
        ids, weights = ops.topk_route(logits, bias, top_k=4, scale=1.5, temperature=0.5)
    for t in range(9):
        want_ids, want = by_hand(logits[t].tolist(), bias.tolist(), 4, 1.5, 0.5)
        assert ids[t].tolist() == want_ids
        assert weights[t].tolist() == pytest.approx(want, rel=1e-7)


def test_bias_chooses_but_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 5.0, 0.0, 9.0])
    ids, weights = ops.topk_route(logits, bias, top_k=2, scale=3.0)
    assert ids.tolist() == [[3, 1]] and weights.tolist() == [[1.5, 1.5]]


def test_ties_go_to_the_lower_id() -> None:
    ids, weights = ops.topk_route(torch.zeros(3, 9), torch.zeros(9), top_k=4, scale=1.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3 and (weights == 0.25).all()


def test_image_tokens_have_their_own_bias() -> None:
    logits = torch.randn(5, 6)
    text, vision = torch.randn(6) * 4, torch.randn(6) * 4
    image = torch.tensor([False, True, False, True, True])
    ids, weights = ops.topk_route(logits, text, top_k=2, scale=1.5, image_bias=vision, image=image)
    for bias, rows in ((text, ~image), (vision, image)):
        want_ids, want = ops.topk_route(logits[rows], bias, top_k=2, scale=1.5)
        assert torch.equal(ids[rows], want_ids) and torch.equal(weights[rows], want)


@given(st.integers(1, 8), st.integers(0, 999))
def test_ids_are_distinct_and_weights_sum_to_the_scale(top_k: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 8, generator=draw).mul(30).round()  # many ties, some far below zero
    ids, weights = ops.topk_route(logits, torch.zeros(8), top_k=top_k, scale=1.5)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert (ids >= 0).all() and (ids < 8).all()
    assert weights.sum(1).tolist() == pytest.approx([1.5] * 4, rel=1e-6)
    assert (weights.diff(dim=1) <= 0).all()  # without a bias the largest comes first


def test_hopeless_rows_are_finite() -> None:
    """Logits so low that every score underflows: no division of zero by zero."""
    ids, weights = ops.topk_route(torch.full((1, 4), -1e4), torch.zeros(4), top_k=2, scale=1.5)
    assert ids.tolist() == [[0, 1]] and weights.isfinite().all()


def test_rows() -> None:
    logits, bias, image = torch.randn(6, 8), torch.randn(8), torch.arange(6) % 2 == 0
    keys: dict[str, Any] = {"top_k": 3, "scale": 1.5}

    def call(rows: torch.Tensor) -> Any:
        return ops.topk_route(logits[rows], bias, image_bias=-bias, image=image[rows], **keys)

    assert_rows_independent(call, 6)
    assert_nan_stays(lambda x: ops.topk_route(x, bias, **keys), logits)


L, B = torch.zeros(2, 8), torch.zeros(8)
K: dict[str, Any] = {"top_k": 2, "scale": 1.0}
ERRORS: dict[str, Any] = {
    "logits": (
        lambda: ops.topk_route(B, B, **K),
        r"topk_route: expected logits: \[\*, \*\] float32, got \[8\]",
    ),
    "bias": (lambda: ops.topk_route(L, B[:4], **K), r"bias: \[8\] float32, got \[4\]"),
    "top_k": (lambda: ops.topk_route(L, B, top_k=9, scale=1.0), "top_k: an integer of 1 to 8, got 9"),
    "pair": (lambda: ops.topk_route(L, B, image_bias=B, **K), "image and image_bias together, got"),
    "image": (lambda: ops.topk_route(L, B, image_bias=B, image=B > 0, **K), r"image: \[2\] bool, got \[8\]"),
    "image_bias": (
        lambda: ops.topk_route(L, B, image_bias=L, image=L[:, 0] > 0, **K),
        r"image_bias: \[8\] float32, got \[2, 8\]",
    ),
    **{
        f"temperature {t}": (
            lambda t=t: ops.topk_route(L, B, temperature=t, **K),
            f"temperature: a finite number above 0, got {t}",
        )
        for t in (0.0, -1.0, float("nan"))
    },
    "out ids": (
        lambda: ops.topk_route(L, B, out=(L, L), **K),
        r"out ids: \[2, 2\] int32, got \[2, 8\] float32",
    ),
    "out weights": (
        lambda: ops.topk_route(L, B, out=(L[:, :2].int().contiguous(), L), **K),
        r"out weights: \[2, 2\] float32, got \[2, 8\]",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])
