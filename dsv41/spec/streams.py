"""Random numbers of a batch of requests: which key each draw uses is decided here and nowhere else."""

from dataclasses import dataclass

import torch

from .._op import check, check_tensor
from ..ops.verify import sample_tokens
from ..ops.verify.api import MODES
from ._values import integer


@dataclass(frozen=True)
class Streams:
    """Counter-based streams of requests: noise is a function of (seed, uid, position), never of who else is
    in the batch.

    Two requests that are alive together must differ in uid even when users chose the same seed; a uid that is
    chosen by the client (not by arrival) makes a seeded request reproducible.

    Args:
        seeds: [num_requests] int64.
        uids: [num_requests] int64 in [0, 2**48).
    """

    seeds: torch.Tensor
    uids: torch.Tensor

    def __post_init__(self) -> None:
        check_tensor("Streams", "seeds", self.seeds, (None,), torch.int64)
        check_tensor("Streams", "uids", self.uids, (self.seeds.shape[0],), torch.int64, like=self.seeds)

    @classmethod
    def of(cls, seeds: list[int], uids: list[int], device: torch.device | str = "cpu") -> "Streams":
        """Streams from Python integers; refuses repeated or out-of-range uids."""
        check(len(set(uids)) == len(uids), "Streams", "uids: all different", uids)
        for label, values, low in (("seeds", seeds, -(2**63)), ("uids", uids, None)):
            for value in values:
                integer("Streams", label, value, low, None if low is None else 2**63 - 1)
        check(all(0 <= uid < 2**48 for uid in uids), "Streams", "uids in [0, 2**48)", uids)
        return cls(
            torch.tensor(seeds, dtype=torch.int64, device=device),
            torch.tensor(uids, dtype=torch.int64, device=device),
        )

    def select(self, rows: torch.Tensor) -> "Streams":
        """The streams of some requests, [num_rows] int64 rows of this batch."""
        return Streams(self.seeds[rows], self.uids[rows])

    def draft(
        self,
        logits: torch.Tensor,
        column: int,
        anchors: torch.Tensor,
        temperature: torch.Tensor,
        *,
        mode: str = "chain",
    ) -> torch.Tensor:
        """Draw draft number ``column`` (from 0) of every request.

        Args:
            logits: [num_requests, vocab] draft logits, the Markov bias included, before temperature.
            column: which draft of the block, 0 to 255.
            anchors: [num_requests] int64, position of the anchor.
            temperature: [num_requests] f32; <= 0 is argmax.
            mode: verification mode. ``coupled`` shares the target's noise at that position; the others must
                not.

        Returns:
            [num_requests] int64; -1 where the logits have no law, which ends the request's drafts.
        """
        column = integer("Streams", "column", column, 0, 255)
        check(mode in MODES, "Streams", f"mode: one of {', '.join(MODES)}", mode)
        coupled = mode == "coupled"
        return sample_tokens(
            logits,
            temperature=temperature,
            seeds=self.seeds,
            uids=self.uids,
            positions=anchors + 1 + column if coupled else anchors,
            columns=None if coupled else torch.full_like(anchors, column),
            stream="emit" if coupled else "draft",
        )
