"""Decode steps over memory that stays in place, captured in CUDA graphs of a few sizes.

A step drafts, splits the budget, runs the target, verifies, takes back what fell and writes the drafter's
context, all on the device: nothing waits for the host, which reads what was emitted while the next steps run.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .._op import check, check_numbers, check_sizes, check_values, no_compile
from ..ops.draft import DraftBlock
from ..ops.verify import split_budget_ragged, verify_drafts
from ..ops.verify.api import MODES
from ._values import integer
from .generate import Drafts
from .streams import Streams

Size = tuple[int, int]


def default_sizes(requests: int, block: int) -> list[Size]:
    """A grid of (requests, tokens): powers of two, with no draft each, one, two, half a block and all."""
    check_sizes("default_sizes", 1, requests=requests)
    check_sizes("default_sizes", block=block)
    powers = [1 << i for i in range((requests - 1).bit_length())]
    drafts = sorted({0, 1, 2, -(-block // 2), block} if block else {0})
    return [(r, r * (1 + k)) for r in [*powers, requests] for k in drafts if k <= block]


@dataclass
class _Live:
    """What the host knows of a request: its caches hold at most ``length`` tokens and never above ``end``."""

    length: int
    end: int
    room: int


@dataclass
class Emission:
    """What one step emits. `read` waits for it; others may have run since. ``rows`` [requests, columns] is
    what the step left on the host.
    """

    owner: "DecodeGraphs"
    rows: torch.Tensor
    event: Any
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    verified: int = 0
    read_already: bool = False

    def read(self) -> dict[int, list[int]]:
        """Emitted ids of each request that emitted any; ``ended`` and ``verified`` are known afterwards."""
        self.owner.catch_up(self)
        return self.tokens


class DecodeGraphs:
    """Decodes the requests of a state, a step a call; see `step`.

    A request takes part from `admit`, behind its prefill, until it has emitted its tokens or a stop id, or
    `cancel`. It is row ``request`` of the state; the lowest free row keeps the steps small. Texts are those
    of `generate` with the same options.

    Args:
        model: the target, called as `dsv41.layers.V41Flash`.
        state: its caches (`dsv41.layers.V41State`): one request a row.
        drafter: what drafts (of a captured step: on the device, as `dsv41.layers.draft.Drafter`), or None.
        mode: ``chain``, ``block`` or ``coupled``.
        sizes: (requests, tokens) of the graphs, tokens at least requests; None is `default_sizes`. A step
            takes the smallest that holds it, or runs by itself in its own size when none does.
        stop_ids: a request ends behind one of these.
        confidence: from confidence logits to probabilities.
        depth: steps that may run before the host reads the first of them.
    """

    def __init__(
        self,
        model: Callable[..., torch.Tensor],
        state: Any,
        *,
        drafter: Drafts | None = None,
        mode: str = "chain",
        sizes: Iterable[Size] | None = None,
        stop_ids: Iterable[int] = (),
        confidence: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid,
        depth: int = 2,
    ):
        name = "DecodeGraphs"
        count: int = getattr(state, "num_requests", -1)
        check(count >= 0, name, "state: V41State", state)
        check(callable(model), name, "model: V41Flash, or what is called like it", model)
        check(callable(confidence), name, "confidence: a function", confidence)
        check(mode in MODES, name, f"mode: one of {', '.join(MODES)}", mode)
        check_sizes(name, 1, depth=depth)
        check(count > 0, name, "a state with requests", count)
        self.model, self.state, self.drafter, self.mode = model, state, drafter, mode
        self.confidence, self.count = confidence, count
        self.block: int = 1 if drafter is None else getattr(drafter, "block_size", 0)
        check(self.block >= 1, name, "drafter: what has a block_size and drafts", drafter)
        self._written = 1 if drafter is None else self.block + 1  # tokens a request and step, at most
        self._largest_token: int = getattr(getattr(model, "cfg", None), "vocab_size", 2**31) - 1
        back = drafter is None or self.block <= state.max_rollback
        check(back, name, f"a state that takes back {self.block} tokens", state.max_rollback)
        known = sizes is None or isinstance(sizes, Iterable)
        check(known, name, "sizes: a list of (requests, tokens)", sizes)
        given = default_sizes(count, 0 if drafter is None else self.block) if sizes is None else list(sizes)
        for size in given:
            pair = isinstance(size, tuple | list) and len(size) == 2 and all(type(n) is int for n in size)
            good = pair and 1 <= size[0] <= count and size[0] <= size[1]
            check(good, name, f"sizes: (requests up to {count}, tokens of at least as many)", size)
        self.sizes: list[Size] = sorted(set(given))
        device = state.lens.device

        def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full(shape or (count,), value, dtype=dtype, device=device)

        # Inputs and results of every step, always at the same place.
        self.anchors, self.left = full(-1, torch.int64), full(0, torch.int32)
        self.temperature = full(0, torch.float32)
        self.seeds, self.uids = full(0, torch.int64), torch.arange(count, device=device)
        self.budget, self.rotation = full(0, torch.int32, 1), full(0, torch.int32, 1)
        self.results = full(-1, torch.int64, count, self.block + 1 + _EXTRA)
        check(isinstance(stop_ids, Iterable), name, "stop_ids: token ids", stop_ids)
        stops = [integer(name, "stop_ids: token ids", i) for i in stop_ids]
        check(all(abs(i) < 2**63 for i in stops), name, "stop_ids: token ids", stops)
        self.stops = torch.tensor(stops, dtype=torch.int64, device=device)
        self._number = torch.arange(self.block + 1, device=device)
        undrafted = full(-1, torch.int64, count, self.block), None, full(0, torch.float32, count, self.block)
        self._undrafted, self._none = DraftBlock(*undrafted), full(0, torch.int32)
        self.steps = 0
        self._states: dict[int, Any] = {count: state}
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self._live: dict[int, _Live] = {}
        self._uids: dict[int, int] = {}
        self._unread: deque[Emission] = deque()
        pinned = device.type == "cuda"
        self._host = [torch.empty_like(self.results, device="cpu", pin_memory=pinned) for _ in range(depth)]

    # Requests.

    @property
    def live(self) -> list[int]:
        """Requests that may still emit, as far as the host has read."""
        return sorted(self._live)

    def admit(
        self,
        request: int,
        anchor: int | torch.Tensor,
        *,
        length: int,
        left: int,
        temperature: float = 0.0,
        seed: int = 0,
        uid: int | None = None,
        room: int | None = None,
    ) -> None:
        """Let a request decode behind its prefill.

        Args:
            request: row of the state.
            anchor: the token that it emitted last and that its caches do not hold; an integer, or a tensor of
                one on the device (there its value is looked at under ``DSV41_CHECK=1`` only).
            length: tokens that its caches hold.
            left: tokens that it may still emit, at least 1.
            temperature: 0 is greedy.
            seed: of its random stream.
            uid: of its random stream, other than those of all live requests; None is ``request``.
            room: tokens that its pages hold, `grow` raises it. None is what the page table says on a CPU, and
                the state's capacity on an accelerator, where a pool that is smaller than that needs it.

        Errors: ValueError for a live request, or one that has no room for its next token.
        """
        name = "DecodeGraphs.admit"
        check_sizes(name, 0, self.count - 1, request=request)
        if not isinstance(anchor, torch.Tensor):
            check_sizes(name, anchor=anchor)
        else:
            one = anchor.numel() == 1 and anchor.dtype in (torch.int32, torch.int64)
            check(one, name, "anchor: one token id", anchor)
        if not isinstance(anchor, torch.Tensor) or anchor.device.type == "cpu" or check_values():
            check_sizes(name, 0, self._largest_token, anchor=int(anchor))
        check_sizes(name, 0, self.state.capacity, length=length)
        check_sizes(name, 1, 2**31 - 1, left=left)
        check_numbers(name, -math.inf, temperature=temperature)
        check_sizes(name, -(2**63), seed=seed)
        if room is not None:
            check_sizes(name, room=room)
        if uid is not None:
            check_sizes(name, 0, 2**48 - 1, uid=uid)
        self.catch_up()
        check(request not in self._live, name, "a request that is not live", request)
        held = self._held(name, request, room)
        check(length + 1 <= held, name, f"room for {length + 1} tokens of request {request}", held)
        uid = request if uid is None else uid
        taken = {self._uids[r] for r in self._live}
        check(uid not in taken, name, "uid: of no other live request", uid)
        if self.state.lens.device.type == "cpu":
            there = int(self.state.lens[request])
            check(there == length, name, f"length {there} of request {request}", length)
        self.anchors[request] = anchor
        for tensor, value in (
            (self.left, left), (self.temperature, temperature), (self.seeds, seed), (self.uids, uid),
        ):  # fmt: skip
            tensor[request] = value
        self._uids[request] = uid
        self._live[request] = _Live(length, length + left, held)

    def grow(self, request: int, room: int) -> None:
        """The request's pages hold ``room`` tokens now."""
        self._check_live("DecodeGraphs.grow", request)
        check_sizes("DecodeGraphs.grow", room=room)
        self._live[request].room = self._held("DecodeGraphs.grow", request, room)

    def _held(self, name: str, request: int, room: int | None) -> int:
        """Tokens that a request's pages hold, as far as the host can know."""
        held, table = self.state.capacity, getattr(self.state, "page_table", None)
        if table is not None and table.device.type == "cpu":
            free = (table[request] < 0).nonzero()
            held = min(held, self.state.block * int(free[0, 0]) if len(free) else held)
        elif table is not None and room is None:
            pool = min((c.pages.shape[0] for c in self.state.compressed.values()), default=table.numel())
            check(pool >= table.numel(), name, "room: tokens that its pages hold, for a pool", room)
        return held if room is None else min(room, held)

    def cancel(self, request: int) -> None:
        """End a request now; its caches are the caller's again."""
        self._check_live("DecodeGraphs.cancel", request)
        self.catch_up()
        self.anchors[request] = -1
        self._live.pop(request, None)

    def _check_live(self, name: str, request: int) -> None:
        check_sizes(name, request=request)
        check(request in self._live, name, f"a live request: {self.live}", request)

    def catch_up(self, last: Emission | None = None) -> None:
        """Read all steps, or those up to ``last``, in order; waits for the device."""
        while self._unread and (last is None or not last.read_already):
            self._read(self._unread.popleft())

    def _read(self, emission: Emission) -> None:
        if emission.event is not None:
            emission.event.synchronize()
        rows = emission.rows.tolist()
        emission.read_already, ended = True, set()
        for r in self.live:
            *tokens, count, over, length, verified = rows[r]
            if count:
                emission.tokens[r] = tokens[:count]
            emission.verified += verified
            # What ran since may have added up to a block and a token a step.
            known = self._live[r]
            known.length = min(length + len(self._unread) * self._written, known.end)
            if over:
                ended.add(r)
                del self._live[r]
        emission.ended = frozenset(ended)

    # Steps.

    def step(self, budget: int | None = None) -> Emission:
        """Emit one token or more of every live request.

        Args:
            budget: drafts that are verified, over all requests; None is all.

        Returns:
            Emission; its results are on the way to the host. It is empty when the host now reads that all
            have ended.

        Errors: ValueError, before anything is written, when nobody is live or a request might run out of its
            pages in this step (only near that end the host waits for the steps before).
        Contract: no host sync, except for the step ``depth`` before this one; the same texts in every size.
        """
        name = "DecodeGraphs.step"
        check(bool(self._live), name, "a request that decodes (admit)", "none")
        if budget is not None:
            check_sizes(name, budget=budget)
        if len(self._unread) == len(self._host):
            self._read(self._unread.popleft())
            if not self._live:
                return Emission(self, self._host[0], None, read_already=True)
        self._check_room(name)
        most = 0 if self.drafter is None else self.block * len(self._live)
        drafts = most if budget is None else min(budget, most)
        size = self.size(max(self._live) + 1, len(self._live) + drafts)
        self.budget.fill_(drafts)
        self.rotation.fill_(self.steps % self.count)
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
        else:
            self.run(*size)
        self.steps += 1
        for known in self._live.values():
            known.length = min(known.length + self._written, known.end)
        free = next(host for host in self._host if all(host is not e.rows for e in self._unread))
        free.copy_(self.results, non_blocking=True)
        event = None
        if self.results.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._unread.append(Emission(self, free, event))
        return self._unread[-1]

    def _check_room(self, name: str) -> None:
        def short() -> list[tuple[int, int, int]]:
            needed = ((r, min(k.length + self._written, k.end), k.room) for r, k in self._live.items())
            return [row for row in needed if row[1] > row[2]]

        if short():
            self.catch_up()
        for request, needed, room in short():
            check(False, name, f"pages for {needed} tokens of request {request} (grow)", room)

    def size(self, requests: int, tokens: int) -> Size:
        """The smallest captured size for so many rows of the state and tokens; themselves beyond the grid."""
        return min(
            (s for s in self._graphs if s[0] >= requests and s[1] >= tokens), default=(requests, tokens)
        )

    def capture(self) -> None:
        """Capture the step of every size, the largest first: all graphs share their memory.

        Errors: RuntimeError when a kernel is not compiled, with the call to make (`dsv41.prepare`).
        """
        name, device = "DecodeGraphs.capture", self.state.lens.device
        check(device.type == "cuda", name, "a state on a CUDA device", str(device))
        anchors = self.anchors.clone()
        self.anchors.fill_(-1)  # nobody decodes: running a step changes nothing
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            for size in sorted(self.sizes, key=lambda s: (s[1], s[0]), reverse=True):
                with no_compile():
                    with torch.cuda.stream(stream):
                        self.run(*size)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=stream):
                        self.run(*size)
                self._graphs[size] = graph
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            self.anchors.copy_(anchors)

    def _rows(self, requests: int) -> Any:
        """The state's first rows: views, made once."""
        if requests not in self._states:
            self._states[requests] = self.state.first(requests)
        return self._states[requests]

    def run(self, requests: int, tokens: int) -> None:
        """One step of the first ``requests`` rows in ``tokens`` rows of the target: what a graph replays."""
        with torch.no_grad():
            self._run(self._rows(requests), requests, tokens)

    def _run(self, state: Any, requests: int, tokens: int) -> None:
        anchors, left, heat = self.anchors[:requests], self.left[:requests], self.temperature[:requests]
        streams = Streams(self.seeds[:requests], self.uids[:requests])
        start = state.lens.long()
        drafts = self._draft(state, anchors, start, heat, streams)
        live = anchors >= 0
        most = self._none[:requests]
        if self.drafter is not None:
            there = (drafts.tokens >= 0).cumprod(1).sum(1, dtype=torch.int32)
            most = torch.minimum(there, (left - 1).clamp(min=0))
        one = live.int()
        split = split_budget_ragged(
            self.confidence(drafts.confidence).float().contiguous(),
            self.budget,
            lo=self._none[:requests],
            hi=most,
            base=one,
            bonus=one,
            start=start,
            rotation=self.rotation,
            max_tokens=tokens,
            max_logits=tokens,
        )
        owner = split.token_request_ids.long()
        request = owner.clamp(min=0)
        place = (split.positions - start[request]).clamp(min=0)
        both = torch.cat([anchors[:, None], drafts.tokens], 1)
        # Rows of nobody are padding: any id. (A fill, as `where` would first make a tensor of the number.)
        ids = both[request, place].masked_fill_(owner < 0, 0)
        positions, inputs = split.positions.int(), None
        if self.drafter is not None and self.drafter.input_width:
            shape = (tokens, self.drafter.input_width)
            inputs = torch.empty(shape, dtype=torch.bfloat16, device=ids.device)
        logits = self.model(
            ids, positions, state,
            cu_seqlens=split.cu_q, max_len=self.block + 1, rows=None, draft_inputs=inputs,
        )  # fmt: skip
        law = verify_drafts(
            logits,
            split.cu_logits,
            drafts.tokens,
            temperature=heat,
            seeds=streams.seeds,
            uids=streams.uids,
            positions=start,
            draft_logits=drafts.logits,
            mode=self.mode,
        )
        number = self._number
        count = torch.minimum(law.num_emitted, left)  # 0 of a request that does not decode
        over = law.status != 0
        if len(self.stops):
            stops = torch.isin(law.tokens, self.stops) & (number < count[:, None])
            first = torch.where(stops, number + 1, self.block + 2).amin(1).int()
            over |= first <= count
            count = torch.minimum(count, first)
        last = law.tokens.gather(1, (count.long() - 1).clamp_(min=0)[:, None])[:, 0]
        left.sub_(count)
        over = live & (over | (left <= 0))
        state.rollback((start + count).int())
        if self.drafter is not None and inputs is not None:
            self.drafter.write_context(inputs, positions, state, cu_seqlens=split.cu_q)
        torch.where(live, last.masked_fill(over, -1), anchors, out=anchors)
        self.results[requests:, self.block + 1] = 0
        rows = self.results[:requests]
        rows[:, : self.block + 1] = law.tokens.masked_fill(number >= count[:, None], -1)
        for i, column in enumerate((count, over, state.lens, split.lengths)):
            rows[:, self.block + 1 + i] = column

    def _draft(
        self, state: Any, anchors: torch.Tensor, start: torch.Tensor, heat: torch.Tensor, streams: Streams
    ) -> DraftBlock:
        if self.drafter is None:
            tokens, _, confidence = self._undrafted
            return DraftBlock(tokens[: len(anchors)], None, confidence[: len(anchors)])

        def sample(z: torch.Tensor, column: int) -> torch.Tensor:
            return streams.draft(z, column, start, heat, mode=self.mode)

        return self.drafter(anchors, state, sample)


_EXTRA = 4  # columns of the results behind the tokens: count, over, length, drafts verified
