"""RMSNorm and rotary embedding."""

import torch

from ..._op import Op, check, check_tensor, output

_RMS_NORM = Op(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()",
    reference="dsv41_reference.norm_rope:rms_norm",
    package=__package__,
)
_ROPE = Op(
    "rope(Tensor x, Tensor cos, Tensor sin, bool inverse, Tensor(a!) out) -> ()",
    reference="dsv41_reference.norm_rope:rope",
    package=__package__,
)


def check_rope_table(
    name: str, cos: torch.Tensor, sin: torch.Tensor, tokens: int, dim: int, like: torch.Tensor
) -> None:
    """Check cos and sin: [tokens, rope_dim/2] f32 with rope_dim at most ``dim``."""
    check_tensor(name, "cos", cos, (tokens, None), torch.float32, like=like)
    check_tensor(name, "sin", sin, (tokens, cos.shape[1]), torch.float32, like=like)
    check(2 * cos.shape[1] <= dim, name, f"cos: at most {dim // 2} angles", cos)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Root-mean-square normalisation of each row.

        out = weight * (x * rsqrt(mean(x^2) + eps)), computed in f32, rounded once

    Args:
        x: [num_tokens, dim] bf16; rows may be strided.
        weight: [dim] bf16.
        eps: added to the mean square (1e-20 in V4.1).
        out: [num_tokens, dim] bf16 to write into.

    Returns:
        [num_tokens, dim] bf16; ``out`` itself when it was given. A row of zeros is zero.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.norm_rope.rms_norm
    """
    check_tensor("rms_norm", "x", x, (None, None), torch.bfloat16)
    check_tensor("rms_norm", "weight", weight, (x.shape[1],), torch.bfloat16, like=x)
    out = output("rms_norm", out, tuple(x.shape), torch.bfloat16, x)
    _RMS_NORM(x, weight, eps, out)
    return out


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    inverse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate interleaved pairs of the last ``2 * cos.shape[1]`` dimensions of every head.

        (a, b) -> (a cos - b sin, b cos + a sin), computed in f32, rounded once; inverse negates the angle

    Args:
        x: [num_tokens, num_heads, dim] bf16.
        cos: [num_tokens, rope_dim/2] f32, rows of `dsv41_reference.rope.rope_table`.
        sin: [num_tokens, rope_dim/2] f32.
        inverse: rotate back.
        out: [num_tokens, num_heads, dim] bf16 to write into; may be ``x``.

    Returns:
        [num_tokens, num_heads, dim] bf16; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.norm_rope.rope
    """
    check_tensor("rope", "x", x, (None, None, None), torch.bfloat16)
    check_rope_table("rope", cos, sin, x.shape[0], x.shape[2], x)
    out = output("rope", out, tuple(x.shape), torch.bfloat16, x)
    _ROPE(x, cos, sin, inverse, out)
    return out
