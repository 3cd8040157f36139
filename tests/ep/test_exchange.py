"""Exchange over threads: what comes back is the op's own result, whoever holds the experts."""

import types
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import ops
from dsv41.formats import MXFP4Experts, quantize_mxfp4, quantize_mxfp8
from dsv41.ops.exchange import Exchange, LocalTransport, PeerLost, agree, deepep_transport, facts
from tests.ep.ranks import on_ranks, told
from tests.ops.rows import assert_refused, same

BF16, I32 = torch.bfloat16, torch.int32
HIDDEN, INTER, TOP_K, PER_RANK = 64, 32, 3, 4


def make_experts(count: int) -> MXFP4Experts:
    a = quantize_mxfp4(torch.randn(count, 2 * INTER, HIDDEN))
    b = quantize_mxfp4(torch.randn(count, HIDDEN, INTER))
    return MXFP4Experts(a.values, a.scale, b.values, b.scale)


def part(e: MXFP4Experts, rank: int) -> MXFP4Experts:
    own = slice(PER_RANK * rank, PER_RANK * (rank + 1))
    return MXFP4Experts(e.w13[own], e.w13_scale[own], e.w2[own], e.w2_scale[own])


def layer(
    transport: Any, e: MXFP4Experts, given_: Any, shared: torch.Tensor, capacity: int | None
) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
    x, slots, weights = given_
    exchange = Exchange(transport, PER_RANK, capacity)
    flight = exchange.dispatch(x, slots, weights, exact=capacity is None)
    arrived = flight.wait()
    rows = ops.mxfp4_moe(*arrived, part(e, transport.rank), limit=10.0)
    return flight.combine(rows, shared=shared), exchange.lost()


def inputs(tokens: int, slots: torch.Tensor) -> Any:
    return quantize_mxfp8(torch.randn(tokens, HIDDEN)), slots, torch.rand(tokens, TOP_K)


@settings(max_examples=15)
@given(
    st.integers(1, 5), st.lists(st.integers(0, 6), min_size=5, max_size=5), st.booleans(), st.integers(0, 9)
)
def test_equals_one_rank(ranks: int, tokens: list[int], exact: bool, skew: int) -> None:
    """Ranks with and without tokens; routing from even to everything for one rank."""
    e = make_experts(ranks * PER_RANK)
    most = max(PER_RANK, ranks * PER_RANK * (10 - skew) // 10)
    given_ = [
        (inputs(n, torch.randint(-1, most, (n, TOP_K), dtype=I32)), torch.randn(n, HIDDEN).to(BF16))
        for n in tokens[:ranks]
    ]
    capacity = None if exact else 6 * TOP_K
    with accumulate(torch.float64):
        got = on_ranks(
            ranks,
            lambda t: layer(t, e, *given_[t.rank], capacity),
        )
        for ((x, slots, weights), shared), (out, lost) in zip(given_, got, strict=True):
            assert same(out, ops.mxfp4_moe(x, slots, weights, e, limit=10.0, shared=shared))
            assert lost == [0] * ranks


def test_pairs_past_the_capacity_are_counted_on_every_rank() -> None:
    """Rank 1 sends all 15 pairs to rank 0, which has room for 4 of them; nobody else loses any."""
    e = make_experts(3 * PER_RANK)

    def work(t: LocalTransport) -> Any:
        n = 5 if t.rank == 1 else 1
        slots = torch.zeros(n, TOP_K, dtype=I32) + (0 if t.rank == 1 else t.rank * PER_RANK)
        x, slots, weights = inputs(n, slots)
        shared = torch.zeros(n, HIDDEN, dtype=BF16)
        exchange = Exchange(t, PER_RANK, 4)
        for _ in range(2):  # counts add up over the layers of a step
            flight = exchange.dispatch(x, slots, weights)
            flight.combine(ops.mxfp4_moe(*flight.wait(), part(e, t.rank), limit=10.0), shared=shared)
        return exchange.lost(), exchange.lost()

    assert on_ranks(3, work) == [([0, 22, 0], [0, 0, 0])] * 3


def test_the_order_of_the_sum_is_the_order_of_the_experts_not_of_the_ranks() -> None:
    """1e4 + 1 - 1e4 depends on the order in f32 and bf16; ranks holding the terms may be any."""
    rows = torch.tensor([[3e38], [-3e38], [1.0]]).expand(3, 32).to(BF16).contiguous()
    for order in ([0, 1, 2], [2, 0, 1], [0, 2, 1]):
        place = torch.tensor([order], dtype=I32)
        want = torch.zeros(32)
        for i in order:
            want += rows[i].float()
        assert same(ops.exchange_combine(rows, place)[0], want.to(BF16))


def test_a_missing_thread_is_named() -> None:
    first, _ = LocalTransport.group(2, patience=0.2)
    with pytest.raises(PeerLost, match=r"within 0.2 s, got none of rank 1") as caught:
        first.counts(torch.zeros(2, dtype=torch.int64))
    assert caught.value.ranks == (1,)


def test_ranks_that_differ_are_named() -> None:
    def work(t: LocalTransport) -> str:
        mine = {**facts(), "driver": "570.1" if t.rank == 2 else "580.2"}
        return told(lambda: agree("V41Flash", t, mine), ValueError)

    want = "V41Flash: expected the same on all 4 ranks, got driver '570.1' on rank 2 where most have '580.2'"
    assert on_ranks(4, work) == [want] * 4
    on_ranks(3, lambda t: agree("V41Flash", t, facts()))  # equal facts pass


def test_a_fact_that_one_rank_lacks_is_a_difference() -> None:
    def work(t: LocalTransport) -> None:
        agree("x", t, {} if t.rank == 0 else {"nccl": "2.28"})

    with pytest.raises(ValueError, match=r"nccl 'nothing' on rank 0 where most have '2.28'"):
        on_ranks(3, work)


X = quantize_mxfp8(torch.zeros(1, HIDDEN))
ONE = torch.zeros(1, TOP_K, dtype=I32)
ERRORS: dict[str, Any] = {
    "slots": (lambda t: Exchange(t, 0), "slots_per_rank: an integer of 1 or more, got 0"),
    "capacity": (lambda t: Exchange(t, 4, 0), "capacity: an integer of 1 or more, got 0"),
    "fixed": (lambda t: Exchange(t, 4).dispatch(X, ONE, ONE.float()), "a capacity, or exact=True, got None"),
    "rows": (
        lambda t: Exchange(t, 4, 3).dispatch(X, ONE, ONE.float()).combine(torch.zeros(1, HIDDEN)),
        r"rows: \[3, 64\] bfloat16, got \[1, 64\] float32",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    call, message = ERRORS[error]
    (alone,) = LocalTransport.group(1)
    assert_refused(lambda: call(alone), message)


# ---- DeepEP ----


class FakeBuffer:
    """What the adapter uses of ``deep_ep.Buffer``, over threads."""

    low_latency_mode = False

    def __init__(self, transport: LocalTransport):
        self.transport, self.rank, self.group_size = transport, transport.rank, transport.size

    def dispatch(
        self, x: torch.Tensor, *, num_tokens_per_rank: torch.Tensor, is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor, async_finish: bool,
    ) -> Any:  # fmt: skip
        assert x.dtype == BF16 and async_finish and num_tokens_per_expert.dtype == torch.int32
        assert (
            torch.equal(is_token_in_rank.sum(0), num_tokens_per_rank) and is_token_in_rank.sum(1).eq(1).all()
        )
        sent, came = self.transport.counts(num_tokens_per_rank.long())
        rows = torch.empty(sum(came), x.shape[1], dtype=BF16)
        self.transport.all_to_all(x, rows, sent, came)
        return rows, None, None, None, None, types.SimpleNamespace(current_stream_wait=lambda: None)


def test_deepep_carries_the_rows_of_the_exact_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    e = make_experts(2 * PER_RANK)
    given_ = [inputs(n, torch.randint(-1, 8, (n, TOP_K), dtype=I32)) for n in (4, 7)]

    def work(t: LocalTransport) -> torch.Tensor:
        shared = torch.zeros(len(given_[t.rank][1]), HIDDEN, dtype=BF16)
        through = deepep_transport(FakeBuffer(t), t)
        fixed, _ = layer(through, e, given_[t.rank], shared, 21)
        exact, _ = layer(through, e, given_[t.rank], shared, None)
        assert same(exact, fixed)
        return exact

    with accumulate(torch.float64):
        for (x, slots, weights), out in zip(given_, on_ranks(2, work), strict=True):
            assert same(out, ops.mxfp4_moe(x, slots, weights, e, limit=10.0, shared=torch.zeros_like(out)))


def test_deepep_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = LocalTransport.group(2)
    buffer = FakeBuffer(first)
    assert_refused(lambda: deepep_transport(buffer, first), "package 'deep_ep', got not installed")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    buffer.group_size = 4
    assert_refused(lambda: deepep_transport(buffer, first), "a buffer of rank 0 of 2, got rank 0 of 4")
    buffer.group_size, buffer.low_latency_mode = 2, True
    assert_refused(lambda: deepep_transport(buffer, first), "throughput mode, got low_latency_mode=True")
