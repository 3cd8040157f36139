"""Quantising ops: rows of the formats, and the clamped SwiGLU."""

import math
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from dsv41_reference.numerics import bf16

from dsv41 import formats, ops
from dsv41.formats import E4M3, E8M0, MXFP8
from tests.ops.rows import assert_nan_stays, assert_refused, assert_rows_independent, same

BF16 = torch.bfloat16
QUANTIZE = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}


def op(kind: str):
    return getattr(ops, f"quantize_{kind}")


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("kind", QUANTIZE)
def test_op_equals_format(kind: str, dtype: torch.dtype) -> None:
    """The op and the format's own function are one: also for strided rows and another floor."""
    x = (torch.randn(5, 192) * torch.logspace(-6, 6, 5)[:, None]).to(dtype)[:, :96]
    for floor in ({}, {"floor": 0.5}):
        got, want = op(kind)(x, **floor), getattr(formats, f"quantize_{kind}")(x, **floor)
        assert same(got.values, want.values) and same(got.scale, want.scale)


@pytest.mark.parametrize("kind", QUANTIZE)
def test_rows(kind: str) -> None:
    x = torch.randn(6, 64).to(BF16)
    assert_rows_independent(lambda rows: op(kind)(x[rows]), 6)
    assert_nan_stays(op(kind), x)


def swiglu_by_hand(gate: float, up: float, weight: float, limit: float) -> float:
    gate, up = min(gate, limit), min(max(up, -limit), limit)
    return gate / (1 + math.exp(-gate)) * up * weight


@pytest.mark.parametrize("round_bf16", [True, False])
def test_swiglu_closed_form(round_bf16: bool) -> None:
    """The gate is clamped from above only, up on both sides, and the weight comes before the rounding."""
    gate = torch.tensor([-20.0, -3.0, -0.5, 0.0, 0.75, 2.0, 3.0, 50.0] * 4)
    up = torch.tensor([7.0, -7.0, 1.5, -1.5, 0.25, 3.0, -0.125, 30.0] * 4)
    weight = torch.tensor([1.0, 0.3])
    x = torch.cat([gate, up])[None].expand(2, -1).to(BF16)
    with accumulate(torch.float64):
        got = ops.swiglu_quantize(x, limit=2.5, weight=weight, round_bf16=round_bf16)
    rows = [
        [swiglu_by_hand(g, u, w, 2.5) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
        for w in weight.tolist()
    ]
    y = torch.tensor(rows, dtype=torch.float64)
    want = formats.quantize_mxfp8(bf16(y) if round_bf16 else y.float())
    assert same(got.values, want.values) and same(got.scale, want.scale)


def test_swiglu_rows() -> None:
    x, weight = torch.randn(5, 128).to(BF16), torch.rand(5)
    assert_rows_independent(lambda r: ops.swiglu_quantize(x[r], limit=10.0, weight=weight[r]), 5)
    assert_nan_stays(lambda x: ops.swiglu_quantize(x, limit=10.0), x)
    ones = ops.swiglu_quantize(x, limit=10.0, weight=torch.ones(5))
    assert same(ones.values, ops.swiglu_quantize(x, limit=10.0).values)


X = torch.zeros(2, 64, dtype=BF16)
OUT = MXFP8(torch.zeros(2, 32).to(E4M3), torch.zeros(2, 1, dtype=torch.uint8).view(E8M0))
V8, S8 = torch.zeros(2, 64).to(E4M3), torch.zeros(2, 2, dtype=torch.uint8).view(E8M0)
ERRORS = {
    "dims": (
        lambda: ops.quantize_mxfp8(X[0]),
        r"quantize_mxfp8: expected x: \[\*, \*\] bfloat16\|float32, got \[64\]",
    ),
    "dtype": (lambda: ops.quantize_mxfp4(X.double()), r"quantize_mxfp4: .* got \[2, 64\] float64"),
    "width": (lambda: ops.quantize_nvfp4(X[:, :24]), "K a multiple of 16, got"),
    "columns": (
        lambda: MXFP8(torch.zeros(64, 64).to(E4M3), torch.zeros(2, 64, dtype=torch.uint8).view(E8M0).t()),
        r"MXFP8: expected scale: last dimension contiguous, got strides \(1, 64\)",
    ),
    "stride": (lambda: ops.quantize_mxfp8(X[:, ::2]), r"x: last dimension contiguous, got strides \(64, 2\)"),
    "device": (lambda: ops.quantize_mxfp8(X[:, :32].to("meta"), out=OUT), r"out.values on meta, got cpu"),
    "out": (lambda: ops.quantize_mxfp8(X, out=OUT), r"out.values: \[2, 64\] float8_e4m3fn, got \[2, 32\]"),
    "gate_up": (lambda: ops.swiglu_quantize(X.float(), limit=1.0), r"gate_up: \[\*, \*\] bfloat16, got"),
    "inter": (lambda: ops.swiglu_quantize(X[:, :32], limit=1.0), "inter a multiple of 32, got"),
    **{
        f"limit {n}": (
            lambda n=n: ops.swiglu_quantize(X, limit=n),
            f"swiglu_quantize: expected limit: a finite number above 0, got {n}",
        )
        for n in (0.0, -1.0, float("nan"))
    },
    "out apart": (
        lambda: ops.quantize_mxfp8(X, out=MXFP8(V8[:1].expand(2, 64), S8)),
        r"out.values: elements apart in memory, got strides \(0, 1\)",
    ),
    "scale apart": (
        lambda: ops.quantize_mxfp8(X, out=MXFP8(V8, S8[:1].expand(2, 2))),
        r"out.scale: elements apart in memory, got strides \(0, 1\)",
    ),
    "norm apart": (
        lambda: ops.rms_norm_quantize(X, X[0], eps=0.0, norm=X[:1].expand(2, 64)),
        r"norm: elements apart in memory, got strides \(0, 1\)",
    ),
    "weight": (
        lambda: ops.swiglu_quantize(X, limit=1.0, weight=torch.ones(3)),
        r"weight: \[2\] float32, got \[3\]",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])


def test_out_of_another_format_is_refused() -> None:
    """The same shapes, other scales: nothing else would tell."""
    x = torch.randn(32, 32).bfloat16()
    mxfp4, nvfp4 = formats.quantize_mxfp4(x), formats.quantize_nvfp4(x)
    tiles = formats.quantize_mxfp8(x, tile_rows=32)
    calls: list[Any] = [
        (ops.quantize_mxfp4, nvfp4),
        (ops.quantize_nvfp4, mxfp4),
        (ops.quantize_mxfp8, tiles),
    ]
    for call, wrong in calls:
        with pytest.raises(ValueError, match="expected out: "):
            call(x, out=wrong)
