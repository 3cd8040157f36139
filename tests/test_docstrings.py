"""Everything public is documented: what it does, the shape of every array, what it refuses, where it is from.

Ops have a stricter form, which tests/test_api.py checks.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

ROOT = Path(__file__).parents[1]
# Modules on the API page; what others hold is not for callers.
MODULES = re.findall(r"automodule:: (dsv41\.[\w.]+)", (ROOT / "docs" / "api.md").read_text("utf-8"))
PACKAGES = ("dsv41", "dsv41.ops", "dsv41.layers", "dsv41.spec", "dsv41.replay", "dsv41.eplb")
SCALAR = re.compile(r"one-element|\b(as in|as given|to write into|sizes?)\b")
ARRAY = re.compile(r"Tensor|ArrayLike|ndarray|\bInts\b|\bFloats\b")


def members(module: str) -> Iterator[tuple[str, Any]]:
    """Public functions, classes, methods and properties that are written in a module."""
    loaded = importlib.import_module(module)
    for name, value in vars(loaded).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module:
            continue
        yield name, value
        if inspect.isclass(value) and Protocol not in value.__bases__:
            for part, inner in vars(value).items():
                plain = inner.__func__ if isinstance(inner, (staticmethod, classmethod)) else inner
                plain = plain.fget if isinstance(plain, property) else plain
                if not part.startswith("_") and inspect.isfunction(plain):
                    yield f"{name}.{part}", plain


def documented(value: Any, name: str, module: str) -> str:
    """The docstring, a method's also of the method that it overrides."""
    if inspect.isclass(value):
        return value.__doc__ or ""
    text = value.__doc__
    if not text and "." in name:
        owner, part = name.split(".")
        for base in getattr(importlib.import_module(module), owner).__mro__[1:]:
            text = text or getattr(vars(base).get(part), "__doc__", None)
    return inspect.cleandoc(text or "")


@pytest.mark.parametrize("module", MODULES)
def test_everything_on_the_api_page_has_a_docstring(module: str) -> None:
    assert importlib.import_module(module).__doc__
    for name, value in members(module):
        text = documented(value, name, module)
        assert text, f"{module}.{name} has no docstring"
        first = text.split("\n\n")[0].rstrip()
        assert first.endswith((".", ":", "``", "`")) or "Args:" in text, f"{module}.{name}: a sentence first"


def exported() -> list[tuple[str, Any]]:
    """Functions and classes that a package offers by name, once each."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        loaded = importlib.import_module(package)
        for name in loaded.__all__:
            value = getattr(loaded, name)
            if callable(value) and getattr(value, "__module__", "").startswith("dsv41"):
                found.setdefault(f"{value.__module__}.{name}", value)
    return sorted(found.items())


@pytest.mark.parametrize(("name", "value"), exported(), ids=[name for name, _ in exported()])
def test_arrays_have_shapes_and_refusals_are_told(name: str, value: Any) -> None:
    text = documented(value, name.rpartition(".")[2], value.__module__)
    assert len(text) > 20, f"{name} has no docstring"
    function = value.__init__ if inspect.isclass(value) else value
    if inspect.isclass(value) and not inspect.isfunction(function):
        return
    for parameter in inspect.signature(function).parameters.values():
        kind = str(parameter.annotation)
        if parameter.name == "self" or not ARRAY.search(kind) or "Callable" in kind:
            continue
        # "name: [shape] ..." or "``name`` [shape]", perhaps of several names; or a number.
        told = rf"\b{parameter.name}\b(`*,? `*[\w`, ]*)?`*:?([^\n]*\n?[^\n]*)"
        places = [m[0] for m in re.finditer(told, text)]
        assert places or "rguments as" in text, f"{name}: {parameter.name} is not explained"
        shaped = any("[" in place or SCALAR.search(place) for place in places)
        assert shaped or "rguments as" in text, f"{name}: {parameter.name} has no shape in brackets"


def test_the_rules_notice_a_lie() -> None:
    """A function without a docstring, and one whose array has no shape."""

    def bare(x: "torch.Tensor") -> None: ...  # noqa: F821 # pyright: ignore

    with pytest.raises(AssertionError, match="no docstring"):
        test_arrays_have_shapes_and_refusals_are_told("bare", bare)
    bare.__doc__ = "Do something with a tensor.\n\nArgs:\n    x: a tensor.\n"
    with pytest.raises(AssertionError, match="no shape in brackets"):
        test_arrays_have_shapes_and_refusals_are_told("bare", bare)
    bare.__doc__ = "Do something with a tensor.\n\nArgs:\n    x: [rows, K] bf16.\n"
    test_arrays_have_shapes_and_refusals_are_told("bare", bare)
