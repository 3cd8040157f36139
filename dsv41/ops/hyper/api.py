"""mHC: mixes, collapse and expand of the residual streams, and all between two sub-layers at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..._op import (
    Kernel,
    Op,
    check,
    check_flags,
    check_numbers,
    check_sizes,
    check_tensor,
    given_outputs,
    output,
    workspace,
)
from ...formats import MXFP8
from ..quant.api import quantised_output, unaligned


def _mixing(x: torch.Tensor, fn: torch.Tensor) -> str | None:
    if x.shape[1] != 4:
        return f"built for 4 streams, not {x.shape[1]}"
    if x.shape[2] % 32:
        return f"hidden a multiple of 32, not {x.shape[2]}"
    return None if fn.is_contiguous() else "fn is strided"


def _boundary(
    y: Any, x: torch.Tensor, post: Any, comb: Any, pre: Any, fn: torch.Tensor, *_: Any
) -> str | None:
    return _mixing(x, fn)


def _mixing_rows(x: torch.Tensor, fn: torch.Tensor, *_: Any) -> str | None:
    return _mixing(x, fn) or unaligned(x=x, fn=fn)


def _boundary_rows(
    y: torch.Tensor, x: torch.Tensor, post: Any, comb: Any, pre: Any, fn: torch.Tensor, base: Any, scale: Any,
    weight: torch.Tensor, norm_eps: float, eps: float, iters: int, floor: float, out: torch.Tensor, *_: Any,
) -> str | None:  # fmt: skip
    rows = {"y": y, "x": x, "post": post, "comb": comb, "pre": pre, "fn": fn, "weight": weight, "out": out}
    return _mixing(x, fn) or unaligned(**rows)


def _triton(supports: Callable[..., str | None] | None = None) -> tuple[Kernel, ...]:
    return (
        Kernel("triton_cuda", "cuda", needs=("triton",), supports=supports),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=supports),
    )


def _hopper(supports: Callable[..., str | None]) -> Kernel:
    return Kernel("tilelang_cuda", "cuda", needs=("tilelang",), archs=(90,), supports=supports)


_MIXES = Op(
    "mhc_mixes(Tensor x, Tensor fn, Tensor base, Tensor scale, float norm_eps, float eps, int iters,"
    " Tensor(a!) pre, Tensor(b!) post, Tensor(c!) comb, Tensor(d!) scratch) -> ()",
    reference="dsv41_reference.hyper:mhc_mixes",
    package=__package__,
    kernels=(_hopper(_mixing_rows), *_triton(lambda x, fn, *_: _mixing(x, fn))),
)
_COLLAPSE = Op(
    "mhc_collapse(Tensor x, Tensor pre, Tensor(a!) out) -> ()",
    reference="dsv41_reference.hyper:mhc_collapse",
    package=__package__,
    kernels=_triton(),
)
_EXPAND = Op(
    "mhc_expand(Tensor y, Tensor x, Tensor post, Tensor comb, Tensor(a!) out) -> ()",
    reference="dsv41_reference.hyper:mhc_expand",
    package=__package__,
    kernels=_triton(),
)

_BOUNDARY = Op(
    "mhc_boundary(Tensor y, Tensor x, Tensor post, Tensor comb, Tensor pre, Tensor fn, Tensor base,"
    " Tensor scale, Tensor weight, float norm_eps, float eps, int iters, float floor, Tensor(a!) out,"
    " Tensor(b!) next_pre, Tensor(c!) next_post, Tensor(d!) next_comb, Tensor(e!) norm, Tensor(f!) values,"
    " Tensor(g!) codes, Tensor(h!) scratch) -> ()",
    reference="dsv41_reference.hyper:mhc_boundary",
    package=__package__,
    kernels=(_hopper(_boundary_rows), *_triton(_boundary)),
)


class Boundary(NamedTuple):
    """What lies between two sub-layers; see `mhc_boundary`."""

    x: torch.Tensor
    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    norm: torch.Tensor
    q: MXFP8


ROWS, CHUNK, WIDTH = 64, 32, 32  # tokens and columns of a tile of the kernels; sums a token and part


def parts(tokens: int, hidden: int) -> tuple[int, int, int]:
    """How the kernels cut the columns: parts, chunks a part, and parts a group of chunks.

    A part is a group where those fill a GPU, else one chunk. Chunks are added in the same order either way.
    """
    chunks = -(-hidden // CHUNK)
    groups = next(g for g in (8, 5, 4, 2, 1) if chunks % g == 0)
    if -(-tokens // ROWS) * groups >= 128:
        return groups, chunks // groups, 1
    return chunks, 1, chunks // groups


def levels(hidden: int) -> tuple[int, int, int]:
    """How the Hopper kernels add up the chunks of a row: groups, sums a group, and chunks a sum."""
    chunks = hidden // CHUNK
    per = next(n for n in (4, 2, 1) if chunks % n == 0)
    groups = next(n for n in (8, 5, 4, 2, 1) if chunks // per % n == 0)
    return groups, chunks // per // groups, per


def hopper_parts(tokens: int, hidden: int) -> tuple[int, int]:
    """How they cut the columns: parts, and chunks a part (a group if those fill a GPU, a sum, or one)."""
    groups, sums, per = levels(hidden)
    if -(-tokens // (2 * ROWS)) * groups > 88:
        return groups, sums * per
    chunks = 1 if tokens <= ROWS else per
    return hidden // CHUNK // chunks, chunks


def mhc_scratch(num_tokens: int, hidden: int) -> int:
    """f32 numbers (not bytes) of scratch that the mixes of exactly ``num_tokens`` rows need on accelerators.

    Not for at most so many: the columns of few rows are cut into more parts, and more rows may need less.
    For several sizes take the largest.
    """
    check_sizes("mhc_scratch", num_tokens=num_tokens)
    check_sizes("mhc_scratch", 1, hidden=hidden)
    number = max(parts(num_tokens, hidden)[0], hopper_parts(num_tokens, hidden)[0])
    return num_tokens * WIDTH * number


def _workspace(name: str, scratch: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return workspace(name, scratch, mhc_scratch(x.shape[0], x.shape[2]), x, torch.float32)


def mhc_mixes(
    x: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
    scratch: torch.Tensor | None = None,
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
        scratch: [n] f32, at least ``mhc_scratch(...)`` numbers; contents need no preparation.
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
    check_numbers(name, norm_eps=norm_eps, eps=eps)
    check_sizes(name, 1, iters=iters)
    given = given_outputs(name, out, 3)
    out = (
        output(name, given[0], (tokens, streams), torch.float32, x, "out pre"),
        output(name, given[1], (tokens, streams), torch.float32, x, "out post"),
        output(name, given[2], (tokens, streams, streams), torch.float32, x, "out comb"),
    )
    _MIXES(x, fn, base, scale, norm_eps, eps, iters, *out, _workspace(name, scratch, x))
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


def mhc_boundary(
    y: torch.Tensor,
    x: torch.Tensor,
    mixes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    iters: int,
    floor: float = 1e-4,
    mix: bool = True,
    scratch: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Boundary:
    """From one sub-layer's output to the next one's input, reading and writing the streams once.

        x    = mhc_expand(y, x, post, comb)                  with the mixes of the sub-layer that made y
        next = mhc_mixes(x, fn, base, scale)
        norm = rms_norm(mhc_collapse(x, pre), weight);  q = quantize_mxfp8(norm)

    Args:
        y: [num_tokens, hidden] bf16, the sub-layer's output; hidden a multiple of 32.
        x: [num_tokens, streams, hidden] bf16, the streams that entered it.
        mixes: pre [num_tokens, streams] f32, post and comb of that sub-layer, as `mhc_mixes` gives them.
        fn: [streams * (streams + 2), streams * hidden] f32 of the next sub-layer, as in `mhc_mixes`.
        base: [streams * (streams + 2)] f32.
        scale: [3] f32.
        weight: [hidden] bf16 of the next sub-layer's norm.
        norm_eps: added to the mean squares.
        eps: as in `mhc_mixes`.
        iters: as in `mhc_mixes`.
        floor: smallest block maximum that a scale is chosen for.
        mix: False leaves ``next`` out: nothing here needs it, and few rows have their next input in half the
            time. The caller makes it of the new streams, with `mhc_mixes`, before the next boundary.
        scratch: [n] f32, at least ``mhc_scratch(...)`` numbers; contents need no preparation.
        out: [num_tokens, streams, hidden] bf16 for the new streams; may be ``x``.

    Returns:
        Boundary: x (``out`` itself when it was given), pre, post, comb of the next sub-layer (of no rows
        without ``mix``), norm [num_tokens, hidden] bf16 and q, its MXFP8.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run, on an
        accelerator for every batch a row is in, and those of `mhc_mixes` on the new streams.
    Reference: dsv41_reference.hyper.mhc_boundary
    """
    name = "mhc_boundary"
    check_tensor(name, "x", x, (None, None, None), torch.bfloat16, contiguous=True)
    tokens, streams, hidden = x.shape
    check(hidden % 32 == 0, name, "x: hidden a multiple of 32", x)
    outputs, f32 = streams * (streams + 2), torch.float32
    check_tensor(name, "y", y, (tokens, hidden), torch.bfloat16, like=x)
    check(isinstance(mixes, tuple | list) and len(mixes) == 3, name, "mixes: pre, post and comb", mixes)
    pre, post, comb = mixes
    check_tensor(name, "pre", pre, (tokens, streams), f32, like=x, contiguous=True)
    check_tensor(name, "post", post, (tokens, streams), f32, like=x, contiguous=True)
    check_tensor(name, "comb", comb, (tokens, streams, streams), f32, like=x, contiguous=True)
    check_tensor(name, "fn", fn, (outputs, streams * hidden), f32, like=x)
    check_tensor(name, "base", base, (outputs,), f32, like=x)
    check_tensor(name, "scale", scale, (3,), f32, like=x)
    check_tensor(name, "weight", weight, (hidden,), torch.bfloat16, like=x)
    check_numbers(name, norm_eps=norm_eps, eps=eps)
    check_numbers(name, above=True, floor=floor)
    check_sizes(name, 1, iters=iters)
    check_flags(name, mix=mix)
    out = output(name, out, tuple(x.shape), torch.bfloat16, x)
    check(out.is_contiguous(), name, "out: contiguous", f"strides {tuple(out.stride())}")
    rows = tokens if mix else 0
    following = (torch.empty_like(pre[:rows]), torch.empty_like(post[:rows]), torch.empty_like(comb[:rows]))
    norm = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    q = quantised_output(name, MXFP8, None, (tokens, hidden), x)
    _BOUNDARY(
        y, x, post, comb, pre, fn, base, scale, weight, norm_eps, eps, iters, floor, out, *following, norm,
        *q.flat(), _workspace(name, scratch, x if mix else x[:0]),
    )  # fmt: skip
    return Boundary(out, *following, norm, q)
