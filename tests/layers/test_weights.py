"""Checkpoints: tensor table, synthetic values, lazy reader, a loader that refuses before it copies."""

import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dsv41_reference.quant import e8m0_decode, from_mxfp4, from_mxfp8, from_mxfp8_tiles
from safetensors.torch import load_file, save_file

from dsv41 import V41FlashConfig
from dsv41.formats import E4M3, E8M0
from dsv41.layers.engram import EngramStore, MappedEngramStore
from dsv41.layers.weights import (
    expected_tensors,
    load,
    open_checkpoint,
    parameter_counts,
    synthetic_tensor,
    write_synthetic,
)

INDEX = "model.safetensors.index.json"
FLASH, MICRO = V41FlashConfig.flash(), V41FlashConfig.micro()
SEED = 5


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# The table.


def test_totals_of_the_released_checkpoint() -> None:
    """Names, parameters and bytes, the figures that are published for the real files."""
    full, text = expected_tensors(FLASH, vision=True), expected_tensors(FLASH)
    assert (len(full), len(text)) == (96_085, 95_819)
    counts = parameter_counts(FLASH, vision=True)
    assert counts == {
        torch.int8: 557_171_343_360,
        E4M3: 204_015_223_296,
        torch.bfloat16: 1_976_441_856,
        torch.float32: 42_307_282,
        E8M0: 23_563_015_184,
    }
    assert sum(counts.values()) - counts[E8M0] == 763_205_315_794
    assert sum(math.prod(shape) * dtype.itemsize for shape, dtype in full.values()) == 510_286_023_000


def test_groups_of_the_released_checkpoint() -> None:
    groups = {
        "experts": (r"layers\.\d+\.ffn\.experts\.", 543_581_798_400),
        "attention": (r"layers\.\d+\.attn\.w(q_a|q_b|kv|o_a|o_b)\.", 5_064_622_080),
        "shared": (r"layers\.\d+\.ffn\.shared_experts\.", 1_415_577_600),
        "routers": (r"layers\.\d+\.ffn\.gate\.", 78_673_920),
        "indexers": (r"layers\.\d+\.attn\.indexer\.", 43_516_416),
        "mHC": (r"layers\.\d+\.hc_", 39_323_760),
        "compressors": (r"layers\.\d+\.attn\.compressor\.", 18_352_128),
        "norms and sinks": (r"norm\.|layers\.\d+\.(\w+_norm|attn\.(\w+_norm|attn_sink))", 488_960),
        "memory": (r"layers\.\d+\.engram\.[wqk]", 314_654_720),
        "ends": (r"embed\.|head\.", 1_323_827_200),
        "tables": (r"layers\.\d+\.engram\.embed\.", 196_613_849_600),
        "drafter": (r"mtp\.", 14_225_362_530),
        "vision": (r"vision\.|aligner\.|image_", 485_268_480),
    }
    either = re.compile("|".join(f"({pattern.replace('(', '(?:')})" for pattern, _ in groups.values()))
    found = [0] * len(groups)
    for name, (shape, dtype) in expected_tensors(FLASH, vision=True).items():
        match = either.match(name)
        assert match and match.lastindex, name
        if dtype != E8M0:
            found[match.lastindex - 1] += math.prod(shape) * (2 if dtype == torch.int8 else 1)
    assert found == [total for _, total in groups.values()]


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("head.weight", (129280, 5120), torch.bfloat16),
        ("layers.39.hc_ffn_fn", (24, 20480), torch.float32),
        ("layers.0.hc_attn_scale", (3,), torch.float32),
        ("mtp.2.attn.attn_sink", (64,), torch.float32),
        ("layers.7.attn.wq_b.weight", (32768, 1280), E4M3),
        ("layers.7.attn.wq_b.scale", (1024, 40), E8M0),
        ("layers.7.attn.wo_a.weight", (8192, 4096), E4M3),
        ("layers.7.attn.wo_a.scale", (256, 128), E8M0),
        ("layers.14.attn.compressor.wgate.weight", (512, 5120), torch.bfloat16),
        ("layers.20.attn.compressor.wkv.weight", (512, 5120), torch.bfloat16),
        ("layers.36.attn.indexer.wq_b.scale", (128, 40), E8M0),
        ("layers.39.ffn.experts.383.w1.weight", (2304, 2560), torch.int8),
        ("layers.39.ffn.experts.383.w2.scale", (5120, 72), E8M0),
        ("layers.3.ffn.shared_experts.w2.scale", (160, 72), E8M0),
        ("mtp.1.ffn.experts.127.w3.scale", (2304, 160), E8M0),
        ("mtp.1.ffn.gate.bias_vl", (128,), torch.float32),
        ("layers.14.engram.embed.weight", (384_016_682, 256), E4M3),
        ("layers.1.engram.embed.scale", (384_006_168, 8), E8M0),
        ("layers.1.engram.wkv.scale", (800, 192), E8M0),
        ("layers.14.engram.k_weight", (4, 5120), torch.bfloat16),
        ("mtp.0.main_proj.scale", (160, 480), E8M0),
        ("mtp.2.markov_head.head.weight", (129280, 256), torch.bfloat16),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), torch.bfloat16),
        ("aligner.w1.weight", (5120, 9216), torch.bfloat16),
        ("vision.patch_embed.proj.weight", (1024, 588), torch.bfloat16),
        ("vision.blocks.31.attn.wqkv.bias", (3072,), torch.bfloat16),
        ("vision.blocks.0.mlp.w1.weight", (5632, 1024), torch.bfloat16),
    ],
)
def test_shapes_of_the_released_checkpoint(name, shape, dtype) -> None:
    assert expected_tensors(FLASH, vision=True)[name] == (shape, dtype)


def test_layers_that_have_no_such_tensor() -> None:
    names = expected_tensors(FLASH)
    for name in ("layers.20.attn.compressor.wgate.weight", "layers.3.attn.compressor.wkv.weight",
                 "layers.24.attn.indexer.wk.weight", "layers.2.engram.q_weight", "mtp.1.main_norm.weight",
                 "mtp.0.norm.weight", "image_start"):  # fmt: skip
        assert name not in names


# Synthetic values.


def test_every_value_is_in_use() -> None:
    """Nothing is zero; norms, biases, sinks and scales are not one; no tensor is constant."""
    for name, (shape, dtype) in expected_tensors(MICRO, vision=True).items():
        t = synthetic_tensor(MICRO, name, SEED)
        assert tuple(t.shape) == shape and t.dtype == dtype, name
        if dtype == torch.int8:
            codes = t.view(torch.uint8)
            assert (codes & 7).all() and (codes >> 4 & 7).all(), name
            continue
        value = e8m0_decode(t.view(torch.uint8)) if dtype == E8M0 else t.float()
        assert value.isfinite().all() and (value != 0).all(), name
        assert t.numel() < 8 or value.unique().numel() > 1, name
        if dtype in (E8M0, torch.float32) or "norm" in name or "bias" in name:
            assert (value != 1).all(), name


def test_values_are_of_their_own_stream() -> None:
    name = "layers.0.attn.wq_a.weight"
    first = synthetic_tensor(MICRO, name, SEED)
    assert same_bits(first, synthetic_tensor(MICRO, name, SEED))
    assert not same_bits(first, synthetic_tensor(MICRO, name, SEED + 1))
    assert not same_bits(first, synthetic_tensor(MICRO, "layers.1.attn.wq_a.weight", SEED))
    bias = synthetic_tensor(MICRO, "layers.0.ffn.gate.bias", SEED)
    assert not same_bits(bias, synthetic_tensor(MICRO, "layers.0.ffn.gate.bias_vl", SEED))
    with pytest.raises(
        ValueError, match="synthetic_tensor: expected name: a checkpoint tensor of this config"
    ):
        synthetic_tensor(MICRO, "layers.0.attn.wq_a", SEED)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def test_sizes_keep_activations_near_one() -> None:
    """A unit input comes out of a linear at its gain; scales spread over blocks."""
    cfg = V41FlashConfig.mini()

    def tensors(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        weight, scale = (synthetic_tensor(cfg, f"{name}.{part}", SEED) for part in ("weight", "scale"))
        assert scale.view(torch.uint8).unique().numel() == 4
        return weight, scale.view(torch.uint8)

    for name, gain in (("layers.9.attn.wkv", 1.0), ("layers.9.attn.wq_b", 2.0), ("layers.1.engram.wkv", 1.0)):
        w = from_mxfp8_tiles(*tensors(name))
        assert rms(w) * math.sqrt(w.shape[1]) == pytest.approx(gain, rel=0.1), name
    w1 = from_mxfp4(*tensors("layers.9.ffn.experts.3.w1"))
    gate = torch.randn(256, cfg.hidden) @ w1.t()
    # The clamp at 10 is met, by few.
    assert 0.002 < (gate.abs() > cfg.swiglu_limit).float().mean() < 0.1
    table = from_mxfp8(*tensors("layers.14.engram.embed"))
    assert rms(table) == pytest.approx(1, rel=0.05)


def test_biases_change_choices() -> None:
    cfg = V41FlashConfig.mini()
    x = torch.randn(512, cfg.hidden)
    a = (x @ synthetic_tensor(cfg, "layers.5.ffn.gate.weight", SEED).float().t()).exp().log1p().sqrt()
    choices = [a, *(a + synthetic_tensor(cfg, f"layers.5.ffn.gate.{b}", SEED) for b in ("bias", "bias_vl"))]
    chosen = [torch.zeros_like(a).scatter(1, c.topk(cfg.top_k).indices, 1) for c in choices]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert 0.1 < (chosen[i] != chosen[j]).any(1).float().mean() < 0.95


# Writing and reading.


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_synthetic(MICRO, folder, SEED, vision=True)
    return folder


def test_layout(written: Path) -> None:
    index = json.loads((written / INDEX).read_text())
    expected = expected_tensors(MICRO, vision=True)
    assert set(index["weight_map"]) == set(expected)
    files = sorted(written.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [f.name for f in files] and len(files) >= 3
    assert re.fullmatch(r"model-00001-of-0000\d.safetensors", files[0].name)
    assert index["metadata"]["total_size"] == sum(math.prod(s) * d.itemsize for s, d in expected.values())
    for file in files:
        for name, t in load_file(file).items():
            assert index["weight_map"][name] == file.name
            assert (tuple(t.shape), t.dtype) == expected[name]
            assert same_bits(t, synthetic_tensor(MICRO, name, SEED))
    assert V41FlashConfig.from_hf(json.loads((written / "config.json").read_text())) == MICRO


def test_reader(written: Path) -> None:
    checkpoint = open_checkpoint(written, MICRO)
    assert set(checkpoint) == set(expected_tensors(MICRO, vision=True)) and len(checkpoint) == len(
        set(checkpoint)
    )
    for name in ("embed.weight", "layers.2.ffn.experts.1.w2.scale", "mtp.0.main_norm.weight", "image_end"):
        assert same_bits(checkpoint[name], synthetic_tensor(MICRO, name, SEED))
    assert "layers.0.engram.q_weight" not in checkpoint
    with pytest.raises(KeyError):
        checkpoint["model.embed.weight"]
    path, begin = checkpoint.locate("head.weight")
    held = path.read_bytes()[begin : begin + 16]
    assert (
        held
        == synthetic_tensor(MICRO, "head.weight", SEED).view(torch.uint8).flatten()[:16].numpy().tobytes()
    )


# Loading.


class FakeModel:
    """Parameters of another model class: experts as uint8 views of one tensor, tables attached."""

    def __init__(self, cfg: V41FlashConfig = MICRO, drafter: bool = False, tables: bool = False):
        self.cfg = cfg
        self.parameters: dict[str, torch.Tensor] = {}
        self.stores: dict[int, EngramStore] = {}
        for name, (shape, dtype) in expected_tensors(cfg).items():
            held = tables or "engram.embed" not in name
            if held and (drafter or not name.startswith("mtp.")):
                raw = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 77, dtype=torch.uint8)
                self.parameters[name] = raw if dtype == torch.int8 else raw.view(dtype)

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.parameters)

    def attach_engram(self, layer: int, store: EngramStore) -> None:
        self.stores[layer] = store

    def untouched(self) -> bool:
        return not self.stores and all((t.view(torch.uint8) == 77).all() for t in self.parameters.values())


def test_load(written: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    report = load(model, written)
    for name, t in model.parameters.items():
        want = synthetic_tensor(MICRO, name, SEED)
        assert torch.equal(t.view(torch.uint8), want.view(torch.uint8)), name
    assert set(report.loaded) == set(model.parameters)
    assert report.size == sum(t.nbytes for t in model.parameters.values())
    # Tables stay on disk and answer with the checkpoint's rows.
    assert report.engram == MICRO.engram.layers == tuple(model.stores)
    for layer, store in model.stores.items():
        assert isinstance(store, MappedEngramStore)
        parts = (
            synthetic_tensor(MICRO, f"layers.{layer}.engram.embed.{p}", SEED) for p in ("weight", "scale")
        )
        values, scale = parts
        dense = from_mxfp8(values, scale.view(torch.uint8)).bfloat16()
        assert torch.equal(store.lookup(torch.arange(len(values), dtype=torch.int32)[:, None]), dense)
    # What was skipped is said, in one line.
    skipped = {
        n
        for n in expected_tensors(MICRO, vision=True)
        if n.startswith(("mtp.", "vision.", "aligner.", "image_"))
    }
    assert set(report.skipped) == skipped
    said = [line for line in capfd.readouterr().err.replace("\r", "\n").splitlines() if "skipped" in line]
    drafter = sum(n.startswith("mtp.") for n in skipped)
    assert len(said) == 1 and str(report) in said[0]
    assert f"{drafter} of mtp.*" in said[0] and "3 of image_*" in said[0] and "4 of aligner.*" in said[0]


def test_load_quietly_with_drafter_and_tables(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A text-only folder, a model that holds everything."""
    write_synthetic(MICRO, tmp_path, SEED)
    model = FakeModel(drafter=True, tables=True)
    report = load(model, tmp_path, progress=False)
    assert set(report.loaded) == set(expected_tensors(MICRO)) and not report.skipped and not model.stores
    assert str(report).endswith("; skipped nothing")
    assert capfd.readouterr().err == ""
    for name in ("mtp.0.main_proj.scale", "layers.1.engram.embed.weight"):
        assert same_bits(model.parameters[name], synthetic_tensor(MICRO, name, SEED))


# Refusals. Every case spoils a good folder, and nothing of the model may change.


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    for file in written.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def refusal(folder: Path, model: FakeModel | None = None) -> str:
    model = model or FakeModel()
    with pytest.raises(ValueError) as error:
        load(model, folder, progress=False)
    assert model.untouched()
    message = str(error.value)
    assert message.startswith("load: expected ") and ", got " in message and "\n" not in message
    return message


def shard_of(folder: Path, name: str) -> str:
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_shard(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: t.clone() for name, t in load_file(folder / file).items()}
    change(tensors)
    save_file(tensors, folder / file)


NAME = "layers.1.attn.q_norm.weight"


def test_missing_tensor(folder: Path) -> None:
    file = shard_of(folder, NAME)
    edit_shard(folder, file, lambda t: t.pop(NAME))
    wanted = f"1 missing: {NAME} (the index says {file})"
    assert wanted in refusal(folder)
    edit_index(folder, lambda index: index.pop(NAME))
    assert f"1 missing: {NAME}" in refusal(folder)


def test_extra_tensor(folder: Path) -> None:
    file = shard_of(folder, NAME)
    edit_shard(folder, file, lambda t: t.update({"model.layers.0.conv.weight": torch.ones(3)}))
    wanted = f"1 in the wrong place: model.layers.0.conv.weight (in {file}; the index does not name it)"
    assert wanted in refusal(folder)
    edit_index(folder, lambda index: index.update({"model.layers.0.conv.weight": file}))
    assert f"1 extra: model.layers.0.conv.weight (in {file})" in refusal(folder)


def test_wrong_shape_and_type(folder: Path) -> None:
    file = shard_of(folder, NAME)
    scale = next(n for n in load_file(folder / file) if n.endswith("wkv.scale"))
    rank = MICRO.q_rank
    edit_shard(
        folder, file, lambda t: t.update({NAME: torch.ones(rank + 1).bfloat16(), scale: t[scale].float()})
    )
    message = refusal(folder)
    assert f"1 mis-shaped: {NAME} ([{rank + 1}] for [{rank}], in {file})" in message
    assert f"1 mis-typed: {scale} (F32 for F8_E8M0, in {file})" in message
    assert message.count(";") == 1


def test_every_problem_is_in_one_error(folder: Path) -> None:
    """Of several kinds and in several shards, with the count of what is not spelled out."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    first, second, *_ = sorted(set(index.values()))
    lost = [n for n in index if index[n] == second][:20]
    edit_shard(folder, second, lambda t: [t.pop(n) for n in lost])
    edit_shard(folder, first, lambda t: t.update({"embed.weight": t["embed.weight"].float()}))
    message = refusal(folder)
    assert (
        f"20 missing: {lost[0]} (the index says {second}), {lost[1]} (" in message and "and 4 more" in message
    )
    assert f"1 mis-typed: embed.weight (F32 for BF16, in {first})" in message


def test_truncated_shard(folder: Path) -> None:
    file = shard_of(folder, "embed.weight")
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:-5])
    message = refusal(folder)
    last = max(open_checkpoint_entries(data), key=lambda e: e[1])
    assert (
        f"1 truncated: {last[0]} (ends at byte {len(data)} of {file}, which has {len(data) - 5})" in message
    )
    for size in (0, 5, 100):  # the header itself
        (folder / file).write_bytes(data[:size])
        message = refusal(folder)
        assert f"1 unreadable: {file} (of embed.weight and others: a header of " in message
    (folder / file).write_bytes(data + b"\0")
    assert f"{file} (of embed.weight and others: 1 bytes behind the last tensor)" in refusal(folder)
    (folder / file).write_bytes(struct.pack("<Q", 20) + b"{" * 20)
    assert f"1 unreadable: {file} (of embed.weight and others: Expecting property name" in refusal(folder)
    (folder / file).unlink()
    assert f"1 unreadable: {file} (of embed.weight and others: no such file)" in refusal(folder)


def open_checkpoint_entries(data: bytes) -> list[tuple[str, int]]:
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return [(name, entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]


def test_header_that_lies_about_bytes(folder: Path) -> None:
    """A hole between tensors, and a tensor with another size than its shape."""
    file = shard_of(folder, NAME)
    data = (folder / file).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    (first, second), *_ = sorted(
        ((e["data_offsets"], n) for n, e in header.items() if n != "__metadata__")
    )[0:2], None  # fmt: skip
    cut = first[0][1] - 2

    def rewrite() -> None:
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    header[first[1]]["data_offsets"] = [0, cut]
    rewrite()
    assert f"{file} (of " in refusal(folder) and f"{second[1]} starts at byte " in refusal(folder)
    header[second[1]]["data_offsets"][0] = cut
    rewrite()
    message = refusal(folder)
    assert f"2 mis-sized: {first[1]} (" in message or f"2 mis-sized: {second[1]} (" in message


def test_tensor_in_another_shard(folder: Path) -> None:
    here = shard_of(folder, NAME)
    other = next(f for f in sorted(p.name for p in folder.glob("*.safetensors")) if f != here)
    edit_index(folder, lambda index: index.update({NAME: other}))
    assert f"1 in the wrong place: {NAME} (in {here}; the index says {other})" in refusal(folder)


def test_tensor_in_two_shards(folder: Path) -> None:
    here = shard_of(folder, NAME)
    other = next(f for f in sorted(p.name for p in folder.glob("*.safetensors")) if f != here)
    edit_shard(folder, other, lambda t: t.update({NAME: torch.ones(MICRO.q_rank).bfloat16()}))
    assert f"1 in the wrong place: {NAME} (in {other}; the index says {here})" in refusal(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "\x80"])
def test_index_that_is_none(folder: Path, text: str) -> None:
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    message = refusal(folder)
    assert INDEX in message and "weight_map" in message


def test_index_of_another_place(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert re.search(rf"a checkpoint index .*{INDEX}, got no such file", refusal(folder))
    edit = {"weight_map": {"embed.weight": "../model.safetensors"}}
    (folder / INDEX).write_text(json.dumps(edit))
    assert "file names without a folder in" in refusal(folder)


def test_another_models_checkpoint(folder: Path) -> None:
    message = refusal(folder, FakeModel(V41FlashConfig.tiny()))
    file = shard_of(folder, "embed.weight")
    assert f"mis-shaped: embed.weight ([96, 64] for [512, 128], in {file})" in message
    assert re.search(r"\d+ missing: layers\.\d\.[\w.]+, ", message)
    assert re.search(r"\d+ extra: layers\.\d\.[\w.]+ \(in model-", message)


def test_part_of_the_vision_tower(folder: Path) -> None:
    file = shard_of(folder, "image_end")
    edit_shard(folder, file, lambda t: t.pop("image_end"))
    edit_index(folder, lambda index: index.pop("image_end"))
    assert "1 missing: image_end" in refusal(folder)


def test_scale_byte_255(folder: Path) -> None:
    names = ("layers.3.ffn.experts.2.w1.scale", "layers.0.attn.wo_b.scale")
    for name in names:
        edit_shard(
            folder, shard_of(folder, name), lambda t, n=name: t[n].view(torch.uint8)[-1, -1].fill_(255)
        )
    message = refusal(folder)
    assert "scales without byte 255" in message and "got 2 spoiled: " in message
    for name in names:
        assert f"{name} (in {shard_of(folder, name)})" in message


def test_scale_byte_255_in_a_table_row(folder: Path) -> None:
    """Tables are not scanned: the row is refused when somebody reads it."""
    name = "layers.1.engram.embed.scale"
    edit_shard(folder, shard_of(folder, name), lambda t: t[name].view(torch.uint8)[4].fill_(255))
    model = FakeModel()
    load(model, folder, progress=False)
    rows = torch.tensor([[3, 5]], dtype=torch.int32)
    model.stores[1].lookup(rows)
    with pytest.raises(ValueError, match=r"no byte 255 in the rows that are read, got row \[4\]"):
        model.stores[1].lookup(rows - 1)
    # A model that holds its tables reads all of them.
    assert name in refusal(folder, FakeModel(tables=True))


def change_model(name: str, value: torch.Tensor | None) -> FakeModel:
    model = FakeModel(drafter=True)
    if value is None:
        del model.parameters[name]
    else:
        model.parameters[name] = value
    return model


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (NAME, None, f"1 not offered: {NAME}"),
        ("mtp.1.ffn.gate.bias", None, "1 not offered: mtp.1.ffn.gate.bias"),
        ("layers.0.conv", torch.full((3,), 77, dtype=torch.uint8), "1 not in the checkpoint: layers.0.conv"),
        (
            "layers.1.engram.embed.weight",
            torch.full((60, 32), 77, dtype=torch.uint8).view(E4M3),
            "1 not offered: layers.1.engram.embed.scale",
        ),
        (
            "norm.weight",
            torch.full((64, 4), 77, dtype=torch.uint8).view(torch.float32)[:, 0],
            "1 mismatched: norm.weight ([64] float32 for [64] bfloat16)",
        ),
        (
            "layers.0.attn.wq_a.scale",
            torch.full((1, 2), 77, dtype=torch.uint8),
            "1 mismatched: layers.0.attn.wq_a.scale ([1, 2] uint8 for [1, 2] float8_e8m0fnu)",
        ),
    ],
)
def test_model_that_does_not_fit(written: Path, name, value, message) -> None:
    assert message in refusal(written, change_model(name, value))


def test_model_without_memory(written: Path) -> None:
    model = FakeModel()
    model.parameters = {NAME: torch.empty(MICRO.q_rank, dtype=torch.bfloat16, device="meta")}
    with pytest.raises(ValueError) as error:
        load(model, written, progress=False)
    assert f"mismatched: {NAME} ([32] bfloat16 on meta" in str(error.value)


def test_reader_refuses_too(folder: Path) -> None:
    file = shard_of(folder, NAME)
    (folder / file).write_bytes((folder / file).read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=f"^open_checkpoint: expected the .* tensors .* truncated: .* of {file}"
    ):
        open_checkpoint(folder, MICRO)
    open_checkpoint(write_again(folder), MICRO)


def write_again(folder: Path) -> Path:
    write_synthetic(MICRO, folder, SEED, vision=True)
    return folder


def test_other_constants_of_equal_shape_are_refused(tmp_path: Path) -> None:
    """A checkpoint of another rope base or top-k has the same tensors; its config.json tells."""
    cfg = V41FlashConfig.micro()
    write_synthetic(cfg, tmp_path, 0)
    open_checkpoint(tmp_path, replace(cfg, max_positions=cfg.max_positions // 2))
    with pytest.raises(ValueError, match=r"constants \{'index_top_k': 3, 'rope_theta': 5.0\}.*got \{"):
        open_checkpoint(tmp_path, replace(cfg, rope_theta=5.0, index_top_k=3))
    (tmp_path / "config.json").write_text('{"dim": 64}')
    with pytest.raises(ValueError, match=r"expected a V4\.1 config in"):
        open_checkpoint(tmp_path, cfg)
