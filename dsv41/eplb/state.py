"""When to do what: refresh the split, repair the map, or leave both alone; and how to read the numbers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._check import Floats, Ints, as_loads, as_map, check, check_ranks, check_whole
from ._flow import compiled_loops
from .maps import imbalance, peak_over_mean
from .repair import Move, repair
from .split import ENTRIES, equal_shares, to_table, water_fill

Action = Literal["keep", "refresh", "repair"]
STALE_GAIN = 1e-3  # a new split must promise this much mean imbalance to be worth sending out


def expected_maximum(n: int) -> float:
    """Expected largest of ``n`` independent standard normals: the integral of ``x d(Phi(x)**n)``."""
    check_whole("expected_maximum", n=n)
    check(n >= 1, "expected_maximum", "n >= 1", n)
    return _expected_maximum(int(n))


@functools.cache
def _expected_maximum(n: int) -> float:
    step, low = 1 / 512, -10.0
    edges = [low + i * step for i in range(int(20 / step) + 1)]
    power = [(0.5 * math.erfc(-x / math.sqrt(2))) ** n for x in edges]
    return math.fsum((x + step / 2) * (b - a) for x, a, b in zip(edges, power, power[1:], strict=False))


def noise_floor(num_gpus: int, tokens_per_rank: float, top_k: int = 6) -> float:
    """Imbalance of a step that multinomial sampling alone causes under a perfect map: ``1 + z / sqrt(top_k *
    B)``.

    ``z`` is ``expected_maximum(num_gpus)`` and ``B`` the tokens per rank and step. Independent tokens are
    assumed; those of one request are not, so the real floor is higher. No packing goes below it: read
    measured imbalances beside it.
    """
    given = (tokens_per_rank, top_k)
    real = all(isinstance(x, int | float) for x in given)
    check(real and min(given) > 0, "noise_floor", "positive tokens and top_k", given)
    return 1.0 + expected_maximum(num_gpus) / math.sqrt(top_k * tokens_per_rank)


@dataclass(frozen=True)
class Metrics:
    """Imbalance of one step or one window: mean over layers, worst layer, and the noise floor of as many
    tokens."""

    mean: float
    worst: float
    floor: float


def metrics(physical_counts: ArrayLike, num_gpus: int) -> Metrics:
    """How balanced observed counts were.

    Args:
        physical_counts: [layers, slots] routed pairs that reached each slot, of one step or summed over a
            window. The two are different quantities: a window averages the sampling noise away.
        num_gpus: ranks; divides ``slots``.
    """
    counts = as_loads("metrics", physical_counts)
    size = check_ranks("metrics", counts.shape[1], num_gpus)
    ratio = peak_over_mean(np.add.reduce(counts.reshape(len(counts), num_gpus, size), axis=2))
    per_rank = float(counts.sum() / len(counts) / num_gpus)
    floor = noise_floor(num_gpus, per_rank, 1) if per_rank else 1.0
    return Metrics(math.fsum(ratio) / len(ratio), float(ratio.max()), floor)


@dataclass(frozen=True, eq=False)
class Decision:
    """What ``Balancer.decide`` proposes for epoch ``epoch``; nothing happens until ``Balancer.commit``.

    ``now``, ``refreshed``, ``repaired``: predicted mean imbalance over layers when left alone, with a new
    split, and after ``moves`` (equal to ``refreshed`` without moves). ``physical_to_logical``, ``shares``
    [layers, slots] and ``table`` [layers, experts, entries] are those to serve with afterwards.
    Two decisions are equal only if they are the same object.
    """

    action: Action
    epoch: int
    step: int
    now: float
    refreshed: float
    repaired: float
    physical_to_logical: Ints
    shares: Floats
    table: NDArray[np.int16]
    moves: list[Move]


class Balancer:
    """The map, split and table being served, and the rule that changes them.

    Call ``decide`` on one rank with the loads of the last window, broadcast the decision, carry out its
    moves, then ``commit`` on all ranks between two steps. ``epoch`` counts committed changes of the map: a
    decision made for another epoch is refused, so ranks cannot drift apart unnoticed.

    Args:
        physical_to_logical: [layers, slots] the map being served.
        num_experts: experts per layer.
        num_gpus: ranks; divides ``slots``.
        target: imbalance above which a layer is repaired.
        min_gain: repair only if it lowers the predicted mean imbalance over layers by this much more than a
            new split.
        budget: most transfers per repair, over all layers; None for no limit.
        per_rank: most transfers into one rank of a layer per repair.
        patience: steps after which an uncommitted decision is ``overdue``.
        entries: entries per expert of the table.
        compiled: as in ``water_fill``; loaded here, so that no decision waits for it.
    """

    def __init__(
        self,
        physical_to_logical: ArrayLike,
        num_experts: int,
        num_gpus: int,
        *,
        target: float = 1.02,
        min_gain: float = 0.005,
        budget: int | None = None,
        per_rank: int | None = 3,
        patience: int = 1000,
        entries: int = ENTRIES,
        compiled: bool | None = None,
    ) -> None:
        op = "Balancer"
        p2l = np.asarray(physical_to_logical)
        check(p2l.ndim == 2, op, "physical_to_logical: [layers, slots]", list(p2l.shape))
        self.physical_to_logical = as_map(op, "physical_to_logical", p2l, len(p2l), num_experts)
        check_ranks(op, p2l.shape[1], num_gpus)
        limits = {"budget": budget, "per_rank": per_rank, "patience": patience}
        for name, limit in limits.items():
            if limit is not None or name == "patience":
                check_whole(op, **{name: limit})
                check(limit is not None and limit >= 0, op, f"{name} >= 0", limit)
        check(target >= 1 and min_gain >= 0, op, "target >= 1 and min_gain >= 0", (target, min_gain))
        self.num_experts, self.num_gpus, self.entries = num_experts, num_gpus, entries
        self.target, self.min_gain, self.budget, self.per_rank = target, min_gain, budget, per_rank
        self.patience, self.compiled = patience, compiled
        compiled_loops(compiled)
        self.shares = equal_shares(self.physical_to_logical, num_experts)
        self.table = to_table(self.shares, self.physical_to_logical, num_experts, entries)
        self.epoch = 0
        self.pending: Decision | None = None

    def decide(self, loads: ArrayLike, step: int = 0, *, allow_moves: bool = True) -> Decision:
        """The best use of a window's ``loads`` [layers, experts]: keep everything, a new split, or moves as
        well.

        All-zero layers count as balanced. Predictions are for the window given; drift and sampling come on
        top.
        """
        weight = as_loads("Balancer.decide", loads)
        old = self.physical_to_logical
        now = self._mean(imbalance(weight, old, self.num_gpus, self.shares))
        shares = water_fill(weight, old, self.num_gpus, compiled=self.compiled)
        refreshed = repaired = self._mean(imbalance(weight, old, self.num_gpus, shares))
        action: Action = "refresh" if now - refreshed > STALE_GAIN else "keep"
        p2l, moves = old, []
        if allow_moves and refreshed > self.target - self.min_gain:
            fix = repair(
                weight,
                old,
                self.num_gpus,
                target=self.target,
                budget=self.budget,
                per_rank=self.per_rank,
                compiled=self.compiled,
            )
            after = self._mean(fix.after)
            if fix.moves and refreshed - after >= self.min_gain:
                action, p2l, shares, moves = "repair", fix.physical_to_logical, fix.shares, fix.moves
                repaired = after
        if action == "keep":
            shares, table = self.shares, self.table
        else:
            table = to_table(shares, p2l, self.num_experts, self.entries)
        self.pending = Decision(action, self.epoch, step, now, refreshed, repaired, p2l, shares, table, moves)
        return self.pending

    def commit(self, decision: Decision) -> None:
        """Serve with ``decision`` from now on; its moves must have been carried out."""
        check(
            decision.epoch == self.epoch,
            "Balancer.commit",
            f"a decision for epoch {self.epoch}",
            decision.epoch,
        )
        self.physical_to_logical, self.shares = decision.physical_to_logical, decision.shares
        self.table = decision.table
        self.epoch += decision.action == "repair"
        self.pending = None

    def overdue(self, step: int) -> bool:
        """Whether a decision has been waiting for its commit for more than ``patience`` steps: a transfer
        hangs."""
        return self.pending is not None and step - self.pending.step > self.patience

    @staticmethod
    def _mean(ratios: Floats) -> float:
        return math.fsum(ratios) / len(ratios)
