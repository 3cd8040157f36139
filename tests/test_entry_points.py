"""Whatever a public function of the planners is given, it answers or refuses with the library's sentence."""

import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsv41 import eplb, replay, spec
from dsv41.eplb import Move, apply_moves, roll

FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (spec, replay, eplb)
    for name in module.__all__
    if isinstance(getattr(module, name), types.FunctionType) or hasattr(getattr(module, name), "__wrapped__")
}
GARBAGE = {"none": None, "word": "x", "number": 3, "fraction": -0.5, "object": object(), "list": [None]}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_garbage_is_refused_with_a_sentence(name: str, garbage: str) -> None:
    call, value = FUNCTIONS[name], GARBAGE[garbage]
    needed = [
        p for p in inspect.signature(call).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip
    args = [value for p in needed if p.kind is not p.KEYWORD_ONLY]
    keys = {p.name: value for p in needed if p.kind is p.KEYWORD_ONLY}
    try:
        call(*args, **keys)
    except ValueError as error:
        assert "expected " in str(error) and ", got " in str(error)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a layer from the end": (
        lambda: apply_moves([[0, 1]], [Move(-1, 0, 0, 0, 1, 0)]),
        "apply_moves: expected moves within 1 layers of 2 slots",
    ),
    "a slot past the end": (
        lambda: apply_moves([[0, 1]], [Move(0, 0, 0, 0, 2, 0)]),
        "apply_moves: expected moves within 1 layers of 2 slots",
    ),
    "counts of one layer": (
        lambda: roll(
            np.zeros((2, 3, 4), np.int64), np.zeros(1, np.int64), np.arange(2)[:, None, None],
            np.ones(4, np.int64), np.ones(1, np.int64), 1,
        ),
        r"roll: expected counts: \[3, 4\], got \[4\]",
    ),
    "steps of no block": (
        lambda: roll(
            torch.zeros(1, 3, 4).long(), torch.zeros(1).long(), torch.zeros(1, 1, 1).long(),
            torch.ones(3, 4).long(), torch.ones(1).long(), 0,
        ),
        "roll: expected block_steps >= 1, got 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_silent(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
