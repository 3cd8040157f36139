"""Engram: hash n-grams of token ids to table rows, read the rows, gate what they say into the streams."""

import itertools
from typing import Any

import torch

from ..._op import (
    Kernel,
    Op,
    check,
    check_flags,
    check_numbers,
    check_sizes,
    check_tensor,
    check_values,
    output,
)
from ...formats import E4M3, E8M0
from ..quant.api import unaligned


def _one_tile(x: torch.Tensor, *_: Any) -> str | None:
    return None if x.shape[2] <= 16384 else f"built for rows of up to 16384, not {x.shape[2]}"


def _gate_fits(
    x: torch.Tensor,
    kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    dead: Any,
    eps: float,
    out: torch.Tensor,
) -> str | None:
    if x.shape[1] != 4 or x.shape[2] % 256 or x.shape[2] > 5120:
        return f"built for 4 streams of a multiple of 256 up to 5120, not {x.shape[1]} of {x.shape[2]}"
    return unaligned(x=x, kv=kv, q_weight=q, k_weight=k, out=out)


def _whole(tokens: Any, positions: Any, cu: Any, lookback: Any, classes: Any, *constants: Any) -> str | None:
    whole = all(x.is_contiguous() for x in constants[:3])
    return None if whole else "multipliers, primes or offsets are strided"


_HASH = Op(
    "engram_hash(Tensor tokens, Tensor positions, Tensor cu_seqlens, Tensor? lookback, Tensor token_classes,"
    " Tensor multipliers, Tensor primes, Tensor offsets, int pad_token, int image_token, bool mask_dead,"
    " Tensor(a!) out) -> ()",
    reference="dsv41_reference.engram:engram_hash",
    package=__package__,
    kernels=(
        Kernel("triton_cuda", "cuda", needs=("triton",), supports=_whole),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=_whole),
    ),
)
_LOOKUP = Op(
    "engram_lookup(Tensor rows, Tensor values, Tensor scale, Tensor(a!) out) -> ()",
    reference="dsv41_reference.engram:engram_lookup",
    package=__package__,
    kernels=(
        Kernel("triton_cuda", "cuda", needs=("triton",)),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu")),
    ),
)
_GATE = Op(
    "engram_gate(Tensor x, Tensor kv, Tensor q_weight, Tensor k_weight, Tensor? dead, float eps,"
    " Tensor(a!) out) -> ()",
    reference="dsv41_reference.engram:engram_gate",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), archs=(90,), supports=_gate_fits),
        Kernel("triton_cuda", "cuda", needs=("triton",), supports=_one_tile),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu")),
    ),
)
_INTEGERS = (torch.int32, torch.int64)


def engram_hash(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens: torch.Tensor,
    token_classes: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    *,
    lookback: torch.Tensor | None = None,
    pad_token: int = 2,
    image_token: int = -1,
    mask_dead: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Table rows of every token's n-grams, for all Engram layers.

        blocked[k] = position - k < 0, or the token there is an image token, or blocked[k-1]
        a[k]   = a[k-1] xor class(pad_token if blocked[k] else id at position - k) * multipliers[layer, k]
        out[c] = a[1 + c // heads] mod primes[layer, c] + offsets[layer, c]

    Args:
        tokens: [num_tokens] int32 or int64 raw ids, the rows of all requests one after the other.
        positions: [num_tokens] int32 or int64, position in the request; consecutive within a request.
        cu_seqlens: [num_requests + 1] int32, first row of each request; rows past the last are padding.
        token_classes: [vocab] int32, class of each id (`dsv41.layers.engram.TokenMap`).
        multipliers: [num_layers, orders] int64, odd (`dsv41.layers.engram.EngramSpec`).
        primes: [num_layers, columns] int64, columns = (orders - 1) * heads.
        offsets: [num_layers, columns] int64, first table row of a column.
        lookback: [num_requests, orders - 1] int32 or int64, raw ids before a request's first row, oldest
            first, -1 before position 0; None when every request starts at position 0.
        pad_token: raw id whose class stands for a blocked position.
        image_token: raw id that blocks, -1 for none.
        mask_dead: give image tokens themselves row -1; else the rows of an n-gram that is all padding.
        out: [num_tokens, num_layers, columns] int32 to write into.

    Returns:
        [num_tokens, num_layers, columns] int32; ``out`` itself when it was given. Padding rows are -1.

    Contract: no host sync unless DSV41_CHECK=1; graph-safe; allocates only what is None; the same bits for
        every way to cut a request into chunks. An id out of range or unknown at a valid position is an error
        under DSV41_CHECK=1 and blocks otherwise.
    Reference: dsv41_reference.engram.engram_hash
    """
    name = "engram_hash"
    check_tensor(name, "tokens", tokens, (None,), *_INTEGERS)
    count = tokens.shape[0]
    check_tensor(name, "positions", positions, (count,), *_INTEGERS, like=tokens)
    check_tensor(name, "cu_seqlens", cu_seqlens, (None,), torch.int32, like=tokens)
    check(cu_seqlens.shape[0] >= 1, name, "cu_seqlens: [num_requests + 1] int32", cu_seqlens)
    check_tensor(name, "token_classes", token_classes, (None,), torch.int32, like=tokens)
    check_tensor(name, "multipliers", multipliers, (None, None), torch.int64, like=tokens)
    layers, orders = multipliers.shape
    check(orders >= 2, name, "multipliers: [num_layers, orders] with 2 orders or more", multipliers)
    check_tensor(name, "primes", primes, (layers, None), torch.int64, like=tokens)
    columns = primes.shape[1]
    whole = columns % (orders - 1) == 0
    check(whole, name, f"primes: columns a multiple of {orders - 1}, the number of orders", primes)
    check_tensor(name, "offsets", offsets, (layers, columns), torch.int64, like=tokens)
    if lookback is not None:
        requests = cu_seqlens.shape[0] - 1
        check_tensor(name, "lookback", lookback, (requests, orders - 1), *_INTEGERS, like=tokens)
    vocab = token_classes.shape[0]
    check_sizes(name, 0, vocab - 1, pad_token=pad_token)
    check_sizes(name, -1, image_token=image_token)
    check_flags(name, mask_dead=mask_dead)
    out = output(name, out, (count, layers, columns), torch.int32, tokens)
    if check_values():
        _check_ids(tokens, positions, cu_seqlens, lookback, orders, vocab)
    _HASH(
        tokens, positions, cu_seqlens, lookback, token_classes, multipliers, primes, offsets,
        pad_token, image_token, mask_dead, out,
    )  # fmt: skip
    return out


def _check_ids(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lookback: torch.Tensor | None,
    orders: int,
    vocab: int,
) -> None:
    """The checks of values under DSV41_CHECK=1, on the host."""
    name = "engram_hash"
    cu, place, ids = cu_seqlens.tolist(), positions.cpu().long(), tokens.cpu()
    rising = cu[0] == 0 and cu[-1] <= len(ids) and all(a <= b for a, b in itertools.pairwise(cu))
    check(rising, name, f"cu_seqlens: rising from 0 to at most {len(ids)}", cu)
    used = ids[: cu[-1]]
    bad = used[(used < 0) | (used >= vocab)]
    check(not bad.numel(), name, f"tokens: ids below {vocab}", bad[:1].tolist())
    known = torch.full((len(cu) - 1, orders - 1), -1) if lookback is None else lookback.cpu().long()
    for request, (first, end) in enumerate(itertools.pairwise(cu)):
        if first == end:
            continue
        start = int(place[first])
        consecutive = start >= 0 and torch.equal(place[first:end], torch.arange(start, start + end - first))
        check(
            consecutive, name, f"positions: consecutive in request {request}", place[first:end].tolist()[:8]
        )
        needed = known[request, max(orders - 1 - start, 0) :]
        there = bool(((needed >= 0) & (needed < vocab)).all())
        wanted = f"lookback: the {len(needed)} ids before position {start} of request {request}"
        check(there, name, wanted, known[request].tolist())


def engram_lookup(
    rows: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Read and dequantise table rows, side by side.

        out[t] = concat over c of values[rows[t, c]] * scale[rows[t, c]], a negative row reads as zeros

    Args:
        rows: [num_tokens, columns] int32; may be one layer's slice of `engram_hash`.
        values: [num_rows, head_dim] float8_e4m3fn, head_dim a multiple of 32; with ``rows`` on a GPU also in
            pinned host memory.
        scale: [num_rows, head_dim/32] float8_e8m0fnu, beside ``values``.
        out: [num_tokens, columns * head_dim] bf16 to write into.

    Returns:
        [num_tokens, columns * head_dim] bf16; ``out`` itself when it was given. Exact for scale codes 3..246.

    Contract: no host sync unless DSV41_CHECK=1; graph-safe; allocates only what is None; 64-bit addresses. A
        row past the table, or a scale byte 255 in a row that is read, is an error under DSV41_CHECK=1; else
        the first reads as zeros and the second as NaN.
    Reference: dsv41_reference.engram.engram_lookup
    """
    name = "engram_lookup"
    check_tensor(name, "rows", rows, (None, None), torch.int32)
    # The schema's tensors may live in two places: a GPU reads pinned host memory where it is.
    away = rows.device.type == "cuda" and isinstance(values, torch.Tensor) and values.device.type == "cpu"
    pinned = away and values.is_pinned()
    place = None if pinned else rows
    check_tensor(name, "values", values, (None, None), E4M3, like=place, contiguous=True)
    count, width = values.shape
    check(width % 32 == 0, name, "values: head_dim a multiple of 32", values)
    check_tensor(name, "scale", scale, (count, width // 32), E8M0, like=values, contiguous=True)
    check(not pinned or scale.is_pinned(), name, "scale: pinned, as values", "pageable memory")
    out = output(name, out, (rows.shape[0], rows.shape[1] * width), torch.bfloat16, rows)
    codes = scale.view(torch.uint8)
    if check_values():
        check_rows(name, rows, codes)
    _LOOKUP(rows, values, codes, out)
    return out


def check_rows(name: str, rows: torch.Tensor, codes: torch.Tensor) -> None:
    """Refuse rows past the table and scale bytes of 255 in the rows that are read; syncs with the device.

    Args:
        name: of the caller, for the error sentence.
        rows: [num_tokens, columns] int32.
        codes: [num_rows, groups] uint8.
    """
    read = rows[rows >= 0].long().to(codes.device)
    past = read[read >= codes.shape[0]]
    check(not past.numel(), name, f"rows: below {codes.shape[0]}", past[:1].tolist())
    bad = read[(codes[read] == 255).any(-1)]
    check(not bad.numel(), name, "scale: no byte 255 in the rows that are read", f"row {bad[:1].tolist()}")


def engram_gate(
    x: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    dead: torch.Tensor | None = None,
    eps: float = 1e-20,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the memory's value to every stream, as far as the stream asks for it.

        u[c] = <x[c] * q_weight[c] * k_weight[c], key[c]> * rsqrt(mean x[c]^2 + eps)
               * rsqrt(mean key[c]^2 + eps) / sqrt(hidden)
        out[c] = x[c] + sigmoid(copysign(sqrt(max(|u[c]|, 1e-6)), u[c])) * value, rounded once

    Args:
        x: [num_tokens, num_streams, hidden] bf16.
        kv: [num_tokens, (num_streams + 1) * hidden] bf16, the key of every stream, then the shared value.
        q_weight: [num_streams, hidden] bf16.
        k_weight: [num_streams, hidden] bf16.
        dead: [num_tokens] bool, rows that are returned as they are (image tokens), or None.
        eps: added to the mean squares.
        out: [num_tokens, num_streams, hidden] bf16 to write into; may be ``x``.

    Returns:
        [num_tokens, num_streams, hidden] bf16; ``out`` itself when it was given. A dead row is ``x`` bit for
        bit, also when its ``kv`` is NaN.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.engram.engram_gate
    """
    name = "engram_gate"
    check_tensor(name, "x", x, (None, None, None), torch.bfloat16)
    count, streams, hidden = x.shape
    check_tensor(name, "kv", kv, (count, (streams + 1) * hidden), torch.bfloat16, like=x)
    check_tensor(name, "q_weight", q_weight, (streams, hidden), torch.bfloat16, like=x)
    check_tensor(name, "k_weight", k_weight, (streams, hidden), torch.bfloat16, like=x)
    check_numbers(name, eps=eps)
    if dead is not None:
        check_tensor(name, "dead", dead, (count,), torch.bool, like=x)
    out = output(name, out, (count, streams, hidden), torch.bfloat16, x)
    _GATE(x, kv, q_weight, k_weight, dead, eps, out)
    return out
