"""How often each expert is chosen: a window of the last steps, kept as a ring of block sums of *logical*
counts.

Logical counts do not depend on the map, so a reshuffle in the middle of a window needs no care.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._check import Ints, check, check_whole


def roll(ring: Any, clock: Any, lanes: Any, counts: Any, enabled: Any, block_steps: int) -> None:
    """Add one step's counts to the ring, in place.

        block = clock // block_steps % blocks
        ring[block] = (0 at the first step of a block, else ring[block]) + counts;  clock += 1       if
        enabled is 1

    Only elementwise arithmetic and in-place updates: the arguments may be NumPy arrays or torch tensors of
    one integer type, and a CUDA graph can hold the call, since it reads no value on the host.

    Args:
        ring: [blocks, layers, experts] int64.
        clock: [1] int64, recorded steps so far.
        lanes: [blocks, 1, 1] int64, ``0 .. blocks - 1``.
        counts: [layers, experts] integers, this step's routed pairs.
        enabled: [1] int64, 1 to record or 0 to leave everything as it is.
        block_steps: steps per block.

    Errors: ValueError for other shapes, before anything is written.
    """
    given = {"ring": ring, "clock": clock, "lanes": lanes, "counts": counts, "enabled": enabled}
    shapes: dict[str, tuple[int, ...]] = {n: tuple(getattr(x, "shape", ())) for n, x in given.items()}
    of_ring = shapes["ring"]
    check(len(of_ring) == 3, "roll", "ring: [blocks, layers, experts]", list(of_ring))
    wanted = {"clock": (1,), "lanes": (of_ring[0], 1, 1), "counts": of_ring[1:], "enabled": (1,)}
    for name, shape in wanted.items():
        check(shapes[name] == shape, "roll", f"{name}: {list(shape)}", list(shapes[name]))
    check_whole("roll", block_steps=block_steps)
    check(block_steps >= 1, "roll", "block_steps >= 1", block_steps)
    block = clock // block_steps % len(lanes)
    here = (lanes == block) * enabled
    fresh = (clock % block_steps == 0) * here
    ring *= 1 - fresh
    ring += here * counts
    clock += enabled


def count_pairs(ids: ArrayLike, num_experts: int, padding: ArrayLike | None = None) -> Ints:
    """Routed pairs of each expert.

    Args:
        ids: [layers, tokens, top_k] integers; -1 means none.
        num_experts: ids are below this.
        padding: [tokens] bool, True for dummy tokens, which do not count; or None.

    Returns:
        [layers, num_experts] int64.
    """
    op = "count_pairs"
    chosen = np.asarray(ids)
    want = "ids: [layers, tokens, top_k] of integers"
    check(chosen.ndim == 3 and chosen.dtype.kind in "iu", op, want, f"{list(chosen.shape)} {chosen.dtype}")
    inside = chosen.size == 0 or (int(chosen.min()) >= -1 and int(chosen.max()) < num_experts)
    check(inside, op, f"ids in [-1, {num_experts})", f"{chosen.min()}..{chosen.max()}" if chosen.size else "")
    valid = chosen >= 0
    if padding is not None:
        dummy = np.asarray(padding, bool)
        check(dummy.shape == chosen.shape[1:2], op, f"padding: [{chosen.shape[1]}]", list(dummy.shape))
        valid &= ~dummy[:, None]
    layer = np.broadcast_to(np.arange(len(chosen))[:, None, None], chosen.shape)[valid]
    flat = layer * num_experts + chosen[valid].astype(np.int64)
    return (
        np.bincount(flat, minlength=len(chosen) * num_experts)
        .reshape(len(chosen), num_experts)
        .astype(np.int64)
    )


@dataclass(frozen=True)
class Quality:
    """What a snapshot rests on: steps and routed pairs it covers (``pairs`` of this rank alone), and
    ``recorded``, the steps recorded since the window was made or last cleared; those made while ``enabled``
    is 0 do not count."""

    steps: int
    pairs: int
    recorded: int


class LoadWindow:
    """Routed pairs per layer and expert over the last ``window`` steps, on the host.

    ``blocks`` block sums: at the end of a block the snapshot covers exactly the last ``window`` steps; ``k``
    steps into a block it covers the last ``window - window / blocks + k``. The arrays ``ring``, ``clock``,
    ``lanes`` and ``enabled`` are the whole state and may be replaced by torch tensors for ``roll`` on a
    device.

    Args:
        layers: MoE layers.
        experts: logical experts per layer.
        window: steps; a multiple of ``blocks``.
        blocks: block sums in the ring.
    """

    def __init__(self, layers: int, experts: int, window: int, blocks: int = 8) -> None:
        op = "LoadWindow"
        check(layers >= 1 and experts >= 1, op, "layers >= 1 and experts >= 1", (layers, experts))
        check(
            blocks >= 1 and window >= 1 and window % blocks == 0,
            op,
            f"window a multiple of {blocks} blocks",
            window,
        )
        self.window, self.block_steps = window, window // blocks
        self.ring = np.zeros((blocks, layers, experts), np.int64)
        self.clock = np.zeros(1, np.int64)
        self.lanes = np.arange(blocks, dtype=np.int64)[:, None, None]
        self.enabled = np.ones(1, np.int64)

    def record(self, counts: ArrayLike) -> None:
        """Add one step: ``counts`` [layers, experts] integers >= 0. Does nothing while ``enabled`` is 0."""
        op = "LoadWindow.record"
        step = np.asarray(counts)
        check(step.shape == self.ring.shape[1:], op, f"counts: {list(self.ring.shape[1:])}", list(step.shape))
        check(step.dtype.kind in "iu", op, "counts of integers", step.dtype)
        low, high = int(step.min()), int(step.max())
        check(low >= 0, op, "counts >= 0", low)
        check(high < 1 << 63, op, "counts below 2**63", high)
        roll(self.ring, self.clock, self.lanes, step.astype(np.int64), self.enabled, self.block_steps)

    def snapshot(self, all_reduce: Callable[[Ints], Ints | None] | None = None) -> Ints:
        """Sum over the window, [layers, experts] int64; ``all_reduce`` adds the snapshots of all ranks up.

        ``all_reduce`` either returns the sum, of the same shape and int64, or works in place and returns
        None.
        """
        total = np.asarray(self.ring).sum(0, dtype=np.int64)
        reduced = None if all_reduce is None else all_reduce(total)
        if reduced is None:
            return total
        out = np.asarray(reduced)
        fits = out.shape == total.shape and out.dtype == np.int64
        want = f"all_reduce to return {list(total.shape)} int64"
        check(fits, "LoadWindow.snapshot", want, f"{list(out.shape)} {out.dtype}")
        return out

    def quality(self) -> Quality:
        """Steps and pairs (of this rank) the snapshot covers."""
        recorded = int(self.clock[0])
        into = (recorded - 1) % self.block_steps + 1
        steps = min(recorded, self.window - self.block_steps + into)
        return Quality(steps, int(np.asarray(self.ring).sum(dtype=np.int64)), recorded)

    def clear(self) -> None:
        """Forget everything recorded."""
        self.ring[...] = 0
        self.clock[...] = 0
