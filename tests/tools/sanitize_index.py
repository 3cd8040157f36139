"""Small calls of the indexer's kernels, for compute-sanitizer on a GPU:

compute-sanitizer --tool memcheck python -m tests.tools.sanitize_index
compute-sanitizer --tool racecheck python -m tests.tools.sanitize_index
"""

import torch

from tests.ops import test_index_hopper as index


def main() -> None:
    """Runs everything once; what it computes is tested elsewhere."""
    for together in (1, 6):
        index.Scene("mxfp4", index.ENTRIES, index.ROWS[6]).launch(40, together=together)
    scene = index.Scene("mxfp4", index.ENTRIES, index.ROWS[6])
    for together in (1, 4):
        _, blocks = scene.launch(32, together=together, blocks=20)
        scene.launch(32, candidates=blocks)
    rows = [(0, n) for n in (9000, 8999, 7000, 5000)]
    for together, count in ((6, 0), (1, 300)):
        index.Scene("mxfp4", [9000], rows).launch(512, together=together, blocks=count)
    index.run_topk(torch.randn(3, 9001), torch.tensor([9001, 5, 8000], dtype=torch.int32), 512)
    index.test_index_query()
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
