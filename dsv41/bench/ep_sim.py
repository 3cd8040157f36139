"""``python -m dsv41 bench ep --simulate``: decode at EP4 to EP128, with the real planner and a cost model.

A step is its layers one after the other; a layer waits for the rank with most to do. What a rank does is
measured (``docs/results``): experts by the rows of each, linears, attention, index, packing of rows. Between
ranks, NVLink is as measured between two GPUs, here for the eight of a node; the network beyond is modelled, a
latency and a bandwidth. Tokens are drawn independently from expert popularities that drifted since the plan
was made. The exchange has the fixed form, with the least capacity that no simulated step exceeds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import V41FlashConfig
from ..eplb import imbalance, noise_floor, rebalance_experts, water_fill
from ..ops.exchange import record_bytes
from . import results
from .tables import read

NODE = 8  # GPUs that NVLink joins
RANKS = (4, 8, 16, 32, 64, 128)
TOKENS = 64  # requests a rank, one token each: what the linears were measured at
LAYERS, STEPS = 4, 40  # that are simulated; the model's other layers are like them
DRIFT = 0.05  # rms change of an expert's log-popularity between the plan and the steps
LOADS = {"lognormal .5": 0.5, "lognormal 1": 1.0}


@dataclass(frozen=True)
class Links:
    """Between ranks. NVLink: microseconds of a collective by the bytes that a GPU sends to others, measured
    (`measured_links`). The network: modelled.
    """

    nvlink_bytes: tuple[float, ...]
    nvlink_us: tuple[float, ...]
    network_gbps: float = 40.0  # of a 400 Gb/s port a GPU
    network_us: float = 35.0  # of a collective, beside the time of its bytes

    def us(self, near: float, far: float, ranks: int) -> float:
        """One way of an exchange: the bytes that a rank moves inside its node and beyond."""
        inside = float(np.interp(near, self.nvlink_bytes, self.nvlink_us))
        return inside if ranks <= NODE else max(inside, self.network_us + far / self.network_gbps / 1e3)


@dataclass(frozen=True)
class Costs:
    """Measured microseconds of one H200, by the committed results.

    rows, expert_us: rows of an expert, and what it adds to the products of a layer. call_us: the rest of a
    call. shared_us: the shared expert. local_us: packing, unpacking and adding up around an exchange.
    rest_us: everything of a layer that is not an expert nor exchanged.
    """

    rows: np.ndarray
    expert_us: np.ndarray
    call_us: float
    shared_us: float
    local_us: float
    rest_us: float

    def experts(self, rows: np.ndarray) -> np.ndarray:
        """[...] microseconds of the products of ranks, from rows an expert [..., slots]."""
        return np.interp(rows, self.rows, self.expert_us).sum(-1) + self.call_us


SMALL_US = 40.0  # mHC, norms, router, rope, quantising of a layer: modelled


def measured(cfg: V41FlashConfig) -> Costs:
    """The costs of a rank, from ``docs/results``."""
    points, calls = {0.0: 0.0}, []
    for row in read("moe"):
        if row.get("numerics") != "exact":
            continue
        pairs = row["tokens"] * cfg.top_k
        # Experts that got a row, of uniform choices without repetition in a token.
        active = row["experts"] * (1 - (1 - cfg.top_k / row["experts"]) ** row["tokens"])
        if row["tokens"] == 64 and row["experts"] == 384:
            continue  # most of its experts have one row or two; the others cover that
        calls.append(6.0)
        points[pairs / active] = (row["us"] - calls[-1]) / active
    first = min(k for k in points if k)
    points[1.0] = points[first]  # an expert's weights are read whatever its rows
    rows = np.array(sorted(points))
    # More rows never cost less: the points come from calls of different sizes.
    us = np.maximum.accumulate(np.array([points[k] for k in rows]))
    linear = {(r["shape"], r["tokens"]): r["us"] for r in read("linear") if r["numerics"] == "exact"}
    attention = next(r["us"] for r in read("attn") if r["case"] == f"decode b={TOKENS} q=1")
    index = next(r["us"] for r in read("index") if r["case"] == f"index_topk b={TOKENS} keys=65536")
    shared = sum(linear[name, TOKENS] for name in ("shared w13", "shared w2"))
    rest = sum(linear[name, TOKENS] for name in ("wq_a+wkv", "wq_b", "wo_a", "wo_b")) + attention
    indexers = len(cfg.index_sources) / cfg.num_layers
    rest += indexers * (index + linear["indexer wq_b", TOKENS]) + SMALL_US
    row = next(r for r in _exchanges() if r["tokens"] == TOKENS and r["form"] == "fixed")
    local = row["pack_us"] + row["unpack_us"] + row["combine_us"] - row["bare_combine_us"]
    return Costs(rows, us, 6.0, shared, local, rest)


def _exchanges() -> list[dict[str, Any]]:
    return [row for row in read("ep") if row["part"] == "exchange" and row["ranks"] > 1]


def measured_links() -> Links:
    """NCCL's bare all-to-all with its own settings, as measured between two GPUs."""
    rows = [r for r in read("ep") if r["part"] == "links" and "bytes_away" in r and not r["env"]]
    moved, us = zip(*sorted((r["bytes_away"], r["us"]) for r in rows), strict=True)
    return Links(moved, us)


@dataclass(frozen=True)
class Policy:
    """Where experts are: ``spare`` redundant slots a rank, planned from the loads or in order."""

    name: str
    spare: int
    planned: bool


POLICIES = (Policy("in order", 0, False), Policy("EPLB, one spare", 1, True))


def placement(policy: Policy, loads: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Map and shares, both [layers, slots]."""
    layers, experts = loads.shape
    slots = experts + policy.spare * ranks
    if not policy.planned:
        return np.tile(np.arange(experts), (layers, 1)), np.ones((layers, experts))
    p2l, _, _ = rebalance_experts(loads, slots, 1, 1, ranks)
    return p2l, water_fill(loads, p2l, ranks, compiled=False)


def simulate(
    cfg: V41FlashConfig, costs: Costs, links: Links, ranks: int, spread: float, policy: Policy, seed: int = 0
) -> dict[str, Any]:
    """One row: mean over steps and layers."""
    rng = np.random.default_rng(seed)
    popular = rng.lognormal(0, spread, (LAYERS, cfg.num_experts))
    p2l, shares = placement(policy, popular, ranks)
    now = popular * np.exp(rng.normal(0, DRIFT, popular.shape))
    slot_share = np.take_along_axis(now / now.sum(1, keepdims=True), p2l, 1) * shares
    moe, ratio, capacity = [], [], 0
    for layer in range(LAYERS):
        law = slot_share[layer] / slot_share[layer].sum()
        sent = rng.multinomial(TOKENS * cfg.top_k, law, (STEPS, ranks)).reshape(STEPS, ranks, ranks, -1)
        rows = sent.sum(1)  # [steps, ranks, slots]
        arrive = rows.sum(-1)
        moe.append(costs.experts(rows.astype(float)).max(1))
        ratio.append(arrive.max(1) * ranks / arrive.sum(1))
        capacity = max(capacity, int(sent.sum(-1).max()))
    # Own rows stay, those for ranks of the node take NVLink.
    near, far = (capacity * peers for peers in (min(NODE, ranks) - 1, max(0, ranks - NODE)))
    dispatch, combine = (
        links.us(near * b, far * b, ranks) for b in (record_bytes(cfg.hidden), 2 * cfg.hidden)
    )
    experts_us = float(np.mean(moe))
    layer_us = costs.rest_us + costs.local_us + max(dispatch, costs.shared_us) + experts_us + combine
    step_ms = layer_us * cfg.num_layers / 1e3
    window = imbalance(now, p2l, ranks, shares)
    return {
        "op": "ep_sim", "ranks": ranks, "tokens": TOKENS, "loads": f"lognormal {spread:g}",
        "policy": policy.name, "slots_per_rank": p2l.shape[1] // ranks,
        "window_imbalance": float(window.mean()),
        "step_imbalance": float(np.mean(ratio)), "floor": noise_floor(ranks, TOKENS, cfg.top_k),
        "capacity": capacity,
        "experts_us": experts_us, "dispatch_us": float(dispatch), "combine_us": float(combine),
        "rest_us": costs.rest_us, "local_us": costs.local_us, "shared_us": costs.shared_us,
        "layer_us": layer_us, "step_ms": step_ms,
        "tokens_per_s_per_gpu": TOKENS / step_ms * 1e3,
    }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print one JSON line a case."""
    cfg, links = V41FlashConfig.flash(), measured_links()
    costs = measured(cfg)
    rows = [
        simulate(cfg, costs, links, ranks, spread, policy, args.seed)
        for spread in LOADS.values()
        for ranks in RANKS
        for policy in POLICIES
    ]
    rows = [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        | {"model_network_gbps": links.network_gbps, "model_network_us": links.network_us}
        for row in rows
    ]
    for row in rows:
        print(json.dumps(row))
    if args.json:
        results.append(args.json, rows)
    return 0
