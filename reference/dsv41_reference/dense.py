"""The steps of a layer over a whole sequence, each as the rounding contract (docs/numerics.md) states it.

A step computes in the accumulation dtype and rounds its result once. Nothing here knows of caches or chunks.
`dsv41_reference.model` and `dsv41_reference.draft` put the steps together.

Names of dimensions: T tokens, S residual streams, E compressed entries, Q queries of a block.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .numerics import bf16, matmul, mean_square, narrow, row_sum, sigmoid, softplus, wide
from .quant import from_mxfp4, from_mxfp8, from_mxfp8_tiles, q4mx, q4nv, q8, swiglu
from .rope import rope_table

Table = tuple[torch.Tensor, torch.Tensor]


def expect(condition: bool, name: str, expected: str, got: Any) -> None:
    """Refuse a caller's mistake in one sentence; a tensor is named by its shape and dtype."""
    if not condition:
        if isinstance(got, torch.Tensor):
            got = f"{list(got.shape)} {str(got.dtype).removeprefix('torch.')}"
        raise ValueError(f"{name}: expected {expected}, got {got}")


@dataclass(frozen=True)
class Scope:
    """The checkpoint tensors under one prefix such as ``layers.3.``; each is read when it is asked for."""

    weights: Mapping[str, torch.Tensor]
    prefix: str = ""

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor as it is stored."""
        name = self.prefix + name
        try:
            return self.weights[name]
        except KeyError:
            raise ValueError(f"Scope: expected weights that hold {name}, got none of that name") from None

    def codes(self, name: str) -> torch.Tensor:
        """A block scale as E8M0 codes, uint8."""
        return self[name].view(torch.uint8)

    def tiles(self, name: str) -> torch.Tensor:
        """A linear's weight in 32 x 32 MXFP8 tiles, [out, in] f32; exact."""
        return from_mxfp8_tiles(self[name + ".weight"], self.codes(name + ".scale"))

    def mxfp4(self, name: str) -> torch.Tensor:
        """An expert's weight, [out, in] f32; exact."""
        return from_mxfp4(self[name + ".weight"], self.codes(name + ".scale"))


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Q8(x) · weightᵀ: [T, in] bf16 and the dequantised [out, in] f32 to [T, out] bf16."""
    return bf16(matmul(q8(x), weight))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """w · (x · rsqrt(mean x² + eps)): [..., width] to bf16 of the same shape."""
    return bf16(wide(weight) * (wide(x) * torch.rsqrt(mean_square(x) + eps)))


def layer_table(cfg: Any, ratio: int, positions: torch.Tensor) -> Table:
    """cos and sin [T, rope_dim / 2] f32: plain for window-only layers (ratio 0), else YaRN."""
    if ratio == 0:
        return rope_table(positions, cfg.rope_dim, cfg.rope_theta)
    yarn = (cfg.rope_factor, cfg.rope_beta_fast, cfg.rope_beta_slow, cfg.rope_original_positions)
    return rope_table(positions, cfg.rope_dim, cfg.compress_rope_theta, *yarn)


def rotate(
    x: torch.Tensor, table: Table, dtype: torch.dtype = torch.bfloat16, inverse: bool = False
) -> torch.Tensor:
    """Turn the interleaved pairs of the last rope_dim values: (a, b) to (a cos − b sin, b cos + a sin).

    Args:
        x: [T, width] or [T, heads, width] bf16.
        table: cos and sin, each [T, rope_dim / 2] f32.
        dtype: what the rotated values are rounded to; the others pass unchanged.
        inverse: turn back, by the negative angle.
    """
    cos, sin = (wide(t) if x.dim() == 2 else wide(t)[:, None] for t in table)
    if inverse:
        sin = -sin
    still = x.shape[-1] - 2 * cos.shape[-1]
    a, b = wide(x[..., still::2]), wide(x[..., still + 1 :: 2])
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([x[..., :still].to(dtype), narrow(turned, dtype)], -1)


def mixes(
    streams: torch.Tensor, scope: Scope, name: str, cfg: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three mixes that a sub-layer derives from the streams before it runs.

        m    = (W x) · rsqrt(mean x² + norm_eps),  x the streams one behind the other
        pre  = σ(m s₀ + b) + mhc_eps;  post = 2 σ(m s₁ + b)
        comb = softmax over k of (m s₂ + b), + mhc_eps, then columns, (rows, columns) · (sinkhorn_iters − 1)

    Args:
        streams: [T, S, hidden] bf16.
        name: ``hc_attn`` or ``hc_ffn``.

    Returns:
        pre [T, S], post [T, S] and comb [T, S, S], f32.
    """
    fn, base, scale = scope[name + "_fn"], wide(scope[name + "_base"]), wide(scope[name + "_scale"])
    num = streams.shape[1]
    x = wide(streams.flatten(1))
    m = matmul(x, fn) * torch.rsqrt(mean_square(x) + cfg.norm_eps)  # [T, S * (2 + S)]
    pre = sigmoid(m[:, :num] * scale[0] + base[:num]) + cfg.mhc_eps
    post = 2 * sigmoid(m[:, num : 2 * num] * scale[1] + base[num : 2 * num])
    logits = (m[:, 2 * num :] * scale[2] + base[2 * num :]).unflatten(-1, (num, num))
    comb = torch.exp(logits - logits.amax(-1, keepdim=True))
    comb = comb / comb.sum(-1, keepdim=True) + cfg.mhc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + cfg.mhc_eps)
    for _ in range(cfg.sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + cfg.mhc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + cfg.mhc_eps)
    return pre.float(), post.float(), comb.float()


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Σ_s pre_s · X_s: [T, S, hidden] bf16 and [T, S] f32 to [T, hidden] bf16."""
    terms = wide(pre)[..., None] * wide(streams)
    return bf16(sum(terms.unbind(1)[1:], terms[:, 0]))


def expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_k = post_k · y + Σ_j comb[j, k] · X_j: [T, hidden] bf16 into [T, S, hidden] bf16."""
    total = wide(post)[..., None] * wide(y)[:, None]
    for j in range(streams.shape[1]):
        total.addcmul_(wide(comb[:, j])[..., None], wide(streams[:, j, None]))
    return bf16(total)


def residual_block(
    streams: torch.Tensor,
    pre: torch.Tensor,
    scope: Scope,
    cfg: Any,
    attention: Callable[[torch.Tensor], torch.Tensor],
    mixture: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer: each sub-layer reads the streams through the pre-mix that the sub-layer before it made.

    Args:
        streams: [T, S, hidden] bf16; pre: [T, S] f32, from the layer before.
        attention, mixture: [T, hidden] bf16, normalised, to [T, hidden] bf16.

    Returns:
        The new streams, and the pre-mix for the next layer.
    """
    for name, norm, sublayer in (("hc_attn", "attn_norm", attention), ("hc_ffn", "ffn_norm", mixture)):
        next_pre, post, comb = mixes(streams, scope, name, cfg)
        y = sublayer(rms_norm(collapse(streams, pre), scope[norm + ".weight"], cfg.norm_eps))
        streams, pre = expand(y, streams, post, comb), next_pre
    return streams, pre


def queries(h: torch.Tensor, scope: Scope, cfg: Any, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed bottleneck [T, q_rank] bf16 and the rotated queries [T, num_heads, head_dim] bf16."""
    qr = rms_norm(linear(h, scope.tiles("attn.wq_a")), scope["attn.q_norm.weight"], cfg.norm_eps)
    q = linear(qr, scope.tiles("attn.wq_b")).unflatten(-1, (cfg.num_heads, cfg.head_dim))
    return qr, rotate(q, table)


def window_rows(h: torch.Tensor, scope: Scope, cfg: Any, table: Table) -> torch.Tensor:
    """Q8(RoPE(RMS(h · wkvᵀ))), both key and value of a token: [T, hidden] to [T, head_dim] bf16 (exact)."""
    row = rms_norm(linear(h, scope.tiles("attn.wkv")), scope["attn.kv_norm.weight"], cfg.norm_eps)
    return q8(rotate(row, table)).to(torch.bfloat16)


def attend(
    q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """One softmax over all visible keys and the sink, which has a weight but no value.

        z = q · k · scale,  M = max(z, sink),  e = exp(z − M)
        out = Σ bf16(e) · k / (Σ e + exp(sink − M))

    Args:
        q: [Q, heads, head_dim] bf16; keys: [n, head_dim], also the values; visible: [Q, n] bool.
        sink: [heads] f32, not scaled.

    Returns:
        [Q, heads, head_dim] bf16.
    """
    sink = wide(sink)[:, None, None]
    z = matmul(q.transpose(0, 1), keys).mul_(scale).masked_fill_(~visible, -torch.inf)  # [heads, Q, n]
    peak = torch.maximum(z.amax(-1, keepdim=True), sink)
    e = z.sub_(peak).exp_()
    total = row_sum(e) + torch.exp(sink - peak)
    e[:, visible] = wide(bf16(e[:, visible]))  # the others are zero; few are visible, and rounding is slow
    return bf16(matmul(e, keys.transpose(0, 1)) / total).transpose(0, 1)


def project_out(o: torch.Tensor, scope: Scope, cfg: Any, table: Table) -> torch.Tensor:
    """Inverse RoPE, wo_a a group of heads (input stays bf16), wo_b: [T, heads, head_dim] to [T, hidden]."""
    o = rotate(o, table, inverse=True).flatten(1).unflatten(-1, (cfg.o_groups, -1)).transpose(0, 1)
    low = bf16(matmul(o, scope.tiles("attn.wo_a").unflatten(0, (cfg.o_groups, -1))))  # [groups, T, o_rank]
    return linear(low.transpose(0, 1).flatten(1), scope.tiles("attn.wo_b"))


def compress(
    h: torch.Tensor, scope: Scope, ratio: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The latents of all complete groups, before RoPE and quantisation.

    Ratio 2: per channel Σ softmax(gate) · kv over tokens 2j and 2j + 1. Ratio 1: kv itself, no gate.

    Returns:
        [T // ratio, head_dim] bf16, and at ratio 2 each token's (kv, gate) [T, 2 * head_dim] f32, else None.
    """
    scope = Scope(scope.weights, scope.prefix + "attn.compressor.")
    kv, carry = matmul(h, scope["wkv.weight"]), None
    if ratio == 1:
        pooled = bf16(kv)
    else:
        carry = torch.cat([kv.float(), matmul(h, scope["wgate.weight"]).float()], -1)
        groups = wide(carry[: h.shape[0] // ratio * ratio]).unflatten(0, (-1, ratio))
        kv, gate = groups.chunk(2, -1)  # [E, ratio, head_dim]
        e = torch.exp(gate - gate.amax(1, keepdim=True))
        pooled = bf16((e / e.sum(1, keepdim=True) * kv).sum(1))
    return rms_norm(pooled, scope["norm.weight"], eps), carry


def compressed_rows(latent: torch.Tensor, table: Table, round_rope: bool) -> torch.Tensor:
    """Q4nv(RoPE(latent)): [E, head_dim] bf16 (exact)."""
    return q4nv(rotate(latent, table, torch.bfloat16 if round_rope else torch.float32)).to(torch.bfloat16)


def index_keys(latent: torch.Tensor, scope: Scope, table: Table, eps: float) -> torch.Tensor:
    """Q4mx(RoPE(RMS(latent · wkᵀ))): [E, index_dim] bf16 (exact)."""
    key = bf16(matmul(latent, scope["attn.indexer.wk.weight"]))
    return q4mx(rotate(rms_norm(key, scope["attn.indexer.k_norm.weight"], eps), table)).to(torch.bfloat16)


def index_queries(
    h: torch.Tensor, qr: torch.Tensor, scope: Scope, cfg: Any, table: Table
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4mx queries [T, index_heads, index_dim] bf16 (exact) and head weights [T, index_heads] f32."""
    q = linear(qr, scope.tiles("attn.indexer.wq_b")).unflatten(-1, (cfg.index_heads, cfg.index_dim))
    weight = wide(bf16(matmul(h, scope["attn.indexer.weights_proj.weight"])))
    weight = weight * cfg.index_dim**-0.5 * cfg.index_heads**-0.5
    return q4mx(rotate(q, table)).to(torch.bfloat16), weight.float()


def index_scores(q: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Σ_h ω_h · relu(q_h · k): [Q, heads, dim], [Q, heads] and [n, dim] to [Q, n] f32."""
    total = wide(q.new_zeros(q.shape[0], keys.shape[0]))
    for h in range(q.shape[1]):
        total += wide(weight[:, h, None]) * torch.relu(matmul(q[:, h], keys))
    return total.float()


def top_mask(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest of each row of [Q, n], as bool: ties to the lower index, never NaN or −inf."""
    count = min(count, scores.shape[-1])
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    least = scores.topk(count).values[:, -1:]
    above, equal = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & (scores > -torch.inf)


def candidate_mask(scores: torch.Tensor, num_visible: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Entries of the ``count`` best blocks of ``size`` neighbours; a block scores as its best visible entry.

    The block of the query's newest entry is always among them, ties go to the lower block.

    Args:
        scores: [Q, n] f32, −inf where the query does not see the entry; num_visible: [Q] int.

    Returns:
        [Q, n] bool.
    """
    n = scores.shape[1]
    num_blocks = -(-n // size)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    padded = torch.nn.functional.pad(scores, (0, num_blocks * size - n), value=-torch.inf)
    best = padded.unflatten(1, (num_blocks, size)).amax(-1)  # [Q, blocks]
    newest = torch.arange(num_blocks) == ((num_visible - 1).div(size, rounding_mode="floor"))[:, None]
    kept = top_mask(best.masked_fill(newest, torch.inf), count)
    return kept.repeat_interleave(size, 1)[:, :n]


def index_lists(selected: torch.Tensor, top_k: int) -> torch.Tensor:
    """A mask [T, E] of at most top_k entries a row, ascending: [T, top_k] int64, −1 after the last."""
    lists = torch.full((len(selected), top_k), -1, dtype=torch.int64)
    row, entry = selected.nonzero(as_tuple=True)
    slot = selected.cumsum(1)[row, entry] - 1
    lists[row, slot] = entry
    return lists


def route(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, cfg: Any, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts a token visits, and with what weight.

        z = x · gateᵀ / temperature,  a = sqrt(softplus(z));  the top_k largest a + bias, ties to the lower id
        weight = a / (Σ chosen a + 1e-20) · route_scale

    Args:
        x: [T, hidden] bf16; bias: [T, experts] or [experts] f32, for the choice only.

    Returns:
        ids [T, top_k] int64 by descending a + bias, and weights [T, top_k] f32.
    """
    z = (matmul(x, gate) / cfg.route_temperature).float()
    a = torch.sqrt(softplus(wide(z)))
    ids = torch.sort(a + wide(bias), dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = a.gather(1, ids)
    return ids, (chosen / (row_sum(chosen) + 1e-20) * cfg.route_scale).float()


def expert(
    x: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    weight: torch.Tensor | None,
    limit: float,
):
    """w2(silu(min(w1 x, limit)) · clamp(w3 x, ±limit) · weight): [n, hidden] bf16 to the same."""
    return linear(bf16(swiglu(linear(x, w1), linear(x, w3), weight, limit)), w2)


def mixture(
    x: torch.Tensor, scope: Scope, cfg: Any, top_k: int, image: torch.Tensor | None = None
) -> torch.Tensor:
    """Routed experts, added in the order of the choice, and the shared expert: [T, hidden] bf16 to the same.

    Args:
        image: [T] bool, tokens that are routed by ``bias_vl``; None where there are none.
    """
    scope = Scope(scope.weights, scope.prefix + "ffn.")
    bias = scope["gate.bias"]
    if image is not None:
        bias = torch.where(image[:, None], scope["gate.bias_vl"], bias)
    ids, weights = route(x, scope["gate.weight"], bias, cfg, top_k)
    routed = x.new_zeros(*ids.shape, x.shape[1])  # [T, top_k, hidden] bf16
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        w1, w3, w2 = (scope.mxfp4(f"experts.{e}.{w}") for w in ("w1", "w3", "w2"))
        routed[token, slot] = expert(x[token], w1, w3, w2, weights[token, slot], cfg.swiglu_limit)
    w1, w3, w2 = (scope.tiles(f"shared_experts.{w}") for w in ("w1", "w3", "w2"))
    total = wide(routed[:, 0])
    for slot in range(1, top_k):
        total = total + wide(routed[:, slot])
    return bf16(total + wide(expert(x, w1, w3, w2, None, cfg.swiglu_limit)))


# Keyed by layer and number of classes: the released tables do not depend on NumPy's random stream.
_MULTIPLIERS = {
    (1, 99_092): (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (14, 99_092): (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}


def engram_multipliers(layer: int, num_classes: int, max_ngram: int) -> tuple[int, ...]:
    """Odd factors of a token and the max_ngram − 1 before it: 2r + 1, r < B drawn from seed 10007 · layer.

    B = max(1, ⌊⌊(2⁶³ − 1) / num_classes⌋ / 2⌋), so that no product leaves the positive int64.
    """
    if max_ngram == 4 and (layer, num_classes) in _MULTIPLIERS:
        return _MULTIPLIERS[layer, num_classes]
    import numpy

    bound = max(1, (2**63 - 1) // num_classes // 2)
    drawn = numpy.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=numpy.int64)
    return tuple(2 * int(r) + 1 for r in drawn)


def engram_primes(base: int, num_tables: int, columns: int) -> list[list[int]]:
    """The first num_tables · columns primes from ``base`` on; each table goes on where the last one ended."""

    def primes() -> Iterator[int]:
        n = max(base, 2)
        while True:
            if all(n % d for d in range(2, int(n**0.5) + 1)):
                yield n
            n += 1

    endless = primes()
    return [[next(endless) for _ in range(columns)] for _ in range(num_tables)]


def engram_rows(
    classes: torch.Tensor, dead: torch.Tensor, pad: int, multipliers: tuple[int, ...], primes: list[int]
) -> torch.Tensor:
    """Table rows of each token, orders 2, 3, ... outside and heads inside.

    Order n hashes the token and the n − 1 before it: XOR of class · multiplier, modulo the column's prime,
    plus the sum of the primes before it. A dead token, and what lies before position 0, count as ``pad``, and
    so does everything older.

    Args:
        classes: [T] int64; dead: [T] bool; pad: class of the pad token.

    Returns:
        [T, columns] int64; a dead token has rows as well.
    """
    num_tokens, heads = len(classes), len(primes) // (len(multipliers) - 1)
    offsets = [sum(primes[:c]) for c in range(len(primes))]
    blocked = torch.zeros(num_tokens, dtype=torch.bool)
    mixed = torch.zeros(num_tokens, dtype=torch.int64)
    rows = []
    for back, multiplier in enumerate(multipliers):
        source = torch.arange(num_tokens) - back
        blocked = blocked | (source < 0) | dead[source.clamp(min=0)]
        mixed = mixed ^ (torch.where(blocked, pad, classes[source.clamp(min=0)]) * multiplier)
        if back:
            columns = range(heads * (back - 1), heads * back)
            rows += [mixed % primes[c] + offsets[c] for c in columns]
    return torch.stack(rows, -1)


def engram_gate(
    streams: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    factor: torch.Tensor,
    dead: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Add the value to each stream as far as the stream agrees with its key.

        u_s = Σ X_s factor_s K_s · rsqrt(mean X_s² + eps) · rsqrt(mean K_s² + eps) / sqrt(hidden)
        X_s + σ(copysign(sqrt(max(|u_s|, 1e-6)), u_s)) · V

    Args:
        streams, keys: [T, S, hidden] bf16; value: [T, hidden] bf16; factor: [S, hidden].
        dead: [T] bool, rows that come back unchanged.

    Returns:
        [T, S, hidden] bf16.
    """
    u = row_sum(wide(streams) * wide(factor) * wide(keys))
    u = u * torch.rsqrt(mean_square(streams) + eps) * torch.rsqrt(mean_square(keys) + eps)
    u = u / streams.shape[-1] ** 0.5
    gate = sigmoid(torch.copysign(torch.sqrt(u.abs().clamp(min=1e-6)), u))
    return torch.where(dead[:, None, None], streams, bf16(wide(streams) + gate * wide(value)[:, None]))


def engram(streams: torch.Tensor, rows: torch.Tensor, scope: Scope, eps: float) -> torch.Tensor:
    """Read the rows, project them to a key a stream and one value, gate: [T, S, hidden] bf16 to the same.

    Args:
        rows: [T, columns] int64, −1 for dead tokens.
    """
    dead, at = rows[:, 0] < 0, rows.clamp(min=0)
    values = scope["embed.weight"].view(torch.uint8)[at].view(torch.float8_e4m3fn)
    read = from_mxfp8(values, scope.codes("embed.scale")[at]).masked_fill(dead[:, None, None], 0)
    kv = linear(read.to(torch.bfloat16).flatten(1), scope.tiles("wkv"))
    num, hidden = streams.shape[1:]
    keys, value = kv[:, : num * hidden].unflatten(-1, (num, hidden)), kv[:, num * hidden :]
    factor = wide(scope["q_weight"]) * wide(scope["k_weight"])
    return engram_gate(streams, keys, value, factor, dead, eps)


def embed(
    tokens: torch.Tensor, weights: Mapping[str, torch.Tensor], num_streams: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal streams [T, S, hidden] bf16 and the first pre-mix [T, S] f32, which takes stream 0."""
    row = Scope(weights)["embed.weight"][tokens]
    pre = torch.zeros(len(tokens), num_streams)
    pre[:, 0] = 1
    return row[:, None].repeat(1, num_streams, 1), pre


def head_logits(h: torch.Tensor, head: torch.Tensor, block: int) -> torch.Tensor:
    """h · headᵀ: [n, hidden] bf16 to [n, vocab] f32, a slice of the vocabulary at a time to bound memory."""
    logits = torch.empty(h.shape[0], head.shape[0])
    for v in range(0, head.shape[0], 8192):
        part = wide(head[v : v + 8192])
        for i in range(0, h.shape[0], block):
            logits[i : i + block, v : v + 8192] = matmul(h[i : i + block], part)
    return logits
