"""``python -m dsv41 parity``: kernels against the reference on a checkpoint, layer by layer.

The weights of one sub-layer at a time are on the device, so that the released checkpoint runs on one GPU.
Two questions are asked. In place: does every op give what the reference gives on the same inputs? Dense: do
the caches and logits of the chunked, paged run equal those of the cacheless model? The second is exact only
where sums are, in float64 on a CPU; there, ops are the reference themselves and the first question is idle.
"""

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dsv41_reference import accumulate, keep_weights
from dsv41_reference.model import V41Reference
from torch import nn

from . import parity
from ._op import check
from .config import V41FlashConfig
from .formats import E8M0
from .layers import V41Flash, V41State, weights
from .layers.engram import MappedEngramStore, TokenMap
from .layers.moe import Experts

SMALL = 1024  # up to this hidden size the dense model runs by default
BOUND = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `parity`."""
    parser.add_argument(
        "folder", nargs="?", help="a checkpoint in the official layout (default: a synthetic one)"
    )
    parser.add_argument(
        "--config", choices=("tiny", "mini"), help="of the synthetic one (default: tiny on a CPU)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=100, help="prompt tokens, in two chunks (default 100)")
    parser.add_argument("--decode", type=int, default=2, help="decode steps behind them (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the token ids and synthetic weights")
    parser.add_argument("--bound", type=float, default=BOUND, help=f"largest distance (default {BOUND:g})")
    parser.add_argument(
        "--dense", action=argparse.BooleanOptionalAction, help="default: on a CPU, for narrow models"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print a line a layer and the first difference; 1 when there is one."""
    for label, least in (("tokens", 1), ("decode", 0), ("bound", 0)):
        value = getattr(args, label)
        if not value >= least:
            raise SystemExit(f"parity: expected --{label} of {least} or more, got {value}")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(f"parity: expected --device that is here, got {args.device!r} ({reason})") from error
    with contextlib.ExitStack() as stack:
        folder = args.folder
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            small = args.config or ("tiny" if args.device == "cpu" else "mini")  # tiles of kernels fit mini
            weights.write_synthetic(getattr(V41FlashConfig, small)(), folder, args.seed)
        report = check_folder(Path(folder), args)
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        print(report)
    return 0 if report.first is None else 1


@dataclass
class Report:
    """rows: every op's output against the reference. dense: cache or logits to their largest difference."""

    device: str
    bound: float
    rows: list[parity.Row] = field(default_factory=list)
    dense: dict[str, float] | None = None

    @property
    def first(self) -> str | None:
        """The first difference in the order of the calls, in place before dense."""
        for row in self.rows:
            if row.differs(self.bound):
                kind = "distance" if row.floats else "share of differing elements"
                what = f"{row.op}, output {row.output} {list(row.shape)} of {row.kernel}"
                return f"{row.where}: {what}: {kind} {row.value:.3g}"
        for name, value in (self.dense or {}).items():
            if value != 0:
                return f"{name}: differs from the dense model by {value:g}"
        return None

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.first is None,
            "first": self.first,
            "rows": [vars(row) for row in self.rows],
            "dense": self.dense,
        }

    def __str__(self) -> str:
        lines = [f"{'place':<20}{'outputs':>8}{'kernels':>9}{'distance':>12}{'differing':>12}"]
        for place in dict.fromkeys(row.where for row in self.rows):
            mine = [row for row in self.rows if row.where == place]
            kernels = len({(row.op, row.kernel) for row in mine if row.kernel != "torch"})
            worst = [
                max((r.value for r in mine if r.floats is floats), default=None) for floats in (True, False)
            ]
            cells = "".join(f"{'-' if w is None else f'{w:.2e}':>12}" for w in worst)
            mark = "  <--" if any(row.differs(self.bound) for row in mine) else ""
            lines.append(f"{place:<20}{len(mine):>8}{kernels:>9}{cells}{mark}")
        if self.dense is not None:
            equal = sum(value == 0 for value in self.dense.values())
            lines.append(f"dense model: {equal} of {len(self.dense)} caches and logits equal to the bit")
        if all(row.kernel == "torch" for row in self.rows):
            lines.append(
                f"on {self.device} ops are the reference themselves: nothing but the dense model checks"
            )
        first = self.first
        lines.append("no difference" if first is None else f"FIRST DIFFERENCE  {first}")
        return "\n".join(lines)


def check_folder(folder: Path, args: argparse.Namespace) -> Report:
    """Run a prompt in two chunks and some decode steps through a checkpoint; compare everything."""
    path = folder / "config.json"
    check(path.is_file(), "parity", f"a checkpoint folder with {path.name}", str(folder))
    cfg = V41FlashConfig.from_file(path)
    device = torch.device(args.device)
    checkpoint = weights.open_checkpoint(folder, cfg)
    tokenizer = folder / "tokenizer.json"
    classes = (
        TokenMap.build(tokenizer, num_classes=cfg.engram.num_classes)
        if tokenizer.is_file()
        else TokenMap.synthetic(cfg.vocab_size, cfg.engram.num_classes, args.seed)
    )
    total = args.tokens + args.decode
    check(total <= cfg.max_positions, "parity", f"at most {cfg.max_positions} tokens", total)
    stream = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(0, cfg.image_token, (total,), generator=stream)
    dense = device.type == "cpu" and cfg.hidden <= SMALL if args.dense is None else args.dense
    report = Report(str(device), args.bound)
    check(
        not dense or device.type == "cpu",
        "parity",
        "--dense on a CPU only: kernels sum in float32",
        args.device,
    )
    cuts = sorted({0, max(1, args.tokens * 2 // 3), *range(args.tokens, total + 1)})
    with contextlib.ExitStack() as exact:
        if dense:
            exact.enter_context(accumulate(torch.float64))
            exact.enter_context(keep_weights())
        streamed = StreamedModel(cfg, checkpoint, classes, device)
        state = V41State.allocate(cfg, 1, total, device=device)
        logits = []
        with parity.compare(plain=streamed.plain, where=lambda: streamed.where) as report.rows:
            for start, stop in itertools.pairwise(cuts):
                print(f"parity: tokens {start} to {stop} of {total}", file=sys.stderr, flush=True)
                place = torch.arange(start, stop, dtype=torch.int32, device=device)
                with streamed:
                    logits.append(
                        streamed.model(ids[start:stop].to(device), place, state, max_len=stop - start)
                    )
        if dense:
            report.dense = _dense(cfg, checkpoint, classes, ids, state, torch.cat(logits).cpu())
    return report


def _dense(
    cfg: V41FlashConfig,
    checkpoint: weights.Checkpoint,
    classes: TokenMap,
    ids: torch.Tensor,
    state: V41State,
    logits: torch.Tensor,
) -> dict[str, float]:
    trace: dict[str, torch.Tensor] = {}
    want = V41Reference(cfg, checkpoint, classes.ids).forward(ids, trace=trace)
    found = parity.cache_differences(state, trace, len(ids))
    return {**found, "logits": parity.largest(logits, want)}


class StreamedModel:
    """`V41Flash` whose attention, experts and Engram projections are on the device while they run.

    ``plain`` keeps the experts' tensors in the checkpoint's order where they are packed; ``where`` is the
    place of the running op.
    """

    def __init__(
        self, cfg: V41FlashConfig, checkpoint: weights.Checkpoint, classes: TokenMap, device: torch.device
    ):
        with torch.device("meta"):
            self.model = V41Flash(cfg, classes)
        self.checkpoint, self.device, self.where = checkpoint, device, "embedding"
        self.plain: dict[int, tuple[torch.Tensor, ...]] = {}
        self._resident: tuple[str, nn.Module] | None = None
        for layer in cfg.engram.layers:
            name = f"layers.{layer}.engram.embed."
            places = checkpoint.locate(f"{name}weight"), checkpoint.locate(f"{name}scale")
            rows, width = checkpoint.shape(f"{name}weight")
            self.model.attach_engram(layer, MappedEngramStore(*places, num_rows=rows, head_dim=width))
        self._parts = {
            f"layers.{i}.{part}": getattr(layer, part)
            for i, layer in enumerate(self.model.layers)
            for part in ("engram", "attn", "ffn")
            if getattr(layer, part) is not None
        }
        inside = tuple(f"{path}." for path in self._parts)
        for name, parameter in list(self.model.named_parameters()):
            if not name.startswith(inside):
                self._replace(self.model, name, self._new(parameter, self.device))
        self._fill("", self.model, lambda name: not name.startswith(inside))
        logits = self.model.logits

        def head(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
            self.where = "head"
            return logits(x, pre)

        self.model.logits = head  # pyright: ignore[reportAttributeAccessIssue]

    def __enter__(self) -> "StreamedModel":
        self.where = "embedding"
        self._hooks = [
            module.register_forward_pre_hook(lambda _module, _args, path=path: self._enter(path))
            for path, module in self._parts.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._leave()

    def _enter(self, path: str) -> None:
        _, layer, part = path.split(".")
        self.where = f"layer {layer} {part}"
        self._leave()
        module = self._parts[path]
        for name, parameter in list(module.named_parameters()):
            self._replace(module, name, self._new(parameter, self.device))
        self._fill(f"{path}.", module, lambda _: True)
        self._resident = path, module
        self._pack(module)

    def _pack(self, module: nn.Module) -> None:
        """What `V41Flash.pack` does, for one part; plain experts are kept for the reference."""
        for part in self._modules(module):
            if isinstance(part, Experts) and part.packable:
                kept = tuple(t.clone() for t in part.mxfp4.flat()[:4])
                part.pack()
                self.plain[part.w13.data_ptr()] = kept
            elif hasattr(part, "joined"):
                getattr(part, "join")()  # noqa: B009

    @staticmethod
    def _modules(module: Any) -> list[Any]:
        return list(module.modules())

    def _leave(self) -> None:
        """Give the memory of the last part back."""
        if self._resident is None:
            return
        _, module = self._resident
        for name, parameter in list(module.named_parameters()):
            self._replace(module, name, self._new(parameter, torch.device("meta")))
        for part in self._modules(module):
            if isinstance(part, Experts):
                part.layout = "plain"
            elif hasattr(part, "joined"):
                part.joined = None
        self.plain.clear()
        self._resident = None

    def _fill(self, prefix: str, module: nn.Module, wanted: Any) -> None:
        """Copy the module's tensors from the checkpoint, as bytes."""
        views: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            if ".experts." not in f".{name}":
                views[name] = parameter.data
        for path, part in module.named_modules():
            if isinstance(part, Experts) and wanted(f"{path}."):
                views |= {f"{path}.{name}": view.data for name, view in part.checkpoint_tensors().items()}
        for name, view in views.items():
            if wanted(name):
                view.view(torch.uint8).copy_(self.checkpoint[prefix + name].view(torch.uint8))

    @staticmethod
    def _new(like: torch.Tensor, device: torch.device) -> nn.Parameter:
        dtype = torch.uint8 if like.dtype == E8M0 else like.dtype
        raw = torch.empty(like.shape, dtype=dtype, device=device)
        return nn.Parameter(raw.view(like.dtype), requires_grad=False)

    @staticmethod
    def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path)._parameters[leaf] = parameter
