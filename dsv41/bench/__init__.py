"""``python -m dsv41 bench <part>``: cases and timing. Speed is reported, never asserted."""

import argparse
import importlib
import math
import sys
from pathlib import Path

from .._op import check

PARTS = {
    "cpu": "tokens a second of the incremental model on this CPU",
    "budget": "draft budgets against a fixed number of drafts, simulated",
    "moe": "MXFP4 experts of a layer on a CUDA device",
    "throughput": "tokens a second with drafts, for measured and assumed acceptance",
    "replay": "bounded replay: rows, FLOPs and time",
    "attn": "sparse attention on a GPU, beside FlashMLA",
    "linear": "block-scaled linears on a CUDA device, beside bf16 products",
    "ep": "expert parallel over the ranks of torchrun, on GPUs or CPUs",
    "quant": "quantising ops on a CUDA device",
    "eplb": "expert placements: imbalance, movement and planning time",
    "step": "prefill and decode of one EP8 rank's share, op by op against its roofline",
    "rows": "mHC, Engram, router and budget split on a CUDA device, beside DeepGEMM and TileKernels",
    "memory": "what a rank's share allocates on a CUDA device, beside its plan",
    "index": "index scores and selection on a CUDA device, beside DeepGEMM and torch.topk",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command a part; only the chosen part is imported."""
    parts = parser.add_subparsers(dest="part_name", required=True, metavar="{" + ",".join(PARTS) + "}")
    chosen = next((a for a in sys.argv[2:] if a in PARTS), None)
    for name, text in PARTS.items():
        part = parts.add_parser(name, help=text, description=text)
        if name == chosen:
            importlib.import_module(f"{__name__}.{name}").add_arguments(part)


MAY_BE_0 = ("prefill", "replay", "keep", "seed", "acceptance", "host_gb", "engram_gb")


def run(args: argparse.Namespace) -> int:
    """Run the chosen part; returns its exit code. Numbers and places of results are looked at first."""
    name = f"bench {args.part_name}"
    for label, value in vars(args).items():
        option, least = f"--{label.replace('_', '-')}", 0 if label in MAY_BE_0 else 1
        for x in value if isinstance(value, list) else [value]:
            if isinstance(x, int | float) and not isinstance(x, bool):
                check(least <= x < math.inf, name, f"{option} of {least} or more", x)
        if label in ("json", "writers_json", "plot") and value is not None:
            place = Path(str(value))
            check(place.parent.is_dir() and not place.is_dir(), name, f"{option}: a file to write", value)
    return importlib.import_module(f"{__name__}.{args.part_name}").run(args)
