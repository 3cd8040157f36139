"""The budget: exact against brute force on random stairs, tables refused or warned about, ranks together."""

import itertools
import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.spec import (
    StepCost,
    budget_curve,
    budget_of_tier,
    joint_tier,
    solve_budget,
    solve_budget_early_stop,
    solve_budget_joint,
    solve_budget_lossless,
    survival,
)


@st.composite
def stairs(draw, reach):
    """A random table that reaches ``reach`` tokens at least: stairs, plateaus, a tail, a draft cost."""
    sizes = sorted(draw(st.sets(st.integers(1, reach + 6), min_size=1, max_size=6)) | {reach})
    value = st.sampled_from([0.5, 1.0, 1.01, 2.0]) | st.floats(0.1, 10)
    seconds = draw(st.lists(value, min_size=len(sizes), max_size=len(sizes)))
    tail = draft = None
    if draw(st.booleans()):
        at = sorted(draw(st.sets(st.integers(sizes[-1] + 1, sizes[-1] + 9), min_size=1, max_size=3)))
        tail = (at, draw(st.lists(value, min_size=len(at), max_size=len(at))))
        if len(sizes) > 1 and draw(st.booleans()):
            sizes, seconds = sizes[:-1], seconds[:-1]  # now the step may end in the tail
            if at[-1] < reach:
                at.append(reach)
                tail[1].append(draw(value))
    if draw(st.booleans()):
        draft = ([1, 3, 9], draw(st.lists(st.floats(0, 2), min_size=3, max_size=3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return StepCost(sizes, seconds, draft=draft, tail=tail)


@st.composite
def steps(draw, max_rows=4, max_block=3):
    rows, block = draw(st.integers(1, max_rows)), draw(st.integers(1, max_block))
    value = st.sampled_from([0.0, 0.5, 0.9, 1.0]) | st.floats(0, 1)
    c = np.array(
        draw(st.lists(st.lists(value, min_size=block, max_size=block), min_size=rows, max_size=rows))
    )
    bonus = draw(st.integers(0, rows))
    base = bonus + draw(st.integers(0, 4))
    ints = st.integers(0, block)
    options = {
        "base_tokens": base,
        "num_bonus": bonus,
        "lo": draw(st.none() | st.lists(ints, min_size=rows, max_size=rows)),
        "hi": draw(st.none() | st.lists(ints, min_size=rows, max_size=rows)),
        "weights": draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=rows, max_size=rows)),
        "max_tokens": None,
    }
    if draw(st.booleans()):
        options["max_tokens"] = base + rows * block - draw(st.integers(0, 3))
    return np.cumprod(c, axis=1), options


def priced(cost: StepCost, tokens: int, requests: int) -> float:
    """The cost model said again, one size at a time."""
    fitting = [s for size, s in zip(cost.sizes, cost.seconds, strict=True) if tokens <= size]
    if fitting:
        seconds = fitting[0]
    else:
        assert cost.tail is not None
        at, took = cost.tail
        seconds = took[0] if tokens <= at[0] else np.interp(tokens, at, took)
    drafting = 0.0
    if cost.draft is not None and requests:
        drafting = next(s for size, s in zip(*cost.draft, strict=True) if requests <= size)
    return float(seconds + drafting)


def rate_by_brute_force(a, cost, options, total=None):
    """Best expected tokens a second over every vector of lengths (with that total, when one is given)."""
    rows, block = a.shape
    hi = [block] * rows if options["hi"] is None else options["hi"]
    lo = [0] * rows if options["lo"] is None else [min(x, y) for x, y in zip(options["lo"], hi, strict=True)]
    weights = [1.0] * rows if options["weights"] is None else options["weights"]
    cap = cost.max_tokens if options["max_tokens"] is None else min(options["max_tokens"], cost.max_tokens)
    best = -1.0
    for lengths in itertools.product(*(range(x, y + 1) for x, y in zip(lo, hi, strict=True))):
        tokens = options["base_tokens"] + sum(lengths)
        if tokens <= cap and total in (None, sum(lengths)):
            worth = options["num_bonus"] + sum(
                w * a[i, :n].sum() for i, (w, n) in enumerate(zip(weights, lengths, strict=True))
            )
            best = max(best, worth / priced(cost, tokens, options["num_bonus"]))
    return best


@settings(deadline=None, max_examples=300)
@given(steps(), st.data())
def test_solve_budget_equals_brute_force_on_random_stairs(step, data):
    a, options = step
    cost = data.draw(stairs(options["base_tokens"] + a.size))
    best = rate_by_brute_force(a, cost, options)
    if best < 0:
        with pytest.raises(ValueError, match=r"solve_budget: expected a token cap .* of at least"):
            solve_budget(a, cost, **options)
        return
    found = solve_budget(a, cost, **options)
    assert isinstance(found, int)
    assert rate_by_brute_force(a, cost, options, total=found) == pytest.approx(best, rel=1e-12)


@settings(deadline=None, max_examples=100)
@given(steps(max_rows=6), st.data())
def test_early_stop_never_beats_it_and_equals_it_on_convex_costs(step, data):
    a, options = step
    options |= {"lo": None, "hi": None, "weights": None, "max_tokens": None}
    given = {"base_tokens": options["base_tokens"], "num_bonus": options["num_bonus"]}
    reach = options["base_tokens"] + a.size
    cost = data.draw(stairs(reach))

    def rate(k, cost):
        worth = options["num_bonus"] + np.sort(a.ravel())[::-1][:k].sum()
        return worth / priced(cost, options["base_tokens"] + k, options["num_bonus"])

    early = solve_budget_early_stop(a, cost, **given)
    assert rate(early, cost) <= rate(solve_budget(a, cost, **given), cost) * (1 + 1e-12)

    steps_up = data.draw(st.lists(st.floats(0.01, 1), min_size=reach, max_size=reach))
    convex = StepCost(np.arange(1, reach + 2), 1 + np.cumsum([0.01, *sorted(steps_up)]))
    early = solve_budget_early_stop(a, convex, **given)
    assert rate(early, convex) == pytest.approx(rate(solve_budget(a, convex, **given), convex), rel=1e-12)


def test_early_stop_loses_on_stairs_as_published():
    """100 sure requests; the first draft enters a bucket that costs 1.01 % more and holds them all."""
    cost = StepCost([100, 600], [1.0, 1.0101])
    a = np.ones((100, 5))
    best, early = (f(a, cost, base_tokens=100) for f in (solve_budget, solve_budget_early_stop))
    ratio = ((100 + early) / cost(100 + early)) / ((100 + best) / cost(100 + best))
    print(f"solve_budget {best} drafts, early stop {early}: {ratio:.3f} of the optimum")
    assert (best, early) == (500, 0)
    assert ratio == pytest.approx(0.168, abs=5e-4)


def test_retrospective_search_counter_example_of_the_paper():
    """Two drafts, rates 1, 0.5, 0.45: numbers at which a search over current drafts is biased."""
    cost = StepCost([1, 2, 3], [1.0, 1 / 0.5, 1 / 0.45])
    a_if_x1_is_a, a_otherwise = np.array([[0.8, 0.72]]), np.array([[0.8, 0.0]])
    assert solve_budget(a_if_x1_is_a, cost, base_tokens=1) == 2  # 2.52 * .45 = 1.134 > 1
    assert solve_budget(a_otherwise, cost, base_tokens=1) == 0
    for a in (a_if_x1_is_a, a_otherwise):
        assert solve_budget_early_stop(a, cost, base_tokens=1) == 0
    for c2 in (0.9, 0.0):  # what may be read does not include c2
        a1 = np.array([0.8])
        assert solve_budget_lossless(cost, base_tokens=1, first=a1, prior=np.array([0.9])) == 2, c2


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_joint_equals_brute_force_over_ranks(data):
    ranks = data.draw(st.integers(1, 3))
    local = [data.draw(steps(max_rows=3, max_block=2)) for _ in range(ranks)]
    for _, options in local:
        options["max_tokens"] = None
    cost = data.draw(stairs(max(o["base_tokens"] + a.size for a, o in local)))
    keys = ("base_tokens", "num_bonus", "lo", "hi", "weights")
    budgets = solve_budget_joint([a for a, _ in local], cost, **{k: [o[k] for _, o in local] for k in keys})

    emitting = max(o["num_bonus"] for _, o in local)
    unit = _UnitCost(cost.max_tokens)

    def gain(rank, k):
        a, o = local[rank]
        return rate_by_brute_force(a, unit, o, total=k)

    curves = [[gain(r, k) for k in range(local[r][0].size + 1)] for r in range(ranks)]
    best = -1.0
    for ks in itertools.product(*(range(len(c)) for c in curves)):
        gains = [curve[k] for curve, k in zip(curves, ks, strict=True)]
        if min(gains) < 0:
            continue
        tokens = max(o["base_tokens"] + k for (_, o), k in zip(local, ks, strict=True))
        tier = next(b for b in cost.tiers if b >= tokens)
        best = max(best, sum(gains) / priced(cost, int(tier), emitting))
    tokens = max(o["base_tokens"] + k for (_, o), k in zip(local, budgets, strict=True))
    tier = next(b for b in cost.tiers if b >= tokens)
    found = sum(gain(r, k) for r, k in enumerate(budgets)) / priced(cost, int(tier), emitting)
    assert found == pytest.approx(best, rel=1e-12)


class _UnitCost:
    """Every step costs 1: brute force over it gives expected tokens."""

    def __init__(self, max_tokens):
        self.max_tokens, self.sizes, self.seconds, self.draft, self.tail = (
            max_tokens,
            [max_tokens],
            [1.0],
            None,
            None,
        )


def test_joint_ranks_agree_and_idle_ranks_take_part():
    rng = np.random.default_rng(0)
    cost = StepCost([16, 32, 64, 128, 256], [1.0, 1.1, 1.3, 1.7, 2.5])
    a = [survival(rng.random((n, 5)))[0] for n in (3, 20)] + [np.zeros((0, 5))]
    budgets = solve_budget_joint(a, cost, base_tokens=[3, 20, 0])
    curves = [budget_curve(x, cost, base_tokens=len(x)) for x in a]
    tier = joint_tier(curves, cost, draft_requests=20)
    assert budgets == [min(tier - len(x), x.size) for x in a] and budgets[2] == 0
    assert solve_budget_joint([a[1]], cost, base_tokens=[20]) == [solve_budget(a[1], cost, base_tokens=20)]


def test_buckets_are_filled_and_ties_take_the_smallest():
    a = np.array([[0.9, 0.0, 0.0]])
    assert solve_budget(a, StepCost([1, 3, 9], [1.0, 1.1, 2.0]), base_tokens=1) == 2
    assert solve_budget(np.zeros((4, 3)), StepCost([4, 8], [1.0, 2.0]), base_tokens=4) == 0
    # Equal rates: 1 / 1 and 2 / 2.
    assert solve_budget(np.ones((1, 1)), StepCost([1, 2], [1.0, 2.0]), base_tokens=1) == 0


def test_invalid_survivals_read_as_zero_from_there_on():
    cost = StepCost([4, 5, 6, 7, 8], [1.0, 1.1, 1.2, 1.3, 1.4])
    bad = np.array([[0.9, np.nan, 0.5], [np.inf, 0.9, 0.9], [0.8, 0.7, 0.6], [0.0, 0.0, 0.0]])
    good = np.array([[0.9, 0, 0], [0, 0, 0], [0.8, 0.7, 0.6], [0, 0, 0]])
    with pytest.warns(RuntimeWarning, match="solve_budget: 2 of 12 survivals are NaN or infinite"):
        assert solve_budget(bad, cost, base_tokens=4) == solve_budget(good, cost, base_tokens=4) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve_budget(good, cost, base_tokens=4)


def test_lossless_variant_reads_only_what_it_is_given():
    cost = StepCost(np.arange(1, 65), 1 + 0.02 * np.arange(64))
    rng = np.random.default_rng(5)
    stale = survival(rng.random((8, 5)))[0]
    assert solve_budget_lossless(cost, base_tokens=8, stale=stale) == solve_budget(stale, cost, base_tokens=8)
    with pytest.raises(ValueError, match="expected one of stale and first, got both"):
        solve_budget_lossless(cost, base_tokens=8, stale=stale, first=stale[:, 0])
    with pytest.raises(ValueError, match="expected one of stale and first, got neither"):
        solve_budget_lossless(cost, base_tokens=8)
    with pytest.raises(
        ValueError, match=r"first: \[num_requests\], nothing past the first draft, got \[8, 5\]"
    ):
        solve_budget_lossless(cost, base_tokens=8, first=stale, prior=np.ones(4))
    with pytest.raises(ValueError, match=r"prior: \[block - 1\] beside first"):
        solve_budget_lossless(cost, base_tokens=8, first=stale[:, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"max_tokens": 7}, r"a token cap \(max_tokens and the cost table\) of at least 8 \+ 0"),
        ({"lo": 2, "max_tokens": 20}, r"of at least 8 \+ 16 \(base_tokens \+ floors\), got 20"),
        ({"base_tokens": 65}, "of at least 65"),
        ({"base_tokens": 7}, "base_tokens >= num_bonus = 8, got 7"),
        ({"num_bonus": 9}, "num_bonus from 0 to 8"),
        ({"survival": np.ones(3)}, r"survival: \[num_requests, block\]"),
        ({"survival": np.tile([0.5, 0.9], (8, 1))}, "not rising along a row"),
        ({"survival": np.full((8, 2), 1.5)}, r"survivals in \[0, 1\]"),
        ({"weights": [1, -1, 1, 1, 1, 1, 1, 1]}, "finite and positive"),
        ({"hi": [1, 2]}, r"hi: \[8\] integers"),
        ({"lo": np.ones(8)}, r"lo: \[8\] integers"),
        ({"weights": 1e39}, "finite and positive"),  # the split weighs in fp32
        ({"weights": "heavy"}, "weights: numbers"),
        ({"survival": [[0.5], [0.5, 0.5]]}, "survival: numbers"),
        ({"survival": np.ones((8, 3), complex)}, "survival: numbers"),
        ({"base_tokens": 8.5}, "base_tokens: an integer, got 8.5"),
        ({"num_bonus": 7.5}, "num_bonus: an integer"),
        ({"max_tokens": float("inf")}, "max_tokens: an integer"),
    ],
)
def test_solve_budget_refusals(call, message):
    cost = StepCost([8, 16, 32, 64], [1.0, 1.1, 1.2, 1.3])
    options = {"survival": np.full((8, 3), 0.5), "base_tokens": 8, **call}
    with pytest.raises(ValueError, match="solve_budget: expected .*" + message):
        solve_budget(options.pop("survival"), cost, **options)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (([], []), "at least one size"),
        (([4, 2], [1, 2]), "rising order"),
        (([2, 2], [1, 2]), "rising order"),
        (([1, 2], [1, -1]), "seconds: finite and positive"),
        (([1, 2], [1, 0]), "seconds: finite and positive"),
        (([1, 2], [1, float("nan")]), "seconds: finite and positive"),
        (([1, 2], [1, float("inf")]), "seconds: finite and positive"),
        (([0, 2], [1, 2]), "whole sizes above 0"),
        (([1, 2.5], [1, 2]), "whole sizes"),
        (([1, 2], [1]), "seconds: as many as sizes, 2"),
        (([1, 2**63], [1, 2]), "whole sizes"),
        (([1, 2], ["a", "b"]), "seconds: numbers"),
        (([1, 2], [1j, 2j]), "seconds: numbers"),
    ],
)
def test_bad_tables_are_refused(table, message):
    with pytest.raises(ValueError, match="StepCost: expected .*" + message):
        StepCost(*table)
    with pytest.raises(ValueError, match="StepCost: expected .*" + message.replace("above 0", "above 4")):
        StepCost([4], [1.0], tail=([s + 4 for s in table[0]], table[1]))


def test_budgets_are_python_integers_of_any_host_array():
    cost = StepCost([8, 16, 32], [1.0, 1.1, 1.5])
    want = solve_budget(np.full((8, 3), 0.5), cost, base_tokens=8)
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        a = torch.full((8, 3), 0.5, dtype=kind, requires_grad=True)
        for base in (8, np.int32(8), torch.tensor(8)):
            got = solve_budget(a, cost, base_tokens=base)  # pyright: ignore[reportArgumentType]
            assert type(got) is int and got == want
    assert survival(torch.ones(2, 2, dtype=torch.bfloat16))[1] == 0  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("curve", [3, None, [1], [[1], [0.1], [2]]])
def test_a_curve_is_two_lists(curve):
    for label in ("draft", "tail"):
        if curve is not None:
            with pytest.raises(ValueError, match=rf"StepCost: expected {label}: \(sizes, seconds\)"):
                StepCost([1, 2], [1, 2], **{label: curve})
    data = json.loads(StepCost([1, 2], [1, 2]).to_json())
    for change in ({"draft": 3}, {"sizes": None}, {"seconds": {}}, {"tail": [1]}):
        with pytest.raises(ValueError, match="StepCost: expected "):
            StepCost.from_json(json.dumps({**data, **change}))
    for key in data:
        with pytest.raises(ValueError, match="StepCost: expected JSON of format"):
            StepCost.from_json(json.dumps({k: v for k, v in data.items() if k != key}))
    for text in ("", "{", "[]", "null"):
        with pytest.raises(ValueError, match="StepCost: expected JSON of format"):
            StepCost.from_json(text)


def test_draft_and_tail_are_checked_too():
    with pytest.raises(ValueError, match=r"StepCost: expected sizes: \[n\], got \[1, 2\]"):
        StepCost([[1, 2]], [1, 2])
    with pytest.raises(ValueError, match="StepCost: expected draft seconds: finite and not negative"):
        StepCost([1, 2], [1, 2], draft=([1], [-1.0]))
    with pytest.raises(ValueError, match="StepCost: expected tail sizes: whole sizes above 2"):
        StepCost([1, 2], [1, 2], tail=([2, 4], [3, 4]))
    cost = StepCost([1, 2], [1, 2], draft=([1, 4], [0.0, 0.5]))
    assert [cost.draft_seconds(n) for n in (0, 1, 2, 4)] == [0.0, 0.0, 0.5, 0.5]
    with pytest.raises(ValueError, match="at most 4 drafting requests, got 5"):
        cost.draft_seconds(5)
    for wrong in (-1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="StepCost: expected requests: an integer from 0"):
            cost.draft_seconds(wrong)  # pyright: ignore[reportArgumentType]
    assert cost.draft is not None
    with pytest.raises(ValueError, match="read-only"):
        cost.draft[1][0] = 1.0


def test_cost_is_a_ceiling_on_stairs_and_linear_only_inside_the_tail():
    cost = StepCost([4, 8], [1.0, 2.0], tail=([10, 14], [3.0, 5.0]))
    assert cost([0, 1, 4, 5, 8, 9, 10, 11, 12, 14]).tolist() == [1, 1, 1, 2, 2, 3, 3, 3.5, 4, 5]
    with pytest.raises(ValueError, match="0 to 14 tokens"):
        cost(15)


def test_noise_is_made_monotone_and_flat_tables_warn():
    noisy = StepCost([1, 2, 3, 4], [2.0, 1.5, 3.0, 2.5], tail=([6], [1.0]))
    assert noisy.seconds.tolist() == [2, 2, 3, 3]
    assert noisy.tail is not None and noisy.tail[1].tolist() == [3]
    with pytest.warns(UserWarning, match="every size costs the same, so no budget can ever trim"):
        flat = StepCost([64, 128], [0.5, 0.5])
    assert solve_budget(np.full((20, 5), 1e-6), flat, base_tokens=20) == 100
    with pytest.warns(UserWarning):
        StepCost([64], [0.5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StepCost([64, 128], [0.5, 0.6])


def test_json_round_trip_version_and_fingerprint():
    cost = StepCost([1, 3, 7], [0.1, 0.2, 1 / 3], draft=([2, 4], [0.01, 0.02]), tail=([9, 20], [0.5, 0.7]))
    again = StepCost.from_json(cost.to_json())
    assert again.to_json() == cost.to_json() and again.fingerprint == cost.fingerprint
    assert again(np.arange(21)).tolist() == cost(np.arange(21)).tolist()
    assert (
        StepCost([1, 3], [0.1, 0.2]).fingerprint != StepCost([1, 3], [0.1, np.nextafter(0.2, 1)]).fingerprint
    )
    for change in ({"version": 2}, {"format": "other"}):
        with pytest.raises(
            ValueError, match=r"StepCost: expected JSON of format 'dsv41.StepCost', version 1"
        ):
            StepCost.from_json(json.dumps({**json.loads(cost.to_json()), **change}))
    with pytest.raises(ValueError, match="read-only"):
        cost.top_seconds[0] = 1


def test_measure_takes_medians_and_refuses_a_run_of_another_size():
    now, calls = [0.0], []

    def run(tokens):
        calls.append(tokens)
        now[0] += 0.001 * tokens * (10 if len(calls) % 5 == 0 else 1)  # every fifth is an outlier

    cost = StepCost.measure(
        run, [1, 2, 4], tail=[8], draft=(run, [3]), timer=lambda: now[0], synchronize=lambda: None
    )
    assert cost.seconds == pytest.approx([0.001, 0.002, 0.004])
    assert cost.draft is not None and cost.draft[1] == pytest.approx([0.003])
    assert cost.tail is not None and cost.tail[1] == pytest.approx([0.008])
    with pytest.raises(ValueError, match="StepCost: expected a run of 4 tokens, got 8"):
        StepCost.measure(lambda tokens: 8, [4, 8])
    for change, message in (
        ({"repeats": 0}, "repeats"),
        ({"warmup": -1}, "warmup"),
        ({"sizes": [2.5]}, "a size"),
    ):
        with pytest.raises(ValueError, match=f"StepCost: expected {message}: an integer"):
            StepCost.measure(**{"run": lambda tokens: None, "sizes": [2], **change})
    assert StepCost.measure(run, iter([1, 2]), timer=lambda: now[0]).sizes.tolist() == [1, 2]  # pyright: ignore


def test_a_joint_tier_needs_one_that_holds_every_rank():
    cost = StepCost([4, 8], [1.0, 1.5])
    a = np.full((2, 3), 0.5)
    curve = budget_curve(a, cost, base_tokens=2)
    for broken in (curve * np.nan, curve + np.inf, np.full(2, -np.inf), np.array([1.0, np.nan])):
        with pytest.raises(ValueError, match="joint_tier: expected "):
            joint_tier([curve, broken], cost)
    for options, message in (
        ({"base_tokens": 2}, "base_tokens of 2"),
        ({"base_tokens": [2, 2.5]}, "base_tokens: an integer"),
        ({"base_tokens": [2, 2], "lo": 1}, "lo of 2 ranks"),
        ({"base_tokens": [2, 2], "max_tokens": 8}, "max_tokens of 2 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            solve_budget_joint([a, a], cost, **options)  # pyright: ignore[reportArgumentType]
    for tier in (4.5, None, float("nan")):
        with pytest.raises(ValueError, match="budget_of_tier: expected tier: an integer"):
            budget_of_tier(a, cost, tier, base_tokens=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match="budget_of_tier: expected num_bonus, lo, hi and weights, got weigths"
    ):
        budget_of_tier(a, cost, 4, base_tokens=2, weigths=2)
