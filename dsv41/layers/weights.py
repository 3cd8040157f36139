"""Checkpoint folders: a lazy reader, and a loader that checks everything before it copies anything.

Shards are read with the ``safetensors`` library, which maps them into memory. The tensor table and synthetic
checkpoints are in `dsv41.layers.checkpoint`; their names are here too.
"""

import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from tqdm import tqdm

from .._op import check, describe
from ..config import V41FlashConfig
from ..formats import E4M3, E8M0
from .checkpoint import (
    INDEX,
    TensorSpec,
    expected_tensors,
    parameter_counts,
    synthetic_tensor,
    tensor_specs,
    write_synthetic,
)
from .engram import EngramStore, MappedEngramStore

__all__ = [
    "Checkpoint",
    "LoadReport",
    "LoadableModel",
    "expected_tensors",
    "load",
    "open_checkpoint",
    "parameter_counts",
    "synthetic_tensor",
    "write_synthetic",
]

_SPELLING = {"BF16": torch.bfloat16, "F32": torch.float32, "I8": torch.int8, "F8_E4M3": E4M3, "F8_E8M0": E8M0}
_OPTIONAL = ("vision.", "aligner.", "image_")
_SKIPPABLE = (*_OPTIONAL, "mtp.")
_SHOWN = 16


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


class _Problems:
    """Everything that is wrong with a checkpoint, told in one sentence."""

    def __init__(self, op: str, expected: str):
        self.op, self.expected = op, expected
        self.found: dict[str, list[str]] = {}

    def add(self, kind: str, what: str) -> None:
        self.found.setdefault(kind, []).append(what)

    def refuse(self) -> None:
        if not self.found:
            return
        parts = []
        for kind, items in self.found.items():
            more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
            parts.append(f"{len(items)} {kind}: {', '.join(items[:_SHOWN])}{more}")
        raise ValueError(f"{self.op}: expected {self.expected}, got {'; '.join(parts)}")


def _read_header(path: Path) -> tuple[dict[str, _Entry], int]:
    """The tensors that a shard declares, with absolute byte ranges, and the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    start = 8 + length
    entries = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            entries[name] = _Entry(tuple(entry["shape"]), entry["dtype"], start + begin, start + end)
    # The format has no holes. A file that ends early is reported by tensor, later.
    ranges = sorted((e.begin, e.end, name) for name, e in entries.items())
    for (_, end, _), (begin, _, name) in itertools.pairwise([(0, start, ""), *ranges]):
        if begin != end:
            raise ValueError(f"{name} starts at byte {begin}, where {end} is due")
    last = ranges[-1][1] if ranges else start
    if size > last:
        raise ValueError(f"{size - last} bytes behind the last tensor")
    return entries, size


def _read_index(op: str, folder: Path) -> dict[str, str]:
    path = folder / INDEX
    check(path.is_file(), op, f"a checkpoint index {path}", "no such file")
    try:
        index = json.loads(path.read_text())["weight_map"]
        good = bool(index) and all(isinstance(k, str) and isinstance(v, str) for k, v in index.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{op}: expected a weight_map in {path}, got {error!r}") from error
    check(good, op, f"a weight_map of tensor names to file names in {path}", index)
    outside = [file for file in set(index.values()) if Path(file).name != file]
    check(not outside, op, f"file names without a folder in {path}", outside)
    return index


class Checkpoint(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint folder by name, mapped into memory. Made by `open_checkpoint`."""

    def __init__(self, folder: Path, entries: dict[str, tuple[str, _Entry]]):
        self.folder = folder
        self._entries = entries
        self._files: dict[str, Any] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        file, _ = self._entries[name]
        # Opened when first read: the library maps a whole file as private memory, which a system may refuse
        # for the file of an Engram table if nobody needs it.
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, "pt")
            except Exception as error:
                wanted = f"a safetensors file {self.folder / file} (for {name})"
                raise ValueError(f"Checkpoint: expected {wanted}, got {error}") from error
        return self._files[file].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header."""
        return self._entries[name][1].shape

    def locate(self, name: str) -> tuple[Path, int]:
        """The file that holds a tensor and the byte its values start at."""
        file, entry = self._entries[name]
        return self.folder / file, entry.begin


def open_checkpoint(folder: str | Path, cfg: V41FlashConfig) -> Checkpoint:
    """Open a checkpoint folder for reading, after checking that it is exactly this config's.

    Args:
        folder: holds ``model.safetensors.index.json`` and the shards that it names.
        cfg: the constants of the model that is expected there.

    Returns:
        A mapping from name to tensor; the tensors are views of the mapped files (do not write to them), in
        their stored dtypes. Vision tensors are there when the folder has them.

    Errors: one ValueError that names every missing, extra, misplaced, mis-shaped, mis-typed or truncated
        tensor with its file (the first of each kind, and how many).
    """
    return _open("open_checkpoint", Path(folder), cfg)


def _check_config(op: str, folder: Path, cfg: V41FlashConfig) -> None:
    """Refuse a folder whose ``config.json`` has other constants: shapes alone do not show them.

    How many positions are wanted is the caller's choice; the vision tower is not built.
    """
    path = folder / "config.json"
    if not path.is_file():
        return
    stored = V41FlashConfig.from_file(path)
    free = {"max_positions", "vision"}
    names = [f.name for f in fields(cfg) if f.name not in free]
    other = {n: getattr(stored, n) for n in names if getattr(stored, n) != getattr(cfg, n)}
    wanted = {n: getattr(cfg, n) for n in other}
    check(not other, op, f"the model's constants {wanted} in {path}", other)


def _open(op: str, folder: Path, cfg: V41FlashConfig) -> Checkpoint:
    index = _read_index(op, folder)
    everything, required = tensor_specs(cfg, True), tensor_specs(cfg, False)
    if any(name.startswith(_OPTIONAL) for name in index):
        required = everything
    problems = _Problems(op, f"the {len(required)} tensors of this config in {folder}")
    declared: dict[str, list[str]] = {}
    entries: dict[tuple[str, str], _Entry] = {}
    sizes: dict[str, int] = {}
    for file in sorted(set(index.values())):
        try:
            header, sizes[file] = _read_header(folder / file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            first = next(name for name in index if index[name] == file)
            reason = "no such file" if isinstance(error, FileNotFoundError) else error
            problems.add("unreadable", f"{file} (of {first} and others: {reason})")
            continue
        for name, entry in header.items():
            declared.setdefault(name, []).append(file)
            entries[name, file] = entry
    for name, files in declared.items():
        for file in files:
            if index.get(name) != file:
                says = f"the index says {index[name]}" if name in index else "the index does not name it"
                problems.add("in the wrong place", f"{name} (in {file}; {says})")
    for name in required:
        if name not in index:
            problems.add("missing", name)
    for name, file in index.items():
        if name not in everything:
            problems.add("extra", f"{name} (in {file})")
        elif file in sizes and name not in declared:
            problems.add("missing", f"{name} (the index says {file})")
        elif (name, file) in entries:
            _check_entry(problems, name, file, entries[name, file], everything[name], sizes[file])
    problems.refuse()
    _check_config(op, folder, cfg)
    return Checkpoint(folder, {name: (file, entries[name, file]) for name, file in index.items()})


def _check_entry(
    problems: _Problems, name: str, file: str, entry: _Entry, want: TensorSpec, size: int
) -> None:
    good = entry.shape == want.shape and _SPELLING.get(entry.dtype) == want.dtype
    if entry.shape != want.shape:
        problems.add("mis-shaped", f"{name} ({list(entry.shape)} for {list(want.shape)}, in {file})")
    if _SPELLING.get(entry.dtype) != want.dtype:
        wanted = next(spelling for spelling, dtype in _SPELLING.items() if dtype == want.dtype)
        problems.add("mis-typed", f"{name} ({entry.dtype} for {wanted}, in {file})")
    if entry.end > size:
        problems.add("truncated", f"{name} (ends at byte {entry.end} of {file}, which has {size})")
    due, held = math.prod(want.shape) * want.dtype.itemsize, entry.end - entry.begin
    if good and held != due:
        problems.add("mis-sized", f"{name} ({held} bytes for {due}, in {file})")


class LoadableModel(Protocol):
    """What `load` needs of a model."""

    cfg: V41FlashConfig

    # A model that is one rank of several also has ``elsewhere() -> set[str]``: names that others load.

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters by checkpoint name, as views of the checkpoint's shape and dtype (int8 may be uint8)."""
        ...

    def attach_engram(self, layer: int, store: EngramStore) -> None:
        """Take the table of an Engram layer."""
        ...


@dataclass(frozen=True)
class LoadReport:
    """What `load` did.

    loaded: names copied into the model. size: their bytes. engram: layers whose tables stay on disk.
    skipped: names in the folder that the model has no place for (drafter, vision).
    elsewhere: how many tensors other ranks load.
    """

    loaded: tuple[str, ...]
    size: int
    engram: tuple[int, ...]
    skipped: tuple[str, ...]
    elsewhere: int = 0

    def __str__(self) -> str:
        groups = Counter(next(g for g in _SKIPPABLE if name.startswith(g)) for name in self.skipped)
        skipped = ", ".join(f"{count} of {group}*" for group, count in groups.items()) or "nothing"
        tables = f"; tables of layers {self.engram} stay on disk" if self.engram else ""
        others = f"; {self.elsewhere} are other ranks'" if self.elsewhere else ""
        loaded = f"loaded {len(self.loaded)} tensors, {self.size / 1e6:.1f} MB{others}{tables}"
        return f"{loaded}; skipped {skipped}"


def load(model: LoadableModel, folder: str | Path, *, progress: bool = True) -> LoadReport:
    """Fill a model from a checkpoint folder. Everything is checked before the first value is copied.

    Bytes are copied as they are, never converted. Engram tables that the model does not hold are attached as
    `dsv41.layers.engram.MappedEngramStore`. Drafter and vision tensors are skipped where the model has none.

    Args:
        model: offers its parameters by checkpoint name; its ``cfg`` says what the folder must hold.
        folder: holds ``model.safetensors.index.json`` and the shards that it names.
        progress: show a bar and print the report's line, to standard error.

    Returns:
        LoadReport.

    Errors: as `open_checkpoint`; also one ValueError for every tensor that the model lacks, or offers in
        another shape or dtype or without memory, and for every scale that holds byte 255. Table scales are
        checked when rows are read. The model is unchanged after an error.
    """
    checkpoint = _open("load", Path(folder), model.cfg)
    offered = model.checkpoint_tensors()
    others: set[str] = getattr(model, "elsewhere", set)()
    _check_offered(offered, checkpoint, model.cfg, others)
    files = sorted((checkpoint.locate(name), name) for name in offered)
    sources = {name: checkpoint[name] for _, name in files}
    problems = _Problems("load", f"scales without byte 255 in {folder}")
    for name, source in sources.items():
        if source.dtype == E8M0 and bool((source.view(torch.uint8) == 255).any()):
            problems.add("spoiled", f"{name} (in {checkpoint.locate(name)[0].name})")
    problems.refuse()
    stores = {
        layer: _open_table(checkpoint, layer)
        for layer in model.cfg.engram.layers
        if _table_names(layer)[0] not in offered
    }
    size = sum(source.nbytes for source in sources.values())
    with torch.no_grad(), tqdm(total=size, unit="B", unit_scale=True, disable=not progress) as bar:
        for name, source in sources.items():
            target = offered[name]
            if source.element_size() == 1:
                # As bytes: experts may be offered as uint8, and a copy into another 8-bit type converts.
                target, source = target.view(torch.uint8), source.view(torch.uint8)
            target.copy_(source)
            bar.update(target.nbytes)
    for layer, store in stores.items():
        model.attach_engram(layer, store)
    kept = {name for layer in stores for name in _table_names(layer)}
    skipped = tuple(name for name in checkpoint if name not in offered and name not in kept | others)
    report = LoadReport(tuple(sources), size, tuple(stores), skipped, len(others))
    if progress:
        tqdm.write(str(report), file=sys.stderr)
    return report


def _table_names(layer: int) -> tuple[str, str]:
    return f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"


def _open_table(checkpoint: Checkpoint, layer: int) -> MappedEngramStore:
    values, scale = _table_names(layer)
    rows, width = checkpoint.shape(values)
    places = checkpoint.locate(values), checkpoint.locate(scale)
    return MappedEngramStore(*places, num_rows=rows, head_dim=width)


def _check_offered(
    offered: dict[str, torch.Tensor], checkpoint: Checkpoint, cfg: V41FlashConfig, others: set[str]
) -> None:
    """Refuse a model that does not offer what the checkpoint is for, and ``others`` do not load either."""
    known = tensor_specs(cfg, True)
    problems = _Problems("load", "a model that offers the tensors of its config")
    tables = {name for layer in cfg.engram.layers for name in _table_names(layer)}
    begun = {group for group in _SKIPPABLE if any(name.startswith(group) for name in offered)}
    for name in checkpoint:
        group = next((g for g in _SKIPPABLE if name.startswith(g)), None)
        due = name not in tables | others if group is None else group in begun
        if name not in offered and due:
            problems.add("not offered", name)
    for layer in cfg.engram.layers:
        values, scale = _table_names(layer)
        if (values in offered) != (scale in offered):
            problems.add("not offered", scale if values in offered else values)
    for name, tensor in offered.items():
        want = known.get(name)
        if want is None or name not in checkpoint:
            problems.add("not in the checkpoint", name)
            continue
        dtypes = (want.dtype, torch.uint8) if want.dtype == torch.int8 else (want.dtype,)
        if tuple(tensor.shape) != want.shape or tensor.dtype not in dtypes or tensor.is_meta:
            place = " on meta" if tensor.is_meta else ""
            spelled = str(want.dtype).removeprefix("torch.")
            problems.add("mismatched", f"{name} ({describe(tensor)}{place} for {list(want.shape)} {spelled})")
    problems.refuse()
