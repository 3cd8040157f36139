"""Cache records: how one vector is stored as bytes, and where its bytes lie in a page.

Layouts, for a vector of ``dim`` values (bytes for the real widths in brackets):

==========  =======================================  ====================================  ===========
layout      values                                   scales                                in a page
==========  =======================================  ====================================  ===========
mxfp8       dim E4M3                                 dim/32 UE8M0                          [528] rows
nvfp4       dim/2, E2M1 pairs                        dim/16 E4M3                           [288] rows
mxfp4       dim/2, E2M1 pairs                        dim/32 UE8M0                          [68] split
v4          dim-64 E4M3, then 64 bf16                (dim-64)/64 UE8M0, padded to 8        [584] split
fp8         dim E4M3                                 one f32, a power of two               [132] split
bf16        2 dim                                    none                                  [1024] rows
==========  =======================================  ====================================  ===========

*rows*: a token's values, then its scales, token after token. *split*: all values of the page, then all
scales. A slot number is ``page * page_size + offset``; -1 writes nothing and reads as zeros.
"""

import torch

from .norm_rope import normalise, rotate
from .numerics import bf16, narrow
from .quant import (
    E4M3_MAX,
    FLOOR_MXFP8,
    e4m3_round,
    e8m0_decode,
    from_mxfp4,
    from_mxfp8,
    from_nvfp4,
    to_mxfp4,
    to_mxfp8,
    to_nvfp4,
    ue8m0_code,
)

V4_ROPE = 64
V4_GROUP = 64


def record_bytes(layout: str, dim: int) -> tuple[int, int, bool]:
    """(value bytes, scale bytes, split) of one record."""
    return {
        "mxfp8": (dim, dim // 32, False),
        "nvfp4": (dim // 2, dim // 16, False),
        "mxfp4": (dim // 2, dim // 32, True),
        "v4": (dim + V4_ROPE, 8, True),
        "fp8": (dim, 4, True),
        "bf16": (2 * dim, 0, False),
    }[layout]


def encode(layout: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, dim] bf16 or f32 to values uint8 [N, value bytes] and scales uint8 [N, scale bytes]."""
    byte = torch.uint8
    if layout == "mxfp8":
        values, scale = to_mxfp8(x)
    elif layout == "nvfp4":
        values, scale = to_nvfp4(x)
    elif layout == "mxfp4":
        values, scale = to_mxfp4(x)
    elif layout == "v4":
        plain, rope = x[:, :-V4_ROPE], bf16(x[:, -V4_ROPE:])
        quantised, code = to_mxfp8(plain, V4_GROUP)
        values = torch.cat([quantised.view(byte), rope.contiguous().view(byte)], 1)
        scale = torch.nn.functional.pad(code, (0, 8 - code.shape[1]))
    elif layout == "fp8":
        amax = x.float().abs().amax(-1, keepdim=True).clamp(min=FLOOR_MXFP8)
        factor = e8m0_decode(ue8m0_code(amax, E4M3_MAX))
        values, scale = e4m3_round(x.float() / factor), factor
    else:
        values, scale = narrow(x, torch.bfloat16), x.new_empty((len(x), 0), dtype=byte)
    return values.contiguous().view(byte), scale.contiguous().view(byte)


def decode(layout: str, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values uint8 [N, value bytes] and scales uint8 [N, scale bytes] to f32 [N, dim]; exact."""
    values, scale = values.contiguous(), scale.contiguous()
    e4m3 = torch.float8_e4m3fn
    if layout == "mxfp8":
        return from_mxfp8(values.view(e4m3), scale)
    if layout == "nvfp4":
        return from_nvfp4(values, scale.view(e4m3))
    if layout == "mxfp4":
        return from_mxfp4(values, scale)
    if layout == "v4":
        plain, rope = values[:, : -2 * V4_ROPE].contiguous(), values[:, -2 * V4_ROPE :].contiguous()
        groups = plain.shape[1] // V4_GROUP
        return torch.cat(
            [from_mxfp8(plain.view(e4m3), scale[:, :groups]), rope.view(torch.bfloat16).float()], 1
        )
    if layout == "fp8":
        return values.view(e4m3).float() * scale.view(torch.float32)
    return values.view(torch.bfloat16).float()


def _parts(pages: torch.Tensor, layout: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of all values [num_pages, page_size, V] and scales [num_pages, page_size, C] of a cache."""
    size = pages.shape[1]
    values, scales, split = record_bytes(layout, dim)
    if not split:
        return pages[..., :values], pages[..., values:]
    flat = pages.view(pages.shape[0], size * (values + scales))
    return flat[:, : size * values].unflatten(1, (size, values)), flat[:, size * values :].unflatten(
        1, (size, scales)
    )


def in_range(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """bool: slots that the cache has. All others are none: they write nothing and read as zeros."""
    return (slots >= 0) & (slots < pages.shape[0] * pages.shape[1])


def read_rows(pages: torch.Tensor, layout: str, dim: int, slots: torch.Tensor) -> torch.Tensor:
    """Records at ``slots`` [N] (int) as f32 [N, dim]; zeros where the cache has no such slot."""
    size, held = pages.shape[1], in_range(pages, slots)
    if not pages.numel():
        return torch.zeros((len(slots), dim), device=pages.device)
    values, scales = _parts(pages, layout, dim)
    safe = torch.where(held, slots, 0).long()
    row = decode(layout, values[safe // size, safe % size], scales[safe // size, safe % size])
    return torch.where(held[:, None], row, 0)


def write_rows(pages: torch.Tensor, layout: str, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Store [N, dim] at ``slots`` [N] (int); nothing where the cache has no such slot."""
    size = pages.shape[1]
    keep = in_range(pages, slots).nonzero()[:, 0]
    at = slots[keep].long()
    values, scales = _parts(pages, layout, x.shape[1])
    new_values, new_scales = encode(layout, x[keep])
    values[at // size, at % size] = new_values
    scales[at // size, at % size] = new_scales


def write_cache(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    round_rope: bool,
    layout: str,
    pages: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.write_cache``."""
    keep = in_range(pages, slots).nonzero()[:, 0]
    row = x[keep]
    if norm_weight is not None:
        row = bf16(normalise(row, norm_weight, eps))
    row = rotate(row, cos[keep], sin[keep])
    write_rows(pages, layout, slots[keep], bf16(row) if round_rope else row)


def copy_records(
    source: torch.Tensor, source_slots: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor
) -> None:
    """Reference of ``dsv41.ops.copy_records``."""
    keep = (in_range(pages, slots) & in_range(source, source_slots)).nonzero()[:, 0]
    at, origin = slots[keep].long(), source_slots[keep].long()
    size, origin_size = pages.shape[1], source.shape[1]
    pages[at // size, at % size] = source[origin // origin_size, origin % origin_size]
