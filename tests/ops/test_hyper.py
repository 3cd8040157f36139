"""mHC: mixes, collapse and expand against loops in Python."""

import math

import pytest
import torch
from dsv41_reference import accumulate
from dsv41_reference.hyper import sinkhorn
from hypothesis import given
from hypothesis import strategies as st

from dsv41 import ops
from tests.ops.rows import assert_nan_stays, assert_refused, assert_rows_independent

BF16, S, D = torch.bfloat16, 4, 8
KEYS = {"norm_eps": 1e-20, "eps": 1e-6, "iters": 20}


def parameters() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = S * (S + 2)
    return torch.randn(outputs, S * D), torch.randn(outputs), torch.tensor([0.5, -1.5, 2.0])


def sinkhorn_by_hand(rows: list[list[float]], iters: int, eps: float) -> list[list[float]]:
    n = range(len(rows))
    top = [max(r) for r in rows]
    e = [[math.exp(rows[i][j] - top[i]) for j in n] for i in n]
    c = [[e[i][j] / sum(e[i]) + eps for j in n] for i in n]
    for step in range(iters):
        if step:
            c = [[c[i][j] / (sum(c[i]) + eps) for j in n] for i in n]
        column = [sum(c[i][j] for i in n) + eps for j in n]
        c = [[c[i][j] / column[j] for j in n] for i in n]
    return c


def test_mixes_closed_form() -> None:
    """pre has the epsilon, post the factor two; the matrix has rows first and columns last, 20 of each."""
    x, (fn, base, scale) = torch.randn(2, S, D).to(BF16), parameters()
    for iters in (1, 2, 20):
        keys = {"norm_eps": 0.125, "eps": 1e-3, "iters": iters}  # large enough to be seen in f32
        with accumulate(torch.float64):
            pre, post, comb = ops.mhc_mixes(x, fn, base, scale, **keys)
        for t in range(2):
            row = x[t].flatten().double()
            size = math.sqrt(float(row.square().mean()) + 0.125)
            m = [float(fn[o].double() @ row) / size for o in range(len(fn))]

            def logit(o: int, part: int, m: list[float] = m) -> float:
                return m[o] * float(scale[part]) + float(base[o])

            def sigmoid(v: float) -> float:
                return 1 / (1 + math.exp(-v))

            assert pre[t].tolist() == pytest.approx([sigmoid(logit(o, 0)) + 1e-3 for o in range(S)], rel=1e-7)
            assert post[t].tolist() == pytest.approx(
                [2 * sigmoid(logit(S + o, 1)) for o in range(S)], rel=1e-7
            )
            square = [[logit(2 * S + S * j + k, 2) for k in range(S)] for j in range(S)]
            want = sinkhorn_by_hand(square, iters, 1e-3)
            assert comb[t].tolist() == [pytest.approx(r, rel=1e-6) for r in want]


def test_zero_logits() -> None:
    """Without inputs and bias: pre is 1/2 + eps, post is 1, every stream goes to every stream alike."""
    x, fn = torch.zeros(1, S, D, dtype=BF16), torch.ones(S * (S + 2), S * D)
    pre, post, comb = ops.mhc_mixes(
        x, fn, torch.zeros(len(fn)), torch.ones(3), norm_eps=1e-20, eps=0.0, iters=20
    )
    assert (pre == 0.5).all() and (post == 1).all() and (comb == 0.25).all()


@given(st.lists(st.floats(-20, 20), min_size=16, max_size=16))
def test_sinkhorn_is_doubly_stochastic(values: list[float]) -> None:
    """The columns, which are normalised last, sum to one up to the epsilon; the matrix is positive."""
    c = sinkhorn(torch.tensor(values, dtype=torch.float64).view(4, 4), 20, 1e-6)
    assert (c > 0).all() and (c.sum(-2) - 1).abs().max() < 1e-5


def test_transposing_the_logits_is_not_transposing_the_matrix() -> None:
    logits = torch.tensor([[3.0, 0.0], [0.0, -3.0]]) + torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    one = sinkhorn(logits, 1, 0.0)
    assert not torch.allclose(one, sinkhorn(logits.T, 1, 0.0).T)


def test_collapse_closed_form() -> None:
    x, pre = torch.randn(3, S, D).to(BF16), torch.rand(3, S)
    with accumulate(torch.float64):
        got = ops.mhc_collapse(x, pre)
    want = [[sum(pre[t, s].item() * x[t, s, d].item() for s in range(S)) for d in range(D)] for t in range(3)]
    assert torch.equal(got, torch.tensor(want, dtype=torch.float64).to(torch.float32).to(BF16))
    first = torch.tensor([1.0, 0, 0, 0]).expand(3, 4).contiguous()
    assert torch.equal(ops.mhc_collapse(x, first), x[:, 0])


def test_expand_closed_form() -> None:
    """Stream k takes comb[j, k] of stream j: the sum runs over the first index."""
    y, x = torch.randn(2, D).to(BF16), torch.randn(2, S, D).to(BF16)
    post, comb = torch.randn(2, S), torch.rand(2, S, S)
    with accumulate(torch.float64):
        got = ops.mhc_expand(y, x, post, comb)
    for t in range(2):
        for k in range(S):
            want = post[t, k].double() * y[t].double()
            want = want + sum(comb[t, j, k].double() * x[t, j].double() for j in range(S))
            assert torch.equal(got[t, k], want.float().to(BF16))
    shift = torch.zeros(2, S, S)
    for j in range(S):
        shift[:, j, (j + 1) % S] = 1
    assert torch.equal(ops.mhc_expand(y, x, torch.zeros(2, S), shift), x.roll(1, 1))


def test_rows() -> None:
    x, params = torch.randn(6, S, D).to(BF16), parameters()
    y, pre, comb = torch.randn(6, D).to(BF16), torch.rand(6, S), torch.rand(6, S, S)
    assert_rows_independent(lambda r: ops.mhc_mixes(x[r], *params, **KEYS), 6)
    assert_rows_independent(lambda r: ops.mhc_collapse(x[r], pre[r]), 6)
    assert_rows_independent(lambda r: ops.mhc_expand(y[r], x[r], pre[r], comb[r]), 6)
    assert_nan_stays(lambda x: ops.mhc_mixes(x, *params, **KEYS), x)
    assert_nan_stays(lambda x: ops.mhc_collapse(x, pre), x)
    assert_nan_stays(lambda x: ops.mhc_expand(y, x, pre, comb), x)


X, FN = torch.zeros(2, S, D, dtype=BF16), torch.zeros(24, S * D)
B, C, P, Q = torch.zeros(24), torch.zeros(3), torch.zeros(2, S), torch.zeros(2, S, S)
ERRORS = {
    "mixes x": (
        lambda: ops.mhc_mixes(X.float(), FN, B, C, **KEYS),
        r"mhc_mixes: expected x: \[\*, \*, \*\] bfloat16",
    ),
    "mixes contiguous": (
        lambda: ops.mhc_mixes(torch.zeros(2, S, 2 * D, dtype=BF16)[..., :D], FN, B, C, **KEYS),
        r"x: contiguous, got strides \(64, 16, 1\)",
    ),
    "mixes fn": (lambda: ops.mhc_mixes(X, FN[:8], B, C, **KEYS), r"fn: \[24, 32\] float32, got \[8, 32\]"),
    "mixes base": (lambda: ops.mhc_mixes(X, FN, B[:3], C, **KEYS), r"base: \[24\] float32, got \[3\]"),
    "mixes scale": (lambda: ops.mhc_mixes(X, FN, B, B, **KEYS), r"scale: \[3\] float32, got \[24\]"),
    "mixes iters": (
        lambda: ops.mhc_mixes(X, FN, B, C, norm_eps=0.0, eps=0.0, iters=0),
        "iters: an integer of 1 or more, got 0",
    ),
    "mixes out": (
        lambda: ops.mhc_mixes(X, FN, B, C, **KEYS, out=(P, P, P)),
        r"out comb: \[2, 4, 4\] float32, got",
    ),
    "collapse x": (lambda: ops.mhc_collapse(X[0], P), r"mhc_collapse: expected x: \[\*, \*, \*\] bfloat16"),
    "collapse pre": (lambda: ops.mhc_collapse(X, P[:, :2]), r"pre: \[2, 4\] float32, got \[2, 2\]"),
    "collapse out": (lambda: ops.mhc_collapse(X, P, out=P), r"out: \[2, 8\] bfloat16, got \[2, 4\] float32"),
    "expand x": (
        lambda: ops.mhc_expand(X[:, 0], X[0], P, Q),
        r"mhc_expand: expected x: \[\*, \*, \*\] bfloat16",
    ),
    "expand y": (lambda: ops.mhc_expand(X[:1, 0], X, P, Q), r"y: \[2, 8\] bfloat16, got \[1, 8\]"),
    "expand post": (lambda: ops.mhc_expand(X[:, 0], X, P[0], Q), r"post: \[2, 4\] float32, got \[4\]"),
    "expand comb": (lambda: ops.mhc_expand(X[:, 0], X, P, P), r"comb: \[2, 4, 4\] float32, got \[2, 4\]"),
    "expand out": (
        lambda: ops.mhc_expand(X[:, 0], X, P, Q, out=X[:1]),
        r"out: \[2, 4, 8\] bfloat16, got \[1, 4, 8\]",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])
