"""The same between GPUs, over NCCL: two ranks and, where there are as many, four."""

import pytest
import torch

from tests.ep import jobs
from tests.ep.models import GPU_CFG
from tests.ep.processes import on_processes

GPUS = torch.cuda.device_count()
STEPS = 3
ranks_of_gpus = pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=pytest.mark.skipif(n > GPUS, reason=f"needs {n} GPUs")) for n in (2, 4)],
)


@ranks_of_gpus
def test_equals_one_gpu_through_a_reshuffle_and_an_overflow(ranks: int) -> None:
    found = on_processes(ranks, jobs.equal_on_gpus, STEPS, backend="nccl")
    for told in found:
        assert isinstance(told, dict), told
        assert told["moved layers"] >= 1 and told["reshuffled"], told
        assert sum(told["lost"]) > 0 and told["lost"] == found[0]["lost"] and told["repeated"], told


@ranks_of_gpus
def test_a_rank_killed_during_a_transfer_is_named(ranks: int) -> None:
    """The others raise within the watchdog's time, and their stream does not wait for the dead."""
    timeout, dead = 6.0, min(2, ranks - 1)
    results = on_processes(ranks, jobs.die_in_a_transfer, timeout, GPU_CFG, "cuda", backend="nccl")
    assert results[dead] is None
    for rank in set(range(ranks)) - {dead}:
        kind, text, lost, seconds, old = results[rank]
        assert kind == "PeerLost" and lost == (dead,) and f"none of rank {dead}" in text, results[rank]
        assert seconds < timeout + 2 and old, results[rank]
