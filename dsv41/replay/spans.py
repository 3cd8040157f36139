"""What each request asks of one forward: the planner's input, as objects or as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter, index
from struct import Struct
from typing import Any

import numpy as np

from .config import ReplayConfigError, check

Ints = np.ndarray | Sequence[int]

UNKNOWN = (
    1 << 62
)  # an absent target_end or decoder_live_start: above every position, so it never limits anything
_MAX_POSITION = (1 << 31) - 1  # the plan's positions are int32
_COLUMNS = (
    "q_len",
    "end",
    "target_end",
    "swa_start",
    "decoder_live_start",
    "hit_end",
    "is_decode",
    "keep_all",
)
_OPTIONAL = ("target_end", "decoder_live_start")
_pack = Struct(f"{len(_COLUMNS)}q").pack
_packed = attrgetter("_packed")


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
        keep_all: run every row as in mode mask/windowed, whatever the mode: rows below the segment with
            their true window, rows in it with the segment's. E.g. for prompt log-probs.
        hit_end: H, end of a prefix hit that is being replayed: compressed entries and index keys of positions
            below it are cached and stay as they are. Pass it with every chunk; 0 without a hit.

    Raises:
        ReplayConfigError: a value that is not an integer (a flag: not a boolean), or values that contradict
            each other.
    """

    q_len: int
    end: int
    target_end: int | None = None
    swa_start: int = 0
    decoder_live_start: int | None = None
    is_decode: bool = False
    keep_all: bool = False
    hit_end: int = 0

    def __post_init__(self) -> None:
        target = UNKNOWN if self.target_end is None else self.target_end
        live = UNKNOWN if self.decoder_live_start is None else self.decoder_live_start
        numbers = (self.q_len, self.end, target, self.swa_start, live, self.hit_end)
        if (
            not type(self.q_len)
            is type(self.end)
            is type(target)
            is type(self.swa_start)
            is type(live)
            is type(self.hit_end)
            is int
        ):
            numbers = tuple(_index(name, value) for name, value in zip(_COLUMNS, numbers, strict=False))
        flags = (self.is_decode, self.keep_all)
        if not type(self.is_decode) is type(self.keep_all) is bool:
            flags = (_flag("is_decode", self.is_decode), _flag("keep_all", self.keep_all))
        row = numbers + flags
        if _contradicts(row):
            _explain("RequestSpan", row)
        # Packed once here, so that the planner reads a batch with one join and no Python integer.
        object.__setattr__(self, "_packed", _pack(*row))


def _index(name: str, value: Any) -> int:
    if not isinstance(value, (bool, np.bool_)):
        with suppress(TypeError):
            return index(value)
    raise ReplayConfigError(
        f"RequestSpan: expected {name}: an integer, got {value!r}; pass a token count or position"
    )


def _flag(name: str, value: Any) -> bool:
    # 0 and 1 too: they are what a column of flags gives back.
    good = isinstance(value, (bool, np.bool_)) or (isinstance(value, (int, np.integer)) and value in (0, 1))
    check(good, f"RequestSpan: expected {name}: a boolean, got {value!r}; pass True or False")
    return bool(value)


def _contradicts(columns: Any) -> Any:
    """Whether a span is impossible; on 8 integers and on int64 columns [8, num_requests] alike."""
    q_len, end, target, f, live, hit, decode, _ = columns
    start = end - q_len
    bad = (q_len < 0) | (f < 0) | (f > start) | (end > _MAX_POSITION) | (target < end)
    bad |= (target != UNKNOWN) & ((target > _MAX_POSITION) | (decode != 0))
    bad |= (hit != 0) & ((hit < f) | (hit > target) | (hit > _MAX_POSITION))
    return bad | (live != UNKNOWN) & ((live < f) | (live > start))


def _explain(who: str, columns: Sequence[int]) -> None:
    """Raise the sentence for a span that `_contradicts` found impossible."""
    at = f"{who}: expected "
    q_len, end, target, f, live, hit, decode, _ = columns
    start = end - q_len
    check(q_len >= 0, f"{at}q_len: at least 0, got {q_len}; count the request's rows in this forward")
    check(start >= 0, f"{at}end: at least q_len {q_len}, got {end}; pass the position after the last row")
    check(end <= _MAX_POSITION, f"{at}end: at most {_MAX_POSITION}, got {end}; split the sequence")
    check(
        0 <= f <= start,
        f"{at}swa_start: in 0..{start} (the first row of the step), got {f}; pass the first position "
        "with encoder window KV",
    )
    check(
        target >= end,
        f"{at}target_end: at least end {end}, got {target}; pass the number of tokens known at admission",
    )
    if target != UNKNOWN:
        check(not decode, f"{at}target_end: None for a decode span, got {target}; leave it out")
        check(target <= _MAX_POSITION, f"{at}target_end: at most {_MAX_POSITION}, got {target}; split it")
    highest = min(target, _MAX_POSITION)
    check(
        hit == 0 or f <= hit <= highest,
        f"{at}hit_end: in {f}..{highest} (swa_start to target_end), or 0, got {hit}; pass the end "
        "of the cached prefix",
    )
    raise ReplayConfigError(
        f"{at}decoder_live_start: in {f}..{start}, got {live}; pass the first position of the "
        "decoder window KV that ends at the step's first row, or None"
    )


def _column(name: str, column: Any) -> np.ndarray:
    try:
        return np.asarray(column)
    except (ValueError, TypeError) as mistake:
        raise ReplayConfigError(
            f"SpanBatch: expected {name}: a column of integers, got {type(column).__name__} of another "
            "shape; "
            "pass one value a request"
        ) from mistake


@dataclass(frozen=True, eq=False)
class SpanBatch:
    """The spans of one forward as columns, in the order their rows are packed.

    Args:
        table: [8, num_requests] int64, one row a field of `RequestSpan`. Not checked: build it with
            `from_spans` or `from_columns`.
    """

    table: np.ndarray

    @staticmethod
    def from_spans(spans: Iterable[RequestSpan]) -> SpanBatch:
        """Columns of a list of spans, in order."""
        try:
            flat = np.frombuffer(b"".join(map(_packed, spans)), np.int64)
        except (AttributeError, TypeError) as mistake:
            raise ReplayConfigError(
                f"SpanBatch: expected spans: RequestSpans or a SpanBatch, got {type(spans).__name__} "
                f"({mistake}); "
                "pass a list"
            ) from mistake
        return SpanBatch(flat.reshape(-1, len(_COLUMNS)).T.copy())

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
        hit_end: Ints | None = None,
    ) -> SpanBatch:
        """Columns an engine already holds; no Python object a request.

        Args: as in `RequestSpan`, each [num_requests] integers (booleans for the flags); an entry of -1 in
            `target_end` or `decoder_live_start` means None, and a column left out means its default.

        Raises:
            ReplayConfigError: a column of another length or kind, or a span that contradicts itself; the
                sentence names the request.
        """
        columns = (q_len, end, target_end, swa_start, decoder_live_start, hit_end, is_decode, keep_all)
        table = np.zeros((len(_COLUMNS), np.size(_column("q_len", q_len))), np.int64)
        for row, name, column in zip(table, _COLUMNS, columns, strict=True):
            if column is None:
                row[:] = UNKNOWN if name in _OPTIONAL else 0
                continue
            values = _column(name, column)
            kinds = "iub" if name in ("is_decode", "keep_all") else "iu"
            check(
                values.shape == row.shape and (values.dtype.kind in kinds or values.size == 0),
                f"SpanBatch: expected {name}: [{len(row)}] integers, got {list(values.shape)} "
                f"{values.dtype}; "
                f"pass one value a request",
            )
            row[:] = values
            if name in _OPTIONAL:
                row[values == -1] = UNKNOWN  # of the values: an unsigned column has no -1, only large numbers
        bad = _contradicts(table)
        if bad.any():
            r = int(np.flatnonzero(bad)[0])
            _explain(f"SpanBatch, request {r}", table[:, r].tolist())
        return SpanBatch(table)

    def __len__(self) -> int:
        return self.table.shape[1]
