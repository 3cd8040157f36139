"""Small calls of the indexer's kernels, for compute-sanitizer on a GPU:

compute-sanitizer --tool memcheck python -m tests.tools.sanitize_index
compute-sanitizer --tool racecheck python -m tests.tools.sanitize_index racecheck

Racecheck takes what a warp did after its n-th barrier for earlier than what another one did after its n+1-th,
also when groups of warps have met at barriers of their own, some more often than others. It follows
mbarriers: for it, the parts of a block meet at those, in the same places.
"""

import sys

import torch

from dsv41.ops.index import tilelang_cuda
from tests.ops import test_index_hopper as index

MEETING = """
namespace racecheck {
__device__ __forceinline__ uint64_t* of(int id) {
  __shared__ uint64_t barriers[16];
  return barriers + id;
}
__device__ __forceinline__ void init(int tid) {
  if (tid < 16) hopper::barrier_init(of(tid), 128);
}
__device__ __forceinline__ void meet(int id, int) {
  uint64_t state;
  const uint32_t bar = hopper::smem_address(of(id));
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(bar) : "memory");
  asm volatile(
      "{\\n.reg .pred done;\\n"
      "again:\\n mbarrier.try_wait.shared::cta.b64 done, [%0], %1;\\n"
      "@done bra ready;\\n bra again;\\nready:\\n}\\n" ::"r"(bar), "l"(state) : "memory");
}
__device__ __forceinline__ bool any(int id, int threads, bool mine) {
  __shared__ int said[16];
  if (threadIdx.x % 128 == 0) said[id] = 0;
  meet(id, threads);
  if (mine) atomicOr(&said[id], 1);
  meet(id, threads);
  const bool found = atomicOr(&said[id], 0) != 0;
  meet(id, threads);
  return found;
}
}  // namespace racecheck

"""


def meet_at_mbarriers() -> None:
    """From here on the kernels are built for racecheck."""
    source = tilelang_cuda.source
    changes = {
        "hopper::named_barrier(": "racecheck::meet(",
        "hopper::named_barrier_any(": "racecheck::any(",
        "namespace choose {": MEETING + "namespace choose {",
        "if (tid == 0) share->unit = -1;": "if (tid == 0) share->unit = -1;\n  racecheck::init(tid);",
    }

    def changed(*files: str, **more: tuple[int, ...]) -> str:
        text = source(*files, **more)
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        return text

    tilelang_cuda.source = changed


def main() -> None:
    """Runs everything once; what it computes is tested elsewhere."""
    if "racecheck" in sys.argv:
        meet_at_mbarriers()
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
