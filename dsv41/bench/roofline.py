"""The least time of an op call: the bytes it must move and the products it must make, at measured ceilings.

The ceilings are an H200's: a device copy, the best bf16 and FP8 products seen, a copy from pinned memory.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .._op import Op

BYTES, HOST_BYTES = 4.26e12, 55e9  # a second
BF16, FP8 = 790e12, 1304e12  # operations a second
# Arguments of which a call reads or writes a part; what it does is counted by hand.
PARTIAL = {
    "scratch", "pages", "source", "keys", "window", "compressed", "page_table", "carry", "token_classes",
    "w13", "w13_scale", "w2", "w2_scale",
}  # fmt: skip


def arguments(op: Op, args: tuple[Any, ...]) -> dict[str, Any]:
    """A call's arguments by the names of its schema."""
    return {a.name: value for a, value in zip(op._call._schema.arguments, args, strict=True)}


def least_seconds(name: str, a: dict[str, Any]) -> float:
    """Least time of one call. Reads ids and lengths from the device: for accounts, not inside a step."""
    tensors = {k: v for k, v in a.items() if isinstance(v, torch.Tensor) and k not in PARTIAL}
    if name == "engram_lookup" and not a["values"].is_cuda:
        values = a["values"]
        each = values.shape[1] + values.shape[1] // 32
        return max(int((a["rows"] >= 0).sum()) * each / HOST_BYTES, a["out"].nbytes / BYTES)
    tensors.pop("values" if name == "engram_lookup" else "", None)
    moved, made, rate = float(sum(t.nbytes for t in tensors.values())), 0.0, BF16
    if name in ("block_linear", "grouped_linear", "linear"):
        rows = a["x"].shape[0]
        made, rate = 2.0 * rows * a["w"].numel(), FP8 if name == "block_linear" else BF16
    elif name == "mxfp4_moe":
        chosen = a["expert_ids"][a["expert_ids"] >= 0]
        weights = sum(a[k].nbytes for k in ("w13", "w13_scale", "w2", "w2_scale"))
        moved += chosen.unique().numel() * weights / a["w13"].shape[0]
        made, rate = 4.0 * chosen.numel() * (a["w13"].numel() + a["w2"].numel()) / a["w13"].shape[0], FP8
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
        moved, made, rate = moved + float(read.sum()) * record, 2.0 * float(seen.sum()) * heads * width, FP8
    elif name == "rope" and a["out"].data_ptr() == a["x"].data_ptr():  # the other columns stay as they are
        tables = a["cos"].nbytes + a["sin"].nbytes
        moved = tables + 2.0 * a["x"].nbytes * 2 * a["cos"].shape[1] / a["x"].shape[2]
    elif name in ("write_cache", "copy_records"):
        slots = int((a["slots"] >= 0).sum())
        moved += slots * a["pages"].shape[-1] * (2 if name == "copy_records" else 1)
    return max(moved / BYTES, made / rate)


@contextlib.contextmanager
def account() -> Iterator[dict[str, list[float]]]:
    """Inside the context op calls run and are counted: name to [calls, least seconds]."""
    found: dict[str, list[float]] = {}
    run = Op.__call__

    def count(self: Op, *args: Any) -> None:
        row = found.setdefault(self.name, [0, 0.0])
        row[0] += 1
        row[1] += least_seconds(self.name, arguments(self, args))
        run(self, *args)

    Op.__call__ = count
    try:
        yield found
    finally:
        Op.__call__ = run
