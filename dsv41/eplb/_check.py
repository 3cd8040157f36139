"""Argument checks and exact arithmetic shared by the package.

Loads are turned into *integers held in float64* (below 2**53), so every sum of them is exact: the order of
summation, SIMD width and thread count cannot change a result, and two hosts always compute the same map.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def check(ok: bool, op: str, expected: str, got: object) -> None:
    """Raise ``ValueError("<op>: expected <expected>, got <got>")`` unless ``ok``."""
    if not ok:
        raise ValueError(f"{op}: expected {expected}, got {got}")


def as_array(op: str, name: str, value: Any) -> NDArray[Any]:
    """Numbers as an array, whatever holds them: nested lists, an array, a tensor."""
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    check(array.dtype.kind in "iufb", op, f"{name} of a real number type", array.dtype)
    return array


def as_rows(op: str, name: str, value: Any) -> NDArray[Any]:
    """Integers [layers, slots], any of them."""
    array = as_array(op, name, value)
    fits = array.ndim == 2 and array.dtype.kind in "iu"
    check(fits, op, f"{name}: [layers, slots] of integers", f"{list(array.shape)} {array.dtype}")
    return array


def as_loads(op: str, weight: ArrayLike) -> Floats:
    """Loads ``[layers, experts]`` as float64, checked: two dimensions, not empty, finite, none negative."""
    array = as_array(op, "weight", weight)
    check(array.ndim == 2 and array.size > 0, op, "weight: [layers, experts]", list(array.shape))
    loads = array.astype(np.float64)
    bad = ~(np.isfinite(loads) & (loads >= 0))
    if bad.any():
        layer, expert = (int(i) for i in np.argwhere(bad)[0])
        check(False, op, "finite loads >= 0", f"{loads[layer, expert]} at layer {layer}, expert {expert}")
    return loads


def as_map(op: str, name: str, value: Any, layers: int, experts: int, slots: int | None = None) -> Ints:
    """A physical-to-logical map ``[layers, slots]`` as int64, checked: integers in range, every expert
    present."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    want = f"{name}: [{layers}, {'slots' if slots is None else slots}] of integers"
    fits = array.ndim == 2 and array.shape[0] == layers and slots in (None, array.shape[1])
    check(fits and array.dtype.kind in "iu", op, want, f"{list(array.shape)} {array.dtype}")
    check(
        bool(array.size) and int(array.min()) >= 0 and int(array.max()) < experts,
        op,
        f"{name} to hold expert ids in [0, {experts})",
        f"{array.min()}..{array.max()}" if array.size else "no slots",
    )
    array = array.astype(np.int64)
    counts = replica_counts(array, experts)
    if not counts.all():
        layer, expert = (int(i) for i in np.argwhere(counts == 0)[0])
        check(False, op, f"{name} to hold every expert", f"none of expert {expert} in layer {layer}")
    return array


def check_whole(op: str, **values: object) -> None:
    """Raise unless every named value is an integer, of Python or NumPy; None and bool are not."""
    for name, value in values.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        check(whole, op, f"{name} to be an integer", repr(value))


def as_shares(op: str, name: str, value: Any, shape: tuple[int, ...]) -> Floats:
    """Shares as float64, checked: the shape, finite, none negative."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    fits = array.shape == shape and array.dtype.kind in "iuf"
    check(fits, op, f"{name}: {list(shape)}", f"{list(array.shape)} {array.dtype}")
    array = array.astype(np.float64)
    bad = ~(np.isfinite(array) & (array >= 0))
    check(not bad.any(), op, f"finite {name} >= 0", array[bad][0] if bad.any() else None)
    return array


def check_ranks(op: str, slots: int, num_gpus: int) -> int:
    """Slots per rank; raises unless ``num_gpus >= 1`` divides ``slots``; both must be integers."""
    check_whole(op, slots=slots, num_gpus=num_gpus)
    check(num_gpus >= 1, op, "num_gpus >= 1", num_gpus)
    check(slots % num_gpus == 0, op, "slots divisible by num_gpus", f"{slots} slots over {num_gpus} GPUs")
    return slots // num_gpus


def replica_counts(physical_to_logical: Ints, experts: int) -> Ints:
    """Copies of each expert: ``[layers, experts]`` int64."""
    layers = len(physical_to_logical)
    flat = physical_to_logical + np.arange(layers, dtype=np.int64)[:, None] * experts
    return np.bincount(flat.ravel(), minlength=layers * experts).reshape(layers, experts)


def exact(loads: Floats) -> Floats:
    """Each row scaled by a power of two and rounded to integers, as large as exact sums allow.

    A row's sum stays below 2**45; its largest load has ``44 - bit_length(experts)`` bits. Integer loads below
    that are kept exactly, and ``exact(2**k * loads) == exact(loads)``.
    """
    bits = 44 - loads.shape[1].bit_length()
    exponent = np.frexp(loads.max(1, keepdims=True))[1]
    return np.rint(np.ldexp(np.ldexp(loads, -exponent), bits))
