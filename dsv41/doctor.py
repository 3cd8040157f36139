"""``python -m dsv41 doctor``: what this machine has, the kernel every op would take, and what is missing.

Exit status: 0 when every op has a kernel on every device that was looked at (the reference on a CPU), 1 when
one has none. ``--one-rank`` leaves the ops between ranks out.
"""

import argparse
import importlib.metadata
import json
import platform
import shutil
from dataclasses import replace
from typing import Any

import torch

from . import __version__
from ._op import Target, _installed, _target, check, compiler_found, ops
from .config import V41FlashConfig
from .support import MISSING

# Package (or program): (distributions that bring it, what to install, what it is for).
PACKAGES = {
    "tilelang": (("tilelang",), "pip install 'dsv41[cuda]' (on Ascend: 'dsv41[npu]')", "most kernels"),
    "triton": (("triton",), "pip install 'dsv41[cuda]'", "portable CUDA kernels"),
    "nvcc": (
        ("nvidia-cuda-nvcc",),
        "a CUDA toolkit on PATH, or pip install nvidia-cuda-nvcc",
        "compiles TileLang kernels",
    ),
    "torch_npu": (("torch-npu",), "pip install 'dsv41[npu]'", "torch on Ascend"),
    "deep_gemm": (("deep-gemm", "deep_gemm"), "from its sources", "adapters: linears, experts, index scores"),
    "flash_mla": (("flash-mla", "flash_mla"), "from its sources", "adapter: attention"),
    "deep_ep": (("deep-ep", "deep_ep"), "from its sources", "adapters: exchange, Engram rows of other ranks"),
    "numba": (("numba",), "pip install 'dsv41[eplb]'", "compiled loops of dsv41.eplb"),
    "tokenizers": (("tokenizers",), "pip install 'dsv41[text]'", "python -m dsv41 demo"),
    "xgrammar": (("xgrammar",), "pip install 'dsv41[grammar]'", "grammars for apply_token_bitmask"),
}
_ACCELERATOR = {"cuda": ("tilelang", "triton", "nvcc"), "npu": ("tilelang", "torch_npu"), "cpu": ()}


def parse_target(text: str) -> Target:
    """A target by name: ``cpu``, ``npu``, ``rocm``, ``cuda:90`` (the architecture behind the colon).

    Errors: ValueError for anything else.
    """
    device, _, arch = text.partition(":")
    known = arch.isascii() and arch.isdigit() and len(arch) < 4 and int(arch) > 0
    good = text in ("cpu", "npu", "rocm") or (device == "cuda" and known)
    check(good, "doctor", "target: cpu, npu, rocm or cuda:<architecture> (cuda:90, cuda:100)", text)
    return Target(device, int(arch) if arch else None)


def present_targets() -> dict[str, Target]:
    """Targets of the accelerators that torch sees here, by what to print; the CPU where there is none."""
    found: dict[str, Target] = {}
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            size = properties.total_memory / 2**30
            target = _target("cuda", i)
            kind = "ROCm" if target.arch is None else f"sm{target.arch}"
            found[f"cuda:{i} {properties.name}, {size:.1f} GiB, {kind}"] = target
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        found |= {f"npu:{i} {npu.get_device_name(i)}": Target("npu") for i in range(npu.device_count())}
    return found or {"no accelerator; ops run their PyTorch reference": Target("cpu")}


def diagnose(
    target: Target, cfg: V41FlashConfig | None = None, one_rank: bool = False
) -> list[dict[str, Any]]:
    """A row an op: the kernel that takes it on ``target``, None for none, and every refusal's reason.

    Args:
        target: where; any `Target`.
        cfg: look at the calls of this model's prefill and decode steps, whose shapes and layouts a kernel can
            refuse (about ten seconds for V4.1-Flash). None asks for the device and packages only.
        one_rank: leave out the ops of the exchange between ranks.
    """
    rows = []
    asked = {name: [None] for name in sorted(ops())} if cfg is None else _calls(target, cfg)
    if one_rank:
        asked = {
            name: calls for name, calls in asked.items() if not ops()[name].package.endswith(".exchange")
        }
    for name, calls in asked.items():
        chosen: list[str | None] = []
        reasons: dict[str, dict[str, None]] = {}  # a kernel may be a candidate twice, for two architectures
        for args in calls:
            candidates = ops()[name].explain(target, args)
            chosen.append(next((kernel for kernel, reason in candidates if reason is None), None))
            for kernel, reason in candidates:
                if reason and kernel != "torch":
                    reasons.setdefault(kernel, {})[reason] = None
        kernels = [k for k in dict.fromkeys(chosen) if k is not None]
        whole = None not in chosen
        refused = {kernel: "; or ".join(why) for kernel, why in reasons.items()}
        rows.append({"op": name, "kernel": ", ".join(kernels) if whole else None, "refused": refused})
    return rows


def _calls(target: Target, cfg: V41FlashConfig) -> dict[str, list[Any]]:
    """Arguments of every different call of a step, by op; those of an expert exchange are not among them."""
    from .warm import calls

    found: dict[str, list[Any]] = {}
    for op, args in calls(cfg, cfg.num_experts, 64, 4096, True):
        if op.name == "mxfp4_moe" and target == Target("cuda", 90, target.packages):
            args = (*args[:8], "hopper", *args[9:])  # there, model.pack() comes before the first step
        found.setdefault(op.name, []).append(args)
    return dict(sorted(found.items()))


def versions() -> dict[str, str]:
    """What is installed, by name; ``-`` for what is not."""
    found = {"dsv41": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["torch's CUDA"] = torch.version.cuda
    for package, (distributions, _, _) in PACKAGES.items():
        found[package] = _version(package, distributions)
    return found


def _version(package: str, distributions: tuple[str, ...]) -> str:
    if not _installed(package):
        return "-"
    if package == "nvcc" and not compiler_found():
        return "found by TileLang, or kernels in its cache"
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return shutil.which(package) or "installed"


def missing(target: Target) -> list[str]:
    """A line for every package that kernels of this device need and that is not installed."""
    lines = []
    for package in _ACCELERATOR.get(target.device, ()):
        if not target.has(package):
            _, install, use = PACKAGES[package]
            lines.append(f"{package} ({use}): {install}")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `doctor`."""
    parser.epilog = (
        "exit status: 0 when every op has a kernel on every device that was looked at (here or the"
        " --target), 1 when one has none (NONE in the table)"
    )
    parser.add_argument("--target", help="cpu, npu, cuda:90, cuda:100: ask about a machine that is not here")
    parser.add_argument(
        "--installed", action="store_true", help="with --target: as if every package were installed"
    )
    parser.add_argument(
        "--model", action="store_true", help="the calls of a V4.1-Flash step: shapes can be refused as well"
    )
    parser.add_argument(
        "--one-rank", action="store_true", help="leave out the ops of the exchange between ranks"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when an op has no kernel on a device that is here or that was asked for, else 0."""
    made_up = args.target is not None
    check(made_up or not args.installed, "doctor", "--target with --installed", "--installed alone")
    targets = {f"asked for: {args.target}": parse_target(args.target)} if made_up else present_targets()
    if args.installed:
        targets = {name: replace(t, packages=frozenset(PACKAGES)) for name, t in targets.items()}
    cfg = V41FlashConfig.flash() if args.model else None
    reports = {name: diagnose(target, cfg, args.one_rank) for name, target in targets.items()}
    bare = any(row["kernel"] is None for rows in reports.values() for row in rows)
    if args.json:
        needed = {name: missing(target) for name, target in targets.items()}
        print(json.dumps({"versions": versions(), "targets": reports, "missing": needed}))
        return int(bare)
    print(f"platform      {platform.platform()}")
    for name, version in versions().items():
        print(f"{name:<14}{version}")
    for name, target in targets.items():
        print(f"\n{name}\n")
        print("\n".join(_lines(reports[name], target)))
        needed = missing(target)
        print("".join(f"\nmissing: {line}" for line in needed), end="\n" if needed else "")
    if bare:
        print("\nAn op without a kernel raises Unsupported; dsv41.use('torch') asks for its reference.")
    return int(bare)


def _lines(rows: list[dict[str, Any]], target: Target) -> list[str]:
    """``op  kernel  reasons`` in columns; kernels of other devices are not worth a word."""
    table = []
    for row in rows:
        reasons = [
            f"{kernel}: {reason}"
            for kernel, reason in row["refused"].items()
            if not reason.startswith("built for") or reason.startswith("built for sm")
        ]
        if row["kernel"] is None and not reasons:
            everything = [f"{kernel}: {reason}" for kernel, reason in row["refused"].items()]
            known = MISSING.get(row["op"]) if target.device == "npu" else None
            reasons = [known] if known else everything or ["no kernel"]
        chosen = "torch (reference)" if row["kernel"] == "torch" else row["kernel"] or "NONE"
        table.append((row["op"], chosen, "; ".join(reasons)))
    first, second = (max(len(cells[i]) for cells in table) + 2 for i in (0, 1))
    return [f"{op:<{first}}{kernel:<{second}}{why}".rstrip() for op, kernel, why in table]
