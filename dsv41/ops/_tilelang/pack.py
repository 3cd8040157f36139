"""Weights in the order in which ``weights_gemm.cuh`` reads them.

Blocks of 64 features x 128 k are contiguous, two of the same k together; in one, 128 threads each own the
values that wgmma's A operand gives them: rows ``16 * warp + lane / 4`` and ``+ 8``.
"""

import torch

ROWS, BLOCK_K = 64, 128
MIN_CODE, MAX_CODE = 1, 223  # scales that a bf16 exponent holds, with every product finite
# E2M1 times 2^-13 to 2^13 is exact in E5M2's normal numbers: scales this far from a base fold into values.
FOLD = 13
# What the base is moved to for experts that fold in a layer where others do not: their codes, above MAX_CODE,
# tell them apart.
MOVED_BASE = 224 + FOLD


def used_codes(packed: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """[experts, 256] int64: how many blocks of [experts, rows, K/2] values, other than zeros, have each scale
    code.
    """
    counts = torch.zeros(len(code), 256, dtype=torch.int64, device=code.device)
    for e, (values, codes) in enumerate(zip(packed, code, strict=True)):  # one expert at a time
        live = (values & 0x77).view(*codes.shape, 16).amax(-1) > 0
        counts[e] = torch.bincount(codes[live].long(), minlength=256)
    return counts


def fold_base(counts: torch.Tensor) -> int:
    """The base whose neighbourhood of ``FOLD`` codes holds most of [256] blocks."""
    inside = torch.nn.functional.pad(counts, (FOLD, FOLD)).unfold(0, 2 * FOLD + 1, 1).sum(-1).cpu()
    best = (inside == inside.max()).nonzero().flatten()
    return int(best[len(best) // 2])


def outside(counts: torch.Tensor, base: int) -> torch.Tensor:
    """[...]: how many of [..., 256] blocks do not fold with a base."""
    return counts.sum(-1) - counts[..., max(0, base - FOLD) : base + FOLD + 1].sum(-1)


def moved_codes(code: torch.Tensor, base: int) -> torch.Tensor:
    """Codes of an expert that folds, relative to `MOVED_BASE`; those of zeros become what is nearest."""
    return ((code.int() - base).clamp(-FOLD, FOLD) + MOVED_BASE).to(torch.uint8)


def mxfp4_values(packed: torch.Tensor) -> torch.Tensor:
    """[rows, K/2] bytes of two E2M1 (even element low) to as many bytes in reading order, same shape.

    Word (q, i) of a thread holds columns ``32 q + 16 i + 4 * (lane % 4) + {0..3}`` of its two rows; the bit
    positions are those that ``Mxfp4`` reads.
    """
    rows, half_k = packed.shape
    code = torch.stack([packed & 15, packed >> 4], -1).view(rows // ROWS, 4, 2, 8, half_k // 64, 8, 4, 4)
    f = code.permute(0, 4, 1, 3, 6, 5, 2, 7).to(torch.int64)  # block, kb, warp, g, c, word, row half, column
    words = torch.zeros(f.shape[:-2], dtype=torch.int64, device=packed.device)
    for half in range(2):
        for i in range(4):
            x = f[..., half, i]
            words |= (x & 7) << (16 * half + 4 * i) | (x >> 3) << (8 * i + 7 - 4 * half)
    words = words.unflatten(-1, (2, 4)).permute(0, 1, 5, 2, 3, 4, 6)  # halves of the words apart
    low = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    low = low.unflatten(0, (-1, 2)).transpose(1, 2)
    return low.contiguous().view(torch.uint8).view(rows, half_k)


def mxfp4_scales(code: torch.Tensor) -> torch.Tensor:
    """[rows, K/32] E8M0 codes in reading order."""
    rows, groups = code.shape
    x = code.view(rows // 128, 2, 4, 2, 8, groups // 4, 4)  # pair, block, warp, row half, g, kb, group
    return x.permute(0, 5, 1, 2, 4, 3, 6).reshape(rows, groups)


def gate_up_rows(x: torch.Tensor) -> torch.Tensor:
    """[2 * inter, ...], the gate first, to an order in which a thread owns gate and up of a feature."""
    inter = x.shape[0] // 2
    y = x.view(2, inter // 32, 4, 8, *x.shape[1:])
    return y.permute(1, 2, 0, 3, *range(4, y.dim())).reshape(x.shape)
