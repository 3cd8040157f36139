"""Every kernel compiles to machine code of its architecture on a machine without a GPU.

CI takes one build of every builder; the `sweep` form takes everything that a model can need. Tensor-core and
copy-engine instructions must be in the machine code of a file whose sources ask for them. Spills are none, or
no more than the file (`SPILLS = {"builder": bytes}`) or the table here documents.
"""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv41 import V41FlashConfig
from tests.tools import lowering

pytest.importorskip("tilelang")
pytest.importorskip("triton")
if lowering.nvcc() is None or lowering.cuobjdump() is None:
    pytest.skip("needs nvcc and cuobjdump", allow_module_level=True)

CFG = V41FlashConfig()
# Bytes of spills that were seen and left: wgmma needs many registers at once. Lower them, never raise them.
SPILLS: dict[str, dict[str, int]] = {
    "dsv41.ops.attn.tilelang_cuda": {"_attend": 64},
    "dsv41.ops.index.tilelang_cuda": {"_scan": 128},
    "dsv41.ops.moe.tilelang_cuda": {"_gate_up": 16},
}
TILELANG, TRITON = lowering.files("tilelang"), lowering.files("triton")


def builds(sweep: bool) -> list[Any]:
    """(module, builder, args) of all files: one a builder, or the rest."""
    found = []
    for module in TILELANG:
        seen = set()
        for builder, args in lowering.all_variants(module, CFG):
            first = builder.__name__ not in seen
            seen.add(builder.__name__)
            if first != sweep:
                name = ".".join(module.split(".")[2:3]) + f"-{builder.__name__}-" + "-".join(map(str, args))
                found.append(pytest.param(module, builder, args, id=name))
    return found


def check(module: str, builder: Any, args: tuple[Any, ...], record: Any) -> None:
    made = lowering.lower_tilelang(module, builder, args)
    record("registers", made.registers)
    record("spills", made.spills)
    known = {**SPILLS.get(module, {}), **getattr(importlib.import_module(module), "SPILLS", {})}
    allowed = known.get(builder.__name__, 0)
    assert made.spills <= allowed, f"{made.spills} bytes of spills"


@pytest.mark.parametrize("module, builder, args", builds(sweep=False))
def test_one_build_a_builder(module: str, builder: Any, args: Any, record_property: Any) -> None:
    check(module, builder, args, record_property)


@pytest.mark.sweep
@pytest.mark.parametrize("module, builder, args", builds(sweep=True))
def test_every_build(module: str, builder: Any, args: Any, record_property: Any) -> None:
    check(module, builder, args, record_property)


# Instructions of which one must be there when a source asks for the operation.
WGMMA_BF16, WGMMA_FP8, BULK = ("HGMMA",), ("QGMMA",), ("UBLKCP", "UTMALDG")


def declared(module: str) -> list[tuple[str, ...]]:
    """What a file's sources ask for: wgmma operations by type, and bulk copies."""
    loaded: Any = importlib.import_module(module)
    kept, asked, texts = loaded.device_source, set(), []

    def catch(*paths: Path, wgmma: dict[str, Any] | None = None) -> str:
        asked.update(wgmma or {})
        texts.extend(path.read_text("utf-8") for path in paths)
        return kept(*paths, wgmma=wgmma)

    loaded.device_source = catch
    try:
        for builder, args in lowering.all_variants(module, CFG):
            lowering.program(module, builder, args)
    finally:
        loaded.device_source = kept
    groups = []
    groups += [WGMMA_BF16] if any(op.startswith("bf16") for op in asked) else []
    groups += [WGMMA_FP8] if any(op.startswith(("e4m3", "e5m2")) for op in asked) else []
    return groups + ([BULK] if any("bulk_copy" in text for text in texts) else [])


@pytest.mark.parametrize("module", TILELANG)
def test_the_instructions_asked_for_are_there(module: str) -> None:
    wanted = declared(module) if hasattr(importlib.import_module(module), "device_source") else []
    if not wanted:
        pytest.skip("asks for neither tensor cores nor bulk copies")
    # One build of each builder first; the others for what is still missing, as in a kernel of two types.
    first, others = {}, []
    for builder, args in lowering.all_variants(module, CFG):
        if first.setdefault(builder.__name__, (builder, args)) != (builder, args):
            others.append((builder, args))
    for builder, args in [*first.values(), *others]:
        if not wanted:
            break
        made = lowering.lower_tilelang(module, builder, args)
        wanted = [group for group in wanted if not made.has(*group)]
    assert not wanted


@pytest.mark.parametrize("module", TRITON)
def test_triton(module: str) -> None:
    """In a process of its own: the interpreter of other tests must not be in the way."""
    loaded = importlib.import_module(module)
    if not hasattr(loaded, "variants"):
        pytest.skip("compiles by itself only")
    command = [sys.executable, "-m", "tests.tools.lowering", module]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rows) == len(lowering.all_variants(module, CFG))
    assert all(registers and size and not spills for registers, spills, size in rows)


def test_spills_and_instructions_are_seen() -> None:
    """The report is read as ptxas writes it, and a missing instruction is missing."""
    text = "Used 168 registers\n 0 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads"
    assert lowering.usage(text) == (168, 24)
    made = lowering.Lowered("", "  HGMMA.64x8x16.F32.BF16 R4, gdesc ;", 8, 0)
    assert made.has("HGMMA", "QGMMA") and not made.has("UBLKCP")
