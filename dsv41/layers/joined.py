"""Linears that read the same input, as one product."""

import torch

from ..formats import E8M0, MXFP8
from .linear import BlockLinear


def joined(*linears: BlockLinear) -> MXFP8:
    """One weight of several with the same input; theirs become views of its rows."""
    values = torch.cat([linear.weight for linear in linears])
    scale = torch.cat([linear.scale.view(torch.uint8) for linear in linears]).view(E8M0)
    outputs = [linear.weight.shape[0] for linear in linears]
    tiles = [linear.scale.shape[0] for linear in linears]
    for linear, rows, codes in zip(linears, values.split(outputs), scale.split(tiles), strict=True):
        linear.weight.data, linear.scale.data = rows, codes
    return MXFP8(values, scale, 32)
