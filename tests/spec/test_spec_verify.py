"""The sampler: its law by a million draws, acceptance by position, greedy and coupled text, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from dsv41_reference import verify as reference
from scipy.stats import chi2
from spec_toy import Toy
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv41.ops.verify import Verified, sample_tokens, verify_drafts
from dsv41.spec import Streams, accept

VOCAB = 64
CHUNK = 10_000


def g_test(counts: torch.Tensor, law: torch.Tensor) -> float:
    """p-value of counts against a law, cells below five expected draws pooled."""
    expected = law.double().flatten() * counts.sum()
    observed = counts.double().flatten()
    assert float(observed[expected == 0].sum()) == 0
    rare = expected < 5
    observed = torch.cat((observed[~rare], observed[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    g = 2 * torch.where(observed > 0, observed * (observed / expected.clamp(min=1e-30)).log(), 0.0).sum()
    return float(chi2.sf(float(g), int((expected > 0).sum()) - 1))


def lengths_of(schedule: str, drafts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    requests, block = drafts.shape
    if schedule == "random":
        return torch.randint(0, block + 1, (requests,), generator=generator)
    # Adversarial but causal: draft k is verified when the drafts before it have an even sum.
    before = drafts.cumsum(1) - drafts
    return (before % 2 == 0).cumprod(1).sum(1)


def first_two_tokens(toy, draws, schedule, mode, *, own=True, block=2, temperature=1.0, bitmask=None, **law):
    """Counts [vocab, vocab] of the first two emitted tokens; a second step follows where the first emits one.

    Drafts come from the library's own streams, or (faster) from a generator.
    """
    counts = torch.zeros(toy.vocab * toy.vocab, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, draws, CHUNK):
        n = min(CHUNK, draws - begin)
        streams = Streams(torch.full((n,), 11), torch.arange(begin, begin + n))
        anchors, positions = torch.zeros(n, dtype=torch.int64), torch.full((n,), 5)
        pair = torch.empty(n, 2, dtype=torch.int64)
        rows, filled = torch.arange(n), torch.zeros(n, dtype=torch.int64)
        for _ in range(2):
            t = torch.full((len(rows),), temperature)
            local = streams.select(rows)
            drafts, logits = toy.propose(local if own else generator, anchors, positions, block, t, mode)
            lengths = lengths_of(schedule, drafts, generator)
            options = {k: v.repeat(len(rows)) for k, v in law.items()}
            done = toy.step(
                local, anchors, positions, drafts, logits, lengths, t, mode=mode, bitmask=bitmask, **options
            )
            room = 2 - filled[rows]
            pair[rows, filled[rows]] = done.tokens[:, 0]
            two = (done.num_emitted >= 2) & (room == 2)
            pair[rows[two], 1] = done.tokens[two, 1]
            filled[rows] += torch.minimum(done.num_emitted.long(), room)
            again = filled[rows] < 2
            rows, anchors, positions = rows[again], done.tokens[again, 0], positions[again] + 1
        counts += torch.bincount(pair[:, 0] * toy.vocab + pair[:, 1], minlength=toy.vocab**2)
    return counts.view(toy.vocab, toy.vocab)


@pytest.mark.parametrize(
    ("mode", "schedule", "draws", "own"),
    [
        ("chain", "random", 10**6, False),
        ("block", "random", 10**6, False),
        ("chain", "causal", 10**5, True),
        ("block", "causal", 10**5, True),
        ("coupled", "random", 10**5, True),
    ],
)
def test_pairs_of_tokens_follow_the_target_law(mode, schedule, draws, own):
    toy = Toy(VOCAB, seed=4)
    law = toy.target.softmax(-1)
    counts = first_two_tokens(toy, draws, schedule, mode, own=own)
    p = g_test(counts, law[0][:, None] * law)
    print(f"{mode}, {schedule} lengths: {draws} draws at vocabulary {VOCAB}, p = {p:.3f}")
    assert counts.sum() == draws and p > 1e-3


def test_g_test_catches_a_small_bias():
    """The draft's law, pulled 5 % of the way: the same test must see it."""
    toy = Toy(VOCAB, seed=4)
    p, q = toy.target.softmax(-1)[0], toy.draft.softmax(-1)[0]
    counts = torch.distributions.Multinomial(10**5, 0.95 * p + 0.05 * q).sample()
    assert g_test(counts, p) < 1e-3


def test_filtered_laws_are_sampled_exactly():
    """Temperature, top-k, top-p and a bitmask on the target, none of which the draft knows."""
    toy = Toy(VOCAB, seed=5)
    generator = torch.Generator().manual_seed(0)
    bitmask = torch.randint(-(2**31), 2**31, (VOCAB, 2), generator=generator, dtype=torch.int64).to(
        torch.int32
    )
    top_k, top_p = torch.tensor([20], dtype=torch.int32), torch.tensor([0.9])
    law = by_hand(toy.target, 0.7, 20, 0.9, bitmask)
    counts = first_two_tokens(
        toy, 10**5, "random", "chain", temperature=0.7, bitmask=bitmask, top_k=top_k, top_p=top_p
    )
    assert ((law > 0).sum(-1) < 20).all()
    assert g_test(counts, law[0][:, None] * law) > 1e-3


def by_hand(logits, temperature, top_k, top_p, bitmask):
    """The processed law, one row and one token at a time."""
    laws = torch.zeros(logits.shape, dtype=torch.float64)
    for r, row in enumerate(logits.double().tolist()):
        bits = [(int(bitmask[r, i // 32]) >> (i % 32)) & 1 for i in range(len(row))]
        kept = [i for i in range(len(row)) if bits[i]]
        kept = sorted(kept, key=lambda i: -row[i])[:top_k]
        weight = {i: np.exp(row[i] / temperature) for i in kept}
        total, mass = sum(weight.values()), 0.0
        for i in kept:
            if mass / total < top_p:
                laws[r, i] = weight[i]
            mass += weight[i]
    return laws / laws.sum(-1, keepdim=True)


def acceptance(toy, n, block, mode):
    """Accepted counts when every position has the laws of row 0 and all drafts are verified."""
    streams = Streams(torch.zeros(n, dtype=torch.int64), torch.arange(n))
    flat = Toy(toy.vocab, 0)
    flat.target, flat.draft = (x[:1].expand(toy.vocab, -1) for x in (toy.target, toy.draft))
    anchors, positions, t = torch.zeros(n, dtype=torch.int64), torch.full((n,), 9), torch.ones(n)
    drafts, logits = flat.propose(streams, anchors, positions, block, t, mode)
    done = flat.step(streams, anchors, positions, drafts, logits, torch.full((n,), block), t, mode=mode)
    return done.num_accepted


@pytest.mark.parametrize("mode", ["chain", "coupled"])
def test_acceptance_by_position(mode):
    toy, n, block = Toy(VOCAB, seed=6), 30_000, 3
    p, q = (x[0].double().softmax(-1) for x in (toy.target, toy.draft))
    accepted = acceptance(toy, n, block, mode)
    if mode == "chain":
        expected = float(torch.minimum(p, q).sum())
    else:  # shared noise: sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)
        expected = float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(-1)).sum())
    for k in range(block):
        tested, kept = int((accepted >= k).sum()), int((accepted > k).sum())
        sigma = (expected * (1 - expected) / tested) ** 0.5
        print(
            f"{mode}, draft {k + 1}: {kept / tested:.4f} of {tested}, expected {expected:.4f} +- {sigma:.4f}"
        )
        assert abs(kept / tested - expected) < 4 * sigma


def test_block_verification_keeps_more_than_the_chain():
    toy = Toy(VOCAB, seed=6)
    chain, block = (acceptance(toy, 20_000, 3, mode).double().mean() for mode in ("chain", "block"))
    print(f"mean accepted of 3: chain {chain:.4f}, block {block:.4f}")
    assert block > chain + 0.01


def test_one_hot_drafts_are_accepted_with_their_own_probability():
    toy, n = Toy(VOCAB, seed=7), 60_000
    p = toy.target[0].double().softmax(-1)
    best = int(toy.draft[0].argmax())
    streams = Streams(torch.ones(n, dtype=torch.int64), torch.arange(n))
    done = verify_drafts(
        toy.target[:1].expand(2 * n, -1),
        torch.arange(0, 2 * n + 1, 2, dtype=torch.int32),
        torch.full((n, 1), best),
        temperature=torch.ones(n),
        seeds=streams.seeds,
        uids=streams.uids,
        positions=torch.full((n,), 3),
    )
    rate, expected = float((done.num_emitted == 2).double().mean()), float(p[best])
    assert abs(rate - expected) < 4 * (expected * (1 - expected) / n) ** 0.5
    assert g_test(torch.bincount(done.tokens[:, 0], minlength=VOCAB), p) > 1e-3
    rejected = done.tokens[done.num_emitted == 1, 0]
    assert not (rejected == best).any()


def test_the_residual_never_emits_what_the_draft_over_proposes():
    toy, n = Toy(VOCAB, seed=8), 20_000
    p, q = (x[0].softmax(-1) for x in (toy.target, toy.draft))
    streams = Streams(torch.ones(n, dtype=torch.int64), torch.arange(n))
    t, anchors, positions = torch.ones(n), torch.zeros(n, dtype=torch.int64), torch.full((n,), 3)
    drafts, logits = toy.propose(streams, anchors, positions, 1, t)
    done = toy.step(streams, anchors, positions, drafts, logits, torch.ones(n, dtype=torch.int64), t)
    fresh = done.tokens[done.num_emitted == 1, 0]
    assert len(fresh) > 1000 and not (p <= q)[fresh].any()


@pytest.mark.parametrize("mode", ["chain", "block", "coupled"])
def test_greedy_text_is_the_same_under_any_budget(mode):
    """Sampled drafts, argmax drafts, and an oracle whose corruption makes every accepted length happen."""
    toy = Toy(16, seed=9)
    streams, anchors, cold = Streams.of([1, 2, 3], [7, 8, 9]), [0, 5, 11], torch.zeros(3)
    plain = []
    for a in anchors:
        text = [a]
        for _ in range(40):
            text.append(int(toy.target[text[-1]].argmax()))
        plain.append(text)
    rng = np.random.default_rng(0)
    counts: dict[int, int] = {}

    def oracle(texts, block):
        rows = []
        for text, whole in zip(texts, plain, strict=True):
            row = (whole * 2)[len(text) : len(text) + block]
            rows.append([t if rng.random() < 0.8 else int(rng.integers(16)) for t in row])
        return torch.tensor(rows)

    for budget in (lambda n, m: 0, lambda n, m: m, lambda n, m: int(rng.integers(0, m + 1))):
        for propose in (None, oracle):
            text = toy.generate(streams, anchors, 40, cold, budget, mode=mode, propose=propose, counts=counts)
            assert text == plain
    print(f"{mode}: steps by accepted length {dict(sorted(counts.items()))}")
    assert set(counts) == set(range(6))


def test_coupled_text_depends_on_its_own_seed_only():
    toy = Toy(16, seed=10)
    rng = np.random.default_rng(1)

    def text(uids, anchors, budget, temperature=0.9):
        streams = Streams.of([3] * len(uids), uids)
        return toy.generate(
            streams, anchors, 50, torch.full((len(uids),), temperature), budget, mode="coupled"
        )

    alone = {uid: text([uid], [uid % 16], lambda n, m: 0)[0] for uid in (4, 2**40 + 5, 77)}
    assert len({tuple(t) for t in alone.values()}) == 3
    budgets = [lambda n, m: m, lambda n, m: n % (m + 1), lambda n, m: int(rng.integers(0, m + 1))]
    for budget in budgets:
        mates = text([77, 4, 9, 2**40 + 5], [77 % 16, 4, 1, 5], budget)
        assert [mates[0], mates[1], mates[3]] == [alone[77], alone[4], alone[2**40 + 5]]


def test_pinned_chain_text_is_reproducible_beside_adaptive_requests():
    """With its length fixed, a seeded request's text does not change with its batch even in chain mode."""
    toy = Toy(16, seed=10)

    def text(uids):
        streams = Streams.of([3] * len(uids), uids)
        return toy.generate(streams, [1] * len(uids), 40, torch.full((len(uids),), 0.9), lambda n, m: m)

    assert text([5])[0] == text([8, 5, 6])[1]
    assert text([5])[0] != text([6])[0]


def batch(rows=3, block=2, vocab=8, seed=0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "target_logits": torch.randn(rows * (block + 1), vocab, generator=generator),
        "cu_logits": torch.arange(0, rows * (block + 1) + 1, block + 1, dtype=torch.int32),
        "draft_tokens": torch.randint(0, vocab, (rows, block), generator=generator),
        "draft_logits": torch.randn(rows, block, vocab, generator=generator),
        "temperature": torch.ones(rows),
        "seeds": torch.arange(rows),
        "uids": torch.arange(rows),
        "positions": torch.arange(rows) + 3,
    }


@pytest.mark.parametrize("mode", ["chain", "block", "coupled"])
@pytest.mark.parametrize("bad", ["-inf", "nan", "+inf", "mask"])
def test_rows_without_a_law_are_named_and_never_give_a_token(mode, bad):
    call = batch()
    call["cu_logits"] = torch.tensor([0, 3, 4, 7], dtype=torch.int32)  # request 1 has no drafts
    if bad == "mask":
        call["bitmask"] = torch.full((9, 1), -1, dtype=torch.int32)
        call["bitmask"][3] = 0
    elif bad == "-inf":
        call["target_logits"][3] = float("-inf")
    else:
        call["target_logits"][3, 2] = float(bad)
    done = verify_drafts(**call, mode=mode)
    assert done.status.tolist() == [0, 1, 0]
    assert done.num_emitted[1] == 0 and done.tokens[1].tolist() == [-1, -1, -1]
    assert int(done.tokens.max()) < 8
    streams = Streams(call.pop("seeds"), call.pop("uids"))
    arguments = [call.pop(n) for n in ("target_logits", "cu_logits", "draft_tokens")]
    with pytest.raises(
        ValueError, match=r"accept: expected at least one finite logit.*row 0 of request beta"
    ):
        accept(*arguments, **call, streams=streams, mode=mode, names=["alpha", "beta", "gamma"])
    with pytest.raises(ValueError, match=r"accept: expected names: \[3\], got"):
        accept(*arguments, **call, streams=streams, mode=mode, names=["alpha"])
    unread = accept(*arguments, **call, streams=streams, mode=mode, sync=False)
    assert unread.num_emitted.tolist() == done.num_emitted.tolist()


@pytest.mark.parametrize("mode", ["chain", "block", "coupled"])
def test_unusable_drafts_end_the_block_and_the_target_speaks(mode):
    """Placeholder ids and broken draft laws are dropped unseen; the emitted law is then p, not a residual."""
    n, vocab = 30_000, 8
    call = batch(1, 2, vocab)
    p = call["target_logits"][0].softmax(-1)
    many = {
        "target_logits": call["target_logits"].repeat(n, 1),
        "cu_logits": torch.arange(0, 3 * n + 1, 3, dtype=torch.int32),
        "draft_tokens": torch.full((n, 2), -1),
        "draft_logits": call["draft_logits"].repeat(n, 1, 1),
        "temperature": torch.ones(n),
        "seeds": torch.zeros(n, dtype=torch.int64),
        "uids": torch.arange(n),
        "positions": torch.full((n,), 3),
    }
    done = verify_drafts(**many, mode=mode)
    assert (done.num_emitted == 1).all()
    assert g_test(torch.bincount(done.tokens[:, 0], minlength=vocab), p) > 1e-3
    many["draft_tokens"] = torch.full((n, 2), vocab)
    assert torch.equal(verify_drafts(**many, mode=mode).tokens, done.tokens)
    if mode != "coupled":
        many["draft_tokens"] = torch.zeros(n, 2, dtype=torch.int64)
        many["draft_logits"][:, 0] = float("nan")
        assert torch.equal(verify_drafts(**many, mode=mode).tokens, done.tokens)


@pytest.mark.parametrize("mode", ["chain", "block", "coupled"])
def test_a_request_does_not_see_its_batch_and_every_lane_is_written(mode):
    call = batch(5, 3, 32, seed=2)
    whole = verify_drafts(**call, mode=mode)
    for value in (-9, 4):
        out = Verified(*(torch.full_like(x, value) for x in whole))
        again = verify_drafts(**call, mode=mode, out=out)
        assert again is out
        assert all(torch.equal(x, y) for x, y in zip(again, whole, strict=True))
    laid = whole._replace(tokens=whole.tokens[:1].expand(5, 4))
    with pytest.raises(ValueError, match=r"out.tokens: elements apart in memory, got strides \(0, 1\)"):
        verify_drafts(**call, mode=mode, out=laid)
    for r in range(5):
        one = {k: v[r : r + 1] for k, v in call.items() if k not in ("target_logits", "cu_logits")}
        alone = verify_drafts(
            call["target_logits"][4 * r : 4 * r + 4],
            torch.tensor([0, 4], dtype=torch.int32),
            **one,
            mode=mode,
        )
        assert torch.equal(alone.tokens[0], whole.tokens[r])


def test_empty_batches_and_rows():
    call = batch()
    call["cu_logits"] = torch.zeros(4, dtype=torch.int32)
    done = verify_drafts(**{**call, "target_logits": call["target_logits"][:0]})
    assert done.num_emitted.tolist() == [0, 0, 0] and (done.tokens == -1).all()
    call["cu_logits"] = torch.tensor([0, 3, 3, 6], dtype=torch.int32)  # request 1 is inside its prefill
    done = verify_drafts(**call)
    assert (
        done.num_emitted[1] == 0
        and done.status.tolist() == [0, 0, 0]
        and (done.num_emitted[[0, 2]] > 0).all()
    )
    none = torch.zeros(0, dtype=torch.int64)
    empty = verify_drafts(
        torch.zeros(0, 4),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(0, 2, dtype=torch.int64),
        seeds=none,
        uids=none,
        positions=none,
        temperature=torch.zeros(0),
    )
    assert list(empty.tokens.shape) == [0, 3]


def test_verification_never_waits_for_the_device():
    with FakeTensorMode():
        for mode in ("chain", "block", "coupled"):
            one = torch.ones(3, dtype=torch.int64)
            float_one = torch.ones(3)
            out = (
                torch.ones(3, 3, dtype=torch.int64),
                torch.ones(3, dtype=torch.int32),
                torch.ones(3, dtype=torch.int32),
            )
            reference.verify_drafts(
                torch.ones(9, 8),
                torch.ones(4, dtype=torch.int32),
                torch.ones(3, 2, dtype=torch.int64),
                torch.ones(3, 2, 8),
                float_one,
                float_one,
                one,
                float_one,
                torch.ones(9, 1, dtype=torch.int32),
                one,
                one,
                one,
                mode,
                *out,
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"target_logits": torch.ones(9)},
            "target_logits: [*, *] float32|bfloat16|float16|float64, got [9] float32",
        ),
        ({"cu_logits": torch.zeros(3, dtype=torch.int32)}, "cu_logits: [4] int32|int64, got [3] int32"),
        ({"draft_tokens": torch.zeros(3, 0, dtype=torch.int64)}, "a block and a vocabulary of at least 1"),
        ({"draft_logits": torch.ones(3, 2, 9)}, "draft_logits: [3, 2, 8]"),
        ({"temperature": torch.ones(2)}, "temperature: [3] float32, got [2] float32"),
        ({"seeds": torch.ones(3)}, "seeds: [3] int64, got [3] float32"),
        ({"uids": torch.ones(2, dtype=torch.int64)}, "uids: [3] int64"),
        ({"positions": torch.ones(3, dtype=torch.int32)}, "positions: [3] int64"),
        ({"top_k": torch.ones(3)}, "top_k: [3] int32|int64"),
        ({"top_p": torch.ones(3, dtype=torch.float64)}, "top_p: [3] float32"),
        ({"bitmask": torch.zeros(9, 0, dtype=torch.int32)}, "bitmask: at least 1 words for 8 tokens"),
        ({"bitmask": torch.zeros(3, 1, dtype=torch.int32)}, "bitmask: [9, *] int32"),
        ({"mode": "typical"}, "mode: one of chain, block, coupled, got typical"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError) as error:
        verify_drafts(**{**batch(), **change})
    assert str(error.value).startswith("verify_drafts: expected ") and message in str(error.value)


def test_values_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("DSV41_CHECK", "1")
    with pytest.raises(ValueError, match="cu_logits: from 0, 0 to 3 rows a request, within 9"):
        verify_drafts(**{**batch(), "cu_logits": torch.tensor([0, 4, 6, 9], dtype=torch.int32)})
    with pytest.raises(ValueError, match="uids: all different"):
        verify_drafts(**{**batch(), "uids": torch.zeros(3, dtype=torch.int64)})
    verify_drafts(**batch())


def test_streams_refuse_what_would_correlate_requests():
    with pytest.raises(ValueError, match="Streams: expected uids: all different"):
        Streams.of([1, 1], [4, 4])
    with pytest.raises(ValueError, match="uids in"):
        Streams.of([1], [2**48])
    with pytest.raises(ValueError, match="seeds"):
        Streams(torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    for seeds, uids, message in (
        ([0.5], [1], "seeds: an integer"),
        ([2**63], [1], "seeds: an integer from"),
        ([1], [1.5], "uids: an integer"),
        ([1], [1, 2], r"uids: \[1\]"),
    ):
        with pytest.raises(ValueError, match=f"Streams: expected {message}"):
            Streams.of(seeds, uids)  # pyright: ignore[reportArgumentType]
    streams, anchors = Streams.of([0, 0], [1, 2]), torch.zeros(2, dtype=torch.int64)
    for column in (-1, 256, 1.5):  # 256 would share the noise of 0
        with pytest.raises(ValueError, match="Streams: expected column: an integer from 0 to 255"):
            streams.draft(torch.zeros(2, 4), column, anchors, torch.ones(2))  # pyright: ignore
    with pytest.raises(ValueError, match="Streams: expected mode: one of chain, block, coupled, got couple"):
        streams.draft(torch.zeros(2, 4), 0, anchors, torch.ones(2), mode="couple")


def test_plain_decoding_is_sampling_on_the_emit_stream():
    """A request without drafts draws exactly what `sample_tokens` draws for that position."""
    call = batch(4, 2, 32)
    logits = call.pop("target_logits")[:4]
    call |= {
        "cu_logits": torch.arange(5, dtype=torch.int32),
        "temperature": torch.tensor([1.0, 0.0, 0.5, 2.0]),
    }
    drawn = sample_tokens(
        logits,
        temperature=call["temperature"],
        seeds=call["seeds"],
        uids=call["uids"],
        positions=call["positions"] + 1,
    )
    for mode in ("chain", "block", "coupled"):
        assert verify_drafts(logits, **call, mode=mode).tokens[:, 0].tolist() == drawn.tolist()
