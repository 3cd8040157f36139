"""Models on ranks: the shared weights of `tests.models`, each rank with its own experts."""

from typing import Any

import numpy as np
import torch

from dsv41 import V41FlashConfig
from dsv41.eplb import rebalance_experts
from dsv41.layers import V41Flash, V41State
from dsv41.layers.engram import MemoryEngramStore
from dsv41.layers.expert_parallel import ExpertParallel
from tests import models

KIND = "micro"
CFG = models.config(KIND)
GPU_CFG = V41FlashConfig.tiny(hidden=256, inter=128)  # the smallest that the kernels of a GPU take
PROMPTS = (9, 4, 0, 13)  # tokens of the request of each rank; a rank without one takes part with no tokens


def random_map(ranks: int, slots: int, seed: int, cfg: V41FlashConfig = CFG) -> np.ndarray:
    """A map of random loads: experts with two copies and more, no rank with one twice."""
    loads = np.random.default_rng(seed).lognormal(0, 1.0, (cfg.num_layers, cfg.num_experts))
    return rebalance_experts(loads, slots, 1, 1, ranks)[0]


def build(
    transport: Any,
    physical_to_logical: Any,
    capacity: int | None = None,
    kind: models.Kind = KIND,
    device: str = "cpu",
) -> V41Flash:
    """The model of a rank, filled from the shared weights; of one with all experts without a transport."""
    cfg, stored, group = models.config(kind), models.weights(kind), None
    if transport is not None:
        group = ExpertParallel(
            transport, physical_to_logical, cfg.num_experts, capacity=capacity, device=device
        )
    with torch.device(device):
        model = V41Flash(cfg, models.token_map(kind), ep_group=group)
    models.fill(model, stored)
    for layer in cfg.engram.layers:
        parts = (stored[f"layers.{layer}.engram.embed.{part}"] for part in ("weight", "scale"))
        model.attach_engram(layer, MemoryEngramStore(*(_on(device, table) for table in parts)))
    return model.pack() if device != "cpu" else model


def _on(device: str, x: torch.Tensor) -> torch.Tensor:
    """A copy there of any type, also of those that torch cannot copy."""
    return x.view(torch.uint8).to(device).view(x.dtype)


def generate(
    model: Any,
    rank: int,
    steps: int,
    between: Any = None,
    forward: Any = None,
    kind: models.Kind = KIND,
    device: str = "cpu",
) -> torch.Tensor:
    """Prefill this rank's prompt exactly, then ``steps`` greedy tokens; the logits of all steps.

    ``between(step)`` runs between decode steps, ``forward`` in place of the model's own in decode.
    """
    length = PROMPTS[rank % len(PROMPTS)]
    state = V41State.allocate(models.config(kind), int(length > 0), 64, device=device)
    tokens = models.text(kind, length, seed=rank).to(device)
    place = models.positions(0, length).to(device)
    cu = torch.tensor([0, length] if length else [0], dtype=torch.int32, device=device)
    seen = []
    call = model
    for step in range(steps + 1):
        if step == 0 and getattr(model, "ep", None) is not None:
            with model.ep.exactly():
                logits = model(tokens, place, state, cu_seqlens=cu)
        else:
            logits = call(tokens, place, state, cu_seqlens=cu)
        seen.append(logits)
        if between is not None:
            between(step)
        call = forward or model
        if length:
            tokens, length = logits[-1:].argmax(-1), length + 1
            place = models.positions(length - 1, 1).to(device)
            cu = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return torch.cat(seen)
