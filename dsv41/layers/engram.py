"""Engram around its ops: classes of tokens, constants of the hash, where tables live, prefetching.

Rows depend on token ids only, so a step hashes first (`dsv41.ops.engram_hash`), looks rows up ahead of the
layers that use them (`EngramPrefetcher`), and gates them in (`dsv41.ops.engram_gate`).
"""

import contextvars
import hashlib
import itertools
import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .._op import check, check_tensor, check_values
from ..config import EngramConfig, V41FlashConfig
from ..formats import E4M3, E8M0
from ..ops.engram import engram_lookup
from ..ops.engram.api import check_rows

# Token classes.


@dataclass(frozen=True)
class TokenMap:
    """Class of every token id: ids that read the same up to case, accents and white space share one.

    Args:
        ids: [vocab] int32, classes from 0 to num_classes - 1, each used.
        num_classes: seeds the hash, so a map with another count belongs to other tables.
    """

    ids: torch.Tensor
    num_classes: int

    def __post_init__(self) -> None:
        check_tensor("TokenMap", "ids", self.ids, (None,), torch.int32)
        count = self.ids.unique().numel()
        whole = count == self.num_classes and count and self.ids.min() == 0 and self.ids.max() == count - 1
        check(
            bool(whole), "TokenMap", f"ids that use every class below {self.num_classes}", f"{count} classes"
        )

    @staticmethod
    def build(tokenizer_json: str | Path, *, num_classes: int = 99_092) -> "TokenMap":
        """Derive the classes from a tokenizer, with the ``tokenizers`` library that defined them.

        Args:
            tokenizer_json: a Hugging Face ``tokenizer.json``.
            num_classes: the count that the tables were made with.

        Returns:
            The map. Classes are numbered in the order in which ids first use them.

        Errors: ValueError when the count differs or ids 0, 1, 2 do not start the numbering: the hash would
            read other rows, without a sign of it.
        """
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(tokenizer_json))
        except Exception as error:
            raise ValueError(
                f"TokenMap.build: expected a tokenizer in {tokenizer_json}, got {error}"
            ) from error
        normalise = _normaliser().normalize_str
        count = tokenizer.get_vocab_size(with_added_tokens=True)
        texts = tokenizer.decode_batch([[i] for i in range(count)], skip_special_tokens=False)
        classes: dict[str, int] = {}
        ids = []
        for token, text in enumerate(texts):
            # A part of a UTF-8 character has no text of its own.
            key = str(tokenizer.id_to_token(token)) if "\ufffd" in text else normalise(text) or text
            ids.append(classes.setdefault(key, len(classes)))
        check(
            len(classes) == num_classes, "TokenMap.build", f"{num_classes} classes", f"{len(classes)} classes"
        )
        check(ids[:3] == [0, 1, 2], "TokenMap.build", "classes 0, 1, 2 for ids 0, 1, 2", ids[:3])
        return TokenMap(torch.tensor(ids, dtype=torch.int32), num_classes)

    @staticmethod
    def synthetic(vocab_size: int, num_classes: int, seed: int) -> "TokenMap":
        """A map for a config without a tokenizer: random, every class used, the same on every machine.

        Args:
            vocab_size: number of ids, at least num_classes.
            num_classes: number of classes.
            seed: of the draw.
        """
        fits = 0 < num_classes <= vocab_size
        check(fits, "TokenMap.synthetic", f"num_classes: 1..{vocab_size}", num_classes)
        stream = np.random.default_rng(seed)
        ids = stream.integers(0, num_classes, vocab_size, dtype=np.int32)
        ids[stream.permutation(vocab_size)[:num_classes]] = np.arange(num_classes, dtype=np.int32)
        return TokenMap(torch.from_numpy(ids), num_classes)

    @property
    def sha256(self) -> str:
        """Hash of the ids as little-endian int32."""
        return hashlib.sha256(self.ids.cpu().numpy().astype("<i4").tobytes()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with the ids, their count and their hash."""
        note = {"num_classes": str(self.num_classes), "sha256": self.sha256}
        save_file({"ids": self.ids.cpu().contiguous()}, path, metadata=note)

    @staticmethod
    def load(path: str | Path) -> "TokenMap":
        """Read what `save` wrote.

        Errors: ValueError for another file, or one whose ids do not have the hash that was saved with them.
        """
        wanted = f"a token map in {path}"
        try:
            with safe_open(path, "pt") as file:
                note, ids = file.metadata() or {}, file.get_tensor("ids").clone()
            made = TokenMap(ids, int(note["num_classes"]))
        except Exception as error:
            raise ValueError(f"TokenMap.load: expected {wanted}, got {error!r}") from error
        check(
            made.sha256 == note.get("sha256"), "TokenMap.load", f"{wanted} with its saved hash", made.sha256
        )
        return made

    def check_config(self, cfg: V41FlashConfig) -> None:
        """Refuse a map that does not belong to a config: another vocabulary, or another number of classes."""
        got = (self.ids.shape[0], self.num_classes)
        wanted = (cfg.vocab_size, cfg.engram.num_classes)
        check(got == wanted, "TokenMap", f"{wanted[0]} ids in {wanted[1]} classes, as the config", got)


def _normaliser() -> Any:
    """Reading of a token's text that ignores case, accents, compatibility forms and white space."""
    from tokenizers import Regex, normalizers

    # A token that is one space stays one: it is hidden while both ends are stripped.
    space = "\ue000"
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), space),
            normalizers.Strip(),
            normalizers.Replace(space, " "),
        ]
    )


# Constants of the hash.

# The released model's, as numbers: they do not depend on a random generator's stream at run time.
_RELEASED_CLASSES = 99_092
_RELEASED = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}


@dataclass(frozen=True)
class EngramSpec:
    """Constants of the n-gram hash, one row an Engram layer in the config's order.

    Args:
        layers: layer ids.
        multipliers: [num_layers, max_ngram] int64, odd; column k belongs to the id k positions back.
        primes: [num_layers, columns] int64, the modulus of a column; orders 2, 3, ... outer, heads inner.
        offsets: [num_layers, columns] int64, first table row of a column.
        head_dim: values a table row.
        pad_token: raw id that stands for a position that is not there.
    """

    layers: tuple[int, ...]
    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor
    head_dim: int
    pad_token: int

    @staticmethod
    def from_config(cfg: V41FlashConfig) -> "EngramSpec":
        """The constants of a config.

        Errors: ValueError when the primes of a layer do not sum to its declared number of table rows.
        """
        engram = cfg.engram
        primes = torch.tensor(_primes(engram.base, len(engram.layers) * engram.columns), dtype=torch.int64)
        primes = primes.view(len(engram.layers), engram.columns)
        sums = tuple(primes.sum(1).tolist())
        check(sums == engram.num_rows, "EngramSpec", f"engram.num_rows: {sums}", engram.num_rows)
        multipliers = [_multipliers(layer, engram) for layer in engram.layers]
        return EngramSpec(
            layers=engram.layers,
            multipliers=torch.tensor(multipliers, dtype=torch.int64).view(-1, engram.max_ngram),
            primes=primes,
            offsets=primes.cumsum(1) - primes,
            head_dim=engram.head_dim,
            pad_token=engram.pad_token,
        )

    def to(self, device: torch.device | str) -> "EngramSpec":
        """The same constants on a device."""
        tensors = ("multipliers", "primes", "offsets")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    @property
    def columns(self) -> int:
        """Table rows that a token reads."""
        return self.primes.shape[1]

    def shards(self, layer: int, group_size: int) -> list["Shard"]:
        """Split the table of a layer over a group, by whole columns: every rank owns one run of rows.

        Args:
            layer: layer id.
            group_size: number of ranks; no rank may be left without a column (for 24 columns: 1, 2, 3, 4, 5,
                6, 8, 12 or 24).
        """
        check(layer in self.layers, "EngramSpec.shards", f"layer: one of {self.layers}", layer)
        each = -(-self.columns // max(group_size, 1))
        full = 0 < group_size <= self.columns and each * (group_size - 1) < self.columns
        wanted = f"group_size: one that leaves no rank without one of {self.columns} columns"
        check(full, "EngramSpec.shards", wanted, group_size)
        index = self.layers.index(layer)
        bounds = [*self.offsets[index].tolist(), int(self.primes[index].sum())]
        cuts = [min(rank * each, self.columns) for rank in range(group_size + 1)]
        return [Shard(a, b, bounds[a], bounds[b]) for a, b in itertools.pairwise(cuts)]


@dataclass(frozen=True)
class Shard:
    """One rank's part of a table: columns ``first..stop-1``, which are the rows ``row_first..row_stop-1``."""

    first: int
    stop: int
    row_first: int
    row_stop: int

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's columns as its own table numbers them.

        Args:
            rows: [num_tokens, columns] int32 of the whole table.

        Returns:
            [num_tokens, stop - first] int32; what is not in the shard is -1.
        """
        mine = rows[:, self.first : self.stop]
        inside = (mine >= self.row_first) & (mine < self.row_stop)
        return torch.where(inside, mine - self.row_first, -1)


def _primes(start: int, count: int) -> list[int]:
    """The first primes not below ``start``."""
    found: list[int] = []
    candidate = max(start, 2)
    while len(found) < count:
        if all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            found.append(candidate)
        candidate += 1
    return found


def _multipliers(layer: int, engram: EngramConfig) -> tuple[int, ...]:
    if engram.num_classes == _RELEASED_CLASSES and engram.max_ngram == 4 and layer in _RELEASED:
        return _RELEASED[layer]
    return drawn_multipliers(layer, engram.num_classes, engram.max_ngram)


def drawn_multipliers(layer: int, num_classes: int, orders: int) -> tuple[int, ...]:
    """Odd multipliers of a layer, small enough that a product with any class stays below 2^63.

    Drawn from NumPy's PCG64, seeded by the layer id.
    """
    bound = max(1, (2**63 - 1) // num_classes // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=orders, dtype=np.int64)
    return tuple(2 * int(r) + 1 for r in drawn)


# Token history. The ring and the position decide what is there: 0 in a fresh buffer is a real id.


def lookback_ids(ring: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
    """The ids before a chunk, from the ring that holds the id of position p in slot ``p % slots``.

    Args:
        ring: [num_requests, slots] int32, slots at least ``count`` and the deepest rollback together.
        starts: [num_requests] int32 or int64, position of each request's first row.
        count: ids wanted, ``max_ngram - 1``.

    Returns:
        [num_requests, count] of the ring's dtype, oldest first; -1 before position 0.
    """
    check_tensor("lookback_ids", "ring", ring, (None, None), torch.int32, torch.int64)
    check(ring.shape[1] >= count, "lookback_ids", f"ring: {count} slots or more", ring)
    check_tensor("lookback_ids", "starts", starts, (ring.shape[0],), torch.int32, torch.int64, like=ring)
    wanted = starts.long()[:, None] + torch.arange(-count, 0, device=ring.device)
    return torch.where(wanted >= 0, ring.gather(1, wanted.clamp(min=0) % ring.shape[1]), -1)


def dead_tokens(tokens: torch.Tensor, image_token: int) -> torch.Tensor:
    """[num_tokens] bool: rows with a closed gate, which also cut n-grams. One id, not the router's range."""
    return tokens == image_token


def append_ids(
    ring: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    """Write a chunk's ids into the ring, in place; of a request longer than the ring its last ones stay.

    Args:
        ring: [num_requests, slots] int32.
        tokens: [num_tokens] int32 or int64.
        positions: [num_tokens] int32 or int64.
        cu_seqlens: [num_requests + 1] int32; rows past the last are padding.
    """
    name, integers = "append_ids", (torch.int32, torch.int64)
    check_tensor(name, "ring", ring, (None, None), torch.int32)
    check_tensor(name, "tokens", tokens, (None,), *integers, like=ring)
    check_tensor(name, "positions", positions, tuple(tokens.shape), *integers, like=ring)
    check_tensor(name, "cu_seqlens", cu_seqlens, (ring.shape[0] + 1,), torch.int32, like=ring)
    if not tokens.shape[0] or not ring.shape[0]:
        return
    slots = ring.shape[1]
    rows = torch.arange(tokens.shape[0], device=ring.device)
    cu = cu_seqlens.long()
    request = torch.searchsorted(cu[1:].contiguous(), rows, right=True)
    # Rows that a later row of the same request overwrites, and padding, go to a slot that is cut off again.
    kept = (rows < cu[-1]) & (cu[(request + 1).clamp(max=ring.shape[0])] - rows <= slots)
    wider = torch.cat([ring.flatten(), ring.new_zeros(1)])
    target = torch.where(kept, request * slots + positions.long() % slots, ring.numel())
    wider[target] = tokens.to(ring.dtype)
    ring.copy_(wider[:-1].view_as(ring))


# Stores.


class EngramStore(ABC):
    """One layer's table, wherever it lives: rows of E4M3 values with an E8M0 scale every 32."""

    num_rows: int
    head_dim: int

    @abstractmethod
    def lookup(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read rows, as `dsv41.ops.engram_lookup`.

        Args:
            rows: [num_tokens, columns] int32; a negative row reads as zeros.
            out: [num_tokens, columns * head_dim] bf16 to write into.

        Returns:
            [num_tokens, columns * head_dim] bf16 on the device of ``rows``; ``out`` itself when it was given.

        Errors: ValueError for a row past the table or a scale byte 255 in a row that is read. Tables are
            never scanned, so the second is found when it matters. On an accelerator under DSV41_CHECK=1 only.
        """


class MemoryEngramStore(EngramStore):
    """A table in the memory of a device, or in pinned host memory that a GPU reads where it is.

    Args:
        values: [num_rows, head_dim] float8_e4m3fn.
        scale: [num_rows, head_dim/32] float8_e8m0fnu, pinned if ``values`` are.
    """

    def __init__(self, values: torch.Tensor, scale: torch.Tensor):
        check_tensor("MemoryEngramStore", "values", values, (None, None), E4M3, contiguous=True)
        self.num_rows, self.head_dim = values.shape
        groups = (self.num_rows, self.head_dim // 32)
        check_tensor("MemoryEngramStore", "scale", scale, groups, E8M0, like=values, contiguous=True)
        self.values, self.scale = values, scale

    def lookup(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        mapped = rows.device.type == "cuda" and self.values.device.type == "cpu" and self.values.is_pinned()
        place = None if mapped else self.values
        check_tensor("EngramStore.lookup", "rows", rows, (None, None), torch.int32, like=place)
        if rows.device.type == "cpu" or check_values():
            check_rows("EngramStore.lookup", rows, self.scale.view(torch.uint8))
        return engram_lookup(rows, self.values, self.scale, out=out)


class MappedEngramStore(EngramStore):
    """A table in mapped files: the rows that are read are gathered on the host, then dequantised.

    The values of 98 GB stay where they are; what moves to a device is 264 bytes a row.

    Args:
        values: file and the byte where the E4M3 values start.
        scale: file and the byte where the scale bytes start.
        num_rows: rows of the table.
        head_dim: values a row, a multiple of 32.
    """

    def __init__(self, values: tuple[Path, int], scale: tuple[Path, int], *, num_rows: int, head_dim: int):
        self.num_rows, self.head_dim = num_rows, head_dim
        check(head_dim % 32 == 0, "MappedEngramStore", "head_dim: a multiple of 32", head_dim)
        self._values = _map_bytes(*values, num_rows, head_dim)
        self._scale = _map_bytes(*scale, num_rows, head_dim // 32)

    def lookup(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        name = "EngramStore.lookup"
        check_tensor(name, "rows", rows, (None, None), torch.int32)
        host = rows.cpu().numpy()
        wanted = host[host >= 0].astype(np.int64)
        past = wanted[wanted >= self.num_rows]
        check(not past.size, name, f"rows: below {self.num_rows}", past[:1].tolist())
        compact = np.full(host.shape, -1, dtype=np.int32)
        compact[host >= 0] = np.arange(wanted.size, dtype=np.int32)
        codes = self._scale[wanted]
        bad = wanted[(codes == 255).any(-1)]
        check(not bad.size, name, "scale: no byte 255 in the rows that are read", f"row {bad[:1].tolist()}")
        values = torch.from_numpy(self._values[wanted]).view(E4M3)
        scale = torch.from_numpy(codes).view(E8M0)
        moved = (t.to(rows.device) for t in (torch.from_numpy(compact), values, scale))
        return engram_lookup(*moved, out=out)


def _map_bytes(path: Path, begin: int, num_rows: int, width: int) -> np.ndarray:
    """[num_rows, width] uint8 of a file, read only, without read-ahead: rows lie far apart."""
    size, needed = path.stat().st_size, begin + num_rows * width
    check(size >= needed, "MappedEngramStore", f"{needed} bytes or more in {path}", size)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    flat = np.frombuffer(mapped, dtype=np.uint8, count=num_rows * width, offset=begin)
    return flat.reshape(num_rows, width)


class Prefetcher(Protocol):
    """Reads the rows of a step ahead of the layers that use them; see `V41Flash.attach_prefetcher`."""

    def submit(self, rows: torch.Tensor) -> None:
        """Start reading rows [num_tokens, num_layers, columns] int32 of `dsv41.ops.engram_hash`."""
        ...

    def wait(self, layer: int) -> torch.Tensor:
        """Values of a layer's rows [num_tokens, columns * head_dim] bf16, for the last `submit`."""
        ...


class StreamPrefetcher:
    """Looks rows up on a stream of its own, in layer order, while the layers before run. Graphs capture it.

    Args:
        stores: the table of each Engram layer, in the order of the hash's layers; in the device's memory or
            in pinned host memory.
        stream: where to read; other work on it waits, as this does for that.
    """

    def __init__(self, stores: Mapping[int, EngramStore], stream: torch.cuda.Stream):
        self.stores, self.stream = dict(stores), stream
        self._ready: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def submit(self, rows: torch.Tensor) -> None:
        """Start reading the rows [num_tokens, num_layers, columns] int32 of a step."""
        name, layers = "StreamPrefetcher.submit", len(self.stores)
        check_tensor(name, "rows", rows, (None, layers, None), torch.int32)
        self.stream.wait_stream(torch.cuda.current_stream(rows.device))
        for index, (layer, store) in enumerate(self.stores.items()):
            # Memory of the caller's stream: it is given back there, behind the wait.
            shape = (rows.shape[0], rows.shape[2] * store.head_dim)
            values = torch.empty(shape, dtype=torch.bfloat16, device=rows.device)
            with torch.cuda.stream(self.stream):
                store.lookup(rows[:, index], values)
                ready = torch.cuda.Event()
                ready.record()
            self._ready[layer] = values, ready

    def wait(self, layer: int) -> torch.Tensor:
        """Values of a layer's rows [num_tokens, columns * head_dim] bf16; later work waits for them."""
        if layer not in self._ready:
            raise RuntimeError(f"StreamPrefetcher.wait: nothing was submitted for layer {layer}")
        values, ready = self._ready.pop(layer)
        torch.cuda.current_stream(values.device).wait_event(ready)
        return values


class EngramPrefetcher:
    """Looks rows up in a worker thread, in layer order, while the layers before run.

    The buffers are made once and stay at their addresses, in host memory. What `wait` returns is valid until
    the next `submit`. One thread submits and waits.

    Args:
        stores: the table of each Engram layer, in the order of the hash's layers.
        max_tokens: largest step.
        columns: rows a token and layer.
    """

    def __init__(self, stores: Mapping[int, EngramStore], max_tokens: int, columns: int):
        self.stores, self.max_tokens, self.columns = dict(stores), max_tokens, columns
        self._rows = torch.empty((max_tokens, len(stores), columns), dtype=torch.int32)
        self.staging = {
            layer: torch.empty((max_tokens, columns * s.head_dim), dtype=torch.bfloat16)
            for layer, s in self.stores.items()
        }
        self._pending: dict[int, Future[torch.Tensor]] = {}
        # One worker: a layer's read is not slowed down by the next one's.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="engram")

    def submit(self, rows: torch.Tensor) -> None:
        """Start reading the rows of a step.

        Args:
            rows: [num_tokens, num_layers, columns] int32 of `dsv41.ops.engram_hash`, on the CPU; copied, so
                the caller may reuse it at once.
        """
        name = "EngramPrefetcher.submit"
        check_tensor(name, "rows", rows, (None, len(self.stores), self.columns), torch.int32, like=self._rows)
        count = rows.shape[0]
        check(count <= self.max_tokens, name, f"at most {self.max_tokens} tokens", count)
        # A step that was never waited for still owns the buffers until its reads end.
        for future in self._pending.values():
            future.exception()
        own = self._rows[:count]
        own.copy_(rows)
        self._pending = {}
        for index, (layer, store) in enumerate(self.stores.items()):
            context = contextvars.copy_context()
            buffer = self.staging[layer][:count]
            self._pending[layer] = self._worker.submit(context.run, store.lookup, own[:, index], buffer)

    def wait(self, layer: int) -> torch.Tensor:
        """The rows of a layer for the last `submit`, once they are there.

        Args:
            layer: layer id.

        Returns:
            [num_tokens, columns * head_dim] bf16, a view of the layer's buffer.

        Errors: RuntimeError when nothing was submitted; what the lookup raised.
        """
        if layer not in self._pending:
            raise RuntimeError(f"EngramPrefetcher.wait: nothing was submitted for layer {layer}")
        return self._pending[layer].result()

    def close(self) -> None:
        """Let the worker finish and end it."""
        self._worker.shutdown()

    def __enter__(self) -> "EngramPrefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
