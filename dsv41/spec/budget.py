"""How many drafts a step verifies: the exact optimum over a measured cost table, and its split over requests.

A step of B target tokens costs T(B), a stair: graphs are padded to the captured size. With S requests that
emit a token and survivals a, the budget K maximises

    theta(K) = (S + floors + sum of the K largest weighted survivals) / (T(base_tokens + K) + D(S))

Inside a bucket T is constant and the numerator does not fall, so the optimum fills a bucket: one ratio a
bucket is exact.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from .._op import check
from ..ops.verify import split_budget_ragged
from ._values import integer, numbers
from .confidence import first_survival
from .cost import StepCost


def _gains(
    name: str,
    survival: ArrayLike,
    num_bonus: int | None,
    lo: ArrayLike | None,
    hi: ArrayLike | None,
    weights: ArrayLike | None,
) -> tuple[int, int, np.ndarray]:
    """Requests that emit, drafts of the floors, and expected tokens by how many drafts come on top."""
    a = numbers(name, "survival", survival)
    if a.dtype not in (np.float32, np.float64):
        a = a.astype(np.float64)
    check(a.ndim == 2, name, "survival: [num_requests, block]", list(a.shape))
    rows, block = a.shape
    bonus = rows if num_bonus is None else integer(name, "num_bonus", num_bonus)
    check(0 <= bonus <= rows, name, f"num_bonus from 0 to {rows}", bonus)
    if a.size == 0:
        return bonus, 0, np.array([float(bonus)])
    invalid = int(a.size - np.count_nonzero(np.isfinite(a)))
    if invalid:
        message = f"{name}: {invalid} of {a.size} survivals are NaN or infinite and read as 0 from there on"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        a = np.where(np.logical_and.accumulate(np.isfinite(a), axis=1), a, 0)
    falling = bool((a[:, 1:] <= a[:, :-1]).all() and a[:, 0].max() <= 1 and a[:, -1].min() >= 0)
    check(
        falling,
        name,
        "survivals in [0, 1], not rising along a row",
        "other values (conditional confidences?)",
    )
    gain = a
    if weights is not None:
        w = numbers(name, "weights", weights).astype(np.float64)
        with np.errstate(over="ignore", under="ignore"):
            seen = w.astype(np.float32)  # what the split weighs with: there 0 and infinity count for nothing
        good = w.shape in ((), (rows,)) and bool(np.all(np.isfinite(seen)) and np.all(seen > 0))
        check(good, name, f"weights: [{rows}], finite and positive", w.tolist())
        gain = a * np.broadcast_to(w, (rows,))[:, None]
    if lo is None and hi is None:
        ranked, floors = gain.ravel(), 0
        granted = float(bonus)
    else:
        cap = np.clip(_per_row(name, "hi", block if hi is None else hi, rows), 0, block)
        floor = np.clip(_per_row(name, "lo", 0 if lo is None else lo, rows), 0, cap)
        slot = np.arange(block)
        below = slot < floor[:, None]
        ranked, floors = gain[~below & (slot < cap[:, None])], int(floor.sum())
        granted = bonus + float(gain[below].sum(dtype=np.float64))
    total = np.empty(ranked.size + 1)
    total[0] = granted
    total[1:] = np.sort(ranked)[::-1]
    return bonus, floors, total.cumsum()


def _per_row(name: str, label: str, value: ArrayLike, rows: int) -> np.ndarray:
    array = numbers(name, label, value)
    good = array.shape in ((), (rows,)) and array.dtype.kind in "iu"
    check(good, name, f"{label}: [{rows}] integers", f"{list(array.shape)} {array.dtype}")
    return np.broadcast_to(array, (rows,))


def _limit(
    name: str, cost: StepCost, base: int, bonus: int, floors: int, drafts: int, max_tokens: int | None
) -> tuple[int, int]:
    """The base tokens and the largest count that the step may have; refuses a cap that does not hold what
    must run.
    """
    base = integer(name, "base_tokens", base)
    check(base >= bonus, name, f"base_tokens >= num_bonus = {bonus}", base)
    cap = (
        cost.max_tokens
        if max_tokens is None
        else min(integer(name, "max_tokens", max_tokens), cost.max_tokens)
    )
    needed = (
        f"a token cap (max_tokens and the cost table) of at least {base} + {floors} (base_tokens + floors)"
    )
    check(base + floors <= cap, name, needed, cap)
    return base, min(cap, base + floors + drafts)


def solve_budget(
    survival: ArrayLike,
    cost: StepCost,
    *,
    base_tokens: int,
    num_bonus: int | None = None,
    lo: ArrayLike | None = None,
    hi: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    max_tokens: int | None = None,
) -> int:
    """Draft tokens of a step that maximise expected tokens a second, exactly.

        theta(K) = (num_bonus + sum of weighted survivals of the floors and of the best K - floors other
        drafts)
                   / (T(base_tokens + K) + D(num_bonus))

    The text stays exact only if ``survival`` does not come from the drafts about to be verified (unless all
    of them are deterministic or verified by exact match): pass an earlier block's, or use
    `solve_budget_lossless`.

    Args:
        survival: [num_requests, block] running products, see `survival`; NaN or infinity reads as 0 from
            there on, with a RuntimeWarning.
        cost: StepCost.
        base_tokens: target tokens without drafts: anchors and prefill chunks.
        num_bonus: requests that emit a token in this step (those not inside their prefill); None is every
            row.
        lo: [num_requests] drafts a row gets in any case, or one for all; ``lo = hi`` pins a row, and more
            than ``hi`` is cut to it. None is 0.
        hi: [num_requests] drafts available to a row, or one for all; None is block.
        weights: [num_requests] positive worth of a row's drafts, or one for all; None is 1.
        max_tokens: cap on the step's tokens (KV slots, logits rows), or None for the table's own end.

    Returns:
        Total drafts, floors included. The bucket is filled: padding would cost the same. Of equal buckets the
        smallest.

    Errors: ValueError when the cap is below base_tokens + floors, or survivals rise along a row.

    Source: DSpark, arXiv 2607.05147 (objective); the reduction to bucket tops is in docs/speculative.md.
    """
    name = "solve_budget"
    bonus, floors, total = _gains(name, survival, num_bonus, lo, hi, weights)
    base, limit = _limit(name, cost, base_tokens, bonus, floors, total.size - 1, max_tokens)
    least = base + floors
    begin, end = np.searchsorted(cost.tops, (least, limit))
    tokens = np.minimum(cost.tops[begin : end + 1], limit)
    rate = total[tokens - least] / (cost.top_seconds[begin : end + 1] + cost.draft_seconds(bonus))
    return int(tokens[rate.argmax()]) - base


def solve_budget_lossless(
    cost: StepCost,
    *,
    base_tokens: int,
    stale: ArrayLike | None = None,
    first: ArrayLike | None = None,
    prior: ArrayLike | None = None,
    num_bonus: int | None = None,
    lo: ArrayLike | None = None,
    hi: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    max_tokens: int | None = None,
) -> int:
    """`solve_budget` over what may be read without biasing sampled text: nothing that depends on a drafted
    token.

    Exactly one of ``stale`` and ``first``. The first confidence of a block depends on the context alone;
    later ones depend on drafts whose verification is being decided, so here they are not even arguments.

    Args:
        cost: StepCost.
        base_tokens: target tokens without drafts.
        stale: [num_requests, block] survivals of an earlier block, e.g.
            ``survival(StaleConfidence.read(...))``.
        first: [num_requests] confidence of the first draft of the current block.
        prior: [block - 1] typical conditional confidences after the first, from earlier blocks; with
            ``first`` only.
        num_bonus: as in `solve_budget`.
        lo: as in `solve_budget`.
        hi: as in `solve_budget`.
        weights: as in `solve_budget`; may not depend on the current drafts either.
        max_tokens: as in `solve_budget`.

    Returns:
        Total drafts, as `solve_budget`.
    """
    name = "solve_budget_lossless"
    check(
        (stale is None) != (first is None),
        name,
        "one of stale and first",
        "both" if stale is not None else "neither",
    )
    if stale is None:
        check(prior is not None, name, "prior: [block - 1] beside first", prior)
        stale = first_survival(first, prior)  # pyright: ignore[reportArgumentType]
    return solve_budget(
        stale,
        cost,
        base_tokens=base_tokens,
        num_bonus=num_bonus,
        lo=lo,
        hi=hi,
        weights=weights,
        max_tokens=max_tokens,
    )


def solve_budget_early_stop(
    survival: ArrayLike, cost: StepCost, *, base_tokens: int, num_bonus: int | None = None
) -> int:
    """The paper's baseline: admit drafts by falling survival while the rate rises, stop at the first that
    does not.

    Exact for convex costs; on stairs one bucket edge can hide the whole rest of a bucket. For comparisons
    only.

    Args:
        survival: [num_requests, block] running products; may be the current drafts': the rule looks at no
            later draft.
        cost: StepCost.
        base_tokens: target tokens without drafts.
        num_bonus: requests that emit a token in this step; None is every row.

    Returns:
        Total drafts.

    Source: DSpark, arXiv 2607.05147, algorithm 1.
    """
    name = "solve_budget_early_stop"
    bonus, floors, total = _gains(name, survival, num_bonus, None, None, None)
    base, limit = _limit(name, cost, base_tokens, bonus, floors, total.size - 1, None)
    seconds = cost(np.arange(base, limit + 1)) + cost.draft_seconds(bonus)
    rate = total[: seconds.size] / seconds
    stops = np.flatnonzero(rate[1:] <= rate[:-1])
    return int(stops[0]) if stops.size else rate.size - 1


def budget_curve(
    survival: ArrayLike,
    cost: StepCost,
    *,
    base_tokens: int,
    num_bonus: int | None = None,
    lo: ArrayLike | None = None,
    hi: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    max_tokens: int | None = None,
) -> np.ndarray:
    """What one data-parallel rank tells the others: its expected tokens if the common tier is each of
    ``cost.tiers``.

    Args:
        survival: [num_requests, block], this rank's; as in `solve_budget`. [0, block] for an idle rank.
        cost: StepCost, the same on every rank (compare `StepCost.fingerprint`).
        base_tokens: this rank's target tokens without drafts; 0 for an idle rank.
        num_bonus: as in `solve_budget`.
        lo: as in `solve_budget`.
        hi: as in `solve_budget`.
        weights: as in `solve_budget`.
        max_tokens: this rank's cap.

    Returns:
        [num_tiers] float64; -inf where the tier does not hold this rank's base tokens and floors.
    """
    name = "budget_curve"
    bonus, floors, total = _gains(name, survival, num_bonus, lo, hi, weights)
    base, limit = _limit(name, cost, base_tokens, bonus, floors, total.size - 1, max_tokens)
    least = base + floors
    reach = np.minimum(cost.tiers, limit) - least
    return np.where(reach >= 0, total[np.maximum(reach, 0)], -np.inf)


def joint_tier(curves: ArrayLike, cost: StepCost, *, draft_requests: int = 0) -> int:
    """The tier all ranks pad to: argmax over tiers of the ranks' expected tokens together, over the tier's
    seconds.

    Args:
        curves: [num_ranks, num_tiers] from `budget_curve`, gathered in the step's existing collective.
        cost: StepCost.
        draft_requests: requests of the fullest rank that will draft, for the draft table.

    Returns:
        Tokens of the tier; every rank then fills up to it. Of equal tiers the smallest: the same on every
        rank.

    Errors: ValueError for a curve with a NaN or +inf, or when no tier holds every rank.
    """
    check(isinstance(cost, StepCost), "joint_tier", "cost: StepCost", cost)
    gains = numbers("joint_tier", "curves", curves).astype(np.float64)
    check(
        gains.ndim == 2 and gains.shape[1] == len(cost.tiers),
        "joint_tier",
        f"curves: [num_ranks, {len(cost.tiers)}]",
        list(gains.shape),
    )
    check(bool((gains < np.inf).all()), "joint_tier", "curves without a NaN or +inf", gains.tolist())
    together = gains.sum(0)
    held = bool(gains.size) and together.max() > -np.inf
    check(held, "joint_tier", "curves of ranks that one tier holds together", gains.tolist())
    rate = together / (cost.tier_seconds + cost.draft_seconds(draft_requests))
    return int(cost.tiers[rate.argmax()])


def solve_budget_joint(
    survivals: Sequence[ArrayLike],
    cost: StepCost,
    *,
    base_tokens: Sequence[int],
    num_bonus: Sequence[int | None] | None = None,
    lo: Sequence[ArrayLike | None] | None = None,
    hi: Sequence[ArrayLike | None] | None = None,
    weights: Sequence[ArrayLike | None] | None = None,
    max_tokens: Sequence[int | None] | None = None,
) -> list[int]:
    """Budgets of data-parallel ranks that run in step, all padded to the largest: one tier, chosen for all of
    them.

        maximise over tiers b:  sum over ranks of G_d(min(b - base_tokens_d, drafts_d)) / (T(b) + max_d
        D(num_bonus_d))

    Args:
        survivals: a [num_requests, block] a rank; as in `solve_budget`.
        cost: StepCost.
        base_tokens: [num_ranks] target tokens without drafts.
        num_bonus: [num_ranks], or None; each as in `solve_budget`.
        lo: one a rank, or None; as in `solve_budget`.
        hi: one a rank, or None; as in `solve_budget`.
        weights: one a rank, or None; as in `solve_budget`.
        max_tokens: one a rank, or None; as in `solve_budget`.

    Returns:
        [num_ranks] drafts of each rank: as many as fit the tier.
    """
    name, ranks = "solve_budget_joint", _length(survivals)
    check(isinstance(ranks, int), name, "survivals: one a rank", survivals)
    check(isinstance(cost, StepCost), name, "cost: StepCost", cost)
    check(
        ranks > 0 and _length(base_tokens) == ranks,
        name,
        f"base_tokens of {ranks} (at least 1) ranks",
        _length(base_tokens),
    )
    options: list[dict[str, Any]] = [
        {"base_tokens": integer(name, "base_tokens", base)} for base in base_tokens
    ]
    for label, values in (
        ("num_bonus", num_bonus),
        ("lo", lo),
        ("hi", hi),
        ("weights", weights),
        ("max_tokens", max_tokens),
    ):
        if values is not None:
            check(_length(values) == ranks, name, f"{label} of {ranks} ranks", _length(values))
            for option, value in zip(options, values, strict=True):
                option[label] = value
    curves = [budget_curve(a, cost, **option) for a, option in zip(survivals, options, strict=True)]
    emitting = [
        len(np.asarray(a)) if o.get("num_bonus") is None else o["num_bonus"]
        for a, o in zip(survivals, options, strict=True)
    ]
    tier = joint_tier(curves, cost, draft_requests=max(emitting))
    return [budget_of_tier(a, cost, tier, **option) for a, option in zip(survivals, options, strict=True)]


def _length(values: Any) -> Any:
    """How many entries a list has; a value that is no list comes back as text, which equals no count."""
    return len(values) if hasattr(values, "__len__") else repr(values)


def budget_of_tier(
    survival: ArrayLike,
    cost: StepCost,
    tier: int,
    *,
    base_tokens: int,
    max_tokens: int | None = None,
    **options: Any,
) -> int:
    """Drafts of one rank that fill the common tier as far as it has drafts.

    Args:
        survival: [num_requests, block], this rank's.
        cost: StepCost.
        tier: from `joint_tier`.
        base_tokens: this rank's target tokens without drafts.
        max_tokens: this rank's cap.
        options: num_bonus, lo, hi and weights of `solve_budget`.

    Returns:
        Total drafts.
    """
    name = "budget_of_tier"
    labels = ("num_bonus", "lo", "hi", "weights")
    unknown = ", ".join(sorted(set(options) - set(labels)))
    check(not unknown, name, "num_bonus, lo, hi and weights", unknown)
    bonus, floors, total = _gains(name, survival, *(options.get(label) for label in labels))
    cap = integer(name, "tier", tier)
    if max_tokens is not None:
        cap = min(cap, integer(name, "max_tokens", max_tokens))
    base, limit = _limit(name, cost, base_tokens, bonus, floors, total.size - 1, cap)
    return limit - base


def split_budget(
    confidence: Any,
    budget: int | torch.Tensor,
    *,
    lo: Any = None,
    hi: Any = None,
    weights: Any = None,
    rotation: int | torch.Tensor = 0,
) -> Any:
    """Drafts of each request under a budget: the best ``budget`` slots by weighted survival, floors first.

    Ties go to the request that comes first after ``rotation``, within a request to the earlier draft; whether
    draft k is verified never depends on confidences after k. This is `dsv41.ops.split_budget_ragged` without
    its layout.

    Args:
        confidence: [num_requests, block] conditional confidences of the current drafts, NumPy or torch. NaN
            and infinities read as 0 (`survival` and the op count them).
        budget: drafts of the step, clamped to what floors and caps allow; an integer, or a one-element tensor
            on the device.
        lo: [num_requests] integers, or one for all, cut to ``hi``; None is 0.
        hi: [num_requests] integers, or one for all; None is block.
        weights: [num_requests] positive, or one for all; None is 1.
        rotation: step counter, an integer or a one-element tensor.

    Returns:
        [num_requests] int32 of the kind of ``confidence``, on its device. Sums to the clamped budget.
    """
    name = "split_budget"
    as_tensor = isinstance(confidence, torch.Tensor)
    if as_tensor:
        c = confidence
    else:
        with np.errstate(over="ignore"):  # beyond fp32 is infinite, and reads as 0
            c = torch.from_numpy(np.atleast_1d(numbers(name, "confidence", confidence)).astype(np.float32))
    check(c.dim() == 2, name, "confidence: [num_requests, block]", c)
    rows, block = c.shape
    check(block > 0, name, "confidence: [num_requests, block], block at least 1", c)
    if rows == 0:
        empty = c.new_empty((0,), dtype=torch.int32)
        return empty if as_tensor else empty.numpy()

    def spread(label: str, value: Any, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        if value is None:
            return None
        wanted = f"{label}: [{size}] {'numbers' if dtype == torch.float32 else 'integers'}"
        try:
            x = torch.as_tensor(value, device=c.device)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            x = None
            check(False, name, wanted, value)
        assert x is not None
        whole = not (x.is_floating_point() or x.is_complex()) or dtype == torch.float32
        check(whole and tuple(x.shape) in ((), (1,), (size,)), name, wanted, x)
        return x.to(dtype).expand(size).contiguous()

    # Python's integers have no end; the op's do.
    if isinstance(budget, int):
        budget = min(max(budget, -1), rows * block)
    if isinstance(rotation, int):
        rotation %= rows
    count = spread("budget", budget, 1, torch.int64)
    check(count is not None, name, "budget: [1] integers", budget)
    assert count is not None
    lengths = split_budget_ragged(
        c.to(torch.float32).contiguous(),
        count,
        max_tokens=0,
        max_logits=0,
        lo=spread("lo", lo, rows, torch.int64),
        hi=spread("hi", hi, rows, torch.int64),
        weights=spread("weights", weights, rows, torch.float32),
        rotation=spread("rotation", rotation, 1, torch.int64),
    ).lengths
    return lengths if as_tensor else lengths.numpy()
