"""Synthetic models that tests share: weights in memory, the incremental model, its dense twin."""

import functools
from typing import Any

import torch
from dsv41_reference.model import V41Reference

from dsv41 import V41FlashConfig
from dsv41.cache import page_slots
from dsv41.layers import V41Flash, V41State
from dsv41.layers.engram import MemoryEngramStore, TokenMap
from dsv41.layers.weights import LoadableModel, expected_tensors, synthetic_tensor

SEED = 7


Kind = str | V41FlashConfig  # a name of a config, or a config


@functools.cache
def config(kind: Kind) -> V41FlashConfig:
    return kind if isinstance(kind, V41FlashConfig) else getattr(V41FlashConfig, kind)()


@functools.cache
def weights(kind: Kind) -> dict[str, torch.Tensor]:
    cfg = config(kind)
    return {name: synthetic_tensor(cfg, name, SEED) for name in expected_tensors(cfg)}


@functools.cache
def token_map(kind: Kind) -> TokenMap:
    cfg = config(kind)
    return TokenMap.synthetic(cfg.vocab_size, cfg.engram.num_classes, SEED)


def fill(model: LoadableModel, stored: dict[str, torch.Tensor]) -> None:
    """Copy checkpoint tensors into a model byte by byte."""
    for name, view in model.checkpoint_tensors().items():
        view.view(torch.uint8).copy_(stored[name].view(torch.uint8))


def build(kind: Kind, drafter: bool = False) -> V41Flash:
    """A new model; tests that change weights take this."""
    cfg, stored = config(kind), weights(kind)
    model = V41Flash(cfg, token_map(kind), drafter=drafter)
    fill(model, stored)
    for layer in cfg.engram.layers:
        table = (stored[f"layers.{layer}.engram.embed.{part}"] for part in ("weight", "scale"))
        model.attach_engram(layer, MemoryEngramStore(*table))
    return model


def on_gpu(kind: Kind) -> V41Flash:
    """A new model with its drafter on the GPU, its tables too, packed."""
    model: Any = build(kind, drafter=True).cuda().pack()
    for layer in config(kind).engram.layers:
        store = model.layers[layer].engram.store
        store.values, store.scale = (
            t.view(torch.uint8).cuda().view(t.dtype) for t in (store.values, store.scale)
        )
    return model


@functools.cache
def model(kind: Kind) -> V41Flash:
    """The shared model; do not change it."""
    return build(kind)


@functools.cache
def drafting_model(kind: Kind) -> V41Flash:
    """The shared model with its drafter; do not change it."""
    return build(kind, drafter=True)


@functools.cache
def reference(kind: Kind) -> V41Reference:
    return V41Reference(config(kind), weights(kind), token_map(kind).ids)


def text(kind: Kind, length: int, seed: int = 0, images: bool = False) -> torch.Tensor:
    """[length] int64 random ids; with images, spans of image tokens in between."""
    cfg = config(kind)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, cfg.image_token, (length,), generator=draw)
    if images and length > 8:
        ids[3:6] = cfg.image_token
        ids[length // 2 : length // 2 + 2] = cfg.image_token
    return ids


def positions(start: int, length: int) -> torch.Tensor:
    return torch.arange(start, start + length, dtype=torch.int32)


def assert_state_equals(state: V41State, request: int, trace: dict[str, torch.Tensor], length: int) -> None:
    """Every record that the caches of one request hold equals the dense model's, to the bit."""
    cfg = state.cfg
    assert int(state.lens[request]) == length
    for i in range(cfg.num_layers):
        ring = state.windows[i]
        place = torch.arange(max(0, length - ring.page_size), length)
        # A rolled-back row may stand where the oldest row of a full ring was.
        place = place[-(length if length <= cfg.window else cfg.window) :]
        got = ring.read(request * ring.page_size + place % ring.page_size)
        assert torch.equal(got, trace[f"window.{i}"][place].float()), f"window of layer {i}"
    for i in cfg.kv_sources:
        ratio = cfg.compress_ratios[i]
        entries = torch.arange(length // ratio)
        for label, cache in (("compressed", state.compressed[i]), ("index_key", state.index_keys[i])):
            slots = page_slots(entries[None], torch.tensor([request]), state.page_table, cache.page_size)[0]
            assert torch.equal(cache.read(slots), trace[f"{label}.{i}"].float()), f"{label} of layer {i}"
        if ratio == 2 and length % 2:
            held = state.carry[i][request, (length - 1) % state.carry[i].shape[1]]
            assert torch.equal(held, trace[f"carry.{i}"][length - 1]), f"carry of layer {i}"
