"""Ascend kernels between the large products, run from the emitted Ascend C: the tests of the Triton ones."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ops import test_step_kernels as steps
from tests.spec import test_verify_kernels as drafts
from tests.tools import ascend_emu

pytest.importorskip("tilelang")
if not ascend_emu.available():
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(autouse=True)
def on_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels that those tests call are the emulated ones."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def kernels(family: str) -> Any:
            return stack.enter_context(ascend_emu.emulated(f"dsv41.ops.{family}.tilelang_npu"))

        kernels("norm_rope")  # a part of the boundary
        monkeypatch.setattr(steps, "kernels", kernels)
        monkeypatch.setattr(steps.triton_interp, "interpret", lambda name, *_: kernels(name.split(".")[2]))
        monkeypatch.setattr(drafts, "drafting", lambda: kernels("draft"))
        yield


@pytest.mark.emulates("split_budget_ragged")
@pytest.mark.parametrize("trial", [11, 24, 25])
def test_split(trial: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts.test_split(trial, monkeypatch)


@pytest.mark.emulates("mhc_mixes")
@pytest.mark.parametrize("tokens, hidden", [(5, 128), (600, 32)])
def test_mixes(tokens: int, hidden: int) -> None:
    steps.test_mixes(tokens, hidden)


@pytest.mark.emulates("mhc_boundary")
def test_boundary() -> None:
    steps.test_the_boundary_is_the_ops_one_after_the_other()


@pytest.mark.emulates("mhc_collapse", "mhc_expand")
@pytest.mark.parametrize("streams, hidden", [(4, 96), (2, 1100)])
def test_collapse_and_expand(streams: int, hidden: int) -> None:
    steps.test_collapse_and_expand(streams, hidden)


@pytest.mark.emulates("topk_route")
@pytest.mark.parametrize("experts, top_k", [(384, 6), (12, 4)])
def test_route(experts: int, top_k: int) -> None:
    steps.test_route(experts, top_k)


PHYSICAL = pytest.mark.emulates("physical_experts")


@pytest.mark.parametrize("tokens", [0, *(pytest.param(n, marks=PHYSICAL) for n in (1, 700))])
def test_physical(tokens: int) -> None:
    steps.test_physical(tokens)


@pytest.mark.parametrize("cut", steps.CUTS)
def test_hash(cut: Any) -> None:
    steps.test_hash(cut, torch.int32)


@pytest.mark.emulates("engram_hash")
def test_hash_of_int64() -> None:
    steps.test_hash(steps.CUTS[0], torch.int64)


@pytest.mark.emulates("engram_lookup")
@pytest.mark.parametrize("width", [256])
def test_lookup(width: int) -> None:
    steps.test_lookup(width)


@pytest.mark.emulates("engram_gate")
@pytest.mark.parametrize("tokens, streams, hidden", [(40, 2, 96)])
def test_gate(tokens: int, streams: int, hidden: int) -> None:
    steps.test_gate(tokens, streams, hidden)
