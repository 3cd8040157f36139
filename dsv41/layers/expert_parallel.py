"""Experts spread over ranks: the map, the exchange, and what of it each layer needs."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._op import check, check_sizes
from ..formats import MXFP8
from ..ops import physical_experts
from ..ops.exchange import Exchange, Flight, Transport, agree, facts
from .state import V41State

if TYPE_CHECKING:
    from .model import V41Flash
    from .moe import Experts

ENTRIES = 64  # of an expert in the table of copies, unless one is given


class ExpertParallel:
    """The ranks that share a model's routed experts: pass it to ``V41Flash(cfg, ep_group=...)``.

    Every rank runs the whole model on its own requests; only the routed experts of the backbone are spread.
    All ranks must call ``forward`` equally often, one without requests with no tokens. The drafter's experts
    are whole on every rank.

    Args:
        transport: the ranks. All of them make an ExpertParallel at once: versions, sizes and maps are
            compared here.
        physical_to_logical: [num_layers, slots] the expert in each slot, slot s on rank s // (slots / ranks);
            what ``dsv41.eplb.rebalance_experts`` gives, or `even_map`.
        num_experts: experts a layer.
        capacity: rows that one rank may send to one other in a layer of the fixed form; see `Exchange`. None
            always uses the exact form.
        table: [num_layers, num_experts, entries] int16 slots that pairs are spread over, of
            ``dsv41.eplb.to_table``; None gives every copy of an expert the same share.
        device: where the model is.
        settings: more that must be the same on every rank, by name.

    Errors: a ValueError that names the rank.
    """

    def __init__(
        self,
        transport: Transport,
        physical_to_logical: Any,
        num_experts: int,
        *,
        capacity: int | None = None,
        table: Any = None,
        device: torch.device | str = "cpu",
        settings: dict[str, str] | None = None,
    ):
        name = "ExpertParallel"
        ranks = all(isinstance(getattr(transport, n, None), int) for n in ("rank", "size"))
        check(ranks, name, "transport: a Transport", transport)
        self.rank, self.size = transport.rank, transport.size
        check_sizes(name, 1, num_experts=num_experts)
        if capacity is not None:
            check_sizes(name, 1, capacity=capacity)
        given = as_tensor(name, "physical_to_logical", physical_to_logical)
        good = given.dim() == 2 and given.numel() > 0 and not given.is_floating_point()
        check(good, name, "physical_to_logical: [num_layers, slots] of integers", given)
        p2l = given.to("cpu", torch.int64, copy=True)
        wanted = f"slots that {self.size} ranks share evenly"
        check(p2l.shape[1] % self.size == 0, name, wanted, f"{p2l.shape[1]} on rank {self.rank}")
        self.num_experts, self.slots_per_rank = num_experts, p2l.shape[1] // self.size
        self.physical_to_logical = p2l
        self._check_map(name)
        made = even_table(p2l, num_experts) if table is None else as_tensor(name, "table", table)
        rows = made.dim() == 3 and made.shape[:2] == (len(p2l), num_experts)
        check(rows, name, f"table: [{len(p2l)}, {num_experts}, entries] int16", made)
        self.table = made.to(device, torch.int16, copy=True)
        self.transport = transport
        self.exchange = Exchange(transport, self.slots_per_rank, capacity)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.counts = torch.zeros((len(p2l), num_experts), dtype=torch.int64, device=device)
        self.live: torch.Tensor | None = None
        self._chosen: dict[int, torch.Tensor] = {}
        self._first = torch.arange(len(p2l), device=device) * num_experts
        self.exact = capacity is None
        self.exact_layers: frozenset[int] = frozenset()
        self.layers = [EPLayer(self, i) for i in range(len(p2l))]
        mine = {**facts(), "map": self.checksum(), "capacity": str(capacity), "experts": str(num_experts)}
        agree(name, transport, {**mine, **(settings or {})})

    def _check_map(self, name: str) -> None:
        p2l, experts = self.physical_to_logical, self.num_experts
        for layer, row in enumerate(p2l.view(len(p2l), self.size, -1)):
            there = row.flatten().bincount(minlength=experts) if int(row.min()) >= 0 else row.new_zeros(0)
            whole = len(there) == experts and bool((there > 0).all())
            check(whole, name, f"every expert 0 to {experts - 1} in layer {layer}", row.flatten().tolist())
            twice = [r for r, own in enumerate(row.tolist()) if len(set(own)) < len(own)]
            check(not twice, name, f"no expert twice on a rank, layer {layer}", f"one on rank {twice[:1]}")

    def checksum(self) -> str:
        """Of the maps and tables that this rank serves with; waits for the device."""
        parts = self.physical_to_logical, self.table.cpu()
        return hashlib.sha256(b"".join(p.contiguous().numpy().tobytes() for p in parts)).hexdigest()[:16]

    def own(self, layer: int) -> list[int]:
        """The experts in this rank's slots."""
        first = self.rank * self.slots_per_rank
        return self.physical_to_logical[layer, first : first + self.slots_per_rank].tolist()

    def begin(self, num_tokens: int, cu_seqlens: torch.Tensor | None) -> None:
        """A new step: start elsewhere in the tables. Rows from ``cu_seqlens[-1]`` on are padding and go
        nowhere.
        """
        self.step.add_(1)
        self._chosen.clear()
        rows = None if cu_seqlens is None else torch.arange(num_tokens, device=self.step.device)
        self.live = None if rows is None or cu_seqlens is None else (rows < cu_seqlens[-1])[:, None]

    def note(self, layer: int, ids: torch.Tensor) -> None:
        """Keep what a layer chose until `end` counts it."""
        self._chosen[layer] = ids

    def end(self) -> None:
        """The step is over: its routed pairs go into ``counts`` [num_layers, num_experts], on the device."""
        self.counts.zero_()
        alike: dict[torch.Size, list[int]] = {}  # layers with equally many rows are counted together
        for layer, ids in self._chosen.items():
            alike.setdefault(ids.shape, []).append(layer)
        for layers in alike.values():
            ids = torch.stack([self._chosen[layer] for layer in layers]).long().flatten(1)
            real = (ids >= 0).long()
            first = torch.stack([self._first[layer] for layer in layers])[:, None]
            self.counts.view(-1).scatter_add_(0, (ids.clamp(min=0) + first).flatten(), real.flatten())
        self._chosen.clear()

    def switch(self, layer: int, physical_to_logical: Any, table: Any) -> None:
        """Serve ``layer`` with another map from the next step on; its experts must be in their slots.

        In place, in stream order: a captured graph follows.
        """
        self.physical_to_logical[layer] = torch.as_tensor(physical_to_logical)
        self.table[layer].copy_(torch.as_tensor(table))
        experts = self.layers[layer].experts
        if experts is not None:
            experts.ids = self.own(layer)

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """Everything that belongs to the experts of a layer, this rank's slots first in every tensor."""
        experts = self.layers[layer].experts
        check(experts is not None, "ExpertParallel.tensors", "a model made with this", f"none at {layer}")
        return {name: p.data for name, p in experts.named_parameters()} if experts is not None else {}

    @contextlib.contextmanager
    def exactly(self, layers: Iterable[int] | None = None) -> Iterator[None]:
        """Inside the context exchanges take the exact form; every rank must enter it.

        ``layers``: only these. A prefill under bounded replay has few rows behind the encoder: in the fixed
        form the host need not wait for the device in those layers (`Exchange.lost` tells whether they fit).
        """
        before = self.exact, self.exact_layers
        if layers is None:
            self.exact = True
        else:
            self.exact_layers = frozenset(layers)
        try:
            yield
        finally:
            self.exact, self.exact_layers = before


class EPLayer:
    """One layer's part of an `ExpertParallel`."""

    def __init__(self, group: ExpertParallel, layer: int):
        self.group, self.layer = group, layer
        self.experts: Experts | None = None

    def dispatch(self, x: MXFP8, ids: torch.Tensor, weights: torch.Tensor) -> Flight:
        """Note the routed pairs, choose copies, and start to send: arguments as ``mxfp4_moe``."""
        g = self.group
        if g.live is not None:
            ids = torch.where(g.live, ids, -1)
        g.note(self.layer, ids)
        slots = physical_experts(ids, g.table[self.layer], source=g.rank, step=g.step)
        return g.exchange.dispatch(x, slots, weights, exact=g.exact or self.layer in g.exact_layers)


def as_tensor(name: str, label: str, value: Any) -> torch.Tensor:
    """A tensor of an array, of nested lists or of a tensor."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        check(False, name, f"{label}: an array of integers", value)
        raise


def even_map(num_layers: int, num_experts: int, ranks: int, spare: int = 0) -> torch.Tensor:
    """Experts in order, then ``spare`` more slots a rank that repeat experts of the rank before.

    Args:
        num_layers: rows of the map.
        num_experts: a multiple of ``ranks``.
        ranks: ranks.
        spare: redundant slots a rank.

    Returns:
        [num_layers, num_experts + ranks * spare] int64.
    """
    check_sizes("even_map", num_layers=num_layers, spare=spare)
    check_sizes("even_map", 1, num_experts=num_experts, ranks=ranks)
    check(num_experts % ranks == 0, "even_map", f"experts that {ranks} ranks share evenly", num_experts)
    each = num_experts // ranks
    check(spare <= each * (ranks > 1), "even_map", f"at most {each} spare slots and two ranks", spare)
    own = torch.arange(num_experts).view(ranks, each)
    row = torch.cat([own, own.roll(1, 0)[:, :spare]], 1).flatten()
    return row.expand(num_layers, -1).contiguous()


def even_table(physical_to_logical: torch.Tensor, num_experts: int, entries: int = ENTRIES) -> torch.Tensor:
    """[num_layers, num_experts, entries] int16: the copies of each expert in turn."""
    rows = []
    for row in physical_to_logical.tolist():
        places: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(row):
            places[expert].append(slot)
        rows.append([[p[i % len(p)] for i in range(entries)] for p in places])
    return torch.tensor(rows, dtype=torch.int16)


def elsewhere(layers: Sequence[EPLayer]) -> set[str]:
    """Checkpoint names of the experts that other ranks hold."""
    names = set()
    for layer in layers:
        own = set(layer.group.own(layer.layer))
        for e in range(layer.group.num_experts):
            if e not in own:
                at = f"layers.{layer.layer}.ffn.experts.{e}."
                names |= {f"{at}{w}.{part}" for w in ("w1", "w2", "w3") for part in ("weight", "scale")}
    return names


def forward_complete(
    model: "V41Flash", tokens: torch.Tensor, positions: torch.Tensor, state: V41State, **options: Any
) -> torch.Tensor:
    """``model(...)`` in the fixed form, and once more in the exact form if any rank lost a pair.

    Every rank repeats if one does. Waits for the device and for all ranks, as reading the tokens does.

    A step in the fixed form may have at most ``state.max_rollback`` rows a request, which
    ``V41State.allocate(drafts=...)`` sets, overflow or not; ``max_len`` bounds them (without it the exact
    value on a CPU, all rows elsewhere). A longer step is refused before anything is written.
    """
    group = model.ep
    check(group is not None, "forward_complete", "a model with an ep_group", None)
    assert group is not None
    if not group.exact:
        step = (options.get(key) for key in ("cu_seqlens", "max_len", "rows", "draft_inputs"))
        most, length = state.max_rollback, model._check(tokens, positions, state, *step)[1]
        room = f"at most {most} rows a request (drafts= of V41State.allocate; max_len= bounds them)"
        check(length <= most, "forward_complete", room, length)
    before = state.lens.clone()
    logits = model(tokens, positions, state, **options)
    if not group.exact and any(group.exchange.lost()):
        state.rollback(before)
        with group.exactly():
            logits = model(tokens, positions, state, **options)
    return logits
