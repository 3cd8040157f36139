"""What the processes of `test_processes` do; each function runs on every rank."""

import os
import signal
import time
from typing import Any

import numpy as np
import torch
from dsv41_reference import accumulate

from dsv41.eplb import Balancer
from dsv41.eplb.live import LiveExperts
from dsv41.ops.exchange import GroupTransport, agree, facts
from tests.ep.models import CFG, build, generate, random_map

KEEN: dict[str, Any] = {"target": 1.0, "min_gain": 0.0, "compiled": False}


def live_of(model: Any, transport: Any, timeout: float = 30.0) -> LiveExperts:
    group = model.ep
    balancer = Balancer(group.physical_to_logical.numpy(), CFG.num_experts, transport.size, **KEEN)
    layers = [group.tensors(i) for i in range(CFG.num_layers)]
    return LiveExperts(balancer, transport, layers, group.switch, timeout=timeout)


def generate_with_a_reshuffle(transport: GroupTransport, slots: int, capacity: int | None, steps: int) -> Any:
    """Logits, and how many layers were moved between the steps."""
    model = build(transport, random_map(transport.size, slots, 3), capacity)
    live = live_of(model, transport)
    moved = []

    def between(step: int) -> None:
        if step == 0:
            assert model.ep is not None
            live.propose(model.ep.counts)
        moved.append(live.advance())

    with accumulate(torch.float64):
        logits = generate(model, transport.rank, steps, between)
    return logits.numpy(), len([m for m in moved if m is not None])


class Dying(GroupTransport):
    """Rank 2 ends without a word when data is about to move."""

    def swap(self, sends: Any, recvs: Any, timeout: float) -> None:
        if self.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().swap(sends, recvs, timeout)


def die_in_a_transfer(transport: GroupTransport, timeout: float) -> Any:
    """What the others are told, after how long, and whether they serve the old map with its experts."""
    model = build(transport, random_map(transport.size, CFG.num_experts + transport.size, 3))
    group = model.ep
    assert group is not None
    live = live_of(model, transport, timeout)
    counts = torch.from_numpy(np.random.default_rng(1).integers(1, 99, (CFG.num_layers, CFG.num_experts)))
    live.propose(counts * 4 ** (torch.arange(CFG.num_experts) % 3))
    layer = live.todo[0]
    before = group.checksum(), [t.view(torch.uint8).clone() for t in group.tensors(layer).values()]
    transport.__class__ = Dying
    started = time.monotonic()
    try:
        live.advance()
    except RuntimeError as error:
        seconds = time.monotonic() - started
        now = [t.view(torch.uint8) for t in group.tensors(layer).values()]
        same = group.checksum() == before[0] and all(map(torch.equal, now, before[1]))
        return type(error).__name__, str(error), getattr(error, "ranks", None), seconds, same
    return None


def disagree(transport: GroupTransport) -> None:
    agree("bench", transport, {**facts(), "driver": "570" if transport.rank == 1 else "580"}, 20.0)


def stay_away(transport: GroupTransport) -> Any:
    """Rank 1 takes no part in a gather."""
    if transport.rank == 1:
        time.sleep(4)
        return None
    transport.gather(b"here", 1.0)
