"""V4.1-Flash: embeddings, blocks and head over caches that the caller owns."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._op import check, check_flags, check_sizes, check_tensor, check_values
from ..config import V41FlashConfig
from ..formats import MXFP8
from ..ops import engram_gate, engram_hash, linear, mhc_collapse, rms_norm
from .attention import Attention, Selection
from .beside import LONG, SHORT, beside
from .block import Block, embed_streams, run_blocks
from .draft import Drafter
from .engram import EngramSpec, EngramStore, Prefetcher, TokenMap, append_ids, dead_tokens, lookback_ids
from .expert_parallel import EPLayer, ExpertParallel, elsewhere
from .linear import BlockLinear, Weight, frozen
from .moe import Experts, SharedExperts
from .replayed import Replay, ReplayedForward, check_replay
from .state import Step, V41State, plan_step


class Engram(nn.Module):
    """``engram`` of one layer: the table is in a store (`attach`), everything else are parameters."""

    def __init__(self, cfg: V41FlashConfig):
        super().__init__()
        self.eps, self.width = cfg.norm_eps, cfg.engram.width
        self.wkv = BlockLinear(cfg.engram.width, (cfg.num_streams + 1) * cfg.hidden)
        self.q_weight = frozen((cfg.num_streams, cfg.hidden), torch.bfloat16)
        self.k_weight = frozen((cfg.num_streams, cfg.hidden), torch.bfloat16)
        self.store: EngramStore | None = None

    def forward(
        self, x: torch.Tensor, rows: torch.Tensor, dead: torch.Tensor, values: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Inject the memory into the streams.

        Args:
            x: [num_tokens, streams, hidden] bf16.
            rows: [num_tokens, columns] int32, this layer's table rows.
            dead: [num_tokens] bool, tokens that are returned as they are.
            values: [num_tokens, width] bf16 that were read ahead; None reads them here.
        """
        if values is None:
            check(self.store is not None, "Engram", "a table: model.attach_engram(layer, store)", "none")
            assert self.store is not None
            values = torch.empty((rows.shape[0], self.width), dtype=torch.bfloat16, device=x.device)
            self.store.lookup(rows, values)
        return engram_gate(x, self.wkv(values), self.q_weight, self.k_weight, dead=dead, eps=self.eps)


class Layer(Block):
    """Backbone layer: a block, with Engram in front where the config has it."""

    def __init__(self, cfg: V41FlashConfig, layer: int, ep: EPLayer | None = None):
        super().__init__(cfg, layer, ep)
        self.engram = Engram(cfg) if layer in cfg.engram.layers else None


class V41Flash(nn.Module):
    """The text model. Parameters carry the checkpoint's names; `weights.load` fills them.

    Prefill, chunked prefill and decode are one `forward` over a varlen batch; what is kept between steps is a
    `V41State`. Modules allocate no caches, look up no process group and never synchronise with the device.
    """

    def __init__(
        self,
        cfg: V41FlashConfig,
        token_map: TokenMap | None = None,
        *,
        drafter: bool = False,
        ep_group: ExpertParallel | None = None,
    ):
        """Build with uninitialised parameters (use ``with torch.device(...)`` to say where).

        Args:
            cfg: model constants.
            token_map: classes of token ids for Engram; `weights.load` needs none, `forward` does.
            drafter: also build ``mtp``, the `Drafter`; its tensors are skipped otherwise.
            ep_group: the ranks that share the routed experts of the layers; None holds them all here.
        """
        super().__init__()
        check(isinstance(cfg, V41FlashConfig), "V41Flash", "cfg: V41FlashConfig", cfg)
        check_flags("V41Flash", drafter=drafter)
        self.cfg, self.ep = cfg, ep_group
        if ep_group is not None:
            check(isinstance(ep_group, ExpertParallel), "V41Flash", "ep_group: ExpertParallel", ep_group)
            there, wanted = tuple(ep_group.counts.shape), (cfg.num_layers, cfg.num_experts)
            check(there == wanted, "V41Flash", f"an ep_group of {wanted} layers and experts", there)
        self.embed = Weight(cfg.vocab_size, cfg.hidden)
        self.layers = nn.ModuleList(
            Layer(cfg, i, None if ep_group is None else ep_group.layers[i]) for i in range(cfg.num_layers)
        )
        self.norm = Weight(cfg.hidden)
        self.head = Weight(cfg.vocab_size, cfg.hidden)
        self.mtp = Drafter(cfg, self.embed, self.head) if drafter else None
        with torch.device("cpu"):  # constants have values, also when parameters are built on "meta"
            self.engram_spec = EngramSpec.from_config(cfg)
        self.token_map: TokenMap | None = None
        self.prefetcher: Prefetcher | None = None
        self._on_device: dict[torch.device, tuple[torch.Tensor, EngramSpec]] = {}
        if token_map is not None:
            self.attach_token_map(token_map)

    # Weights.

    def attach_token_map(self, token_map: TokenMap) -> None:
        """Use these token classes; they must be as many as the tables were hashed with."""
        check(isinstance(token_map, TokenMap), "V41Flash", "token_map: TokenMap", token_map)
        token_map.check_config(self.cfg)
        self.token_map = token_map
        self._on_device.clear()

    def attach_engram(self, layer: int, store: EngramStore) -> None:
        """Read the Engram table of ``layer`` from ``store``."""
        check(layer in self.cfg.engram.layers, "V41Flash", f"layer: one of {self.cfg.engram.layers}", layer)
        reads = callable(getattr(store, "lookup", None))
        check(reads, "V41Flash", "store: an EngramStore", store)
        engram = self.layers[layer].engram
        assert isinstance(engram, Engram)
        engram.store = store

    def attach_prefetcher(self, prefetcher: Prefetcher | None) -> None:
        """Read Engram rows as soon as a step's ids are there, ahead of the layers; None reads them there."""
        good = prefetcher is None or all(hasattr(prefetcher, f) for f in ("submit", "wait"))
        check(good, "V41Flash.attach_prefetcher", "a prefetcher (submit, wait) or None", prefetcher)
        self.prefetcher = prefetcher

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter by its official name, as a view of the checkpoint's shape and type."""
        views: dict[str, torch.Tensor] = {}
        for path, parameter in self.named_parameters():
            if ".ffn.experts." not in path:
                views[path] = parameter.data
        for path, module in self.named_modules():
            if path.endswith(".ffn.experts"):
                for name, view in module.checkpoint_tensors().items():
                    views[f"{path}.{name}"] = view.data
        return views

    def elsewhere(self) -> set[str]:
        """Names in the checkpoint that other ranks load."""
        return set() if self.ep is None else elsewhere(self.ep.layers)

    def pack(self) -> "V41Flash":
        """Put loaded weights into the order and the pieces that kernels read, in place and once.

        Weights that read the same input become one (``wq_a`` with ``wkv``, ``w1`` with ``w3`` of the shared
        expert). On Hopper the routed experts take their kernel's order: they are no checkpoint tensors any
        more, and `forward` refuses experts that were not packed. Needs a layer's memory for a moment.
        """
        for module in self.modules():
            if isinstance(module, (Attention, SharedExperts)):
                module.join()
            elif isinstance(module, Experts) and module.packable:
                module.pack()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "V41Flash":
        super()._apply(fn, recurse)
        for module in self.modules():
            if isinstance(module, (Attention, SharedExperts)) and module.joined is not None:
                module.join()  # `to` and its like move each weight to a place of its own
        return self

    # Forward.

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        state: V41State,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_len: int | None = None,
        rows: torch.Tensor | None = None,
        draft_inputs: torch.Tensor | None = None,
        replay: Replay | None = None,
    ) -> torch.Tensor:
        """Process new tokens of every request and return logits.

        Args:
            tokens: [num_tokens] int32 or int64 ids; rows of one request are consecutive.
            positions: [num_tokens] int32, each request continuing at ``state.lens``.
            state: caches, written in place; ``state.lens`` and ``state.tokens`` advance at the end.
            cu_seqlens: [num_requests + 1] int32, first row of each request of the state (a request may have
                none); rows past the last are padding. None when the state has one request.
            max_len: bound on the rows of one request; None is the exact value on a CPU and num_tokens
                elsewhere.
            rows: [n] int64, which rows' logits are wanted; None is all of them. Under a replay plan they
                count its kept rows, as ``plan.logits_row`` does.
            draft_inputs: [num_tokens, num_targets * hidden] bf16 to write the drafter's inputs into, or None.
            replay: bounded replay, a `dsv41.replay.device.DevicePlan` of exactly these rows (no padding
                rows): the decoder layers run on the plan's rows only. None runs every row in every layer.

        Returns:
            [n, vocab_size] f32; without ``rows``, of every row of the step, or of the plan's kept rows.

        Under DSV41_CHECK=1 token ids, positions and room are checked before anything is written; otherwise a
        token out of range embeds as zeros and an entry that no page holds is not stored.
        """
        with torch.no_grad():
            cu_seqlens, max_len = self._check(
                tokens, positions, state, cu_seqlens, max_len, rows, draft_inputs
            )
            if replay is not None:
                check_replay(self.cfg, replay, len(tokens), state.num_requests)
            if rows is not None and rows.numel() and (rows.device.type == "cpu" or check_values()):
                least, most = int(rows.min()), int(rows.max())
                end = len(tokens) if replay is None else replay.plan.num_rows
                check(least >= 0 and most < end, "V41Flash", f"rows: 0 to {end - 1}", f"{least} to {most}")
            floors = None if replay is None else replay.encoder_floor
            embedded = beside(lambda: self.embed_streams(tokens), tokens, SHORT)
            step = plan_step(state, positions, cu_seqlens, max_len, floors)
            if self.ep is not None:  # a replay has no padding rows
                self.ep.begin(len(tokens), cu_seqlens if replay is None else None)
            x, pre = embedded.wait()
            if replay is None:
                x, pre = self.run(x, pre, tokens, step, state, cu_seqlens, draft_inputs)
            else:
                step.pages.wait()
                parts = ReplayedForward(self, replay, tokens, step, state, cu_seqlens, draft_inputs)
                x, pre = parts.run(x, pre)
            if self.ep is not None:
                self.ep.end()
            committed = beside(lambda: self.commit(tokens, step, state, cu_seqlens), tokens, LONG)
            if rows is not None:
                x, pre = x[rows], pre[rows]
            logits = self.logits(x, pre)
            committed.wait()
            return logits

    def embed_streams(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams [num_tokens, streams, hidden] bf16, all equal, and the one-hot pre-mix of the first
        sub-layer.
        """
        return embed_streams(tokens, self.embed.weight, self.cfg.num_streams)

    def run(
        self,
        x: torch.Tensor,
        pre: torch.Tensor,
        tokens: torch.Tensor,
        step: Step,
        state: V41State,
        cu_seqlens: torch.Tensor,
        draft_inputs: torch.Tensor | None = None,
        num_layers: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``num_layers`` layers (None: all) over the rows of the step."""
        cfg = self.cfg
        ahead = self.prefetcher

        def look() -> torch.Tensor:
            rows = self.engram_rows(tokens, step, state, cu_seqlens)
            if ahead is not None:
                ahead.submit(rows)
            return rows

        looked = beside(look, tokens, LONG)
        dead, image = dead_tokens(tokens, cfg.image_token), self.image_rows(tokens)
        shared = Selection()

        def attend(layer: Block, h: torch.Tensor, hq: MXFP8) -> torch.Tensor:
            return layer.attn(h, hq, step, state, shared)

        def remember(engram: Engram, layer: int, x: torch.Tensor) -> torch.Tensor:
            own = looked.wait()[:, cfg.engram.layers.index(layer)]
            return engram(x, own, dead, None if ahead is None else ahead.wait(layer))

        def inject(layer: Block) -> Callable[[torch.Tensor], torch.Tensor] | None:
            if not isinstance(layer, Layer) or layer.engram is None:
                return None
            return functools.partial(remember, layer.engram, layer.layer)

        def watch(layer: Block, x: torch.Tensor) -> None:
            self.capture(layer.layer, x, draft_inputs)

        return run_blocks(self.blocks[:num_layers], x, pre, attend, image, watch=watch, inject=inject)

    @property
    def blocks(self) -> list[Block]:
        """The backbone's layers."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def capture(
        self, layer: int, x: torch.Tensor, draft_inputs: torch.Tensor | None, rows: torch.Tensor | None = None
    ) -> None:
        """Put the streams that enter a target layer into ``rows`` (None: all) of ``draft_inputs``."""
        targets, hidden = self.cfg.draft.target_layers, self.cfg.hidden
        if draft_inputs is not None and layer in targets:
            columns = draft_inputs.narrow(1, targets.index(layer) * hidden, hidden)
            columns[slice(None) if rows is None else rows] = stream_mean(x)

    def image_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """[num_tokens] bool: tokens that are routed with ``bias_vl``."""
        return (tokens >= self.cfg.image_token) & (tokens < self.cfg.image_token_end)

    def engram_rows(
        self, tokens: torch.Tensor, step: Step, state: V41State, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        """Table rows [num_tokens, engram layers, columns] int32 of the step's tokens."""
        cfg = self.cfg
        if not cfg.engram.layers:
            return tokens.new_empty((tokens.shape[0], 0, 0))
        device = tokens.device
        if device not in self._on_device:
            check(self.token_map is not None, "V41Flash", "a token map: model.attach_token_map(map)", "none")
            assert self.token_map is not None
            self._on_device[device] = self.token_map.ids.to(device), self.engram_spec.to(device)
        classes, spec = self._on_device[device]
        return engram_hash(
            tokens,
            step.positions,
            cu_seqlens,
            classes,
            spec.multipliers,
            spec.primes,
            spec.offsets,
            lookback=lookback_ids(state.tokens, state.lens, cfg.engram.max_ngram - 1),
            pad_token=spec.pad_token,
            image_token=cfg.image_token,
        )

    def logits(self, x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """Final collapse, norm and head: [n, vocab_size] f32."""
        h = rms_norm(mhc_collapse(x, pre), self.norm.weight, eps=self.cfg.norm_eps)
        return linear(h, self.head.weight, dtype=torch.float32)

    @staticmethod
    def commit(tokens: torch.Tensor, step: Step, state: V41State, cu_seqlens: torch.Tensor) -> None:
        """Record the step's ids and advance the lengths."""
        append_ids(state.tokens, tokens, step.positions, cu_seqlens)
        state.lens.add_(cu_seqlens[1:] - cu_seqlens[:-1])
        torch.maximum(state.written, state.lens, out=state.written)

    def _check(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        state: V41State,
        cu_seqlens: torch.Tensor | None,
        max_len: int | None,
        rows: torch.Tensor | None,
        draft_inputs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, int]:
        name = "V41Flash"
        check_tensor(name, "tokens", tokens, (None,), torch.int32, torch.int64, like=self.embed.weight)
        count = tokens.shape[0]
        check_tensor(name, "positions", positions, (count,), torch.int32, like=tokens)
        check(isinstance(state, V41State), name, "state: V41State", state)
        check(state.cfg == self.cfg, name, "a state of the same config", "another")
        check(state.lens.device == tokens.device, name, f"a state on {tokens.device}", f"{state.lens.device}")
        if cu_seqlens is None:
            one = state.num_requests == 1
            check(one, name, f"cu_seqlens: [{state.num_requests + 1}] int32 for this state", None)
            cu_seqlens = count * torch.arange(2, dtype=torch.int32, device=tokens.device)
        check_tensor(name, "cu_seqlens", cu_seqlens, (state.num_requests + 1,), torch.int32, like=tokens)
        if rows is not None:
            check_tensor(name, "rows", rows, (None,), torch.int64, like=tokens)
        if draft_inputs is not None:
            width = len(self.cfg.draft.target_layers) * self.cfg.hidden
            check_tensor(name, "draft_inputs", draft_inputs, (count, width), torch.bfloat16, like=tokens)
        longest = count
        if tokens.device.type == "cpu" and state.num_requests:
            lengths = cu_seqlens.diff()
            rising = int(cu_seqlens[0]) == 0 and int(lengths.min()) >= 0 and int(cu_seqlens[-1]) <= count
            check(rising, name, f"cu_seqlens: rising from 0 to at most {count}", cu_seqlens.tolist())
            longest = int(lengths.max())
            if max_len is not None:
                check_sizes(name, max(0, longest), max_len=max_len)
        if max_len is None:
            max_len = longest
        check_sizes(name, max_len=max_len)
        if check_values():
            self._check_values(tokens, positions, state, cu_seqlens.tolist(), max_len)
        return cu_seqlens, max_len

    def _check_values(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        state: V41State,
        cu: list[int],
        max_len: int,
    ) -> None:
        name = "V41Flash"
        rising = cu[0] == 0 and all(a <= b for a, b in itertools.pairwise(cu)) and cu[-1] <= len(tokens)
        check(rising, name, f"cu_seqlens: rising from 0 to at most {len(tokens)}", cu)
        lens, place = state.lens.tolist(), positions.tolist()
        table = state.page_table.cpu()
        for r, (first, end) in enumerate(itertools.pairwise(cu)):
            if first == end:
                continue
            length = end - first
            check(length <= max_len, name, f"at most max_len = {max_len} rows of request {r}", length)
            wanted = list(range(lens[r], lens[r] + length))
            got = place[first:end]
            what = f"positions of request {r} to continue its state at {lens[r]}"
            check(got == wanted, name, what, f"{got[:4]} ..." if length > 4 else got)
            last = lens[r] + length
            check(last <= state.capacity, name, f"room for {last} tokens of request {r}", f"{state.capacity}")
            pages = table[r, : -(-last // state.block)]
            held = bool(((pages >= 0) & (pages < self._num_pages(state))).all())
            check(held, name, f"a page in range for every block of request {r}", pages.tolist()[:8])
        used = tokens[: cu[-1]]
        bad = used[(used < 0) | (used >= self.cfg.vocab_size)]
        check(not bad.numel(), name, f"token ids 0 to {self.cfg.vocab_size - 1}", bad[:1].tolist())

    @staticmethod
    def _num_pages(state: V41State) -> int:
        return min((c.pages.shape[0] for c in state.compressed.values()), default=2**31)


def stream_mean(x: torch.Tensor) -> torch.Tensor:
    """Mean of the streams [num_tokens, streams, hidden] in f32, rounded once to bf16 (exact for four
    streams).
    """
    return x.float().mean(1).to(torch.bfloat16)
