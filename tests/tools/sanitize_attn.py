"""Small calls of the attention kernel and the cache writers, for compute-sanitizer on a GPU:

compute-sanitizer --tool memcheck python -m tests.tools.sanitize_attn
compute-sanitizer --tool racecheck python -m tests.tools.sanitize_attn racecheck

All data comes from the CPU: PyTorch's own kernels would take the tools minutes. Racecheck does not know three
things, so for it the kernel is built without them: __syncwarp orders what the other lanes did before one lane
arrives at a barrier; a cluster's barrier does not wait for warps that have ended; what cp.async wrote is
there behind its wait, also for other blocks of the cluster. Each of the three makes it name places on an
H200; the emulator of the tests checks the copies' waits.
"""

import dataclasses
import re
import sys
import time
from typing import Any

import torch

from dsv41 import ops, use
from dsv41.cache import PagedKV
from dsv41.ops.attn import tilelang_cuda
from tests.ops import test_compress_hopper as writers
from tests.ops.attn_cases import CASES, inputs

ATTENTION = ("three splits", "drafter", "rope")


def to_gpu(x: Any) -> Any:
    """The same on the GPU; what is not a tensor as it is."""
    if isinstance(x, PagedKV):
        return PagedKV(x.pages.cuda(), x.record)
    if isinstance(x, tuple):
        return tuple(map(to_gpu, x))
    return x.cuda() if isinstance(x, torch.Tensor) else x


def racecheck_source(source: str) -> str:
    """The attention kernel for racecheck: every lane arrives at warps' barriers, every warp at a cluster's
    (the kernel's own producers have ended there), and copies are loads and stores.
    """
    stored = "*static_cast<uint4*>(dst) = valid ? *static_cast<const uint4*>(src) : make_uint4(0, 0, 0, 0);"
    source, found = re.subn(r"(void copy_16\(.*?\{).*?;\n\}", rf"\1\n  {stored}\n}}", source, flags=re.S)
    assert found == 1
    for old, new in (
        ("constexpr int ARRIVING = 1;", "constexpr int ARRIVING = 32;"),
        ("producer.run();", "producer.run();\n    if (CLUSTER > 1) cluster_barrier(), cluster_barrier();"),
    ):
        assert old in source
        source = source.replace(old, new)
    return source


def all_arrive() -> None:
    """From here on the kernel is built for racecheck."""
    every = racecheck_source(tilelang_cuda._source())
    tilelang_cuda._source = lambda: every


def main() -> None:
    """Runs everything once; what it computes is tested elsewhere."""
    start = time.time()
    if "racecheck" in sys.argv:
        all_arrive()
    for name in ATTENTION:
        case = dataclasses.replace(CASES[name], tokens=2, near=66, far=70, missing=0.1)
        args, keys = inputs(case, "cpu")
        with use("tilelang_cuda"):
            ops.sparse_attn(*to_gpu(args), **{k: to_gpu(x) for k, x in keys.items()}, num_splits=case.splits)
        torch.cuda.synchronize()
        print(f"sparse_attn: {name}, {time.time() - start:.0f} s", flush=True)
    for layout, dim in (("mxfp8", 512), ("nvfp4", 512), ("mxfp4", 128), ("v4", 512), ("bf16", 512)):
        writers.test_write_cache(layout, dim, layout != "nvfp4", True)
    for trial in range(4):
        writers.test_pairs(trial)
    writers.test_copy_records(528)
    print(f"done, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
