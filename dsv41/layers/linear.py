"""Parameters as the checkpoint stores them."""

import torch
from torch import nn

from ..formats import E4M3, E8M0, MXFP8
from ..ops import block_linear


def frozen(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter that takes no gradient. E8M0 is allocated as bytes: factories lack it."""
    raw = torch.empty(shape, dtype=torch.uint8 if dtype == E8M0 else dtype)
    return nn.Parameter(raw.view(dtype), requires_grad=False)


class Weight(nn.Module):
    """A bare ``weight``: embeddings, norms and bf16 linears, under the checkpoint's name."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.weight = frozen(shape, dtype)


class BlockLinear(nn.Module):
    """E4M3 weight [out, in] with one UE8M0 scale a 32 x 32 tile."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = frozen((outputs, inputs), E4M3)
        self.scale = frozen((-(-outputs // 32), -(-inputs // 32)), E8M0)

    @property
    def mxfp8(self) -> MXFP8:
        """The weight as an op takes it."""
        return MXFP8(self.weight, self.scale, 32)

    def forward(self, x: torch.Tensor | MXFP8) -> torch.Tensor:
        """[num_tokens, in] bf16 (quantised here) or MXFP8 to [num_tokens, out] bf16."""
        return block_linear(x, self.mxfp8)
