"""Engram ops: golden vectors of the published implementation, big-integer twins, properties, refusals."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dsv41_reference import engram as reference
from dsv41_reference import quant
from dsv41_reference.numerics import accumulate
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import V41FlashConfig
from dsv41.config import EngramConfig
from dsv41.formats import E4M3, E8M0
from dsv41.layers.engram import EngramSpec
from dsv41.ops.engram import engram_gate, engram_hash, engram_lookup

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/engram_golden.json").read_text())
SPEC = EngramSpec.from_config(V41FlashConfig.flash())
CLASSES = 99_092
# Golden ids are classes already. One id more stands for an image token.
IDENTITY = torch.cat([torch.arange(CLASSES), torch.tensor([5])]).to(torch.int32)
DEAD = CLASSES
DIGESTS = {
    "A": "d11440f695c3d61ae624b85d9326b2ee6d1dad68f181cf21d42c69708b28272a",
    "B": "e515c07902f6f04218e07b0f7ce951647529becfb35307400d05640083176088",
    "C": "5ce233ce57bada61c9895979a40923c2530dc250ff44a99f901742ca2c5af8f5",
    "D": "6f1dbde2fdf267897b8d002b0c094b1f2d0a840bb86e2de6dec599eea87edf01",
    "E": "cfba58e3714e34ec9a1471fa7d0a30ca423150cdf3c0a25f413e495a5a60b86b",
    "F": "3bbd54816c7e58dfd2a3fa2aaf98c910d156623a7894e541f8cb0bdd26ed729d",
    "R": "50c84ee1ce12258a4b3cb4009111fc04986fbdcc68dc2ab9782cfa989eda940e",
}
TINY_IDS = [3, 1, 4, 1, 5]
TINY = EngramSpec.from_config(
    V41FlashConfig.micro(
        engram=EngramConfig(
            layers=(0, 2), num_rows=(60, 120), max_ngram=3, num_heads=2, head_dim=32,
            base=10, num_classes=8, pad_token=0,
        )
    )
)  # fmt: skip


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def hashed(ids, *, start=0, lookback=None, spec=SPEC, classes=IDENTITY, cu=None, **kwargs) -> torch.Tensor:
    """The op over one request (or the requests that ``cu`` says), with positions from ``start``."""
    tokens = torch.as_tensor(ids, dtype=torch.int32)
    cu = ints(0, len(tokens)) if cu is None else cu
    positions = kwargs.pop("positions", torch.arange(start, start + len(tokens), dtype=torch.int32))
    constants = (spec.multipliers, spec.primes, spec.offsets)
    back = None if lookback is None else torch.tensor(lookback, dtype=torch.int32)
    kwargs.setdefault("image_token", DEAD)
    kwargs.setdefault("pad_token", spec.pad_token)
    return engram_hash(tokens, positions, cu, classes, *constants, lookback=back, **kwargs)


def digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.numpy().astype("<i4").tobytes()).hexdigest()


# Golden vectors.


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_hash_golden(case: str) -> None:
    golden = GOLDEN["cases"][case]
    ids = [DEAD if i == -1 else i for i in golden["ids"]]
    rows = hashed(ids, mask_dead=False)
    assert rows.dtype == torch.int32 and rows.tolist() == golden["rows"]
    assert digest(rows) == DIGESTS[case[0]]
    masked = hashed(ids)
    dead = torch.tensor(ids) == DEAD
    assert (masked[dead] == -1).all() and torch.equal(masked[~dead], rows[~dead])


def test_hash_golden_random() -> None:
    ids = np.random.default_rng(20260911).integers(0, CLASSES, 4096)
    assert ids[:3].tolist() == [3019, 65721, 72364]
    assert digest(hashed(ids)) == DIGESTS["R"]


def test_hash_by_hand() -> None:
    """The worked example of a toy table, from the generator to the rows."""
    assert TINY.multipliers.tolist() == [
        [734366826923567141, 311042903955578225, 47239256865562251],
        [947659773816598419, 459511964909639395, 280521841122799869],
    ]
    assert TINY.primes.tolist() == [[11, 13, 17, 19], [23, 29, 31, 37]]
    rows = hashed(TINY_IDS, spec=TINY, classes=torch.arange(8, dtype=torch.int32), image_token=-1)
    assert rows.tolist() == [
        [[10, 13, 24, 59], [19, 43, 55, 102]],
        [[0, 15, 24, 48], [17, 44, 76, 84]],
        [[6, 21, 32, 48], [4, 34, 74, 101]],
        [[10, 18, 31, 55], [0, 27, 59, 115]],
        [[3, 13, 31, 46], [1, 51, 73, 101]],
    ]


# Integers.


def test_hash_equals_big_integers() -> None:
    """int64 arithmetic against Python integers on 100,000 4-tuples, the largest class among them."""
    stream = np.random.default_rng(7)
    tuples = stream.integers(0, CLASSES, (100_000, 4))
    tuples[stream.random(tuples.shape) < 0.1] = CLASSES - 1
    got = reference.hash_classes(
        torch.from_numpy(tuples), torch.zeros(tuples.shape, dtype=torch.bool), 2,
        SPEC.multipliers, SPEC.primes, SPEC.offsets,
    )  # fmt: skip
    for layer in range(2):
        factors = SPEC.multipliers[layer].tolist()
        primes = SPEC.primes[layer].view(3, 8).tolist()
        keys = []
        for a, b, c, d in tuples.tolist():
            second = a * factors[0] ^ b * factors[1]
            third = second ^ c * factors[2]
            keys.append((second, third, third ^ d * factors[3]))
        # All columns of one head in eight, and every column of a part.
        want = [[key[n] % primes[n][0] for n in range(3)] for key in keys]
        assert (got[:, layer, ::8] - SPEC.offsets[layer, ::8]).tolist() == want
        want = [[key[n] % p for n in range(3) for p in primes[n]] for key in keys[:5000]]
        assert (got[:5000, layer] - SPEC.offsets[layer]).tolist() == want


def test_largest_product_fits() -> None:
    bound = (2**63 - 1) // CLASSES // 2
    assert bound == 46_539_438_283_891
    largest = (CLASSES - 1) * (2 * bound - 1)
    assert largest == 9_223_278_957_977_987_071 < 2**63
    # The same in the op's arithmetic: positive, and the remainder of the true product.
    top = torch.full((1, 4), 2 * bound - 1)
    classes = torch.full((1, 4), CLASSES - 1)
    no = torch.zeros((1, 4), dtype=torch.bool)
    rows = reference.hash_classes(classes, no, 2, top, SPEC.primes[:1], SPEC.offsets[:1])
    third = (rows[0, 0, 8:16] - SPEC.offsets[0, 8:16]).tolist()
    assert third == [largest % p for p in SPEC.primes[0, 8:16].tolist()]


# Properties.


def test_ids_are_compressed_first() -> None:
    """Raw ids never reach the arithmetic: theirs and the pad token's classes do."""
    permuted = torch.randperm(CLASSES, dtype=torch.int32)
    permuted[[2, 7]] = permuted[[7, 2]] if permuted[2] == 2 else permuted[[2, 7]]
    ids = torch.randint(0, CLASSES, (9,))
    want = hashed(permuted[ids], pad_token=int(permuted[2]))
    assert torch.equal(hashed(ids, classes=permuted), want)


def test_start_and_image_and_pad_give_one_row() -> None:
    alone = hashed([77])
    assert torch.equal(hashed([DEAD, 77])[1:], alone)
    assert torch.equal(hashed([2, 2, 2, 77])[3:], alone)


def test_image_blocks_everything_older() -> None:
    """Two tokens back an image hides the token three back as well, whatever it is."""
    rows = [hashed([first, DEAD, 8, 9])[3:] for first in (4, 5)]
    assert torch.equal(*rows)
    assert torch.equal(rows[0], hashed([2, 2, 8, 9])[3:])


@settings(max_examples=30)
@given(st.lists(st.integers(0, CLASSES - 1), min_size=6, max_size=6), st.integers(0, CLASSES - 1))
def test_row_depends_on_exactly_four_ids(ids: list[int], other: int) -> None:
    last = hashed(ids)[5]
    for back in range(6):
        changed = list(ids)
        changed[5 - back] = other
        row = hashed(changed)[5]
        if other == ids[5 - back] or back > 3:
            assert torch.equal(row, last)
        else:
            # Orders shorter than the distance do not see the change.
            first = 0 if back < 2 else 8 * (back - 1)
            assert torch.equal(row[:, :first], last[:, :first])
            assert (row[:, first:] != last[:, first:]).any(0).all()


@settings(max_examples=60)
@given(st.data())
def test_chunks_equal_the_whole(data: st.DataObject) -> None:
    """Any batch of requests, cut into any chunks and handed over with their last ids, hashes as one pass."""
    ids = st.sampled_from([0, 1, 2, 11, 22, 5000, CLASSES - 1, DEAD])
    requests = data.draw(st.lists(st.lists(ids, max_size=12), min_size=1, max_size=3))
    whole = [hashed(r) for r in requests]
    done = [0] * len(requests)
    for left in range(data.draw(st.integers(0, 3)), -1, -1):
        ends = [12 if left == 0 else data.draw(st.integers(0, 5)) for _ in requests]
        steps = [min(end, len(r) - d) for end, d, r in zip(ends, done, requests, strict=True)]
        tokens, positions, lookback, cu = [], [], [], [0]
        for request, at, step in zip(requests, done, steps, strict=True):
            tokens += request[at : at + step]
            positions += range(at, at + step)
            lookback.append(([-1] * 3 + request[:at])[-3:])
            cu.append(len(tokens))
        padding = data.draw(st.integers(0, 2))
        tokens += [9] * padding
        positions += [40] * padding
        rows = hashed(tokens, positions=ints(*positions), cu=ints(*cu), lookback=lookback)
        for r, step in enumerate(steps):
            assert torch.equal(rows[cu[r] : cu[r + 1]], whole[r][done[r] : done[r] + step])
            done[r] += step
        assert (rows[cu[-1] :] == -1).all()
    assert done == [len(r) for r in requests]


def test_drafts_need_no_undo() -> None:
    """A verify step hashes drafts behind committed ids; after a rejection the ids simply differ."""
    committed, drafts = [5, 6, 7, 8], [100, 200, 300]
    rows = hashed(drafts, start=4, lookback=[committed[1:]])
    assert torch.equal(rows, hashed(committed + drafts)[4:])
    again = hashed([100, 9], start=4, lookback=[committed[1:]])
    assert torch.equal(again[0], rows[0]) and torch.equal(again, hashed([*committed, 100, 9])[4:])


def test_same_buffers_after_the_history_changed() -> None:
    """What a replayed graph does: the same tensors, other contents."""
    tokens, out = ints(1, 2, 3), torch.empty((3, 2, 24), dtype=torch.int32)
    assert hashed(tokens, out=out) is out
    tokens.copy_(ints(7, 8, 9))
    hashed(tokens, out=out)
    assert torch.equal(out, hashed([7, 8, 9]))


def test_sizes_at_the_edge() -> None:
    assert hashed([]).shape == (0, 2, 24)
    assert hashed([], cu=ints(0), positions=ints()).shape == (0, 2, 24)
    assert (hashed([4], cu=ints(0), positions=ints(0)) == -1).all()
    two = hashed([4, 5], cu=ints(0, 0, 2), positions=ints(0, 1))
    assert torch.equal(two, hashed([4, 5]))
    last = 1_048_575
    assert torch.equal(hashed([5], start=last, lookback=[[1, 3, 4]]), hashed([1, 3, 4, 5])[3:])
    wide = torch.arange(4)
    constants = (SPEC.multipliers, SPEC.primes, SPEC.offsets)
    assert torch.equal(engram_hash(wide, wide, ints(0, 4), IDENTITY, *constants), hashed([0, 1, 2, 3]))


# Bad input.


def test_values_out_of_range_are_contained() -> None:
    bad = hashed([5, -7, CLASSES + 1, 6])
    assert (bad[1:3] == -1).all()
    assert torch.equal(bad[3], hashed([2, 2, 2, 6])[3])
    assert torch.equal(bad[0], hashed([5])[0])
    # An id that is missing at a valid position blocks too.
    assert torch.equal(hashed([6], start=9), hashed([6]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ids": [5, CLASSES + 1]}, "expected tokens: ids below 99093, got [99093]"),
        ({"ids": [-1]}, "expected tokens: ids below 99093, got [-1]"),
        ({"ids": [5], "start": 2}, "expected lookback: the 2 ids before position 2 of request 0"),
        (
            {"ids": [5], "start": 9, "lookback": [[-1, 3, 4]]},
            "expected lookback: the 3 ids before position 9 of request 0, got [-1, 3, 4]",
        ),
        (
            {"ids": [5, 6], "positions": ints(0, 2)},
            "expected positions: consecutive in request 0, got [0, 2]",
        ),
        ({"ids": [5], "cu": ints(0, 2)}, "expected cu_seqlens: rising from 0 to at most 1, got [0, 2]"),
        ({"ids": [5, 6], "cu": ints(0, 2, 1)}, "expected cu_seqlens: rising from 0"),
    ],
)
def test_values_are_refused_when_checked(kwargs, message, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = kwargs.pop("ids")
    hashed(ids, **kwargs)
    monkeypatch.setenv("DSV41_CHECK", "1")
    with pytest.raises(ValueError) as error:
        hashed(ids, **kwargs)
    assert message in str(error.value) and str(error.value).startswith("engram_hash: expected")


def test_checked_values_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CHECK", "1")
    hashed([5, 6, DEAD, 0, 99], cu=ints(0, 2, 2, 4), positions=ints(1, 2, 9, 10, 0),
           lookback=[[-1, -1, 4], [-1, -1, -1], [1, 2, 3]])  # fmt: skip


HASH_ARGS = {
    "tokens": ints(1, 2),
    "positions": ints(0, 1),
    "cu_seqlens": ints(0, 2),
    "token_classes": IDENTITY,
    "multipliers": SPEC.multipliers,
    "primes": SPEC.primes,
    "offsets": SPEC.offsets,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.ones(2)}, "tokens: [*] int32|int64, got [2] float32"),
        ({"tokens": ints(1, 2)[None]}, "tokens: [*] int32|int64, got [1, 2] int32"),
        ({"positions": ints(0)}, "positions: [2] int32|int64, got [1] int32"),
        ({"cu_seqlens": ints(0, 2, dtype=torch.int64)}, "cu_seqlens: [*] int32, got [2] int64"),
        ({"cu_seqlens": ints()}, "cu_seqlens: [num_requests + 1] int32, got [0] int32"),
        ({"token_classes": IDENTITY.long()}, "token_classes: [*] int32, got [99093] int64"),
        ({"multipliers": SPEC.multipliers[0]}, "multipliers: [*, *] int64, got [4] int64"),
        ({"multipliers": SPEC.multipliers[:, :1]}, "multipliers: [num_layers, orders] with 2 orders or more"),
        ({"primes": SPEC.primes[:1]}, "primes: [2, *] int64, got [1, 24] int64"),
        ({"primes": SPEC.primes[:, :23]}, "primes: columns a multiple of 3"),
        ({"offsets": SPEC.offsets[:, :3]}, "offsets: [2, 24] int64, got [2, 3] int64"),
        ({"lookback": ints(1, 2, 3)}, "lookback: [1, 3] int32|int64, got [3] int32"),
        ({"pad_token": CLASSES + 1}, "pad_token: an integer of 0 to 99092, got 99093"),
        ({"out": torch.empty(2, 2, 24)}, "out: [2, 2, 24] int32, got [2, 2, 24] float32"),
        ({"tokens": torch.ones(2, dtype=torch.int32, device="meta")}, "positions on meta, got cpu"),
    ],
)
def test_hash_refuses(change, message) -> None:
    with pytest.raises(ValueError) as error:
        engram_hash(**(HASH_ARGS | change))
    assert f"engram_hash: expected {message}" in str(error.value)


# Lookup.


def table(rows: int, width: int = 64, low: int = 110, high: int = 125) -> tuple[torch.Tensor, torch.Tensor]:
    values = (torch.randn(rows, width) * 50).clamp(-448, 448).to(E4M3)
    codes = torch.randint(low, high, (rows, width // 32), dtype=torch.uint8)
    return values, codes.view(E8M0)


def test_lookup_is_exact_for_every_value_and_scale() -> None:
    """All 254 finite E4M3 codes under every scale code, against float64; lossless from code 3 to 246."""
    codes = torch.arange(256).to(torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    values = torch.cat([finite, finite[:2]]).view(E4M3)
    number = values.double()
    scales = torch.arange(255, dtype=torch.uint8)
    table_values = values.view(torch.uint8).expand(255, 256).contiguous().view(E4M3)
    table_scale = scales[:, None].expand(255, 8).contiguous().view(E8M0)
    rows = torch.arange(255, dtype=torch.int32)[:, None]
    got = engram_lookup(rows, table_values, table_scale)
    want = number * torch.exp2(scales.double() - 127)[:, None]
    lossless = slice(3, 247)
    assert torch.equal(got[lossless].double(), want[lossless])
    assert torch.equal(got.view(torch.int16), want.float().bfloat16().view(torch.int16))
    assert (got[0] != 0).any()  # byte 0 is 2^-127, not zero


def test_lookup_order_zeros_and_out() -> None:
    values, scale = table(10)
    rows = ints(3, -1, 9, 0, 5, -7).view(2, 3)
    out = torch.empty((2, 192), dtype=torch.bfloat16)
    assert engram_lookup(rows, values, scale, out=out) is out
    dense = quant.from_mxfp8(values, scale.view(torch.uint8)).bfloat16()
    zero = torch.zeros(64, dtype=torch.bfloat16)
    want = torch.stack([torch.cat([dense[3], zero, dense[9]]), torch.cat([dense[0], dense[5], zero])])
    assert torch.equal(out, want)
    assert engram_lookup(rows[:0], values, scale).shape == (0, 192)
    assert torch.equal(engram_lookup(ints(-1).view(1, 1), values[:0], scale[:0]), zero[None])
    # One layer's slice of a hash.
    both = torch.stack([rows, rows.flip(0)], 1)
    assert torch.equal(engram_lookup(both[:, 0], values, scale), out)


def test_lookup_bad_values(monkeypatch: pytest.MonkeyPatch) -> None:
    values, scale = table(4)
    scale.view(torch.uint8)[2, 1] = 255
    rows = ints(1, 4, 2).view(3, 1)
    got = engram_lookup(rows, values, scale)
    assert (got[1] == 0).all() and got[2, 32:].isnan().all() and got[:2].isfinite().all()
    monkeypatch.setenv("DSV41_CHECK", "1")
    engram_lookup(rows[:1], values, scale)
    with pytest.raises(ValueError, match=r"^engram_lookup: expected rows: below 4, got \[4\]"):
        engram_lookup(rows[:2], values, scale)
    with pytest.raises(ValueError, match=r"^engram_lookup: expected scale: no byte 255 .* got row .2."):
        engram_lookup(rows[2:], values, scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ints(0)}, "rows: [*, *] int32, got [1] int32"),
        ({"rows": ints(0, dtype=torch.int64)[None]}, "rows: [*, *] int32, got [1, 1] int64"),
        ({"rows": torch.zeros((3, 4), dtype=torch.int32).t()}, "rows: last dimension contiguous"),
        ({"values": torch.zeros(4, 64)}, "values: [*, *] float8_e4m3fn, got [4, 64] float32"),
        ({"values": torch.zeros(4, 40).to(E4M3)}, "values: head_dim a multiple of 32"),
        ({"values": torch.zeros(4, 128).to(E4M3)[:, :64]}, "values: contiguous, got"),
        ({"scale": torch.zeros((4, 2), dtype=torch.uint8)}, "scale: [4, 2] float8_e8m0fnu, got [4, 2] uint8"),
        ({"out": torch.zeros(1, 64)}, "out: [1, 64] bfloat16, got [1, 64] float32"),
    ],
)
def test_lookup_refuses(change, message) -> None:
    values, scale = table(4)
    with pytest.raises(ValueError) as error:
        engram_lookup(**({"rows": ints(0).view(1, 1), "values": values, "scale": scale} | change))
    assert f"engram_lookup: expected {message}" in str(error.value)


def test_rows_requantise_without_loss() -> None:
    """A dequantised row is an MXFP8 operand again, bit for bit, while its blocks are above the floor."""
    values, scale = table(400, 256, low=110, high=140)
    rows = torch.arange(400, dtype=torch.int32)[:, None]
    e = engram_lookup(rows, values, scale)
    assert e.unflatten(-1, (-1, 32)).abs().amax(-1).min() >= 1e-4
    assert torch.equal(quant.q8(e), e.float())
    # Below the floor it is not: the scale no longer follows the block.
    _, low = table(400, 256, low=90, high=104)
    e = engram_lookup(rows, values, low)
    assert not torch.equal(quant.q8(e), e.float())


# Gate.


def gate_case(tokens: int = 5, streams: int = 4, hidden: int = 64) -> dict[str, Any]:
    return {
        "x": torch.randn(tokens, streams, hidden).bfloat16(),
        "kv": torch.randn(tokens, (streams + 1) * hidden).bfloat16(),
        "q_weight": (1 + 0.3 * torch.randn(streams, hidden)).bfloat16(),
        "k_weight": (1 + 0.3 * torch.randn(streams, hidden)).bfloat16(),
    }


def lattice() -> dict[str, Any]:
    t, s, j = torch.meshgrid(torch.arange(2), torch.arange(3), torch.arange(8), indexing="ij")
    return {
        "x": (((7 * t + 3 * s + 5 * j) % 17 - 8) / 8)[:, :2].bfloat16(),
        "kv": (((5 * t + 11 * s + 3 * j) % 13 - 6) / 4).flatten(1).bfloat16(),
        "q_weight": (1 + ((s + j) % 5 - 2) / 16)[0, :2].bfloat16(),
        "k_weight": (1 + ((2 * s + j) % 7 - 3) / 16)[0, :2].bfloat16(),
    }


def test_gate_golden_values() -> None:
    u = torch.tensor([0.0, -1e-8, 0.25, -0.25, 4.0], dtype=torch.float64)
    want = [0.50025, 0.49975, 0.622459331, 0.377540669, 0.880797078]
    assert reference.gate_value(u).tolist() == pytest.approx(want, abs=5e-10)
    assert reference.gate_value(torch.tensor([-0.0])).item() < 0.5  # copysign, not a comparison with zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gate_golden_lattice(dtype: torch.dtype) -> None:
    case = lattice()
    with accumulate(dtype):
        keys = case["kv"].unflatten(-1, (3, 8))[:, :2]
        u = reference.gate_scores(
            case["x"], keys, case["q_weight"].to(dtype) * case["k_weight"].to(dtype), 1e-20
        )
        got = engram_gate(**case)
    want = [0.19722201, -1.61369753, -0.71025038, -0.57723188]
    assert u.flatten().tolist() == pytest.approx(want, abs=5e-7)
    want = [0.60923481, 0.21920352, 0.30095306, 0.31869885]
    assert reference.gate_value(u).flatten().tolist() == pytest.approx(want, abs=1e-7)
    row = [-0.54296875, 0.5390625, -0.359375, 0.72265625, -0.3203125, 0.76171875, -0.13671875, -1.1796875]
    assert got[0, 0].tolist() == row


def test_gate_dead_rows_are_untouched() -> None:
    case = gate_case()
    want = engram_gate(**case)
    dead = torch.tensor([False, True, False, True, False])
    case["kv"][1] = float("nan")
    case["x"][3, 1, :2] = torch.tensor([-0.0, float("inf")])
    got = engram_gate(**case, dead=dead)
    bits = got.view(torch.int16), case["x"].view(torch.int16)
    assert torch.equal(bits[0][dead], bits[1][dead])
    assert torch.equal(got[~dead], want[~dead])


def test_gate_of_zeros_is_finite() -> None:
    case = gate_case()
    case["x"].zero_()
    value = case["kv"].unflatten(-1, (5, 64))[:, 4:]
    assert torch.equal(engram_gate(**case), (0.50025 * value.float()).bfloat16().expand(-1, 4, -1))
    case["kv"].zero_()
    assert (engram_gate(**case) == 0).all()
    assert engram_gate(**{k: v[:0] if k in ("x", "kv") else v for k, v in case.items()}).shape == (0, 4, 64)


def test_gate_row_by_row_and_in_place() -> None:
    case = gate_case(tokens=7, hidden=96)
    with accumulate(torch.float64):
        whole = engram_gate(**case)
        for i in range(7):
            part = case | {"x": case["x"][i : i + 1], "kv": case["kv"][i : i + 1]}
            assert torch.equal(engram_gate(**part), whole[i : i + 1])
        case["x"] = case["x"].clone()
        assert engram_gate(**case, out=case["x"]) is case["x"]
    assert torch.equal(case["x"], whole)


def test_gate_formula_in_plain_python() -> None:
    case = gate_case(tokens=2, streams=2, hidden=32)
    with accumulate(torch.float64):
        got = engram_gate(**case, eps=1e-3)
    for t in range(2):
        value = case["kv"][t, 64:].tolist()
        for s in range(2):
            x, key = case["x"][t, s].tolist(), case["kv"][t, 32 * s : 32 * s + 32].tolist()
            w = [
                q * k for q, k in zip(case["q_weight"][s].tolist(), case["k_weight"][s].tolist(), strict=True)
            ]
            dot = math.fsum(a * b * c for a, b, c in zip(x, w, key, strict=True))
            size = math.sqrt(
                (math.fsum(a * a for a in x) / 32 + 1e-3) * (math.fsum(a * a for a in key) / 32 + 1e-3)
            )
            u = dot / size / math.sqrt(32)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(u), 1e-6)), u)))
            want = torch.tensor([a + gate * v for a, v in zip(x, value, strict=True)]).bfloat16()
            assert torch.equal(got[t, s], want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 4, 64)}, "x: [*, *, *] bfloat16, got [5, 4, 64] float32"),
        ({"kv": torch.zeros(5, 256).bfloat16()}, "kv: [5, 320] bfloat16, got [5, 256] bfloat16"),
        ({"q_weight": torch.zeros(64).bfloat16()}, "q_weight: [4, 64] bfloat16, got [64] bfloat16"),
        ({"k_weight": torch.zeros(4, 64)}, "k_weight: [4, 64] bfloat16, got [4, 64] float32"),
        ({"dead": torch.zeros(4, dtype=torch.bool)}, "dead: [5] bool, got [4] bool"),
        ({"out": torch.zeros(5, 4, 32).bfloat16()}, "out: [5, 4, 64] bfloat16, got [5, 4, 32] bfloat16"),
    ],
)
def test_gate_refuses(change, message) -> None:
    with pytest.raises(ValueError) as error:
        engram_gate(**(gate_case() | change))
    assert f"engram_gate: expected {message}" in str(error.value)


@pytest.mark.parametrize("op", ["hash", "lookup", "gate"])
def test_ops_are_well_formed(op: str) -> None:
    """Schema, fake and aliasing of the registered ops."""
    values, scale = table(4)
    case = gate_case()
    calls = {
        "hash": (*HASH_ARGS.values(),),
        "lookup": (ints(0, -1).view(1, 2), values, scale.view(torch.uint8), torch.zeros(1, 128).bfloat16()),
        "gate": (*case.values(), None, 1e-20, torch.zeros_like(case["x"])),
    }
    tokens, positions, cu, *constants = calls["hash"]
    out = torch.zeros((2, 2, 24), dtype=torch.int32)
    calls["hash"] = (tokens, positions, cu, None, *constants, 2, -1, True, out)
    overload = getattr(torch.ops.dsv41, f"engram_{op}").default
    # The schema check multiplies its inputs to see whether they are written, which 8-bit floats cannot do.
    checks = ("test_faketensor",) if op == "lookup" else ("test_schema", "test_faketensor")
    torch.library.opcheck(overload, calls[op], test_utils=checks)
