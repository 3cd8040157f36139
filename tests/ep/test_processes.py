"""The same over gloo, between processes: 2 and 4 ranks, one that dies, one that is silent."""

import pytest
import torch

from tests.ep import jobs
from tests.ep.models import CFG
from tests.ep.processes import on_processes
from tests.ep.test_layers import STEPS, alone
from tests.ops.rows import same


@pytest.mark.parametrize("ranks, capacity", [(2, None), (4, CFG.top_k)])
def test_equals_one_rank_through_a_reshuffle(ranks: int, capacity: int | None) -> None:
    slots = CFG.num_experts + ranks
    results = on_processes(ranks, jobs.generate_with_a_reshuffle, slots, capacity, STEPS)
    moved = {layers for _, layers in results}
    assert len(moved) == 1 and moved.pop() >= 1
    for rank, (logits, _) in enumerate(results):
        assert same(torch.from_numpy(logits), alone(rank))


def test_a_rank_killed_during_a_transfer_is_named() -> None:
    """The others raise within the watchdog's time, with the old map and untouched weights."""
    timeout = 6.0
    results = on_processes(4, jobs.die_in_a_transfer, timeout)
    assert results[2] is None
    for rank in (0, 1, 3):
        kind, text, lost, seconds, old = results[rank]
        assert kind == "PeerLost" and lost == (2,) and "none of rank 2" in text
        assert seconds < timeout + 2 and old


def test_other_drivers_are_refused_by_name() -> None:
    want = "bench: expected the same on all 3 ranks, got driver '570' on rank 1 where most have '580'"
    assert on_processes(3, jobs.disagree) == [("ValueError", want)] * 3


def test_a_silent_rank_is_named() -> None:
    results = on_processes(3, jobs.stay_away)
    assert results[1] is None or results[1] == []
    for rank in (0, 2):
        assert results[rank][0] == "PeerLost" and "within 1 s, got none of rank 1" in results[rank][1]
