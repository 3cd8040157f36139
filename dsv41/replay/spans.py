"""What each request asks of one forward: the planner's input, as objects or as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, index
from typing import Any

import numpy as np

from .config import ReplayConfigError, check

Ints = np.ndarray | Sequence[int]

_UNKNOWN = -(1 << 62)  # None as an integer: no caller can mean it, while -1 must stay a refused mistake
_MAX_POSITION = (1 << 31) - 1  # the plan's positions are int32
_COLUMNS = ("q_len", "end", "target_end", "swa_start", "decoder_live_start", "is_decode", "keep_all")
_row_of = attrgetter("_row")


@dataclass(frozen=True)
class RequestSpan:
    """Rows of one request in one forward; positions are absolute and count tokens from 0.

    Args:
        q_len: rows of this request in the forward (0 is allowed: a request that only holds its place).
        end: position after the last of them; the rows are `end - q_len .. end - 1`.
        target_end: L, tokens known when prefill began (prompt plus, after a preemption, what was generated);
            None when not known yet. Must be None for a decode span.
        swa_start: f, first position whose encoder window KV exists; 0 unless a prefix hit was replayed.
        decoder_live_start: v, when the decoder layers already hold window KV of `v .. end - q_len - 1` from
            an earlier turn and it should be read; None otherwise. For a chunked prompt pass it with every
            chunk or with none.
        is_decode: decode or verification rows: never dropped, no floor.
        keep_all: run every row with its true window (mask/windowed for this request), e.g. for prompt
            log-probs.

    Raises:
        ReplayConfigError: a value that is not an integer. Ranges are checked when the batch is planned.
    """

    q_len: int
    end: int
    target_end: int | None = None
    swa_start: int = 0
    decoder_live_start: int | None = None
    is_decode: bool = False
    keep_all: bool = False

    def __post_init__(self) -> None:
        target = _UNKNOWN if self.target_end is None else self.target_end
        live = _UNKNOWN if self.decoder_live_start is None else self.decoder_live_start
        numbers = (self.q_len, self.end, target, self.swa_start, live)
        # One packed tuple a span lets the planner read 256 requests in one pass instead of seven.
        if not all(type(value) is int for value in numbers):
            numbers = tuple(_index(name, value) for name, value in zip(_COLUMNS, numbers, strict=False))
        object.__setattr__(self, "_row", (*numbers, bool(self.is_decode), bool(self.keep_all)))


def _index(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise ReplayConfigError(
            f"RequestSpan.{name} must be an integer, got {value!r}; pass a token count or position"
        )
    try:
        return index(value)
    except TypeError:
        raise ReplayConfigError(
            f"RequestSpan.{name} must be an integer, got {value!r}; pass a token count or position"
        ) from None


@dataclass(frozen=True, eq=False)
class SpanBatch:
    """The spans of one forward as columns, in the order their rows are packed.

    Args:
        table: [7, num_requests] int64, one row a field of `RequestSpan`; build it with `from_spans` or
            `from_columns`.

    Raises:
        ReplayConfigError: a span that contradicts itself; the sentence names the request.
    """

    table: np.ndarray

    def __post_init__(self) -> None:
        q_len, end, target, swa_start, live, decode, _ = self.table
        start = end - q_len
        known, has_live = target != _UNKNOWN, live != _UNKNOWN
        bad = (q_len < 0) | (start < 0) | (end > _MAX_POSITION)
        bad |= (swa_start < 0) | (swa_start > start)
        bad |= known & ((target < end) | (target > _MAX_POSITION) | (decode != 0))
        bad |= has_live & ((live < swa_start) | (live > start))
        if bad.any():
            self._explain(int(np.flatnonzero(bad)[0]))

    def _explain(self, r: int) -> None:
        """Say which rule request `r` breaks; only reached when one is broken."""
        q_len, end, target, swa_start, live, decode, _ = (int(v) for v in self.table[:, r])
        start, at = end - q_len, f"request {r}: "
        check(
            q_len >= 0, f"{at}q_len must be at least 0, got {q_len}; count the request's rows in this forward"
        )
        check(
            start >= 0,
            f"{at}end must be at least q_len {q_len}, got {end}; pass the position after the last row",
        )
        check(end <= _MAX_POSITION, f"{at}end must be at most {_MAX_POSITION}, got {end}; split the sequence")
        check(
            0 <= swa_start <= start,
            f"{at}swa_start must lie in 0..{start} (the first row of the step), got {swa_start}; pass the "
            f"first position with encoder window KV",
        )
        if target != _UNKNOWN:
            check(not decode, f"{at}target_end must be None for a decode span, got {target}; leave it out")
            check(
                end <= target <= _MAX_POSITION,
                f"{at}target_end must be at least end {end}, got {target}; pass the number of tokens known "
                "at admission",
            )
        check(
            swa_start <= live <= start,
            f"{at}decoder_live_start must lie in {swa_start}..{start}, got {live}; pass the first position "
            f"of the decoder window KV that ends at the step's first row, or None",
        )

    @staticmethod
    def from_spans(spans: Iterable[RequestSpan]) -> SpanBatch:
        """Columns of a list of spans, in order."""
        flat = np.fromiter(chain.from_iterable(map(_row_of, spans)), np.int64)
        return SpanBatch(flat.reshape(-1, len(_COLUMNS)).T)

    @staticmethod
    def from_columns(
        q_len: Ints,
        end: Ints,
        *,
        target_end: Ints | None = None,
        swa_start: Ints | None = None,
        decoder_live_start: Ints | None = None,
        is_decode: Ints | None = None,
        keep_all: Ints | None = None,
    ) -> SpanBatch:
        """Columns an engine already holds; no Python object a request.

        Args: as in `RequestSpan`, each [num_requests] integers (booleans for the last two); an entry of -1 in
            `target_end` or `decoder_live_start` means None, and a column left out means its default.
        """
        columns = (q_len, end, target_end, swa_start, decoder_live_start, is_decode, keep_all)
        table = np.zeros((len(_COLUMNS), len(q_len)), np.int64)
        for row, name, column in zip(table, _COLUMNS, columns, strict=True):
            if column is None:
                row[:] = _UNKNOWN if name in ("target_end", "decoder_live_start") else 0
                continue
            values = np.asarray(column)
            kinds = "iub" if name in ("is_decode", "keep_all") else "iu"
            check(
                values.shape == row.shape and (values.dtype.kind in kinds or values.size == 0),
                f"SpanBatch.{name} must be [{len(row)}] integers, got {list(values.shape)} {values.dtype}; "
                f"pass one value a request",
            )
            row[:] = values
            if name in ("target_end", "decoder_live_start"):
                row[row == -1] = _UNKNOWN
        return SpanBatch(table)

    def __len__(self) -> int:
        return self.table.shape[1]

    @property
    def known(self) -> np.ndarray:
        """[num_requests] bool: `target_end` was given."""
        return self.table[2] != _UNKNOWN

    @property
    def has_live(self) -> np.ndarray:
        """[num_requests] bool: `decoder_live_start` was given."""
        return self.table[4] != _UNKNOWN
