"""Plan, pack, unpack and combine against loops in Python; their Triton kernels against them."""

import functools
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from hypothesis import given
from hypothesis import strategies as st

from dsv41 import V41FlashConfig, ops, use
from dsv41.formats import E4M3, E8M0, MXFP8, MXFP4Experts, quantize_mxfp4, quantize_mxfp8
from dsv41.ops.exchange import record_bytes
from tests.ops.rows import assert_refused, same, tensors
from tests.tools import triton_interp

BF16, I32 = torch.bfloat16, torch.int32
interpreted = pytest.mark.skipif(not triton_interp.available(), reason="needs triton")
TWO: dict[str, Any] = {"num_ranks": 2, "slots_per_rank": 4}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@functools.cache
def kernels() -> Any:
    return triton_interp.interpret("dsv41.ops.exchange.triton_cuda")


def plan_by_hand(
    slots: list[list[int]], ranks: int, per: int, capacity: int | None
) -> tuple[list[list[int]], list[int], list[int]]:
    pairs = [s for row in slots for s in row]
    by = [[p for p, s in enumerate(pairs) if s >= 0 and s // per == r] for r in range(ranks)]
    rows = len(pairs) if capacity is None else ranks * capacity
    source, place, begin = [-1] * rows, [-1] * len(pairs), 0
    for r, mine in enumerate(by):
        first = begin if capacity is None else r * capacity
        for i, p in enumerate(mine[:capacity]):
            source[first + i], place[p] = p, first + i
        begin += len(mine)
    k = len(slots[0]) if slots else 1
    return [place[i : i + k] for i in range(0, len(place), k)], source, [len(m) for m in by]


@given(
    st.integers(0, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 7),
    st.integers(0, 99),
)  # fmt: skip
def test_plan(tokens: int, top_k: int, ranks: int, per: int, capacity: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, ranks * per, (tokens, top_k), generator=draw, dtype=I32)
    got = ops.exchange_plan(slots, num_ranks=ranks, slots_per_rank=per, capacity=capacity or None)
    place, source, counts = plan_by_hand(slots.tolist(), ranks, per, capacity or None)
    assert (got[0].tolist(), got[1].tolist(), got[2].tolist()) == (place, source, counts)


def test_records_hold_what_was_packed() -> None:
    x, weights = quantize_mxfp8(torch.randn(5, 64)), torch.rand(5, 3)
    slots = torch.randint(-1, 8, (5, 3), dtype=I32)
    _, source, _ = ops.exchange_plan(slots, num_ranks=2, slots_per_rank=4, capacity=9)
    records = ops.exchange_pack(x, weights, slots, source, slots_per_rank=4)
    assert records.shape[1] == record_bytes(64) == 96  # 16 + 64 + 2, padded
    view, local, share = ops.exchange_unpack(records, hidden=64)
    for row, pair in enumerate(source.tolist()):
        if pair < 0:
            assert local[row] == -1
            continue
        t, j = divmod(pair, 3)
        assert same(view.values[row], x.values[t]) and same(view.scale[row], x.scale[t])
        assert local[row] == slots[t, j] % 4 and share[row] == weights[t, j]


@pytest.mark.parametrize("capacity", [1, 4, 15])
def test_pack_fixed_is_plan_and_pack(capacity: int) -> None:
    x, weights = quantize_mxfp8(torch.randn(5, 64)), torch.rand(5, 3)
    slots, keys = torch.randint(-1, 8, (5, 3), dtype=I32), TWO
    place, source, counts = ops.exchange_plan(slots, **keys, capacity=capacity)
    records = ops.exchange_pack(x, weights, slots, source, slots_per_rank=4)
    lost = torch.tensor([10, 20])
    got = ops.exchange_pack_fixed(x, weights, slots, **keys, capacity=capacity, lost=lost)
    assert same(got[0], place) and same(got[1], records)
    assert (lost - torch.tensor([10, 20])).tolist() == [max(0, int(n) - capacity) for n in counts]


def experts(count: int, hidden: int, inter: int) -> MXFP4Experts:
    a, b = (
        quantize_mxfp4(torch.randn(count, 2 * inter, hidden)),
        quantize_mxfp4(torch.randn(count, hidden, inter)),
    )
    return MXFP4Experts(a.values, a.scale, b.values, b.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shared", [False, True])
def test_a_row_an_expert_and_the_sum_are_the_ops_own_bits(dtype: torch.dtype, shared: bool) -> None:
    """What an exchange makes of one op is the op."""
    e, x, extra = experts(6, 64, 32), torch.randn(9, 64).to(BF16), torch.randn(9, 64).to(BF16)
    ids, weights = torch.randint(-1, 6, (9, 4), dtype=I32), torch.rand(9, 4)
    given = extra if shared else None
    with accumulate(dtype, row_at_a_time=True):  # float32 products depend on the row count
        want = ops.mxfp4_moe(x, ids, weights, e, limit=10.0, shared=given)
        place, source, _ = ops.exchange_plan(ids, num_ranks=3, slots_per_rank=2, capacity=36)
        records = ops.exchange_pack(x, weights, ids, source, slots_per_rank=2)
        rows = torch.empty(108, 64, dtype=BF16)
        for r in range(3):  # each rank's part, with its own two experts
            part = slice(36 * r, 36 * r + 36)
            two = slice(2 * r, 2 * r + 2)
            own = MXFP4Experts(e.w13[two], e.w13_scale[two], e.w2[two], e.w2_scale[two])
            arrived, local, share = ops.exchange_unpack(records[part], hidden=64)
            rows[part] = ops.mxfp4_moe(arrived, local, share, own, limit=10.0)
        assert same(ops.exchange_combine(rows, place, shared=given), want)


S, W = torch.zeros((2, 3), dtype=I32), torch.rand(2, 3)
Q, ROWS = quantize_mxfp8(torch.randn(2, 64)), torch.zeros(4, 64, dtype=BF16)
LAID = MXFP8(torch.zeros(2, 64).to(E4M3), torch.zeros(1, 2, dtype=torch.uint8).view(E8M0).expand(2, 2))
SOURCE, LOST = torch.zeros(4, dtype=I32), torch.zeros(2, dtype=torch.int64)
ERRORS: dict[str, Any] = {
    "slots": (lambda: ops.exchange_plan(S.long(), **TWO), r"slots: \[\*, \*\] int32, got \[2, 3\] int64"),
    "ranks": (
        lambda: ops.exchange_plan(S, num_ranks=0, slots_per_rank=4),
        "num_ranks: an integer of 1 or more, got 0",
    ),
    "capacity": (lambda: ops.exchange_plan(S, capacity=0, **TWO), "capacity: an integer of 1 or more, got 0"),
    "out": (lambda: ops.exchange_plan(S, **TWO, out=(S, S, S)), r"out source: \[6\] int32"),
    "weights": (lambda: ops.exchange_pack(Q, S, S, SOURCE, slots_per_rank=4), r"weights: \[2, 3\] float32"),
    "x": (lambda: ops.exchange_pack(Q, W[:1], S[:1], SOURCE, slots_per_rank=4), r"x: \[1, 64\], got"),
    "per rank": (
        lambda: ops.exchange_pack(Q, W, S, SOURCE, slots_per_rank=0),
        "slots_per_rank: an integer of 1 or more",
    ),
    "lost": (
        lambda: ops.exchange_pack_fixed(Q, W, S, **TWO, capacity=1, lost=S),
        r"lost: \[2\] int64, got \[2, 3\]",
    ),
    "room": (
        lambda: ops.exchange_pack_fixed(Q, W, S, **TWO, capacity=0, lost=LOST),
        "capacity: an integer of 1 or more, got 0",
    ),
    "scale apart": (
        lambda: ops.exchange_unpack(torch.zeros(2, 96, dtype=torch.uint8), hidden=64, out=(LAID, S, W)),
        r"exchange_unpack: expected out.scale: elements apart in memory, got strides \(0, 1\)",
    ),
    "hidden": (lambda: ops.exchange_unpack(SOURCE[None], hidden=33), "hidden: a multiple of 32, got 33"),
    "records": (lambda: ops.exchange_unpack(SOURCE[None], hidden=64), r"records: \[\*, 96\] uint8"),
    "place": (lambda: ops.exchange_combine(ROWS, W), r"place: \[\*, \*\] int32"),
    "shared": (lambda: ops.exchange_combine(ROWS, S, shared=ROWS), r"shared: \[2, 64\] bfloat16, got \[4"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])


def test_slots_past_the_last_are_refused_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.exchange_plan(S + 8, **TWO)[0].eq(-1).all()
    monkeypatch.setenv("DSV41_CHECK", "1")
    assert_refused(lambda: ops.exchange_plan(S + 8, **TWO), "slots: at most 7, got 8")


# ---- Triton ----

CASES = [(0, 6, 4, 5, 3), (1, 6, 2, 3, None), (70, 6, 4, 5, 30), (70, 6, 4, 5, None), (500, 6, 3, 7, 1100)]


def inputs(tokens: int, top_k: int, slots: int, hidden: int) -> Any:
    x = quantize_mxfp8(torch.randn(tokens, hidden))
    return x, torch.rand(tokens, top_k), torch.randint(-1, slots, (tokens, top_k), dtype=I32)


@interpreted
@pytest.mark.parametrize("tokens, top_k, ranks, per, capacity", CASES)
def test_plan_kernel(
    tokens: int, top_k: int, ranks: int, per: int, capacity: int | None, module: Any = None
) -> None:
    slots = torch.randint(-1, ranks * per + 1, (tokens, top_k), dtype=I32)
    want = ops.exchange_plan(slots, num_ranks=ranks, slots_per_rank=per, capacity=capacity)
    got = [torch.full_like(t, 99) for t in want]
    (module or kernels()).exchange_plan(slots, ranks, per, capacity or 0, *got)
    assert all(map(same, got, want))


@interpreted
def test_pack_and_unpack_kernels(module: Any = None) -> None:
    module = module or kernels()
    x, weights, slots = inputs(9, 3, 8, 128)
    _, source, _ = ops.exchange_plan(slots, num_ranks=2, slots_per_rank=4, capacity=17)
    want = ops.exchange_pack(x, weights, slots, source, slots_per_rank=4)
    got = torch.full_like(want, 7)
    module.exchange_pack(*x.flat(), weights, slots, source, 4, got)
    used = source >= 0
    assert same(got[used, :8], want[used, :8]) and same(got[:, 4:8], want[:, 4:8])
    assert same(got[used, 16 : 16 + 128 + 4], want[used, 16 : 16 + 128 + 4])
    expected = ops.exchange_unpack(want, hidden=128)
    view, local, share = ops.exchange_unpack(torch.zeros_like(want), hidden=128)
    module.exchange_unpack(want, *view.flat(), local, share)
    assert all(map(same, tensors((view, local, share)), tensors(expected)))


@interpreted
@pytest.mark.parametrize("tokens, top_k, ranks, per, capacity", [c for c in CASES if c[4]])
def test_pack_fixed_kernel(
    tokens: int, top_k: int, ranks: int, per: int, capacity: int, module: Any = None
) -> None:
    x, weights, slots = inputs(tokens, top_k, ranks * per + 1, 128)
    lost = torch.arange(ranks)
    want = ops.exchange_pack_fixed(
        x, weights, slots, num_ranks=ranks, slots_per_rank=per, capacity=capacity, lost=lost
    )
    got = torch.full_like(want[0], 99), torch.arange(ranks), torch.full_like(want[1], 7)
    (module or kernels()).exchange_pack_fixed(*x.flat(), weights, slots, ranks, per, capacity, *got)
    used = want[1][:, 4:8].contiguous().view(I32)[:, 0] >= 0
    assert same(got[0], want[0]) and same(got[1], lost)
    assert same(got[2][:, :8], want[1][:, :8])
    assert same(got[2][used, 16 : 16 + 128 + 4], want[1][used, 16 : 16 + 128 + 4])


@interpreted
@pytest.mark.parametrize("shared", [False, True])
def test_combine_kernel(shared: bool, module: Any = None) -> None:
    rows, place = torch.randn(11, 1280).to(BF16), torch.randint(-1, 11, (6, 5), dtype=I32)
    extra = torch.randn(6, 1280).to(BF16) if shared else None
    want, got = ops.exchange_combine(rows, place, shared=extra), torch.zeros(6, 1280, dtype=BF16)
    (module or kernels()).exchange_combine(rows, place, extra, got)
    assert same(got, want)


FAULTS: dict[str, Any] = {
    "own pair counted": (
        "tl.cumsum(mine, 0) - mine", "tl.cumsum(mine, 0)", lambda m: test_plan_kernel(*CASES[2], module=m)
    ),
    "a row of the capacity unused": (
        "nth < CAPACITY", "nth < CAPACITY - 1", lambda m: test_plan_kernel(*CASES[2], module=m)
    ),
    "lower ranks not counted": (
        "slot < rank * PER_RANK)", "slot < 0)", lambda m: test_plan_kernel(*CASES[3], module=m)
    ),
    "global slot sent": (
        "tl.where(used, slot % PER_RANK", "tl.where(used, slot", test_pack_and_unpack_kernels
    ),
    "a pair after it counted": (
        "other < pair, other", "other <= pair, other", lambda m: test_pack_fixed_kernel(*CASES[2], module=m)
    ),
    "unused rows not marked": (
        "row >= earlier", "row > earlier", lambda m: test_pack_fixed_kernel(*CASES[0], module=m)
    ),
    "losses of the last step only": (
        "tl.load(lost + rank) + past", "past", lambda m: test_pack_fixed_kernel(*CASES[2], module=m)
    ),
    "scales behind the wrong word": ("HEADER + WORDS + lane", "WORDS + lane", test_pack_and_unpack_kernels),
    "scales over the values": (
        "HEADER + WORDS + few", "WORDS + few", lambda m: test_pack_fixed_kernel(*CASES[2], module=m)
    ),
    "row 0 left out": (
        "there & (at >= 0)", "there & (at > 0)",
        lambda m: test_combine_kernel(True, m),
    ),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    old, new, test = FAULTS[fault]
    with pytest.raises((AssertionError, IndexError)):
        test(triton_interp.interpret("dsv41.ops.exchange.triton_cuda", {old: new}))


@on_gpu
@pytest.mark.parametrize("tokens, capacity", [(0, 8), (64, 130), (64, 90), (4096, None)])
def test_on_the_gpu(tokens: int, capacity: int | None) -> None:
    cfg = V41FlashConfig()
    x, weights, slots = inputs(tokens, cfg.top_k, 4 * 97, cfg.hidden)
    view = type(x)(x.values.cuda(), x.scale.view(torch.uint8).cuda().view(x.scale.dtype))
    keys: dict[str, Any] = {"num_ranks": 4, "slots_per_rank": 97}
    with use("triton_cuda", ops.exchange_plan, ops.exchange_pack, ops.exchange_unpack, ops.exchange_combine):
        place, source, counts = ops.exchange_plan(slots.cuda(), **keys, capacity=capacity)
        records = ops.exchange_pack(view, weights.cuda(), slots.cuda(), source, slots_per_rank=97)
        arrived = tensors(ops.exchange_unpack(records, hidden=cfg.hidden))
    want = ops.exchange_plan(slots, **keys, capacity=capacity)
    assert all(same(a.cpu(), b) for a, b in zip((place, source, counts), want, strict=True))
    expected = tensors(
        ops.exchange_unpack(
            ops.exchange_pack(x, weights, slots, want[1], slots_per_rank=97), hidden=cfg.hidden
        )
    )
    used = want[1] >= 0
    if capacity is not None:
        lost = torch.zeros(4, dtype=torch.int64, device="cuda")
        with use("triton_cuda", ops.exchange_pack_fixed):
            at, fixed = ops.exchange_pack_fixed(
                view, weights.cuda(), slots.cuda(), **keys, capacity=capacity, lost=lost
            )
        assert same(lost.cpu(), (want[2] - capacity).clamp(min=0))
        assert same(at.cpu(), want[0])
        for a, b in zip(tensors(ops.exchange_unpack(fixed, hidden=cfg.hidden)), arrived, strict=True):
            assert same(a.view(torch.uint8).cpu()[used], b.view(torch.uint8).cpu()[used])
    for a, b in zip(arrived, expected, strict=True):
        assert same(a.view(torch.uint8).cpu()[used], b.view(torch.uint8)[used])
    rows = torch.randn(len(source), cfg.hidden).to(BF16)
    shared = torch.randn(tokens, cfg.hidden).to(BF16)
    with use("triton_cuda", ops.exchange_combine):
        got = ops.exchange_combine(rows.cuda(), place, shared=shared.cuda()).cpu()
    assert same(got, ops.exchange_combine(rows, want[0], shared=shared))
