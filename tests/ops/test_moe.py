"""Mixture of experts: identity experts, one expert, empty experts."""

import dataclasses
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from dsv41_reference.numerics import bf16, silu
from dsv41_reference.quant import from_mxfp4, q8
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import ops
from dsv41.formats import MXFP4Experts, quantize_mxfp4, quantize_mxfp8
from tests.ops.rows import assert_nan_stays, assert_refused, assert_rows_independent, same

BF16, HIDDEN, INTER = torch.bfloat16, 64, 32


def stack(w13: torch.Tensor, w2: torch.Tensor) -> MXFP4Experts:
    a, b = quantize_mxfp4(w13), quantize_mxfp4(w2)
    return MXFP4Experts(a.values, a.scale, b.values, b.scale)


def experts(count: int = 4) -> MXFP4Experts:
    return stack(torch.randn(count, 2 * INTER, HIDDEN), torch.randn(count, HIDDEN, INTER))


def choices(tokens: int, count: int = 4, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).to(torch.int32)
    return ids, torch.rand(tokens, top_k) + 0.1


def by_hand(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, e: MXFP4Experts, limit: float):
    """One token and one expert at a time, rounded where the specification rounds."""
    w13, s13, w2, s2, _ = e.flat()
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for t in range(len(x)):
        for k in range(ids.shape[1]):
            i = int(ids[t, k])
            if i < 0:
                continue
            gate_up = bf16(q8(x[t]).double() @ from_mxfp4(w13[i], s13[i]).double().T).double()
            gate, up = gate_up[:INTER].clamp(max=limit), gate_up[INTER:].clamp(-limit, limit)
            y = bf16(silu(gate) * up * weights[t, k].double())
            out[t] += bf16(q8(y).double() @ from_mxfp4(w2[i], s2[i]).double().T).double()
    return bf16(out)


@pytest.mark.parametrize("limit", [10.0, 0.5])
def test_closed_form(limit: float) -> None:
    x, e = torch.randn(5, HIDDEN).to(BF16), experts()
    ids, weights = choices(5)
    ids[2, 1] = -1
    with accumulate(torch.float64):
        got = ops.mxfp4_moe(x, ids, weights, e, limit=limit)
        assert torch.equal(got, by_hand(x, ids, weights, e, limit))


def test_identity_expert() -> None:
    """Gate rows first, then up: w1 picks the first half of x, w3 the second, w2 puts the product back."""
    w13 = torch.cat([torch.eye(INTER, HIDDEN), torch.eye(INTER, HIDDEN).roll(INTER, 1)])[None]
    w2 = torch.cat([torch.eye(INTER), torch.zeros(INTER, INTER)])[None]
    x = torch.randn(3, HIDDEN).to(BF16)
    one = torch.zeros(3, 1, dtype=torch.int32)
    with accumulate(torch.float64):
        got = ops.mxfp4_moe(x, one, torch.full((3, 1), 0.75), stack(w13, w2), limit=10.0)
    gate, up = q8(x).double().chunk(2, 1)
    want = q8(bf16(silu(gate) * up * 0.75)).to(BF16)
    assert torch.equal(got, torch.cat([want, torch.zeros_like(want)], 1))


def test_weight_before_the_second_product() -> None:
    """A weight that is no power of two moves the second quantisation: not the same as scaling the output."""
    x, e, ids = torch.randn(8, HIDDEN).to(BF16), experts(1), torch.zeros(8, 1, dtype=torch.int32)

    def moe(weight: float) -> torch.Tensor:
        return ops.mxfp4_moe(x, ids, torch.full((8, 1), weight), e, limit=10.0)

    with accumulate(torch.float64):
        assert torch.equal(moe(0.5), (0.5 * moe(1.0).float()).to(BF16))
        assert not torch.equal(moe(0.7), (0.7 * moe(1.0).float()).to(BF16))


def test_none_and_shared() -> None:
    x, e, (ids, weights) = torch.randn(4, HIDDEN).to(BF16), experts(), choices(4)
    shared = torch.randn(4, HIDDEN).to(BF16)
    ids[1] = -1
    plain = ops.mxfp4_moe(x, ids, weights, e, limit=10.0)
    assert (plain[1] == 0).all()
    out = shared.clone()
    assert ops.mxfp4_moe(x, ids, weights, e, limit=10.0, shared=out, out=out) is out
    assert torch.equal(out[1], shared[1])
    weights[1] = torch.nan  # the weight of no expert is not looked at
    assert same(ops.mxfp4_moe(x, ids, weights, e, limit=10.0), plain)
    ids[:] = -1
    assert (ops.mxfp4_moe(x, ids, weights, e, limit=10.0) == 0).all()


@settings(max_examples=20)
@given(st.permutations(range(4)), st.integers(0, 99))
def test_numbering_of_experts_does_not_matter(order: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    x, e, (ids, weights) = torch.randn(6, HIDDEN).to(BF16), experts(), choices(6)
    moved = MXFP4Experts(e.w13[order], e.w13_scale[order], e.w2[order], e.w2_scale[order])
    place = torch.tensor([order.index(i) for i in range(4)], dtype=torch.int32)
    with accumulate(torch.float64):
        want = ops.mxfp4_moe(x, ids, weights, e, limit=10.0)
        assert torch.equal(ops.mxfp4_moe(x, place[ids.long()], weights, moved, limit=10.0), want)


def test_all_tokens_to_one_expert() -> None:
    x, e = torch.randn(70, HIDDEN).to(BF16), experts()
    ids = torch.full((70, 1), 2, dtype=torch.int32)
    with accumulate(torch.float64):
        got = ops.mxfp4_moe(x, ids, torch.ones(70, 1), e, limit=10.0)
        assert torch.equal(got, by_hand(x, ids, torch.ones(70, 1), e, 10.0))


def test_rows() -> None:
    x, e, (ids, weights) = torch.randn(6, HIDDEN).to(BF16), experts(), choices(6)
    ids[3, 0] = -1
    assert_rows_independent(lambda r: ops.mxfp4_moe(x[r], ids[r], weights[r], e, limit=10.0), 6)
    assert_nan_stays(lambda x: ops.mxfp4_moe(x, ids, weights, e, limit=10.0), x)
    assert_nan_stays(lambda w: ops.mxfp4_moe(x, ids, w, e, limit=10.0), weights)
    quantised = ops.mxfp4_moe(ops.quantize_mxfp8(x), ids, weights, e, limit=10.0)
    assert same(quantised, ops.mxfp4_moe(x, ids, weights, e, limit=10.0))


def test_a_wrong_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contributes nothing, and is refused when values are checked."""
    x, e, (ids, weights) = torch.randn(2, HIDDEN).to(BF16), experts(), choices(2)
    ids[0, 0] = 99
    contained = ops.mxfp4_moe(x, ids, weights, e, limit=10.0)
    ids[0, 0] = -1
    assert same(contained, ops.mxfp4_moe(x, ids, weights, e, limit=10.0))
    ids[0, 0] = 4
    monkeypatch.setenv("DSV41_CHECK", "1")
    assert_refused(lambda: ops.mxfp4_moe(x, ids, weights, e, limit=10.0), "expert_ids: -1 to 3, got")


@pytest.mark.parametrize("place", ["x.scale", "w13_scale", "w2_scale"])
def test_a_scale_byte_of_255(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, e, (ids, weights) = quantize_mxfp8(torch.randn(2, HIDDEN).to(BF16)), experts(), choices(2)
    scale = {"x.scale": x.scale, "w13_scale": e.w13_scale, "w2_scale": e.w2_scale}[place]
    scale.view(torch.uint8).view(-1)[1] = 255
    monkeypatch.setenv("DSV41_CHECK", "1")
    assert_refused(
        lambda: ops.mxfp4_moe(x, ids, weights, e, limit=1.0), f"mxfp4_moe: expected {place}: no byte 255"
    )


E, X = experts(1), torch.zeros(2, HIDDEN, dtype=BF16)
J, W = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1)
NOTHING: Any = None


def packed(**changes: Any) -> MXFP4Experts:
    """What packing gives, changed."""
    e = ops.pack_experts(stack(torch.randn(2, 256, 256), torch.randn(2, 256, 128)))
    return dataclasses.replace(e, **{name: change(e) for name, change in changes.items()})


@pytest.mark.parametrize("changes, message", [
    ({"w2": lambda e: e.w2[:1]}, r"w2: \[2, 256, 64\] uint8"),
    ({"w13_scale": lambda e: e.w13_scale[:, :1]}, r"w13_scale: \[2, 256, 8\]"),
    ({"layout": lambda e: "hopper"}, "layout: plain, plain fp8 or that of pack_experts, got hopper"),
    ({"layout": lambda e: "hopper exact 999 -5"}, "layout: plain, plain fp8 or that of pack_experts"),
    ({"layout": lambda e: "hopperx exact 120 120"}, "layout: plain, plain fp8 or that of pack_experts"),
    ({"layout": lambda e: "plainer"}, "layout: plain, plain fp8 or that of pack_experts"),
])  # fmt: skip
def test_packed_experts_are_looked_at(changes: dict[str, Any], message: str) -> None:
    assert_refused(lambda: packed(**changes), message)


def test_the_view_that_was_packed_is_refused() -> None:
    e = stack(torch.randn(2, 256, 256), torch.randn(2, 256, 128))
    x, ids = torch.zeros(1, 256, dtype=BF16), torch.zeros(1, 1, dtype=torch.int32)
    ops.pack_experts(e)
    assert_refused(
        lambda: ops.mxfp4_moe(x, ids, torch.ones(1, 1), e, limit=1.0),
        "mxfp4_moe: expected the view that pack_experts returned, got the one that it took",
    )
    assert_refused(lambda: ops.pack_experts(e), "plain layout, got moved")


ERRORS: dict[str, Any] = {
    "no column": (
        lambda: ops.mxfp4_moe(X, J[:, :0], W[:, :0], E, limit=1.0),
        "mxfp4_moe: expected expert_ids of at least one column",
    ),
    "fp8 of any width": (
        lambda: ops.mxfp4_moe(X, J, W, dataclasses.replace(E, layout="plain fp8"), limit=1.0),
        r"mxfp4_moe: expected hidden and inter multiples of 128 in fp8, got \(64, 32\)",
    ),
    "rows of out overlap": (
        lambda: ops.mxfp4_moe(
            X, J, W, E, limit=1.0, out=torch.zeros(200, dtype=BF16).as_strided((2, 64), (32, 1))
        ),
        "mxfp4_moe: expected out: elements apart in memory",
    ),
    "add_up": (
        lambda: ops.pack_experts(E, add_up=3),  # type: ignore[arg-type]
        "pack_experts: expected add_up: a function of counts, or None, got 3",
    ),
    "experts": (
        lambda: ops.mxfp4_moe(X, J, W, NOTHING, limit=1.0),
        "mxfp4_moe: expected experts: MXFP4Experts, got None",
    ),
    "x": (
        lambda: ops.mxfp4_moe(X[:, :32], J, W, E, limit=1.0),
        r"x: \[\*, 64\] bfloat16, got \[2, 32\] bfloat16",
    ),
    "x.values": (
        lambda: ops.mxfp4_moe(quantize_mxfp8(X[:, :32]), J, W, E, limit=1.0),
        r"x.values: \[\*, 64\] float8_e4m3fn, got \[2, 32\]",
    ),
    "x tiles": (
        lambda: ops.mxfp4_moe(quantize_mxfp8(torch.zeros(32, 64), tile_rows=32), J, W, E, limit=1.0),
        "x: MXFP8 of 1 x 32 blocks, got 32",
    ),
    "ids": (
        lambda: ops.mxfp4_moe(X, J.long(), W, E, limit=1.0),
        r"expert_ids: \[2, \*\] int32, got \[2, 1\] int64",
    ),
    "weights": (
        lambda: ops.mxfp4_moe(X, J, W[:1], E, limit=1.0),
        r"expert_weights: \[2, 1\] float32, got \[1, 1\]",
    ),
    "shared": (
        lambda: ops.mxfp4_moe(X, J, W, E, limit=1.0, shared=X.float()),
        r"shared: \[2, 64\] bfloat16, got \[2, 64\] float32",
    ),
    "out": (
        lambda: ops.mxfp4_moe(X, J, W, E, limit=1.0, out=X[:1]),
        r"out: \[2, 64\] bfloat16, got \[1, 64\]",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])
