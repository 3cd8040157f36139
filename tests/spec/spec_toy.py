"""A first-order Markov target and drafter over a small vocabulary: laws that are known exactly."""

from collections.abc import Callable

import torch

from dsv41.ops.verify import split_budget_ragged
from dsv41.spec import Accepted, Streams, accept


class Toy:
    """``target[prev]`` and ``draft[prev]`` are [vocab] logits of the next token."""

    def __init__(self, vocab: int, seed: int, *, spread: float = 1.5, gap: float = 0.7):
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.target = spread * torch.randn(vocab, vocab, generator=generator)
        self.draft = self.target + gap * torch.randn(vocab, vocab, generator=generator)

    def propose(self, streams, anchors, positions, block, temperature, mode="chain"):
        """Drafts [num_requests, block] and their logits, drawn from ``streams`` or a torch generator."""
        tokens, logits, previous = [], [], anchors
        for k in range(block):
            logits.append(self.draft[previous])
            if isinstance(streams, torch.Generator):
                law = (logits[-1] / temperature[:, None]).softmax(-1)
                previous = law.multinomial(1, generator=streams)[:, 0]
            else:
                previous = streams.draft(logits[-1], k, positions, temperature, mode=mode)
            tokens.append(previous)
        return torch.stack(tokens, 1), torch.stack(logits, 1)

    def rows(self, anchors, drafts, lengths):
        """Previous token of every logits row, and the exclusive sums that own them."""
        previous = torch.cat((anchors[:, None], drafts), 1)
        used = torch.arange(previous.shape[1]) <= lengths[:, None]
        cu = torch.cat((torch.zeros(1, dtype=torch.int64), (lengths + 1).cumsum(0)))
        return previous[used], cu.to(torch.int32)

    def step(
        self,
        streams,
        anchors,
        positions,
        drafts,
        draft_logits,
        lengths,
        temperature,
        *,
        mode="chain",
        bitmask=None,
        **law,
    ) -> Accepted:
        """Verify; ``bitmask`` is [vocab, words] by previous token."""
        previous, cu = self.rows(anchors, drafts, lengths)
        return accept(
            self.target[previous],
            cu,
            drafts,
            streams=streams,
            positions=positions,
            temperature=temperature,
            draft_logits=draft_logits,
            mode=mode,
            bitmask=None if bitmask is None else bitmask[previous],
            **law,
        )

    def generate(
        self,
        streams: Streams,
        anchors: list[int],
        count: int,
        temperature: torch.Tensor,
        budget: Callable[[int, int], int],
        *,
        block: int = 5,
        mode: str = "chain",
        propose: Callable | None = None,
        counts: dict[int, int] | None = None,
    ) -> list[list[int]]:
        """Whole texts under any sequence of budgets, the split made on made-up confidences."""
        requests = len(anchors)
        texts = [[a] for a in anchors]
        for number in range(count * 2):
            if all(len(t) > count for t in texts):
                break
            last = torch.tensor([t[-1] for t in texts])
            positions = torch.tensor([len(t) - 1 for t in texts])
            if propose is None:
                drafts, logits = self.propose(streams, last, positions, block, temperature, mode)
            else:
                drafts, logits = propose(texts, block), None
            confidence = ((drafts * 37 + number) % 11 / 11).float().roll(1, 1)
            total = torch.tensor([budget(number, requests * block)])
            split = split_budget_ragged(confidence, total, rotation=torch.tensor([number]))
            result = self.step(
                streams, last, positions, drafts, logits, split.lengths.long(), temperature, mode=mode
            )
            for text, new, kept in zip(texts, result.lists(), result.num_accepted.tolist(), strict=True):
                if counts is not None:
                    counts[kept] = counts.get(kept, 0) + 1
                text += new
        return [t[: count + 1] for t in texts]
