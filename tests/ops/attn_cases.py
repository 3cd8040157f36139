"""Inputs of the sparse attention kernels and their comparison with the reference, on a CPU and on a GPU."""

from dataclasses import dataclass
from typing import Any

import torch
from dsv41_reference import accumulate
from dsv41_reference.cache import _parts

from dsv41 import ops, use
from dsv41.cache import PagedKV, Record
from dsv41.parity import distance

BF16, WIDTH, SCALE = torch.bfloat16, 512, 512**-0.5


@dataclass(frozen=True)
class Case:
    """One call: ``near`` and ``far`` are slots a row of the two id lists."""

    why: str
    tokens: int = 3
    heads: int = 64
    near: int = 128
    far: int = 512
    layouts: tuple[str, str] = ("mxfp8", "nvfp4")
    page: tuple[int, int] = (32, 64)
    gap: int = 0  # bytes behind each page
    missing: float = 0.0  # share of the ids that are -1
    sink: float | None = 0.5  # its mean; None for no sink
    splits: int | None = None
    width: int = WIDTH
    rope: int = 0  # dimensions that are rotated back
    steep: float = 1  # multiplies q
    context: int = 0  # slots of the compressed cache, when there are more than the rows read


CASES = {
    "decode": Case("the model's decode step"),
    "decode one row": Case("all tiles in blocks of their own", tokens=1),
    "no splits": Case("one block a row", splits=1),
    "three splits": Case("tiles that three does not divide", splits=3),
    "persistent": Case("blocks that take several rows", tokens=300, splits=1),
    "window alone": Case("ratio 0 layers", far=0),
    "no ids": Case("neither list has a column", near=0, far=0),
    **{f"near {n}": Case("lengths around a tile", tokens=2, near=n, far=64) for n in (0, 1, 63, 64, 65)},
    **{f"near {n}": Case("lengths around a window", tokens=2, near=n, far=0) for n in (127, 128, 129)},
    **{f"far {n}": Case("lengths around the top k", tokens=2, far=n) for n in (1, 511, 512, 513)},
    "rope": Case("output rotated back", rope=64, splits=1),
    "rope, split": Case("rotated by the combination", rope=64, splits=3),
    "many": Case("more than the model selects", tokens=1, far=2048, splits=2),
    "holes": Case("ids of -1 anywhere", tokens=5, missing=0.4),
    "mostly holes": Case("tiles with no key", tokens=9, missing=0.99, splits=1),
    "all holes": Case("rows with no key", tokens=2, missing=1.0),
    "all holes, split": Case("parts with no key", tokens=2, missing=1.0, splits=4),
    "steep": Case("maxima that grow much", steep=4),
    "no sink": Case("softmax alone", sink=None),
    "sink +inf": Case("all weight at the sink", sink=torch.inf),
    "sink -inf": Case("no weight at the sink", sink=-torch.inf),
    "drafter": Case(
        "ring and scratch page of mxfp8", near=128, far=5, layouts=("mxfp8", "mxfp8"), page=(133, 30)
    ),
    "v4": Case("584-byte records", layouts=("v4", "v4"), page=(32, 32)),
    "bf16": Case("plain rows", layouts=("bf16", "bf16"), page=(8, 8)),
    **{
        f"{a} and {b}": Case("records of two kinds", near=130, layouts=(a, b), page=(16, 16))
        for a, b in (
            ("v4", "nvfp4"),
            ("bf16", "mxfp8"),
            ("nvfp4", "mxfp8"),
            ("nvfp4", "nvfp4"),
            ("mxfp8", "bf16"),
        )
    },
    "gap": Case("page strides", gap=4096),
    "heads 2": Case("the tiny model's heads", heads=2),
    "heads 16": Case("a quarter of a tile", heads=16),
    "heads 128": Case("two tiles of heads", heads=128, tokens=2),
    "heads 80": Case("a tile and a quarter", heads=80, tokens=2),
}


def random_cache(layout: str, slots: int, page: int, gap: int, device: str, width: int = WIDTH) -> PagedKV:
    """Finite records of all kinds of bytes; NaN in the gaps between pages."""
    record, count = Record(layout, width), max(1, -(-slots // page))
    stride = page * record.bytes + gap
    pool = torch.full((count, stride), 0xFF, dtype=torch.uint8, device=device)
    pages = pool.as_strided((count, page, record.bytes), (stride, record.bytes, 1))
    values, scales = _parts(pages, layout, width)
    byte = torch.randint(0, 256, values.shape, dtype=torch.uint8, device=device)
    if layout in ("mxfp8", "v4", "fp8"):
        byte[(byte & 0x7F) == 0x7F] = 0
    if layout in ("v4", "bf16"):
        plain = torch.randn(*byte.shape[:2], 64 if layout == "v4" else width, device=device).to(BF16)
        byte[..., byte.shape[2] - 2 * plain.shape[2] :] = plain.view(torch.uint8)
    values.copy_(byte)
    low, high = (0x20, 0x40) if layout == "nvfp4" else (116, 122)
    scales.copy_(torch.randint(low, high, scales.shape, dtype=torch.uint8, device=device))
    if layout == "nvfp4":
        scales[..., 0] = torch.randint(0, 8, scales.shape[:2], dtype=torch.uint8, device=device)  # subnormal
        scales[..., 1] |= 0x80
        scales[1:2, ..., -1] = 0x4C  # 6: too large for the short way of the kernel
    if layout == "v4":
        scales[..., 7] = 0
    if layout == "fp8":
        scales.copy_(torch.full((1,), 2.0**-7, device=device).view(torch.uint8).expand_as(scales))
    return PagedKV(pages, record)


def poison(cache: PagedKV, ids: torch.Tensor) -> None:
    """NaN in every record that no id names."""
    values, scales = _parts(cache.pages, cache.record.layout, cache.record.dim)
    unused = torch.ones(cache.num_slots, dtype=torch.bool, device=ids.device)
    unused[ids[ids >= 0].long()] = False
    unused = unused.view(cache.pages.shape[:2])
    values[unused] = 0xFF
    scales[unused] = 0xFF


def choose(tokens: int, count: int, slots: int, missing: float, device: str) -> torch.Tensor:
    """Distinct slots a row, some of them -1; the row stride is not the count."""
    ids = torch.full((tokens, count + 3), 0x7FFFFFFF, dtype=torch.int32, device=device)
    ids[:, :count] = torch.rand(tokens, slots, device=device).argsort(1)[:, :count].to(torch.int32)
    if count > 1 and slots - 1 not in ids[0]:
        ids[0, 1] = slots - 1  # the last one of the cache, whatever its size
    ids[:, :count][torch.rand(tokens, count, device=device) < missing] = -1
    return ids[:, :count]


def inputs(case: Case, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ``ops.sparse_attn``: positional and by keyword."""
    caches = []
    for layout, page, count in zip(case.layouts, case.page, (case.near, case.far), strict=True):
        slots = -(-max(count + 50, case.context if caches else 0) // page) * page
        cache = random_cache(layout, slots, page, case.gap, device, case.width)
        ids = choose(case.tokens, count, cache.num_slots, case.missing, device)
        poison(cache, ids)
        caches += [cache, ids]
    q = (torch.randn(case.tokens, case.heads, case.width, device=device) * case.steep).to(BF16)
    sink = None
    if case.sink is not None:
        sink = case.sink + torch.randn(case.heads, device=device)
    keys = {"scale": case.width**-0.5, "sink": sink, "return_lse": True, "inverse_rope": None}
    if case.rope:
        angle = torch.rand(case.tokens, case.rope + 3, device=device)[:, : case.rope // 2] * 6
        keys["inverse_rope"] = (angle.cos(), angle.sin())
    return (q, *caches), keys


def compare(
    case: Case, got: Any, arguments: tuple[Any, ...], keys: dict[str, Any]
) -> tuple[float, float, float]:
    """(distance, largest error over value and row rms, lse error) against the reference in float64."""
    with accumulate(torch.float64), use("torch"):
        want, want_lse = ops.sparse_attn(*arguments, **keys)
    out, lse = got
    assert out.isfinite().all(), case.why
    assert want_lse is not None and torch.equal(lse.isinf(), want_lse.isinf()), case.why
    held = want_lse.isfinite()
    rms = want.double().square().mean(-1, keepdim=True).sqrt()
    error = float(
        ((out.double() - want.double()).abs() / torch.maximum(want.double().abs(), rms + 1e-30)).max()
    )
    if rms.max() == 0:
        assert (out == 0).all(), case.why
        error = 0.0
    lse_error = float((lse - want_lse)[held].abs().max()) / case.steep if held.any() else 0.0
    return distance(out, want), error, lse_error
