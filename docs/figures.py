"""The drawings of the documentation: ``python docs/figures.py`` writes ``docs/img/*.svg``.

Sizes, layers and widths come from the library, so a drawing cannot say something else than the code.
"""

from html import escape
from pathlib import Path

from dsv41 import V41FlashConfig
from dsv41.cache import Record

HERE = Path(__file__).parent / "img"
BLUE, GREEN, ORANGE, VIOLET, GREY, RED = "#cfe3fa", "#d4efd9", "#fde2c4", "#e6dbf7", "#e9ecef", "#f9d6d5"


class Drawing:
    """An SVG with a white ground: readable on light and on dark pages."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
            f' font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            ' orient="auto"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, *lines: str, fill: str = GREY) -> None:
        """A rectangle with centred lines of text; the first is bold when there are more."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="#666"/>'
        )
        first = y + h / 2 + 4.5 - 8 * (len(lines) - 1)
        for i, line in enumerate(lines):
            bold = i == 0 and len(lines) > 1
            self.text(x + w / 2, first + 16 * i, line, anchor="middle", bold=bold, size=13 if i == 0 else 12)

    def text(
        self, x: float, y: float, line: str, *, anchor: str = "start", bold: bool = False, size: int = 13
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="#222"{weight}>'
            f"{escape(line)}</text>"
        )

    def line(self, *points: tuple[float, float], tip: bool = True, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="#444" stroke-width="1.4"{end}{dash}/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def model() -> Drawing:
    """The forty layers, what each reads, and one layer from the inside."""
    cfg = V41FlashConfig.flash()
    d = Drawing(1000, 716, "Data flow of DeepSeek-V4.1-Flash")
    d.box(30, 40, 110, 44, "token ids", f"{cfg.vocab_size:,}")
    d.box(180, 40, 130, 44, "embedding", f"{cfg.hidden} wide", fill=BLUE)
    d.box(350, 40, 150, 44, f"{cfg.num_streams} equal streams", "of hyper-connections", fill=BLUE)
    d.box(560, 40, 130, 44, f"{cfg.num_layers} layers", "below")
    d.box(740, 40, 110, 44, "norm, head", fill=BLUE)
    d.box(890, 40, 80, 44, "logits")
    for a, b in ((140, 180), (310, 350), (500, 560), (690, 740), (850, 890)):
        d.line((a, 62), (b, 62))
    x0, cell, top = 40.0, 23.0, 165.0
    fills = {0: GREY, 2: GREEN, 1: ORANGE}
    half = x0 + cell * cfg.first_decoder_layer
    d.text(x0, 120, "encoder layers: all rows of a prefill run", bold=True)
    d.text(half + 6, 120, "decoder layers: bounded replay runs the last 140 rows", bold=True)
    d.line((half, 106), (half, 250), tip=False, dashed=True)
    for i in range(cfg.num_layers):
        x = x0 + cell * i
        d.box(x, top, cell, 34, str(i), fill=fills[cfg.compress_ratios[i]])
        for ids, mark in ((cfg.engram.layers, "E"), (cfg.draft.target_layers, "D")):
            if i in ids:
                d.text(x + cell / 2, top - 8, mark, anchor="middle", bold=True)
        if i in cfg.kv_sources:
            end = next((s for s in cfg.kv_sources if s > i), cfg.num_layers)
            width = cell * (end - i) - 4
            ratio = cfg.compress_ratios[i]
            label = "one entry a token" if ratio == 1 else "one entry 2 tokens"
            d.box(x + 2, top + 60, width, 26, label, fill=fills[ratio])
            d.line((x + cell / 2, top + 34), (x + cell / 2, top + 60))
        if i in cfg.index_sources:
            d.text(x + cell / 2 + 9, top + 50, "K", anchor="middle", bold=True)
    d.text(
        x0,
        top + 106,
        "Each layer keeps a ring of its last 128 tokens (grey: nothing else). Below: the four",
        size=12,
    )
    d.text(
        x0,
        top + 122,
        "compressed caches, and the layers that read each. K: chooses the 512 entries for itself",
        size=12,
    )
    d.text(x0, top + 138, "and the layers behind it. E: Engram. D: streams that the drafter reads.", size=12)
    y = 346.0
    d.text(40, y, "One layer (Engram adds to the streams before it, in layers 1 and 14)", bold=True, size=14)
    y += 30
    d.box(40, y, 120, 60, "4 streams", "bf16", fill=BLUE)
    d.line((100, y), (100, y - 12), (770, y - 12), (770, y), dashed=True)
    d.box(200, y, 130, 60, "collapse, norm", "pre-mix from the", "sub-layer before", fill=BLUE)
    d.box(
        370, y, 300, 60, "attention, 64 heads of 512", "one softmax: window + 512 entries + sink", fill=VIOLET
    )
    d.box(710, y, 120, 60, "expand", "into the streams", fill=BLUE)
    d.box(870, y, 100, 60, "4 streams", fill=BLUE)
    for a, b in ((160, 200), (330, 370), (670, 710), (830, 870)):
        d.line((a, y + 30), (b, y + 30))
    caches = (
        (370, "window", f"{Record('mxfp8', 512).bytes} B a token", GREY),
        (475, "entries", f"{Record('nvfp4', 512).bytes} B each", GREEN),
        (580, "index keys", f"{Record('mxfp4', 128).bytes} B each", ORANGE),
    )
    for x, name, size, fill in caches:
        d.box(x, y + 80, 90, 40, name, size, fill=fill)
        d.line((x + 45, y + 80), (x + 45, y + 60))
    d.text(40, y + 96, "caches, in the caller's pages;", size=12)
    d.text(40, y + 112, "entries and keys: 890 bytes a token", size=12)
    y += 168
    d.box(40, y, 120, 60, "4 streams", "bf16", fill=BLUE)
    d.line((100, y + 60), (100, y + 84), (770, y + 84), (770, y + 60), dashed=True)
    d.box(200, y, 130, 60, "collapse, norm", fill=BLUE)
    d.box(370, y, 90, 60, "router", f"{cfg.top_k} of {cfg.num_experts}", fill=RED)
    d.box(500, y - 12, 170, 38, "experts, MXFP4", fill=RED)
    d.box(500, y + 34, 170, 38, "shared expert, MXFP8", fill=RED)
    d.box(710, y, 120, 60, "expand", "into the streams", fill=BLUE)
    d.box(870, y, 100, 60, "next layer")
    for points in (
        ((160, y + 30), (200, y + 30)),
        ((330, y + 30), (370, y + 30)),
        ((460, y + 30), (480, y + 30), (480, y + 7), (500, y + 7)),
        ((350, y + 30), (350, y + 72), (480, y + 72), (480, y + 53), (500, y + 53)),
        ((670, y + 7), (690, y + 7), (690, y + 30), (710, y + 30)),
        ((670, y + 53), (690, y + 53), (690, y + 30), (710, y + 30)),
        ((830, y + 30), (870, y + 30)),
    ):
        d.line(*points)
    d.line((920, y - 108), (920, y - 34), (60, y - 34), (60, y))
    y += 108
    d.box(40, y, 190, 40, "streams of layers 37, 38, 39", fill=BLUE)
    d.box(270, y, 190, 40, f"drafter, {cfg.draft.num_stages} stages", fill=VIOLET)
    d.box(500, y, 190, 40, f"{cfg.draft.block_size} drafts + confidence", fill=ORANGE)
    d.box(730, y, 240, 40, "budget, then one verified step", fill=GREEN)
    for a, b in ((230, 270), (460, 500), (690, 730)):
        d.line((a, y + 20), (b, y + 20))
    return d


def records() -> Drawing:
    """The bytes of the cache records and weight blocks."""
    rows = (
        ("window row, MXFP8", Record("mxfp8", 512),
         ((512, "512 E4M3 values", BLUE), (16, "16 E8M0", ORANGE))),
        ("compressed entry, NVFP4", Record("nvfp4", 512),
         ((256, "512 E2M1, two a byte", GREEN), (32, "32 E4M3", ORANGE))),
        ("index key, MXFP4", Record("mxfp4", 128), ((64, "128 E2M1", GREEN), (4, "4 E8M0", ORANGE))),
        ("V4 record", Record("v4", 512),
         ((448, "448 E4M3", BLUE), (128, "64 bf16 (rotated)", VIOLET), (8, "7 E8M0, 0", ORANGE))),
        ("FP8 index key", Record("fp8", 128), ((128, "128 E4M3", BLUE), (4, "f32", ORANGE))),
    )  # fmt: skip
    d = Drawing(1000, 70 * len(rows) + 150, "Bytes of the records")
    scale = 1.2
    for k, (name, record, parts) in enumerate(rows):
        y = 20 + 70 * k
        assert sum(size for size, _, _ in parts) == record.bytes
        d.text(20, y + 18, name, bold=True)
        d.text(20, y + 36, f"{record.bytes} bytes", size=12)
        x = 215.0
        for size, label, fill in parts:
            width = max(size * scale, 8)
            fits = len(label) * 7 < width
            d.box(x, y, width, 30, label if fits else "", fill=fill)
            if not fits:
                d.text(x + width / 2, y + 46, label, anchor="middle", size=12)
            x += width
    y = 70 * len(rows) + 20
    d.text(20, y + 18, "one byte of E2M1", bold=True)
    for i in range(8):
        upper = i < 4
        d.box(215 + 52 * i, y, 52, 30, f"bit {7 - i}", fill=GREEN if upper else BLUE)
    d.text(215 + 104, y + 48, "odd element: sign, exponent 2, mantissa 1", anchor="middle", size=12)
    d.text(215 + 312, y + 48, "even element", anchor="middle", size=12)
    d.text(20, y + 84, "E8M0 byte c is the power of two 2^(c - 127); 255 is NaN. One scale covers 32 values"
           " (NVFP4: 16), a weight's scale 32 x 32.", size=12)  # fmt: skip
    return d


def imports() -> Drawing:
    """Who may import whom: the rules of tests/test_imports.py."""
    d = Drawing(1000, 420, "Import graph")
    d.box(
        40,
        20,
        920,
        44,
        "commands: python -m dsv41 demo, doctor, parity, plan, bench, eplb",
        "with prepare and plan_memory; may import everything",
    )
    tops = (
        (40, "layers", "V41Flash, V41State", VIOLET), (280, "spec", "drafts, budget, verify", VIOLET),
        (520, "replay", "bounded prefill", VIOLET), (760, "eplb", "NumPy (live: torch)", GREY),
    )  # fmt: skip
    for x, name, text, fill in tops:
        d.box(x, 110, 200, 50, f"dsv41.{name}", text, fill=fill)
        d.line((x + 100, 64), (x + 100, 110))
    d.box(
        40,
        210,
        680,
        50,
        "dsv41.ops.<family>.api",
        "public functions: checks, allocation, one Op each",
        fill=BLUE,
    )
    for x in (140, 380, 620):
        d.line((x, 160), (x, 210))
    d.box(760, 210, 200, 50, "<toolchain>_<device>.py", "kernels", fill=ORANGE)
    d.line((720, 235), (760, 235), dashed=True)
    d.text(740, 200, "by name, when first chosen", anchor="middle", size=12)
    d.box(40, 310, 440, 50, "dsv41._op, formats, cache, config", "torch and the standard library", fill=GREEN)
    d.line((260, 260), (260, 310))
    d.box(520, 310, 200, 50, "dsv41_reference", "torch only", fill=GREEN)
    d.line((620, 260), (620, 310), dashed=True)
    d.line((480, 335), (520, 335))
    d.box(760, 310, 200, 50, "tilelang, triton, ...", "extras", fill=GREY)
    d.line((860, 260), (860, 310))
    d.text(40, 396, "Arrows point down and nothing imports sideways; dashed: loaded by name, so import dsv41"
           " loads torch and no toolchain.", size=12)  # fmt: skip
    return d


DRAWINGS = {"model": model, "records": records, "imports": imports}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (HERE / f"{name}.svg").write_text(str(draw()), "utf-8")
