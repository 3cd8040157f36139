"""What the processes of `test_processes` and `test_nccl` do; each function runs on every rank."""

import functools
import os
import signal
import time
from typing import Any

import numpy as np
import torch
from dsv41_reference import accumulate

from dsv41.eplb import Balancer
from dsv41.eplb.live import LiveExperts
from dsv41.layers.expert_parallel import even_map, forward_complete
from dsv41.ops.exchange import GroupTransport, agree, facts
from tests import models
from tests.ep.models import GPU_CFG, KIND, build, generate, random_map
from tests.ops.rows import same

KEEN: dict[str, Any] = {"target": 1.0, "min_gain": 0.0, "compiled": False}


def live_of(model: Any, transport: Any, timeout: float = 30.0) -> LiveExperts:
    group = model.ep
    balancer = Balancer(group.physical_to_logical.numpy(), group.num_experts, transport.size, **KEEN)
    layers = [group.tensors(i) for i in range(len(group.layers))]
    return LiveExperts(balancer, transport, layers, group.switch, timeout=timeout)


def generate_with_a_reshuffle(
    transport: GroupTransport,
    slots: int,
    capacity: int | None,
    steps: int,
    kind: models.Kind = KIND,
    device: str = "cpu",
) -> Any:
    """Logits, and how many layers were moved between the steps."""
    physical = random_map(transport.size, slots, 3, models.config(kind))
    model = build(transport, physical, capacity, kind, device)
    live = live_of(model, transport)
    moved = []

    def between(step: int) -> None:
        if step == 0:
            assert model.ep is not None
            live.propose(model.ep.counts)
        moved.append(live.advance())

    with accumulate(torch.float64):
        logits = generate(model, transport.rank, steps, between, kind=kind, device=device)
    return logits.cpu().numpy(), len([m for m in moved if m is not None])


def equal_on_gpus(transport: GroupTransport, steps: int) -> dict[str, Any]:
    """What ranks with a GPU each say against one with all experts: through a reshuffle, and when rows did not
    fit and every rank repeated its step.
    """
    rank, on = transport.rank, {"kind": GPU_CFG, "device": "cuda"}
    alone = generate(build(None, None, **on), rank, steps, **on).cpu()
    slots = GPU_CFG.num_experts + transport.size
    moved, layers = generate_with_a_reshuffle(transport, slots, GPU_CFG.top_k, steps, **on)
    model = build(transport, even_map(GPU_CFG.num_layers, GPU_CFG.num_experts, transport.size), 1, **on)
    assert model.ep is not None
    found: list[int] = []
    lost = model.ep.exchange.lost
    model.ep.exchange.lost = lambda: found.extend(lost()) or found[-transport.size :]  # pyright: ignore
    whole = functools.partial(forward_complete, model)
    full = generate(model, rank, steps, forward=whole, **on).cpu()
    return {
        "moved layers": layers, "reshuffled": same(torch.from_numpy(moved), alone),
        "lost": found, "repeated": same(full, alone),
    }  # fmt: skip


class Dying(GroupTransport):
    """The last rank but one of four, or else the last, ends without a word when data is about to move."""

    def swap(self, sends: Any, recvs: Any, timeout: float) -> None:
        if self.rank == min(2, self.size - 1):
            os.kill(os.getpid(), signal.SIGKILL)
        super().swap(sends, recvs, timeout)


def die_in_a_transfer(
    transport: GroupTransport, timeout: float, kind: models.Kind = KIND, device: str = "cpu"
) -> Any:
    """What the others are told, after how long, and whether they serve the old map with its experts."""
    cfg = models.config(kind)
    physical = random_map(transport.size, cfg.num_experts + transport.size, 3, cfg)
    model = build(transport, physical, None, kind, device)
    group = model.ep
    assert group is not None
    live = live_of(model, transport, timeout)
    counts = torch.from_numpy(np.random.default_rng(1).integers(1, 99, (cfg.num_layers, cfg.num_experts)))
    live.propose((counts * 4 ** (torch.arange(cfg.num_experts) % 3)).to(device))
    live.advance()  # one layer arrives: connections are open
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
