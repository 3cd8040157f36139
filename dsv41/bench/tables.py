"""The tables and the picture of `docs/h200.md` and the README, made from the committed results:
``python -m dsv41.bench.tables``.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import plot

ROOT = Path(__file__).parents[2] / "docs"
Row = dict[str, Any]
Column = tuple[str, Callable[[Row], Any]]


def read(name: str) -> list[Row]:
    """Rows of ``docs/results/<name>.jsonl``."""
    return [json.loads(line) for line in (ROOT / "results" / f"{name}.jsonl").read_text("utf-8").splitlines()]


def table(rows: Iterable[Row], columns: list[Column]) -> str:
    """Markdown of rows; floats with three figures, None as a dash."""

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        return str(value)

    lines = [
        "| " + " | ".join(name for name, _ in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += ["| " + " | ".join(cell(pick(row)) for _, pick in columns) + " |" for row in rows]
    return "\n".join(lines)


def _ratio(peer: str) -> Callable[[Row], Any]:
    return lambda r: r["us"] / r[peer] if r.get(peer) else None


def _get(name: str) -> Callable[[Row], Any]:
    return lambda r: r.get(name)


# What was wanted of a case: its time over a peer's, or a linear's times as fast as bf16.
_TOKEN, _BY_128 = "FP8 a token", "FP8 each 128"
WANTED: dict[str, dict[tuple[Any, ...], str]] = {
    "moe": {
        (48, 16, "exact"): f"1 of {_TOKEN}", (48, 64, "exact"): f"1 of {_TOKEN}",
        (48, 256, "exact"): "0.75 of bf16", (48, 1024, "exact"): "0.95 of bf16",
        (48, 4096, "exact"): "0.95 of bf16", (48, 1024, "fp8"): f"0.8 of {_BY_128}, 1 of {_TOKEN}",
        (48, 4096, "fp8"): f"0.8 of {_BY_128}, 1 of {_TOKEN}", (384, 64, "exact"): f"1.05 of {_TOKEN}",
        (384, 256, "exact"): f"1.05 of {_TOKEN}", (384, 4096, "exact"): "0.95 of bf16",
        (384, 4096, "fp8"): f"0.85 of {_BY_128}",
    },
    "linear": {
        (shape, *case): wanted
        for shape in ("wq_b", "wo_b")
        for case, wanted in (((64, "exact"), "1.5"), ((4096, "exact"), "1"), ((4096, "fp8"), "1.5"))
    },
    "index": {
        ("scores b=64 keys=65536",): "0.7", ("topk 512 of 64 x 65536",): "0.2",
        ("index_topk b=64 keys=65536",): "0.6", ("index_topk b=64 keys=1048576",): "0.6",
    },
    "rows": {
        ("mhc_boundary", 4096): "0.55", ("mhc_boundary", 64): "0.5", ("engram_gate", 4096): "0.85",
        ("topk_route", 4096): "0.7", ("split_budget_ragged", 256): "10 us",
        ("engram_lookup host", 8192): "0.6 of a copy",
    },
}  # fmt: skip


def _wanted(name: str, *keys: str) -> Callable[[Row], Any]:
    """Of a row by these fields; a layer with experts that do not fold is none of the cases."""
    return lambda r: None if r.get("unfolded") else WANTED[name].get(tuple(r[k] for k in keys))


def tables() -> dict[str, str]:
    """Name of a marker in the document to its table."""
    moe: list[Column] = [
        ("experts", _get("experts")),
        ("tokens", _get("tokens")),
        ("numerics", lambda r: r["numerics"] + (f", {r['unfolded']} unfolded" if r.get("unfolded") else "")),
        ("us", _get("us")),
        ("TB/s of weights", _get("TBps")),
        ("TFLOP/s", _get("TFLOPs")),
        ("share of the ceiling", _get("share")),
        ("distance", _get("distance")),
        ("Humming bf16, us", _get("humming_bf16_us")),
        ("ratio", _ratio("humming_bf16_us")),
        ("Humming FP8 a token, us", _get("humming_fp8_token_us")),
        ("ratio", _ratio("humming_fp8_token_us")),
        ("Humming FP8 each 128, us", _get("humming_fp8_128_us")),
        ("ratio", _ratio("humming_fp8_128_us")),
        ("wanted", _wanted("moe", "experts", "tokens", "numerics")),
    ]
    attn: list[Column] = [
        ("case", _get("case")),
        ("us", _get("us")),
        ("TFLOP/s", _get("tflops")),
        ("share of the ceiling", _get("share")),
        ("distance", _get("distance")),
        ("FlashMLA, us", _get("peer_us")),
        ("ratio", _get("ratio")),
        ("wanted", _get("wanted")),
    ]
    index: list[Column] = [
        ("case", _get("case")),
        ("us", _get("us")),
        ("TB/s", _get("TBps")),
        ("share of the ceiling", _get("share")),
        ("scratch, bytes", _get("scratch")),
        ("peer, us", _get("peer_us")),
        ("ratio", _get("ratio")),
        ("wanted", _wanted("index", "case")),
    ]
    linear: list[Column] = [
        ("layer", _get("shape")),
        ("out x in", lambda r: f"{r['features']} x {r['k']}"),
        ("tokens", _get("tokens")),
        ("numerics", _get("numerics")),
        ("us", _get("us")),
        ("TFLOP/s", _get("TFLOPs")),
        ("share of the ceiling", _get("share")),
        ("distance", _get("distance")),
        ("torch bf16, us", _get("torch_bf16_us")),
        ("times faster", _get("speedup")),
        ("wanted", _wanted("linear", "shape", "tokens", "numerics")),
        ("DeepGEMM, us", _get("deepgemm_us")),
    ]
    quant: list[Column] = [
        ("op", _get("op")),
        ("width", _get("width")),
        ("tokens", _get("tokens")),
        ("us", _get("us")),
        ("TB/s", _get("TBps")),
        ("share of a copy's", _get("share")),
        ("distance", _get("distance")),
    ]
    rows: list[Column] = [
        ("op", lambda r: " ".join(filter(None, (r["op"], r.get("rows"))))),
        ("tokens", _get("tokens")),
        ("us", _get("us")),
        ("TB/s", _get("TBps")),
        ("distance", _get("distance")),
        ("peer", _get("peer")),
        ("us", _get("peer_us")),
        ("ratio", _get("ratio")),
        ("rate beside a copy's", _get("share")),
        ("wanted", _wanted("rows", "op", "tokens")),
    ]
    cache: list[Column] = [
        ("writer", _get("case")),
        ("us", _get("us")),
        ("TB/s", _get("TBps")),
        ("share of a copy's", _get("share")),
    ]
    columns = {"moe": moe, "attn": attn, "index": index, "linear": linear, "quant": quant}
    columns |= {"rows": rows, "cache": cache}
    return {"speed": speed(), **{name: table(read(name), c) for name, c in columns.items()}}


# The README's rows: what, which file, the row's fields, the peer and the field of its time.
_HUMMING, _BF16 = ("Humming, bf16 activations", "humming_bf16_us"), ("torch, bf16", "torch_bf16_us")
_SHOWN: tuple[tuple[str, str, Row, tuple[str, str]], ...] = (
    ("experts, 64 tokens, 48 of them", "moe", {"experts": 48, "tokens": 64}, _HUMMING),
    ("experts, 64 tokens, all 384", "moe", {"experts": 384, "tokens": 64}, _HUMMING),
    ("experts, 4096 tokens, 48 of them", "moe", {"experts": 48, "tokens": 4096}, _HUMMING),
    ("attention, 64 requests decode", "attn", {"case": "decode b=64 q=1"}, ("FlashMLA", "peer_us")),
    ("attention, 64 requests, 5 drafts", "attn", {"case": "decode b=64 q=6"}, ("FlashMLA", "peer_us")),
    ("attention, 4096 prefill", "attn", {"case": "prefill 4096 x 640"}, ("FlashMLA, bf16 rows", "peer_us")),
    ("index scores and top-512, 64 x 65,536 keys", "index", {"case": "index_topk b=64 keys=65536"},
     ("DeepGEMM + torch.topk", "peer_us")),
    ("mHC boundary, 4096 tokens", "rows", {"op": "mhc_boundary", "tokens": 4096},
     ("DeepGEMM + TileKernels", "peer_us")),
    ("Engram gate, 4096", "rows", {"op": "engram_gate", "tokens": 4096}, ("TileKernels", "peer_us")),
    ("router, 4096", "rows", {"op": "topk_route", "tokens": 4096}, ("TileKernels", "peer_us")),
    ("query projection, 64 tokens", "linear", {"shape": "wq_b", "tokens": 64, "numerics": "exact"}, _BF16),
    ("query projection, 4096", "linear", {"shape": "wq_b", "tokens": 4096, "numerics": "exact"}, _BF16),
    ("the same, folded scales", "linear", {"shape": "wq_b", "tokens": 4096, "numerics": "fp8"}, _BF16),
)  # fmt: skip


def speed() -> str:
    """A short table over all results; above 1 is faster than the peer. What was not measured has no row."""
    found = []
    for label, name, fields, (peer, key) in _SHOWN:
        same = [r for r in read(name) if all(r.get(k, v) == v for k, v in fields.items()) and r.get(key)]
        exact = [r for r in same if r.get("numerics", "exact") == fields.get("numerics", "exact")]
        found += [{"op": label, "us": r["us"], "peer": peer, "peer_us": r[key]} for r in exact[:1]]
    columns: list[Column] = [
        ("on one H200, parity checked first", _get("op")),
        ("us", _get("us")),
        ("peer", _get("peer")),
        ("us", _get("peer_us")),
        ("times as fast", lambda r: f"{r['peer_us'] / r['us']:.2f}"),
    ]
    return table(found, columns)


def refresh(text: str) -> str:
    """A document with every table between its markers made anew."""
    for name, made in tables().items():
        begin, end = f"<!-- {name}: generated by python -m dsv41.bench.tables -->", f"<!-- /{name} -->"
        if begin not in text:
            continue
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{made}\n{end}{rest.split(end, 1)[1]}"
    return text


def picture() -> str:
    """``docs/img/h200.svg``."""
    return plot.svg({name: read(name) for name in ("moe", "attn", "index", "linear")})


if __name__ == "__main__":
    for document in (ROOT / "h200.md", ROOT.parent / "README.md"):
        document.write_text(refresh(document.read_text("utf-8")), "utf-8")
    (ROOT / "img" / "h200.svg").write_text(picture(), "utf-8")
