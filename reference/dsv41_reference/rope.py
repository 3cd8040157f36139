"""Rotary tables: the one place where angles, cosines and sines are made.

The incremental and the dense model share this file, because tables that differ in their last bit would hide
every other difference between the two.
"""

import math
from typing import Any

import torch


def rope_frequencies(
    dim: int,
    theta: float,
    factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_positions: int = 65_536,
) -> torch.Tensor:
    """Angle a position of each pair, YaRN-blended when ``factor`` is given; no attention factor.

        b_i = theta^(-2i/dim);  f_i = b_i * ((1 - ρ_i) + ρ_i / factor)
        ρ_i = clamp((i - low) / (high - low), 0, 1)
        low = max(⌊c(beta_fast)⌋, 0),  high = min(⌈c(beta_slow)⌉, dim - 1)
        c(n) = dim * ln(original_positions / (2πn)) / (2 ln theta)

    Args:
        dim: rotated dimensions, even.
        theta: base.
        factor: position stretch of YaRN, or None for the plain table.
        beta_fast, beta_slow: turns over the original positions at which the blend starts and ends.
        original_positions: positions before the stretch.

    Returns:
        [dim / 2] f32, every step of the formula over i in float32.
    """
    if dim % 2 or dim <= 0:
        raise ValueError(f"rope_frequencies: expected dim: positive and even, got {dim}")
    base = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if factor is None:
        return base

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original_positions / (2 * math.pi * times)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), dim - 1)
    # Equal (or crossed) ends make the ramp a step between pair ``low`` and the next.
    span = max(high - low, 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base * ((1 - ramp) + ramp / factor)


_kept: dict[tuple[Any, ...], torch.Tensor] = {}


def _frequencies_at(positions: torch.Tensor, *constants: Any) -> torch.Tensor:
    """`rope_frequencies` where the positions are. On an accelerator they are moved once: a move waits."""
    with torch.device("cpu"):  # made there for every device, so that they are the same bits
        if positions.device.type == "cpu" or type(positions) is not torch.Tensor:
            return rope_frequencies(*constants).to(positions.device)
        key = (positions.device, *constants)
        if key not in _kept:
            _kept[key] = rope_frequencies(*constants).to(positions.device)
        return _kept[key]


def rope_table(
    positions: torch.Tensor,
    dim: int,
    theta: float,
    factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_positions: int = 65_536,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of float32(position) * f_i, in float32 throughout; see `rope_frequencies`.

    A float64 table would be another function: at position 65,535 a cosine moves by up to 1e-3.

    Args:
        positions: [...] int.

    Returns:
        cos and sin, each [..., dim / 2] f32. A row's bits do not depend on the other positions.
    """
    constants = (dim, theta, factor, beta_fast, beta_slow, original_positions)
    angles = positions.to(torch.float32)[..., None] * _frequencies_at(positions, *constants)
    return torch.cos(angles), torch.sin(angles)
