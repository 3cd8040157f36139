"""Engram: rows of n-gram memory chosen by a hash of token ids, their lookup, and the gate."""

import math

import torch

from .numerics import mean_square, narrow, row_sum, sigmoid, wide
from .quant import from_mxfp8

_CLAMP = 1e-6


def ngram_ids(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lookback: torch.Tensor | None,
    orders: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids that the n-grams of every row are made of: its own and those of the positions before.

    Args:
        tokens: [num_tokens] int32 or int64, the rows of all requests one after the other.
        positions: [num_tokens] position of a row in its request, consecutive in a request.
        cu_seqlens: [num_requests + 1] int32.
        lookback: [num_requests, orders - 1] ids before a request's first row, oldest first, -1 for none.
        orders: how many ids a row looks at.

    Returns:
        ids [num_tokens, orders] int64, column k the id at position - k or -1 where it is unknown; and bool
        [num_tokens, orders], whether the position exists: not before the start nor past ``cu_seqlens[-1]``.
    """
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    cu = cu_seqlens.long()
    requests = cu.shape[0] - 1
    back = torch.arange(orders, device=tokens.device)
    exists = (positions.long()[:, None] >= back) & (rows < cu[-1])[:, None]
    if requests == 0 or tokens.shape[0] == 0:
        return exists.long() - 1, exists & False
    request = torch.searchsorted(cu[1:].contiguous(), rows, right=True).clamp(max=requests - 1)
    place = (rows - cu[request])[:, None] - back
    ids = tokens.long()[(rows[:, None] - back).clamp(min=0)]
    if lookback is None or orders == 1:
        before = torch.full_like(ids, -1)
    else:
        before = lookback.long()[request[:, None], (place + orders - 1).clamp(0, orders - 2)]
    return torch.where(exists, torch.where(place >= 0, ids, before), -1), exists


def hash_classes(
    classes: torch.Tensor,
    blocked: torch.Tensor,
    pad_class: torch.Tensor | int,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """The table rows of n-grams that are given as compressed ids.

        a[k]   = a[k-1] xor (pad if anything at lookback 0..k is blocked else class[k]) * multiplier[k]
        row[c] = a[order of c] mod prime[c] + offset[c]

    Args:
        classes: [num_tokens, orders] int64, column k the class at position - k.
        blocked: [num_tokens, orders] bool, true where there is none; everything older is blocked too.
        pad_class: class of the padding token.
        multipliers: [num_layers, orders] int64.
        primes, offsets: [num_layers, columns] int64, orders 2, 3, ... outer and heads inner.

    Returns:
        [num_tokens, num_layers, columns] int32. Products stay below 2^63 for every class that the multipliers
        were made for, so signed arithmetic is exact and the remainder of a non-negative number.
    """
    sticky = blocked.long().cumsum(-1) > 0
    classes = torch.where(sticky, torch.as_tensor(pad_class, device=classes.device).long(), classes.long())
    terms = classes[:, None] * multipliers
    mixed, orders = [terms[..., 0]], multipliers.shape[-1]
    for k in range(1, orders):
        mixed.append(mixed[-1] ^ terms[..., k])
    heads = primes.shape[-1] // (orders - 1)
    keys = torch.stack(mixed[1:], -1).repeat_interleave(heads, -1)
    return (keys % primes + offsets).to(torch.int32)


def engram_hash(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lookback: torch.Tensor | None,
    token_classes: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad_token: int,
    image_token: int,
    mask_dead: bool,
    out: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.engram_hash``."""
    ids, exists = ngram_ids(tokens, positions, cu_seqlens, lookback, multipliers.shape[-1])
    vocab = token_classes.shape[0]
    blocked = ~exists | (ids < 0) | (ids >= vocab) | (ids == image_token)
    classes = token_classes.long()[ids.clamp(0, vocab - 1)]
    rows = hash_classes(classes, blocked, token_classes[pad_token], multipliers, primes, offsets)
    absent = blocked[:, 0] if mask_dead else ~exists[:, 0]
    out.copy_(torch.where(absent[:, None, None], -1, rows))


def engram_lookup(rows: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Reference of ``dsv41.ops.engram_lookup``."""
    there = (rows >= 0) & (rows < values.shape[0])
    index = torch.where(there, rows, 0).long()
    if values.shape[0] == 0:
        out.zero_()
        return
    # Bytes are gathered: not every device indexes 8-bit floats.
    picked = values.view(torch.uint8)[index].view(values.dtype)
    read = from_mxfp8(picked, scale[index])
    out.copy_(torch.where(there[..., None], read, 0.0).flatten(1))


def gate_scores(x: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """How much each stream asks for its key: the product of both as unit vectors, weighted.

    Args:
        x, keys: [num_tokens, num_streams, hidden], weight: [num_streams, hidden].

    Returns:
        [num_tokens, num_streams, 1] in the accumulation dtype, not rounded.
    """
    x, keys = wide(x), wide(keys)
    unit = torch.rsqrt(mean_square(x) + eps) * torch.rsqrt(mean_square(keys) + eps)
    return row_sum(x * wide(weight) * keys) * unit / math.sqrt(x.shape[-1])


def gate_value(u: torch.Tensor) -> torch.Tensor:
    """sigmoid(copysign(sqrt(max(|u|, 1e-6)), u)): steep at zero, never 1/2 itself."""
    return sigmoid(torch.copysign(u.abs().clamp(min=_CLAMP).sqrt(), u))


def engram_gate(
    x: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    dead: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.engram_gate``."""
    streams, hidden = x.shape[1:]
    keys, value = kv.unflatten(-1, (streams + 1, hidden)).split((streams, 1), 1)
    gate = gate_value(gate_scores(x, keys, wide(q_weight) * wide(k_weight), eps))
    y = narrow(wide(x) + gate * wide(value), x.dtype)
    out.copy_(y if dead is None else torch.where(dead[:, None, None], x, y))
