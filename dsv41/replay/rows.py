"""Moving rows between the packed forward and the decoder's compact batch.

Works on NumPy arrays and torch tensors alike, through the few methods they share, so that this file imports
no torch.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from .config import ReplayConfigError, check


def gather_rows(x: Any, rows: Any, padded_to: int) -> Any:
    """x [N, ...] -> [padded_to, ...]: x[rows], then zero rows.

    Args:
        x: array or tensor.
        rows: [M] int64 indices; a NumPy array, or a tensor on x's device (no transfer then).
        padded_to: at least M.

    Zero rows and not copies of a real row: padding must not load the experts of some token twice.
    """
    if padded_to == rows.shape[0]:
        return x[rows]
    out = _empty(x, (padded_to, *x.shape[1:]))
    out[: rows.shape[0]] = x[rows]
    out[rows.shape[0] :] = 0
    return out


def scatter_rows(
    values: Any, rows: Any, num_rows: int, out: Any | None, fill: Literal["nan", "zero"] | None
) -> Any:
    """values [>= M, ...] -> [num_rows, ...] with out[rows] = values[:M]; see `ReplayPlan.scatter`."""
    check(
        fill in ("nan", "zero", None),
        f"scatter: expected fill: nan, zero or None, got {fill!r}; choose one of them",
    )
    check(
        out is not None or fill is not None,
        "scatter: expected fill: nan or zero when out is not given, got None; dropped rows would hold old "
        "memory: pass one of them",
    )
    if out is None:
        # A type without NaN is refused below, before anything is written.
        return scatter_rows(values, rows, num_rows, _empty(values, (num_rows, *values.shape[1:])), fill)
    # Assignment would broadcast another shape over the rows and round another type without a word.
    wanted, given = (num_rows, *values.shape[1:]), tuple(out.shape)
    check(
        given == wanted and out.dtype == values.dtype,
        f"scatter: expected out: {list(wanted)} {values.dtype} like values, got {list(given)} {out.dtype}; "
        "pass such a buffer",
    )
    if fill == "zero":
        out[:] = 0
    elif fill == "nan":
        if not _is_floating(out):
            raise ReplayConfigError(
                f"scatter: expected a floating type for fill=nan, got {out.dtype}; use fill=zero"
            )
        out[:] = float("nan")
    out[rows] = values[: rows.shape[0]]
    return out


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    return like.new_empty(shape) if hasattr(like, "new_empty") else np.empty(shape, like.dtype)


def _is_floating(x: Any) -> bool:
    return x.is_floating_point() if hasattr(x, "is_floating_point") else np.issubdtype(x.dtype, np.floating)
