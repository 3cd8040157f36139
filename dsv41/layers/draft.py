"""The DSpark drafter: stages ``mtp.*`` that draft a block of tokens from the target's hidden rows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .._op import check, check_tensor, check_values
from ..cache import PagedKV
from ..config import V41FlashConfig
from ..formats import MXFP8
from ..ops import linear, markov_bias, mhc_collapse, rms_norm, rms_norm_quantize, sparse_attn
from ..ops.draft import DraftBlock
from ..ops.verify import sample_tokens
from .attention import Attention
from .block import Block, embed_streams, run_blocks
from .linear import BlockLinear, Weight, frozen
from .state import V41State, request_of_rows, rope_tables

MARKOV_KINDS = ("vanilla", "gated", "rnn")


class Biased(Weight):
    """A linear with a bias; the product and the sum are f32."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(outputs, inputs)
        self.bias = frozen((outputs,), torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in] bf16 to [num_tokens, out] f32."""
        return linear(x, self.weight, dtype=torch.float32) + self.bias


class MarkovHead(nn.Module):
    """Logits of a row look at the token before it: a low-rank table of token pairs.

        e = embed[previous]
        vanilla   f = e
        gated     f = sigmoid(gate([hidden, e])) * e
        rnn       (g, c, o) = joint([s, e, hidden]);  f = tanh(o)
                  s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)
        logits += f @ head.T

    The released checkpoint has the vanilla form; the others carry the names ``gate`` and ``joint`` here. s
    starts at 0 in every block, is kept in f32 and enters ``joint`` as bf16; f is rounded to bf16.
    """

    def __init__(self, vocab_size: int, hidden: int, rank: int, kind: str = "vanilla"):
        super().__init__()
        check(kind in MARKOV_KINDS, "MarkovHead", f"kind: one of {', '.join(MARKOV_KINDS)}", kind)
        self.kind = kind
        self.embed = Weight(vocab_size, rank)
        self.head = Weight(vocab_size, rank)
        if kind == "gated":
            self.gate = Biased(hidden + rank, rank)
        if kind == "rnn":
            self.joint = Biased(2 * rank + hidden, 3 * rank)

    def lookup(self, previous: torch.Tensor) -> torch.Tensor:
        """e [num_requests, rank] bf16 of ids [num_requests]; -1 reads id 0, for rows that nobody uses."""
        return self.embed.weight[previous.clamp(min=0)]

    def start(self, num_requests: int) -> torch.Tensor:
        """s [num_requests, rank] f32 before the first row of a block."""
        rank = self.embed.weight.shape[1]
        return torch.zeros((num_requests, rank), device=self.embed.weight.device)

    def forward(
        self, logits: torch.Tensor, e: torch.Tensor, hidden: torch.Tensor, s: torch.Tensor
    ) -> torch.Tensor:
        """Add the bias to one row of every request.

        Args:
            logits: [num_requests, vocab_size] f32, changed in place.
            e: [num_requests, rank] bf16, from `lookup`.
            hidden: [num_requests, hidden] bf16 of the row, before the norm.
            s: [num_requests, rank] f32, from `start` or the row before.

        Returns:
            s for the next row.
        """
        f = e
        if self.kind == "gated":
            f = (torch.sigmoid(self.gate(torch.cat([hidden, e], 1))) * e).to(e.dtype)
        if self.kind == "rnn":
            g, c, o = self.joint(torch.cat([s.to(e.dtype), e, hidden], 1)).chunk(3, 1)
            keep = torch.sigmoid(g)
            s = keep * s + (1 - keep) * torch.tanh(c)
            f = torch.tanh(o).to(e.dtype)
        markov_bias(logits, f, self.head.weight)
        return s


class ConfidenceHead(nn.Module):
    """Logit of "this draft is accepted if those before it are", in f32, without a bias."""

    def __init__(self, hidden: int, rank: int):
        super().__init__()
        self.proj = Weight(1, hidden + rank)

    def forward(self, hidden: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        """hidden [num_requests, hidden] bf16 before the norm, e of the token before: [num_requests] f32."""
        return linear(torch.cat([hidden, e], 1), self.proj.weight, dtype=torch.float32)[:, 0]


class Stage(Block):
    """One ``mtp.{i}``; the first projects the target's rows, the last owns the heads."""

    def __init__(self, cfg: V41FlashConfig, stage: int, markov: str):
        super().__init__(cfg, cfg.num_layers + stage)
        draft = cfg.draft
        if stage == 0:
            self.main_proj = BlockLinear(len(draft.target_layers) * cfg.hidden, cfg.hidden)
            self.main_norm = Weight(cfg.hidden)
        if stage == draft.num_stages - 1:
            self.norm = Weight(cfg.hidden)
            self.markov_head = MarkovHead(cfg.vocab_size, cfg.hidden, draft.markov_rank, markov)
            self.confidence_head = ConfidenceHead(cfg.hidden, draft.markov_rank)


@dataclass(frozen=True)
class BlockPlan:
    """Index tensors of one block: what its rows see in a ring and among each other.

    cos, sin: [num_tokens, rope_dim/2] f32 at the rows' positions.
    ring_ids: [num_tokens, window] int32 slots of a ring, -1 before position 0.
    rows: where the block's own records are, for the time of one stage.
    row_slots: [num_tokens] int32 in ``rows``. row_ids: [num_tokens, block] int32, all rows of the request.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    ring_ids: torch.Tensor
    rows: PagedKV
    row_slots: torch.Tensor
    row_ids: torch.Tensor


class Drafter(nn.ModuleList):
    """``mtp``: drafts of every request of a `V41State` that was allocated with ``drafter=True``.

    After the target processed tokens, `write_context` stores what the drafter keeps of them: one window
    record a stage and position. `forward` then drafts the tokens behind the anchor, the token that the target
    emitted last and has not processed yet. Drafting writes nothing into the state.

    Args:
        cfg: model constants.
        embed: the target's token embedding, shared.
        head: the target's output head, shared.
        markov: form of the Markov head, ``vanilla``, ``gated`` or ``rnn``.
    """

    def __init__(self, cfg: V41FlashConfig, embed: Weight, head: Weight, markov: str = "vanilla"):
        super().__init__(Stage(cfg, i, markov) for i in range(cfg.draft.num_stages))
        self.cfg = cfg
        self._shared = (embed, head)  # in a tuple: they stay parameters of the target alone

    @property
    def input_width(self) -> int:
        """Columns of the target's ``draft_inputs``."""
        return len(self.cfg.draft.target_layers) * self.cfg.hidden

    @property
    def block_size(self) -> int:
        """Drafts a block."""
        return self.cfg.draft.block_size

    def _stages(self) -> list[Stage]:
        return [stage for stage in self if isinstance(stage, Stage)]

    def _check_state(self, name: str, state: V41State) -> None:
        cfg = self.cfg
        check(state.cfg == cfg, name, "a state of the same config", "another")
        rings = cfg.num_layers + cfg.draft.num_stages
        check(len(state.windows) == rings, name, f"{rings} windows (drafter=True)", len(state.windows))

    def write_context(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        state: V41State,
        *,
        cu_seqlens: torch.Tensor | None = None,
    ) -> None:
        """Keep rows that the target has processed, as far as they were accepted.

            main = RMS(main_proj(inputs));  ring_i[p] = Q8(RoPE(RMS(main · wkv_iᵀ)))

        Args:
            inputs: [num_tokens, input_width] bf16, the target's ``draft_inputs`` of the step.
            positions: [num_tokens] int32, of the step.
            state: after the step and its rollback: rows at or past ``state.lens`` are not stored.
            cu_seqlens: [num_requests + 1] int32, of the step; None when the state has one request.

        Contract: no host sync; graph-safe.
        """
        name, count = "Drafter.write_context", inputs.shape[0]
        self._check_state(name, state)
        check_tensor(name, "inputs", inputs, (None, self.input_width), torch.bfloat16, like=state.lens)
        check_tensor(name, "positions", positions, (count,), torch.int32, like=inputs)
        if cu_seqlens is None:
            check(state.num_requests == 1, name, f"cu_seqlens: [{state.num_requests + 1}] int32", None)
            cu_seqlens = count * torch.arange(2, dtype=torch.int32, device=inputs.device)
        check_tensor(name, "cu_seqlens", cu_seqlens, (state.num_requests + 1,), torch.int32, like=inputs)
        if not count or not state.num_requests:
            return
        with torch.no_grad():
            request = request_of_rows(cu_seqlens, count)
            ring = state.windows[-1].page_size
            lens = state.lens[request.long().clamp(min=0)]
            kept = (request >= 0) & (positions < lens) & (positions >= lens - ring)
            slots = torch.where(kept, request * ring + positions % ring, -1).to(torch.int32)
            cos, sin = rope_tables(self.cfg, positions, False)
            stages = self._stages()
            main = stages[0].main_proj(inputs)
            main = rms_norm_quantize(main, stages[0].main_norm.weight, eps=self.cfg.norm_eps)
            for stage in stages:
                stage.attn.write_window(stage.attn.wkv(main), cos, sin, slots, state.windows[stage.layer])

    def forward(
        self,
        anchors: torch.Tensor,
        state: V41State,
        sample: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    ) -> DraftBlock:
        """Draft ``block_size`` tokens behind the anchor of every request.

        Block rows are [anchor, noise, ...] at positions ``lens``, ``lens + 1``, ...; each sees the last
        ``window`` rows of the rings and the whole block.

        Args:
            anchors: [num_requests] int64, the token at position ``state.lens`` of each request; -1 for a
                request that does not draft.
            state: rings hold every position below ``lens``; not changed.
            sample: from logits [num_requests, vocab_size] f32 and the number of the draft in the block to ids
                [num_requests] int64, -1 where it can draw none. None takes the largest logit, the lower id on
                ties.

        Returns:
            DraftBlock; tokens are -1 where ``anchors`` is.

        Contract: no host sync; graph-safe if ``sample`` is; a request's drafts do not depend on the others.
        Reference: dsv41_reference.draft.V41ReferenceDraft
        """
        self._check_state("Drafter", state)
        check_tensor("Drafter", "anchors", anchors, (state.num_requests,), torch.int64, like=state.lens)
        _check_ids("anchors", anchors, self.cfg.vocab_size)
        cfg, block = self.cfg, self.block_size
        with torch.no_grad():
            plan = self.plan(state)
            ids = anchors[:, None].repeat(1, block)
            ids[:, 1:] = cfg.draft.noise_token
            x, pre = embed_streams(ids.flatten(), self._shared[0].weight, cfg.num_streams)

            def attend(stage: Block, h: torch.Tensor, hq: MXFP8) -> torch.Tensor:
                return attend_block(stage.attn, hq, state.windows[stage.layer], plan)

            x, pre = run_blocks(self._stages(), x, pre, attend, None)
            return self.chain(mhc_collapse(x, pre), anchors, sample or most_likely)

    def plan(self, state: V41State) -> BlockPlan:
        """Derive the block's indices from ``state.lens``."""
        requests, block, device = state.num_requests, self.block_size, state.lens.device
        ring = state.windows[-1]
        positions = (state.lens[:, None] + torch.arange(block, dtype=torch.int32, device=device)).flatten()
        cos, sin = rope_tables(self.cfg, positions, False)
        back = torch.arange(-self.cfg.window, 0, dtype=torch.int32, device=device)
        key = state.lens[:, None] + back
        number = torch.arange(requests, dtype=torch.int32, device=device)[:, None]
        seen = torch.where(key >= 0, number * ring.page_size + key % ring.page_size, -1).to(torch.int32)
        slots = torch.arange(requests * block, dtype=torch.int32, device=device)
        pages = torch.empty((1, requests * block, ring.record.bytes), dtype=torch.uint8, device=device)
        return BlockPlan(
            cos=cos,
            sin=sin,
            ring_ids=seen.repeat_interleave(block, 0),
            rows=PagedKV(pages, ring.record),
            row_slots=slots,
            row_ids=slots.view(requests, block).repeat_interleave(block, 0),
        )

    def chain(
        self,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        sample: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> DraftBlock:
        """The sequential heads, left to right.

        Args:
            hidden: [num_requests * block, hidden] bf16, collapsed, before the norm.
            anchors: [num_requests] int64.
            sample: as in `forward`.
        """
        last, block = self._stages()[-1], self.block_size
        normed = rms_norm(hidden, last.norm.weight, eps=self.cfg.norm_eps)
        logits = linear(normed, self._shared[1].weight, dtype=torch.float32).unflatten(0, (-1, block))
        hidden = hidden.unflatten(0, (-1, block))
        tokens = anchors[:, None].repeat(1, block)
        confidence = logits.new_empty((len(anchors), block))
        previous, s = anchors, last.markov_head.start(len(anchors))
        for i in range(block):
            e = last.markov_head.lookup(previous)
            confidence[:, i] = last.confidence_head(hidden[:, i], e)
            s = last.markov_head(logits[:, i], e, hidden[:, i], s)
            drawn, label = sample(logits[:, i], i), "what sample returns"
            check_tensor("Drafter", label, drawn, (len(anchors),), torch.int64, torch.int32, like=anchors)
            _check_ids(label, drawn, self.cfg.vocab_size)
            previous = torch.where(anchors >= 0, drawn, -1)
            tokens[:, i] = previous
        return DraftBlock(tokens, logits, confidence)


def _check_ids(label: str, ids: torch.Tensor, vocab: int) -> None:
    """Refuse ids past the vocabulary, on request: looking at them waits for the device."""
    if check_values() and ids.numel():
        check(int(ids.max()) < vocab, "Drafter", f"{label} below {vocab}", ids.tolist())


def attend_block(attn: Attention, hq: MXFP8, ring: PagedKV, plan: BlockPlan) -> torch.Tensor:
    """Attention of block rows over the ring and the block: MXFP8 [num_tokens, hidden] to bf16."""
    low, kv = attn.down(hq)
    attn.write_window(kv, plan.cos, plan.sin, plan.row_slots, plan.rows)
    q, _ = attn.queries(low, plan.cos, plan.sin)
    scale, sink = attn.cfg.softmax_scale, attn.attn_sink
    back = (plan.cos, plan.sin)
    o, _ = sparse_attn(
        q, ring, plan.ring_ids, plan.rows, plan.row_ids, scale=scale, sink=sink, inverse_rope=back
    )
    return attn.project(o)


def most_likely(logits: torch.Tensor, column: int) -> torch.Tensor:
    """Greedy drafts [num_requests] int64: the largest logit, the lower id on ties, -1 without a law."""
    none = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    cold = torch.zeros(len(logits), device=logits.device)
    return sample_tokens(logits, temperature=cold, seeds=none, uids=none, positions=none, stream="draft")
