"""Moving experts while serving: no token changes, a failure leaves the old map, every rank knows the same."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from dsv41_reference import accumulate

from dsv41.eplb import Balancer, LoadWindow, rebalance_experts
from dsv41.eplb.live import DeviceLoadWindow, LiveExperts, TransferFailed
from dsv41.formats import MXFP4Experts, quantize_mxfp4
from dsv41.layers.expert_parallel import ExpertParallel, even_map
from dsv41.layers.moe import Experts, MoE
from dsv41.ops import pack_experts
from dsv41.ops.exchange import LocalTransport
from tests import models
from tests.ep.models import CFG, KIND, build, generate, random_map
from tests.ep.ranks import on_ranks, told
from tests.ep.test_layers import STEPS, alone
from tests.ops.rows import assert_refused, same

RANKS, EXPERTS, SLOTS, LAYERS = 4, 12, 16, 5
KEEN: dict[str, Any] = {"target": 1.0, "min_gain": 0.0, "compiled": False}


def loads(seed: int, layers: int = LAYERS, experts: int = EXPERTS) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(4, 1.2, (layers, experts)).astype(np.int64) + 1


def start() -> np.ndarray:
    return rebalance_experts(loads(0), SLOTS, 1, 1, RANKS)[0]


def weights(layer: int, expert: int) -> dict[str, torch.Tensor]:
    """Distinct bytes an expert: values and scales of several types."""
    draw = torch.Generator().manual_seed(layer * 100 + expert)
    raw = torch.randint(0, 250, (3, 8), generator=draw, dtype=torch.uint8)
    return {
        "w": raw,
        "w_scale": raw[:, :2].contiguous().view(torch.float8_e8m0fnu),
        "bias": raw[0].float(),
    }


def tensors(row: list[int], layer: int) -> dict[str, torch.Tensor]:
    made = [weights(layer, e) for e in row]
    # e8m0 cannot be stacked as such
    return {
        name: torch.stack([m[name].view(torch.uint8) for m in made]).view(made[0][name].dtype)
        for name in made[0]
    }


class Serving:
    """What one rank serves with."""

    def __init__(self, t: Any, physical: np.ndarray, **options: Any):
        own = slice(t.rank * SLOTS // RANKS, (t.rank + 1) * SLOTS // RANKS)
        self.own, self.rank = own, t.rank
        self.tensors = [tensors(row, layer) for layer, row in enumerate(physical[:, own].tolist())]
        self.map = physical.copy()
        self.switched: list[int] = []
        balancer = Balancer(physical, EXPERTS, RANKS, **KEEN)
        self.live = LiveExperts(balancer, t, self.tensors, self.switch, **options)

    def switch(self, layer: int, row: Any, table: Any) -> None:
        self.map[layer] = row
        self.switched.append(layer)

    def is_sound(self) -> bool:
        """Every slot holds the bytes of the expert that the served map names."""
        good = np.array_equal(self.map, self.live.balancer.physical_to_logical)
        for layer, mine in enumerate(self.tensors):
            want = tensors(self.map[layer, self.own].tolist(), layer)
            good = good and all(same(mine[name], want[name]) for name in want)
        return good


def share(seed: int, rank: int) -> torch.Tensor:
    """This rank's part of the loads of a window."""
    whole = torch.from_numpy(loads(seed))
    return whole // RANKS if rank else whole - 3 * (whole // RANKS)


def finish(live: LiveExperts) -> list[int]:
    done = []
    while (layer := live.advance()) is not None:
        done.append(layer)
    return done


@pytest.mark.parametrize("seed", range(4))
def test_every_slot_gets_what_the_plan_says(seed: int) -> None:
    def work(t: LocalTransport) -> Any:
        serving = Serving(t, start(), planner=seed % RANKS)
        decision = serving.live.propose(share(seed, t.rank), step=7)
        planned = sorted({m.layer for m in decision.moves})
        assert serving.is_sound() and set(serving.switched) == set(range(LAYERS)) - set(planned)
        for layer in planned:  # valid after each
            assert serving.live.advance() == layer and serving.is_sound()
        assert serving.live.advance() is None
        b = serving.live.balancer
        assert np.array_equal(serving.map, decision.physical_to_logical) and b.epoch == LAYERS
        assert np.array_equal(b.table, decision.table) and np.array_equal(b.shares, decision.shares)
        per_expert = sum(x.nbytes for x in weights(0, 0).values())
        received = sum(m.dst_rank == t.rank for m in decision.moves)
        assert serving.live.moved == received * per_expert
        return len(decision.moves), decision.now, decision.repaired

    results = on_ranks(RANKS, work)
    assert len(set(results)) == 1
    moves, now, after = results[0]
    if seed:
        assert moves > 0 and after < now


def test_plans_follow_one_another_and_a_split_moves_nothing() -> None:
    def work(t: LocalTransport) -> None:
        serving = Serving(t, start())
        for seed in range(1, 4):
            serving.live.propose(share(seed, t.rank))
            finish(serving.live)
            assert serving.is_sound()
        moved = serving.live.moved
        decision = serving.live.propose(share(9, t.rank), allow_moves=False)
        assert decision.action == "refresh" and finish(serving.live) == []
        assert serving.live.moved == moved and serving.is_sound()

    on_ranks(RANKS, work)


def test_the_loads_of_all_ranks_make_the_plan() -> None:
    def work(t: LocalTransport) -> Any:
        return Serving(t, start()).live.propose(share(3, t.rank)).table

    alone_ = Balancer(start(), EXPERTS, RANKS, **KEEN).decide(loads(3))
    assert all(np.array_equal(table, alone_.table) for table in on_ranks(RANKS, work))


class Bad(LocalTransport):
    """A rank that corrupts what it receives."""

    def swap(self, sends: Any, recvs: Any, timeout: float) -> None:
        super().swap(sends, recvs, timeout)
        for x in recvs.values():
            x[3] ^= 1


def test_other_bytes_than_were_sent_leave_the_old_map() -> None:
    receivers = set()

    def work(t: LocalTransport) -> str:
        serving = Serving(t, start())
        before = serving.map.copy()
        decision = serving.live.propose(share(2, t.rank))
        first = serving.live.todo[0]
        receiver = next(m for m in decision.moves if m.layer == first).dst_rank
        receivers.add(receiver)
        if t.rank == receiver:
            t.__class__ = Bad
        text = told(serving.live.advance, TransferFailed)
        t.__class__ = LocalTransport
        assert np.array_equal(serving.map[first], before[first]) and serving.is_sound()
        assert serving.live.advance() is None  # the rest of the plan is given up
        serving.live.propose(share(2, t.rank))  # and the next one succeeds
        assert finish(serving.live)[0] == first and serving.is_sound()
        return text

    texts = set(on_ranks(RANKS, work))
    assert len(texts) == 1
    want = rf"layer \d on every rank, got rank {receivers.pop()}: other bytes than rank \d sent"
    assert re.search(want, texts.pop())


class Full(list[Any]):
    """Tensors that cannot be read any more."""

    def __getitem__(self, i: Any) -> Any:
        raise MemoryError("3 GB")


def test_a_rank_that_cannot_prepare_is_named_and_nobody_waits() -> None:
    def work(t: LocalTransport) -> str:
        serving = Serving(t, start())
        serving.live.propose(share(2, t.rank))
        if t.rank == 1:
            serving.live.layers = Full()
        text = told(serving.live.advance, TransferFailed)
        assert serving.is_sound()
        return text

    texts = set(on_ranks(RANKS, work))
    assert len(texts) == 1 and "on every rank, got rank 1: MemoryError: 3 GB" in texts.pop()


def test_maps_that_disagree_are_refused_with_the_rank() -> None:
    def work(t: LocalTransport) -> None:
        physical = start()
        if t.rank == 2:
            physical[1, [0, 1]] = physical[1, [1, 0]]
        Serving(t, physical).live.propose(share(1, t.rank))

    text = told(lambda: on_ranks(RANKS, work), ValueError)
    assert re.search(r"LiveExperts.propose: expected map \w+ on every rank, got \w+ on rank 2", text)


def test_epochs_that_disagree_are_refused_with_the_rank() -> None:
    def work(t: LocalTransport) -> None:
        serving = Serving(t, start())
        serving.live.propose(share(1, t.rank))
        serving.live.balancer.epoch += t.rank == 3
        serving.live.advance()

    with pytest.raises(ValueError, match=r"advance: expected epoch (\d) on every rank, got \d on rank 3"):
        on_ranks(RANKS, work)


def test_a_reshuffle_in_the_middle_of_generation_changes_no_token() -> None:
    """A plan after the first step, then a layer of it between every two steps, with copies and without."""
    ranks = 4

    def work(t: LocalTransport) -> Any:
        model = build(t, random_map(ranks, 12, 1), capacity=CFG.top_k)
        group = model.ep
        assert group is not None
        balancer = Balancer(group.physical_to_logical.numpy(), CFG.num_experts, ranks, **KEEN)
        layers = [group.tensors(i) for i in range(CFG.num_layers)]
        live = LiveExperts(balancer, t, layers, group.switch)
        window = DeviceLoadWindow(CFG.num_layers, CFG.num_experts, 8, device="cpu")
        moved, before = [], group.checksum()

        def between(step: int) -> None:
            window.record(group.counts)
            if step == 0:
                live.propose(window.totals())
            for _ in range(3):
                moved.append(live.advance())

        logits = generate(model, t.rank, STEPS, between)
        assert group.checksum() != before and len([m for m in moved if m is not None]) >= 3
        stored = alone_experts()
        for i, layer in enumerate(model.layers):  # weights are where the map says
            experts: Any = layer.ffn.experts  # pyright: ignore
            for slot, e in enumerate(group.own(i)):
                assert same(experts.w2[slot], stored[i].w2[e])
                assert same(
                    experts.w13_scale[slot].view(torch.uint8), stored[i].w13_scale[e].view(torch.uint8)
                )
        return logits

    with accumulate(torch.float64):
        for rank, logits in enumerate(on_ranks(ranks, work)):
            assert same(logits, alone(rank))


def alone_experts() -> list[Any]:
    return [layer.ffn.experts for layer in models.model(KIND).layers]  # pyright: ignore


def test_packed_experts_move_as_they_are() -> None:
    """In the kernel's order too an expert is its slot of every tensor: packing and moving commute."""
    made = [quantize_mxfp4(torch.randn(4, 256, 256)), quantize_mxfp4(torch.randn(4, 256, 128))]
    order = torch.tensor([2, 0, 3, 3])

    def pack(rows: torch.Tensor) -> MXFP4Experts:
        parts = [t.view(torch.uint8)[rows].view(t.dtype) for m in made for t in (m.values, m.scale)]
        return pack_experts(MXFP4Experts(parts[0], parts[1], parts[2], parts[3]))

    whole, moved = pack(torch.arange(4)), pack(order)
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        a, b = (getattr(e, name).view(torch.uint8) for e in (whole, moved))
        assert same(a[order], b)


def rank_experts(t: LocalTransport) -> Experts:
    """One rank's half of the experts of a layer of "mini"."""
    cfg = models.config("mini")
    group = ExpertParallel(t, even_map(cfg.num_layers, cfg.num_experts, 2), cfg.num_experts)
    return MoE(cfg, cfg.num_experts, cfg.top_k, group.layers[0]).experts


def test_ranks_pack_alike_whatever_their_scales() -> None:
    """A packed order depends on the scales of the layer: of all ranks' experts, or they could not move."""

    def work(t: LocalTransport) -> tuple[str, str]:
        experts = rank_experts(t)
        for tensor in (experts.w13, experts.w2):
            tensor.data.random_(0, 256)
        for scale in (experts.w13_scale, experts.w2_scale):  # other sizes on every rank
            scale.data.view(torch.uint8).random_(110 + 9 * t.rank, 115 + 9 * t.rank)
        copies: Any = [p.data.view(torch.uint8).clone().view(p.dtype) for p in experts.parameters()]
        mine = pack_experts(MXFP4Experts(*copies))
        experts.pack()
        return experts.layout, mine.layout

    (first, mine), (second, other) = on_ranks(2, work)
    assert first == second and mine != other


def test_ranks_agree_that_a_layer_is_mixed() -> None:
    """An expert that does not fold is on one rank, and may come to the other."""

    def work(t: LocalTransport) -> tuple[str, int]:
        experts = rank_experts(t)
        for tensor in (experts.w13, experts.w2):
            tensor.data.fill_(0x11)
        for scale in (experts.w13_scale, experts.w2_scale):
            scale.data.view(torch.uint8).fill_(120)
        if t.rank:
            experts.w2_scale.data.view(torch.uint8)[0, 2, 1] = 90
        experts.pack()
        return experts.layout, experts.routed

    assert on_ranks(2, work) == [("hopper exact 120 120 mixed", 0), ("hopper exact 120 120 mixed", 1)]


def test_the_window_on_the_device_is_the_window() -> None:
    ours, theirs = DeviceLoadWindow(2, 3, 8, blocks=4, device="cpu"), LoadWindow(2, 3, 8, blocks=4)
    assert ours.quality() == theirs.quality()
    for step in range(21):
        counts = torch.randint(0, 9, (2, 3))
        ours.record(counts)
        theirs.record(counts.numpy())
        assert np.array_equal(ours.totals().numpy(), theirs.snapshot())
        assert np.array_equal(ours.snapshot(lambda x: x * 2), theirs.snapshot(lambda x: x * 2))
        assert ours.quality() == theirs.quality() and ours.quality().recorded == step + 1
    ours.clear()
    assert int(ours.totals().sum()) == 0


def construct(change: dict[str, Any]) -> Any:
    def call() -> None:
        (t,) = LocalTransport.group(1)
        physical = np.arange(4)[None]
        given = {
            "balancer": Balancer(physical, 4, 1, compiled=False),
            "layers": [{"w": torch.zeros(4, 2)}],
            **change,
        }
        LiveExperts(given.pop("balancer"), t, given.pop("layers"), lambda *_: None, **given)

    return call


ERRORS: dict[str, Any] = {
    "ranks": (
        {"balancer": Balancer(np.arange(4)[None], 4, 2, compiled=False)},
        "a balancer of 1 ranks, got 2",
    ),
    "layers": ({"layers": []}, "tensors of 1 layers, got 0"),
    "tensors": ({"layers": [{}]}, "at least one tensor a layer, got none for layer 0"),
    "slots": ({"layers": [{"w": torch.zeros(5, 2)}]}, r"w of layer 0: contiguous \[4, ...\], got \[5, 2\]"),
    "planner": ({"planner": 1}, "planner: 0 to 0, got 1"),
    "timeout": ({"timeout": 0}, "a timeout above 0, got 0"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    change, message = ERRORS[error]
    assert_refused(construct(change), message)
