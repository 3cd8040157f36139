"""The compressor's pairs and carry, and the cache writers, against loops in Python."""

import math
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from dsv41_reference.rope import rope_table
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import ops
from dsv41.cache import PagedKV, Record
from tests.ops.rows import assert_refused, same

BF16, DIM = torch.bfloat16, 6


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Softmax over two rows per channel, of (kv, gate) rows."""
    out = []
    for c in range(DIM):
        g0, g1 = a[DIM + c].item(), b[DIM + c].item()
        w = 1 / (1 + math.exp(g1 - g0))
        out.append(w * a[c].item() + (1 - w) * b[c].item())
    return torch.tensor(out, dtype=torch.float64)


def test_closed_form() -> None:
    rows = torch.randn(5, 2 * DIM)
    carry = torch.full((1, 4, 2 * DIM), torch.nan)
    with accumulate(torch.float64):
        out = ops.compress_pairs(rows, ints(*[0] * 5), torch.arange(5, dtype=torch.int32), carry)
    for t in (1, 3):
        assert out[t].tolist() == pytest.approx(pool(rows[t - 1], rows[t]).to(BF16).tolist())
    assert (out[0::2] == 0).all()
    assert torch.equal(carry[0], rows[[4, 1, 2, 3]])


def test_equal_gates_average_and_a_large_gate_wins() -> None:
    kv = torch.tensor([[1.0] * DIM, [3.0] * DIM])
    for gates, want in (((0.0, 0.0), 2.0), ((100.0, 0.0), 1.0), ((0.0, 100.0), 3.0), ((-1e30, -1e30), 2.0)):
        rows = torch.cat([kv, torch.tensor(gates)[:, None].expand(2, DIM)], 1)
        out = ops.compress_pairs(rows, ints(0, 0), ints(0, 1), torch.zeros(1, 2, 2 * DIM))
        assert (out[1] == want).all()


@settings(max_examples=25)
@given(st.data())
def test_every_cut_gives_the_same(data: st.DataObject) -> None:
    """Several requests, cut anywhere, with padding rows and taken-back tokens: the bits of one pass."""
    slots, requests = data.draw(st.integers(4, 8)), 3
    lengths = [data.draw(st.integers(0, 9)) for _ in range(requests)]
    texts = [torch.randn(n, 2 * DIM) for n in lengths]

    def run(pieces: list[tuple[int, int, int]], carry: torch.Tensor) -> torch.Tensor:
        """Rows of (request, start, stop) one behind the other, then a padding row."""
        rows = torch.cat([*[texts[r][a:b] for r, a, b in pieces], torch.full((1, 2 * DIM), torch.nan)])
        request = ints(*[r for r, a, b in pieces for _ in range(a, b)], -1)
        place = ints(*[p for _, a, b in pieces for p in range(a, b)], 5)
        return ops.compress_pairs(rows, request, place, carry)

    def empty() -> torch.Tensor:
        return torch.full((requests, slots, 2 * DIM), torch.nan)

    with accumulate(torch.float64):
        whole = run([(r, 0, n) for r, n in enumerate(lengths)], empty())
        want, start = [], 0
        for n in lengths:
            want.append(whole[start : start + n])
            start += n
        carry, done = empty(), [0] * requests
        got = [torch.zeros(n, DIM, dtype=BF16) for n in lengths]
        while done != lengths:
            spans = enumerate(zip(done, lengths, strict=True))
            pieces = [(r, d, data.draw(st.integers(min(d + 1, n), n))) for r, (d, n) in spans]
            out, start = run(pieces, carry), 0
            for r, a, b in pieces:
                got[r][a:b] = out[start : start + b - a]
                start += b - a
                back = data.draw(st.integers(0, min(b - a, slots - 1))) if b > a else 0
                done[r] = b - back if b - back > a else b
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert (whole[-1] == 0).all()


def test_requests_do_not_mix() -> None:
    """Each request's first row closes a pair that its own carry opened, though other rows lie before it."""
    carry, rows = torch.randn(3, 4, 2 * DIM), torch.randn(3, 2 * DIM)
    opened = carry[[0, 1, 2], [2, 0, 2]].clone()
    with accumulate(torch.float64):
        out = ops.compress_pairs(rows, ints(0, 1, 2), ints(3, 5, 7), carry)
    for r in range(3):
        assert torch.equal(out[r], pool(opened[r], rows[r]).to(BF16))


def test_padding_rows_touch_nothing() -> None:
    carry = torch.randn(2, 4, 2 * DIM)
    before = carry.clone()
    ops.compress_pairs(torch.randn(3, 2 * DIM), ints(-1, -1, -1), ints(0, 1, 2), carry)
    assert torch.equal(carry, before)


# Writers.


def cache(layout: str = "mxfp8", dim: int = 64, pages: int = 2, size: int = 4) -> PagedKV:
    record = Record(layout, dim)
    return PagedKV(torch.full((pages, size, record.bytes), 0x7F, dtype=torch.uint8), record)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("round_rope", [True, False])
def test_write_cache_is_norm_rope_quantise(norm: bool, round_rope: bool) -> None:
    """In this order; each step rounded to bf16, the rotation only when asked."""
    x, weight = torch.randn(5, 64).to(BF16), torch.randn(64).to(BF16)
    cos, sin = rope_table(torch.arange(5) * 7 + 3, 16, 100.0)
    into, slots = cache("nvfp4"), ints(6, -1, 0, 3, 5)
    keys: dict[str, Any] = {"norm_weight": weight, "eps": 1e-3} if norm else {}
    with accumulate(torch.float64):
        ops.write_cache(x, cos, sin, slots, into, round_rope=round_rope, **keys)
        row = ops.rms_norm(x, weight, eps=1e-3) if norm else x
        if round_rope:
            row = ops.rope(row[:, None], cos, sin)[:, 0].float()
        else:
            turned = row.double().clone()
            a, b = row.double()[:, 48::2], row.double()[:, 49::2]
            turned[:, 48::2], turned[:, 49::2] = a * cos - b * sin, b * cos + a * sin
            row = turned.float()
    want = ops.quantize_nvfp4(row).dequantize(torch.float32)
    assert torch.equal(into.read(slots), torch.where((slots >= 0)[:, None], want, 0))
    untouched = into.pages.view(8, -1)[[1, 2, 4, 7]]
    assert (untouched == 0x7F).all()


def test_copy_records() -> None:
    source, into = cache(), cache(size=3)
    source.pages.random_(0, 256)
    before = into.pages.clone()
    ops.copy_records(source, ints(7, 0, -1, 3), into, ints(5, 1, 2, -1))
    assert torch.equal(into.pages[1, 2], source.pages[1, 3])
    assert torch.equal(into.pages[0, 1], source.pages[0, 0])
    into.pages[1, 2], into.pages[0, 1] = before[1, 2], before[0, 1]
    assert same(into.pages, before)


def test_wrong_slots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CHECK", "1")
    x, table = torch.zeros(2, 64, dtype=BF16), (torch.ones(2, 8), torch.zeros(2, 8))
    assert_refused(lambda: ops.write_cache(x, *table, ints(0, 8), cache()), "slots: -1 to 7, got 0 to 8")
    assert_refused(
        lambda: ops.copy_records(cache(), ints(-2, 0), cache(), ints(0, 1)), "source_slots: -1 to 7, got -2"
    )
    assert_refused(
        lambda: ops.copy_records(cache(), ints(0, 1), cache(), ints(0, 9)), "slots: -1 to 7, got 0 to 9"
    )


R, Z, Q = torch.zeros(2, 12), ints(0, 0), torch.zeros(1, 2, 12)
X, T, C = torch.zeros(2, 64, dtype=BF16), torch.zeros(2, 8), cache()
ERRORS: dict[str, Any] = {
    "kv_gate": (
        lambda: ops.compress_pairs(R.to(BF16), Z, Z, Q),
        r"compress_pairs: expected kv_gate: \[\*, \*\] float32",
    ),
    "odd": (
        lambda: ops.compress_pairs(R[:, :11], Z, Z, Q),
        r"kv_gate: \[num_tokens, 2 \* dim\], got \[2, 11\]",
    ),
    "requests": (lambda: ops.compress_pairs(R, Z.long(), Z, Q), r"request_ids: \[2\] int32, got \[2\] int64"),
    "positions": (lambda: ops.compress_pairs(R, Z, Z[:1], Q), r"positions: \[2\] int32, got \[1\]"),
    "carry": (
        lambda: ops.compress_pairs(R, Z, Z, Q.to(BF16)),
        r"carry: \[\*, \*, 12\] float32, got \[1, 2, 12\] bfloat16",
    ),
    "no slots": (
        lambda: ops.compress_pairs(R, Z, Z, Q[:, :0]),
        r"carry: at least one slot, got \[1, 0, 12\]",
    ),
    "out apart": (
        lambda: ops.compress_pairs(R, Z, Z, Q, out=torch.zeros(6, dtype=torch.bfloat16).expand(2, 6)),
        r"compress_pairs: expected out: elements apart in memory, got strides \(0, 1\)",
    ),
    "out": (lambda: ops.compress_pairs(R, Z, Z, Q, out=R), r"out: \[2, 6\] bfloat16, got \[2, 12\] float32"),
    "write x": (
        lambda: ops.write_cache(X[:, :32], T, T, Z, C),
        r"write_cache: expected x: \[\*, 64\] bfloat16, got \[2, 32\]",
    ),
    "write cos": (lambda: ops.write_cache(X, T[:1], T, Z, C), r"cos: \[2, \*\] float32, got \[1, 8\]"),
    "write slots": (lambda: ops.write_cache(X, T, T, Z[:1], C), r"slots: \[2\] int32, got \[1\]"),
    "write norm": (
        lambda: ops.write_cache(X, T, T, Z, C, norm_weight=X),
        r"norm_weight: \[64\] bfloat16, got \[2, 64\]",
    ),
    "copy record": (
        lambda: ops.copy_records(C, Z, cache("bf16"), Z),
        "copy_records: expected cache: records Record",
    ),
    "copy split": (lambda: ops.copy_records(*[cache("mxfp4"), Z] * 2), "an interleaved record, got mxfp4"),
    "copy from": (lambda: ops.copy_records(C, Z[:1], C, Z), r"slots: \[1\] int32, got \[2\]"),
    "copy to": (lambda: ops.copy_records(C, Z, C, Z.long()), r"slots: \[2\] int32, got \[2\] int64"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])
