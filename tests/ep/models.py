"""Models on ranks: the shared weights of `tests.models`, each rank with its own experts."""

from typing import Any

import numpy as np
import torch

from dsv41.eplb import rebalance_experts
from dsv41.layers import V41Flash, V41State
from dsv41.layers.engram import MemoryEngramStore
from dsv41.layers.expert_parallel import ExpertParallel
from tests import models

KIND = "micro"
CFG = models.config(KIND)
PROMPTS = (9, 4, 0, 13)  # tokens of the request of each rank; a rank without one takes part with no tokens


def random_map(ranks: int, slots: int, seed: int) -> np.ndarray:
    """A map of random loads: experts with two copies and more, no rank with one twice."""
    loads = np.random.default_rng(seed).lognormal(0, 1.0, (CFG.num_layers, CFG.num_experts))
    return rebalance_experts(loads, slots, 1, 1, ranks)[0]


def build(transport: Any, physical_to_logical: Any, capacity: int | None = None) -> V41Flash:
    """The model of a rank, filled from the shared weights."""
    group = ExpertParallel(transport, physical_to_logical, CFG.num_experts, capacity=capacity)
    model = V41Flash(CFG, models.token_map(KIND), ep_group=group)
    stored = models.weights(KIND)
    models.fill(model, stored)
    for layer in CFG.engram.layers:
        table = (stored[f"layers.{layer}.engram.embed.{part}"] for part in ("weight", "scale"))
        model.attach_engram(layer, MemoryEngramStore(*table))
    return model


def generate(model: Any, rank: int, steps: int, between: Any = None, forward: Any = None) -> torch.Tensor:
    """Prefill this rank's prompt exactly, then ``steps`` greedy tokens; the logits of all steps.

    ``between(step)`` runs between decode steps, ``forward`` in place of the model's own in decode.
    """
    length = PROMPTS[rank % len(PROMPTS)]
    state = V41State.allocate(CFG, int(length > 0), 64)
    tokens, place = models.text(KIND, length, seed=rank), models.positions(0, length)
    cu = torch.tensor([0, length] if length else [0], dtype=torch.int32)
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
            tokens, place, length = logits[-1:].argmax(-1), models.positions(length, 1), length + 1
            cu = torch.tensor([0, 1], dtype=torch.int32)
    return torch.cat(seen)
