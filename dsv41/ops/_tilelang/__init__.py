"""What the TileLang kernel files share: compiling for a named architecture, and CUDA device functions.

A kernel whose speed needs registers laid out by hand (measured: see docs/ops/moe.md) is a TileLang kernel
around one device function from a ``.cuh`` file beside it. These functions use only ``hopper.cuh`` and plain
CUDA C++, so that the tests run them on a CPU.

Kernels of little work begin with ``T.pdl_sync(); T.pdl_trigger()``: they may be launched before the one in
front of them has ended, wait there for its end, and let the one behind them be launched.
"""

from pathlib import Path
from typing import Any

import torch

from ..._op import Target

HERE = Path(__file__).parent


def arch_of(x: torch.Tensor) -> str:
    """The architecture to compile for where ``x`` is: "sm_90a"."""
    return f"sm_{Target.of(x).arch}a"


def build(func: Any, arch: str, **pass_configs: Any) -> Any:
    """A TileLang program compiled for an architecture ("sm_90a"); on a machine without a GPU too."""
    import tilelang

    configs = {getattr(tilelang.PassConfigKey, name): value for name, value in pass_configs.items()}
    return tilelang.compile(
        func,
        target={"kind": "cuda", "arch": arch},
        execution_backend="tvm_ffi",
        pass_configs=configs,
        compile_flags=["-w"],
    )


def device_source(*files: Path, wgmma: dict[str, tuple[int, ...]] | None = None) -> str:
    """The text that a kernel imports: ``hopper.cuh``, the wgmma instructions it uses, its own files.

    Args:
        files: ``.cuh`` files, in order.
        wgmma: operation ("bf16_rs", "bf16_ss", "bf16_ss_t", "e4m3_rs", "e4m3_ss", "e5m2_rs", "e5m2e4m3_rs")
            to the widths N it uses. ``_t``: the second operand is MN-major. Two types: of the operands.
    """
    parts = [(HERE / "hopper.cuh").read_text("utf-8")]
    parts += [wgmma_source(op, widths) for op, widths in (wgmma or {}).items()]
    parts += [file.read_text("utf-8") for file in files]
    return "\n".join(parts).replace("#pragma once\n", "")


def wgmma_source(op: str, widths: tuple[int, ...]) -> str:
    """``hopper::wgmma_<op>(d, a, b, accumulate)`` for each width: one overload an accumulator size."""
    dtype, source, *transposed = op.split("_")
    k = 16 if dtype in ("bf16", "f16") else 32
    kind = f"{dtype[:4]}.{dtype[-4:]}"
    flags = ", 1, 1" + (
        "" if k == 32 else f", {int(bool(transposed))}" if source == "rs" else f", 0, {int(bool(transposed))}"
    )
    lines = ["#ifndef DSV41_EMULATE  // emu_hopper.h has templates for every width", "namespace hopper {"]
    for n in widths:
        count = n // 2
        d = ", ".join(f"%{i}" for i in range(count))
        if source == "rs":
            a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
            inputs, after = "const uint32_t (&a)[4]", count + 4
            operands = ", ".join(f'"r"(a[{i}])' for i in range(4))
        else:
            a, inputs, after, operands = f"%{count}", "uint64_t a", count + 1, '"l"(a)'
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        lines.append(
            f"__device__ __forceinline__ void wgmma_{op}(float (&d)[{count}], {inputs}, uint64_t b,"
            f" int accumulate) {{\n"
            f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after + 1}, 0;\\n"\n'
            f'    "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind} {{{d}}}, {a}, %{after},'
            f' p{flags};\\n}}\\n"\n'
            f'    : {outputs}\n    : {operands}, "l"(b), "r"(accumulate));\n}}'
        )
    return "\n".join([*lines, "}  // namespace hopper", "#endif"])
