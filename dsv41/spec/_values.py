"""Arguments of the host code as plain numbers, or a refusal in one sentence."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .._op import check


def integer(name: str, label: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """A Python integer of an integer of any kind (NumPy's, a one-element tensor's); a float is refused.

    Args:
        name: the caller, for the error.
        label: the argument, for the error.
        value: what was given.
        low: least value, or None.
        high: largest value, or None.

    Errors: ValueError ``<name>: expected <label>: an integer ..., got ...``.
    """
    try:
        whole = operator.index(value)
    except (TypeError, RuntimeError):  # torch raises either for a tensor that is not one integer
        whole = None
    good = whole is not None and (low is None or whole >= low) and (high is None or whole <= high)
    span = "" if low is None else f" from {low}"
    span += "" if high is None else f" to {high}"
    check(good, name, f"{label}: an integer{span}", value)
    assert whole is not None
    return whole


def numbers(name: str, label: str, value: Any) -> np.ndarray:
    """A NumPy array of real numbers of a list, an array or a tensor on the host, any shape and dtype.

    A tensor on another device is refused: reading it would wait for the device unseen.

    Errors: ValueError ``<name>: expected <label>: numbers on the host, got ...``.
    """
    array = None
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            small = value.dtype in (torch.bfloat16, torch.float16)  # NumPy has no bfloat16
            array = (value.float() if small else value).detach().numpy()
    else:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):  # rows of different lengths, lists of device tensors
            array = None
    good = array is not None and array.dtype.kind in "biuf"
    check(good, name, f"{label}: numbers on the host", value)
    assert array is not None
    return array


def listed(name: str, label: str, value: Any) -> list[Any]:
    """The entries of a list, tuple, array or tensor of one dimension; text and single values are refused."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        value = value.tolist()
    good = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    check(good, name, f"{label}: a list", value)
    return list(value)
