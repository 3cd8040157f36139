"""A few transfers instead of a new plan: give hot experts another copy where a surplus copy can go."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ._check import Bools, Floats, Ints, as_loads, as_map, as_rows, check, check_ranks, check_whole
from ._flow import Flow, row_sums
from .maps import imbalance
from .split import flow_shares

SETTLE = 6  # sweeps after each trial move
TRIES = 12  # moves in a row that may fail to help before a layer is left as it is
SPILL = 1.5  # weight of flow that the leaving copy's other ranks have no room for
WAY = (0.9, 0.6)  # how far from mean to peak a rank may be filled, by failed tries in a row
GAIN = 1e-4  # a move must lower the peak by this many mean rank loads


class Move(NamedTuple):
    """Copy all tensors of ``expert`` from rank ``src_rank`` over slot ``dst_slot``, which lies on rank
    ``dst_rank``.

    ``src_slot`` holds the expert in the old map and still does when the move's turn comes; the expert that
    leaves ``dst_slot`` has another copy at that time, in a slot of the old map.
    """

    layer: int
    expert: int
    src_rank: int
    dst_rank: int
    dst_slot: int
    src_slot: int


@dataclass(frozen=True)
class Repair:
    """Outcome of ``repair``: the new ``physical_to_logical`` and ``shares``, both [layers, slots], the moves
    that lead there, and imbalances.

    ``before`` and ``after`` [layers] are what ``imbalance`` gives for the old map, levelled, and for the map
    and shares here. ``gains[i]`` is what move ``i`` takes off its layer's imbalance; a layer's gains add up
    to ``before - after`` (rounding aside).
    """

    physical_to_logical: Ints
    shares: Floats
    moves: list[Move]
    gains: list[float]
    before: Floats
    after: Floats

    def batches(self) -> Iterator[list[Move]]:
        """The moves in batches in which no rank sends twice or receives twice, each move in the earliest it
        can join.

        Moves of one batch may run at once: their sources are read before any is overwritten.
        """
        return batches(self.moves)


def repair(
    weight: ArrayLike,
    previous: ArrayLike,
    num_gpus: int,
    *,
    target: float = 1.02,
    budget: int | None = None,
    per_rank: int | None = None,
    num_nodes: int = 1,
    compiled: bool | None = None,
) -> Repair:
    """Lower the water-filled imbalance of a map to ``target`` with few transfers.

    One move gives an expert of the hottest rank a slot on a colder one, in place of an expert that has
    another copy. The move with the largest estimate of what it can take off the peak is tried, the split is
    levelled again, and the move stays if the peak fell. So after every move each expert is still present, and
    no layer ever gets worse. No rank receives an expert that it held in the old map, so every move is a
    transfer that the new map needs.

    Args:
        weight: [layers, experts] loads, finite, >= 0.
        previous: [layers, slots] integers, the current map.
        num_gpus: ranks; divides ``slots``.
        target: leave a layer alone once its largest rank load is at most this multiple of the mean.
        budget: at most this many transfers in all, None for no limit. The best ones come first, so the list
            for a small budget is a prefix of that for a large one.
        per_rank: at most this many transfers into one rank of a layer, None for no limit.
        num_nodes: sources on the node of the destination are preferred; divides ``num_gpus``.
        compiled: as in ``water_fill``.

    Returns:
        Repair. A layer at or below ``target`` has no moves. An expert that stays keeps its slot.

    Contract: deterministic; layers do not influence each other, except for which moves fit the budget.
    """
    op = "repair"
    loads = as_loads(op, weight)
    old = as_map(op, "previous", previous, *loads.shape)
    check_ranks(op, old.shape[1], num_gpus)
    check(target >= 1, op, "target >= 1", target)
    check_whole(op, **{k: v for k, v in {"budget": budget, "per_rank": per_rank}.items() if v is not None})
    check(budget is None or budget >= 0, op, "budget >= 0", budget)
    check(per_rank is None or per_rank >= 0, op, "per_rank >= 0", per_rank)
    check(num_nodes >= 1 and num_gpus % num_nodes == 0, op, f"num_nodes to divide {num_gpus} GPUs", num_nodes)
    search = _Search(loads, old, num_gpus, per_rank, compiled)
    start = flow_shares(search.flow)
    before = imbalance(loads, old, num_gpus, start)
    search.run(target)
    order = _best_first(search.steps)
    kept = order if budget is None else order[:budget]
    if len(kept) < len(order):
        search = _Search(loads, old, num_gpus, per_rank, compiled)
        search.replay(kept)
    p2l, shares = search.flow.p2l, flow_shares(search.flow)
    after = imbalance(loads, p2l, num_gpus, shares)
    worse = after > before  # by rounding alone: every step lowered the peak
    p2l[worse], shares[worse], after[worse] = old[worse], start[worse], before[worse]
    kept = [step for step in kept if not worse[step[0]]]
    moves = _with_sources(old, kept, num_gpus, num_nodes)
    return Repair(p2l, shares, moves, [step[1] for step in kept], before, after)


def as_moves(op: str, moves: Iterable[Move]) -> list[Move]:
    """The moves as a list, each of them a `Move`."""
    check(isinstance(moves, Iterable), op, "moves: a list of Move", moves)
    listed = list(moves)
    check(all(isinstance(move, Move) for move in listed), op, "moves: a list of Move", listed)
    return listed


def apply_moves(physical_to_logical: ArrayLike, moves: Iterable[Move]) -> Ints:
    """The map ``physical_to_logical`` [layers, slots] after ``moves``: the same shape, int64, a new array.

    Errors: ValueError for a map that is none, and a move of a layer or slot that is not there.
    """
    op = "apply_moves"
    p2l = np.array(as_rows(op, "physical_to_logical", physical_to_logical), np.int64)
    for move in as_moves(op, moves):
        there = 0 <= move.layer < p2l.shape[0] and 0 <= move.dst_slot < p2l.shape[1]
        check(there, op, f"moves within {p2l.shape[0]} layers of {p2l.shape[1]} slots", move)
        p2l[move.layer, move.dst_slot] = move.expert
    return p2l


Step = tuple[int, float, int, int]  # layer, gain, expert, destination slot
Saved = dict[str, tuple[tuple[Ints, ...], np.ndarray]]  # array of the flow: index, values there


class _Search:
    """The greedy of ``repair`` on all layers at once: one trial move per layer and turn."""

    def __init__(
        self, loads: Floats, old: Ints, ranks: int, per_rank: int | None, compiled: bool | None = None
    ) -> None:
        self.flow = Flow(loads, old, ranks, None, compiled)
        self.flow.level(np.arange(len(loads)), 20, 1e-3)
        self.ranks = ranks
        self.room = np.full((len(loads), ranks), old.shape[1] if per_rank is None else per_rank)
        self.fixed = self.flow.counts.copy()  # copies still in a slot of the old map
        self.fresh = np.zeros(old.shape, bool)  # slots already given away
        # Slots that carry the flow of further copies on their rank (only maps made elsewhere have any) stay.
        self.held = self._holding(np.arange(len(loads)))
        self.home = np.zeros((*loads.shape, ranks), bool)  # ranks that held an expert in the old map
        self.home[np.arange(len(loads))[:, None], old, np.arange(old.shape[1]) // self.flow.size] = True
        self.steps: list[list[Step]] = [[] for _ in loads]

    def _holding(self, n: Ints) -> Bools:
        """Slots of layers ``n`` that stand for other slots of their rank as well."""
        held = np.zeros((len(n), self.flow.slots), bool)
        row, p = np.nonzero(self.flow.main[n] != np.arange(self.flow.slots))
        held[row, self.flow.main[n][row, p]] = True
        return held

    def replay(self, steps: list[Step]) -> None:
        """Take ``steps`` again, which ``run`` found: the flow is then what it was after the last of each
        layer."""
        todo: dict[int, list[Step]] = {}
        for step in steps:
            todo.setdefault(step[0], []).append(step)
        for turn in range(max(map(len, todo.values()), default=0)):
            now = [own[turn] for own in todo.values() if turn < len(own)]
            layers = np.array([step[0] for step in now])
            self._replace(layers, np.array([step[2] for step in now]), np.array([step[3] for step in now]))
            self.flow.level(layers, SETTLE, 1e-3)

    def run(self, target: float) -> None:
        """Move until every layer is at its target or out of moves that help."""
        flow = self.flow
        act = np.nonzero(flow.peak() > target * flow.mean)[0]
        fails = np.zeros(len(flow.w), np.int64)
        barred = np.zeros(flow.p2l.shape, bool)
        while len(act):
            expert, slot, some = self._propose(act, barred, fails[act])
            act, expert, slot = act[some], expert[some], slot[some]
            if not len(act):
                return
            peak = flow.peak()[act]
            leaving = flow.p2l[act, slot]
            saved = self._save(act, np.stack((leaving, expert), 1), slot)
            self._replace(act, expert, slot)
            flow.level(act, SETTLE, 1e-3)
            gain = (peak - flow.peak()[act]) / flow.mean[act]
            good = gain > GAIN
            self._restore(saved, ~good)
            barred[act[~good]] |= flow.p2l[act[~good]] == leaving[~good, None]
            barred[act[good]] = False
            for layer, e, p, won in zip(act[good], expert[good], slot[good], gain[good], strict=True):
                self.steps[layer].append((int(layer), float(won), int(e), int(p)))
            self.fixed[act[good], leaving[good]] -= 1
            self.fresh[act[good], slot[good]] = True
            self.held[act[good]] = self._holding(act[good])
            self.room[act[good], slot[good] // flow.size] -= 1
            fails[act] = np.where(good, 0, fails[act] + 1)
            act = act[(flow.peak()[act] > target * flow.mean[act]) & (fails[act] < TRIES)]

    def _propose(self, act: Ints, barred: Bools, fails: Ints) -> tuple[Ints, Ints, Bools]:
        """The most promising (expert, slot) of each layer, and whether there is one.

        What a new copy of ``e`` on rank ``g`` could carry: no more than ``e`` puts on ranks above the mean,
        no more than the room on ``g`` once the leaving expert's flow is gone; less what its other ranks
        cannot take up.
        """
        flow, n = self.flow, np.arange(len(act))[:, None]
        load = flow.load[act]
        mean = flow.mean[act, None]
        mean = mean + (load[:, :-1].max(1)[:, None] - mean) * np.array(WAY)[fails % len(WAY), None]
        p2l, x = flow.p2l[act], flow.x[act]
        size, slots = flow.size, flow.slots
        hot = load[:, :-1].argmax(1)
        expert = p2l.reshape(len(act), self.ranks, size)[n[:, 0], hot]
        hosts = flow.hosts[act[:, None], expert]
        at = hosts // size
        above = (x[n[..., None], hosts] * (load[n[..., None], at] > mean[..., None])).sum(-1)

        rank = np.arange(slots) // size
        gap = (mean - load[:, :-1])[:, rank]
        spare = np.maximum(gap, 0.0)
        total = row_sums(p2l, spare, flow.w.shape[1])
        lost = np.maximum(x[:, :-1] - (np.take_along_axis(total, p2l, 1) - spare), 0.0)
        open_slot = (
            ~(self.fresh[act] | barred[act] | self.held[act])
            & (self.fixed[act[:, None], p2l] > 1)
            & (self.room[act] > 0)[:, rank]
        )
        open_slot &= rank != hot[:, None]
        cost = np.where(open_slot, SPILL * lost, np.inf)
        score = np.minimum(above[:, :, None], (gap + x[:, :-1])[:, None]) - cost[:, None]
        # No second copy on a rank (its copies there are all of the old map, or came by a move), and none back
        # to a rank that gave its copy away.
        there = self.home[act[:, None], expert]
        row, e, k = np.nonzero(hosts < slots)
        there[row, e, at[row, e, k]] = True
        score = np.where(np.repeat(there, size, axis=2), -np.inf, score).reshape(len(act), -1)
        best = score.argmax(1)
        which, slot = np.divmod(best, slots)
        return expert[n[:, 0], which], slot, np.isfinite(score[n[:, 0], best])

    def _replace(self, n: Ints, e: Ints, slot: Ints) -> None:
        """Put expert ``e`` into ``slot`` of each layer; the flow that was there moves to its other copies."""
        flow = self.flow
        out = flow.p2l[n, slot]
        flow.load[n, slot // flow.size] -= flow.x[n, slot]
        flow.x[n, slot] = 0.0
        flow.p2l[n, slot] = e
        flow.main[n, slot] = slot
        flow.counts[n, out] -= 1
        flow.counts[n, e] += 1
        flow.drop_host(n, out, slot)
        flow.add_host(n, e, slot)
        # The next sweep pours what is still replicated; a copy left alone takes all its load now.
        last = flow.width[n, out] == 1
        n, out = n[last], out[last]
        only = flow.hosts[n, out, 0]
        flow.load[n, only // flow.size] += flow.w[n, out] - flow.x[n, only]
        flow.x[n, only] = flow.w[n, out]

    def _save(self, n: Ints, pair: Ints, slot: Ints) -> Saved:
        """What ``_replace`` and ``level`` may change when the second of ``pair`` replaces the first in
        ``slot``."""
        at: dict[str, tuple[Ints, ...]] = {"x": (n,), "load": (n,), "p2l": (n, slot), "main": (n, slot)}
        at |= dict.fromkeys(("counts", "width", "colour", "hosts"), (n[:, None], pair))
        return {name: (index, getattr(self.flow, name)[index]) for name, index in at.items()}

    def _restore(self, saved: Saved, pick: Bools) -> None:
        for name, (index, was) in saved.items():
            index, array = tuple(i[pick] for i in index), getattr(self.flow, name)
            if name == "hosts":  # may have become wider since
                array[index] = self.flow.slots
                array[(*index, slice(was.shape[2]))] = was[pick]
            else:
                array[index] = was[pick]


def _best_first(steps: list[list[Step]]) -> list[Step]:
    """All steps, each layer's in its own order, always the one with the largest gain next; ties to the lower
    layer."""
    heap = [(-own[0][1], layer, 0) for layer, own in enumerate(steps) if own]
    heapq.heapify(heap)
    order = []
    while heap:
        _, layer, i = heapq.heappop(heap)
        order.append(steps[layer][i])
        if i + 1 < len(steps[layer]):
            heapq.heappush(heap, (-steps[layer][i + 1][1], layer, i + 1))
    return order


def _with_sources(old: Ints, steps: list[Step], ranks: int, nodes: int) -> list[Move]:
    """Pick each step's source: a slot of the old map that is still intact, same node first, then the fewest
    sends."""
    size, per_node = old.shape[1] // ranks, ranks // nodes
    intact = {layer: old[layer].copy() for layer in {step[0] for step in steps}}
    sends = np.zeros(ranks, np.int64)
    moves = []
    for layer, _, expert, slot in steps:
        holders = np.nonzero(intact[layer] == expert)[0]
        rank, to = holders // size, slot // size
        away = rank // per_node != to // per_node
        source = int(holders[np.lexsort((holders, sends[rank], away))[0]])
        sends[source // size] += 1
        moves.append(Move(layer, expert, source // size, to, slot, source))
        intact[layer][slot] = -1
    return moves


def batches(moves: list[Move]) -> Iterator[list[Move]]:
    """Moves in batches whose senders are distinct and whose receivers are distinct; the order of a layer is
    kept.

    A move waits for every earlier move of its layer that shares a slot with it, which keeps all prefixes
    valid.
    """
    ready: list[list[Move]] = []
    busy: list[tuple[set[int], set[int]]] = []
    floor: dict[int, int] = {}
    for move in moves:
        i = floor.get(move.layer, 0)
        while i < len(ready) and (move.src_rank in busy[i][0] or move.dst_rank in busy[i][1]):
            i += 1
        if i == len(ready):
            ready.append([])
            busy.append((set(), set()))
        ready[i].append(move)
        busy[i][0].add(move.src_rank)
        busy[i][1].add(move.dst_rank)
        floor[move.layer] = i
    yield from ready
