"""The parts of `bench replay` that run a model: prefill with and without replay, error against ``keep``."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch
from dsv41_reference import accumulate

from ..config import V41FlashConfig
from ..layers import V41State
from ..replay import ReplayConfig, ReplayGeometry, ReplayMode, RequestSpan, flops, plan_decoder
from ..replay.chunked import prefill
from ..replay.device import to_device
from . import results
from .cpu import synthetic_model

_LEAST_SPEEDUP = 1.6
_TEXTS, _ERROR_LENGTH = 32, 170
_VARIANTS = ("segment", "all_rows")


def prefill_speed(args: argparse.Namespace) -> bool:
    """Prefill of one prompt on the `mini` model, head on the last row: mode off against compact."""
    cfg = V41FlashConfig.mini()
    model = synthetic_model(cfg)
    ids = torch.randint(0, cfg.image_token, (args.tokens,), generator=torch.Generator().manual_seed(0))
    compact = ReplayConfig(ReplayMode.COMPACT, args.keep)
    prefill(model, ids[:8], V41State.allocate(cfg, 1, 8), compact)  # imports and first allocations
    rows: list[dict[str, Any]] = []
    print(f"prefill of {args.tokens} tokens, mini, chunks of {args.model_chunk}, head on the last row")
    for config in (ReplayConfig(), compact):
        state = V41State.allocate(cfg, 1, args.tokens)
        wall, cpu = time.perf_counter(), time.process_time()
        prefill(model, ids, state, config, chunk=args.model_chunk)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rows.append(
            {"op": "replay_prefill", "config": "mini", "mode": config.mode.value, "keep": args.keep,
             "tokens": args.tokens, "chunk": args.model_chunk,
             "wall_s": round(wall, 2), "cpu_s": round(cpu, 2)}
        )  # fmt: skip
        print(f"{config.mode.value:>10}: {wall:7.1f} s wall, {cpu:7.1f} s CPU")
    wall_ratio, cpu_ratio = (rows[0][key] / rows[1][key] for key in ("wall_s", "cpu_s"))
    rows[1] |= {"speedup_wall": round(wall_ratio, 3), "speedup_cpu": round(cpu_ratio, 3)}
    holds = cpu_ratio >= _LEAST_SPEEDUP
    verdict = "holds" if holds else "DOES NOT HOLD"
    print(
        f"   compact: {wall_ratio:.2f} x (wall), {cpu_ratio:.2f} x (CPU); bound {_LEAST_SPEEDUP} x {verdict}"
    )
    if args.json:
        results.append(args.json, rows)
    return holds


def error_model() -> V41FlashConfig:
    """A very narrow model with 20 decoder layers and a window of 8, so that an exact keep is short."""
    small = V41FlashConfig.micro()
    return V41FlashConfig.micro(
        num_layers=24,
        compress_ratios=(0, 0, 2, 2) + (1,) * 20,
        index_sources=(2, 4, 8, 12, 16, 20),
        draft=dataclasses.replace(small.draft, target_layers=(23,), block_size=5),
    )


def prefill_error(args: argparse.Namespace) -> bool:
    """KL divergence of the last row's law from mode off, against ``keep``, in float64 accumulation."""
    cfg = error_model()
    geometry = ReplayGeometry.from_config(cfg)
    model = synthetic_model(cfg)
    length, draw = _ERROR_LENGTH, torch.Generator().manual_seed(1)
    ids = torch.randint(0, cfg.image_token, (_TEXTS * length,), generator=draw)
    bounds = torch.arange(_TEXTS + 1, dtype=torch.int32) * length
    place = torch.arange(length, dtype=torch.int32).repeat(_TEXTS)

    def laws(config: ReplayConfig) -> torch.Tensor:
        plan = to_device(
            plan_decoder(config, geometry, [RequestSpan(length, length, length)] * _TEXTS), "cpu"
        )
        state = V41State.allocate(cfg, _TEXTS, length)
        with accumulate(torch.float64):
            logits = model(ids, place, state, cu_seqlens=bounds, rows=plan.logits_row.long(), replay=plan)
        return torch.log_softmax(logits.double(), -1)

    off, rows, exact = laws(ReplayConfig()), [], True
    print(f"error of the last row, {_TEXTS} texts of {length} tokens, 20 decoder layers, window {cfg.window}")
    print(f"{'keep':>6} {'first layer':>12} {'mean KL':>10} {'max KL':>10}")
    for variant in _VARIANTS:
        last = geometry.exact_keep(variant)
        for keep in sorted({geometry.min_keep, 20, 32, 48, 64, 96, 128, last - 1, last}):
            if keep > last:
                continue
            law = laws(ReplayConfig(ReplayMode.COMPACT, keep, first_layer_kv=variant, geometry=geometry))
            divergence = (off.exp() * (off - law)).sum(-1).clamp(min=0)
            mean, most = float(divergence.mean()), float(divergence.max())
            exact &= keep < last or bool(torch.equal(law, off))
            rows.append(
                {"op": "replay_error", "first_layer_kv": variant, "keep": keep, "exact_keep": last,
                 "window": cfg.window, "decoder_layers": 20, "tokens": length, "texts": _TEXTS,
                 "mean_kl": mean, "max_kl": most}
            )  # fmt: skip
            print(f"{keep:6d} {variant:>12} {mean:10.2e} {most:10.2e}")
    print(f"at the exact keep the laws are {'bit-equal' if exact else 'NOT EQUAL'}")
    if args.json:
        results.append(args.json, rows)
    if args.plot:
        draw_picture(args.plot, rows, args.keep)
        print(f"wrote {args.plot}")
    return exact


def draw_picture(path: str, rows: list[dict[str, Any]], keep: int) -> None:
    """Left: share of prefill FLOPs saved. Right: the measured error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    lengths = sorted({int(2 ** (7 + i / 4)) for i in range(53)})
    config = V41FlashConfig()
    for count, style in ((keep, "-"), (ReplayGeometry().exact_keep("all_rows"), "--")):
        saved = [100 * flops(n, count, config).saved for n in lengths]
        left.plot(lengths, saved, style, label=f"compact, keep {count}")
    masked = [100 * flops(n, keep, config).saved_mask_empty for n in lengths]
    left.plot(lengths, masked, ":", label=f"mask/empty, keep {keep}")
    left.set(
        xscale="log", xlabel="prompt tokens", ylabel="prefill FLOPs saved, %", title="V4.1-Flash, computed"
    )
    left.set_ylim(0, 55)
    for variant, marker in zip(_VARIANTS, "os", strict=True):
        mine = [row for row in rows if row["first_layer_kv"] == variant]
        last = mine[-1]["exact_keep"]
        seen = [row for row in mine if row["mean_kl"] > 0]
        keeps, means = [row["keep"] for row in seen], [row["mean_kl"] for row in seen]
        (line,) = right.plot(keeps, means, marker=marker, label=f"{variant}, mean KL")
        right.plot(keeps, [row["max_kl"] for row in seen], ":", color=line.get_color(), label="largest")
        right.axvline(last, color=line.get_color(), lw=0.8, label=f"exact from {last} on")
    window, layers, texts = rows[0]["window"], rows[0]["decoder_layers"], rows[0]["texts"]
    title = f"measured: {layers} decoder layers, window {window}, {texts} texts"
    right.set(yscale="log", xlabel="keep", ylabel="KL(off || compact) of the last row", title=title)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
