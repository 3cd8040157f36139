"""The cacheless drafter: what its rows see, and its heads in closed form."""

import dataclasses

import pytest
import torch
from dsv41_reference import dense
from dsv41_reference.dense import Scope
from dsv41_reference.draft import V41ReferenceDraft

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def targets(small):
    return torch.cat([small.trace[f"target.{layer}"] for layer in small.cfg.draft.target_layers], -1)


@pytest.fixture(scope="module")
def hollow(small):
    """Weights whose sub-layers add nothing and whose pre-mixes are 1: h is four times the embedding."""
    changed = {}
    for name, tensor in small.weights.items():
        if name.startswith("mtp.") and (name.endswith("attn.wo_b.weight") or name.endswith(".w2.weight")):
            changed[name] = torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype)
        if name.startswith("mtp.") and name.endswith("hc_ffn_base"):
            changed[name] = torch.cat([torch.full((4,), 60.0), tensor[4:]])
        if name.startswith("mtp.") and name.endswith("hc_ffn_fn"):
            changed[name] = torch.zeros_like(tensor)
    return small.weights | changed


def test_shapes_at_every_context_length(small, targets):
    cfg, draft = small.cfg, small.cfg.draft
    model = V41ReferenceDraft(cfg, small.weights)
    for length in (0, 1, cfg.window, len(targets)):
        trace: dict[str, torch.Tensor] = {}
        tokens, logits, confidence = model.forward(targets[:length], 7, trace=trace)
        assert tokens.shape == confidence.shape == (draft.block_size,) and tokens.dtype == torch.int64
        assert logits.shape == (draft.block_size, cfg.vocab_size)
        assert logits.dtype == confidence.dtype == torch.float32
        assert logits.isfinite().all() and confidence.isfinite().all()
        assert trace.keys() == {f"ring.{stage}" for stage in range(draft.num_stages)}
        assert trace["ring.1"].shape == (length, cfg.head_dim) and trace["ring.1"].dtype == torch.bfloat16


def test_ring_rows_do_not_depend_on_later_positions(small, targets):
    model = V41ReferenceDraft(small.cfg, small.weights)
    whole: dict[str, torch.Tensor] = {}
    model.forward(targets, 7, trace=whole)
    for length in (1, 2, 19):
        part: dict[str, torch.Tensor] = {}
        model.forward(targets[:length], 7, trace=part)
        for name, rows in part.items():
            assert torch.equal(rows, whole[name][:length])


def test_the_block_sees_a_window_of_context(small, targets):
    model, window = V41ReferenceDraft(small.cfg, small.weights), small.cfg.window
    _, logits, _ = model.forward(targets, 7)
    for back, seen in ((window, True), (window + 1, False)):
        other = targets.clone()
        other[-back] = -other[-back]
        _, changed, _ = model.forward(other, 7)
        assert torch.equal(changed, logits) is not seen, back


def test_the_block_is_bidirectional(small, targets):
    """The first row feels what the rows behind it hold."""
    noise = dataclasses.replace(small.cfg.draft, noise_token=3)
    _, logits, _ = V41ReferenceDraft(small.cfg, small.weights).forward(targets, 7)
    cfg = dataclasses.replace(small.cfg, draft=noise)
    _, changed, _ = V41ReferenceDraft(cfg, small.weights).forward(targets, 7)
    assert not torch.equal(changed[0], logits[0])


def test_heads_on_a_known_hidden(small, targets, hollow):
    cfg, last = small.cfg, Scope(hollow, f"mtp.{small.cfg.draft.num_stages - 1}.")
    tokens, logits, confidence = V41ReferenceDraft(cfg, hollow).forward(targets, 7)
    ids = [7] + [cfg.draft.noise_token] * (cfg.draft.block_size - 1)
    hidden = hollow["embed.weight"][ids] * 4
    normed = dense.rms_norm(hidden, last["norm.weight"], cfg.norm_eps)
    base = (normed.double() @ hollow["head.weight"].double().T).float()
    previous = 7
    for i in range(cfg.draft.block_size):
        markov = last["markov_head.embed.weight"][previous].double()
        expected = base[i].double() + last["markov_head.head.weight"].double() @ markov
        torch.testing.assert_close(logits[i].double(), expected, rtol=1e-6, atol=1e-6)
        both = torch.cat([hidden[i].double(), markov])
        expected = last["confidence_head.proj.weight"][0].double() @ both
        torch.testing.assert_close(confidence[i].double(), expected, rtol=1e-6, atol=1e-6)
        previous = int(tokens[i])
        assert previous == int(logits[i].argmax())


def test_without_a_head_the_drafts_follow_the_markov_chain(small, targets, hollow):
    weights = hollow | {"head.weight": torch.zeros_like(hollow["head.weight"])}
    tokens, _, _ = V41ReferenceDraft(small.cfg, weights).forward(targets, 7)
    last = Scope(weights, f"mtp.{small.cfg.draft.num_stages - 1}.")
    bigram = last["markov_head.embed.weight"].double() @ last["markov_head.head.weight"].double().T
    chain = [7]
    for _ in tokens:
        chain.append(int(bigram[chain[-1]].argmax()))
    assert tokens.tolist() == chain[1:]


def test_ties_go_to_the_lower_token(small, targets, hollow):
    weights = hollow | {"head.weight": torch.zeros_like(hollow["head.weight"])}
    name = f"mtp.{small.cfg.draft.num_stages - 1}.markov_head.head.weight"
    weights[name] = torch.zeros_like(weights[name])
    tokens, _, _ = V41ReferenceDraft(small.cfg, weights).forward(targets, 7)
    assert tokens.tolist() == [0] * small.cfg.draft.block_size


def test_sampling_sees_the_tempered_law(small, targets):
    model, laws = V41ReferenceDraft(small.cfg, small.weights), []

    def third(law):
        laws.append(law)
        return int(law.sort(descending=True).indices[2])

    tokens, logits, _ = model.forward(targets, 7, temperature=0.5, sample=third)
    for i, law in enumerate(laws):
        torch.testing.assert_close(law, torch.softmax(logits[i] / 0.5, -1), rtol=1e-5, atol=1e-8)
        assert tokens[i] == logits[i].sort(descending=True).indices[2]


def test_callers_mistakes_are_named(small, targets):
    model = V41ReferenceDraft(small.cfg, small.weights)
    with pytest.raises(
        ValueError, match=r"V41ReferenceDraft: expected targets: \[num_tokens, 128\] bfloat16, got"
    ):
        model.forward(targets[:, :-1], 7)
    with pytest.raises(ValueError, match="V41ReferenceDraft: expected next_token: below 96, got 96"):
        model.forward(targets, 96)
    with pytest.raises(
        ValueError, match="V41ReferenceDraft: expected sample: a function for temperature > 0, got None"
    ):
        model.forward(targets, 7, temperature=1.0)
