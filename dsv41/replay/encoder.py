"""Prefix hits: which rows of a cached prefix must run through the encoder again to rebuild its window KV."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np

from .config import ReplayGeometry, check, check_int, check_kind


@dataclass(frozen=True, eq=False)
class EncoderReplay:
    """Rows of one request that run through the encoder layers after a prefix hit.

    Attributes:
        start: f, first position that runs; 0 means the result is exact. Pass it on as
            `RequestSpan.swa_start`.
        rows: [n] int64, absolute positions `start .. target_end - 1`, in order.
        write_mask: [n] bool, True where compressed entries and index keys are written: positions from the
            hit's end on. Rows below it write window KV only (their compressed slots are PAD); the cached
            entries stay as they are.
        replayed: rows of the hit that run again; count them in the step's token budget and take
            `num_computed` back by this much.
        is_exact: `start == 0`: recomputing everything, no approximation.
    """

    start: int
    rows: np.ndarray
    write_mask: np.ndarray
    replayed: int
    is_exact: bool


def plan_encoder_hit(
    geom: ReplayGeometry, hit_end: int, target_end: int, keep: int, align: int | None = None
) -> EncoderReplay:
    """Rows to replay when the first `hit_end` tokens have cached compressed entries but no window KV.

        r = min(H, max(window, keep - (L - H))),   f = H - r rounded down to a multiple of align

    The second term gives a decoder segment of at least `min(L, keep)` rows even when almost nothing is new.

    Args:
        geom: model geometry.
        hit_end: H, cached tokens; 0 for no hit. Must be a multiple of `geom.align`.
        target_end: L, tokens known now; at least `hit_end` (equal for a full hit: the replayed rows give the
            logits).
        keep: decoder rows wanted at the end, at least `geom.min_keep`.
        align: f becomes a multiple of this and of `geom.align`; default `geom.align`.

    Returns:
        `EncoderReplay`. Not for a hit whose window KV is still there (same session): that needs no replay.

    Raises:
        ReplayConfigError: H negative, beyond L or misaligned; `keep` too small.
    """
    check_kind("plan_encoder_hit.geom", geom, ReplayGeometry)
    check_int("plan_encoder_hit.hit_end", hit_end, 0)
    check_int("plan_encoder_hit.target_end", target_end, hit_end)
    check_int("plan_encoder_hit.keep", keep, geom.min_keep)
    if align is not None:
        check_int("plan_encoder_hit.align", align, 1)
    step = lcm(geom.align, align or 1)
    check(
        hit_end % geom.align == 0,
        f"plan_encoder_hit: expected hit_end: a multiple of {geom.align}, got {hit_end}; shorten the hit to "
        f"{hit_end - hit_end % geom.align}: a compressed pair must not straddle it",
    )
    wanted = min(hit_end, max(geom.window, keep - (target_end - hit_end)))
    start = (hit_end - wanted) // step * step
    rows = np.arange(start, target_end, dtype=np.int64)
    return EncoderReplay(start, rows, rows >= hit_end, hit_end - start, start == 0)
