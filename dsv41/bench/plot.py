"""The picture of `docs/h200.md`, an SVG made from the committed results: ``python -m dsv41.bench.tables``.

One line a measurement: how many times faster than the peer, and the share of what the device can do.
"""

import math
from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple

Row = dict[str, Any]
LINE, LABEL, PANEL, GAP, TOP = 15, 250, 250, 70, 60  # sizes in pixels
LOW, HIGH = 0.5, 8.0  # of the first panel, logarithmic
FAST, SLOW, SHARE, GREY, INK = "#2a7f86", "#d1793a", "#8a94a6", "#d8dbe0", "#222222"


class Line(NamedTuple):
    """A measurement: its name, times faster than the peer (None without one), share of the ceiling."""

    name: str
    speedup: float | None
    share: float


def _faster(row: Row, peer: str) -> float | None:
    return row[peer] / row["us"] if row.get(peer) else None


def groups(results: dict[str, list[Row]]) -> Iterator[tuple[str, list[Line]]]:
    """Heading and lines of each family."""
    yield (
        "Experts, exact, beside Humming bf16",
        [
            Line(f"{r['experts']} experts, {r['tokens']} tokens", _faster(r, "humming_bf16_us"), r["share"])
            for r in results["moe"]
            if r["numerics"] == "exact"
        ],
    )
    yield (
        "Sparse attention, beside FlashMLA",
        [Line(r["case"], _faster(r, "peer_us"), r["share"]) for r in results["attn"]],
    )
    yield (
        "Index scores and selection, beside DeepGEMM and torch.topk",
        [Line(r["case"], _faster(r, "peer_us"), r["share"]) for r in results["index"]],
    )
    yield (
        "Linears, beside torch's bf16 product",
        [
            Line(
                f"{r['shape']}, {r['tokens']} tokens, {r['numerics']}",
                _faster(r, "torch_bf16_us"),
                r["share"],
            )
            for r in results["linear"]
        ],
    )


def _x(ratio: float) -> float:
    """Of a ratio in the first panel."""
    at = math.log2(min(max(ratio, LOW), HIGH) / LOW) / math.log2(HIGH / LOW)
    return LABEL + PANEL * at


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="{width:.1f}" height="11" fill="{colour}"/>'


def svg(results: dict[str, list[Row]]) -> str:
    """The picture of rows by file name ("moe", "attn", "index", "linear")."""
    right, body, y = LABEL + PANEL + GAP, [], TOP
    for heading, lines in groups(results):
        y += LINE + 8
        body.append(_text(8, y, heading, weight="bold"))
        for name, speedup, share in lines:
            y += LINE
            body.append(_text(LABEL - 8, y, name, "end"))
            if speedup:
                low, high = sorted((_x(1), _x(speedup)))
                body.append(_bar(low, y, high - low, FAST if speedup >= 1 else SLOW))
                body.append(_text(max(high, _x(1)) + 4, y, f"{speedup:.2f}"))
            body.append(_bar(right, y, PANEL * min(share, 1), SHARE))
            body.append(_text(right + PANEL * min(share, 1) + 4, y, f"{100 * share:.0f} %"))
    bottom, width = y + LINE, right + PANEL + 50
    axes = [_text(LABEL, 20, "times faster than the peer", weight="bold")]
    axes.append(_text(right, 20, "share of the measured ceiling", weight="bold"))
    ticks = [(_x(t), f"{t:g}") for t in (0.5, 1, 2, 4, 8)]
    ticks += [(right + PANEL * p / 100, f"{p} %") for p in (0, 50, 100)]
    for x, label in ticks:
        colour = INK if label == "1" else GREY
        axes.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{colour}"/>')
        axes.append(_text(x, TOP - 6, label, "middle"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 10}"'
        f' viewBox="0 0 {width} {bottom + 10}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif"'
        f' font-size="11" fill="{INK}">'
    )
    back = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, back, *axes, *body, "</svg>"]) + "\n"
