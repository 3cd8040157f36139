"""Time of device calls: many of them in one CUDA graph, each on inputs that the L2 does not hold."""

import statistics
from collections.abc import Callable, Sequence

import torch

FLUSH_BYTES = 256 << 20  # more than any L2


def graph_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median time in microseconds of one of ``calls``, over replays of a graph that makes each once.

    Args:
        calls: the same work on inputs of their own, so that none finds its data in the L2, which is flushed
            before each replay.
        repeats: replays.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 2):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])
