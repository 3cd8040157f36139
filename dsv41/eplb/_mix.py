"""A small integer hash, the same on every host and simple enough for a kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ._check import Ints

MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


def mix(*keys: ArrayLike) -> Ints:
    """Hash of up to three integers >= 0, broadcast together: int64 in [0, 2**32).

        x = sum of keys[i] * MULTIPLIERS[i]                         modulo 2**32
        x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

    All arithmetic is uint32 with wrap-around, which a kernel can repeat bit for bit.

    Source: the mixer is C. Wellons' "lowbias32" constants.
    """
    x = np.uint64(0)
    for key, multiplier in zip(keys, MULTIPLIERS, strict=False):
        x = x + (np.asarray(key).astype(np.uint64) & np.uint64(0xFFFFFFFF)) * np.uint64(multiplier)
    low = np.uint64(0xFFFFFFFF)
    x = np.asarray(x & low)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & low
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & low
    return (x ^ (x >> np.uint64(16))).astype(np.int64)
