"""Linears: identity weights, exact integers, groups."""

from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from dsv41_reference.quant import q8

from dsv41 import ops
from dsv41.formats import E4M3, E8M0, MXFP8, FP8Tiles, quantize_mxfp8
from tests.ops.rows import assert_nan_stays, assert_refused, assert_rows_independent, same

BF16 = torch.bfloat16


def tiles(w: torch.Tensor) -> MXFP8:
    return quantize_mxfp8(w, tile_rows=32)


def test_identity_weight_is_quantising() -> None:
    """With the identity, the block linear is the activation's own quantisation, and the others are a copy."""
    x, eye = torch.randn(3, 64).to(BF16), torch.eye(64)
    assert torch.equal(ops.block_linear(x, tiles(eye)), q8(x).to(BF16))
    assert torch.equal(ops.linear(x, eye.to(BF16)), x)
    assert torch.equal(ops.linear(x, eye.to(BF16), dtype=torch.float32), x.float())
    groups = torch.randn(3, 2, 32).to(BF16)
    both = torch.cat([torch.eye(32), 2 * torch.eye(32)])
    got = ops.grouped_linear(groups, tiles(both))  # not quantised, and each group has its own weight
    assert torch.equal(got, torch.stack([groups[:, 0], 2 * groups[:, 1]], 1))


def test_exact_products() -> None:
    """Small integers are exact in every format and accumulation: the product is the integer one."""
    x, w = torch.randint(-4, 5, (5, 96)), torch.randint(-4, 5, (64, 96))
    want = (x @ w.T).float()
    assert torch.equal(ops.block_linear(x.to(BF16), tiles(w.float())), want.to(BF16))
    assert torch.equal(ops.linear(x.to(BF16), w.to(BF16), dtype=torch.float32), want)
    groups, weights = x.view(5, 3, 32), torch.randint(-4, 5, (96, 32))
    want = torch.einsum("tgi,gri->tgr", groups, weights.view(3, 32, 32)).to(BF16)
    assert torch.equal(ops.grouped_linear(groups.to(BF16), tiles(weights.float())), want)


def test_a_scale_belongs_to_its_tile() -> None:
    """Row tile r and column tile c weigh 2^(2r + c): a swapped or repeated scale shows."""
    w = torch.ones(64, 64)
    for r in range(2):
        for c in range(2):
            w[32 * r : 32 * r + 32, 32 * c : 32 * c + 32] = 2.0 ** (2 * r + c)
    x = torch.cat([torch.ones(1, 32), 4 * torch.ones(1, 32)], 1).to(BF16)
    got = ops.block_linear(x, tiles(w)).float()[0]
    assert got.tolist() == [32 * (1 + 8)] * 32 + [32 * (4 + 32)] * 32


def test_quantised_input_is_the_same() -> None:
    x, w = torch.randn(4, 64).to(BF16), tiles(torch.randn(32, 64))
    assert same(ops.block_linear(x, w), ops.block_linear(ops.quantize_mxfp8(x), w))


def test_default_output_type() -> None:
    x, w = torch.randn(2, 16).to(BF16), torch.randn(3, 16).to(BF16)
    assert ops.linear(x, w).dtype == BF16
    out = torch.empty(2, 3)
    assert ops.linear(x, w, out=out) is out
    assert torch.equal(out, ops.linear(x, w, dtype=torch.float32))


def test_rows() -> None:
    x, w = torch.randn(6, 64).to(BF16), tiles(torch.randn(64, 64))
    calls = {
        "block": lambda x: ops.block_linear(x, w),
        "linear": lambda x: ops.linear(x, w.dequantize()),
        "grouped": lambda x: ops.grouped_linear(x.view(-1, 1, 64), w),
    }
    for call in calls.values():
        assert_rows_independent(lambda r, call=call: call(x[r]), 6)
        assert_nan_stays(call, x)


X, W = torch.zeros(2, 32, dtype=BF16), tiles(torch.zeros(32, 32))
G = X[:, None]
ERRORS: dict[str, Any] = {
    "block w": (
        lambda: ops.block_linear(X, quantize_mxfp8(X)),
        "block_linear: expected w: MXFP8 of 32 x 32 tiles",
    ),
    "block x": (lambda: ops.block_linear(X[:, :16], W), r"x: \[\*, 32\] bfloat16, got \[2, 16\] bfloat16"),
    "block values": (
        lambda: ops.block_linear(quantize_mxfp8(torch.zeros(2, 64)), W),
        r"x.values: \[\*, 32\] float8_e4m3fn, got \[2, 64\]",
    ),
    "block tiles": (lambda: ops.block_linear(W, W), "x: MXFP8 of 1 x 32 blocks, got 32"),
    "block out": (
        lambda: ops.block_linear(X, W, out=X.float()),
        r"out: \[2, 32\] bfloat16, got \[2, 32\] float32",
    ),
    "grouped w": (
        lambda: ops.grouped_linear(G, quantize_mxfp8(X)),
        "grouped_linear: expected w: MXFP8 of 32 x 32",
    ),
    "grouped x": (lambda: ops.grouped_linear(X, W), r"x: \[\*, \*, 32\] bfloat16, got \[2, 32\]"),
    "grouped rank": (
        lambda: ops.grouped_linear(G.expand(2, 3, 32), W),
        r"w: \[groups \* rank, in\], got \[32, 32\]",
    ),
    "grouped out": (lambda: ops.grouped_linear(G, W, out=X), r"out: \[2, 1, 32\] bfloat16, got \[2, 32\]"),
    "scratch": (
        lambda: ops.block_linear(X, W, scratch=torch.zeros(255, dtype=torch.uint8)),
        r"block_linear: expected scratch: at least 256 bytes, got \[255\] uint8",
    ),
    "grouped scratch": (
        lambda: ops.grouped_linear(G, W, scratch=torch.zeros(255, dtype=torch.uint8)),
        r"grouped_linear: expected scratch: at least 256 bytes, got \[255\] uint8",
    ),
    "linear w": (lambda: ops.linear(X, X[0]), r"linear: expected w: \[\*, \*\] bfloat16, got \[32\]"),
    "linear x": (lambda: ops.linear(X.float(), X), r"x: \[\*, 32\] bfloat16, got \[2, 32\] float32"),
    "linear dtype": (
        lambda: ops.linear(X, X, dtype=torch.float16),
        "dtype: float32 or bfloat16, got torch.float16",
    ),
    "linear out": (lambda: ops.linear(X, X, out=X), r"out: \[2, 2\] bfloat16, got \[2, 32\]"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])


def test_float64_needs_no_order() -> None:
    """The columns of a product in any order: equal bits in float64, which float32 does not promise."""
    x, w, order = torch.randn(4, 256).to(BF16), torch.randn(8, 256).to(BF16), torch.randperm(256)
    with accumulate(torch.float64):
        assert torch.equal(ops.linear(x, w), ops.linear(x[:, order], w[:, order]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_follows_the_sizes(dynamic: bool) -> None:
    """One graph with no break: the scratch is a function that torch.compile can follow."""
    torch._dynamo.reset()
    w = tiles(torch.randn(64, 64))

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.block_linear(x, w), ops.grouped_linear(x[:, None], w)

    graph = torch.compile(both, backend="eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 200):
        x = torch.randn(rows, 64).to(BF16)
        assert all(torch.equal(a, b) for a, b in zip(graph(x), both(x), strict=True))


@pytest.mark.parametrize("place", ["x", "w", "grouped"])
def test_a_scale_byte_of_255(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = quantize_mxfp8(torch.randn(2, 64).bfloat16()), quantize_mxfp8(torch.randn(32, 64), tile_rows=32)
    broken = x if place == "x" else w
    broken.scale.view(torch.uint8)[0, 1] = 255
    monkeypatch.setenv("DSV41_CHECK", "1")
    if place == "grouped":
        rows = torch.randn(2, 1, 64).bfloat16()
        assert_refused(lambda: ops.grouped_linear(rows, w), "grouped_linear: expected w.scale: no byte 255")
    else:
        assert_refused(lambda: ops.block_linear(x, w), f"block_linear: expected {place}.scale: no byte 255")


def test_a_scale_byte_of_255_in_folded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    w = FP8Tiles(torch.zeros(128, 128).to(E4M3), torch.full((1, 1), 255, dtype=torch.uint8).view(E8M0))
    monkeypatch.setenv("DSV41_CHECK", "1")
    x = torch.randn(3, 128).bfloat16()
    assert_refused(lambda: ops.block_linear(x, w), "block_linear: expected w.scale: no byte 255")
