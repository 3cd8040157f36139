"""One forward under bounded replay: every row in the encoder layers, a plan's rows in the decoder layers."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .._op import check, check_values
from ..cache import PagedKV
from ..config import V41FlashConfig
from ..formats import MXFP8
from .attention import Selection
from .block import Block, run_blocks
from .state import Step, V41State, plan_step

if TYPE_CHECKING:
    from .model import V41Flash


class Replay(Protocol):
    """What `V41Flash.forward` reads of a plan on the device; `dsv41.replay.device.DevicePlan` is one.

    N rows of the forward, M kept rows, P >= M rows that the decoder runs on. The fields are defined there.
    ``plan`` is the plan on the host: geometry, num_input_rows, num_rows, max_q_len, first_layer_differs.
    """

    @property
    def plan(self) -> Any: ...
    @property
    def rows(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def cu_seqlens_q(self) -> torch.Tensor: ...
    @property
    def floor(self) -> torch.Tensor: ...
    @property
    def attends(self) -> torch.Tensor: ...
    @property
    def encoder_floor(self) -> torch.Tensor: ...
    @property
    def writes_entries(self) -> torch.Tensor: ...

    def run(self, hooks: Any) -> Any:
        """Call the hooks in order: encode_all, write_global_kv, decode_rows on the gathered boundary."""
        ...


def check_replay(cfg: V41FlashConfig, replay: Replay, num_tokens: int, num_requests: int) -> None:
    """Refuse a plan of another geometry or batch, and a model whose decoder rows cannot be dropped."""
    name, first = "V41Flash", cfg.first_decoder_layer
    good = hasattr(replay, "plan") and hasattr(replay, "run")
    check(good, name, "a replay plan on the device (dsv41.replay.device.to_device)", type(replay).__name__)
    geometry = replay.plan.geometry
    planned = (geometry.window, geometry.first_decoder_layer, geometry.num_decoder_layers)
    ours = (cfg.window, first, cfg.num_layers - first)
    check(planned == ours, name, f"a replay plan for window, encoder and decoder layers {ours}", planned)
    last = max(cfg.engram.layers, default=-1)
    check(last < first, name, f"Engram below the first decoder layer {first} for replay", last)
    rows = replay.plan.num_input_rows
    check(rows == num_tokens, name, f"a replay plan of {num_tokens} rows (padding rows have none)", rows)
    requests = replay.cu_seqlens_q.shape[0] - 1
    check(requests == num_requests, name, f"a replay plan of the state's {num_requests} requests", requests)


def _check_rows(plan: Any, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """Refuse a plan of other rows than the forward's: it would cut windows and pick rows of other tokens."""
    bounds, ends = plan.query_start_loc.tolist(), plan.seq_lens.tolist()
    given, at = cu_seqlens.tolist(), positions.tolist()
    check(given == bounds, "V41Flash", f"cu_seqlens {bounds} of the replay plan", given)
    for r, end in enumerate(ends):
        last = at[bounds[r + 1] - 1] if bounds[r + 1] > bounds[r] else end - 1
        what = f"positions of request {r} up to {end - 1} of the replay plan"
        check(last == end - 1, "V41Flash", what, last)


class ReplayedForward:
    """The layers of one forward as the three hooks of `dsv41.replay.run_prefill`.

    The decoder runs a step of its own: the batch in which every request has its kept rows only. Where the
    first decoder layer keeps window rows of dropped rows too ("all_rows"), it attends the whole step's cache.
    """

    def __init__(
        self,
        model: "V41Flash",
        replay: Replay,
        tokens: torch.Tensor,
        step: Step,
        state: V41State,
        cu_seqlens: torch.Tensor,
        draft_inputs: torch.Tensor | None,
    ):
        if check_values():
            _check_rows(replay.plan, step.positions, cu_seqlens)
        self.first = model.cfg.first_decoder_layer
        self.model, self.replay, self.tokens, self.state = model, replay, tokens, state
        self.cu_seqlens, self.draft_inputs = cu_seqlens, draft_inputs
        slots = {r: torch.where(replay.writes_entries, s, -1) for r, s in step.entry_slots.items()}
        self.step = replace(step, entry_slots=slots)
        self.shared = Selection()
        self.first_window: PagedKV | None = None

    def layer(self, index: int) -> Block:
        layer = self.model.layers[index]
        assert isinstance(layer, Block)
        return layer

    def run(self, x: torch.Tensor, pre: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams and pre-mix of all rows at layer 0 to those of the M kept rows behind the last layer."""
        self.x, self.pre = x, pre
        kept = self.replay.run(self)
        return (x[:0], pre[:0]) if kept is None else kept

    def encode_all(self, plan: Any) -> tuple[torch.Tensor, ...]:
        """Encoder layers over all rows; what crosses the boundary: streams, pre-mix, image mask."""
        arguments = (self.tokens, self.step, self.state, self.cu_seqlens, self.draft_inputs)
        x, pre = self.model.run(self.x, self.pre, *arguments, num_layers=self.first)
        return x, pre, self.model.image_rows(self.tokens)

    def write_global_kv(self, boundary: tuple[torch.Tensor, ...], plan: Any) -> None:
        """The first decoder layer's entries and index keys of all rows; their window rows with "all_rows"."""
        layer = self.layer(self.first)
        h, hq = layer.attention_input(*boundary[:2])
        layer.attn.write_entries(h, self.step, self.state)
        if plan.first_layer_differs:
            kv = layer.attn.wkv(hq)
            self.first_window = layer.attn.fill_window(kv, self.step, self.state, self.shared)

    def decode_rows(self, kept: tuple[torch.Tensor, ...], plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoder layers over the kept rows; writes no entry and no index key."""
        x, pre, image = kept
        replay = self.replay
        positions = replay.positions.to(torch.int32)
        step = plan_step(self.state, positions, replay.cu_seqlens_q, plan.max_q_len, replay.floor)
        step.pages.wait()
        visible = {r: torch.where(replay.attends, count, 0) for r, count in step.visible.items()}
        step = replace(step, visible=visible)

        def attend(layer: Block, h: torch.Tensor, hq: MXFP8) -> torch.Tensor:
            if layer.layer == self.first:
                return self.attend_first(h, hq, step)
            return layer.attn(h, hq, step, self.state, self.shared)

        def watch(layer: Block, x: torch.Tensor) -> None:
            self.model.capture(layer.layer, x[: plan.num_rows], self.draft_inputs, replay.rows)

        return run_blocks(self.model.blocks[self.first :], x, pre, attend, image, watch=watch)

    def attend_first(self, h: torch.Tensor, hq: MXFP8, step: Step) -> torch.Tensor:
        """Attention of the first decoder layer: its entries are written, its window rows perhaps."""
        attention = self.layer(self.first).attn
        window = self.first_window
        if window is None:
            low, kv = attention.down(hq)
            window = attention.fill_window(kv, step, self.state, self.shared)
        else:
            low = attention.wq_a(hq)
            count = len(self.replay.rows)
            ids = torch.full_like(step.window_ids, -1)
            ids[:count] = self.step.window_ids[self.replay.rows]
            step = replace(step, window_ids=torch.where(self.replay.attends[:, None], ids, -1))
        return attention.attend(h, low, step, self.state, self.shared, window)
