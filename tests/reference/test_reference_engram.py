"""The Engram hash against golden rows and a scalar form, the gate against its goldens."""

import json
import math
from pathlib import Path

import pytest
import torch
from dsv41_reference import dense

from dsv41.config import EngramConfig

pytestmark = pytest.mark.usefixtures("float64")
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "engram_golden.json").read_text())
FLASH = EngramConfig()


def test_multipliers_of_the_release_are_what_numpy_draws():
    numpy = pytest.importorskip("numpy")
    bound = max(1, (2**63 - 1) // FLASH.num_classes // 2)
    assert bound == 46_539_438_283_891
    for layer in FLASH.layers:
        ours = dense.engram_multipliers(layer, FLASH.num_classes, 4)
        drawn = numpy.random.default_rng(10007 * layer).integers(0, bound, size=4, dtype=numpy.int64)
        assert list(ours) == [2 * int(r) + 1 for r in drawn] == [int(m) for m in GOLDEN["mult"][str(layer)]]
    small = dense.engram_multipliers(0, 8, 3)
    assert small == (734366826923567141, 311042903955578225, 47239256865562251)


def test_primes_fill_the_declared_tables():
    primes = dense.engram_primes(FLASH.base, 2, FLASH.columns)
    assert primes == [GOLDEN["primes"]["1"], GOLDEN["primes"]["14"]]
    assert tuple(map(sum, primes)) == FLASH.num_rows
    assert dense.engram_primes(10, 2, 4) == [[11, 13, 17, 19], [23, 29, 31, 37]]


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_golden_rows(name):
    case = GOLDEN["cases"][name]
    ids = torch.tensor(case["ids"])
    primes = dense.engram_primes(FLASH.base, 2, FLASH.columns)
    for i, layer in enumerate(FLASH.layers):
        multipliers = dense.engram_multipliers(layer, FLASH.num_classes, FLASH.max_ngram)
        rows = dense.engram_rows(ids.clamp(min=0), ids < 0, GOLDEN["pad"], multipliers, primes[i])
        assert rows.tolist() == [token[i] for token in case["rows"]]


def test_rows_of_a_hand_made_table():
    primes = dense.engram_primes(10, 2, 4)
    ids, alive = torch.tensor([3, 1, 4, 1, 5]), torch.zeros(5, dtype=torch.bool)
    rows = [
        dense.engram_rows(ids, alive, 0, dense.engram_multipliers(i, 8, 3), primes[i // 2]) for i in (0, 2)
    ]
    assert rows[0].tolist() == [
        [10, 13, 24, 59],
        [0, 15, 24, 48],
        [6, 21, 32, 48],
        [10, 18, 31, 55],
        [3, 13, 31, 46],
    ]
    assert rows[1].tolist()[0] == [19, 43, 55, 102] and rows[1].tolist()[4] == [1, 51, 73, 101]


def test_start_dead_and_explicit_pad_are_one_context():
    primes = dense.engram_primes(10, 1, 6)[0]
    multipliers = dense.engram_multipliers(3, 50, 4)

    def last(ids):
        ids = torch.tensor(ids)
        return dense.engram_rows(ids.clamp(min=0), ids < 0, 2, multipliers, primes)[-1].tolist()

    assert last([7]) == last([-1, 7]) == last([2, 2, 2, 7]) == last([9, 9, -1, 7])
    assert last([9, -1, 8, 7]) == last([8, 7]) != last([9, 9, 8, 7])


def test_rows_of_a_run_by_scalars(small):
    """Python integers, one token and column at a time, from the token ids."""
    cfg = small.cfg
    tokens, classes = small.tokens.tolist(), small.classes.tolist()
    pad = classes[cfg.engram.pad_token]
    number = cfg.engram.base
    for layer in cfg.engram.layers:
        multipliers = dense.engram_multipliers(layer, cfg.engram.num_classes, cfg.engram.max_ngram)
        primes = []
        while len(primes) < cfg.engram.columns:
            if number > 1 and all(number % d for d in range(2, number)):
                primes.append(number)
            number += 1
        rows = small.trace[f"engram_rows.{layer}"].tolist()
        for p, token in enumerate(tokens):
            if token == cfg.image_token:
                assert rows[p] == [-1] * cfg.engram.columns
                continue
            for column in range(cfg.engram.columns):
                mixed, blocked = 0, False
                for back in range(column // cfg.engram.num_heads + 2):
                    blocked = blocked or p - back < 0 or tokens[p - back] == cfg.image_token
                    mixed ^= (pad if blocked else classes[tokens[p - back]]) * multipliers[back]
                assert rows[p][column] == mixed % primes[column] + sum(primes[:column])


def test_gate_of_a_lattice():
    t, s, j = torch.meshgrid(torch.arange(2), torch.arange(3), torch.arange(8), indexing="ij")
    streams = (((7 * t + 3 * s + 5 * j) % 17 - 8) / 8)[:, :2].bfloat16()
    kv = (((5 * t + 11 * s + 3 * j) % 13 - 6) / 4).bfloat16()
    s, j = s[0, :2], j[0, :2]
    factor = (1 + ((s + j) % 5 - 2) / 16) * (1 + ((2 * s + j) % 7 - 3) / 16)
    alive = torch.zeros(2, dtype=torch.bool)
    out = dense.engram_gate(streams, kv[:, :2], kv[:, 2], factor, alive, 1e-20)
    first = [-0.54296875, 0.5390625, -0.359375, 0.72265625, -0.3203125, 0.76171875, -0.13671875, -1.1796875]
    assert out[0, 0].tolist() == first
    gates = torch.tensor([[0.60923481, 0.21920352], [0.30095306, 0.31869885]], dtype=torch.float64)
    expected = streams.double() + gates[..., None] * kv[:, 2:].double()
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)
    dead = dense.engram_gate(streams, kv[:, :2], kv[:, 2] * math.nan, factor, ~alive, 1e-20)
    assert torch.equal(dead, streams)


@pytest.mark.parametrize(
    ("u", "gate"),
    [(0.0, 0.50025), (-1e-8, 0.49975), (0.25, 0.622459331), (-0.25, 0.377540669), (4.0, 0.880797078)],
)
def test_gate_values(u, gate):
    """One stream of width 1: X and K are ±1, so u is the factor itself."""
    one = torch.ones(1, 1, 1).bfloat16()
    value = torch.full((1, 1), 2.0**40).bfloat16()
    out = dense.engram_gate(one, one, value, torch.tensor([[u]]), torch.zeros(1, dtype=torch.bool), 1e-20)
    assert out.item() / 2.0**40 == pytest.approx(gate, rel=2**-8)
