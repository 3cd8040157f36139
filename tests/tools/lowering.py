"""Compiles kernels for an architecture that is not here, and tells what is in their machine code."""

import functools
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2] / "dsv41" / "ops"


@dataclass(frozen=True)
class Lowered:
    """What a build became.

    Args:
        source: CUDA C++ (empty for Triton).
        sass: the machine code as text.
        registers: of the kernel that uses most.
        spills: bytes of registers stored to local memory.
    """

    source: str = field(repr=False)
    sass: str = field(repr=False)
    registers: int
    spills: int

    def has(self, *instructions: str) -> bool:
        """Whether one of the instructions occurs."""
        return any(re.search(rf"\b{name}\b", self.sass) for name in instructions)


def nvcc() -> Path | None:
    """The CUDA compiler: of the machine, or of the wheels ``nvidia-cuda-nvcc`` and its parts."""
    found = shutil.which("nvcc")
    if found:
        return Path(found)
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "bin" / "nvcc").exists():
            return Path(folder) / "bin" / "nvcc"
    return None


def cuobjdump() -> str | None:
    """The disassembler: of the machine, or the one inside Triton."""
    spec = importlib.util.find_spec("triton")
    if spec and spec.origin:
        inside = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        if inside.exists():
            return str(inside)
    return shutil.which("cuobjdump")


def files(toolchain: str) -> list[str]:
    """Modules of a toolchain's kernel files: "tilelang", "triton" (both CUDA) or "ascend"."""
    pattern = "*/tilelang_npu.py" if toolchain == "ascend" else f"*/{toolchain}*_cuda.py"
    found = sorted(HERE.glob(pattern))
    return [f"dsv41.ops.{path.parent.name}.{path.stem}" for path in found]


def all_variants(module: str, cfg: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """``[(builder, args)]`` of a kernel file."""
    return list(importlib.import_module(module).variants(cfg))


def program(module: str, builder: Any, args: tuple[Any, ...]) -> tuple[Any, dict[str, Any], str]:
    """The `T.prim_func` that a builder would compile, its pass configurations and its architecture ("" on
    Ascend).
    """
    loaded: Any = importlib.import_module(module)
    kept, caught = loaded.build, []

    def catch(func: Any, arch: str = "", **configs: Any) -> Any:
        caught.append((func, configs, arch))

    loaded.build = catch
    try:
        inspect.unwrap(builder)(*args)
    finally:
        loaded.build = kept
    (one,) = caught
    return one


def ascend_source(func: Any) -> str:
    """Ascend C of a TileLang program; needs neither CANN nor a device."""
    import tilelang
    from tilelang import tvm
    from tilelang.backend.target import determine_target

    target: Any = determine_target("asc", return_object=True)
    with tvm.transform.PassContext(opt_level=3), target:
        return tilelang.lower(func, target=target).kernel_source


@functools.cache
def lower_tilelang(module: str, builder: Any, args: tuple[Any, ...], arch: str | None = None) -> Lowered:
    """Compile one build of a TileLang kernel file with nvcc (for another architecture than its own too)."""
    func, configs, own = program(module, builder, args)
    return compile_tilelang(func, configs, arch or own)


def compile_tilelang(func: Any, configs: dict[str, Any], arch: str) -> Lowered:
    """Compile a TileLang program with nvcc."""
    import tilelang
    from tilelang import tvm
    from tilelang.backend.target import determine_target
    from tilelang.contrib import nvcc as options

    target: Any = determine_target({"kind": "cuda", "arch": arch}, return_object=True)
    passes = {getattr(tilelang.PassConfigKey, k).value: v for k, v in configs.items()}
    with tvm.transform.PassContext(opt_level=3, config=passes), target:
        source = tilelang.lower(func, target=target).kernel_source
    compiler = nvcc()
    assert compiler is not None, "no nvcc"
    with tempfile.TemporaryDirectory() as folder:
        file, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        file.write_text(source, "utf-8")
        command = [str(compiler), "--cubin", "-O3", f"-arch={arch}", *options.default_compile_options(["-w"])]
        command += [f"-I{compiler.resolve().parents[1] / 'include'}", "-Xptxas", "-v"]
        done = subprocess.run([*command, "-o", str(cubin), str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        report = done.stdout + done.stderr
        return Lowered(source, disassemble(cubin), *usage(report))


def lower_triton(module: str, index: int, arch: int = 90) -> Lowered:
    """Compile a variant of a Triton kernel file; those are (kernel, (signature, constants[, options]))."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from dsv41 import V41FlashConfig

    kernel, (signature, constants, *options) = all_variants(module, V41FlashConfig())[index]
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    order = {name: types[name] for name in kernel.arg_names}
    # As at run time: pointers are aligned, and so are rows.
    aligned = [i for i, n in enumerate(order) if types[n][0] == "*" or n.endswith(("stride", "stream"))]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    made = compile(
        ASTSource(kernel, signature=order, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", arch, 32),
        options=options[0] if options else None,
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        command = [cuobjdump() or "cuobjdump", "-res-usage", str(cubin)]
        report = subprocess.run(command, capture_output=True, text=True).stdout
        registers = max((int(n) for n in re.findall(r"REG:(\d+)", report)), default=0)
        local = max((int(n) for n in re.findall(r"(?:LOCAL|STACK):(\d+)", report)), default=0)
        return Lowered("", disassemble(cubin), registers, local)


def usage(report: str) -> tuple[int, int]:
    """Most registers and most bytes of spill stores in what ``ptxas -v`` says."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    return max(registers, default=0), max(spills, default=0)


def disassemble(cubin: Path) -> str:
    """Machine code as text."""
    tool = cuobjdump()
    assert tool is not None, "no cuobjdump"
    environment = {**os.environ, "PATH": f"{Path(tool).parent}:{os.environ.get('PATH', '')}"}
    done = subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    # python -m tests.tools.lowering MODULE ARCH: the builds of a Triton file, in a process of their own; for
    # another architecture than 90 one a kernel.
    import sys

    from dsv41 import V41FlashConfig

    seen: set[Any] = set()
    for number, (kernel, _) in enumerate(all_variants(sys.argv[1], V41FlashConfig())):
        if sys.argv[2] == "90" or kernel not in seen:
            made = lower_triton(sys.argv[1], number, int(sys.argv[2]))
            tcgen05 = made.has("UTCHMMA", "UTCQMMA")
            print(made.registers, made.spills, len(made.sass), int(tcgen05), kernel.fn.__name__)
        seen.add(kernel)
