"""Branches of a step that is captured: work on a stream of its own, beside what the caller goes on with."""

import functools
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
SHORT, LONG = range(2)  # lanes: what is waited for within a sub-layer, and later


class Branch(Generic[T]):
    """The result of a call that may still run on another stream; see `beside`."""

    def __init__(self, result: T, ready: torch.cuda.Event | None = None, call: Callable[[], T] | None = None):
        self._result, self._ready, self._call = result, ready, call  # the call keeps what it reads

    def wait(self) -> T:
        """The result; what the current stream is given from now on waits for it.

        Wait where it is used first: a second call does nothing.
        """
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
            self._ready = self._call = None
        return self._result


def beside(call: Callable[[], T], like: torch.Tensor, lane: int) -> Branch[T]:
    """Make a call beside what follows while the device of ``like`` captures a graph, and at once elsewhere.

    A graph keeps the branch: its kernels wait for those before the call, and those behind `Branch.wait` for
    them. Without a graph the host could not launch two streams fast enough to gain from it.

    Args:
        call: launches kernels. Every branch must be waited for; until then what the call refers to is kept.
        like: any tensor of the device.
        lane: calls of the same lane run one after the other.
    """
    if like.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return Branch(call())
    # What the call allocates is given to later calls of the lane only, which wait for its users as this does.
    stream = _stream(like.device, lane)
    stream.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(stream):
        result = call()
        ready = torch.cuda.Event()
        ready.record()
    return Branch(result, ready, call)


@functools.cache
def _stream(device: torch.device, lane: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
