"""No tensor of the checkpoint is idle: another value of any one of them gives other logits."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from dsv41.formats import E4M3, E8M0
from dsv41.layers import V41Flash, V41State
from dsv41.layers.attention import Selection
from dsv41.layers.block import run_blocks
from dsv41.layers.engram import MemoryEngramStore, dead_tokens
from dsv41.layers.state import plan_step
from dsv41.layers.weights import expected_tensors
from tests import models

KIND, TOKENS = "tiny", 64  # enough that every expert of every layer is chosen
LAYERS = models.config(KIND).num_layers


def other(x: torch.Tensor) -> torch.Tensor:
    """Other values of the same size: each element by itself, so that no common factor hides it."""
    coin = torch.randint(0, 2, x.shape).bool()
    if x.dtype == E8M0:
        return torch.where(coin, x.view(torch.uint8) + 2, x.view(torch.uint8)).index_fill_(
            -1, torch.tensor(0), 128
        )
    if x.dtype in (E4M3, torch.int8):
        return torch.where(
            coin, x.view(torch.uint8), x.view(torch.uint8) ^ (0x80 if x.dtype == E4M3 else 0x88)
        )
    return torch.where(coin, x * 1.5, x * -0.75)


class Replayed:
    """The model over one text, able to go on from any layer: what enters it is kept from one run."""

    def __init__(self) -> None:
        self.model, cfg = models.build(KIND), models.config(KIND)
        ids = models.text(KIND, TOKENS, images=True)
        self.ids, self.place, self.cfg = ids, models.positions(0, TOKENS), cfg
        self.state = V41State.allocate(cfg, 1, TOKENS)
        self.cu = torch.tensor([0, TOKENS], dtype=torch.int32)
        self.step = plan_step(self.state, self.place, self.cu, TOKENS)
        self.rows = self.model.engram_rows(ids, self.step, self.state, self.cu)
        self.dead, self.image = dead_tokens(ids, cfg.image_token), self.model.image_rows(ids)

    def layer(self, i: int, x: torch.Tensor, pre: torch.Tensor, shared: Selection) -> Any:
        layer: Any = self.model.layers[i]
        if layer.engram is not None:
            x = layer.engram(x, self.rows[:, self.cfg.engram.layers.index(i)], self.dead)

        def attend(block: Any, h: Any, hq: Any) -> torch.Tensor:
            return block.attn(h, hq, step=self.step, state=self.state, shared=shared)

        return run_blocks([layer], x, pre, attend, self.image)

    def enter(self, i: int) -> tuple[torch.Tensor, torch.Tensor, Selection]:
        """What layer ``i`` receives; the caches of the layers before it are written on the way."""
        shared = Selection()
        x, pre = self.model.embed_streams(self.ids)
        for k in range(i):
            x, pre = self.layer(k, x, pre, shared)
        return x, pre, shared

    def logits(self, i: int, x: torch.Tensor, pre: torch.Tensor, shared: Selection) -> torch.Tensor:
        """From layer ``i`` to the end. Every layer writes its caches before it reads them."""
        shared = dataclasses.replace(shared, workspace={})
        for k in range(i, LAYERS):
            x, pre = self.layer(k, x, pre, shared)
        return self.model.logits(x, pre)


@functools.cache
def replayed() -> Replayed:
    return Replayed()


def stored(model: V41Flash) -> dict[str, torch.Tensor]:
    """Every tensor that a text model reads, as bytes to write on, the Engram tables included."""
    views = dict(model.checkpoint_tensors())
    for i, layer in enumerate(model.layers):
        engram: Any = getattr(layer, "engram", None)
        if engram is not None and isinstance(engram.store, MemoryEngramStore):
            views[f"layers.{i}.engram.embed.weight"] = engram.store.values
            views[f"layers.{i}.engram.embed.scale"] = engram.store.scale
    return views


def test_nothing_is_left_out() -> None:
    wanted = {name for name in expected_tensors(models.config(KIND)) if not name.startswith("mtp.")}
    assert set(stored(replayed().model)) == wanted


def test_the_replay_is_the_model() -> None:
    run = replayed()
    with torch.no_grad():
        want = run.model(run.ids, run.place, V41State.allocate(run.cfg, 1, TOKENS))
        assert torch.equal(run.logits(3, *run.enter(3)), want)


@pytest.mark.parametrize("layer", [*range(LAYERS), "ends"])
def test_every_tensor_matters(layer: int | str) -> None:
    run = replayed()
    prefix, start = (f"layers.{layer}.", layer) if isinstance(layer, int) else ("", 0)
    views = {k: v for k, v in stored(run.model).items() if k.startswith(prefix)}
    if layer == "ends":
        views = {k: v for k, v in views.items() if not k.startswith("layers.")}
        assert sorted(views) == ["embed.weight", "head.weight", "norm.weight"]
    idle = []
    with torch.no_grad():
        entered = run.enter(int(start))
        want = run.logits(int(start), *entered)
        for name, view in views.items():
            raw = view.view(torch.uint8)
            before, raw_other = raw.clone(), other(view).view(torch.uint8)
            assert not torch.equal(before, raw_other), name
            raw.copy_(raw_other)
            got = run.logits(0, *run.enter(0)) if name == "embed.weight" else run.logits(int(start), *entered)
            raw.copy_(before)
            assert got.isfinite().all(), name
            idle += [name] if torch.equal(got, want) else []
        assert torch.equal(run.logits(int(start), *entered), want)
    assert not idle
