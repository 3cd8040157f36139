"""``python -m dsv41 bench ep --simulate``: decode at EP4 to EP128, with the real planner and a cost model.

A step is its layers one after the other; a layer waits for the rank with most to do. What a rank does is
measured (``docs/results``): experts by the rows of each, linears, attention, index. What lies between ranks
is modelled: a latency and a bandwidth, of NVLink among the eight GPUs of a node and of the network beyond.
Tokens are drawn independently from expert popularities that drifted since the plan was made.

``python -m dsv41.bench.ep_sim`` writes the table of ``docs/expert_parallel.md`` from the committed results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import V41FlashConfig
from ..eplb import imbalance, noise_floor, rebalance_experts, water_fill
from ..ops.exchange import record_bytes
from . import results
from .tables import Column, read, table

NODE = 8  # GPUs that NVLink joins
RANKS = (4, 8, 16, 32, 64, 128)
TOKENS = 64  # requests a rank, one token each: what the linears were measured at
LAYERS, STEPS = 4, 40  # that are simulated; the model's other layers are like them
DRIFT = 0.05  # rms change of an expert's log-popularity between the plan and the steps
LOADS = {"lognormal .5": 0.5, "lognormal 1": 1.0}


@dataclass(frozen=True)
class Links:
    """Between ranks: all of it modelled, except where the bench measured it and the arguments say so."""

    nvlink_gbps: float = 300.0  # bytes a GPU sends, of 450 GB/s
    network_gbps: float = 40.0  # of a 400 Gb/s port a GPU
    nvlink_latency_us: float = 20.0  # of a collective
    network_latency_us: float = 35.0

    def us(self, near: float, far: float, ranks: int) -> float:
        """One way of an exchange: the most bytes that a rank moves inside its node and beyond."""
        latency = self.network_latency_us if ranks > NODE else self.nvlink_latency_us
        return latency + max(near / self.nvlink_gbps, far / self.network_gbps) / 1e3


@dataclass(frozen=True)
class Costs:
    """Measured microseconds of one H200, by the committed results.

    rows, expert_us: rows of an expert, and what it adds to the products of a layer. call_us: the rest of a
    call. shared_us: the shared expert. rest_us: everything of a layer that is not an expert nor exchanged.
    """

    rows: np.ndarray
    expert_us: np.ndarray
    call_us: float
    shared_us: float
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
    return Costs(rows, us, 6.0, shared, rest)


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
    pairs = TOKENS * ranks * cfg.top_k
    slot_share = np.take_along_axis(now / now.sum(1, keepdims=True), p2l, 1) * shares
    moe, ways, ratio = [], [], []
    for layer in range(LAYERS):
        law = slot_share[layer] / slot_share[layer].sum()
        rows = rng.multinomial(pairs, law, STEPS).reshape(STEPS, ranks, -1).astype(float)
        arrive = rows.sum(-1)
        most = arrive.max(1)
        # A rank receives from all ranks alike: its own rows stay, those of its node take NVLink.
        near, far = (min(NODE, ranks) - 1) / ranks, max(0, ranks - NODE) / ranks
        out, back = record_bytes(cfg.hidden), 2 * cfg.hidden
        moe.append(costs.experts(rows).max(1))
        ways.append([[links.us(m * near * b, m * far * b, ranks) for b in (out, back)] for m in most])
        ratio.append(most * ranks / arrive.sum(1))
    dispatch, combine = np.array(ways).mean((0, 1))
    experts_us = float(np.mean(moe))
    layer_us = costs.rest_us + max(dispatch, costs.shared_us) + experts_us + combine
    step_ms = layer_us * cfg.num_layers / 1e3
    window = imbalance(now, p2l, ranks, shares)
    return {
        "op": "ep_sim", "ranks": ranks, "tokens": TOKENS, "loads": f"lognormal {spread:g}",
        "policy": policy.name, "slots_per_rank": p2l.shape[1] // ranks,
        "window_imbalance": float(window.mean()),
        "step_imbalance": float(np.mean(ratio)), "floor": noise_floor(ranks, TOKENS, cfg.top_k),
        "experts_us": experts_us, "dispatch_us": float(dispatch), "combine_us": float(combine),
        "rest_us": costs.rest_us, "shared_us": costs.shared_us, "layer_us": layer_us, "step_ms": step_ms,
        "tokens_per_s_per_gpu": TOKENS / step_ms * 1e3,
    }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print one JSON line a case."""
    cfg, links = V41FlashConfig.flash(), Links()
    costs = measured(cfg)
    rows = [
        simulate(cfg, costs, links, ranks, spread, policy, args.seed)
        for spread in LOADS.values()
        for ranks in RANKS
        for policy in POLICIES
    ]
    rows = [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        | {f"model_{k}": v for k, v in dataclasses.asdict(links).items()}
        for row in rows
    ]
    for row in rows:
        print(json.dumps(row))
    if args.json:
        results.append(args.json, rows)
    return 0


# The table in the documentation.

BEGIN, END = "<!-- ep_sim: generated by python -m dsv41.bench.ep_sim -->", "<!-- /ep_sim -->"
PAGE = Path(__file__).parents[2] / "docs" / "expert_parallel.md"


def refresh(text: str) -> str:
    """The page with the table between its markers made anew."""
    columns: list[Column] = [
        ("loads", lambda r: r["loads"]),
        ("ranks", lambda r: r["ranks"]),
        ("experts", lambda r: r["policy"]),
        ("slots a rank", lambda r: r["slots_per_rank"]),
        ("step imbalance", lambda r: f"{r['step_imbalance']:.3f}"),
        ("experts, us", lambda r: r["experts_us"]),
        ("out, us", lambda r: r["dispatch_us"]),
        ("back, us", lambda r: r["combine_us"]),
        ("layer, us", lambda r: r["layer_us"]),
        ("step, ms", lambda r: f"{r['step_ms']:.1f}"),
        ("tokens/s a GPU", lambda r: r["tokens_per_s_per_gpu"]),
    ]
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table(read('ep_sim'), columns)}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    PAGE.write_text(refresh(PAGE.read_text("utf-8")), "utf-8")
