"""The plan of one forward: which packed rows run in the decoder layers, and what each of them may see.

NumPy and the standard library only. `plan_decoder` costs a few dozen vector operations over requests plus two
over kept rows; everything row-wise that not every engine needs is computed on first use and kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .config import (
    ReplayConfig,
    ReplayConfigError,
    ReplayGeometry,
    ReplayMode,
    check,
    check_choice,
    check_int,
    check_kind,
)
from .cost import plan_flops
from .rows import gather_rows, scatter_rows
from .spans import UNKNOWN, RequestSpan, SpanBatch

if TYPE_CHECKING:
    from ..config import V41FlashConfig

PAD = -1  # a slot or index that must be neither read nor written
_MAX_ROWS = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class ReplayPlan:
    """Which rows of one forward run in the decoder layers. Host arrays; `dsv41.replay.device.to_device` makes
    tensors.

    R requests, N packed input rows, M kept rows, P = `padded_to` >= M rows the decoder runs on. "Floor" is
    the lowest absolute position a window may reach; the window of a row at position i is `max(i - window + 1,
    floor) .. i`, and `floor = i + 1` means it is empty. Only windows have floors, compressed keys never do.

    Attributes:
        geometry: the geometry planned for.
        rows: [M] int64, kept rows as indices into the N packed rows; ascending, unique.
        cu_seqlens_q: [R + 1] int32, exclusive prefix sum of kept rows; a request that keeps none repeats its
            value.
        positions: [M] int32, absolute positions of the kept rows.
        query_start_loc: [R + 1] int32, the same prefix sum over all input rows.
        seq_lens: [R] int32, position after the step; not changed by the plan (compressed visibility depends
            on it).
        cached_lens: [R] int32, position of the first kept row = `seq_lens` - kept rows: what counts as
            already computed.
        swa_floor: [R] int32, floor of the request's kept segment in decoder layers after the first.
        first_layer_floor: [R] int32, the same for the first decoder layer (lower for
            first_layer_kv="all_rows").
        encoder_floor: [R] int32, floor of every row in the encoder layers.
        hit_end: [R] int32, compressed entries and index keys of positions below it are not written.
        dead: [R] int8, how kept rows below `swa_floor` run: 0 there are none, 1 "empty", 2 "windowed".
        first_layer_rows: int64 input rows whose window KV the first decoder layer writes (all N, or `rows`).
        logits_row: [R] int32, index into the M kept rows of the row to sample from; -1 when the step does not
            finish the prompt or keeps no row. With an unknown prompt end it is always the last kept row: the
            caller decides.
        is_identity: every row runs and no floor cuts a window, so the plan can be skipped altogether. (False
            under mask even where all rows of a step lie below the segment.)
        padded_to: rows the decoder runs on, M unless `pad` was called.
    """

    geometry: ReplayGeometry
    rows: np.ndarray
    cu_seqlens_q: np.ndarray
    positions: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    cached_lens: np.ndarray
    swa_floor: np.ndarray
    first_layer_floor: np.ndarray
    encoder_floor: np.ndarray
    hit_end: np.ndarray
    dead: np.ndarray
    first_layer_rows: np.ndarray
    logits_row: np.ndarray
    is_identity: bool
    padded_to: int

    @property
    def num_rows(self) -> int:
        """M, kept rows."""
        return len(self.rows)

    @property
    def num_input_rows(self) -> int:
        """N, packed rows of the forward."""
        return int(self.query_start_loc[-1])

    @property
    def n_kept(self) -> np.ndarray:
        """[R] int32, kept rows of each request."""
        return np.diff(self.cu_seqlens_q)

    @property
    def max_q_len(self) -> int:
        """Most kept rows of one request."""
        return int(self.n_kept.max(initial=0))

    @property
    def dropped_before(self) -> np.ndarray:
        """[R + 1] int32, rows removed before each request boundary: all a device-side planner needs."""
        return self.query_start_loc - self.cu_seqlens_q

    @property
    def window_gather_lens(self) -> np.ndarray:
        """[R] int32, rows of a contiguous window workspace: kept rows plus the older rows their windows
        reach.

        For the layers after the first. Requests with rows below the floor (mode mask) count from the lowest
        row.
        """
        floor = np.where(self.dead == 2, self.encoder_floor, self.swa_floor)
        older = np.minimum(np.maximum(self.cached_lens - floor, 0), self.geometry.window - 1)
        return (self.n_kept + np.where(self.n_kept > 0, older, 0)).astype(np.int32)

    @cached_property
    def is_padding(self) -> np.ndarray:
        """[P] bool, rows that belong to no request."""
        return np.arange(self.padded_to) >= self.num_rows

    @cached_property
    def _request(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.seq_lens), dtype=np.int32), self.n_kept)

    @cached_property
    def first_layer_differs(self) -> bool:
        """The first decoder layer has other window rows than the layers behind it ("all_rows")."""
        fewer = len(self.first_layer_rows) != self.num_rows
        return fewer or bool((self.first_layer_floor != self.swa_floor).any())

    def encoder_floor_rows(self) -> np.ndarray:
        """[N] int32, `encoder_floor` of each input row."""
        return np.repeat(self.encoder_floor, np.diff(self.query_start_loc))

    def writes_entries(self) -> np.ndarray:
        """[N] bool, input rows whose compressed entries and index keys are written: from `hit_end` on."""
        q_len = np.diff(self.query_start_loc)
        first = self.seq_lens - q_len - self.query_start_loc[:-1]
        return np.arange(self.num_input_rows) + np.repeat(first - self.hit_end, q_len) >= 0

    def row_to_request(self) -> np.ndarray:
        """[P] int32, request of each row; -1 for padding."""
        return self._padded(self._request, PAD)

    @cached_property
    def attends(self) -> np.ndarray:
        """[P] bool; False: the row sees no key of any kind, only the sink (dead "empty", padding)."""
        below = self.positions < self.swa_floor[self._request]
        return self._padded(~(below & (self.dead[self._request] == 1)), False)

    def floor_rows(self, first_layer: bool = False) -> np.ndarray:
        """[P] int32, the floor of each row: the row form of `swa_floor`, needed whenever `dead` is not all 0.

        Args:
            first_layer: for the first decoder layer instead of those after it.

        Returns:
            The segment's floor for rows in it, `position + 1` (empty) or the encoder floor for rows below it
            as `dead` says, 0 for padding.
        """
        request = self._request
        floor = (self.first_layer_floor if first_layer else self.swa_floor)[request]
        below = self.positions < self.swa_floor[request]
        how = self.dead[request]
        floor = np.where(below & (how == 1), self.positions + 1, floor)
        floor = np.where(below & (how == 2), self.encoder_floor[request], floor)
        return self._padded(floor.astype(np.int32), 0)

    def window_spans(self, first_layer: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Window of each row as a range of absolute positions.

        Returns:
            (low, length), each [P] int32: the row sees `low .. low + length - 1`. A live row's range ends at
            the row itself and has at least 1 position; a dead "empty" or padding row has length 0.
        """
        m = self.num_rows
        low = np.maximum(self.positions - (self.geometry.window - 1), self.floor_rows(first_layer)[:m])
        return self._padded(low, 0), self._padded(self.positions + 1 - low, 0)

    def window_positions(self, first_layer: bool = False) -> np.ndarray:
        """[P, window] int32, absolute positions each row sees, ascending, then -1.

        Map them to slots with the engine's own rule (`block_table[p // page] * page + p % page`, or `p %
        ring`); keep -1.
        """
        low, length = self.window_spans(first_layer)
        column = np.arange(self.geometry.window, dtype=np.int32)
        return np.where(column < length[:, None], low[:, None] + column, np.int32(PAD))

    def ring_writes(
        self, capacity: int, which: Literal["kept", "first_layer", "all"] = "kept"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which rows of the step go into a window ring after their attention, and where.

        A step longer than the ring would overwrite rows it still reads; so read the old rows first and
        write only the last `capacity` rows of each request afterwards.

        Args:
            capacity: slots a request; at least `geometry.cached_rows`.
            which: "kept" for decoder layers after the first, "first_layer" for that one, "all" for encoders.

        Returns:
            (row, slot), each int64: an index into the M kept rows for "kept", into the N packed rows for
            the others; and position modulo `capacity`.
        """
        check_int("ring_writes.capacity", capacity, self.geometry.cached_rows)
        check_choice("ring_writes.which", which, ("kept", "first_layer", "all"))
        if which == "kept":
            row, request, positions = np.arange(self.num_rows), self._request, self.positions
        else:
            row = self.first_layer_rows if which == "first_layer" else np.arange(self.num_input_rows)
            request = np.searchsorted(self.query_start_loc, row, side="right") - 1
            positions = self.seq_lens[request] - (self.query_start_loc[request + 1] - row)
        written = positions >= self.seq_lens[request] - capacity
        return row[written], positions[written].astype(np.int64) % capacity

    def select_slots(self, slot_mapping: Any, write_groups: Iterable[bool]) -> Any:
        """Cache slots of the rows the decoder runs on.

        Args:
            slot_mapping: [num_groups, N] signed integers (NumPy or torch), slot of each packed row in each
                cache group.
            write_groups: num_groups booleans; False for the compressed and index-key groups, which the first
                decoder layer has already written for all rows.

        Returns:
            [num_groups, P] of the same kind; -1 in groups that are not written and in padding.
        """
        groups = list(write_groups)
        check(
            len(slot_mapping.shape) == 2 and tuple(slot_mapping.shape) == (len(groups), self.num_input_rows),
            f"select_slots: expected slot_mapping: [{len(groups)}, {self.num_input_rows}], got "
            f"{list(slot_mapping.shape)}; pass one slot a packed row in each of the groups of write_groups",
        )
        # The type must hold PAD: unsigned, it would be the largest slot.
        kind = str(slot_mapping.dtype).removeprefix("torch.")
        check(
            kind.startswith("int"),
            f"select_slots: expected slot_mapping: signed integers, got {kind}; PAD is {PAD}: pass int32 or "
            "int64",
        )
        for group in groups:
            check(
                not isinstance(group, str) and group in (0, 1),
                f"select_slots: expected write_groups: booleans, got {group!r}; pass True or False a group",
            )
        shape = (len(groups), self.padded_to)
        if hasattr(slot_mapping, "new_full"):
            out = slot_mapping.new_full(shape, PAD)
        else:
            out = np.full(shape, PAD, slot_mapping.dtype)
        for group, write in enumerate(groups):
            if write:
                out[group, : self.num_rows] = slot_mapping[group][self.rows]
        return out

    def pad(self, padded_to: int) -> ReplayPlan:
        """The same plan for a decoder that runs on `padded_to` rows (graph sizes, equal rank counts)."""
        check_int("pad.padded_to", padded_to, self.num_rows)
        return replace(self, padded_to=padded_to)

    def gather(self, *tensors: Any, rows: Any | None = None) -> tuple[Any, ...]:
        """Kept rows of row-wise tensors ([N, ...], NumPy or torch) -> [P, ...] each; padding rows are zero.

        Args:
            tensors: [N, ...] each.
            rows: `self.rows` as a tensor on their device, to save the transfer (`DevicePlan.rows`).

        Returns:
            One result an argument; when every row is kept and none padded, the arguments themselves, not
            copies.
        """
        for x in tensors:
            self._check_rows(x)
        if self.num_rows == self.num_input_rows == self.padded_to:
            return tensors
        index = self._index(rows)
        return tuple(gather_rows(x, index, self.padded_to) for x in tensors)

    def scatter(
        self,
        values: Any,
        out: Any | None = None,
        fill: Literal["nan", "zero"] | None = "nan",
        rows: Any | None = None,
    ) -> Any:
        """Put decoder rows back at their packed places: [P, ...] -> [N, ...]. Padding rows are left out.

        Args:
            values: [P, ...] NumPy or torch.
            out: [N, ...] to write into; allocated when None.
            fill: what dropped rows hold: "nan" (floating types only), "zero", or None to leave `out` as it
                was.
            rows: as in `gather`.

        Returns:
            `out`.
        """
        check(
            len(getattr(values, "shape", ())) > 0 and values.shape[0] == self.padded_to,
            f"scatter: expected values: {self.padded_to} rows, got {_shape(values)}; pass what the decoder "
            "returned for this plan",
        )
        if out is not None:
            self._check_rows(out)
        return scatter_rows(values, self._index(rows), self.num_input_rows, out, fill)

    def stats(self, config: V41FlashConfig | None = None) -> dict[str, float]:
        """What this forward saves: `rows_kept`, `rows_dropped`, and with the model's config
        `decoder_flops_off` and `decoder_flops` (FLOPs of the decoder layers without and with this plan)."""
        stats: dict[str, float] = {
            "rows_kept": self.num_rows,
            "rows_dropped": self.num_input_rows - self.num_rows,
        }
        if config is not None:
            stats["decoder_flops_off"], stats["decoder_flops"] = plan_flops(self, config)
        return stats

    def _check_rows(self, x: Any) -> None:
        check(
            len(getattr(x, "shape", ())) > 0 and x.shape[0] == self.num_input_rows,
            f"ReplayPlan: expected a row-wise tensor of {self.num_input_rows} rows, got {_shape(x)}; pass "
            "all "
            "packed rows of the forward",
        )

    def _index(self, rows: Any | None) -> Any:
        if rows is None:
            return self.rows
        # One index would broadcast a single row over all places.
        check(
            tuple(rows.shape) == (self.num_rows,),
            f"ReplayPlan: expected rows: the plan's own [{self.num_rows}], got {list(rows.shape)}; pass "
            "DevicePlan.rows",
        )
        return rows

    def _padded(self, values: np.ndarray, fill: int | bool) -> np.ndarray:
        if self.padded_to == self.num_rows:
            return values
        out = np.full(self.padded_to, fill, values.dtype)
        out[: self.num_rows] = values
        return out


def _shape(x: Any) -> str:
    return str(list(x.shape)) if hasattr(x, "shape") else type(x).__name__


def plan_decoder(
    cfg: ReplayConfig, geom: ReplayGeometry, spans: Iterable[RequestSpan] | SpanBatch
) -> ReplayPlan:
    """Plan the decoder rows of one varlen forward. Pure, deterministic, independent of the other requests in
    the batch.

        s = max(f, L - keep, 0), first = min(max(start, s), end)           known prompt end, "prompt_window"
        first = max(start, end - keep), s = first if first > start else f  otherwise
        s = v wherever the whole step is kept and decoder_live_start v was given
        decode: first = start, s = 0;  off, mask, keep_all: first = start

    Args:
        cfg: mode, keep, policy, variants.
        geom: geometry of the model.
        spans: the requests in packing order, as `RequestSpan`s or as columns (`SpanBatch`, no object a
            request).

    Returns:
        `ReplayPlan`; its row arrays are in packing order. Requests that keep no row stay, with an empty span.

    Raises:
        ReplayConfigError: `cfg.keep` too small for `geom`, a span that contradicts itself, or a floor that
            would leave fewer than `geom.cached_rows` window rows at the end of a prompt; a hit that ends
            inside a compressed pair; more rows than int32 counts.
    """
    check_kind("plan_decoder.cfg", cfg, ReplayConfig)
    cfg.check_keep(geom)
    batch = spans if isinstance(spans, SpanBatch) else SpanBatch.from_spans(spans)
    q_len, end, target, f, live, hit, decode, keep_all = batch.table
    r = len(batch)
    start = end - q_len
    is_decode, known = decode != 0, target < UNKNOWN
    off, mask = cfg.mode is ReplayMode.OFF, cfg.mode is ReplayMode.MASK

    dead = np.zeros(r, np.int8)
    if off:
        first, floor = start, f.copy()
    else:
        per_request = known if cfg.policy == "prompt_window" else np.zeros(r, bool)
        floor = np.where(per_request, target, end)
        floor -= min(cfg.keep, UNKNOWN)
        # Without a common segment, a step short enough to be kept whole reads on into the steps before it.
        floor[(floor <= start) & ~per_request] = 0
        np.maximum(floor, f, out=floor)
        first = np.maximum(start, floor)
        np.minimum(first, end, out=first)
        has_live = live < UNKNOWN
        if np.count_nonzero(has_live):
            # Decoder rows of an earlier turn end where this step starts; reading them beats cutting them off.
            np.copyto(floor, live, where=has_live & (floor <= start))
        keeps = keep_all != 0
        np.copyto(first, start, where=True if mask else is_decode | keeps)
        if mask or np.count_nonzero(keeps):
            below = (floor > first) & (first < end)
            dead[below] = 1 if mask and cfg.dead == "empty" else 2
            dead[below & keeps] = 2
    floor[is_decode] = 0
    dead[is_decode] = 0
    _check_floors(geom, target, floor)
    if np.count_nonzero(hit):
        _check_hits(geom, hit)

    n_kept = end - first
    cu = np.zeros((2, r + 1), np.int64)
    n_kept.cumsum(out=cu[0, 1:])
    q_len.cumsum(out=cu[1, 1:])
    m, n = cu[:, -1].tolist()
    check(
        n <= _MAX_ROWS,
        f"plan_decoder: expected at most {_MAX_ROWS} rows a forward, got {n}; row counts are int32: split "
        f"the batch",
    )
    whole = m == n
    rows = np.arange(m)
    packed = rows.astype(np.int32)
    # A kept row's index is a constant of its request away from its position, and from its packed place.
    positions = packed + np.repeat((first - cu[0, :-1]).astype(np.int32), n_kept)
    if not whole:
        rows += np.repeat(cu[1, 1:] - cu[0, 1:], n_kept)

    segment_kv = off or cfg.first_layer_kv == "segment"
    cu32, floor32, f32 = cu.astype(np.int32), floor.astype(np.int32), f.astype(np.int32)
    logits_row = cu32[0, 1:] - 1
    logits_row[known & (end < target) | (n_kept == 0)] = PAD
    return ReplayPlan(
        geometry=geom,
        rows=rows,
        cu_seqlens_q=cu32[0],
        positions=positions,
        query_start_loc=cu32[1],
        seq_lens=end.astype(np.int32),
        cached_lens=first.astype(np.int32),
        swa_floor=floor32,
        first_layer_floor=floor32 if segment_kv else np.where(is_decode, np.int32(0), f32),
        encoder_floor=f32,
        hit_end=hit.astype(np.int32),
        dead=dead,
        first_layer_rows=rows if segment_kv or whole else np.arange(n),
        logits_row=logits_row,
        is_identity=whole and bool((floor <= np.maximum(f, first - (geom.window - 1))).all()),
        padded_to=m,
    )


def _check_floors(geom: ReplayGeometry, target: np.ndarray, floor: np.ndarray) -> None:
    """Refuse a plan whose prompt would end with too few window rows."""
    # An unknown prompt end is above every position and never refused.
    short = floor > np.maximum(target - geom.cached_rows, 0)
    if np.count_nonzero(short):
        r = int(np.flatnonzero(short)[0])
        raise ReplayConfigError(
            f"plan_decoder, request {r}: expected at least {geom.cached_rows} window rows below target_end "
            f"{target[r]}, got {target[r] - floor[r]} (swa_start or decoder_live_start {floor[r]}); replay "
            "the prefix "
            "with plan_encoder_hit"
        )


def _check_hits(geom: ReplayGeometry, hit: np.ndarray) -> None:
    """Refuse a hit whose last compressed entry would be half cached, half new."""
    split = np.flatnonzero(hit % geom.align)
    if len(split):
        r = int(split[0])
        raise ReplayConfigError(
            f"plan_decoder, request {r}: expected hit_end: a multiple of {geom.align}, got {hit[r]}; shorten "
            f"the hit to {hit[r] - hit[r] % geom.align}"
        )
