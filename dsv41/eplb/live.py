"""Rebalancing while serving: counts on the device, a plan made on one rank, experts moved a layer at a time.

Between two steps every rank calls the same method of its `LiveExperts`. Until a layer's experts have arrived
everywhere and every rank has said so, nothing that serves is touched; then the map of that layer changes on
all ranks before the next step.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from ._check import Ints, check
from .repair import Move
from .state import Action, Balancer, Decision
from .stats import LoadWindow, Quality, roll


class TransferFailed(RuntimeError):
    """A layer's experts did not arrive; the old map serves on, and another plan may be made."""


class Ranks(Protocol):
    """What is needed of a group of ranks; the transports of ``dsv41.ops.exchange`` have it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, value: bytes, timeout: float) -> list[bytes]: ...
    def swap(
        self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor], timeout: float
    ) -> None: ...
    def all_reduce(self, x: torch.Tensor) -> None: ...
    def broadcast(self, x: torch.Tensor, source: int) -> None: ...


class DeviceLoadWindow(LoadWindow):
    """`LoadWindow` over torch tensors: ``record`` takes counts on the device and can be captured in a graph.

    Args:
        layers, experts, window, blocks: as in `LoadWindow`.
        device: where the counts are.
    """

    ring: Any
    clock: Any

    def __init__(
        self, layers: int, experts: int, window: int, blocks: int = 8, *, device: torch.device | str
    ) -> None:
        super().__init__(layers, experts, window, blocks)
        for name in ("ring", "clock", "lanes", "enabled"):
            setattr(self, name, torch.from_numpy(getattr(self, name)).to(device))

    def record(self, counts: Any) -> None:
        """Add one step: ``counts`` [layers, experts] int64 on the device."""
        roll(self.ring, self.clock, self.lanes, counts, self.enabled, self.block_steps)

    def totals(self) -> torch.Tensor:
        """Sum over the window on the device, [layers, experts] int64."""
        return self.ring.sum(0)

    def snapshot(self, all_reduce: Any = None) -> Ints:
        """As in `LoadWindow`; waits for the device."""
        total = self.totals().cpu().numpy()
        reduced = None if all_reduce is None else all_reduce(total)
        return total if reduced is None else reduced

    def quality(self) -> Quality:
        """Steps and pairs (of this rank) the snapshot covers; waits for the device."""
        recorded = int(self.clock)
        into = (recorded - 1) % self.block_steps + 1
        return Quality(min(recorded, self.window - self.block_steps + into), int(self.ring.sum()), recorded)


class LiveExperts:
    """The experts of a running model and the plan that moves them.

    Args:
        balancer: of the map being served, made with the same arguments on every rank. Its ``epoch`` counts
            the layers switched.
        ranks: the group; every rank calls every method.
        layers: of each layer, *all* per-slot tensors of this rank by name (weights and scales, in any
            layout), the rank's slots first in every tensor.
        switch: ``switch(layer, map row, table row)`` makes the next step use them.
        planner: the rank that plans.
        timeout: seconds in which every rank must have taken part in a call.
    """

    def __init__(
        self,
        balancer: Balancer,
        ranks: Ranks,
        layers: Sequence[Mapping[str, torch.Tensor]],
        switch: Callable[[int, Any, Any], None],
        *,
        planner: int = 0,
        timeout: float = 30.0,
    ):
        name, slots = "LiveExperts", balancer.physical_to_logical.shape[1]
        check(balancer.num_gpus == ranks.size, name, f"a balancer of {ranks.size} ranks", balancer.num_gpus)
        count = len(balancer.physical_to_logical)
        check(len(layers) == count, name, f"tensors of {count} layers", len(layers))
        self.slots_per_rank = slots // ranks.size
        for i, tensors in enumerate(layers):
            check(bool(tensors), name, "at least one tensor a layer", f"none for layer {i}")
            for label, tensor in tensors.items():
                there = tensor.shape[0] == self.slots_per_rank and tensor.is_contiguous()
                want = f"{label} of layer {i}: contiguous [{self.slots_per_rank}, ...]"
                check(there, name, want, f"{list(tensor.shape)}")
        check(0 <= planner < ranks.size, name, f"planner: 0 to {ranks.size - 1}", planner)
        check(timeout > 0, name, "a timeout above 0", timeout)
        self.balancer, self.ranks, self.layers, self.switch = balancer, ranks, layers, switch
        self.planner, self.timeout = planner, timeout
        self.decision: Decision | None = None
        self.todo: list[int] = []
        self.moved = 0  # bytes that this rank received since it was made

    def propose(self, loads: torch.Tensor, step: int = 0, *, allow_moves: bool = True) -> Decision:
        """Add the ranks' loads up, plan on one rank, give every rank the plan, and serve what needs no move.

        Args:
            loads: [layers, experts] int64 routed pairs of this rank, such as ``DeviceLoadWindow.totals()``.
            step: for `Balancer.decide`.
            allow_moves: as in `Balancer.decide`.

        Returns:
            The decision. Layers with moves follow with `advance`; a plan still under way is given up.

        Errors: ValueError that names the rank whose map, epoch or copy of the plan differs; PeerLost of the
            group.
        """
        total = loads.clone()
        self.ranks.all_reduce(total)
        payload = b""
        if self.ranks.rank == self.planner:
            decision = self.balancer.decide(total.cpu().numpy(), step, allow_moves=allow_moves)
            payload = _pack(decision)
        size = torch.tensor([len(payload)], dtype=torch.int64, device=loads.device)
        self.ranks.broadcast(size, self.planner)
        box = torch.zeros(int(size), dtype=torch.uint8, device=loads.device)
        if payload:
            box.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.ranks.broadcast(box, self.planner)
        payload = box.cpu().numpy().tobytes()
        self._agree("propose", {"plan": hashlib.sha256(payload).hexdigest()[:16]}, self.timeout)
        decision = self.decision = _unpack(payload)
        self.todo = sorted({move.layer for move in decision.moves})
        for layer in range(len(self.layers)):
            if decision.action != "keep" and layer not in self.todo:
                self._serve(layer, decision)
        return decision

    def advance(self) -> int | None:
        """Move the experts of the next layer of the plan and switch it.

        Returns:
            The layer, or None when nothing is left to do.

        Errors: `TransferFailed` on every rank when one could not prepare or did not receive what was sent:
            the old map serves on and the rest of the plan is given up. PeerLost when a rank did not take
            part within the timeout; nothing was changed then either.
        """
        if not self.todo or self.decision is None:
            return None
        layer, decision, started = self.todo[0], self.decision, time.monotonic()
        moves = [move for move in decision.moves if move.layer == layer]

        def left() -> float:
            return max(self.timeout - (time.monotonic() - started), 0.05)

        problem, sends, recvs = "", {}, {}
        try:
            sends, recvs = self._stage(layer, moves)
        except Exception as error:  # out of memory, say: the others must not wait for this rank
            problem = f"{type(error).__name__}: {error}"
        self._all_well(layer, self._agree("advance", {"layer": str(layer)}, left(), problem))
        sent = {r: _sums(x) for r, x in sends.items()}
        try:
            # Half of the time, so that there is some left to ask who is still there.
            self.ranks.swap(_flat(sends), _flat(recvs), left() / 2)
        except RuntimeError as error:
            problem = str(error)
        got = {r: _sums(x) for r, x in recvs.items()} if not problem else {}
        vote = json.dumps({"problem": problem, "sent": sent, "got": got}).encode()
        votes = [json.loads(v) for v in self.ranks.gather(vote, left())]
        problems = [v["problem"] for v in votes]
        for r, v in enumerate(votes):
            for source, sums in v["got"].items():
                if sums != votes[int(source)]["sent"][str(r)]:
                    problems[r] = problems[r] or f"other bytes than rank {source} sent"
        self._all_well(layer, problems)
        self._write(layer, moves, recvs)
        self._serve(layer, decision)
        self.todo.pop(0)
        return layer

    def _stage(
        self, layer: int, moves: list[Move]
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """What this rank sends to each other rank, a row an expert, and room for what it gets. All sources
        are read before anything is written, so a slot may be given away and filled in one layer.
        """
        tensors, me = self.layers[layer], self.ranks.rank
        width = sum(_row(t, 0).numel() for t in tensors.values())
        device = next(iter(tensors.values())).device
        sends: dict[int, list[torch.Tensor]] = {}
        counts: Counter[int] = Counter()
        for move in moves:
            if move.src_rank == me:
                slot = move.src_slot - me * self.slots_per_rank
                row = torch.cat([_row(t, slot) for _, t in sorted(tensors.items())])
                sends.setdefault(move.dst_rank, []).append(row)
            if move.dst_rank == me:
                counts[move.src_rank] += 1
        recvs = {
            r: torch.empty((n, width), dtype=torch.uint8, device=device) for r, n in sorted(counts.items())
        }
        return {r: torch.stack(rows) for r, rows in sorted(sends.items())}, recvs

    def _write(self, layer: int, moves: list[Move], recvs: dict[int, torch.Tensor]) -> None:
        next_row: Counter[int] = Counter()
        for move in moves:
            if move.dst_rank != self.ranks.rank:
                continue
            row = recvs[move.src_rank][next_row[move.src_rank]]
            next_row[move.src_rank] += 1
            at = 0
            for _, tensor in sorted(self.layers[layer].items()):
                place = _row(tensor, move.dst_slot - move.dst_rank * self.slots_per_rank)
                place.copy_(row[at : at + place.numel()])
                at += place.numel()
            self.moved += at

    def _serve(self, layer: int, decision: Decision) -> None:
        """Switch one layer, here and in the balancer."""
        b = self.balancer
        p2l, shares, table = b.physical_to_logical.copy(), b.shares.copy(), b.table.copy()
        p2l[layer], shares[layer] = decision.physical_to_logical[layer], decision.shares[layer]
        table[layer] = decision.table[layer]
        self.switch(layer, p2l[layer], table[layer])
        b.commit(
            replace(decision, epoch=b.epoch, physical_to_logical=p2l, shares=shares, table=table, moves=[])
        )

    def _agree(self, what: str, facts: dict[str, str], timeout: float, problem: str = "") -> list[str]:
        """Compare the ranks' epochs, maps and ``facts``; returns each rank's ``problem``."""
        b = self.balancer
        served = hashlib.sha256(b.physical_to_logical.tobytes() + b.table.tobytes()).hexdigest()[:16]
        mine = {"epoch": str(b.epoch), "map": served, **facts}
        said = [json.loads(v) for v in self.ranks.gather(json.dumps([mine, problem]).encode(), timeout)]
        for key in mine:
            common = Counter(facts[key] for facts, _ in said).most_common(1)[0][0]
            other = [(r, facts[key]) for r, (facts, _) in enumerate(said) if facts[key] != common]
            named = ", ".join(f"{value} on rank {r}" for r, value in other)
            check(not other, f"LiveExperts.{what}", f"{key} {common} on every rank", named)
        return [problem for _, problem in said]

    def _all_well(self, layer: int, problems: list[str]) -> None:
        told = [f"rank {r}: {problem}" for r, problem in enumerate(problems) if problem]
        if told:
            self.todo, self.decision = [], None
            want = f"expected the experts of layer {layer} on every rank"
            raise TransferFailed(f"LiveExperts.advance: {want}, got {'; '.join(told)}")


def _row(tensor: torch.Tensor, slot: int) -> torch.Tensor:
    """The bytes of one slot, as a view."""
    return tensor[slot].view(torch.uint8).view(-1)


def _flat(messages: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {r: x.view(-1) for r, x in messages.items()}


def _sums(rows: torch.Tensor) -> list[int]:
    """A checksum a row, on the device until read."""
    return rows.sum(1, dtype=torch.int64).tolist()


_FIELDS = ("epoch", "step", "now", "refreshed", "repaired")
_ARRAYS = ("physical_to_logical", "shares", "table")


def _pack(decision: Decision) -> bytes:
    head = json.dumps({"action": decision.action, **{k: getattr(decision, k) for k in _FIELDS}})
    arrays = {name: getattr(decision, name) for name in _ARRAYS}
    moves = np.array(decision.moves, np.int64).reshape(-1, len(Move._fields))
    box = io.BytesIO()
    np.savez(box, head=np.frombuffer(head.encode(), np.uint8), moves=moves, **arrays)
    return box.getvalue()


def _unpack(payload: bytes) -> Decision:
    with np.load(io.BytesIO(payload)) as stored:
        head = json.loads(stored["head"].tobytes())
        arrays = {name: stored[name] for name in _ARRAYS}
        moves = [Move(*map(int, row)) for row in stored["moves"]]
    action: Action = head.pop("action")
    return Decision(action, **head, **arrays, moves=moves)
