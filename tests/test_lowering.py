"""Every kernel compiles for each of its targets on a machine without any of them.

To machine code of SM90 and SM100, to Ascend C of an Ascend 950. CI takes one build of every builder; the
`sweep` form takes everything that a model can need. Tensor-core and copy-engine instructions must be in the
machine code of a file whose sources ask for them: wgmma on SM90, tcgen05 on SM100. Spills are none, or no
more than the file (`SPILLS = {"builder": bytes}`) or the table here documents.
"""

import importlib
import re
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
    "dsv41.ops.index.tilelang_cuda": {"_scan": 224},  # what the loop over keys does not use
    "dsv41.ops.index.tilelang_sm100_cuda": {"_scan": 84},  # likewise
    "dsv41.ops.moe.tilelang_cuda": {"_gate_up": 16, "_down": 4},  # fp8 tiles, outside their loops
}
TILELANG, TRITON, ASCEND = (lowering.files(name) for name in ("tilelang", "triton", "ascend"))
# Files with kernels that SM100 takes as they are: no tensor cores of Hopper in them.
ROW_WISE = [f"dsv41.ops.{family}.tilelang_cuda" for family in ("compress", "index", "norm_rope", "quant")]
TCGEN05, TENSOR_MEMORY, COPY = ("UTCQMMA",), ("LDTM",), ("UTMALDG",)


def builds(sweep: bool, modules: list[str] = TILELANG) -> list[Any]:
    """(module, builder, args) of files: one a builder, or the rest."""
    found = []
    for module in modules:
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
    if "sm100" in module:
        pytest.skip("looked at below")
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


# Kernels whose products become tcgen05 on SM100, by family.
TRITON_PRODUCTS = {
    "draft": {"_bias"},
    "hyper": {"_streams"},
    "linear": {"_product"},
    "moe": {"_gate_up", "_down"},
}


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("module", TRITON)
def test_triton(module: str, arch: int) -> None:
    """In a process of its own: the interpreter of other tests must not be in the way."""
    command = [sys.executable, "-m", "tests.tools.lowering", module, str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    variants = lowering.all_variants(module, CFG)
    assert len(rows) == len(variants if arch == 90 else {kernel for kernel, _ in variants})
    assert all(int(registers) and int(size) and spills == "0" for registers, spills, size, *_ in rows)
    products = {name for *_, tcgen05, name in rows if tcgen05 == "1"}
    assert products == (TRITON_PRODUCTS.get(module.split(".")[2], set()) if arch == 100 else set())


# ---- SM100 ----


@pytest.mark.parametrize("module, builder, args", builds(False, ROW_WISE))
def test_row_wise_builds_for_sm100(module: str, builder: Any, args: Any) -> None:
    if builder.__name__ in getattr(importlib.import_module(module), "HOPPER_ONLY", ()):
        pytest.skip("made of Hopper's tensor cores; SM100 has its own or an adapter")
    made = lowering.lower_tilelang(module, builder, args, "sm_100a")
    assert made.registers and not made.spills


# What products of SM100 are made of: FP8 and scales by the copy engine, bf16, FP4 and scales from registers.
SM100_PRODUCTS = {
    "linear._product": (TCGEN05, TENSOR_MEMORY, COPY, ("UTCCP",)),
    "linear._grouped": (("UTCHMMA",), TENSOR_MEMORY, COPY),
    "moe._product": (TCGEN05, TENSOR_MEMORY, COPY, ("UTCCP",)),
    "attn._attend": (("UTCHMMA",), TENSOR_MEMORY, ("STTM",), ("UTCBAR",)),
    "index._scan": (("UTCOMMA",), TENSOR_MEMORY, ("STTM",), ("UTCBAR",)),
}


@pytest.mark.parametrize("name", SM100_PRODUCTS)
def test_products_on_sm100_are_tcgen05(name: str) -> None:
    """Products in tensor memory, with the scales of their operands, and none in registers."""
    family, _, wanted_builder = name.partition(".")
    module = f"dsv41.ops.{family}.tilelang_sm100_cuda"
    builds = lowering.all_variants(module, CFG)
    made = lowering.lower_tilelang(module, *next(b for b in builds if b[0].__name__ == wanted_builder))
    for wanted in SM100_PRODUCTS[name]:
        assert made.has(*wanted), wanted
    assert not made.has("HMMA", "QMMA", "OMMA", "HGMMA", "QGMMA") and not made.spills


def test_tensor_memory_of_attention_lies_behind_fences() -> None:
    """Its barriers are written out (TileLang adds none); TileLang adds the fences around them."""
    module = "dsv41.ops.attn.tilelang_sm100_cuda"
    made = lowering.lower_tilelang(module, *lowering.all_variants(module, CFG)[0])
    used = made.source[: made.source.rindex("tcgen05_ld")]  # behind its last load no fence is needed
    fenced = r"before_thread_sync\(\);\s+__syncthreads\(\);\s+tl::tcgen05_after_thread_sync\(\);"
    assert used.count("__syncthreads();") == len(re.findall(fenced, used)) > 9
    assert re.findall(r"\.wait\(.*\);\s+tl::(.*)\(\);", used) == ["tcgen05_after_thread_sync"] * 2


def test_a_product_in_registers_on_sm100_is_seen() -> None:
    """The mistake that compiles without a word: `T.gemm` into a fragment is no tcgen05 there."""
    import tilelang.language as T

    @T.prim_func
    def wrong(a: T.Tensor((128, 64), T.bfloat16), b: T.Tensor((64, 64), T.bfloat16), c: T.Tensor((128, 64))):  # type: ignore
        with T.Kernel(1, threads=128) as _:
            a_tile, b_tile = T.alloc_shared((128, 64), T.bfloat16), T.alloc_shared((64, 64), T.bfloat16)
            total = T.alloc_fragment((128, 64), T.float32)
            T.copy(a, a_tile)
            T.copy(b, b_tile)
            T.clear(total)
            T.gemm(a_tile, b_tile, total, transpose_B=True)
            T.copy(total, c)

    made = lowering.compile_tilelang(wrong, {}, "sm_100a")
    assert made.has("HMMA") and not made.has(*TCGEN05) and not made.has(*TENSOR_MEMORY)


# ---- Ascend 950 ----


# Builders for cube cores: the products (of FP8 blocks with scales, or of bf16), whether a vector core expands
# operands beside them, and another call that must be there where the result does not just go to memory.
FP8, WIDE = r"ascend_blockscaled_gemm_l1<[^>]*, float8_e4m3_t,", r"[ ;]ascend_gemm_l1<[^>]*, bfloat16_t>"
CUBE = {
    "linear._mxfp8": (FP8, False, ""),
    "linear._plain": (WIDE, False, ""),
    "linear._group": (WIDE, True, ""),
    "moe._product": (FP8, True, ""),
    "attn._attend": (WIDE, True, "asc_copy_l0c2ub("),
    "index._scores": (FP8, True, "asc_copy_l0c2ub("),
    "draft._bias": (WIDE, False, "asc_set_atomic_add_float("),
}


def check_ascend(module: str, builder: Any, args: tuple[Any, ...], record: Any) -> None:
    source = lowering.ascend_source(lowering.program(module, builder, args)[0])
    record("characters", len(source))
    name = f"{module.split('.')[2]}.{builder.__name__}"
    if name not in CUBE:
        assert "__vector__" in source and ("asc_vf_call<" in source or "asc_copy_ub2gm_align(" in source)
        return
    product, expands, more = CUBE[name]
    assert {kind for kind in (FP8, WIDE) if re.search(kind, source)} == {product} and more in source
    assert expands == ("ASC_IS_AIV" in source) == ("asc_copy_ub2l1" in source)


@pytest.mark.parametrize("module, builder, args", builds(False, ASCEND))
def test_one_ascend_build_a_builder(module: str, builder: Any, args: Any, record_property: Any) -> None:
    check_ascend(module, builder, args, record_property)


@pytest.mark.sweep
@pytest.mark.parametrize("module, builder, args", builds(True, ASCEND))
def test_every_ascend_build(module: str, builder: Any, args: Any, record_property: Any) -> None:
    check_ascend(module, builder, args, record_property)


def test_spills_and_instructions_are_seen() -> None:
    """The report is read as ptxas writes it, and a missing instruction is missing."""
    text = "Used 168 registers\n 0 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads"
    assert lowering.usage(text) == (168, 24)
    made = lowering.Lowered("", "  HGMMA.64x8x16.F32.BF16 R4, gdesc ;", 8, 0)
    assert made.has("HGMMA", "QGMMA") and not made.has("UBLKCP")
