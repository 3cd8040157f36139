"""Rows of the exact form through DeepEP's throughput kernels, as bytes: nothing is quantised or added there.

DeepEP's ``dispatch`` is used in both directions, with every row going to one rank. Its ``combine`` would add
what returns from several experts of a rank and round the sum, so that results depended on the map.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from ..._op import check
from .transport import Pending, Transport


class _Dispatched:
    def __init__(self, rows: torch.Tensor, event: Any, recv: torch.Tensor):
        self._rows, self._event, self._recv = rows, event, recv

    def wait(self) -> None:
        self._event.current_stream_wait()
        self._recv.copy_(self._rows.view(torch.uint8))


class DeepEPTransport(Transport):
    """See `dsv41.ops.exchange.deepep_transport`."""

    def __init__(self, buffer: Any, transport: Transport):
        name = "deepep_transport"
        there = importlib.util.find_spec("deep_ep") is not None
        check(there, name, "package 'deep_ep'", "not installed")
        same = (buffer.rank, buffer.group_size) == (transport.rank, transport.size)
        ranks = f"a buffer of rank {transport.rank} of {transport.size}"
        check(same, name, ranks, f"rank {buffer.rank} of {buffer.group_size}")
        check(not buffer.low_latency_mode, name, "a buffer in throughput mode", "low_latency_mode=True")
        self.buffer, self.plain = buffer, transport
        self.rank, self.size = transport.rank, transport.size

    def all_to_all(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        send_rows: list[int] | None = None,
        recv_rows: list[int] | None = None,
    ) -> Pending:
        if send_rows is None:
            return self.plain.all_to_all(send, recv, send_rows, recv_rows)
        width = send.shape[1]
        check(width % 16 == 0, "DeepEPTransport.all_to_all", "rows of a multiple of 16 bytes", width)
        counts = torch.tensor(send_rows, dtype=torch.int32).to(send.device, non_blocking=True)
        rank = torch.repeat_interleave(counts.long(), output_size=len(send))
        here = rank[:, None] == torch.arange(self.size, device=send.device)
        rows, _, _, _, _, event = self.buffer.dispatch(
            send.view(torch.bfloat16),  # the type only says how many bytes a row has
            num_tokens_per_rank=counts,
            is_token_in_rank=here,
            num_tokens_per_expert=counts,  # one expert a rank: experts are chosen on this side of it
            async_finish=True,
        )
        return _Dispatched(rows, event, recv)

    def counts(self, sent: torch.Tensor) -> tuple[list[int], list[int]]:
        return self.plain.counts(sent)

    def gather(self, value: bytes, timeout: float) -> list[bytes]:
        return self.plain.gather(value, timeout)

    def swap(
        self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor], timeout: float
    ) -> None:
        self.plain.swap(sends, recvs, timeout)

    def all_reduce(self, x: torch.Tensor) -> None:
        self.plain.all_reduce(x)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        self.plain.broadcast(x, source)
