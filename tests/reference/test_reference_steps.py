"""Single steps of the dense model in closed form."""

import math

import pytest
import torch
from dsv41_reference import dense
from dsv41_reference.dense import Scope

from dsv41.config import V41FlashConfig

pytestmark = pytest.mark.usefixtures("float64")


def test_sinkhorn_columns_sum_to_one(small):
    streams = torch.randn(20, small.cfg.num_streams, small.cfg.hidden).bfloat16()
    pre, post, comb = dense.mixes(streams, Scope(small.weights, "layers.0."), "hc_attn", small.cfg)
    assert {t.dtype for t in (pre, post, comb)} == {torch.float32}
    torch.testing.assert_close(comb.sum(1), torch.ones(20, 4), rtol=0, atol=3e-6)
    torch.testing.assert_close(comb.sum(2), torch.ones(20, 4), rtol=0, atol=1e-3)
    assert (pre > 1e-6).all() and (pre < 1 + 2e-6).all() and (post > 0).all() and (post < 2).all()


def test_mixes_of_a_zero_projection(small):
    """Only the base is left: pre and post are its sigmoids, comb the Sinkhorn form of its exponentials."""
    cfg = small.cfg
    base = torch.linspace(-2, 2, 24)
    weights = {"a_fn": torch.zeros(24, 4 * cfg.hidden), "a_base": base, "a_scale": torch.ones(3)}
    streams = torch.randn(1, 4, cfg.hidden).bfloat16()
    pre, post, comb = dense.mixes(streams, Scope(weights), "a", cfg)
    for i in range(4):
        assert pre[0, i].item() == pytest.approx(1 / (1 + math.exp(-base[i])) + 1e-6, rel=1e-6)
        assert post[0, i].item() == pytest.approx(2 / (1 + math.exp(-base[4 + i])), rel=1e-6)
    rows = [[math.exp(base[8 + 4 * j + k]) for k in range(4)] for j in range(4)]
    c = [[v / sum(row) + cfg.mhc_eps for v in row] for row in rows]
    for step in range(2 * cfg.sinkhorn_iters - 1):
        if step % 2 == 0:
            sums = [sum(c[j][k] for j in range(4)) + cfg.mhc_eps for k in range(4)]
            c = [[c[j][k] / sums[k] for k in range(4)] for j in range(4)]
        else:
            c = [[v / (sum(row) + cfg.mhc_eps) for v in row] for row in c]
    torch.testing.assert_close(comb[0], torch.tensor(c), rtol=1e-6, atol=0)


def test_expand_sums_over_the_first_index():
    streams = torch.arange(8.0).reshape(1, 4, 2).bfloat16()
    comb = torch.zeros(1, 4, 4)
    comb[0, 0, 2] = comb[0, 3, 1] = 1
    y = torch.tensor([[100.0, 200.0]]).bfloat16()
    out = dense.expand(y, streams, torch.tensor([[1.0, 0.0, 0.0, 0.5]]), comb)
    assert out.tolist() == [[[100, 200], [6, 7], [0, 1], [50, 100]]]


def test_a_sublayer_reads_through_the_pre_mix_of_the_one_before(small):
    cfg, scope = small.cfg, Scope(small.weights, "layers.0.")
    streams = torch.randn(3, cfg.num_streams, cfg.hidden).bfloat16()
    pre = torch.randn(3, cfg.num_streams)
    seen = []

    def sublayer(h):
        seen.append(h)
        return torch.zeros_like(h)

    after, last = dense.residual_block(streams, pre, scope, cfg, sublayer, sublayer)
    attn_pre, post, comb = dense.mixes(streams, scope, "hc_attn", cfg)
    between = dense.expand(torch.zeros(3, cfg.hidden).bfloat16(), streams, post, comb)
    for h, x, p, norm in ((seen[0], streams, pre, "attn_norm"), (seen[1], between, attn_pre, "ffn_norm")):
        assert torch.equal(h, dense.rms_norm(dense.collapse(x, p), scope[norm + ".weight"], cfg.norm_eps))
    assert torch.equal(last, dense.mixes(between, scope, "hc_ffn", cfg)[0]) and after.shape == streams.shape


def test_rotation_turns_the_last_pairs_and_back():
    x = torch.zeros(1, 6).bfloat16()
    x[0, 2:] = torch.tensor([1.0, 0.0, 0.0, 2.0])
    quarter = (torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))  # by 90 degrees, by none
    turned = dense.rotate(x, quarter)
    assert turned.tolist() == [[0, 0, 0, 1, 0, 2]]
    assert torch.equal(dense.rotate(turned, quarter, inverse=True), x)
    assert torch.equal(dense.rotate(turned[:, None], quarter, inverse=True), x[:, None])


def test_attention_with_a_sink():
    """Two equal scores of 0 and a sink of ln 2: weights 1/4, 1/4 and 1/2 that is lost."""
    q = torch.zeros(1, 1, 4).bfloat16()
    keys = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [9, 9, 9, 9]]).bfloat16()
    visible = torch.tensor([[True, True, False]])
    out = dense.attend(q, keys, visible, torch.tensor([math.log(2)]), 0.5)
    assert out.tolist() == [[[0.25, 0.25, 0, 0]]]
    none = dense.attend(q, keys, torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1), 0.5)
    assert none.eq(0).all()


def test_top_mask_ties_and_nan():
    nan, inf = math.nan, math.inf
    scores = torch.tensor([[1.0, 3, 3, 3], [nan, 1, nan, 0], [-inf, -inf, 2, -inf], [0.0, -0.0, 0.0, -1]])
    expected = [[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0], [1, 1, 0, 0]]
    assert dense.top_mask(scores, 2).int().tolist() == expected
    assert dense.top_mask(scores, 9).int().tolist() == [
        [1, 1, 1, 1],
        [0, 1, 0, 1],
        [0, 0, 1, 0],
        [1, 1, 1, 1],
    ]
    assert dense.top_mask(scores[:, :0], 2).shape == (4, 0)


def test_the_newest_block_is_a_candidate_whatever_its_score():
    inf = math.inf
    scores = torch.tensor([[5.0, 1, 4, 3, -9, -inf], [2.0, 2, 2, 2, -inf, -inf], [1.0, *(-inf,) * 5]])
    num_visible = torch.tensor([5, 4, 1])
    one = dense.candidate_mask(scores, num_visible, 2, 1).int().tolist()
    assert one == [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    two = dense.candidate_mask(scores, num_visible, 2, 2).int().tolist()
    assert two == [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    odd = dense.candidate_mask(scores[:, :5], num_visible, 2, 2).int().tolist()
    assert odd == [row[:5] for row in two]


def test_index_lists():
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    assert dense.index_lists(mask, 3).tolist() == [[1, 3, -1], [-1, -1, -1], [0, 1, 2]]


def test_routing_by_biased_choice_and_unbiased_weight():
    cfg = V41FlashConfig.micro(route_temperature=2.0)
    x = torch.eye(1, cfg.hidden).bfloat16()
    gate = torch.zeros(4, cfg.hidden).bfloat16()
    gate[:, 0] = torch.tensor([60.0, 2.0, 0.0, 0.0])
    ids, weights = dense.route(x, gate, torch.tensor([-99.0, 0.0, 3.0, 3.0]), cfg, 3)
    assert ids.tolist() == [[2, 3, 1]]  # equal ones by number; the best is biased away
    a = [math.sqrt(math.log1p(math.exp(z))) for z in (0, 0, 1)]
    for slot in range(3):
        assert weights[0, slot].item() == pytest.approx(a[slot] / sum(a) * cfg.route_scale, rel=1e-6)
    _, one = dense.route(x, gate, torch.zeros(4), cfg, 1)
    assert one.item() == pytest.approx(cfg.route_scale)


def test_mixture_of_one_expert_is_its_formula(small):
    cfg, scope = small.cfg, Scope(small.weights, "layers.0.")
    x = torch.randn(5, cfg.hidden).bfloat16()
    ids, weights = dense.route(x, scope["ffn.gate.weight"], scope["ffn.gate.bias"], cfg, 2)
    out = dense.mixture(x, scope, cfg, 2)
    for t in range(5):
        total = torch.zeros(cfg.hidden, dtype=torch.float64)
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            w1, w3, w2 = (scope.mxfp4(f"ffn.experts.{e}.{w}") for w in ("w1", "w3", "w2"))
            total += dense.expert(x[t : t + 1], w1, w3, w2, weight[None], cfg.swiglu_limit)[0].double()
        w1, w3, w2 = (scope.tiles(f"ffn.shared_experts.{w}") for w in ("w1", "w3", "w2"))
        total += dense.expert(x[t : t + 1], w1, w3, w2, None, cfg.swiglu_limit)[0].double()
        torch.testing.assert_close(out[t].double(), total, rtol=2**-8, atol=1e-6)


def test_head_logits_in_slices_of_the_vocabulary():
    h, head = torch.randn(5, 8).bfloat16(), torch.randn(20_000, 8).bfloat16()
    expected = (h.double() @ head.double().T).float()
    assert torch.equal(dense.head_logits(h, head, 2), expected)
