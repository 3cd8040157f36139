"""Branches of a captured step: who waits for whom, and that no result is used before it is there."""

import contextlib
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate

from dsv41.layers import V41State, beside, block, model, moe, state
from dsv41.spec import DecodeGraphs
from tests import models

MODULES = (block, model, moe, state)


class Late:
    """A branch that runs when it is waited for, behind earlier ones of its lane: as late as a graph may."""

    pending: dict[int, list["Late"]]

    def __init__(self, call: Callable[[], Any], like: torch.Tensor, lane: int):
        self.call, self.lane, self.result = call, lane, None
        Late.pending.setdefault(lane, []).append(self)

    def wait(self) -> Any:
        waiting = Late.pending[self.lane]
        while self in waiting:
            first = waiting.pop(0)
            first.result = first.call()
        return self.result


def decode(drafter: bool, steps: int = 4) -> list[torch.Tensor]:
    """Results of a few steps of two requests, and what their caches hold afterwards."""
    shared = models.drafting_model("micro") if drafter else models.model("micro")
    caches = V41State.allocate(shared.cfg, 2, 64, block=8, drafter=drafter)
    ids = models.text("micro", 23)
    cu = torch.tensor([0, 14, 23], dtype=torch.int32)
    place = torch.cat([models.positions(0, 14), models.positions(0, 9)])
    graphs = DecodeGraphs(shared, caches, drafter=shared.mtp if drafter else None)
    with accumulate(torch.float64):
        logits = shared(ids, place, caches, cu_seqlens=cu, rows=cu[1:].long() - 1)
        for request, (length, first) in enumerate(zip((14, 9), logits.argmax(1).tolist(), strict=True)):
            graphs.admit(request, first, length=length, left=30)
        found = [logits]
        for _ in range(steps):
            graphs.step().read()
            found.append(graphs.results.clone())
    pools = [c.pages for c in (*caches.windows, *caches.compressed.values(), *caches.index_keys.values())]
    return [*found, caches.lens, caches.tokens, *caches.carry.values(), *pools]


@pytest.mark.parametrize("drafter", [False, True])
def test_branches_may_run_as_late_as_they_are_waited_for(
    drafter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, Late.pending = decode(drafter), {}
    for module in MODULES:
        monkeypatch.setattr(module, "beside", Late)
    got = decode(drafter)
    assert set(Late.pending) == {beside.SHORT, beside.LONG}
    assert not any(Late.pending.values()), "a branch that nobody waits for"
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "where, what",
    [(block.Block, "cross"), (moe.MoE, "forward"), (model.V41Flash, "forward")],
)
def test_a_wait_that_is_left_out_shows(where: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want, Late.pending = decode(False), {}
    for module in MODULES:
        monkeypatch.setattr(module, "beside", Late)
    run, wait = getattr(where, what), Late.wait

    def hurried(*args: Any, **options: Any) -> Any:
        with monkeypatch.context() as inside:
            inside.setattr(Late, "wait", lambda self: self.result)
            return run(*args, **options)

    monkeypatch.setattr(where, what, hurried)
    try:
        got = decode(False)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return
    assert Late.wait is wait
    assert not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Streams:
    """Streams and events that only note who waits for whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capturing: bool = True):
        self.log: list[tuple[str, ...]] = []
        self.now = "main"
        cuda = {
            "is_current_stream_capturing": lambda: capturing,
            "current_stream": lambda device=None: self.stream(self.now),
            "stream": self.enter,
            "Event": lambda: types.SimpleNamespace(record=lambda: self.log.append(("record", self.now))),
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(beside, "_stream", lambda device, lane: self.stream(f"lane {lane}"))

    def stream(self, name: str) -> Any:
        return types.SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.log.append((name, "waits for", other.name)),
            wait_event=lambda event: self.log.append((name, "waits for the record")),
        )

    @contextlib.contextmanager
    def enter(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


GPU: Any = types.SimpleNamespace(device=torch.device("cuda", 0))


def test_a_branch_waits_for_what_is_in_front_and_the_caller_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    branch = beside.beside(lambda: streams.log.append(("call on", streams.now)) or 7, GPU, beside.LONG)
    begun = [("lane 1", "waits for", "main"), ("call on", "lane 1"), ("record", "lane 1")]
    assert streams.log == begun
    assert branch.wait() == branch.wait() == 7
    assert streams.log == [*begun, ("main", "waits for the record")]  # once


def test_what_a_call_reads_lives_until_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its memory would be given away while the other stream has not read it yet."""
    Streams(monkeypatch)

    def fork() -> tuple[beside.Branch[int], Any]:
        read = torch.zeros(3)
        return beside.beside(lambda: read.shape[0], GPU, beside.SHORT), weakref.ref(read)

    branch, read = fork()
    gc.collect()
    assert read() is not None
    branch.wait()
    gc.collect()
    assert read() is None


def test_without_a_graph_a_call_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch, capturing=False)
    assert beside.beside(lambda: streams.now, GPU, 0).wait() == "main"
    assert beside.beside(lambda: streams.now, torch.zeros(1), 0).wait() == "main"
    assert streams.log == []
