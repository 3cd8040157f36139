"""Weights in the order in which ``weights_gemm.cuh`` reads them.

A block of 64 features x 128 k is contiguous; in it, 128 threads each own the values that wgmma's A operand gives
them: rows ``16 * warp + lane / 4`` and ``+ 8``, columns ``2 * (lane % 4) + {0, 1}`` and ``+ 8`` of every 16.
"""

import torch

ROWS, BLOCK_K = 64, 128
MAX_CODE = 128  # the decoder multiplies by 2^(code - 1), which must be finite in bf16


def _fragments(x: torch.Tensor) -> torch.Tensor:
    """[rows, K] to [blocks, K/128, warp 4, lane/4 8, lane%4 4, step 8, k half 2, row half 2, pair 2]."""
    rows, k = x.shape
    x = x.view(
        rows // ROWS, 4, 2, 8, k // BLOCK_K, 8, 2, 4, 2
    )  # block, warp, row half, g, kb, step, kh, c, pair
    return x.permute(0, 4, 1, 3, 7, 5, 6, 2, 8)


def mxfp4_values(packed: torch.Tensor) -> torch.Tensor:
    """[rows, K/2] bytes of two E2M1 (even element low) to as many bytes in reading order, same shape.

    A word carries a thread's eight values of 16 k; the bit positions are those that ``Mxfp4::decode`` masks.
    """
    rows, half_k = packed.shape
    code = torch.stack([packed & 15, packed >> 4], -1).view(rows, 2 * half_k)
    f = _fragments(code).to(torch.int32)  # [..., step, k half, row half, pair]
    sign, magnitude = f >> 3, f & 7
    lanes = torch.zeros_like(f[..., 0, 0, :])
    for (kh, rh), (s, m) in {(0, 0): (15, 6), (0, 1): (12, 3), (1, 0): (14, 0), (1, 1): (13, 9)}.items():
        lanes |= sign[..., kh, rh, :] << s | magnitude[..., kh, rh, :] << m
    words = lanes.to(torch.int16).unflatten(-2, (2, 4))  # [block, kb, warp, g, c, half of steps, word, lane]
    words = words.permute(0, 1, 5, 2, 3, 4, 6, 7).contiguous()
    return words.view(torch.uint8).view(rows, half_k)


def mxfp4_scales(code: torch.Tensor) -> torch.Tensor:
    """[rows, K/32] E8M0 codes (at most 128) to exponent fields of the multiplier, in reading order."""
    rows, groups = code.shape
    x = (code.to(torch.int32) + 126).to(torch.uint8)
    x = x.view(rows // ROWS, 4, 2, 8, groups // 4, 4)  # block, warp, row half, g, kb, group
    return x.permute(0, 4, 1, 3, 2, 5).reshape(rows, groups)


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
