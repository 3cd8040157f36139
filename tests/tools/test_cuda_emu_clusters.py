"""Blocks of a cluster in the emulator: what reaches another block, and the barriers that are missing."""

import pytest
import torch

from dsv41.ops._tilelang import HERE, device_source
from tests.tools.cuda_emu import SHARED, EmulationError, available, emulate

pytestmark = pytest.mark.skipif(not available(), reason="needs g++")
# Each block's threads write their number to shared memory; the last warp ends early. Then each block gets 16
# bytes of the others, and adds them up.
SOURCE = """
__device__ void body(float* out, uint8_t* shared) {
  const int t = threadIdx.x, rank = blockIdx.x % 3;
  float* own = reinterpret_cast<float*>(shared);
  own[t] = 1000 * blockIdx.x + t;
  if (t >= 32) return;
  hopper::cluster_barrier();  // places are free
  const float4 v = make_float4(blockIdx.x, rank, t, 1);
  if (t < 3) hopper::cluster_store(hopper::cluster_address(shared + 16 * rank, t), v);
  hopper::cluster_barrier();  // all is there
  if (t < 4) out[blockIdx.x * 4 + t] = own[t] + own[4 + t] + own[8 + t];
}
"""


def run(source: str) -> torch.Tensor:
    out = torch.zeros(6, 4)
    text = device_source(HERE / "hopper_cluster.cuh") + source
    emulate(text, "body", [out, SHARED], grid=6, threads=64, shared_bytes=512, cluster=3)
    return out


def test_blocks_of_a_cluster_reach_each_other() -> None:
    want = [[b // 3 * 9 + 3, 3, 3 * (b % 3), 3] for b in range(6)]
    assert run(SOURCE).tolist() == want


@pytest.mark.parametrize(
    "gone, message",
    [
        ("hopper::cluster_barrier();  // places are free", "after a write by"),
        ("hopper::cluster_barrier();  // all is there", "in flight"),
    ],
)
def test_a_missing_barrier_is_found(gone: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        run(SOURCE.replace(gone, ""))


def test_a_block_that_does_not_come_is_found() -> None:
    alone = "if (rank == 0) hopper::named_barrier(1, 64); else hopper::cluster_barrier();"
    with pytest.raises(EmulationError, match=r"deadlock(.|\n)*named_barrier"):
        run(SOURCE.replace("hopper::cluster_barrier();  // all is there", alone))


def test_places_are_checked() -> None:
    with pytest.raises(EmulationError, match="block 4 of 3"):
        run(SOURCE.replace("16 * rank, t)", "16 * rank, t + 4)"))
    with pytest.raises(EmulationError, match=r"shared memory \+ 512"):
        run(SOURCE.replace("shared + 16 * rank, t)", "shared + 16 * rank, t) + 512 - 16 * rank"))
