"""The exchange of one rank: rows out to the ranks that hold their experts, results back, in a fixed order."""

from typing import Any

import torch

from ..._op import check, check_sizes, check_tensor
from ...formats import MXFP8
from .api import exchange_combine, exchange_pack, exchange_pack_fixed, exchange_plan, exchange_unpack
from .transport import Pending, Transport


class Exchange:
    """Dispatch and combine over one transport. Made by the caller; modules only use it.

    Two forms. *Fixed*: every rank has room for ``capacity`` rows from every other; sizes are known without
    the counts, which never leave the device, so a step can be captured in a graph. Pairs past the capacity
    are not sent; they are counted (`overflow`), and the caller repeats the step in the exact form. *Exact*:
    the counts go first, the host waits for them, and exactly the rows that exist travel.

    A row travels once a routed pair, and comes back as that expert's bf16 output; the sender adds them in
    top-k order. So neither the number of ranks, nor the map, nor timing changes a bit.

    Args:
        transport: the ranks.
        slots_per_rank: physical experts that each rank holds.
        capacity: rows from one rank to one other in the fixed form, the same on every rank; None allows the
            exact form only.
    """

    def __init__(self, transport: Transport, slots_per_rank: int, capacity: int | None = None):
        check_sizes("Exchange", 1, slots_per_rank=slots_per_rank)
        if capacity is not None:
            check_sizes("Exchange", 1, capacity=capacity)
        self.transport, self.slots_per_rank, self.capacity = transport, slots_per_rank, capacity
        self.overflow: torch.Tensor | None = None  # [ranks] int64 on the device: pairs not sent

    def dispatch(
        self, x: MXFP8, slots: torch.Tensor, weights: torch.Tensor, *, exact: bool = False
    ) -> "Flight":
        """Start to send every row to the ranks of its experts.

        Args:
            x: MXFP8 of [num_tokens, hidden].
            slots: [num_tokens, top_k] int32 physical experts of all ranks, -1 for none.
            weights: [num_tokens, top_k] f32.
            exact: the exact form instead of the fixed one. All ranks must say the same.

        Returns:
            Flight. Whatever is computed between this and its ``wait`` overlaps with the transfer.
        """
        name, t = "Exchange.dispatch", self.transport
        check(isinstance(x, MXFP8), name, "x: MXFP8", x)
        check_tensor(name, "slots", slots, (x.values.shape[0], None), torch.int32, like=x.values)
        capacity = None if exact else self.capacity
        check(exact or capacity is not None, name, "a capacity, or exact=True", None)
        ranks: dict[str, Any] = {"num_ranks": t.size, "slots_per_rank": self.slots_per_rank}
        if capacity is not None:
            if self.overflow is None:
                self.overflow = torch.zeros(t.size, dtype=torch.int64, device=slots.device)
            place, records = exchange_pack_fixed(
                x, weights, slots, capacity=capacity, lost=self.overflow, **ranks
            )
            arriving, sent_rows, came_rows = torch.empty_like(records), None, None
        else:
            place, source, counts = exchange_plan(slots, **ranks)
            records = exchange_pack(x, weights, slots, source, slots_per_rank=self.slots_per_rank)
            sent_rows, came_rows = t.counts(counts)
            records = records[: sum(sent_rows)]
            arriving = records.new_empty((sum(came_rows), records.shape[1]))
        pending = t.all_to_all(records, arriving, sent_rows, came_rows)
        return Flight(self, x.values.shape[1], place, records, arriving, sent_rows, came_rows, pending)

    def lost(self, timeout: float = 60.0) -> list[int]:
        """Pairs that each rank did not send since the last call; waits for the device and for every rank."""
        mine = 0 if self.overflow is None else int(self.overflow.sum())
        if self.overflow is not None:
            self.overflow.zero_()
        return [int(n) for n in self.transport.gather(str(mine).encode(), timeout)]


class Flight:
    """Rows between `Exchange.dispatch` and `combine`."""

    def __init__(
        self,
        exchange: Exchange,
        hidden: int,
        place: torch.Tensor,
        records: torch.Tensor,
        arriving: torch.Tensor,
        sent_rows: list[int] | None,
        came_rows: list[int] | None,
        pending: Pending,
    ):
        self._exchange, self._hidden, self._place = exchange, hidden, place
        self._records, self._arriving, self._pending = records, arriving, pending
        self._sent, self._came = sent_rows, came_rows

    def wait(self) -> tuple[MXFP8, torch.Tensor, torch.Tensor]:
        """What arrived, as ``mxfp4_moe`` takes it: MXFP8 of [rows, hidden], slots of this rank [rows, 1]
        int32 (-1: an unused row) and weights [rows, 1] f32.
        """
        self._pending.wait()
        return exchange_unpack(self._arriving, hidden=self._hidden)

    def combine(
        self, rows: torch.Tensor, *, shared: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send the results back and add them up.

        Args:
            rows: [rows, hidden] bf16, a result for each row that ``wait`` gave.
            shared: [num_tokens, hidden] bf16 added before the rounding, or None.
            out: [num_tokens, hidden] bf16 to write into; may be ``shared``.

        Returns:
            [num_tokens, hidden] bf16.
        """
        shape = (len(self._arriving), self._hidden)
        check_tensor("Flight.combine", "rows", rows, shape, torch.bfloat16, contiguous=True)
        back = rows.new_empty((len(self._records), self._hidden))
        sent, came = rows.view(torch.uint8), back.view(torch.uint8)
        self._exchange.transport.all_to_all(sent, came, self._came, self._sent).wait()
        return exchange_combine(back, self._place, shared=shared, out=out)


def usual_capacity(tokens: int, top_k: int, ranks: int) -> int:
    """A capacity for steps of up to ``tokens`` tokens a rank: half as much again as the mean, in sixteens."""
    check_sizes("usual_capacity", tokens=tokens)
    check_sizes("usual_capacity", 1, top_k=top_k, ranks=ranks)
    return min(tokens * top_k, -(-tokens * top_k * 3 // (2 * ranks * 16)) * 16)
