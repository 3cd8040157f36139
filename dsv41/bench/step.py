"""``python -m dsv41 bench step``: one EP8 rank's share of V4.1-Flash, prefill and decode, on a CUDA device.

All layers at full width with an eighth of the routed experts. The router chooses among all experts and pairs
of experts elsewhere are dropped, as those that a group would send away; nothing arrives from other ranks.
Weights and caches are random; layers share the bytes, not the memory, of their experts. An eighth of the
Engram rows is in pinned host memory (``--engram-gb`` may take fewer). Random weights accept no draft: rates
assume that a draft stays with probability ``--acceptance`` once those before it did; a step's work does not
depend on it.
"""

import argparse
import dataclasses
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .. import prepare
from .._op import check, no_compile
from ..config import V41FlashConfig
from ..formats import E4M3, E8M0
from ..layers import V41Flash, V41State
from ..layers.engram import MemoryEngramStore, StreamPrefetcher, TokenMap
from ..layers.moe import Experts, MoE
from ..memory import rank_model
from ..replay import ReplayConfig, ReplayGeometry, ReplayMode, RequestSpan, plan_decoder
from ..replay.device import to_device
from ..spec import DecodeGraphs
from . import results, tables
from .roofline import H200, account, measured

RANKS, SLACK = 8, 64
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench step`."""
    parser.add_argument("--config", choices=("flash", "mini", "tiny"), default="flash")
    parser.add_argument("--device", default="cuda", help="cpu: a dry run of a small config")
    parser.add_argument("--layers", type=int, help="only the first layers: a trial")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--requests", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="*", default=[4096, 32_768, 131_072])
    parser.add_argument("--keep", type=int, default=140, help="rows that bounded replay keeps")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--engram-gb", type=float, default=25.4, help="table rows in pinned host memory")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="append the measurements to this JSON-lines file")
    parser.add_argument("--plot", help="write a picture of the time by op")
    parser.add_argument("--saved", help="measure nothing: tables and picture of the rows of this file")


class LocalMoE(MoE):
    """Chooses among all experts and keeps the pairs of those that are here."""

    here: torch.Tensor  # number here of each expert, or -1

    def route(self, x: torch.Tensor, image: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = super().route(x, image)
        return self.here.index_select(0, ids.flatten()).view_as(ids), weights


class FoldedStore(MemoryEngramStore):
    """A part of a table that stands for all of it: rows are taken modulo its size."""

    def lookup(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().lookup(torch.where(rows >= 0, rows % self.num_rows, -1), out)


def rank(cfg: V41FlashConfig, device: torch.device, engram_gb: float) -> V41Flash:
    """One rank's model with random weights, packed."""
    classes = TokenMap.synthetic(cfg.vocab_size, cfg.engram.num_classes, 0)
    model = rank_model(cfg, classes, -(-cfg.num_experts // RANKS), cfg.draft.num_experts, True)
    _fill(model, device)
    for module in model.modules():
        if isinstance(module, MoE):
            module.__class__ = LocalMoE
            number = torch.arange(len(module.gate.bias), dtype=torch.int32)
            module.here = torch.where(number < module.experts.w13.shape[0], number, -1).to(device)
    _share_experts(model)
    width, stores = cfg.engram.head_dim, {}
    for layer, rows in zip(cfg.engram.layers, cfg.engram.num_rows, strict=True):
        share = engram_gb * 1e9 / len(cfg.engram.layers) / (width + width // 32)
        held, pin = min(int(share), rows // RANKS), device.type == "cuda"
        values = torch.empty((held, width), dtype=torch.uint8, pin_memory=pin)
        scale = torch.empty((held, width // 32), dtype=torch.uint8, pin_memory=pin)
        for table, low, high in ((values, 0, 0x38), (scale, 120, 124)):  # one block, repeated
            block = torch.randint(low, high, (min(held, 1 << 16), table.shape[1]), dtype=torch.uint8)
            for part in table.split(len(block)):
                part.copy_(block[: len(part)])
        stores[layer] = FoldedStore(values.view(E4M3), scale.view(E8M0))
        model.attach_engram(layer, stores[layer])
    if device.type == "cuda":
        model.attach_prefetcher(StreamPrefetcher(stores, torch.cuda.Stream()))
    return model.pack()


def _fill(model: nn.Module, device: torch.device) -> None:
    """Parameters without memory become random ones: products of the size of their inputs."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            if p.dtype == E8M0:
                # E4M3 values of about 16 times 2^-10, E2M1 of about 3 times 2^-8: near 1/sqrt(k).
                code = 117 if name == "scale" else 119
                made = torch.full(p.shape, code, dtype=torch.uint8, device=device).view(E8M0)
            elif p.dtype == torch.uint8:
                made = torch.randint(0, 256, p.shape, dtype=torch.uint8, device=device)
            elif p.dtype == E4M3:
                made = torch.empty(p.shape, dtype=torch.uint8, device=device).view(E4M3)
                for part in made.split(8192):
                    part.copy_(16 * torch.randn(part.shape, device=device))
            else:
                made = torch.randn(p.shape, device=device, dtype=torch.float32)
                made = (made * 0.1 + 1 if p.dim() == 1 else made * p.shape[-1] ** -0.5).to(p.dtype)
            module._parameters[name] = nn.Parameter(made, requires_grad=False)


def _share_experts(model: V41Flash) -> None:
    """Pack one layer's experts; the others get copies of its bytes, in memory of their own."""
    for group in (model.layers, model.mtp if model.mtp is not None else []):
        layers = [m for block in group for m in block.modules() if isinstance(m, Experts)]
        if layers and layers[0].packable:
            layers[0].pack()
        for other in layers[1:]:
            for name, p in layers[0]._parameters.items():
                if p is not None:
                    getattr(other, name).data.view(torch.uint8).copy_(p.data.view(torch.uint8))
            other.layout = layers[0].layout


def random_state(cfg: V41FlashConfig, requests: int, context: int, device: torch.device) -> V41State:
    """Caches with random records: scores differ, so that selections are scattered as a text's are."""
    state = V41State.allocate(cfg, requests, context, drafter=True, device=device)
    for cache in (*state.windows, *state.compressed.values(), *state.index_keys.values()):
        for part in cache.pages.split(4096):
            part.random_(0, 0x38)
    for keys in state.index_keys.values():
        scales = keys.record.dim // 32
        area = keys.pages.flatten(1)[:, -keys.page_size * scales :]
        area.random_(124, 127)
    return state


def timed(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median milliseconds of a call that may run on a GPU."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A CUDA graph of a call that has run before; elsewhere the call itself."""
    if device.type != "cuda":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def run(args: argparse.Namespace) -> int:
    """Print one JSON line a measurement."""
    if args.saved:
        rows = results.read("bench step", args.saved, lines=True)
        try:
            print(markdown(rows))
        except (KeyError, TypeError) as error:
            check(False, "bench step", f"measurements of bench step in {args.saved}", f"none of {error}")
        if args.plot:
            draw(args.plot, [row for row in rows if "spent_ms" in row])
        return 0
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench step needs a CUDA device")
        return 1
    torch.manual_seed(0)
    cfg = _first_layers(getattr(V41FlashConfig, args.config)(), args.layers)
    began = time.perf_counter()

    def note(what: str) -> None:
        print(f"# {time.perf_counter() - began:6.1f} s  {what}", flush=True)

    local = -(-cfg.num_experts // RANKS)
    done = prepare(cfg, device, experts=local, max_requests=max(args.requests), step_tokens=args.prefill)
    note(f"prepared: {done.compiled} kernels compiled ahead, {done.warmed} calls made, {done.seconds:.1f} s")
    model = rank(cfg, device, args.engram_gb)
    note("weights" + (f", {torch.cuda.memory_allocated() / 1e9:.1f} GB" if device.type == "cuda" else ""))
    common: Row = {
        "config": args.config, "layers": cfg.num_layers, "experts": local,
        "engram_gb": round(min(args.engram_gb, _engram_eighth(cfg)), 2),
    }  # fmt: skip
    rows, failed = [], False
    for part in (prefill(cfg, model, device, args), decode(cfg, model, device, args, note)):
        try:
            for row in part:
                rows.append({**row, **common})
                print(json.dumps(rows[-1]), flush=True)
                if args.json:
                    results.append(args.json, rows[-1:])
        except Exception:  # one part's mistake does not take the other's measurements
            traceback.print_exc()
            failed = True
    if args.plot:
        draw(args.plot, [row for row in rows if "spent_ms" in row])
    return int(failed or not all(row.get("live", 1) for row in rows))


def _engram_eighth(cfg: V41FlashConfig) -> float:
    return sum(cfg.engram.num_rows) / RANKS * cfg.engram.head_dim * 33 / 32 / 1e9


def _first_layers(cfg: V41FlashConfig, count: int | None) -> V41FlashConfig:
    """The config cut behind a layer: for trials in seconds."""
    if count is None or count >= cfg.num_layers:
        return cfg

    def below(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i for i in ids if i < count)

    engram = below(cfg.engram.layers)
    return dataclasses.replace(
        cfg,
        num_layers=count,
        compress_ratios=cfg.compress_ratios[:count],
        kv_sources=below(cfg.kv_sources),
        index_sources=below(cfg.index_sources),
        engram=dataclasses.replace(cfg.engram, layers=engram, num_rows=cfg.engram.num_rows[: len(engram)]),
        draft=dataclasses.replace(cfg.draft, target_layers=tuple(range(count - 3, count))),
    )


# Prefill.


def prefill(
    cfg: V41FlashConfig, model: V41Flash, device: torch.device, args: argparse.Namespace
) -> Iterator[Row]:
    """One prompt in one step, its drafter context included; every row in every layer, and bounded replay."""
    assert model.mtp is not None
    tokens = args.prefill
    state = V41State.allocate(cfg, 1, tokens, drafter=True, device=device)
    ids = torch.randint(0, cfg.image_token, (tokens,), device=device)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    cu = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    inputs = torch.empty((tokens, model.mtp.input_width), dtype=torch.bfloat16, device=device)
    geometry = ReplayGeometry.from_config(cfg)
    span = [RequestSpan(tokens, tokens, tokens)]
    kept = ReplayConfig(ReplayMode.COMPACT, max(args.keep, geometry.min_keep), geometry=geometry)
    replays: dict[str, Any] = {"off": None}
    if cfg.first_decoder_layer > max(cfg.engram.layers, default=0):
        replays[str(kept.keep)] = to_device(plan_decoder(kept, geometry, span), device)
    first: float | None = None
    for name, replay in replays.items():
        last = torch.tensor([tokens - 1 if replay is None else replay.plan.num_rows - 1], device=device)

        def call(replay: Any = replay, last: torch.Tensor = last) -> None:
            state.lens.zero_()
            model(
                ids, positions, state,
                cu_seqlens=cu, max_len=tokens, rows=last, draft_inputs=inputs, replay=replay,
            )  # fmt: skip
            model.mtp.write_context(inputs, positions, state, cu_seqlens=cu)  # type: ignore[union-attr]

        call()
        eager = timed(call, device, min(3, args.repeats))
        ms = timed(captured(call, device), device, min(3, args.repeats))
        row: Row = {"op": "prefill", "tokens": tokens, "replay": name, "ms": round(ms, 2)}
        row["eager_ms"] = round(eager, 2)  # with launches, which the host may not keep up with
        row["tokens_per_s"] = round(tokens / ms * 1e3)
        if first is not None:
            row["times_faster"] = round(first / ms, 3)
        first = first or ms
        yield row | breakdown(call, device)


# Decode.


def decode(
    cfg: V41FlashConfig,
    model: V41Flash,
    device: torch.device,
    args: argparse.Namespace,
    note: Callable[[str], None],
) -> Iterator[Row]:
    """A decode step of every batch: plain, all drafts, and a budget of two drafts a request."""
    assert model.mtp is not None
    block, most = model.mtp.block_size, max(args.requests)
    state = random_state(cfg, most, max(args.contexts) + SLACK, device)
    note("caches")
    plain = DecodeGraphs(model, state, sizes=[(r, r) for r in args.requests])
    drafting = DecodeGraphs(
        model, state, drafter=model.mtp, sizes=[(r, r * n) for r in args.requests for n in (3, 1 + block)]
    )
    if device.type == "cuda":
        missed = sum(_compiles(graphs, size, note) for graphs in (plain, drafting) for size in graphs.sizes)
        for graphs in (plain, drafting):
            graphs.capture()
        note(f"captured; {missed} steps compiled something that prepare had not")
    for requests in args.requests:
        for context in args.contexts:
            for name, graphs, drafts in (
                ("none", plain, 0), ("all", drafting, block), ("budget", drafting, 2),
            ):  # fmt: skip
                state.lens.fill_(context - SLACK)
                state.written.copy_(state.lens)
                graphs.anchors.fill_(-1)
                graphs.anchors[:requests].random_(0, cfg.image_token)
                graphs.left.fill_(10**6)
                graphs.budget.fill_(drafts * requests)
                size = (requests, requests * (1 + drafts))
                graph = graphs._graphs.get(size)
                call = (lambda g=graphs, s=size: g.run(*s)) if graph is None else graph.replay
                call()
                with no_compile():
                    ms = timed(call, device, args.repeats)
                verified = graphs.results[:requests, -1].float()
                stay = args.acceptance
                emitted = requests + float((stay * (1 - stay**verified) / (1 - stay)).sum())
                row: Row = {
                    "op": "decode", "requests": requests, "context": context, "drafts": name,
                    "tokens": size[1], "ms": round(ms, 3), "acceptance": stay if drafts else None,
                    "tokens_per_s": round(emitted / ms * 1e3),
                    # Random weights must not end a text: it would take part in no step any more.
                    "live": bool((graphs.anchors[:requests] >= 0).all()),
                }  # fmt: skip
                if (
                    requests in (min(64, most), most)
                    and context == args.contexts[min(1, len(args.contexts) - 1)]
                ):
                    row |= breakdown(lambda g=graphs, s=size: g.run(*s), device)
                    row["over_roofline"] = round(ms / row["roofline_ms"], 3)
                yield row
        note(f"{requests} requests")


def _compiles(graphs: DecodeGraphs, size: tuple[int, int], note: Callable[[str], None]) -> bool:
    """Whether a step of nobody compiles; afterwards it does not."""
    try:
        with no_compile():
            graphs.run(*size)
    except RuntimeError as error:
        note(str(error)[:300])
        graphs.run(*size)
        return True
    return False


# Where the time goes.


def breakdown(call: Callable[[], Any], device: torch.device) -> Row:
    """Least milliseconds of a step by op, and what its kernels took in a profile of the same step."""
    with account(measured() if device.type == "cuda" else H200) as found:
        call()
    least = {name: round(1e3 * seconds, 4) for name, (_, seconds) in found.items()}
    row: Row = {"roofline_ms": round(sum(least.values()), 3), "least_ms": least}
    row["calls"] = {name: int(count) for name, (count, _) in found.items()}
    if device.type != "cuda":
        return row
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as made:
        call()
        torch.cuda.synchronize()
    events = made.key_averages()
    ours = {e.key[7:]: e.device_time_total / 1e3 for e in events if e.key.startswith("dsv41::")}
    # Only kernels: the other events repeat the time of those that they started.
    kernels = sum(e.self_device_time_total for e in events if e.device_type.name == "CUDA") / 1e3
    spent = {name: round(ms, 4) for name, ms in sorted(ours.items(), key=lambda kv: -kv[1])}
    spent["torch"] = round(kernels - sum(ours.values()), 4)
    return row | {"kernels_ms": round(kernels, 3), "spent_ms": spent}


def markdown(rows: list[Row]) -> str:
    """Tables of the steps, and of where the time of those that were taken apart went."""
    steps: list[tables.Column] = [
        ("step", _label),
        ("rows", lambda r: r["tokens"]),
        ("ms", lambda r: r["ms"]),
        ("ms launched one by one", lambda r: r.get("eager_ms")),
        ("tokens/s", lambda r: f"{r['tokens_per_s']:,}"),
        ("roofline, ms", lambda r: r.get("roofline_ms")),
        ("times the roofline", lambda r: r["ms"] / r["roofline_ms"] if "roofline_ms" in r else None),
    ]
    apart = [row for row in rows if "spent_ms" in row]
    names = sorted({n for r in apart for n in r["spent_ms"]}, key=lambda n: -max(_spent(r, n) for r in apart))
    ops = [{"op": n, **{_label(r): f"{_spent(r, n):.2f} / {r['least_ms'].get(n, 0):.2f}" for r in apart}}
           for n in names if max(_spent(r, n) for r in apart) >= 0.1]  # fmt: skip
    columns: list[tables.Column] = [("ms in kernels / roofline", lambda r: f"`{r['op']}`")]
    columns += [(label, lambda r, label=label: r[label]) for label in map(_label, apart)]
    return f"{tables.table(rows, steps)}\n\n{tables.table(ops, columns)}"


def _spent(row: Row, name: str) -> float:
    return row["spent_ms"].get(name, 0.0)


def _label(row: Row) -> str:
    if row["op"] == "prefill":
        return f"prefill, replay {row['replay']}"
    drafts = {"none": "no drafts", "all": "all drafts", "budget": "budget of 2"}[row["drafts"]]
    return f"decode {row['requests']} x {row['context']:,}, {drafts}"


def draw(path: str, rows: list[Row]) -> None:
    """Bars of the time by op beside the least time, for every step that was taken apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not rows:
        return
    figure = Figure(figsize=(11, 2.6 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, row in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        names = sorted(row["spent_ms"], key=lambda n: -row["spent_ms"][n])[:14]
        axes.bar(names, [row["spent_ms"][n] for n in names], label="kernels")
        axes.bar(names, [row["least_ms"].get(n, 0) for n in names], width=0.4, label="roofline")
        axes.set(ylabel="ms", title=f"{_label(row)}: {row['ms']:.1f} ms")
        axes.tick_params(axis="x", rotation=35, labelsize=8)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)
