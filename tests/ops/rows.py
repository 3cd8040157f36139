"""Properties that every op with independent rows has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate

from dsv41.formats import MXFP4, MXFP8, NVFP4


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of an op's result, whatever form it has."""
    if isinstance(result, (MXFP8, MXFP4, NVFP4)):
        return [result.values, result.scale]
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for x in result if x is not None for t in tensors(x)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes, shape and dtype."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.numel() == 0 or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_rows_independent(call: Callable[[torch.Tensor], Any], count: int) -> None:
    """``call(rows)`` runs an op on some of its rows: in float64 a row's bits do not depend on the others.

    Order, repetition, a single row, and no rows at all.
    """
    with accumulate(torch.float64):
        whole = tensors(call(torch.arange(count)))
        for rows in (
            torch.randperm(count),
            torch.tensor([count - 1]),
            torch.tensor([0] * 7),
            torch.arange(0),
        ):
            for a, b in zip(whole, tensors(call(rows)), strict=True):
                assert same(a[rows], b)


def assert_nan_stays(call: Callable[[torch.Tensor], Any], x: torch.Tensor, row: int = 1) -> None:
    """A NaN in one row of ``x`` changes no other row of the result."""
    bad = x.clone()
    bad[row] = torch.nan
    others = torch.arange(len(x)) != row
    for a, b in zip(tensors(call(x)), tensors(call(bad)), strict=True):
        assert same(a[others], b[others])


def assert_refused(call: Callable[[], Any], message: str) -> None:
    """A ValueError in the one sentence form, with ``message`` (a regular expression) in it."""
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert ": expected " in str(caught.value) and ", got " in str(caught.value)
