"""How many drafted tokens stay: `dsv41.ops.verify_drafts` with a batch's streams and named errors."""

from dataclasses import dataclass

import torch

from .._op import check
from ..ops.verify import Verified, verify_drafts
from .streams import Streams


@dataclass(frozen=True)
class Accepted:
    """Tokens a step emits.

    Args:
        tokens: [num_requests, block + 1] int64, the drafts that stay, then the target's token, then -1.
        num_emitted: [num_requests] int32; 0 for a request without rows.
    """

    tokens: torch.Tensor
    num_emitted: torch.Tensor

    @property
    def num_accepted(self) -> torch.Tensor:
        """[num_requests] int32, drafts that stay."""
        return (self.num_emitted - 1).clamp(min=0)

    def lists(self) -> list[list[int]]:
        """The emitted token ids of each request; copies to the host."""
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.num_emitted.tolist(), strict=True)]


def accept(
    target_logits: torch.Tensor,
    cu_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    streams: Streams,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    draft_temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
    mode: str = "chain",
    names: list[str] | None = None,
    sync: bool = True,
    out: Verified | None = None,
) -> Accepted:
    """Verify a step's drafts and draw each request's next token.

    Args:
        target_logits: [num_logits, vocab] float, rows as ``cu_logits`` of the split says.
        cu_logits: [num_requests + 1] int32.
        draft_tokens: [num_requests, block] int; drafts past a request's length are not read.
        streams: the batch's random streams.
        positions: [num_requests] int64, position of the anchor.
        temperature: [num_requests] f32; <= 0 is greedy.
        draft_logits: [num_requests, block, vocab] float that the drafts were drawn from; None if they were
            not drawn.
        draft_temperature: [num_requests] f32; None is ``temperature``.
        top_k: [num_requests] int32, or None.
        top_p: [num_requests] f32, or None.
        bitmask: [num_logits, words] int32, or None.
        mode: ``chain``, ``block`` or ``coupled``; see `dsv41.ops.verify_drafts`.
        names: what errors call the requests; None is their row numbers.
        sync: wait for the device and refuse requests without a law. Off, nothing is read: look at
            ``out.status`` later.
        out: Verified to write into.

    Returns:
        Accepted.

    Errors: ValueError naming the request and the row whose logits leave no token (a NaN, a +inf, nothing but
    -inf, or a
        bitmask that forbids everything), or the request whose temperature is NaN or +inf.
    """
    check(isinstance(streams, Streams), "accept", "streams: Streams", streams)
    if names is not None:
        check(len(names) == len(draft_tokens), "accept", f"names: [{len(draft_tokens)}]", names)
    result = verify_drafts(
        target_logits,
        cu_logits,
        draft_tokens,
        temperature=temperature,
        seeds=streams.seeds,
        uids=streams.uids,
        positions=positions,
        draft_logits=draft_logits,
        draft_temperature=draft_temperature,
        top_k=top_k,
        top_p=top_p,
        bitmask=bitmask,
        mode=mode,
        out=out,
    )
    if sync:
        for row in result.status.nonzero().flatten().tolist()[:1]:
            name = names[row] if names else str(row)
            got = f"a NaN, a +inf or only -inf in row {int(result.num_emitted[row])} of request {name}"
            if not torch.isfinite(temperature[row]) and temperature[row] != float("-inf"):
                got = f"temperature {float(temperature[row])} of request {name}"
            check(False, "accept", "at least one finite logit and no NaN or +inf", got)
    return Accepted(result.tokens, result.num_emitted)
