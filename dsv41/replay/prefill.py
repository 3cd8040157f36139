"""Running one planned forward: the only place that orders encoder, shared-cache writes and decoder.

The layers arrive as three functions, so this file knows no model and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from .config import check, check_kind
from .plan import ReplayPlan


@dataclass(frozen=True)
class ReplayHooks:
    """The three things a model does for bounded replay.

    Args:
        encode_all: `(plan) -> tuple of [N, ...]`. Run all N packed rows through the encoder layers, windows
            floored at `plan.encoder_floor`, writing their caches; return every row-wise tensor the decoder
            needs (residual streams, carried pre-mix, positions, token ids, image mask).
        write_global_kv: `(boundary, plan) -> None`. The first decoder layer's cache writes: compressed entry
            and index key of all N rows, window KV of `plan.first_layer_rows`. Called before any decoder
            query.
        decode_rows: `(kept, plan) -> [P, ...]`, or a tuple of such. The decoder layers on the kept rows,
            `kept` being the gathered boundary. Writes window KV of the layers after the first (and of the
            first too when `write_global_kv` left that out); writes no compressed entry and no index key.
    """

    encode_all: Callable[[ReplayPlan], tuple[Any, ...]]
    write_global_kv: Callable[[tuple[Any, ...], ReplayPlan], None]
    decode_rows: Callable[[tuple[Any, ...], ReplayPlan], Any]


def run_prefill(plan: ReplayPlan, hooks: ReplayHooks, rows: Any | None = None) -> Any | None:
    """Run one forward under `plan`.

    Args:
        plan: from `plan_decoder`, padded or not.
        hooks: the model.
        rows: `plan.rows` on the model's device, to save a transfer a tensor (`DevicePlan.rows`).

    Returns:
        What `decode_rows` returned for the M kept rows, [M, ...] each, padding cut off; sample request r from
        row `plan.logits_row[r]` when it is not -1. None when nothing was kept and nothing padded: the decoder
        did not run.

    Raises:
        ReplayConfigError: a hook returned the wrong number of rows.
    """
    check_kind("run_prefill.plan", plan, ReplayPlan)
    there = all(callable(getattr(hooks, f.name, None)) for f in fields(ReplayHooks))
    check(there, f"run_prefill: expected hooks: a ReplayHooks, got {type(hooks).__name__}; pass one")
    boundary = tuple(hooks.encode_all(plan))
    kept = plan.gather(*boundary, rows=rows)  # checks the row counts before anything is written
    hooks.write_global_kv(boundary, plan)
    if plan.padded_to == 0:
        return None
    out = hooks.decode_rows(kept, plan)
    parts = out if isinstance(out, tuple) else (out,)
    for part in parts:
        check(
            part.shape[0] == plan.padded_to,
            f"run_prefill: expected {plan.padded_to} rows of decode_rows, got {part.shape[0]}; return one "
            "row "
            "for each row it was given",
        )
    cut = tuple(part[: plan.num_rows] for part in parts)
    return cut if isinstance(out, tuple) else cut[0]
