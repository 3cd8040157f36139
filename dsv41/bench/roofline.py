"""The least time of an op call: bytes it must move, products it must make, at measured ceilings."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .._op import Op
from .gpu_time import graph_us

HOST_BYTES = 55e9  # a second, from pinned memory


class Ceilings(NamedTuple):
    """What a device does in a second: bytes of a copy, read and written, and operations of products."""

    copy: float
    bf16: float
    fp8: float


H200 = Ceilings(4.26e12, 790e12, 1304e12)  # accounts without a GPU


@functools.cache
def measured() -> Ceilings:
    """Those of this process's GPU, by PyTorch: a copy of 1 GiB (by a kernel: the copy engine is slower),
    products of 8,192^3.
    """
    size, device = 8192, "cuda"
    source = torch.zeros(1 << 28, device=device)
    into = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    one = torch.ones((), device=device)
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))

    def fp8() -> None:
        product_of: Any = getattr(torch, "_scaled_mm")  # noqa: B009 - not in the stubs
        product_of(a8, b8.t(), one, one, out_dtype=torch.bfloat16, out=product)

    operations = 2 * size**3
    return Ceilings(
        2e6 * source.nbytes / graph_us([lambda: torch.neg(source, out=into)]),
        1e6 * operations / graph_us([lambda: torch.mm(a, b, out=product)]),
        1e6 * operations / graph_us([fp8]),
    )


def share(call: Callable[[], object], us: float) -> dict[str, float]:
    """A call's least microseconds at the ceilings of this GPU, as a share of the ``us`` that it took."""
    with account(measured()) as found:
        call()
    least = 1e6 * sum(seconds for _, seconds in found.values())
    return {"least_us": round(least, 2), "share": round(least / us, 3)}


# Arguments of which a call reads or writes a part; what it does is counted by hand.
PARTIAL = {
    "scratch", "pages", "source", "keys", "window", "compressed", "page_table", "carry", "token_classes",
    "w13", "w13_scale", "w2", "w2_scale",
}  # fmt: skip


def arguments(op: Op, args: tuple[Any, ...]) -> dict[str, Any]:
    """A call's arguments by the names of its schema."""
    return {a.name: value for a, value in zip(op._call._schema.arguments, args, strict=True)}


def least_seconds(name: str, a: dict[str, Any], at: Ceilings = H200) -> float:
    """Least time of one call. Reads ids and lengths from the device: for accounts, not inside a step."""
    tensors = {k: v for k, v in a.items() if isinstance(v, torch.Tensor) and k not in PARTIAL}
    if name == "engram_lookup" and not a["values"].is_cuda:
        values = a["values"]
        each = values.shape[1] + values.shape[1] // 32
        return max(int((a["rows"] >= 0).sum()) * each / HOST_BYTES, a["out"].nbytes / at.copy)
    tensors.pop("values" if name == "engram_lookup" else "", None)
    if name == "mhc_boundary" and not a["next_pre"].numel():  # the mixes are another call's
        tensors.pop("fn")
    moved, made, rate = float(sum(t.nbytes for t in tensors.values())), 0.0, at.bf16
    if name in ("block_linear", "grouped_linear", "linear"):
        rows = a["x"].shape[0]
        made, rate = 2.0 * rows * a["w"].numel(), at.fp8 if name == "block_linear" else at.bf16
    elif name == "mxfp4_moe":
        chosen = a["expert_ids"][a["expert_ids"] >= 0]
        weights = sum(a[k].nbytes for k in ("w13", "w13_scale", "w2", "w2_scale"))
        moved += chosen.unique().numel() * weights / a["w13"].shape[0]
        made, rate = 4.0 * chosen.numel() * (a["w13"].numel() + a["w2"].numel()) / a["w13"].shape[0], at.fp8
    elif name == "sparse_attn":
        heads, width = a["q"].shape[1:]
        for ids, pages in ((a["window_ids"], a["window"]), (a["compressed_ids"], a["compressed"])):
            if ids is not None and pages is not None:
                seen = ids[ids >= 0]
                moved += seen.unique().numel() * pages.shape[-1]
                made += 4.0 * seen.numel() * heads * width
    elif name == "index_topk":
        heads, width, record = a["q"].shape[1], 2 * a["q"].shape[2], a["keys"].shape[-1]
        seen = a["visible"].long()
        if a["candidates"] is not None:
            seen = torch.minimum(seen, (a["candidates"] >= 0).sum(1) * a["block_size"])
        requests = a["request_ids"].long().clamp(min=0)
        longest = torch.zeros(len(a["page_table"]), dtype=torch.long, device=seen.device)
        longest.scatter_reduce_(0, requests, seen, "amax")
        read = longest if a["candidates"] is None else seen
        moved, made, rate = (
            moved + float(read.sum()) * record,
            2.0 * float(seen.sum()) * heads * width,
            at.fp8,
        )
    elif name == "rope" and a["out"].data_ptr() == a["x"].data_ptr():  # the other columns stay as they are
        tables = a["cos"].nbytes + a["sin"].nbytes
        moved = tables + 2.0 * a["x"].nbytes * 2 * a["cos"].shape[1] / a["x"].shape[2]
    elif name in ("write_cache", "copy_records"):
        slots = int((a["slots"] >= 0).sum())
        moved += slots * a["pages"].shape[-1] * (2 if name == "copy_records" else 1)
    return max(moved / at.copy, made / rate)


@contextlib.contextmanager
def account(at: Ceilings = H200) -> Iterator[dict[str, list[float]]]:
    """Inside the context op calls run and are counted: name to [calls, least seconds]."""
    found: dict[str, list[float]] = {}
    run = Op.__call__

    def count(self: Op, *args: Any) -> None:
        row = found.setdefault(self.name, [0, 0.0])
        row[0] += 1
        row[1] += least_seconds(self.name, arguments(self, args), at)
        run(self, *args)

    Op.__call__ = count
    try:
        yield found
    finally:
        Op.__call__ = run
