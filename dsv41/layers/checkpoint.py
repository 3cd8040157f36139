"""What a checkpoint is: its tensor table as data, and synthetic values for every line of it.

Names, shapes and dtypes are the released checkpoint's, written once in `_table`; everything else is derived.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from .._op import check
from ..config import V41FlashConfig
from ..formats import E4M3, E8M0

INDEX = "model.safetensors.index.json"
_BF16, _F32, _I8 = torch.bfloat16, torch.float32, torch.int8


class _Fill(NamedTuple):
    """How `synthetic_tensor` draws a tensor: ``centre`` plus something of size ``spread``."""

    law: str
    spread: float
    centre: float = 0.0


def _normal(std: float) -> _Fill:
    return _Fill("normal", std)


def _linear(gain: float) -> _Fill:
    """A normal whose product with a unit input is of size ``gain``."""
    return _Fill("linear", gain)


def _near(centre: float, spread: float) -> _Fill:
    """Uniform over centre ± spread without the inner fifth: never the centre itself."""
    return _Fill("near", spread, centre)


class _Row(NamedTuple):
    """One line of the table: the tensors ``<place><name>`` for every place.

    A kind is a plain dtype, or a pair that adds ``.weight`` and ``.scale``: fp8 (one scale a 32 x 32 tile),
    rows8 (E4M3, one scale a 1 x 32 block) or fp4 (two E2M1 a byte, one scale a 1 x 32 block).
    """

    name: str
    shape: tuple[int, ...]
    kind: torch.dtype | str
    places: tuple[str, ...]
    fill: _Fill


_ONCE = ("",)
_NORM = _near(1.0, 0.5)


def _table(c: V41FlashConfig) -> list[_Row]:
    """The text model and the drafter: model.md section 6, line by line."""
    layers = tuple(f"layers.{i}." for i in range(c.num_layers))
    stages = tuple(f"mtp.{i}." for i in range(c.draft.num_stages))
    blocks = layers + stages
    sources = tuple(layers[i] for i in c.kv_sources)
    gated = tuple(layers[i] for i in c.kv_sources if c.compress_ratios[i] == 2)
    indexers = tuple(layers[i] for i in c.index_sources)
    memory = tuple(layers[i] for i in c.engram.layers)
    routers = ((layers, c.num_experts), (stages, c.draft.num_experts))
    experts = tuple(f"{at}ffn.experts.{e}." for places, n in routers for at in places for e in range(n))
    hidden, streams, heads, width = c.hidden, c.num_streams, c.num_heads, c.head_dim
    mixes = (2 + streams) * streams
    rows = [
        _Row("embed.weight", (c.vocab_size, hidden), _BF16, _ONCE, _normal(1)),
        _Row("head.weight", (c.vocab_size, hidden), _BF16, _ONCE, _linear(2)),
        _Row("norm.weight", (hidden,), _BF16, _ONCE, _NORM),
        _Row("attn_norm.weight", (hidden,), _BF16, blocks, _NORM),
        _Row("ffn_norm.weight", (hidden,), _BF16, blocks, _NORM),
    ]
    for part in ("attn", "ffn"):
        rows += [
            _Row(f"hc_{part}_fn", (mixes, streams * hidden), _F32, blocks, _linear(1)),
            _Row(f"hc_{part}_base", (mixes,), _F32, blocks, _normal(2)),
            _Row(f"hc_{part}_scale", (3,), _F32, blocks, _NORM),
        ]
    rows += [
        _Row("attn.attn_sink", (heads,), _F32, blocks, _near(3.5, 2.4)),
        _Row("attn.wq_a", (c.q_rank, hidden), "fp8", blocks, _linear(1)),
        _Row("attn.q_norm.weight", (c.q_rank,), _BF16, blocks, _NORM),
        _Row("attn.wq_b", (heads * width, c.q_rank), "fp8", blocks, _linear(2)),
        _Row("attn.wkv", (width, hidden), "fp8", blocks, _linear(1)),
        _Row("attn.kv_norm.weight", (width,), _BF16, blocks, _NORM),
        _Row("attn.wo_a", (c.o_groups * c.o_rank, heads * width // c.o_groups), "fp8", blocks, _linear(1.5)),
        _Row("attn.wo_b", (hidden, c.o_groups * c.o_rank), "fp8", blocks, _linear(1)),
        _Row("attn.compressor.wkv.weight", (width, hidden), _BF16, sources, _linear(1)),
        _Row("attn.compressor.wgate.weight", (width, hidden), _BF16, gated, _linear(1.5)),
        _Row("attn.compressor.norm.weight", (width,), _BF16, sources, _NORM),
        _Row("attn.indexer.wk.weight", (c.index_dim, width), _BF16, sources, _linear(1)),
        _Row("attn.indexer.k_norm.weight", (c.index_dim,), _BF16, sources, _NORM),
        _Row("attn.indexer.wq_b", (c.index_heads * c.index_dim, c.q_rank), "fp8", indexers, _linear(1)),
        _Row("attn.indexer.weights_proj.weight", (c.index_heads, hidden), _BF16, indexers, _linear(1)),
    ]
    for places, count in routers:
        rows += [
            _Row("ffn.gate.weight", (count, hidden), _BF16, places, _linear(1.5)),
            _Row("ffn.gate.bias", (count,), _F32, places, _normal(0.25)),
            _Row("ffn.gate.bias_vl", (count,), _F32, places, _normal(0.25)),
        ]
    # Gate and up are wide enough that the SwiGLU clamp at 10 is met; w2 brings the result back to one.
    shared = tuple(f"{at}ffn.shared_experts." for at in blocks)
    for places, kind in ((experts, "fp4"), (shared, "fp8")):
        rows += [
            _Row("w1", (c.inter, hidden), kind, places, _linear(4)),
            _Row("w3", (c.inter, hidden), kind, places, _linear(4)),
            _Row("w2", (hidden, c.inter), kind, places, _linear(0.06)),
        ]
    for at, count in zip(memory, c.engram.num_rows, strict=True):
        rows.append(_Row("engram.embed", (count, c.engram.head_dim), "rows8", (at,), _normal(1)))
    rows += [
        _Row("engram.wkv", ((streams + 1) * hidden, c.engram.width), "fp8", memory, _linear(1)),
        _Row("engram.q_weight", (streams, hidden), _BF16, memory, _near(1, 0.75)),
        _Row("engram.k_weight", (streams, hidden), _BF16, memory, _near(1, 0.75)),
    ]
    first, last, rank = stages[:1], stages[-1:], c.draft.markov_rank
    rows += [
        _Row("main_proj", (hidden, hidden * len(c.draft.target_layers)), "fp8", first, _linear(1)),
        _Row("main_norm.weight", (hidden,), _BF16, first, _NORM),
        _Row("norm.weight", (hidden,), _BF16, last, _NORM),
        _Row("markov_head.embed.weight", (c.vocab_size, rank), _BF16, last, _normal(1)),
        _Row("markov_head.head.weight", (c.vocab_size, rank), _BF16, last, _linear(1)),
        _Row("confidence_head.proj.weight", (1, hidden + rank), _BF16, last, _linear(1)),
    ]
    return rows


def _vision_table(c: V41FlashConfig) -> list[_Row]:
    v, hidden = c.vision, c.hidden
    blocks = tuple(f"vision.blocks.{i}." for i in range(v.num_layers))
    rows = [_Row(f"image_{n}", (hidden,), _BF16, _ONCE, _normal(1)) for n in ("start", "end", "newline")]

    def linear(name: str, outs: int, ins: int, places: tuple[str, ...], bias: bool = True) -> None:
        rows.append(_Row(f"{name}.weight", (outs, ins), _BF16, places, _linear(1)))
        if bias:
            rows.append(_Row(f"{name}.bias", (outs,), _BF16, places, _normal(0.25)))

    linear("aligner.w1", hidden, v.hidden * v.downsample**2, _ONCE)
    linear("aligner.w2", hidden, hidden, _ONCE)
    linear("vision.patch_embed.proj", v.hidden, 3 * v.patch**2, _ONCE)
    linear("attn.wqkv", 3 * v.hidden, v.hidden, blocks)
    linear("attn.wo", v.hidden, v.hidden, blocks)
    linear("mlp.w1", 2 * v.inter, v.hidden, blocks, bias=False)
    linear("mlp.w2", v.hidden, v.inter, blocks, bias=False)
    norms = (("norm1.weight", blocks), ("norm2.weight", blocks), ("vision.norm.weight", _ONCE))
    return rows + [_Row(name, (v.hidden,), _BF16, places, _NORM) for name, places in norms]


class TensorSpec(NamedTuple):
    """Shape and dtype of a checkpoint tensor, and the table row it comes from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    row: _Row


def _parts(row: _Row) -> Iterator[tuple[str, TensorSpec]]:
    """The tensors of one place: (name suffix, tensor)."""
    if isinstance(row.kind, torch.dtype):
        yield row.name, TensorSpec(row.shape, row.kind, row)
        return
    outs, ins = row.shape
    groups = -(-ins // 32)
    weight = ((outs, ins // 2), _I8) if row.kind == "fp4" else ((outs, ins), E4M3)
    yield f"{row.name}.weight", TensorSpec(*weight, row)
    yield f"{row.name}.scale", TensorSpec((-(-outs // 32) if row.kind == "fp8" else outs, groups), E8M0, row)


@functools.lru_cache(maxsize=8)
def tensor_specs(cfg: V41FlashConfig, vision: bool) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint by name. Shared by all callers: do not change it."""
    rows = _table(cfg) + (_vision_table(cfg) if vision else [])
    parts = ((row, list(_parts(row))) for row in rows)
    return {place + name: tensor for row, made in parts for place in row.places for name, tensor in made}


def expected_tensors(
    cfg: V41FlashConfig, vision: bool = False
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every tensor of the checkpoint of a config.

    Args:
        cfg: the model's constants.
        vision: with the vision tower, the aligner and the image vectors.

    Returns:
        name -> (shape, dtype), ``mtp.*`` included: 96,085 names for `V41FlashConfig.flash` with vision and
        95,819 without. Packed FP4 experts are int8 [out, in/2], scales float8_e8m0fnu.
    """
    return {name: (t.shape, t.dtype) for name, t in tensor_specs(cfg, vision).items()}


def parameter_counts(cfg: V41FlashConfig, vision: bool = False) -> dict[torch.dtype, int]:
    """Logical values a stored dtype; an int8 byte holds two. Scales (float8_e8m0fnu) are not parameters."""
    counts: dict[torch.dtype, int] = {}
    for shape, dtype in expected_tensors(cfg, vision).values():
        counts[dtype] = counts.get(dtype, 0) + math.prod(shape) * (2 if dtype == _I8 else 1)
    return counts


# Synthetic checkpoints.

# Offsets of neighbouring scale codes, and the root mean square of the powers of two that they stand for.
_OFFSETS = (-2, -1, 0, 1)
_OFFSETS_RMS = math.sqrt(sum(4.0**k for k in _OFFSETS) / len(_OFFSETS))
# Both nibbles of a byte: every E2M1 code but the two zeros.
_E2M1_CODES = tuple(k for k in range(16) if k & 7)
_E2M1_RMS = 3.128


@functools.cache
def _unit_normal() -> torch.Tensor:
    """4096 normal quantiles, none nearer to zero than 1/32: sums of products stay exact in float64."""
    half = math.sqrt(2) * torch.erfinv((torch.arange(2048, dtype=torch.float64) + 0.5) / 2048)
    half = half.clamp(min=1 / 32)
    return torch.cat([-half.flip(0), half])


@functools.lru_cache(maxsize=256)
def _levels(row: _Row, dtype: torch.dtype) -> torch.Tensor:
    """The values that a tensor of this row is drawn from, in its stored dtype."""
    law, spread, centre = row.fill
    size = spread / math.sqrt(row.shape[-1]) if law == "linear" else spread
    if isinstance(row.kind, torch.dtype):
        if law == "near":
            steps = torch.linspace(0.2, 1.0, 512, dtype=torch.float64) * spread
            return (centre + torch.cat([-steps, steps])).to(dtype)
        return (_unit_normal() * size).to(dtype)
    # Quantised pairs: the values fill their format, the scales bring them to the wanted size.
    size /= _OFFSETS_RMS
    power = round(math.log2(size / _E2M1_RMS)) if row.kind == "fp4" else math.floor(math.log2(size / 32))
    if dtype == E8M0:
        return torch.tensor([127 + power + k for k in _OFFSETS], dtype=torch.uint8).view(E8M0)
    if row.kind == "fp4":
        codes = torch.tensor(_E2M1_CODES, dtype=torch.uint8)
        return (codes[:, None] | codes[None] << 4).flatten().view(_I8)
    return (_unit_normal() * size * 2.0**-power).clamp(-448, 448).float().to(dtype)


def synthetic_tensor(cfg: V41FlashConfig, name: str, seed: int) -> torch.Tensor:
    """One tensor of the synthetic checkpoint, the same bits on every call and machine.

    Args:
        cfg: the model's constants.
        name: a name of ``expected_tensors(cfg, vision=True)``.
        seed: of the checkpoint; every name has its own stream.

    Returns:
        The tensor in its stored shape and dtype. No value is zero; no norm, bias, sink or scale is one.
    """
    known = tensor_specs(cfg, True)
    check(name in known, "synthetic_tensor", "name: a checkpoint tensor of this config", name)
    shape, dtype, row = known[name]
    levels = _levels(row, dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[levels.element_size()]
    stream = np.random.default_rng(
        int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "big")
    )
    picks = stream.integers(0, len(levels), shape, dtype=np.uint16)
    return torch.from_numpy(levels.view(bits).numpy()[picks]).view(dtype)


def draw_tensor(out: torch.Tensor, cfg: V41FlashConfig, name: str, draw: torch.Generator) -> None:
    """Fill a tensor with values of `synthetic_tensor`'s law, on its own device and quickly; other bits.

    Args:
        out: in the stored shape and dtype of ``name`` (int8 may be uint8).
        cfg: the model's constants.
        name: a name of ``expected_tensors(cfg, vision=True)``.
        draw: generator on the device of ``out``.
    """
    spec = tensor_specs(cfg, True)[name]
    levels = _levels(spec.row, spec.dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[levels.element_size()]
    picks = torch.randint(0, len(levels), out.shape, generator=draw, device=out.device, dtype=torch.int16)
    out.view(bits).copy_(levels.view(bits).to(out.device)[picks.int()])


def write_synthetic(cfg: V41FlashConfig, folder: str | Path, seed: int, *, vision: bool = False) -> None:
    """Write a checkpoint of any config in the official layout: shards, index and ``config.json``.

    Values exercise the whole model: mixes far from uniform, biases that change choices, sinks of the size of
    the scores, clamps that are met, scales that differ from block to block. See `synthetic_tensor`.

    Args:
        cfg: the model's constants.
        folder: made when it does not exist; files of the same names are replaced.
        seed: of all values.
        vision: also write the vision tower, the aligner and the image vectors.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {n: math.prod(s) * d.itemsize for n, (s, d) in expected_tensors(cfg, vision).items()}
    total = sum(sizes.values())
    limit = min(total // 4, 8 << 30)
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        where |= dict.fromkeys(names, file)
        values = {name: synthetic_tensor(cfg, name, seed) for name in names}
        save_file(values, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(cfg.to_hf(), indent=1))
