"""Every planted mistake is noticed: the tables ``tests/mutations_*.py``, run row by row.

A row names the mistake, the function that gets it (``module:qualified.name``), the source text that it loses
(found there once), the text that takes its place, and the check that must fail, ``test module:function`` or
``test module:function(literal arguments)``.

In this process: the function's source with one text replaced takes the function's place wherever the library
holds it, the named check runs and must fail, and everything is put back.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate

from dsv41._op import ops
from dsv41.layers import V41State
from tests import models
from tests.layers.test_model import dense

# A mutant that does not even run proves nothing about the check.
BROKEN = (NameError, AttributeError, SyntaxError, ImportError)


def table() -> list[tuple[str, str, str, str, str]]:
    """The rows of every table beside this file."""
    names = sorted(p.stem for p in pathlib.Path(__file__).parent.glob("mutations_*.py"))
    return [row for name in names for row in importlib.import_module(f"tests.{name}").MUTATIONS]


def library() -> list[ModuleType]:
    return [
        m
        for name, m in list(sys.modules.items())
        if name.partition(".")[0] in ("dsv41", "dsv41_reference") and isinstance(m, ModuleType)
    ]


def forget() -> None:
    """Drop what was remembered of the code: launch functions and cached tables."""
    for op in ops().values():
        op._launchers.clear()
    for module in library():
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear") and getattr(value, "__module__", "").startswith(
                "dsv41_reference"
            ):
                value.cache_clear()


@contextlib.contextmanager
def mutated(target: str, old: str, new: str, *users: ModuleType) -> Iterator[None]:
    """Inside, ``target`` has ``new`` in place of ``old``, for the library and for the modules ``users``."""
    home, name = target.split(":")
    module = importlib.import_module(home)
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, module)
    original = inspect.getattr_static(owner, last)
    function: Any = original
    while not isinstance(function, FunctionType):
        function = function.fget if isinstance(function, property) else function.__wrapped__
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{target}: the text occurs {source.count(old)} times: {old}"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<mutated {target}>", "exec"), vars(module), made)
    held: list[tuple[Any, str]] = [(owner, last)]
    for user in [*library(), *users]:
        held += [(user, key) for key, value in list(vars(user).items()) if value is original]
    forget()
    for place, key in held:
        setattr(place, key, made[last])
    try:
        yield
    finally:
        for place, key in held:
            setattr(place, key, original)
        forget()


def find_check(check: str) -> tuple[ModuleType, Callable[[], None]]:
    """The module and the thunk of ``module:function`` or ``module:function(literals)``."""
    home, call = check.split(":", 1)
    module, (name, _, rest) = importlib.import_module(home), call.partition("(")
    arguments = ast.literal_eval(f"({rest[:-1]},)") if rest else ()
    function = getattr(module, name)
    # Hypothesis is told nothing of mutants: no example is kept, none is shrunk.
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    return module, functools.partial(seeded, function, *arguments)


def seeded(function: Callable[..., None], *arguments: Any) -> None:
    torch.manual_seed(0)
    function(*arguments)


@functools.cache
def passes_unmutated(check: str) -> bool:
    find_check(check)[1]()
    return True


ROWS = table()


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_mutation(row: tuple[str, str, str, str, str]) -> None:
    _, target, old, new, check = row
    assert passes_unmutated(check)
    module, call = find_check(check)
    with mutated(target, old, new, module):
        try:
            call()
        except BROKEN as error:
            pytest.fail(f"the mutant does not run: {error!r}")
        except (AssertionError, ValueError, RuntimeError, IndexError):
            return
    pytest.fail(f"{check} does not notice it")


def test_table() -> None:
    names = [row[0] for row in ROWS]
    assert len(names) == len(set(names)) and len(ROWS) >= 30


# Checks that no test has in a form without arguments.


def check_shared_expert_is_clamped() -> None:
    """Gate and up of the shared expert are far past the limit, and the output is that of the limit."""
    layer: Any = models.build("micro").layers[0]
    moe = layer.ffn
    x = torch.full((1, moe.cfg.hidden), 8.0, dtype=torch.bfloat16)
    for part in (moe.shared_experts.w1, moe.shared_experts.w3):
        part.weight.data.copy_(torch.ones(part.weight.shape))
        part.scale.data.view(torch.uint8).fill_(127)
    moe.experts.w2.data.zero_()
    limit = moe.cfg.swiglu_limit
    y = torch.full((1, moe.cfg.inter), limit / (1 + torch.e**-limit) * limit).to(torch.bfloat16)
    assert torch.equal(moe(x), moe.shared_experts.w2(y))


def check_poisoned_rings() -> None:
    """Ring slots that hold no row yet are NaN and are not read."""
    kind, ids = "micro", models.text("micro", 6)
    with accumulate(torch.float64):
        want, _ = dense(kind, ids)
        state = V41State.allocate(models.config(kind), 1, 16, block=8)
        for ring in state.windows:
            ring.pages.fill_(0x7F)
        assert torch.equal(models.model(kind)(ids, models.positions(0, 6), state), want)


def check_two_requests() -> None:
    """Two requests in one step equal each alone."""
    kind, texts = "micro", [models.text("micro", n, seed=n) for n in (9, 6)]
    cu = torch.tensor([0, 9, 15], dtype=torch.int32)
    place = torch.cat([models.positions(0, len(t)) for t in texts])
    with accumulate(torch.float64):
        state = V41State.allocate(models.config(kind), 2, 16, block=8)
        got = models.model(kind)(torch.cat(texts), place, state, cu_seqlens=cu)
        assert torch.equal(got, torch.cat([dense(kind, t)[0] for t in texts]))
        models.assert_state_equals(state, 0, dense(kind, texts[0])[1], 9)
