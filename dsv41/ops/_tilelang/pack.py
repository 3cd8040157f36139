"""Weights in the order in which ``weights_gemm.cuh`` reads them.

A block of 64 features x 128 k is contiguous; in it, 128 threads each own the values that wgmma's A operand gives
them: rows ``16 * warp + lane / 4`` and ``+ 8``, columns ``2 * (lane % 4) + {0, 1}`` and ``+ 8`` of every 16.
"""

import torch

ROWS, BLOCK_K = 64, 128
MIN_CODE, MAX_CODE = 1, 251  # scales that a bf16 exponent holds, with every product finite


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
    return low.contiguous().view(torch.uint8).view(rows, half_k)


def mxfp4_scales(code: torch.Tensor) -> torch.Tensor:
    """[rows, K/32] E8M0 codes in reading order."""
    rows, groups = code.shape
    x = code.view(rows // ROWS, 4, 2, 8, groups // 4, 4)  # block, warp, row half, g, kb, group
    return x.permute(0, 4, 1, 3, 2, 5).reshape(rows, groups)


def _fragments(x: torch.Tensor) -> torch.Tensor:
    """[rows, K] to [blocks, K/128, warp 4, lane/4 8, lane%4 4, step 8, k half 2, row half 2, pair 2]."""
    rows, k = x.shape
    x = x.view(rows // ROWS, 4, 2, 8, k // BLOCK_K, 8, 2, 4, 2)  # block, warp, row half, g, kb, step, kh, c, pair
    return x.permute(0, 4, 1, 3, 7, 5, 6, 2, 8)


def mxfp8_values(values: torch.Tensor) -> torch.Tensor:
    """[rows, K] E4M3 bytes in reading order, same shape; two words a thread for 16 k."""
    rows, k = values.shape
    f = _fragments(values)  # [block, kb, warp, g, c, step, k half, row half, pair]
    # Byte 2 * pair + (1 - row half) of word (step, k half).
    words = f.flip(-2).transpose(-1, -2).flatten(-4).unflatten(-1, (4, 16))  # [.., g, c, quarter, 16 bytes]
    return words.permute(0, 1, 5, 2, 3, 4, 6).reshape(rows, k)


def mxfp8_scales(code: torch.Tensor) -> torch.Tensor:
    """[rows/32, K/32] E8M0 codes to [rows/64, K/128, 16]: eight exponent fields and eight unused bytes."""
    tiles, groups = code.shape
    x = (code.to(torch.int32) + 120).to(torch.uint8).view(tiles // 2, 2, groups // 4, 4)
    out = x.new_zeros((tiles // 2, groups // 4, 16))
    out[..., :8] = x.permute(0, 2, 1, 3).flatten(-2)
    return out


def gate_up_rows(x: torch.Tensor) -> torch.Tensor:
    """[2 * inter, ...] with the gate's rows first, so ordered that a thread owns the gate and up of a feature."""
    inter = x.shape[0] // 2
    y = x.view(2, inter // 32, 4, 8, *x.shape[1:])
    return y.permute(1, 2, 0, 3, *range(4, y.dim())).reshape(x.shape)
