"""Ways between ranks. A transport is made by the caller from its own process group; nothing here looks up a
default group.
"""

import datetime
import importlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..._op import check


class PeerLost(RuntimeError):
    """Ranks did not answer in time; ``ranks`` names them."""

    def __init__(self, what: str, ranks: Sequence[int], seconds: float):
        self.ranks = tuple(ranks)
        named = ", ".join(f"rank {r}" for r in ranks)
        super().__init__(
            f"{what}: expected an answer of every rank within {round(seconds, 1):g} s, got none of {named}"
        )


class Pending(Protocol):
    """A transfer that was started."""

    def wait(self) -> Any:
        """On a CPU, return when it has landed; on a GPU, let the current stream wait for it."""
        ...


class Transport(Protocol):
    """What `Exchange` and `dsv41.eplb.live` need of a group of ranks."""

    rank: int
    size: int

    def all_to_all(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        send_rows: list[int] | None = None,
        recv_rows: list[int] | None = None,
    ) -> Pending:
        """Start to send rows [rows, bytes] uint8, in rank order, as many to each rank as ``send_rows`` says
        (None: the same number to all).
        """
        ...

    def counts(self, sent: torch.Tensor) -> tuple[list[int], list[int]]:
        """``sent[r]`` rows go to rank r: that as a list, and how many come from each rank. Waits for the
        device.
        """
        ...

    def gather(self, value: bytes, timeout: float) -> list[bytes]:
        """A few bytes of every rank; `PeerLost` names those that did not answer within the seconds."""
        ...

    def swap(
        self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor], timeout: float
    ) -> None:
        """One message [bytes] uint8 to each rank in ``sends`` and from each in ``recvs``, all at once.

        Returns when they have landed; `PeerLost` after ``timeout`` seconds.
        """
        ...

    def all_reduce(self, x: torch.Tensor) -> None:
        """Add the ranks' tensors up, in place, on the device of ``x``."""
        ...

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Fill ``x`` with what rank ``source`` has in it."""
        ...


class GroupTransport(Transport):
    """Through ``torch.distributed``: NCCL between GPUs, gloo between CPUs.

    Args:
        group: the ranks; an ordinary process group.
        store: a ``torch.distributed`` store that the ranks share, such as the one that the group was made
            with. Short messages go through it, each under its rank, so a rank that does not answer is known
            by name. Without a store there is no `gather`.
    """

    def __init__(self, group: dist.ProcessGroup, store: Any = None):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        prefix = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
        self._store: Any = None if store is None else prefix("dsv41_exchange", store)
        self._turn = 0

    def all_to_all(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        send_rows: list[int] | None = None,
        recv_rows: list[int] | None = None,
    ) -> Pending:
        work = dist.all_to_all_single(recv, send, recv_rows, send_rows, group=self.group, async_op=True)
        assert work is not None
        return work

    def counts(self, sent: torch.Tensor) -> tuple[list[int], list[int]]:
        both = torch.stack([sent, torch.empty_like(sent)])
        dist.all_to_all_single(both[1], both[0], group=self.group)
        out, came = both.tolist()
        return out, came

    def gather(self, value: bytes, timeout: float) -> list[bytes]:
        check(self._store is not None, "GroupTransport.gather", "a store: GroupTransport(group, store)", None)
        deadline, turn = time.monotonic() + timeout, self._turn
        self._turn += 1
        answers, missing = [b""] * self.size, []
        try:
            self._store.set(f"{turn}/{self.rank}", value)
            for r in range(self.size):
                # Also after the deadline an answer that is already there counts.
                left = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.05))
                try:
                    self._store.wait([f"{turn}/{r}"], left)
                    answers[r] = self._store.get(f"{turn}/{r}")
                except dist.DistStoreError:
                    missing.append(r)
        except dist.DistNetworkError as error:
            raise RuntimeError(f"gather: expected the store to answer, got {error}") from error
        if missing:
            raise PeerLost("gather", missing, timeout)
        if turn > 0:  # everybody has answered this turn, so everybody has read the last one
            self._store.delete_key(f"{turn - 1}/{self.rank}")
        return answers

    def swap(
        self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor], timeout: float
    ) -> None:
        peers = [("to", r) for r in sorted(sends)] + [("from", r) for r in sorted(recvs)]
        ops = [dist.P2POp(dist.isend, sends[r], group=self.group, group_peer=r) for r in sorted(sends)]
        ops += [dist.P2POp(dist.irecv, recvs[r], group=self.group, group_peer=r) for r in sorted(recvs)]
        if not ops:
            return
        deadline = time.monotonic() + timeout
        if ops[0].tensor.device.type == "cpu":
            try:
                works = dist.batch_isend_irecv(ops)
            except RuntimeError as error:  # a connection that is already closed; its peer is not told apart
                raise PeerLost("swap", sorted({r for _, r in peers}), timeout) from error
            for (_, r), work in zip(peers, works, strict=True):
                left = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.05))
                try:
                    work.wait(left)
                except RuntimeError as error:
                    raise PeerLost("swap", [r], timeout) from error
            return
        # On a stream of its own: with a peer that died NCCL's kernel never ends, and the rows that this rank
        # still serves must not wait for it.
        caller, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(caller)
        with torch.cuda.stream(aside):
            for work in dist.batch_isend_irecv(ops):
                work.wait()  # the stream waits, not the host
            done = torch.cuda.Event()
            done.record()
        for message in (*sends.values(), *recvs.values()):
            message.record_stream(aside)  # not given to others before it has landed
        while not done.query():
            if time.monotonic() > deadline:
                raise PeerLost("swap", sorted({r for _, r in peers}), timeout)
            time.sleep(0.0002)
        caller.wait_event(done)

    def all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        dist.broadcast(x, group=self.group, group_src=source)


class _Landed:
    def wait(self) -> None:
        return None


class _Room:
    """Where the ranks of one process meet."""

    def __init__(self, size: int, patience: float):
        self.box: list[Any] = [None] * size
        self.patience, self.barrier = patience, threading.Barrier(size, timeout=patience)


class LocalTransport(Transport):
    """Ranks as threads of one process, for tests. Made by `LocalTransport.group`."""

    def __init__(self, room: _Room, rank: int):
        self._room, self.rank, self.size = room, rank, len(room.box)

    @staticmethod
    def group(size: int, patience: float = 60.0) -> list["LocalTransport"]:
        """A transport for each of ``size`` threads, which all must take part in every call."""
        room = _Room(size, patience)
        return [LocalTransport(room, r) for r in range(size)]

    def leave(self) -> None:
        """Take no further part: the others get an error instead of waiting for this rank."""
        self._room.barrier.abort()

    def _meet(self, value: Any) -> list[Any]:
        room = self._room
        try:
            room.box[self.rank] = value
            room.barrier.wait()
            everybody = list(room.box)
            room.barrier.wait()  # nobody leaves before all have read
        except threading.BrokenBarrierError as error:
            missing = [r for r, v in enumerate(room.box) if v is None]
            raise PeerLost("LocalTransport", missing, room.patience) from error
        room.box[self.rank] = None
        return everybody

    def all_to_all(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        send_rows: list[int] | None = None,
        recv_rows: list[int] | None = None,
    ) -> Pending:
        rows = send_rows or [len(send) // self.size] * self.size
        recv.copy_(torch.cat([parts[self.rank] for parts in self._meet(send.split(rows))]))
        self._meet(0)  # a sender may reuse its buffer when this returns
        return _Landed()

    def counts(self, sent: torch.Tensor) -> tuple[list[int], list[int]]:
        everybody = self._meet(sent.tolist())
        return everybody[self.rank], [there[self.rank] for there in everybody]

    def gather(self, value: bytes, timeout: float) -> list[bytes]:
        return self._meet(value)

    def swap(
        self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor], timeout: float
    ) -> None:
        everybody = self._meet(sends)
        for r, out in recvs.items():
            out.copy_(everybody[r][self.rank])
        self._meet(0)

    def all_reduce(self, x: torch.Tensor) -> None:
        total = torch.stack(self._meet(x)).sum(0)
        self._meet(0)
        x.copy_(total)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        x.copy_(self._meet(x)[source])
        self._meet(0)


def deepep_transport(buffer: Any, transport: Transport) -> Transport:
    """Send the rows of the exact form through a ``deep_ep.Buffer``; everything else through ``transport``.

    Args:
        buffer: a ``deep_ep.Buffer`` over the same ranks, in its throughput mode.
        transport: counts and short messages go this way.

    Errors: ValueError when DeepEP is not installed, the ranks differ, or the mode is another.
    """
    module = importlib.import_module(f"{__package__}.deepep_cuda")
    return module.DeepEPTransport(buffer, transport)
