"""One JSON line a measurement, with where it was taken."""

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .._op import check

# Modules whose version a row tells if they are loaded: compilers and peers.
LIBRARIES = ("tilelang", "triton", "deep_gemm", "flash_mla", "humming", "tile_kernels", "triton_kernels")


def environment() -> dict[str, str]:
    """Device, versions (also of the libraries that are loaded) and commit of this run."""
    loaded = {name: sys.modules[name] for name in LIBRARIES if name in sys.modules}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {_cpu_name()}"
    return {
        "device": device,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: str(getattr(module, "__version__", "unknown")) for name, module in loaded.items()},
        "commit": _commit(),
    }


def append(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Append measurements to a JSON-lines file, each with `environment`."""
    here = environment()
    with Path(path).open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **here}) + "\n")


def read(name: str, path: str | Path, lines: bool = False) -> Any:
    """What a JSON file holds, or the objects on its ``lines``; ``name`` is the command that refuses it."""
    found: Any = None
    try:
        text = Path(path).read_text("utf-8")
        found = (
            [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
        )
        good = not lines or (found and all(isinstance(row, dict) for row in found))
        got = "other values" if found else "nothing"
    except (OSError, ValueError) as error:
        good, got = False, str(error)
    check(bool(good), name, f"JSON{' objects, one a line,' if lines else ''} in {path}", got)
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str:
    root = Path(__file__).parents[2]
    try:
        git = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


TIMED = ("us", "TBps", "TFLOPs", "GBps", "least_us", "share", "speedup", "ratio")


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row of a right result (its ``parity``, or a distance within its bound that repeats), and of another
    one without what was timed.
    """
    if "parity" in row:
        good = row["parity"]
    else:
        good = (row["distance"] is None or row["distance"] < row["bound"]) and row["repeat"]
    return row if good else {k: v for k, v in row.items() if k not in TIMED}


def status(rows: list[dict[str, Any]]) -> int:
    """What a benchmark exits with: 0 when something was measured and every result was right, 1 otherwise."""
    if not rows:
        print("nothing was measured: no case has these sizes or names")
    return int(not rows or not all("us" in row for row in rows))
