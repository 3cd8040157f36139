"""Where to put every expert: a plan from loads, close to the lower bound, the same bytes on every host."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from . import _place, _tiny
from ._check import Floats, Ints, as_loads, as_map, check, check_ranks, check_whole, exact, replica_counts
from ._mix import mix
from ._relabel import align, keep_slots
from .maps import logical_maps, peak_bound
from .repair import repair

OP = "rebalance_experts"

# Divisor offsets of the count rule, tried in this order on the rows that are still above their goal. Below 0
# they favour experts with one copy, which leaves pieces that pack where the minimax slices nearly fill a rank
# (steep Zipf loads).
OFFSETS = (0.0, -0.3, -0.45, -0.2)
ROUNDS = 96  # rounds of one trial
EARLY = 6  # rounds after which a trial must be below HOPE times its goal
HOPE = 1.02
SOFT = 1.001  # a degree-balanced map may be this much worse than the best
SMALL = 1 << 17  # bounds trials * slots**2 of the random restarts, which only small shapes get
GENERATIONS = 8


def rebalance_experts(
    weight: ArrayLike,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    previous: ArrayLike | None = None,
    target: float = 1.002,
    distinct: bool = True,
    degree_balanced: bool = True,
    budget: int | None = None,
) -> tuple[Ints, Ints, Ints]:
    """Place ``num_replicas`` copies of the experts on ``num_gpus`` ranks so that rank loads are even.

        load[g] = sum over slots p of rank g of weight[expert(p)] / count[expert(p)],   minimise max(load) /
        mean(load)

    Same arguments, shapes and types as ``rebalance_experts`` of DeepSeek's EPLB. When ``num_nodes`` divides
    ``num_groups`` (both above 1), every group of experts stays on one node; otherwise both are ignored, as
    there.

    Args:
        weight: [layers, experts] loads, finite, >= 0; layers are independent.
        num_replicas: slots per layer, a multiple of ``num_gpus``, >= experts.
        num_groups: expert groups; divides experts.
        num_nodes: nodes; divides ``num_gpus``.
        num_gpus: ranks.
        previous: [layers, num_replicas] the current map, or None. The plan is then given the rank and slot
            numbers that keep as many experts in place as a pairwise search finds.
        target: stop at this multiple of the lower bound. Below about 1.005 the next window's noise hides the
            difference.
        distinct: never put an expert twice on a rank (a second copy there is a wasted slot).
        degree_balanced: prefer maps in which all ranks hold equally many copies of replicated experts, so
            that a later ``water_fill`` finds room; given up for a layer where it costs more than 0.1 %, or
            the greedy does better.
        budget: with ``previous``: no new plan, only the best repair with at most this many transfers per
            layer.

    Returns:
        ``physical_to_logical`` [layers, num_replicas], ``logical_to_physical`` [layers, experts, max count]
        padded with -1, ``counts`` [layers, experts]; all int64.

    Raises:
        ValueError: naming the numbers, for loads or shapes that have no plan; among them ``distinct`` with
            more slots than ``experts * num_gpus`` (of a node).

    Contract: exact arithmetic and total orders only, so the bytes depend on the arguments alone; scaling
    ``weight`` by a power of two, or planning a layer by itself, changes nothing. Without ``budget``, never
    above the plain greedy (heaviest first, lightest rank) under the same constraints; where the greedy would
    put an expert twice on a rank and ``distinct`` forbids it, the greedy of distinct experts stands in.
    ``num_replicas - experts + slots`` NumPy steps plus a bounded search: off the serving thread.

    Source: greedy and interface, DeepSeek EPLB; divisor rules, Balinski and Young.
    """
    loads = as_loads(OP, weight)
    experts = loads.shape[1]
    check_whole(OP, num_replicas=num_replicas, num_groups=num_groups, num_nodes=num_nodes, num_gpus=num_gpus)
    if budget is not None:
        check_whole(OP, budget=budget)
    check(target >= 1, OP, "target >= 1", target)
    check(num_replicas >= experts, OP, f"num_replicas >= {experts} experts", num_replicas)
    check_ranks(OP, num_replicas, num_gpus)
    check(
        num_groups >= 1 and experts % num_groups == 0,
        OP,
        f"num_groups to divide {experts} experts",
        num_groups,
    )
    check(num_nodes >= 1 and num_gpus % num_nodes == 0, OP, f"num_nodes to divide {num_gpus} GPUs", num_nodes)
    nodes = num_nodes if num_groups % num_nodes == 0 else 1
    groups = num_groups if nodes > 1 else 1
    most = experts // nodes * num_gpus if distinct else num_replicas
    check(
        num_replicas <= most, OP, f"at most {most} slots of distinct experts on {num_gpus} GPUs", num_replicas
    )
    layers = len(loads)
    old = None if previous is None else as_map(OP, "previous", previous, layers, experts, num_replicas)
    asked = budget is None or (old is not None and budget >= 0)
    check(asked, OP, "budget >= 0 together with previous", budget)
    if old is not None and budget is not None:
        check(
            nodes == 1, OP, "no node groups together with budget", f"{num_groups} groups on {num_nodes} nodes"
        )
        p2l = repair(loads, old, num_gpus, target=target, budget=budget).physical_to_logical
    else:
        shape = (nodes, groups, num_gpus, num_replicas)
        slots = _plan(loads, shape, target, distinct, degree_balanced)
        if old is not None:
            slots = _like_previous(slots, old.reshape(slots.shape), nodes)
        p2l = slots.reshape(layers, num_replicas)
    return p2l, *logical_maps(p2l, experts)


def greedy_map(weight: ArrayLike, num_replicas: int, num_gpus: int, distinct: bool = False) -> Ints:
    """The plain greedy, for comparison: copies to the largest slice, then heaviest first to the lightest
    rank.

    Ties go to the lower expert and rank. With ``distinct``, a layer in which the greedy runs into a rank that
    has the expert already is dealt in rounds instead; more slots than ``experts * num_gpus`` raise
    ``ValueError``. Arguments as ``rebalance_experts``; returns [layers, num_replicas]
    int64.
    """
    op = "greedy_map"
    check_whole(op, num_replicas=num_replicas, num_gpus=num_gpus)
    w = exact(as_loads(op, weight))
    check(num_replicas >= w.shape[1], op, f"num_replicas >= {w.shape[1]} experts", num_replicas)
    check_ranks(op, num_replicas, num_gpus)
    most = w.shape[1] * num_gpus if distinct else num_replicas
    check(
        num_replicas <= most, op, f"at most {most} slots of distinct experts on {num_gpus} GPUs", num_replicas
    )
    counts = _place.replicate(w, num_replicas - w.shape[1], num_gpus if distinct else num_replicas)
    expert, part = _place.sorted_items(w, counts)
    slots, found = _place.lightest_first(expert, part, num_gpus, distinct)
    if distinct and not found.all():
        slots[~found] = _place.deal(expert[~found], part[~found], num_gpus)
    return slots.reshape(len(w), num_replicas)


def _plan(
    loads: Floats, shape: tuple[int, int, int, int], target: float, distinct: bool, degree: bool
) -> Ints:
    """Slots [layers, num_gpus, slots per rank]; with several nodes, the better of two ways to spread the
    groups."""
    nodes, groups, ranks, replicas = shape
    layers, experts = loads.shape
    w = exact(loads)
    if nodes == 1:
        return _solve(w, replicas, ranks, target, distinct, degree)
    best = peak = None
    for members in _group_nodes(w.reshape(layers, groups, -1).sum(-1), nodes):
        size = experts // groups
        ids = (members[..., None] * size + np.arange(size)).reshape(layers * nodes, -1)
        local = w[np.repeat(np.arange(layers), nodes)[:, None], ids]
        slots = _solve(local, replicas // nodes, ranks // nodes, target, distinct, degree)
        part = np.take_along_axis(
            local / replica_counts(slots.reshape(len(slots), -1), local.shape[1]),
            slots.reshape(len(slots), -1),
            1,
        )
        slots = np.take_along_axis(ids, slots.reshape(len(slots), -1), 1).reshape(layers, ranks, -1)
        here = np.floor(part).reshape(slots.shape).sum(-1).max(1)
        if best is None or peak is None:
            best, peak = slots, here
        else:
            best = np.where((here < peak)[:, None, None], slots, best)
    assert best is not None
    return best


def _group_nodes(group_loads: Floats, nodes: int) -> list[Ints]:
    """Two assignments of groups to nodes, [layers, nodes, groups per node]: the greedy one, and that
    improved."""
    layers = len(group_loads)
    ones = np.ones(group_loads.shape, np.int64)
    greedy, _ = _place.lightest_first(*_place.sorted_items(group_loads, ones), nodes, False)
    pack = _packing(group_loads, ones, greedy.copy(), False)
    _place.exchange_search(pack, np.full(layers, 0.0), ROUNDS)
    return [greedy, pack.slots]


def _packing(w: Floats, counts: Ints, slots: Ints, distinct: bool, fair: bool = False) -> _place.Packing:
    """The rows ready for the search; ``fair`` keeps the number of replicated experts' copies on every
    rank."""
    flat = slots.reshape(len(slots), -1)
    part = np.take_along_axis(np.floor(w / counts), flat, 1).reshape(slots.shape)
    tied = part.copy()
    if fair:
        tied += _place.TIE * np.take_along_axis(counts > 1, flat, 1).reshape(slots.shape)
    return _place.Packing(slots, part, tied, distinct)


class _Rows:
    """The best slots and peaks so far of independent rows with exact loads ``w``, and a goal for each."""

    def __init__(self, w: Floats, distinct: bool, counts: Ints, slots: Ints) -> None:
        self.w, self.distinct, self.counts, self.slots = w, distinct, counts.copy(), slots.copy()
        self.peak = _packing(w, counts, slots, distinct).part.sum(-1).max(1)
        self.goal = self.peak

    def left(self) -> Ints:
        """Rows above their goal."""
        return np.nonzero(self.peak > self.goal)[0]

    def search(self, rows: Ints, counts: Ints, slots: Ints, fair: bool = False, early: int = EARLY) -> None:
        """Improve ``slots`` of ``rows`` and keep them where they beat the best so far."""
        if not len(rows):
            return
        pack = _packing(self.w[rows], counts, slots.copy(), self.distinct, fair)
        _place.exchange_search(pack, self.goal[rows], ROUNDS, early, HOPE)
        self.keep(rows, counts, pack.slots, pack.part.sum(-1).max(1))

    def keep(self, rows: Ints, counts: Ints, slots: Ints, peak: Floats) -> None:
        """Take the offered slots where their peak is lower."""
        won = np.nonzero(peak < self.peak[rows])[0]
        at = rows[won]
        self.counts[at], self.slots[at], self.peak[at] = counts[won], slots[won], peak[won]


def _solve(w: Floats, replicas: int, ranks: int, target: float, distinct: bool, degree: bool) -> Ints:
    """Slots [rows, ranks, slots per rank] for exact loads ``w`` [rows, experts]; rows do not influence each
    other."""
    extra = replicas - w.shape[1]
    cap = ranks if distinct else replicas
    counts = _place.replicate(w, extra, cap)
    expert, part = _place.sorted_items(w, counts)
    greedy, found = _place.lightest_first(expert, part, ranks, distinct)
    if not found.all():
        greedy[~found] = _place.deal(expert[~found], part[~found], ranks)
    best = _Rows(w, distinct, counts, greedy)
    plain = best.peak.copy()
    bound = np.maximum(w.sum(1) / ranks, peak_bound(w, counts, replicas // ranks))
    best.goal = np.minimum(target * bound, plain)
    even = None
    left = np.arange(len(w))
    if degree and 0 < extra < replicas - ranks:
        even = _Rows(w, distinct, counts, _place.deal(*_place.sorted_items(w, counts, counts > 1), ranks))
        even.goal = best.goal
        todo = even.left()
        even.search(todo, counts[todo], even.slots[todo], fair=True)
        left = even.left()
    _search_free(best, left, counts, extra, cap, ranks)
    if even is not None:
        fine = (even.peak <= np.maximum(best.goal, SOFT * best.peak)) & (even.peak <= plain)
        best.slots[fine] = even.slots[fine]
    return best.slots


def _search_free(best: _Rows, left: Ints, counts: Ints, extra: int, cap: int, ranks: int) -> None:
    """Bring the rows ``left`` to their goal: from the greedy, then from other counts, then from random
    restarts."""
    for offset in OFFSETS if extra else OFFSETS[:1]:
        left = left[best.peak[left] > best.goal[left]]
        if not len(left):
            return
        if offset:
            trial = _place.replicate(best.w[left], extra, cap, offset)
            best.search(left, trial, _place.deal(*_place.sorted_items(best.w[left], trial), ranks))
        else:
            best.search(left, counts[left], best.slots[left])
    left = left[best.peak[left] > best.goal[left]]
    best.search(left, best.counts[left], best.slots[left], early=0)
    trials = min(SMALL // best.slots[0].size ** 2, 64)
    for turn in range(GENERATIONS if trials else 0):
        left = left[best.peak[left] > best.goal[left]]
        if not len(left):
            return
        _restart(best, left, cap, trials, turn)
    if best.slots[0].size <= _tiny.SLOTS:
        left = left[best.peak[left] > best.goal[left]]
        _enumerate(best, left)


def _enumerate(best: _Rows, rows: Ints) -> None:
    """Look through the maps of tiny rows, as far as that is cheap."""
    ranks, size = best.slots.shape[1:]
    for row in rows:
        w = best.w[row]
        found = _tiny.best_placement(w, ranks * size, ranks, float(best.peak[row]), float(best.goal[row]))
        if found is not None:
            slots = found[None]
            counts = replica_counts(slots.reshape(1, -1), len(w))
            at = np.array([row])
            best.keep(at, counts, slots, _packing(w[None], counts, slots, best.distinct).part.sum(-1).max(1))


def _restart(best: _Rows, rows: Ints, cap: int, trials: int, turn: int) -> None:
    """Pack again with a few copies moved at random from the best counts so far; the better result stays.

    The random numbers belong to positions in the order by load, so renaming experts renames the outcome.
    """
    experts = best.w.shape[1]
    counts = np.repeat(best.counts[rows], trials, axis=0)
    many = np.repeat(rows, trials)
    place = np.argsort(np.argsort(-best.w[rows], axis=1, kind="stable"), axis=1)
    place = np.repeat(place, trials, axis=0)
    trial = np.tile(np.arange(trials), len(rows))[:, None]
    n = np.arange(len(many))
    for move in range(3):
        on = (trial[:, 0] % 3 >= move) & (counts.max(1) > 1) & (counts.min(1) < cap)
        seed = (turn * 3 + move) * 2
        give = np.where(counts > 1, mix(seed, trial, place), -1).argmax(1)
        take = np.where(counts < cap, mix(seed + 1, trial, place), -1).argmax(1)
        counts[n[on], give[on]] -= 1
        counts[n[on], take[on]] += 1
    expert, part = _place.sorted_items(best.w[many], counts)
    pack = _packing(best.w[many], counts, _place.deal(expert, part, best.slots.shape[1]), best.distinct)
    _place.exchange_search(pack, best.goal[many], ROUNDS)
    peak = pack.part.sum(-1).max(1).reshape(len(rows), trials)
    won = peak.argmin(1) + np.arange(len(rows)) * trials
    best.keep(rows, counts[won], pack.slots[won], peak.ravel()[won])
    assert counts.shape[1] == experts


def _like_previous(slots: Ints, old: Ints, nodes: int) -> Ints:
    """The same plan with nodes, ranks and slots renumbered to keep experts where ``old`` has them."""
    layers, ranks, size = slots.shape
    experts = int(max(slots.max(), old.max())) + 1
    if nodes > 1:
        by = align(slots.reshape(layers, nodes, -1), old.reshape(layers, nodes, -1), experts)
        slots = np.take_along_axis(slots.reshape(layers, nodes, -1), by[..., None], 1)
    new, was = slots.reshape(layers * nodes, -1, size), old.reshape(layers * nodes, -1, size)
    new = np.take_along_axis(new, align(new, was, experts)[..., None], 1)
    return keep_slots(new.reshape(-1, size), was.reshape(-1, size)).reshape(layers, ranks, size)
