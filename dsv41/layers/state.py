"""What a model keeps between steps: views over tensors that the caller owns, and the plan of one step."""

from dataclasses import dataclass, replace

import torch
from dsv41_reference.rope import rope_table

from .._op import check, check_flags, check_sizes, check_tensor, check_values
from ..cache import PagedKV, PageRows, Record
from ..config import V41FlashConfig
from .beside import LONG, Branch, beside


def ring_slots(cfg: V41FlashConfig, drafts: int) -> tuple[int, int]:
    """Slots of a window ring, and of the carry and token rings, that survive a rollback of ``drafts`` tokens.

    A window ring of exactly ``window`` slots would lose the far end of the window with every rejected token.
    """
    small = max(8, 1 << (drafts + 3).bit_length())
    return cfg.window + drafts, small


@dataclass(frozen=True)
class V41State:
    """Caches of ``num_requests`` sequences. Memory is the caller's; this checks shapes once and owns nothing.

    Args:
        cfg: the model's config.
        lens: [num_requests] int32, tokens processed so far.
        written: [num_requests] int32, most tokens that the rings ever held at once; a rollback leaves it.
        tokens: [num_requests, slots] int32, id of position p at p % slots: the look-back of Engram.
        page_table: [num_requests, max_pages] int32, pages of each request in order, -1 where none is held.
            A page covers ``block`` tokens: block/ratio entries of each cache.
        windows: a PagedKV a layer (drafter stages last), one page a request: position p at slot p %
            page_size.
        compressed: PagedKV of each kv source.
        index_keys: PagedKV of each kv source, pages as ``compressed``.
        carry: [num_requests, slots, 2 * head_dim] f32 of each kv source of ratio 2.
    """

    cfg: V41FlashConfig
    lens: torch.Tensor
    written: torch.Tensor
    tokens: torch.Tensor
    page_table: torch.Tensor
    windows: tuple[PagedKV, ...]
    compressed: dict[int, PagedKV]
    index_keys: dict[int, PagedKV]
    carry: dict[int, torch.Tensor]

    def __post_init__(self) -> None:
        name, cfg = "V41State", self.cfg
        check_tensor(name, "lens", self.lens, (None,), torch.int32)
        requests = self.lens.shape[0]
        check_tensor(name, "written", self.written, (requests,), torch.int32, like=self.lens)
        check_tensor(name, "tokens", self.tokens, (requests, None), torch.int32, like=self.lens)
        look_back = cfg.engram.max_ngram - 1
        check(self.tokens.shape[1] > look_back, name, f"tokens: more than {look_back} slots", self.tokens)
        check_tensor(name, "page_table", self.page_table, (requests, None), torch.int32, like=self.lens)
        layers = (cfg.num_layers, cfg.num_layers + cfg.draft.num_stages)
        check(len(self.windows) in layers, name, f"windows: {layers[0]} or {layers[1]}", len(self.windows))
        for i, ring in enumerate(self.windows):
            good = ring.pages.shape[0] == requests and ring.page_size >= cfg.window
            check(good, name, f"window {i}: [{requests}, at least {cfg.window}, *]", ring.pages)
            check(ring.page_size == self.windows[0].page_size, name, "windows of one size", ring.page_size)
            check(ring.record.dim == cfg.head_dim, name, f"window {i}: width {cfg.head_dim}", ring.record)
        sources = set(cfg.kv_sources)
        for label, caches in (("compressed", self.compressed), ("index_keys", self.index_keys)):
            check(set(caches) == sources, name, f"{label} of layers {sorted(sources)}", sorted(caches))
        for i in cfg.kv_sources:
            size = self.block // cfg.compress_ratios[i]
            for label, cache in (("compressed", self.compressed[i]), ("index_keys", self.index_keys[i])):
                check(cache.page_size == size, name, f"{label} {i}: {size} entries a page", cache.page_size)
        gated = {i for i in cfg.kv_sources if cfg.compress_ratios[i] == 2}
        check(set(self.carry) == gated, name, f"carry of layers {sorted(gated)}", sorted(self.carry))
        for i, ring in self.carry.items():
            check_tensor(
                name, f"carry {i}", ring, (requests, None, 2 * cfg.head_dim), torch.float32, like=self.lens
            )
            check(ring.shape[1] >= 1, name, f"carry {i}: at least one slot", ring)

    @property
    def num_requests(self) -> int:
        """Sequences, used or not."""
        return self.lens.shape[0]

    @property
    def block(self) -> int:
        """Tokens a page covers."""
        if not self.cfg.kv_sources:
            return 1
        first = self.cfg.kv_sources[0]
        return self.compressed[first].page_size * self.cfg.compress_ratios[first]

    @property
    def capacity(self) -> int:
        """Tokens a request can hold."""
        return min(self.page_table.shape[1] * self.block, self.cfg.max_positions)

    @property
    def max_rollback(self) -> int:
        """Tokens that can be taken back once a ring has wrapped around."""
        window = self.windows[0].page_size - self.cfg.window + 1
        ids = self.tokens.shape[1] - (self.cfg.engram.max_ngram - 1)
        return min([window, ids, *(ring.shape[1] - 1 for ring in self.carry.values())])

    @staticmethod
    def allocate(
        cfg: V41FlashConfig,
        num_requests: int,
        max_tokens: int,
        *,
        drafts: int | None = None,
        block: int = 64,
        pages: int | None = None,
        drafter: bool = False,
        device: torch.device | str = "cpu",
    ) -> "V41State":
        """Caches for ``num_requests`` sequences of up to ``max_tokens`` tokens.

        One pool holds all growing caches: a page has the block's entries of every source, side by side. It
        takes the bytes of the records and nothing more (890 a token for V4.1-Flash).

        Args:
            cfg: the model's config.
            num_requests: sequences.
            max_tokens: tokens a sequence, rounded up to whole blocks.
            drafts: tokens that a step may take back; the config's draft block by default.
            block: tokens a page, even.
            pages: pages of the pool that requests share; ``page_table`` is then all -1, and giving pages to
                requests is up to the caller. None: enough for everybody, and every page assigned.
            drafter: also rings for the drafter's stages.
            device: where.
        """
        name = "V41State.allocate"
        check(isinstance(cfg, V41FlashConfig), name, "cfg: V41FlashConfig", cfg)
        check_sizes(name, num_requests=num_requests)
        check_sizes(name, 0, cfg.max_positions, max_tokens=max_tokens)
        check_sizes(name, 2, block=block)
        check(block % 2 == 0, name, "block: an even number of tokens", block)
        if pages is not None:
            check_sizes(name, pages=pages)
        drafts = cfg.draft.block_size if drafts is None else drafts
        check_sizes(name, drafts=drafts)
        check_flags(name, drafter=drafter)
        ring, small = ring_slots(cfg, drafts)
        pages_each = -(-max_tokens // block)
        held = num_requests * pages_each if pages is None else pages
        kinds = [(i, kind) for i in cfg.kv_sources for kind in ("compressed", "index_keys")]
        records = {
            "compressed": Record("nvfp4", cfg.head_dim),
            "index_keys": Record("mxfp4", cfg.index_dim),
        }
        spans = [block // cfg.compress_ratios[i] * records[kind].bytes for i, kind in kinds]
        pool = torch.zeros((held, sum(spans)), dtype=torch.uint8, device=device)
        caches: dict[str, dict[int, PagedKV]] = {"compressed": {}, "index_keys": {}}
        start = 0
        for (i, kind), span in zip(kinds, spans, strict=True):
            part = pool[:, start : start + span].unflatten(1, (-1, records[kind].bytes))
            caches[kind][i] = PagedKV(part, records[kind])
            start += span
        window = Record("mxfp8", cfg.head_dim)
        layers = cfg.num_layers + (cfg.draft.num_stages if drafter else 0)
        rings = torch.zeros((layers, num_requests, ring, window.bytes), dtype=torch.uint8, device=device)
        table = torch.arange(num_requests * pages_each, dtype=torch.int32, device=device)
        if pages is not None:
            table.fill_(-1)
        carry = {
            i: torch.zeros((num_requests, small, 2 * cfg.head_dim), device=device)
            for i in cfg.kv_sources
            if cfg.compress_ratios[i] == 2
        }
        return V41State(
            cfg=cfg,
            lens=torch.zeros(num_requests, dtype=torch.int32, device=device),
            written=torch.zeros(num_requests, dtype=torch.int32, device=device),
            tokens=torch.full((num_requests, small), -1, dtype=torch.int32, device=device),
            page_table=table.view(num_requests, pages_each),
            windows=tuple(PagedKV(r, window) for r in rings),
            carry=carry,
            **caches,
        )

    def rollback(self, lens: torch.Tensor) -> None:
        """Take tokens back: request r keeps its first ``lens[r]`` tokens; the next step overwrites the rest.

        Args:
            lens: [num_requests] int32, each at most the current length.

        A request can go back to `max_rollback` tokens before the furthest it ever was, or anywhere as long as
        no ring has wrapped around (checked on a CPU and under DSV41_CHECK=1; on an accelerator the engine
        knows its draft count).
        """
        name = "V41State.rollback"
        check_tensor(name, "lens", lens, (self.num_requests,), torch.int32, like=self.lens)
        if lens.device.type == "cpu" or check_values():
            slots = [self.tokens.shape[1], *(ring.shape[1] for ring in self.carry.values())]
            wraps = min(self.windows[0].page_size, *slots)
            rows = zip(self.lens.tolist(), self.written.tolist(), lens.tolist(), strict=True)
            for r, (old, furthest, new) in enumerate(rows):
                # A ring slot holds the last position that was written there, also after a rollback.
                least = 0 if furthest <= wraps else furthest - self.max_rollback
                check(least <= new <= old, name, f"request {r}: {least} to {old} tokens", new)
        self.lens.copy_(lens)

    def first(self, requests: int) -> "V41State":
        """The first ``requests`` sequences, as views: a step over them changes this state."""
        check_sizes("V41State.first", 0, self.num_requests, requests=requests)
        return replace(
            self,
            lens=self.lens[:requests],
            written=self.written[:requests],
            tokens=self.tokens[:requests],
            page_table=self.page_table[:requests],
            windows=tuple(PagedKV(ring.pages[:requests], ring.record) for ring in self.windows),
            carry={i: ring[:requests] for i, ring in self.carry.items()},
        )

    def reset(self, request: int) -> None:
        """Empty one request's sequence. Its pages and rings stay its own."""
        self._check_request("V41State.reset", request)
        self.lens[request] = 0
        self.written[request] = 0

    def _check_request(self, name: str, request: int) -> None:
        check_sizes(name, 0, self.num_requests - 1, request=request)

    def adopt(self, request: int, tokens: torch.Tensor) -> None:
        """Continue behind a cached prefix: the next step of the request starts at position ``len(tokens)``.

        Args:
            request: whose pages in ``page_table`` already hold the prefix's compressed entries.
            tokens: [length] ids of the prefix, of an even length; Engram looks back at the last ones.

        No ring holds a window row then: pass ``forward`` a replay plan whose ``swa_start`` is the length.
        """
        name = "V41State.adopt"
        self._check_request(name, request)
        check_tensor(name, "tokens", tokens, (None,), torch.int32, torch.int64, like=self.lens)
        length = tokens.shape[0]
        check(length <= self.capacity, name, f"a prefix of at most {self.capacity} tokens", length)
        even = length % 2 == 0
        check(even, name, "an even prefix: a compressed pair must not straddle its end", length)
        held = self.tokens.shape[1]
        place = torch.arange(max(0, length - held), length, device=tokens.device)
        self.tokens[request, place % held] = tokens[place].to(torch.int32)
        self.lens[request] = length
        self.written[request] = length


@dataclass(frozen=True)
class Step:
    """Index tensors of one forward, derived once from positions and state; all on the device, no host sync.

    positions, request_ids: [num_tokens] int32; request -1 is a padding row.
    pages: the rows' requests in the page table; layers that read compressed entries wait for it, before they
        use it or what has a key 1 or 2.
    cos, sin: {0: plain, 1 and 2: YaRN} [num_tokens, rope_dim/2] f32 at the token's position.
    entry_cos, entry_sin: the same at the first token of the entry that each row closes, by ratio.
    entry_slots: {ratio: [num_tokens] int32} where the closed entry goes, -1 when none closes.
    visible: {ratio: [num_tokens] int32} entries each row may attend.
    window_ids: [num_tokens, window] int32 slots of the window cache that rows attend.
    window_slots: [num_tokens] int32 where each row's window record goes in that cache.
    workspace_rows: records of the workspace, or 0 when the rings themselves are attended.
    fill: (source slots in a ring, slots in the workspace) copied before attending.
    keep: (source slots in the workspace, slots in a ring) copied after attending.
    """

    positions: torch.Tensor
    request_ids: torch.Tensor
    pages: Branch[PageRows]
    cos: dict[int, torch.Tensor]
    sin: dict[int, torch.Tensor]
    entry_cos: dict[int, torch.Tensor]
    entry_sin: dict[int, torch.Tensor]
    entry_slots: dict[int, torch.Tensor]
    visible: dict[int, torch.Tensor]
    window_ids: torch.Tensor
    window_slots: torch.Tensor
    workspace_rows: int
    fill: tuple[torch.Tensor, torch.Tensor] | None
    keep: tuple[torch.Tensor, torch.Tensor] | None

    def rows(self, rows: torch.Tensor) -> "Step":
        """The queries ``rows`` [n] (int64) of this step, over the same window cache. For rows that only
        attend.
        """

        def pick(table: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            return {k: v[rows] for k, v in table.items()}

        pages = self.pages.wait()
        return replace(
            self,
            positions=self.positions[rows],
            request_ids=self.request_ids[rows],
            pages=Branch(pages._replace(rows=pages.rows[rows])),
            cos=pick(self.cos),
            sin=pick(self.sin),
            entry_cos=pick(self.entry_cos),
            entry_sin=pick(self.entry_sin),
            entry_slots=pick(self.entry_slots),
            visible=pick(self.visible),
            window_ids=self.window_ids[rows],
            window_slots=self.window_slots[rows],
        )


def request_of_rows(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[num_tokens] int32: which request each row belongs to, -1 past the last one."""
    row = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    request = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True, out_int32=True)
    return torch.where(request < cu_seqlens.shape[0] - 1, request, -1).to(torch.int32)


def rope_tables(
    cfg: V41FlashConfig, positions: torch.Tensor, yarn: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [num_tokens, rope_dim/2] f32: the plain table, or the YaRN table of the compressed
    layers.
    """
    if not yarn:
        return rope_table(positions, cfg.rope_dim, cfg.rope_theta)
    return rope_table(
        positions,
        cfg.rope_dim,
        cfg.compress_rope_theta,
        cfg.rope_factor,
        cfg.rope_beta_fast,
        cfg.rope_beta_slow,
        cfg.rope_original_positions,
    )


def plan_step(
    state: V41State,
    positions: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_len: int,
    floors: torch.Tensor | None = None,
) -> Step:
    """Derive a `Step`. Rows of request r are ``cu_seqlens[r]:cu_seqlens[r+1]``, at consecutive positions.

    Args:
        state: the caches.
        positions: [num_tokens] int32.
        cu_seqlens: [num_requests + 1] int32.
        max_len: rows of the longest request, at most. When a ring holds the window of the first row beside
            all new rows (up to ``ring - window + 1`` of them), rows are written first and rings attended;
            otherwise a workspace holds each request's last ``window - 1`` rows and the new ones.
        floors: [num_tokens] int32, lowest position whose window row each row may attend; None is 0.
    """
    cfg, device = state.cfg, positions.device
    tokens, requests, window = positions.shape[0], state.num_requests, cfg.window
    request = request_of_rows(cu_seqlens, tokens)
    live = request >= 0
    ring = state.windows[0].page_size

    def where(condition: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return torch.where(condition, slots, -1).to(torch.int32)

    key = positions[:, None] - torch.arange(window - 1, -1, -1, dtype=torch.int32, device=device)
    attended = (key >= 0) & live[:, None]
    if floors is not None:
        attended &= key >= floors[:, None]
    ring_slot = where(live, request * ring + positions % ring)
    if max_len <= ring - window + 1 or requests == 0:
        window_ids = where(attended, request[:, None] * ring + key % ring)
        window_slots, workspace, fill, keep = ring_slot, 0, None, None
    else:
        past, owner = window - 1, request.long().clamp(min=0)
        start = positions[cu_seqlens[:-1].long().clamp(max=max(tokens - 1, 0))] if tokens else state.lens
        row = torch.arange(tokens, dtype=torch.int32, device=device)
        begin = start[owner][:, None]
        old = request[:, None] * past + key - begin + past
        new = requests * past + cu_seqlens[owner][:, None] + key - begin
        window_ids = where(attended, torch.where(key < begin, old, new))
        window_slots = where(live, requests * past + row)
        workspace = requests * past + tokens
        length = cu_seqlens[1:] - cu_seqlens[:-1]
        before = start[:, None] - torch.arange(past, 0, -1, dtype=torch.int32, device=device)
        number = torch.arange(requests, dtype=torch.int32, device=device)[:, None]
        used = (before >= 0) & (length > 0)[:, None]
        fill = (
            where(used, number * ring + before % ring).flatten(),
            torch.arange(requests * past, dtype=torch.int32, device=device),
        )
        keep = (window_slots, where(row + ring >= cu_seqlens[owner + 1], ring_slot))
    plain = rope_tables(cfg, positions, False)
    cos, sin = {0: plain[0]}, {0: plain[1]}
    entry_cos, entry_sin, entry_slots, visible = {}, {}, {}, {}

    def compressed() -> PageRows:
        """Tables of the layers that read compressed entries."""
        pages = PageRows.of(request, state.page_table)
        yarn = rope_tables(cfg, positions, True)
        for ratio in (1, 2):
            cos[ratio], sin[ratio] = yarn
        for ratio in sorted({cfg.compress_ratios[i] for i in cfg.kv_sources}):
            entry = positions.div(ratio, rounding_mode="floor")
            closes = (positions + 1) % ratio == 0
            slots = pages.slots(where(closes, entry)[:, None], state.block // ratio)
            first = rope_tables(cfg, entry * ratio, True) if ratio > 1 else yarn
            entry_cos[ratio], entry_sin[ratio] = first
            entry_slots[ratio] = slots[:, 0]
            visible[ratio] = torch.where(live, (positions + 1).div(ratio, rounding_mode="floor"), 0)
        return pages

    return Step(
        positions=positions,
        request_ids=request,
        pages=beside(compressed, positions, LONG),
        cos=cos,
        sin=sin,
        entry_cos=entry_cos,
        entry_sin=entry_sin,
        entry_slots=entry_slots,
        visible=visible,
        window_ids=window_ids,
        window_slots=window_slots,
        workspace_rows=workspace,
        fill=fill,
        keep=keep,
    )
