"""Every op call of a step beside the reference, on the inputs that the step gave it.

Logits of a whole model with random weights are no test of kernels: one rounding flips a selection or an
expert, and the rest of the text is another. In place, each op must agree by itself.

    with parity.compare() as rows:
        model(tokens, positions, state)
    print(parity.report(rows))
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._op import Op, Target
from .cache import page_slots

_FLOATS = (torch.float32, torch.bfloat16)
# Ops that round f32 sums to codes: a sum in another order flips one in many thousands.
_ROUNDED = ("mhc_boundary", "rms_norm_quantize", "swiglu_quantize", "write_cache")
FLIPS = 1e-4  # the share of them; seen on an H200: up to 4e-5, and one flipped scale


@dataclass(frozen=True)
class Row:
    """One output of one call: DeepGEMM's distance for floats, the share of differing elements otherwise.

    slack: what ``value`` may be above any bound although the kernel is right. Codes of f32 sums differ
        now and then: a share of `FLIPS`, and two blocks of 32 with their scales. Experts round inside,
        where a flipped scale costs the 32 values of its block a bit: as much as eight blocks of the
        call, which matters in small calls only.
    where: what `compare` was told about the place of the call, such as its layer.
    """

    op: str
    output: str
    kernel: str
    shape: tuple[int, ...]
    floats: bool
    value: float
    slack: float = 0.0
    where: str = ""

    def differs(self, bound: float) -> bool:
        """Whether this is more than roundings; ``bound`` is for floats."""
        return not self.value <= (bound if self.floats else 0) + self.slack


@contextlib.contextmanager
def compare(
    *skip: str,
    plain: dict[int, tuple[torch.Tensor, ...]] | None = None,
    where: Callable[[], str] = str,
) -> Iterator[list[Row]]:
    """Inside the context every op runs twice: its kernel, and the reference on copies of the arguments.

    Args:
        skip: names of ops that only run (those whose outputs depend on noise of their own).
        plain: for experts that are packed in place: data pointer of ``w13`` to the four plain tensors.
        where: asked at every call; its answer goes into the rows.

    Yields:
        The list that calls append their rows to. For tests and diagnosis: slow, and it synchronises.
    """
    rows: list[Row] = []
    run = Op.__call__

    def both(self: Op, *args: Any) -> None:
        op = self
        if op.name in skip:
            return run(op, *args)
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        run(op, *args)
        if op.name == "mxfp4_moe" and plain and args[4].data_ptr() in plain:
            copies[4:9] = [*plain[args[4].data_ptr()], "plain"]
        op.load("torch")(*copies)
        first = next(a for a in args if isinstance(a, torch.Tensor))
        kernel = op.select(Target.of(first), args)
        for got, want, argument in zip(args, copies, op._call._schema.arguments, strict=True):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if not written or argument.name == "scratch" or got is None or not got.numel():
                continue
            floats = got.dtype in _FLOATS
            value = _finite_distance(got, want) if floats else _differing(got, want)
            slack = _slack(op.name, args, got)
            rows.append(Row(op.name, argument.name, kernel, tuple(got.shape), floats, value, slack, where()))

    Op.__call__ = both
    try:
        yield rows
    finally:
        Op.__call__ = run


def report(rows: list[Row]) -> str:
    """A line an op: its kernel, calls, worst distance of float outputs, worst share of differing others."""
    lines = [f"{'op':<22}{'kernel':<16}{'rows':>6}{'distance':>12}{'differing':>12}"]
    for name in sorted({row.op for row in rows}):
        mine = [row for row in rows if row.op == name]
        worst = [
            max((row.value for row in mine if row.floats is floats), default=None) for floats in (True, False)
        ]
        cells = "".join(f"{'-' if w is None else format(w, '.2e'):>12}" for w in worst)
        lines.append(f"{name:<22}{mine[0].kernel:<16}{len(mine):>6}{cells}")
    return "\n".join(lines)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 - 2 <a, b> / (<a, a> + <b, b>) in float64: 0 for equals, NaN where either holds one."""
    a, b = a.double(), b.double()
    total = (a * a + b * b).sum()
    return 0.0 if total == 0 else float(1 - 2 * (a * b).sum() / total)


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite where shapes differ, or just one of the two is not finite."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    return float((a - b).abs().max()) if a.numel() else 0.0


def cache_differences(state: Any, trace: dict[str, torch.Tensor], length: int) -> dict[str, float]:
    """Largest difference of every cache of request 0 from what the dense model says it must hold, in layer
    order.

    Args:
        state: a `dsv41.layers.V41State` with ``length`` tokens of the request, on any device.
        trace: what `dsv41_reference.model.V41Reference.forward` recorded.
        length: tokens.
    """
    cfg, found = state.cfg, {}
    device = state.lens.device
    for i in range(cfg.num_layers):
        ring = state.windows[i]
        place = torch.arange(max(0, length - cfg.window), length, device=device)
        held = ring.read(place % ring.page_size).cpu()
        found[f"layer {i} window"] = largest(held, trace[f"window.{i}"][place.cpu()].float())
        if i not in cfg.kv_sources:
            continue
        ratio = cfg.compress_ratios[i]
        for name, cache in (("compressed", state.compressed[i]), ("index_key", state.index_keys[i])):
            entries = torch.arange(length // ratio, device=device)
            owner = torch.zeros(1, dtype=torch.int64, device=device)
            slots = page_slots(entries[None], owner, state.page_table, cache.page_size)[0]
            want = trace[f"{name}.{i}"][: length // ratio].float()
            found[f"layer {i} {name}"] = largest(cache.read(slots).cpu(), want)
        if ratio == 2 and length % 2:
            held = state.carry[i][0, (length - 1) % state.carry[i].shape[1]].cpu()
            found[f"layer {i} carry"] = largest(held, trace[f"carry.{i}"][length - 1])
    return found


def _slack(op: str, args: tuple[Any, ...], got: torch.Tensor) -> float:
    if op == "mxfp4_moe":
        inner = args[2].numel() * args[4].shape[1] // 2  # pairs of token and expert times their width
        return 2**-9 * min(1.0, 8 * 32 / inner)  # half of the square of 2^-4, on blocks among all
    if op in _ROUNDED and got.dtype not in _FLOATS:
        return FLIPS + 2 * 33 / got.numel()
    return 0.0


def _finite_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance over finite places; infinite when the others are not the same."""
    finite = a.isfinite() & b.isfinite()
    same = torch.equal(a[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0))
    return distance(a[finite], b[finite]) if same else float("inf")


def _differing(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.dtype.itemsize == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return float((a != b).double().mean())
