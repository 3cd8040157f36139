"""Do the ranks agree? Versions, sizes and maps are compared before rows travel."""

import json
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.cuda.nccl

from ..._version import __version__
from .transport import Transport


def facts() -> dict[str, str]:
    """What must be the same on every rank: library, torch, CUDA, NCCL and driver versions, and the device."""
    found = {
        "dsv41": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        found["driver"] = driver.read_text().splitlines()[0].strip()
    return found


def agree(name: str, transport: Transport, mine: Mapping[str, str], timeout: float = 60.0) -> None:
    """Check that every rank says the same.

    Args:
        name: who asks, for the sentence.
        transport: the ranks; all of them must call.
        mine: facts of this rank by name.
        timeout: seconds to wait for the others.

    Errors: ValueError on every rank that names the ranks that differ from most, and in what; `PeerLost`.
    """
    said = [json.loads(answer) for answer in transport.gather(json.dumps(dict(mine)).encode(), timeout)]
    problems = []
    for key in sorted({k for facts_of in said for k in facts_of}):
        values = [facts_of.get(key, "nothing") for facts_of in said]
        # The first of the most frequent values is what the others are measured by.
        common = Counter(values).most_common(1)[0][0]
        problems += [
            f"{key} {value!r} on rank {r} where most have {common!r}"
            for r, value in enumerate(values)
            if value != common
        ]
    if problems:
        raise ValueError(
            f"{name}: expected the same on all {transport.size} ranks, got {'; '.join(problems)}"
        )
