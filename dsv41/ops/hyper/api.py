"""mHC: mixes, collapse and expand of the residual streams."""

import torch

from ..._op import Op, check, check_tensor, output

_MIXES = Op(
    "mhc_mixes(Tensor x, Tensor fn, Tensor base, Tensor scale, float norm_eps, float eps, int iters,"
    " Tensor(a!) pre, Tensor(b!) post, Tensor(c!) comb) -> ()",
    reference="dsv41_reference.hyper:mhc_mixes",
    package=__package__,
)
_COLLAPSE = Op(
    "mhc_collapse(Tensor x, Tensor pre, Tensor(a!) out) -> ()",
    reference="dsv41_reference.hyper:mhc_collapse",
    package=__package__,
)
_EXPAND = Op(
    "mhc_expand(Tensor y, Tensor x, Tensor post, Tensor comb, Tensor(a!) out) -> ()",
    reference="dsv41_reference.hyper:mhc_expand",
    package=__package__,
)


def mhc_mixes(
    x: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mixing coefficients of one sub-layer, from the streams that enter it.

        m    = (fn @ x) * rsqrt(mean(x^2) + norm_eps)          over the concatenated streams
        pre  = sigmoid(m[:S] * scale[0] + base[:S]) + eps
        post = 2 * sigmoid(m[S:2S] * scale[1] + base[S:2S])
        comb = sinkhorn(m[2S:] * scale[2] + base[2S:])         S x S, softmax of rows, column step last

    Args:
        x: [num_tokens, streams, hidden] bf16.
        fn: [streams * (streams + 2), streams * hidden] f32, stream-major columns.
        base: [streams * (streams + 2)] f32.
        scale: [3] f32.
        norm_eps: added to the mean square.
        eps: added to pre, after the softmax and in every Sinkhorn denominator.
        iters: row and column normalisations each, the softmax being the first row one.
        out: the three results to write into.

    Returns:
        pre [num_tokens, streams] f32, post [num_tokens, streams] f32, comb [num_tokens, streams, streams]
        f32. ``pre`` belongs to the *next* sub-layer's input, not to this one's.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.hyper.mhc_mixes
    """
    name = "mhc_mixes"
    check_tensor(name, "x", x, (None, None, None), torch.bfloat16, contiguous=True)
    tokens, streams, hidden = x.shape
    outputs = streams * (streams + 2)
    check_tensor(name, "fn", fn, (outputs, streams * hidden), torch.float32, like=x)
    check_tensor(name, "base", base, (outputs,), torch.float32, like=x)
    check_tensor(name, "scale", scale, (3,), torch.float32, like=x)
    check(iters >= 1, name, "iters: at least 1", iters)
    given = out or (None, None, None)
    out = (
        output(name, given[0], (tokens, streams), torch.float32, x, "out pre"),
        output(name, given[1], (tokens, streams), torch.float32, x, "out post"),
        output(name, given[2], (tokens, streams, streams), torch.float32, x, "out comb"),
    )
    _MIXES(x, fn, base, scale, norm_eps, eps, iters, *out)
    return out


def mhc_collapse(x: torch.Tensor, pre: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Collapse the streams into a sub-layer's input.

        out = sum_s pre[s] * x[s], computed in f32, rounded once

    Args:
        x: [num_tokens, streams, hidden] bf16.
        pre: [num_tokens, streams] f32, from the *previous* sub-layer's mixes.
        out: [num_tokens, hidden] bf16 to write into.

    Returns:
        [num_tokens, hidden] bf16; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.hyper.mhc_collapse
    """
    check_tensor("mhc_collapse", "x", x, (None, None, None), torch.bfloat16)
    tokens, streams, hidden = x.shape
    check_tensor("mhc_collapse", "pre", pre, (tokens, streams), torch.float32, like=x)
    out = output("mhc_collapse", out, (tokens, hidden), torch.bfloat16, x)
    _COLLAPSE(x, pre, out)
    return out


def mhc_expand(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write a sub-layer's output back into the streams.

        out[k] = post[k] * y + sum_j comb[j, k] * x[j], computed in f32, rounded once

    Args:
        y: [num_tokens, hidden] bf16.
        x: [num_tokens, streams, hidden] bf16, the streams that entered the sub-layer.
        post: [num_tokens, streams] f32.
        comb: [num_tokens, streams, streams] f32; the sum runs over its first stream index.
        out: [num_tokens, streams, hidden] bf16 to write into; must not overlap ``x``.

    Returns:
        [num_tokens, streams, hidden] bf16; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.hyper.mhc_expand
    """
    name = "mhc_expand"
    check_tensor(name, "x", x, (None, None, None), torch.bfloat16)
    tokens, streams, hidden = x.shape
    check_tensor(name, "y", y, (tokens, hidden), torch.bfloat16, like=x)
    check_tensor(name, "post", post, (tokens, streams), torch.float32, like=x)
    check_tensor(name, "comb", comb, (tokens, streams, streams), torch.float32, like=x)
    out = output(name, out, tuple(x.shape), torch.bfloat16, x)
    _EXPAND(y, x, post, comb, out)
    return out
