"""What the DeepGEMM adapters share: its layout of scales on SM100."""

import torch


def packed_scale(codes: torch.Tensor) -> torch.Tensor:
    """UE8M0 codes [..., rows, k/32] as SM100 kernels read them: int32 words of four along k, rows fastest.

    The stride between words is the rows rounded up to a multiple of 4 (16 bytes, for the copy engine).
    """
    words = codes.view(torch.uint8).contiguous().view(torch.int32)
    *outer, rows, count = words.shape
    aligned = words.new_empty((*outer, count, -(-rows // 4) * 4))[..., :rows].transpose(-1, -2)
    return aligned.copy_(words)
