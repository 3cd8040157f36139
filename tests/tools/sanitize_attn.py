"""Small calls of the attention kernel and the cache writers, for compute-sanitizer on a GPU:

compute-sanitizer --tool memcheck python -m tests.tools.sanitize_attn
compute-sanitizer --tool racecheck python -m tests.tools.sanitize_attn
"""

import dataclasses

import torch

from dsv41 import ops, use
from tests.ops import test_compress_hopper as writers
from tests.ops.attn_cases import CASES, inputs

ATTENTION = ("three splits", "holes", "drafter", "rope")


def main() -> None:
    """Runs everything once; what it computes is tested elsewhere."""
    for name in ATTENTION:
        case = dataclasses.replace(CASES[name], tokens=3)
        args, keys = inputs(case, "cuda")
        with use("tilelang_cuda"):
            ops.sparse_attn(*args, **keys, num_splits=case.splits)
    for layout, dim in (("mxfp8", 512), ("nvfp4", 512), ("mxfp4", 128), ("v4", 512), ("bf16", 512)):
        writers.test_write_cache(layout, dim, layout != "nvfp4", True)
    for trial in range(4):
        writers.test_pairs(trial)
    writers.test_copy_records(528)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
