"""Carry out a move list on the expert tensors of a layer: weights, scales and whatever else belongs to an
expert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ._check import check
from .repair import Move, as_moves, batches


class Transport(Protocol):
    """Moves one expert's tensors between ranks. A real one posts sends and receives; ``flush`` waits for
    them."""

    def copy(self, move: Move, tensors: Mapping[str, Any]) -> None:
        """Start copying expert row ``move.src_slot`` of every tensor over row ``move.dst_slot``.

        ``tensors`` maps names to all of a layer's per-slot tensors. Until ``flush``, no destination may be
        written before every source of the same batch has been read.
        """
        ...

    def flush(self) -> None:
        """Return when every copy started so far has landed."""
        ...


class InMemory:
    """All ranks in one process: row ``slot`` of a tensor ``[slots, ...]`` is that physical expert. NumPy or
    torch."""

    def __init__(self) -> None:
        self._pending: list[tuple[Any, int, Any]] = []

    def copy(self, move: Move, tensors: Mapping[str, Any]) -> None:
        """Read the source rows now, keep them until ``flush``."""
        for tensor in tensors.values():
            row = tensor[move.src_slot]
            self._pending.append(
                (tensor, move.dst_slot, row.clone() if hasattr(row, "clone") else row.copy())
            )

    def flush(self) -> None:
        """Write all rows read since the last flush."""
        for tensor, slot, row in self._pending:
            tensor[slot] = row
        self._pending.clear()


def transfer(
    moves: Iterable[Move],
    layers: Mapping[int, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
    transport: Transport,
) -> int:
    """Run moves in batches in which every rank sends at most once and receives at most once.

    Stop after any prefix of ``moves`` and the experts match the map with that prefix applied. The caller
    switches a layer's map to the new one between the last batch that touches the layer and its next forward.

    Args:
        moves: of one or more layers, in the order ``repair`` or ``move_list`` gives.
        layers: for each layer, *all* of its per-slot tensors by name (weights and block scales alike), each
            with the physical slot as first dimension.
        transport: carries the rows.

    Returns:
        Expert rows copied: moves times tensors.

    Raises:
        ValueError: before anything is copied, when a move names a layer or slot that is not there.
    """
    todo = as_moves("transfer", moves)
    check(isinstance(layers, Mapping | Sequence), "transfer", "layers: tensors by name of each layer", layers)
    for move in todo:
        there = move.layer in layers if isinstance(layers, Mapping) else 0 <= move.layer < len(layers)
        check(there, "transfer", "tensors for every layer in moves", f"none for layer {move.layer}")
        tensors = layers[move.layer]
        check(bool(tensors), "transfer", "at least one tensor a layer", f"none for layer {move.layer}")
        for name, tensor in tensors.items():
            rows = tensor.shape[0]
            inside = 0 <= move.src_slot < rows and 0 <= move.dst_slot < rows
            check(inside, "transfer", f"slots below {rows} ({name})", (move.src_slot, move.dst_slot))
    copied = 0
    for batch in batches(todo):
        for move in batch:
            transport.copy(move, layers[move.layer])
            copied += len(layers[move.layer])
        transport.flush()
    return copied
