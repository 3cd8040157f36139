"""DeepGEMM's Mega MoE: what the adapter refuses, and what it hands over, to a stand-in for the library."""

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv41 import Target, ops
from dsv41.formats import E8M0, MXFP8, MXFP4Experts, quantize_mxfp4, quantize_mxfp8
from dsv41.ops.exchange import mega_experts
from tests.ops.rows import assert_refused, same
from tests.test_mutations import mutated

HIDDEN, INTER, TOP_K, ROOM = 256, 128, 3, 16
I32, BF16 = torch.int32, torch.bfloat16


def make_buffer(ranks: int, experts: int, **change: Any) -> Any:
    """A buffer as the library makes it: whatever is not written is not zero."""
    sizes = {"num_experts": experts * ranks, "hidden": HIDDEN, "intermediate_hidden": INTER}
    return types.SimpleNamespace(
        group=types.SimpleNamespace(size=lambda: ranks),
        num_max_tokens_per_rank=ROOM,
        num_topk=TOP_K,
        x=torch.full((ROOM, HIDDEN), torch.nan).to(torch.float8_e4m3fn),
        x_sf=torch.full((ROOM, HIDDEN // 128), -1, dtype=I32),
        topk_idx=torch.full((ROOM, TOP_K), 99),
        topk_weights=torch.full((ROOM, TOP_K), torch.nan),
        **{**sizes, **change},
    )


def codes(packed: torch.Tensor) -> torch.Tensor:
    assert packed.dtype == I32 and packed.stride(-2) == 1  # rows are the fastest dimension
    return packed.new_empty(packed.shape).copy_(packed).view(torch.uint8).view(E8M0)


class Library(types.ModuleType):
    """Transforms by a tag that the product must find again, and computes with the reference."""

    def transform_weights_for_mega_moe(self, first: Any, second: Any) -> Any:
        assert first[0].dtype == second[0].dtype == torch.int8
        return ("gate and up", *first), ("down", *second)

    def fp8_fp4_mega_moe(
        self,
        y: torch.Tensor,
        first: Any,
        second: Any,
        buffer: Any,
        *,
        activation_clamp: float,
        fast_math: bool,
    ) -> None:
        assert (first[0], second[0]) == ("gate and up", "down") and not fast_math and y.is_contiguous()
        experts = MXFP4Experts(
            first[1].view(torch.uint8), codes(first[2]), second[1].view(torch.uint8), codes(second[2])
        )
        n = len(y)
        x = MXFP8(buffer.x[:n], buffer.x_sf[:n].view(torch.uint8).view(E8M0))
        ids = buffer.topk_idx[:n]
        assert ((ids >= -1) & (ids < buffer.num_experts)).all()  # it sends a row wherever it is told
        assert ids.dtype == torch.int64 and (buffer.topk_weights[:n][ids < 0] == 0).all()
        here = torch.where(ids < experts.num_experts, ids, -1).to(I32)  # the other ranks are not here
        y.copy_(ops.mxfp4_moe(x, here, buffer.topk_weights[:n], experts, limit=activation_clamp))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    find = "importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: object())
    monkeypatch.setitem(sys.modules, "deep_gemm", Library("deep_gemm"))
    monkeypatch.setattr(Target, "of", staticmethod(lambda x: Target("cuda", 100)))
    yield


def make_experts(count: int) -> MXFP4Experts:
    a, b = (
        quantize_mxfp4(torch.randn(count, 2 * INTER, HIDDEN)),
        quantize_mxfp4(torch.randn(count, HIDDEN, INTER)),
    )
    return MXFP4Experts(a.values, a.scale, b.values, b.scale)


@pytest.mark.parametrize("tokens", [0, 5, ROOM])
@pytest.mark.parametrize("with_shared", [False, True])
def test_what_the_library_is_given(tokens: int, with_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts(4)
    made = mega_experts(make_buffer(2, 4), experts)
    monkeypatch.undo()  # the reference below runs on the CPU
    x = quantize_mxfp8(torch.randn(tokens, HIDDEN).to(BF16))
    slots = torch.randint(-1, 4, (tokens, TOP_K), dtype=I32)
    if tokens:
        slots[1] = torch.tensor([8, -7, 2**31 - 1])  # of nobody: the buffer has 8
    weights = torch.rand(tokens, TOP_K)
    shared = torch.randn(tokens, HIDDEN).to(BF16) if with_shared else None
    want = ops.mxfp4_moe(x, torch.where(slots < 4, slots, -1), weights, experts, limit=3.0)
    want = want if shared is None else want + shared
    out = shared if with_shared else torch.empty(tokens, HIDDEN, dtype=BF16)
    got = made(x, slots, weights, limit=3.0, shared=shared, out=out)
    assert got is out and same(got, want)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, buffer = make_experts(4), make_buffer(2, 4)
    for change in ({"num_experts": 4}, {"hidden": 512}, {"intermediate_hidden": 64}):
        wrong = make_buffer(2, 4, **change)
        assert_refused(
            lambda b=wrong: mega_experts(b, experts), r"a buffer of \(8, 256, 128\) slots of all ranks"
        )
    folded = replace(experts, layout="hopper exact 127 127")
    assert_refused(lambda: mega_experts(buffer, folded), "experts in the plain layout, got hopper")
    made = mega_experts(buffer, experts)
    x = quantize_mxfp8(torch.randn(5, HIDDEN).to(BF16))
    slots, weights = torch.zeros(5, TOP_K, dtype=I32), torch.ones(5, TOP_K)
    many = quantize_mxfp8(torch.randn(ROOM + 1, HIDDEN).to(BF16))
    narrow = quantize_mxfp8(torch.randn(5, 128).to(BF16))
    for call, message in (
        (
            lambda: made(many, slots, weights, limit=1.0),
            "at most 16 tokens, as the buffer has room for, got 17",
        ),
        (lambda: made(narrow, slots, weights, limit=1.0), r"x: MXFP8 of \[num_tokens, 256\]"),
        (lambda: made(x.values, slots, weights, limit=1.0), r"x: MXFP8 of \[num_tokens, 256\]"),
        (lambda: made(x, slots[:, :2], weights, limit=1.0), r"slots: \[5, 3\] int32, got \[5, 2\]"),
        (lambda: made(x, slots, weights.double(), limit=1.0), r"weights: \[5, 3\] float32"),
        (lambda: made(x, slots, weights, limit=0.0), "limit: a finite number above 0, got 0.0"),
        (
            lambda: made(x, slots, weights, limit=1.0, shared=torch.zeros(4, HIDDEN)),
            r"shared: \[5, 256\] bfloat16",
        ),
    ):
        assert_refused(call, message)
    monkeypatch.setenv("DSV41_CHECK", "1")
    assert_refused(lambda: made(x, slots + 8, weights, limit=1.0), "slots: at most 7, got 8")
    monkeypatch.setattr(Target, "of", staticmethod(lambda x: Target("cuda", 90)))
    assert_refused(lambda: mega_experts(buffer, experts), "experts on cuda sm100 or sm103, got cuda sm90")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_refused(lambda: mega_experts(buffer, experts), "package 'deep_gemm', got not installed")


# Planted into what is handed over: the mistake, and what it replaces.
CALL, MADE = ("dsv41.ops.exchange.deepgemm_cuda:MegaExperts." + name for name in ("__call__", "__init__"))
FAULTS = [
    (CALL, "(slots < b.num_experts)", "(slots <= b.num_experts)"),
    (CALL, "(slots >= 0)", "(slots >= -1)"),
    (CALL, "torch.where(held, weights, 0)", "weights"),
    (CALL, "x.scale.view(torch.uint8)", "x.scale.view(torch.uint8).roll(1, 0)"),
    (CALL, "y, *self.weights, b", "y, *self.weights[::-1], b"),
    (CALL, "torch.add(y, shared, out=out)", "out.copy_(y)"),
    (CALL, "activation_clamp=limit", "activation_clamp=10 * limit"),
    (MADE, "packed_scale(w13_scale)", "packed_scale(w13_scale.flip(0))"),
    (MADE, "packed_scale(w2_scale)", "packed_scale(w2_scale.roll(1, 1))"),
]


@pytest.mark.parametrize("target, old, new", FAULTS)
def test_faults_are_seen(target: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mutated(target, old, new), pytest.raises((AssertionError, RuntimeError)):
        test_what_the_library_is_given(5, True, monkeypatch)
