"""Philox and its streams, processed token laws, residuals, and the token bitmask."""

from typing import Any

import numpy as np
import pytest
import torch
from dsv41_reference import verify as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.ops.verify import apply_token_bitmask, sample_tokens, verify_drafts

# Called through Any: the type checker takes an unpacked tuple for all of the remaining arguments.
random_words: Any = reference.random_words


def words(*values):
    return tuple(torch.tensor([v]) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers of the authors' library
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert tuple(int(x) for x in reference.philox(words(*counter), words(*key))) == expected


def test_streams_are_disjoint_and_keyed_by_everything():
    def block(seed=1, uid=2, position=3, column=4, stream=reference.DRAFT):
        return random_words(*words(seed, uid, position, column), stream, 8).flatten().tolist()

    variants = [
        block(),
        block(seed=2),
        block(seed=1 + 2**32),
        block(seed=-1),
        block(uid=3),
        block(uid=2 + 2**32),
        block(position=4),
        block(column=5),
        block(stream=reference.ACCEPT),
        block(stream=reference.EMIT),
    ]
    assert len({tuple(v) for v in variants}) == len(variants)
    assert block() == block() and block()[:3] == random_words(*words(1, 2, 3, 4), 0, 3).flatten().tolist()


def test_uniforms_and_exponentials_stay_inside_their_range():
    edge = torch.tensor([0, 1, 2**31, 2**32 - 129, 2**32 - 1])
    u, e = reference.uniform(edge), reference.exponential(edge)
    assert u.dtype == torch.float32 and (u > 0).all() and (u < 1).all()
    assert torch.isfinite(e).all() and (e > 0).all()
    many = reference.exponential(random_words(*words(0, 0, 0, 0), 0, 200_000))
    assert abs(float(many.mean()) - 1) < 0.01 and abs(float(many.var()) - 1) < 0.03


LOGITS = st.sampled_from([-3.0, 0.0, 0.5, 0.5000001, 2.0, -float("inf")]) | st.floats(-5, 5, width=32)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(LOGITS, min_size=2, max_size=9),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.none() | st.integers(-1, 10),
    st.none() | st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0, 1.5]),
    st.integers(0, 2**9 - 1),
)
def test_token_law_by_definition(row, temperature, top_k, top_p, mask):
    logits = torch.tensor(row, dtype=torch.float64)
    bits = [(mask >> i) & 1 for i in range(len(row))]
    z = [x if b else -np.inf for x, b in zip(logits.tolist(), bits, strict=True)]
    log_p, ok = reference.token_law(
        logits[None],
        torch.tensor([temperature], dtype=torch.float64),
        None if top_k is None else torch.tensor([top_k]),
        None if top_p is None else torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([[mask]], dtype=torch.int32),
    )
    assert bool(ok) == (max(z) > -np.inf)
    if not ok:
        assert (log_p == -np.inf).all()
        return
    if temperature <= 0:
        expected = np.eye(len(z))[int(np.argmax(z))]
    else:
        kept = [i for i, x in enumerate(z) if x > -np.inf]
        if top_k is not None and 0 < top_k < len(kept):
            cut = sorted((z[i] for i in kept), reverse=True)[top_k - 1]
            kept = [i for i in kept if z[i] >= cut]
        p = {i: np.exp((z[i] - max(z)) / temperature) for i in kept}
        if top_p is not None and top_p < 1:
            total = sum(p.values())
            above = {i: sum(p[j] for j in kept if z[j] > z[i]) / total for i in kept}
            # A sum that lands within rounding of top_p may fall either way.
            if any(abs(a - top_p) < 1e-12 for a in above.values() if a > 0):
                return
            kept = [i for i in kept if above[i] < top_p or z[i] == max(z)]
        expected = np.array([p[i] if i in kept else 0.0 for i in range(len(z))])
        expected /= expected.sum()
    np.testing.assert_allclose(log_p[0].exp().numpy(), expected, rtol=1e-9, atol=1e-15)


def test_greedy_takes_the_lowest_id_and_equal_logits_live_or_die_together():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert reference.token_law(logits, torch.zeros(1))[0].exp().tolist() == [[0, 1, 0, 0]]
    one = torch.tensor([1], dtype=torch.int32)
    assert reference.token_law(logits, torch.ones(1), top_k=one)[0].exp().tolist() == [[0, 0.5, 0.5, 0]]
    tiny = torch.tensor([1e-30])
    assert reference.token_law(logits, tiny)[0].exp().tolist() == [[0, 0.5, 0.5, 0]]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=6), st.floats(-3, 0))
def test_residual_by_definition(rows, log_rho):
    log_p, log_q = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in zip(*rows, strict=True))
    log_r, log_mass = reference.residual_law(log_rho + log_p, log_q)
    expected = (np.exp(log_rho) * log_p.exp() - log_q.exp()).clamp(min=0)
    np.testing.assert_allclose(log_r.exp(), expected, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(float(log_mass.exp()), float(expected.sum()), rtol=1e-6, atol=1e-12)


def test_an_empty_residual_falls_back_to_the_target():
    """p = q but the test failed by rounding: the token comes from p."""
    log_p = torch.log(torch.tensor([0.25, 0.75]))
    log_r, log_mass = reference.residual_law(log_p, log_p)
    assert (log_r == -float("inf")).all() and float(log_mass) == -float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_bitmask_in_place_in_the_layout_of_the_grammar_library(dtype, vocab):
    rng = np.random.default_rng(vocab)
    allowed = rng.random((5, vocab)) < 0.5
    masks = np.zeros((5, (vocab + 31) // 32 + 1), np.uint32)
    for r, i in zip(*np.nonzero(allowed), strict=True):
        masks[r, i // 32] |= np.uint32(1) << np.uint32(i % 32)
    masks[:, -1] = 0xDEADBEEF  # bits past the vocabulary mean nothing
    bitmask = torch.from_numpy(masks.view(np.int32))
    logits = torch.randn(5, vocab).to(dtype)
    before = logits.clone()
    assert apply_token_bitmask(logits, bitmask) is logits
    expected = torch.where(torch.from_numpy(allowed), before, -float("inf"))
    assert torch.equal(logits, expected.to(dtype))


def test_bitmask_of_one_row_strided_logits_and_nothing():
    wide = torch.zeros(3, 80)
    apply_token_bitmask(wide[:, :40], torch.tensor([[5, 128]], dtype=torch.int32))
    kept = torch.zeros(80, dtype=torch.bool)
    kept[[0, 2, 39]] = True
    kept[40:] = True
    assert ((wide == 0) == kept).all()
    assert apply_token_bitmask(torch.zeros(0, 40), torch.zeros(0, 2, dtype=torch.int32)).shape == (0, 40)


@pytest.mark.parametrize(
    ("logits", "bitmask", "message"),
    [
        (torch.zeros(2, 40), torch.zeros(2, 1, dtype=torch.int32), "bitmask: at least 2 words for 40 tokens"),
        (torch.zeros(2, 40), torch.zeros(3, 2, dtype=torch.int32), "bitmask: [2, *] int32, got [3, 2] int32"),
        (torch.zeros(2, 40), torch.zeros(2, 2, dtype=torch.int64), "bitmask: [*, *] int32, got [2, 2] int64"),
        (torch.zeros(40), torch.zeros(1, 2, dtype=torch.int32), "logits: [*, *]"),
    ],
)
def test_bitmask_refusals(logits, bitmask, message):
    with pytest.raises(ValueError) as error:
        apply_token_bitmask(logits, bitmask)
    assert str(error.value).startswith("apply_token_bitmask: expected ") and message in str(error.value)


def test_sample_tokens_refusals_and_rows_without_a_law():
    call: dict[str, Any] = {"temperature": torch.ones(2)} | {
        k: torch.ones(2, dtype=torch.int64) for k in ("seeds", "uids", "positions")
    }
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]])
    assert sample_tokens(logits, **call)[1] == -1
    with pytest.raises(ValueError, match="sample_tokens: expected stream: one of draft, emit, got accept"):
        sample_tokens(logits, **call, stream="accept")
    with pytest.raises(ValueError, match=r"sample_tokens: expected columns: \[2\] int32\|int64"):
        sample_tokens(logits, **call, columns=torch.ones(3, dtype=torch.int32))
    assert list(sample_tokens(torch.zeros(0, 4), **{k: v[:0] for k, v in call.items()}).shape) == [0]


@pytest.mark.parametrize("temperature", [float("nan"), float("inf")])
def test_a_temperature_that_is_no_number_leaves_no_law(temperature):
    """Neither may give token 0: NaN compares with nothing, and -inf / inf, of a forbidden token, is NaN."""
    heat = torch.tensor([temperature, 1.0, 0.0])
    call: dict[str, Any] = {k: torch.ones(3, dtype=torch.int64) for k in ("seeds", "uids", "positions")}
    for mask in (None, torch.tensor([[2]] * 3, dtype=torch.int32)):
        drawn = sample_tokens(torch.zeros(3, 4), temperature=heat, bitmask=mask, **call)
        assert drawn[0] == -1 and drawn[1] >= 0 and drawn[2] == (0 if mask is None else 1)
        for mode in ("chain", "block", "coupled"):
            done = verify_drafts(
                torch.zeros(3, 4),
                torch.arange(4, dtype=torch.int32),
                torch.zeros(3, 1, dtype=torch.int64),
                temperature=heat,
                bitmask=mask,
                mode=mode,
                **call,
            )
            assert done.status.tolist() == [1, 0, 0] and done.tokens[0].tolist() == [-1, -1]
            assert done.num_emitted.tolist() == [0, 1, 1]


def test_bitmask_refuses_rows_that_share_memory():
    with pytest.raises(ValueError, match="apply_token_bitmask: expected logits: rows of their own"):
        apply_token_bitmask(torch.zeros(1, 8).expand(2, 8), torch.ones(2, 1, dtype=torch.int32))
