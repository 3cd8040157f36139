"""The split of a budget: against brute force, against its own order, and what its layout promises."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from dsv41_reference import budget as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv41.ops.verify import RaggedSplit, split_budget_ragged
from dsv41.spec import split_budget, survival

# Few distinct values make ties, 1.0 saturates, 1e-30 underflows after two factors; the rest must read as 0.
CONFIDENCES = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0, 1e-30, -0.5, 1.5, float("nan"), float("inf"), -float("inf")]


@st.composite
def splits(draw, max_rows=4, max_block=3):
    rows, block = draw(st.integers(1, max_rows)), draw(st.integers(1, max_block))
    value = st.one_of(st.sampled_from(CONFIDENCES), st.floats(0, 1, width=32))
    ints = st.integers(-1, block + 1)
    case = {
        "confidence": draw(
            st.lists(st.lists(value, min_size=block, max_size=block), min_size=rows, max_size=rows)
        ),
        "budget": draw(st.integers(-2, rows * block + 2)),
        "rotation": draw(st.integers(-3, 7)),
        "lo": draw(st.none() | st.lists(ints, min_size=rows, max_size=rows)),
        "hi": draw(st.none() | st.lists(ints, min_size=rows, max_size=rows)),
        "weights": draw(
            st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=rows, max_size=rows)
        ),
    }
    case["confidence"] = np.array(case["confidence"], np.float32)
    return case


def bounds(case):
    rows, block = case["confidence"].shape
    hi = np.clip(np.full(rows, block) if case["hi"] is None else case["hi"], 0, block)
    lo = np.minimum(np.clip(np.zeros(rows, int) if case["lo"] is None else case["lo"], 0, None), hi)
    return lo, hi


@settings(deadline=None, max_examples=250)
@given(splits())
def test_split_is_the_best_of_all_feasible_lengths(case):
    lengths = split_budget(**case)
    lo, hi = bounds(case)
    total = int(np.clip(case["budget"], lo.sum(), hi.sum()))
    assert lengths.dtype == np.int32
    assert lengths.sum() == total
    assert (lengths >= lo).all() and (lengths <= hi).all()

    a = survival(case["confidence"])[0].astype(np.float64)
    weights = np.ones(len(a)) if case["weights"] is None else np.array(case["weights"])
    prefix = np.concatenate((np.zeros((len(a), 1)), np.cumsum(a * weights[:, None], axis=1)), axis=1)

    def worth(ls):
        return sum(prefix[i, n] for i, n in enumerate(ls))

    ranges = [range(low, high + 1) for low, high in zip(lo, hi, strict=True)]
    best = max(worth(ls) for ls in itertools.product(*ranges) if sum(ls) == total)
    assert worth(lengths) == pytest.approx(best, rel=1e-12, abs=1e-300)


@settings(deadline=None, max_examples=300)
@given(splits(max_rows=6, max_block=5))
def test_split_follows_the_total_order(case):
    """Weighted survival falling, rotated row rising, draft rising: literally, by sorting tuples."""
    lo, hi = bounds(case)
    a = survival(case["confidence"])[0]
    rows = len(a)
    weights = np.ones(rows) if case["weights"] is None else case["weights"]
    slots = [
        (-np.float32(np.float32(weights[i]) * a[i, j]), (i + case["rotation"]) % rows, j, i)
        for i in range(rows)
        for j in range(lo[i], hi[i])
    ]
    expected = lo.copy()
    for *_, i in sorted(slots)[: max(0, case["budget"] - lo.sum())]:
        expected[i] += 1
    assert split_budget(**case).tolist() == expected.tolist()


@settings(deadline=None, max_examples=300)
@given(splits(max_rows=5, max_block=5), st.data())
def test_split_never_anticipates(case, data):
    """Changing c[r, k+1..] in any way never changes whether draft k of r is verified."""
    rows, block = case["confidence"].shape
    r, k = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, block - 1))
    before = split_budget(**case)[r] > k
    changed = case["confidence"].copy()
    value = st.one_of(st.sampled_from(CONFIDENCES), st.floats(0, 1, width=32))
    changed[r, k + 1 :] = data.draw(st.lists(value, min_size=block - k - 1, max_size=block - k - 1))
    assert (split_budget(**{**case, "confidence": changed})[r] > k) == before


@settings(deadline=None, max_examples=100)
@given(splits(max_rows=5, max_block=4))
def test_split_torch_equals_numpy_and_more_budget_only_adds(case):
    tensor = split_budget(**{**case, "confidence": torch.from_numpy(case["confidence"])})
    assert isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int32
    lengths = split_budget(**case)
    assert tensor.tolist() == lengths.tolist()
    assert (split_budget(**{**case, "budget": case["budget"] + 1}) >= lengths).all()


def test_split_numbers_by_hand():
    c = np.array([[0.9, 0.5], [0.6, 0.9], [0.5, 1.0]], np.float32)  # survivals .9 .45 / .6 .54 / .5 .5
    for budget, expected in enumerate(
        [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 2, 0], [1, 2, 1], [1, 2, 2], [2, 2, 2]]
    ):
        assert split_budget(c, budget).tolist() == expected
    assert split_budget(c, 3, weights=[1, 1, 2]).tolist() == [1, 0, 2]
    assert split_budget(c, 3, lo=[2, 0, 0], hi=[2, 2, 2]).tolist() == [2, 1, 0]
    assert split_budget(c, -5).tolist() == [0, 0, 0]
    assert split_budget(c, 10**9).tolist() == [2, 2, 2]
    assert split_budget(np.zeros((0, 2)), 3).tolist() == []


def test_rotation_moves_ties_fairly():
    c = np.ones((4, 3), np.float32)
    totals = np.sum([split_budget(c, 5, rotation=step) for step in range(4)], axis=0)
    assert totals.tolist() == [5, 5, 5, 5]
    assert split_budget(c, 5, rotation=0).tolist() == [3, 2, 0, 0]
    assert split_budget(c, 5, rotation=1).tolist() == [2, 0, 0, 3]  # row 3 is now first, row 0 second


def test_pinned_requests_keep_their_length():
    rng = np.random.default_rng(0)
    for _ in range(50):
        c, budget = rng.random((6, 5)), int(rng.integers(0, 31))
        lengths = split_budget(c, budget, lo=[5, 0, 0, 2, 0, 0], hi=[5, 5, 5, 2, 5, 5])
        assert lengths[0] == 5 and lengths[3] == 2


def ragged_case(rng, rows=7, block=4, live=5):
    def i32(*x):
        return torch.tensor(x, dtype=torch.int32)

    return {
        "confidence": torch.from_numpy(rng.random((rows, block), dtype=np.float32)),
        "budget": i32(6),
        "hi": i32(4, 4, 0, 2, 4, 4, 4),
        "lo": i32(0, 1, 0, 0, 0, 3, 3),
        "base": i32(1, 1, 9, 1, 1, 50, -7),
        "bonus": i32(1, 1, 0, 1, 1, 1, 1),
        "start": torch.tensor([100, 200, 0, 400, 500, 600, 700]),
        "num_requests": i32(live),
        "rotation": i32(3),
        "max_tokens": 24,
        "max_logits": 16,
    }


def poisoned(split: RaggedSplit, value: int) -> RaggedSplit:
    return RaggedSplit(*(torch.full_like(x, value) for x in split))


def test_layout_matches_a_plain_loop_and_writes_every_lane():
    rng = np.random.default_rng(1)
    for budget, live, rotation in itertools.product((-1, 0, 3, 6, 99), (0, 1, 5, 7), (0, 4)):
        case = ragged_case(rng, live=live)
        case["budget"][0], case["rotation"][0] = budget, rotation
        fresh = split_budget_ragged(**case)
        outs = [split_budget_ragged(**case, out=poisoned(fresh, v)) for v in (-77, 12345)]
        for x, y, z in zip(fresh, *outs, strict=True):
            assert torch.equal(x, y) and torch.equal(x, z)

        bonus = [int(i < live and b) for i, b in enumerate(case["bonus"].tolist())]
        hi = [min(int(h), 4) * b for h, b in zip(case["hi"], bonus, strict=True)]
        if live:
            alone = split_budget(
                case["confidence"][:live],
                budget,
                lo=case["lo"][:live],
                hi=torch.tensor(hi[:live]),
                rotation=rotation,
            )
            assert fresh.lengths.tolist() == alone.tolist() + [0] * (7 - live)
        owners, positions, logits, q, cu_q, cu_logits = [], [], [], 0, [0], [0]
        for i, n in enumerate(fresh.lengths.tolist()):
            count = max(int(case["base"][i]), bonus[i]) + n if i < live else 0
            owners += [i] * count
            positions += [int(case["start"][i]) + t for t in range(count)]
            logits += range(q + count - n - bonus[i], q + count)
            q += count
            cu_q.append(q)
            cu_logits.append(cu_logits[-1] + n + bonus[i])
        assert fresh.cu_q.tolist() == cu_q and fresh.cu_logits.tolist() == cu_logits
        assert fresh.token_request_ids.tolist() == (owners + [-1] * 24)[:24]
        assert fresh.positions.tolist() == (positions + [0] * 24)[:24]
        assert fresh.logits_ids.tolist() == (logits + [-1] * 16)[:16]
        assert fresh.stats[:3].tolist() == [q, cu_logits[-1], int(fresh.lengths.sum())]


def test_stats_count_invalid_candidates_and_sum_survivals():
    c = torch.tensor([[0.5, float("nan"), 1.0], [float("inf"), 0.5, float("nan")], [float("nan")] * 3])
    split = split_budget_ragged(
        c,
        torch.tensor([2], dtype=torch.int32),
        hi=torch.tensor([3, 2, 3], dtype=torch.int32),
        num_requests=torch.tensor([2], dtype=torch.int32),
    )
    # Row 0 has one, row 1 one among its two candidates, row 2 is padding.
    assert split.stats.tolist()[3] == 2
    assert split.lengths.tolist() == [2, 0, 0]
    assert split.stats.tolist()[4] == 2**23


def test_overflowing_a_capacity_is_visible():
    split = split_budget_ragged(torch.ones(4, 5), torch.tensor([20]), max_tokens=10, max_logits=3)
    assert split.stats[:2].tolist() == [24, 24]
    assert split.token_request_ids.tolist() == [0] * 6 + [1] * 4


def test_the_split_never_waits_for_the_device():
    with FakeTensorMode(), torch.device("cpu"):
        split = split_budget_ragged(torch.ones(4, 5), torch.ones(1, dtype=torch.int32))
        args = (
            [torch.ones(4, dtype=torch.int32)] * 5 + [torch.ones(4)] + [torch.ones(1, dtype=torch.int32)] * 3
        )
        arguments: Any = (torch.ones(4, 5), *args, *split)
        reference.split_budget_ragged(*arguments)


def test_survivals_of_the_split_are_those_of_numpy_bit_for_bit():
    rng = np.random.default_rng(3)
    c = rng.random((200, 7), dtype=np.float32) ** 20
    c[rng.random(c.shape) < 0.05] = np.nan
    a, invalid = reference.survival(torch.from_numpy(c))
    b, count = survival(c)
    assert torch.equal(a.view(torch.int32), torch.from_numpy(b).view(torch.int32))
    assert int(invalid.sum()) == count > 0
    assert ((b == 0) | (b >= 2.0**-126)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence": torch.ones(3)}, "confidence: [*, *] float32, got [3] float32"),
        ({"confidence": torch.ones(0, 3)}, "neither empty"),
        ({"budget": torch.tensor(3)}, "budget: [1] int32|int64"),
        ({"lo": torch.ones(2, dtype=torch.int32)}, "lo: [3] int32|int64, got [2] int32"),
        ({"hi": torch.ones(3)}, "hi: [3] int32|int64, got [3] float32"),
        ({"weights": torch.ones(3, dtype=torch.float64)}, "weights: [3] float32"),
        ({"max_tokens": -1}, "max_tokens: an integer of 0 or more, got -1"),
        ({"max_logits": 2.5}, "max_logits: an integer of 0 or more, got 2.5"),
    ],
)
def test_ragged_refusals(change, message):
    call = {"confidence": torch.ones(3, 2), "budget": torch.tensor([3]), **change}
    with pytest.raises(ValueError) as error:
        split_budget_ragged(**call)
    assert str(error.value).startswith("split_budget_ragged: expected ") and message in str(error.value)


def test_floors_above_caps_are_cut_and_refused_where_values_are_checked(monkeypatch):
    lo, hi = torch.tensor([0, 2, 0]), torch.tensor([1, 1, 1])
    split = split_budget_ragged(torch.ones(3, 2), torch.tensor([1]), lo=lo, hi=hi)
    assert split.lengths.tolist() == [0, 1, 0]
    monkeypatch.setenv("DSV41_CHECK", "1")
    wanted = "split_budget_ragged: expected lo of at most hi, got lo 2 and hi 1 in row 1"
    with pytest.raises(ValueError, match=wanted):
        split_budget_ragged(torch.ones(3, 2), torch.tensor([1]), lo=lo, hi=hi)


def test_split_budget_refusals():
    with pytest.raises(
        ValueError, match=r"split_budget: expected confidence: \[num_requests, block\], got \[3\]"
    ):
        split_budget(np.ones(3), 1)
    with pytest.raises(ValueError, match=r"split_budget: expected budget: \[1\] integers"):
        split_budget(np.ones((3, 2)), 1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"split_budget: expected lo: \[3\] integers, got \[2\]"):
        split_budget(np.ones((3, 2)), 1, lo=[1, 1])


def test_a_budget_of_any_integer_is_clamped_and_anything_else_refused():
    c = np.array([[0.9, 0.8], [0.5, 0.4]], np.float32)
    for budget in (10**30, 2**63, torch.tensor([2**40])):
        assert split_budget(c, budget).tolist() == [2, 2]
    assert split_budget(c, -(10**30)).tolist() == [0, 0]
    assert split_budget(c, 1, rotation=2**70).tolist() == [1, 0]
    assert split_budget(c, 1, rotation=-1).tolist() == split_budget(c, 1, rotation=1).tolist()
    ones = np.ones((3, 1))
    assert split_budget(ones, 1, rotation=-1).tolist() == split_budget(ones, 1, rotation=2).tolist()
    wrong: Any
    for wrong in (None, "3", 1.5, [1, 2], object()):
        with pytest.raises(ValueError, match=r"split_budget: expected budget: \[1\] integers"):
            split_budget(c, wrong)
    for label in ("lo", "hi", "rotation"):
        for wrong in ("x", [2**70, 0], object()):
            with pytest.raises(ValueError, match=rf"split_budget: expected {label}: \["):
                split_budget(c, 1, **{label: wrong})
    for wrong in ("x", [[1.0], [1.0, 0.5]], np.ones((1, 2), complex)):
        with pytest.raises(ValueError, match="split_budget: expected confidence: numbers"):
            split_budget(wrong, 1)
    with pytest.raises(ValueError, match="block at least 1"):
        split_budget(np.ones((2, 0)), 1)
