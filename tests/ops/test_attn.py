"""Sparse attention against a loop in Python."""

import math
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from dsv41_reference.numerics import bf16
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import ops
from dsv41.cache import PagedKV, Record
from tests.ops.rows import assert_nan_stays, assert_refused, assert_rows_independent, same

BF16, DIM, HEADS, SCALE = torch.bfloat16, 32, 2, 0.3


def cache(layout: str, slots: int, page: int = 4) -> PagedKV:
    """Random records in every slot."""
    record = Record(layout, DIM)
    made = PagedKV(torch.zeros((slots // page, page, record.bytes), dtype=torch.uint8), record)
    still = torch.ones(slots, 1), torch.zeros(slots, 1)
    ops.write_cache(torch.randn(slots, DIM).to(BF16), *still, torch.arange(slots, dtype=torch.int32), made)
    return made


def choose(tokens: int, count: int, slots: int) -> torch.Tensor:
    """Distinct slots a row, some of them -1."""
    ids = torch.stack([torch.randperm(slots)[:count] for _ in range(tokens)]).to(torch.int32)
    return torch.where(torch.rand(tokens, count) < 0.2, -1, ids)


def by_hand(q: torch.Tensor, rows: list[torch.Tensor], sink: float | None) -> tuple[torch.Tensor, float]:
    """One query head over its records: (out, log-sum-exp)."""
    z = [SCALE * float(q.double() @ r) for r in rows]
    top: float = max([*z, *([] if sink is None else [sink]), -math.inf])
    if top == -math.inf:
        return torch.zeros(DIM, dtype=BF16), -math.inf
    e = [math.exp(v - top) for v in z]
    total = sum(e) + (0.0 if sink is None else math.exp(sink - top))
    value = torch.zeros(DIM, dtype=torch.float64)
    for weight, r in zip(e, rows, strict=True):
        value += float(bf16(torch.tensor(weight, dtype=torch.float64))) * r
    return bf16(value / total), math.log(sum(e)) + top if e else -math.inf


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("sets", [1, 2])
def test_closed_form(sets: int, sink: bool) -> None:
    """One softmax over both sets and one sink, which has a weight, no value, and no scale."""
    q = torch.randn(5, HEADS, DIM).to(BF16) * 3
    window, compressed = cache("mxfp8", 12), cache("nvfp4", 16)
    near, far = choose(5, 6, 12), choose(5, 3, 16)
    near[2] = far[2] = -1
    sinks = torch.tensor([0.5, -2.0]) if sink else None
    extra: Any = (compressed, far) if sets == 2 else ()
    with accumulate(torch.float64):
        out, lse = ops.sparse_attn(q, window, near, *extra, scale=SCALE, sink=sinks, return_lse=True)
    assert lse is not None
    for t in range(5):
        rows = list(window.read(near[t][near[t] >= 0]).double())
        if sets == 2:
            rows += list(compressed.read(far[t][far[t] >= 0]).double())
        for h in range(HEADS):
            want, want_lse = by_hand(q[t, h], rows, None if sinks is None else float(sinks[h]))
            assert torch.equal(out[t, h], want)
            assert lse[t, h].item() == pytest.approx(want_lse, rel=1e-6)
    assert (out[2] == 0).all() and (lse[2] == -torch.inf).all()


def test_one_record_is_its_value() -> None:
    window, q = cache("bf16", 4), torch.randn(3, HEADS, DIM).to(BF16)
    ids = torch.tensor([[0], [3], [1]], dtype=torch.int32)
    out, lse = ops.sparse_attn(q, window, ids, scale=SCALE)
    assert lse is None
    want = window.read(ids[:, 0]).to(BF16)[:, None].expand(3, HEADS, DIM)
    assert torch.equal(out, want)


def test_equal_scores_average_and_the_sink_takes_its_share() -> None:
    """A zero query sees all records alike; a sink at score zero counts as one more that has no value."""
    window, ids = cache("bf16", 4), torch.arange(3, dtype=torch.int32)[None]
    q = torch.zeros(1, 1, DIM, dtype=BF16)
    mean = window.read(ids[0]).double().sum(0)
    with accumulate(torch.float64):
        for sink, count in ((None, 3), (torch.zeros(1), 4), (torch.tensor([-torch.inf]), 3)):
            out, _ = ops.sparse_attn(q, window, ids, scale=SCALE, sink=sink)
            assert torch.equal(out[0, 0], bf16(mean / count))
        out, _ = ops.sparse_attn(q, window, ids, scale=SCALE, sink=torch.tensor([torch.inf]))
        assert (out == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_records_that_nobody_reads(value: float) -> None:
    """A NaN or infinite record changes the rows that name it, into NaN, and not one bit of the others."""
    window, q, ids = cache("bf16", 8), torch.randn(6, HEADS, DIM).to(BF16), choose(6, 4, 8)
    ids[1, 0], ids[2] = 5, torch.where(ids[2] == 5, -1, ids[2])
    readers = (ids == 5).any(1)
    want, want_lse = ops.sparse_attn(q, window, ids, scale=SCALE, return_lse=True)
    window.pages.view(BF16)[1, 1, 7] = value
    got, lse = ops.sparse_attn(q, window, ids, scale=SCALE, return_lse=True)
    assert lse is not None and want_lse is not None
    assert same(got[~readers], want[~readers]) and same(lse[~readers], want_lse[~readers])
    assert got[readers].isnan().all() and lse[readers].isnan().all()


@settings(max_examples=15)
@given(st.permutations(range(6)), st.integers(0, 99))
def test_order_of_the_records_does_not_matter(order: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    window, q, ids = cache("mxfp8", 12), torch.randn(3, HEADS, DIM).to(BF16), choose(3, 6, 12)
    with accumulate(torch.float64):
        want, _ = ops.sparse_attn(q, window, ids, scale=SCALE)
        got, _ = ops.sparse_attn(q, window, ids[:, order].contiguous(), scale=SCALE)
        assert torch.equal(got, want)
        # A record may come from either set: one softmax, not two.
        got, _ = ops.sparse_attn(
            q, window, ids[:, :2].contiguous(), window, ids[:, 2:].contiguous(), scale=SCALE
        )
        assert torch.equal(got, want)


def test_rows() -> None:
    window, compressed, sink = cache("mxfp8", 12), cache("nvfp4", 16), torch.randn(HEADS)
    q, near, far = torch.randn(70, HEADS, DIM).to(BF16), choose(70, 5, 12), choose(70, 3, 16)
    keys: dict[str, Any] = {"scale": SCALE, "sink": sink, "return_lse": True}
    assert_rows_independent(lambda r: ops.sparse_attn(q[r], window, near[r], compressed, far[r], **keys), 70)
    assert_nan_stays(lambda q: ops.sparse_attn(q, window, near, compressed, far, **keys), q)


def test_slots_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CHECK", "1")
    window, q = cache("mxfp8", 4), torch.zeros(1, 1, DIM, dtype=BF16)
    past, none = (torch.tensor([[slot]], dtype=torch.int32) for slot in (4, -1))
    message = "{}: -1 to 3, got 4 in row 0"
    assert_refused(lambda: ops.sparse_attn(q, window, past, scale=1.0), message.format("window_ids"))
    two = (q, window, none, window, past)
    assert_refused(lambda: ops.sparse_attn(*two, scale=1.0), message.format("compressed_ids"))
    twice = torch.tensor([[-1, 2, -1, 2]], dtype=torch.int32)
    assert_refused(
        lambda: ops.sparse_attn(q, window, twice, scale=1.0),
        "window_ids: distinct in a row, got 2 twice in row 0",
    )


C, Q, N = cache("mxfp8", 4), torch.zeros(2, 1, DIM, dtype=BF16), torch.zeros(2, 1, dtype=torch.int32)
WIDE = PagedKV(torch.zeros(1, 4, 66, dtype=torch.uint8), Record("mxfp8", 64))
A = torch.zeros(2, 4)
META = PagedKV(C.pages.to("meta"), C.record)


def refuse(*args: Any, **keys: Any) -> Any:
    return lambda: ops.sparse_attn(*args, scale=1.0, **keys)


ERRORS: dict[str, Any] = {
    "q": (refuse(Q[..., :16], C, N), r"sparse_attn: expected q: \[\*, \*, 32\] bfloat16, got \[2, 1, 16\]"),
    "device": (refuse(Q, META, N), "q on meta, got cpu"),
    "pair": (refuse(Q, C, N, C), "compressed and compressed_ids together, got one of them"),
    "ids": (refuse(Q, C, N.long()), r"window_ids: \[2, \*\] int32, got \[2, 1\] int64"),
    "width": (refuse(Q, C, N, WIDE, N), "compressed: records of width 32, got Record"),
    "compressed device": (refuse(Q, C, N, META, N), "compressed on cpu, got meta"),
    "compressed ids": (refuse(Q, C, N, C, N[:1]), r"compressed_ids: \[2, \*\] int32, got \[1, 1\]"),
    "sink": (refuse(Q, C, N, sink=torch.zeros(2)), r"sink: \[1\] float32, got \[2\]"),
    "scale": (lambda: ops.sparse_attn(Q, C, N, scale=math.nan), "scale: a finite number, got nan"),
    "no cos": (refuse(Q, C, N, inverse_rope=(None, A)), r"inverse_rope: \(cos, sin\), .*, got \(None, \[2"),
    "no sin": (refuse(Q, C, N, inverse_rope=(A, None)), r"inverse_rope: .* got \(\[2, 4\] float32, None\)"),
    "no angles": (refuse(Q, C, N, inverse_rope=()), r"inverse_rope: .* got \(\)"),
    "one angle": (refuse(Q, C, N, inverse_rope=(A,)), r"inverse_rope: .* got \(\[2, 4\] float32\)"),
    "splits": (refuse(Q, C, N, num_splits=0), "num_splits: an integer of 1 or more, got 0"),
    "scratch": (
        refuse(
            Q, C, N.expand(2, 130).contiguous(), num_splits=2, scratch=torch.zeros(543, dtype=torch.uint8)
        ),
        r"scratch: at least 544 bytes, got \[543\] uint8",
    ),
    "scratch dtype": (refuse(Q, C, N, scratch=Q), r"scratch: \[\*\] uint8, got \[2, 1, 32\] bfloat16"),
    "out": (refuse(Q, C, N, out=Q.float()), r"out: \[2, 1, 32\] bfloat16, got \[2, 1, 32\] float32"),
    "out apart": (refuse(Q, C, N, out=Q[:1].expand(2, 1, DIM)), "out: elements apart in memory, got strides"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])


def test_a_query_that_is_not_finite_gives_nan_in_its_head_alone() -> None:
    cache = PagedKV(torch.zeros((1, 4, 64), dtype=torch.uint8), Record("bf16", 32))
    q = torch.randn(2, 2, 32).bfloat16()
    q[0, 0], q[1, 1, 0] = float("nan"), float("inf")
    ids = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    out, lse = ops.sparse_attn(q, cache, ids, scale=1.0, return_lse=True)
    assert lse is not None
    assert out[0, 0].isnan().all() and lse[0, 0].isnan() and out[1, 1].isnan().all()
    assert out[0, 1].isfinite().all() and out[1, 0].isfinite().all()


def test_ids_past_the_cache_are_none() -> None:
    cache = PagedKV(torch.zeros((1, 4, 64), dtype=torch.uint8), Record("bf16", 32))
    q = torch.randn(1, 2, 32).bfloat16()
    few = ops.sparse_attn(q, cache, torch.tensor([[1, -1]], dtype=torch.int32), scale=1.0)[0]
    assert torch.equal(
        ops.sparse_attn(q, cache, torch.tensor([[1, 99]], dtype=torch.int32), scale=1.0)[0], few
    )
