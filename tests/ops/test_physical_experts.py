"""The lookup op equals `dsv41.eplb.dispatch` to the bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.eplb import dispatch, equal_shares, rebalance_experts, to_table
from dsv41.ops import physical_experts


def tables(seed: int) -> tuple[np.ndarray, np.ndarray]:
    load = np.random.default_rng(seed).lognormal(0, 1, (1, 16))
    physical, _, _ = rebalance_experts(load, 24, 1, 1, 4)
    return physical, to_table(equal_shares(physical, 16), physical, 16)[0]


@settings(max_examples=50)
@given(st.integers(0, 5), st.integers(0, 40), st.integers(1, 6), st.integers(0, 2**20), st.integers(0, 1000))
def test_equals_the_numpy_oracle(seed: int, tokens: int, top_k: int, step: int, source: int) -> None:
    _, table = tables(seed)
    ids = np.random.default_rng(step).integers(-1, 16, (tokens, top_k)).astype(np.int32)
    got = physical_experts(torch.from_numpy(ids), torch.from_numpy(table), source=source, step=step)
    assert np.array_equal(got.numpy(), dispatch(ids, table, source, step))


def test_every_slot_holds_the_expert_that_was_asked_for() -> None:
    physical, table = tables(3)
    ids = torch.randint(0, 16, (200, 4), dtype=torch.int32)
    slots = physical_experts(ids, torch.from_numpy(table), source=1)
    assert torch.equal(torch.from_numpy(physical[0])[slots.long()], ids.long())


def test_wrong_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    _, table = tables(0)
    good, ids = torch.from_numpy(table), torch.zeros((1, 1), dtype=torch.int32)
    with pytest.raises(ValueError, match="entries a power of two"):
        physical_experts(ids, good[:, :48].contiguous(), source=0)
    with pytest.raises(ValueError, match="source: an integer of 0 to 2147483647, got -1"):
        physical_experts(ids, good, source=-1)
    assert physical_experts(ids + 99, good, source=0).tolist() == [[-1]]
    monkeypatch.setenv("DSV41_CHECK", "1")
    with pytest.raises(ValueError, match="expert_ids: below 16, got 99"):
        physical_experts(ids + 99, good, source=0)
