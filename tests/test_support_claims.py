"""What the support table says of a kernel is what tests do: *lowered*, *emulated* and *run*, claim by claim.

- emulated: tests are marked with the ops whose launch functions they run, ``pytest.mark.emulates``; that
  they do is checked behind each of them (tests/conftest.py).
- lowered: what the lists of `tests.test_lowering` compile, followed from an op's launch function to the
  builders that it asks for kernels.
- run: test files that widen on a GPU name the op, and the kernel where it is not the first choice. That they
  passed there is what the commit of a record in docs/results says; nothing here can tell.
"""

import importlib
import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest

from dsv41 import support
from dsv41._op import Op, ops
from tests.tools import lowering

pytest.importorskip("tilelang")
pytest.importorskip("triton")
if lowering.nvcc() is None or lowering.cuobjdump() is None:
    pytest.skip("what is lowered needs nvcc and cuobjdump", allow_module_level=True)

from tests import test_lowering

HERE = Path(__file__).parent
GPU_TESTS = [
    text
    for folder in ("ops", "spec", "ep")
    for text in (path.read_text("utf-8") for path in sorted((HERE / folder).glob("test_*.py")))
    if "cuda.is_available()" in text or re.search(r"\bGPU\b", text)
]
EMULATING = ("ascend", "ascend_cache", "ascend_cube", "ascend_index", "ascend_step")


def emulated() -> set[str]:
    """Ops that tests of CI run in the emulator."""
    found: set[str] = set()
    for name in EMULATING:
        for test in vars(importlib.import_module(f"tests.test_{name}")).values():
            own = getattr(test, "pytestmark", [])
            cases = [
                case.marks
                for m in own
                if m.name == "parametrize"
                for case in m.args[1]
                if hasattr(case, "marks")
            ]
            for given in ([m for m in own if m.name != "parametrize"], *cases):
                if not any(m.name == "sweep" for m in (*own, *given)):
                    found.update(op for m in given if m.name == "emulates" for op in m.args)
    return found


def asked_for(launch: Any, builders: set[Any]) -> set[Any]:
    """The builders, of those given, that a launch function can come to."""
    found, seen = set(), set()

    def visit(function: Any) -> None:
        if function in seen:
            return
        seen.add(function)
        codes = [function.__code__]
        for code in codes:
            codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
            values = [function.__globals__.get(name) for name in code.co_names]
            for module in [v for v in values if isinstance(v, types.ModuleType)]:
                values += [vars(module).get(name) for name in code.co_names]
            for value in values:
                if any(value is builder for builder in builders):
                    found.add(value)
                elif inspect.isfunction(value) and value.__module__.startswith("dsv41.ops"):
                    visit(inspect.unwrap(value))

    visit(launch)
    return found


def lowered() -> tuple[set[Any], set[Any]]:
    """Builders of all CUDA kernels, and those of which CI compiles a build for sm_100a."""
    every, compiled = set(), set()
    for module in [*test_lowering.TILELANG, *test_lowering.TRITON]:
        hopper = getattr(importlib.import_module(module), "HOPPER_ONLY", ())
        for builder, args in lowering.all_variants(module, test_lowering.CFG):
            every.add(builder)
            row_wise = module in test_lowering.ROW_WISE and builder.__name__ not in hopper
            if module in test_lowering.TRITON or row_wise or "sm_100a" in args:
                compiled.add(builder)
    return every, compiled


def claims(word: str, target: str) -> list[tuple[str, str]]:
    """(op, kernel) of which the table says this on a target."""
    where = support.TARGETS[target]
    return [
        (name, kernel)
        for name, op in sorted(ops().items())
        for kernel in dict.fromkeys(k for k, reason in op.explain(where) if reason is None)
        if support.status(name, kernel, where) == word
    ]


def launch(op: Op, kernel: str) -> Any:
    return getattr(importlib.import_module(f"{op.package}.{kernel}"), op.name)


@pytest.mark.parametrize("op, kernel", claims("lowered", "CUDA SM100"))
def test_what_counts_as_lowered_is_compiled(op: str, kernel: str) -> None:
    every, compiled = lowered()
    needed = asked_for(launch(ops()[op], kernel), every)
    names = sorted(getattr(b, "__name__", str(b)) for b in needed - compiled)
    assert needed and not names, f"{op}: CI does not compile {names or 'anything'} for sm_100a"


@pytest.mark.parametrize("op", ["index_topk", "mxfp4_moe", "sparse_attn"])
def test_what_is_compiled_for_hopper_alone_would_be_seen(op: str) -> None:
    every, compiled = lowered()
    assert asked_for(launch(ops()[op], "tilelang_cuda"), every) - compiled


def test_what_counts_as_emulated_is_run_by_the_emulator() -> None:
    assert {op for op, _ in claims("emulated", "Ascend 950")} == emulated()


@pytest.mark.parametrize("op, kernel", claims("run", "CUDA SM90"))
def test_what_counts_as_run_has_a_test_for_a_gpu(op: str, kernel: str) -> None:
    first = ops()[op].select(support.TARGETS["CUDA SM90"]) == kernel
    names = rf"\b{op}\b|{re.escape('quantize_{kind}')}" if op.startswith("quantize_") else rf"\b{op}\b"
    found = [t for t in GPU_TESTS if re.search(names, t) and (first or kernel in t)]
    assert found, f"{op}: no test for a GPU names {kernel}"
