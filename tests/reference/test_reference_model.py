"""The dense model by its symmetries: causality, block size, image tokens, selections that take all."""

import dataclasses

import pytest
import torch
from dsv41_reference.model import V41Reference

from dsv41.config import V41FlashConfig

pytestmark = pytest.mark.usefixtures("float64")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors differ in a bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def test_the_trace_holds_what_caches_must_hold(small):
    cfg, num_tokens = small.cfg, len(small.tokens)
    expected = {f"{kind}.{layer}" for kind in ("window", "hidden") for layer in range(cfg.num_layers)}
    expected |= {f"{kind}.{layer}" for kind in ("compressed", "index_key") for layer in cfg.kv_sources}
    expected |= {f"carry.{layer}" for layer in cfg.kv_sources if cfg.compress_ratios[layer] == 2}
    expected |= {f"selected.{layer}" for layer in cfg.index_sources}
    expected |= {f"engram_rows.{layer}" for layer in cfg.engram.layers}
    expected |= {f"target.{layer}" for layer in cfg.draft.target_layers}
    assert small.trace.keys() == expected
    shapes = {
        "window.0": ([num_tokens, cfg.head_dim], torch.bfloat16),
        "compressed.2": ([num_tokens // 2, cfg.head_dim], torch.bfloat16),
        "index_key.4": ([num_tokens, cfg.index_dim], torch.bfloat16),
        "carry.2": ([num_tokens, 2 * cfg.head_dim], torch.float32),
        "selected.5": ([num_tokens, cfg.index_top_k], torch.int64),
        "engram_rows.3": ([num_tokens, cfg.engram.columns], torch.int64),
        "target.5": ([num_tokens, cfg.hidden], torch.bfloat16),
        "hidden.5": ([num_tokens, cfg.num_streams, cfg.hidden], torch.bfloat16),
    }
    for name, (shape, dtype) in shapes.items():
        assert (list(small.trace[name].shape), small.trace[name].dtype) == (shape, dtype), name
    assert small.logits.shape == (num_tokens, cfg.vocab_size) and small.logits.dtype == torch.float32
    assert small.logits.isfinite().all() and small.logits.std() > 0.1


@pytest.mark.parametrize("length", range(0, 45, 4))
def test_any_prefix_gives_the_same_rows(small, length):
    trace: dict[str, torch.Tensor] = {}
    logits = small.model().forward(small.tokens[:length], trace=trace)
    assert torch.equal(logits, small.logits[:length])
    for name, value in trace.items():
        assert torch.equal(value, small.trace[name][: len(value)]), name


def test_a_changed_token_changes_no_earlier_row(small):
    at = 17
    tokens = small.tokens.clone()
    tokens[at] = (tokens[at] + 1) % small.cfg.image_token
    logits = small.model().forward(tokens)
    assert torch.equal(logits[:at], small.logits[:at])
    # Every later row feels it: through the window, the compressed rows, or both.
    assert (logits[at:] != small.logits[at:]).any(1).all()


@pytest.mark.parametrize("block", [1, 2, 7, 16, 44, 45, 1000])
def test_the_block_size_is_not_seen(small, block):
    trace: dict[str, torch.Tensor] = {}
    logits = small.model().forward(small.tokens, trace=trace, block=block)
    assert torch.equal(logits, small.logits)
    assert same(trace, small.trace) == []


def test_real_record_widths_give_the_same_rows_in_blocks():
    from reference_weights import random_classes, random_tokens, random_weights

    cfg = V41FlashConfig.tiny()
    model = V41Reference(cfg, random_weights(cfg), random_classes(cfg))
    tokens = random_tokens(cfg, 61, images=True)
    whole, parts, prefix = {}, {}, {}
    logits = model.forward(tokens, trace=whole)
    assert torch.equal(model.forward(tokens, trace=parts, block=9), logits) and same(whole, parts) == []
    assert torch.equal(model.forward(tokens[:38], trace=prefix), logits[:38])


def test_logits_of_chosen_rows(small):
    rows = [44, 0, 7, 7]
    assert torch.equal(small.model().forward(small.tokens, rows=rows), small.logits[rows])
    at = torch.tensor(rows, dtype=torch.int32)
    assert torch.equal(small.model().forward(small.tokens.int(), rows=at), small.logits[rows])
    assert small.model().forward(small.tokens, rows=[]).shape == (0, small.cfg.vocab_size)


def test_an_indexer_that_takes_all_has_no_effect(small):
    """With more selections than entries its queries, keys and weights are irrelevant."""
    wide = {"index_top_k": 64, "candidate_blocks": 64}
    logits = small.model(**wide).forward(small.tokens)
    other = {
        name: tensor.flip(0)
        for name, tensor in small.weights.items()
        if ".indexer.wq_b.weight" in name or ".indexer.wk." in name or ".weights_proj." in name
    }
    assert torch.equal(small.model(other, **wide).forward(small.tokens), logits)
    assert not torch.equal(small.model(other).forward(small.tokens), small.logits)
    assert not torch.equal(logits, small.logits)


def test_image_tokens_are_routed_by_their_own_bias(small):
    cfg = small.cfg
    first = int((small.tokens >= cfg.image_token).nonzero()[0])
    other = {
        name: tensor.flip(0) for name, tensor in small.weights.items() if name.endswith("ffn.gate.bias_vl")
    }
    logits = small.model(other).forward(small.tokens)
    assert torch.equal(logits[:first], small.logits[:first])
    assert not torch.equal(logits[first], small.logits[first])
    text = small.tokens.clamp(max=cfg.image_token - 1)
    assert torch.equal(small.model(other).forward(text), small.model().forward(text))


def test_only_the_image_token_closes_the_engram(small):
    cfg, tokens = small.cfg, small.tokens
    dead = tokens == cfg.image_token
    assert dead.any() and ((tokens > cfg.image_token) & (tokens < cfg.image_token_end)).any()
    for layer in cfg.engram.layers:
        assert torch.equal(
            small.trace[f"engram_rows.{layer}"] < 0, dead[:, None].expand(-1, cfg.engram.columns)
        )
    # The table feeds no dead token of the first Engram layer: its row before attention is what it was.
    layer = cfg.engram.layers[0]
    name = f"layers.{layer}.engram.embed.weight"
    other = small.weights[name].view(torch.uint8).flip(0).view(torch.float8_e4m3fn)
    trace: dict[str, torch.Tensor] = {}
    small.model({name: other}).forward(tokens, trace=trace)
    # Windows are made from each token's own row, through the pre-mix that was carried in.
    assert torch.equal(trace[f"window.{layer}"][dead], small.trace[f"window.{layer}"][dead])
    assert (trace[f"window.{layer}"][~dead] != small.trace[f"window.{layer}"][~dead]).any(1).all()


def test_the_carry_is_the_pair_behind_the_pooled_row(small):
    """Without RMS weights in the way: equal gates pool to the mean, a dominant gate to its own token."""
    from dsv41_reference.dense import Scope, compress

    cfg = small.cfg
    h = torch.randn(6, cfg.hidden).bfloat16()
    weights = {
        "attn.compressor.wkv.weight": torch.eye(cfg.head_dim, cfg.hidden).bfloat16(),
        "attn.compressor.wgate.weight": torch.zeros(cfg.head_dim, cfg.hidden).bfloat16(),
        "attn.compressor.norm.weight": torch.ones(cfg.head_dim).bfloat16(),
    }
    latent, carry = compress(h, Scope(weights), 2, cfg.norm_eps)
    kv = h[:, : cfg.head_dim].double()
    assert carry is not None and torch.equal(carry[:, : cfg.head_dim].double(), kv)
    pooled = ((kv[0::2] + kv[1::2]) / 2).bfloat16().double()
    expected = pooled * pooled.square().mean(-1, keepdim=True).rsqrt()
    torch.testing.assert_close(latent.double(), expected, rtol=2**-8, atol=0)


def test_float32_stays_near_float64(small):
    from dsv41_reference.numerics import accumulate

    # A prefix that fits the window and the selections: no choice can flip there.
    with accumulate(torch.float32):
        logits = small.model().forward(small.tokens[:4])
    drift = (logits - small.logits[:4]).abs().max() / small.logits.std()
    assert drift < 0.1  # measured 0.001; bf16 roundings that fall on the other side


def test_callers_mistakes_are_named(small):
    model = small.model()
    with pytest.raises(
        ValueError, match=r"V41Reference: expected tokens: \[num_tokens\] int, got \[1, 2\] int64"
    ):
        model.forward(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="V41Reference: expected rows: positions below 45, got"):
        model.forward(small.tokens, rows=[45])
    with pytest.raises(ValueError, match="V41Reference: expected block: 1 or more, got 0"):
        model.forward(small.tokens, block=0)
    with pytest.raises(
        ValueError, match=r"V41Reference: expected token_classes: \[96\] int, got \[3\] int64"
    ):
        V41Reference(small.cfg, small.weights, torch.zeros(3, dtype=torch.int64))
    wrong = dataclasses.replace(small.cfg.engram, num_rows=(60, 121))
    with pytest.raises(
        ValueError, match=r"V41Reference: expected engram.num_rows: \(60, 120\), got \(60, 121\)"
    ):
        small.model(engram=wrong)
    with pytest.raises(ValueError, match=r"expected weights that hold embed\.weight"):
        V41Reference(small.cfg, {}, small.classes).forward(small.tokens)
