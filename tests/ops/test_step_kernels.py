"""Triton kernels of mHC, Engram and the router equal the reference: interpreted, on a GPU as launched."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate

from dsv41 import V41FlashConfig, ops, use
from dsv41.formats import quantize_mxfp8
from dsv41.layers.engram import EngramSpec
from dsv41.ops.hyper import mhc_scratch
from tests.ops.rows import same, tensors
from tests.tools import triton_interp

BF16, I32, U8 = torch.bfloat16, torch.int32, torch.uint8
interpreted = pytest.mark.skipif(not triton_interp.available(), reason="needs triton")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MIXING = {"norm_eps": 1e-20, "eps": 1e-6, "iters": 20}
SPEC = EngramSpec.from_config(V41FlashConfig.flash())


@functools.cache
def kernels(family: str) -> Any:
    return triton_interp.interpret(f"dsv41.ops.{family}.triton_cuda")


def on_device(call: Callable[..., Any], *args: Any, **options: Any) -> list[torch.Tensor]:
    """The op's results on the GPU, moved back."""

    def move(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(move(y) for y in x)
        return x.cuda() if isinstance(x, torch.Tensor) else x

    with use("triton_cuda", call):
        return [t.cpu() for t in tensors(call(*map(move, args), **{k: move(v) for k, v in options.items()}))]


def rare(got: torch.Tensor, want: torch.Tensor, share: float = 1e-3, units: int = 1) -> None:
    """bf16 results of f32 sums in another order: a unit apart at most, and that rarely. Where terms cancel,
    units are as small as the result; there, 1e-6 of the largest of the row.
    """
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
    a, b = got.view(torch.int16).int(), want.view(torch.int16).int()
    if not a.numel():
        return
    size = want.float().flatten(1).abs().amax(1).view(-1, *[1] * (want.dim() - 1))
    cancelled = (got.float() - want.float()).abs() <= 1e-6 * size
    assert (((a - b).abs() <= units) | cancelled).all()
    assert ((a != b) & ~cancelled).float().mean() <= share


# ---- mHC ----


def mixing(tokens: int, hidden: int) -> Any:
    """x with a row of NaN and one of zeros, fn, base, scale."""
    x = torch.randn(tokens, 4, hidden).to(BF16)
    if tokens > 2:
        x[1, 2, 5], x[2] = torch.nan, 0
    fn = torch.randn(24, 4 * hidden) * hidden**-0.5
    return x, fn, torch.randn(24), torch.tensor([0.5, -1.5, 2.0])


def assert_mixes(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-7, equal_nan=True)


def launch_mixes(module: Any, x: torch.Tensor, *params: torch.Tensor, iters: int = 20) -> list[torch.Tensor]:
    tokens, _, hidden = x.shape
    out = [torch.zeros(tokens, 4), torch.zeros(tokens, 4), torch.zeros(tokens, 4, 4)]
    module.mhc_mixes(x, *params, 1e-20, 1e-6, iters, *out, torch.zeros(mhc_scratch(tokens, hidden)))
    return out


@interpreted
@pytest.mark.parametrize("tokens, hidden", [(5, 128), (66, 32), (3, 160)])
def test_mixes(tokens: int, hidden: int) -> None:
    x, *params = mixing(tokens, hidden)
    with accumulate(torch.float64):
        want = ops.mhc_mixes(x, *params, **MIXING)
    assert_mixes(launch_mixes(kernels("hyper"), x, *params), want)


@interpreted
def test_mixing_weights_keep_their_24_bits() -> None:
    """A sum of one product shows every bit of its weight; bf16 weights, or two parts of them, would not."""
    x, fn = torch.zeros(1, 4, 64, dtype=BF16), torch.zeros(24, 256)
    x[0, 0, 0], fn[0, 0] = 1, 1 + 2**-12 + 2**-23
    params = (fn, torch.zeros(24), torch.ones(3))
    with accumulate(torch.float64):
        want = ops.mhc_mixes(x, *params, **MIXING)
    parts = kernels("hyper")
    assert_mixes(launch_mixes(parts, x, *params), want)
    sums = torch.zeros(mhc_scratch(1, 64))
    out = [torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(1, 4, 4)]
    parts.mhc_mixes(x, *params, 1e-20, 1e-6, 20, *out, sums)
    assert sums.view(-1, 32)[:, 16].sum() == 1 + 2**-12 + 2**-23


@interpreted
def test_the_boundary_is_the_ops_one_after_the_other() -> None:
    for tokens, hidden in ((5, 128), (3, 96)):
        x, *params = mixing(tokens, hidden)
        y, weight = torch.randn(tokens, hidden).to(BF16), torch.randn(hidden).to(BF16)
        mixes = ops.mhc_mixes(torch.randn(tokens, 4, hidden).to(BF16), *params, **MIXING)
        want = ops.mhc_boundary(y, x, mixes, *params[:3], weight=weight, **MIXING)
        pre, post, comb = mixes
        new, norm, values = x.clone(), torch.zeros_like(y), torch.zeros(tokens, hidden, dtype=U8)
        following = [torch.zeros_like(m) for m in mixes]
        codes = torch.zeros(tokens, hidden // 32, dtype=U8)
        scratch = torch.zeros(mhc_scratch(tokens, hidden))
        kernels("hyper").mhc_boundary(
            y, new, post, comb, pre, *params, weight, 1e-20, 1e-6, 20, 1e-4,
            new, *following, norm, values, codes, scratch,
        )  # fmt: skip
        rare(new, want.x)
        assert_mixes(following, (want.pre, want.post, want.comb))
        rare(norm, want.norm)
        q = ops.quantize_mxfp8(norm)  # of the very rows that it wrote
        assert same(values, q.values.view(U8)) and same(codes, q.scale.view(U8))
        again = launch_mixes(kernels("hyper"), new, *params)
        assert all(torch.equal(a, b) for a, b in zip(again, following, strict=True) if not a.isnan().any())
        alone = [torch.zeros_like(t) for t in (new, norm, values, codes)]
        kernels("hyper").mhc_boundary(
            y, x, post, comb, pre, *params, weight, 1e-20, 1e-6, 20, 1e-4,
            alone[0], *(m[:0] for m in mixes), *alone[1:], scratch[:0],
        )  # fmt: skip
        rare(alone[0], new)
        rare(alone[1], norm)
        q = ops.quantize_mxfp8(alone[1])
        assert same(alone[2], q.values.view(U8)) and same(alone[3], q.scale.view(U8))


@interpreted
@pytest.mark.parametrize("streams, hidden", [(4, 96), (2, 1100)])
def test_collapse_and_expand(streams: int, hidden: int) -> None:
    x, y = torch.randn(5, streams, hidden + 8).to(BF16)[..., :hidden], torch.randn(5, hidden).to(BF16)
    x[1, 0, 3] = torch.nan
    pre, comb = torch.rand(5, streams), torch.rand(5, streams, streams)
    out = torch.zeros(5, hidden, dtype=BF16)
    kernels("hyper").mhc_collapse(x, pre, out)
    rare(out, ops.mhc_collapse(x, pre))
    wide = torch.zeros(5, streams, hidden, dtype=BF16)
    kernels("hyper").mhc_expand(y, x, pre, comb, wide)
    rare(wide, ops.mhc_expand(y, x, pre, comb))


# ---- router ----


@interpreted
@pytest.mark.parametrize("experts, top_k", [(384, 6), (12, 4), (128, 3)])
def test_route(experts: int, top_k: int) -> None:
    logits, bias, vision = torch.randn(7, experts) * 8, torch.randn(experts), torch.randn(experts)
    logits[0, 3], logits[1], logits[2], logits[3, 5] = 30, 0, -1e4, torch.nan
    image = torch.arange(7) % 3 == 0
    cases: list[dict[str, Any]] = [{}, {"image_bias": vision, "image": image}]
    for options in cases:
        want = ops.topk_route(logits, bias, top_k=top_k, scale=1.5, temperature=0.7, **options)
        ids, weights = torch.zeros(7, top_k, dtype=I32), torch.zeros(7, top_k)
        given = (options.get("image_bias"), options.get("image"))
        kernels("route").topk_route(logits, bias, *given, 0.7, 1.5, ids, weights)
        assert torch.equal(ids, want[0])
        torch.testing.assert_close(weights, want[1], rtol=1e-6, atol=1e-9, equal_nan=True)
    ties = torch.zeros(2, experts)
    ids, weights = torch.zeros(2, top_k, dtype=I32), torch.zeros(2, top_k)
    kernels("route").topk_route(ties, torch.zeros(experts), None, None, 1.0, 1.0, ids, weights)
    assert ids.tolist() == [list(range(top_k))] * 2


@interpreted
@pytest.mark.parametrize("tokens", [0, 1, 700])
def test_physical(tokens: int) -> None:
    ids = torch.randint(-2, 20, (tokens, 6), dtype=I32)
    table = torch.randint(0, 30, (2, 16, 16), dtype=torch.int16)[1, :, :8]
    want, out = ops.physical_experts(ids, table, source=77, step=12345678901), torch.full((tokens, 6), 9)
    out = out.to(I32)
    kernels("route").physical_experts(ids, table, 77, torch.tensor([12345678901]), out)
    assert torch.equal(out, want)


# ---- Engram ----

CUTS = [([5, 0, 40, 1], [0, 7, 2, 1], 3), ([0], [0], 2), ([70], [0], 0), ([], [], 4)]


def hashing(lens: list[int], starts: list[int], padding: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """(arguments, lookback): ids out of range and image tokens (7) among them."""
    cu = torch.tensor([0, *lens]).cumsum(0).to(I32)
    rows, vocab = int(cu[-1]) + padding, 1000
    tokens = torch.randint(-1, vocab + 2, (rows,)).to(dtype)
    tokens[torch.rand(rows) < 0.2] = 7
    spans = [torch.arange(s, s + n) for n, s in zip(lens, starts, strict=True)]
    positions = torch.cat([*spans, torch.zeros(padding)]).to(I32)
    classes = torch.randint(0, 99_092, (vocab,), dtype=I32)
    constants = (classes, SPEC.multipliers, SPEC.primes, SPEC.offsets)
    return (tokens, positions, cu, *constants), torch.randint(-1, vocab, (len(lens), 3), dtype=I32)


@interpreted
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cut", CUTS)
def test_hash(cut: Any, dtype: torch.dtype) -> None:
    args, back = hashing(cut[0], cut[1], cut[2], dtype)
    for lookback in (back, None):
        for mask_dead in (True, False):
            want = ops.engram_hash(*args, lookback=lookback, image_token=7, mask_dead=mask_dead)
            out = torch.full_like(want, 99)
            kernels("engram").engram_hash(*args[:3], lookback, *args[3:], 2, 7, mask_dead, out)
            assert torch.equal(out, want)


def table(rows: int, width: int) -> Any:
    """Rows with every kind of scale and NaN values."""
    made = quantize_mxfp8(torch.randn(rows, width) * 3)
    made.scale.view(U8)[3:7] = torch.tensor([255, 0, 246, 254], dtype=U8)[:, None]
    made.values.view(U8)[7, 3], made.values.view(U8)[8, 3] = 0x7F, 0xFF
    return made


@interpreted
@pytest.mark.parametrize("width", [256, 32, 96])
def test_lookup(width: int) -> None:
    made, rows = table(50, width), torch.randint(-2, 55, (13, 2, 6), dtype=I32)[:, 1]
    rows[0] = torch.arange(3, 9)
    want = ops.engram_lookup(rows, made.values, made.scale)
    apart = {"values.device != rows.device and items >= SORTED": "True"}  # as for host memory
    for module in (kernels("engram"), triton_interp.interpret("dsv41.ops.engram.triton_cuda", apart)):
        out = torch.full_like(want, 9)
        module.engram_lookup(rows, made.values, made.scale.view(U8), out)
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.nan_to_num(5), want.nan_to_num(5))


def gating(tokens: int, streams: int, hidden: int) -> Any:
    x, kv = (
        torch.randn(tokens, streams, hidden).to(BF16),
        torch.randn(tokens, (streams + 1) * hidden).to(BF16),
    )
    weights = [torch.randn(streams, hidden).to(BF16) for _ in range(2)]
    dead = torch.rand(tokens) < 0.3
    kv[0], dead[0], x[1, 0] = torch.nan, True, 0
    return x, kv, *weights, dead


@interpreted
@pytest.mark.parametrize("tokens, streams, hidden", [(5, 4, 128), (3, 2, 96), (13, 2, 32), (2, 4, 5120)])
def test_gate(tokens: int, streams: int, hidden: int) -> None:
    *args, dead = gating(tokens, streams, hidden)
    many = triton_interp.interpret("dsv41.ops.engram.triton_cuda", {"count >= 1024": "count >= 10"})
    for given in (dead, None):
        want, out = ops.engram_gate(*args, dead=given), torch.zeros(tokens, streams, hidden, dtype=BF16)
        module = kernels("engram") if tokens < 10 else many
        module.engram_gate(*args, given, 1e-20, out)
        rare(out, want)


# ---- planted faults ----

FAULTS = {
    "two parts of a weight": ("hyper", "tl.dot(x, tl.trans(low), total)", "total", "mixes"),
    "comb transposed": ("hyper", "c = comb + at * 16 + k", "c = comb + at * 16 + 4 * k", "boundary"),
    "columns before rows": ("hyper", "_divide(c, tl.sum(c, 1)[:, None, :] + eps)", "c", "mixes"),
    "ties to the higher id": (
        "route",
        "tl.min(tl.where(key == best, lane, PADDED), 0)",
        "tl.max(tl.where(key == best, lane, -1), 0)",
        "route",
    ),
    "bias in the weights": (
        "route",
        "stride + chosen), temperature, UNIT)",
        "stride + chosen), 1.0, UNIT)",
        "route",
    ),
    "own pair counted": ("route", "tl.cumsum(mine, 0) - mine", "tl.cumsum(mine, 0)", "physical"),
    "not sticky": ("engram", "blocked = blocked | (known == 0)", "blocked = known == 0", "hash"),
    "padding hashed": ("engram", "used = live & (row < tl.load(cu + requests))", "used = live", "hash"),
    "gate of a dead row": ("engram", "closed = tl.load(dead + at) != 0", "closed = at < 0", "gate"),
    "subnormal scale": ("engram", "tl.where(code == 0, 0x00400000, code << 23)", "code << 23", "lookup"),
}


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, old, new, check = FAULTS[fault]
    broken = triton_interp.interpret(f"dsv41.ops.{family}.triton_cuda", {old: new})
    sound = kernels
    monkeypatch.setattr(f"{__name__}.kernels", lambda name: broken if name == family else sound(name))
    checks: dict[str, Callable[[], object]] = {
        "mixes": test_mixing_weights_keep_their_24_bits if "parts" in fault else lambda: test_mixes(5, 128),
        "boundary": test_the_boundary_is_the_ops_one_after_the_other,
        "route": lambda: test_route(12, 4),
        "physical": lambda: test_physical(700),
        "hash": lambda: test_hash(CUTS[0], torch.int32),
        "gate": lambda: test_gate(5, 4, 128),
        "lookup": lambda: test_lookup(32),
    }
    with pytest.raises(AssertionError):
        checks[check]()


# ---- on a GPU ----


@on_gpu
@pytest.mark.parametrize("tokens", [0, 1, 65, 1100])
def test_hyper_on_the_gpu(tokens: int) -> None:
    x, *params = mixing(tokens, 5120)
    y, weight = torch.randn(tokens, 5120).to(BF16), torch.randn(5120).to(BF16)
    with accumulate(torch.float64):
        mixes = ops.mhc_mixes(x, *params, **MIXING)
    assert_mixes(on_device(ops.mhc_mixes, x, *params, **MIXING), mixes)
    pre, post, comb = mixes
    rare(on_device(ops.mhc_collapse, x, pre)[0], ops.mhc_collapse(x, pre))
    rare(on_device(ops.mhc_expand, y, x, post, comb)[0], ops.mhc_expand(y, x, post, comb))
    got = on_device(ops.mhc_boundary, y, x, mixes, *params, weight, **MIXING)
    want = ops.mhc_boundary(y, x, mixes, *params[:3], weight=weight, **MIXING)
    rare(got[0], want.x)
    # Where a stream was rounded the other way, four that cancel leave more of that than of themselves.
    other = (got[0] != want.x).any(1)
    most = want.norm.float().abs().amax(1, keepdim=True) if tokens else 0.0
    assert not (((got[4].float() - want.norm.float()).abs() > 2**-5 * most) & other).any()
    rare(torch.where(other, want.norm, got[4]), want.norm, 1e-2, units=2)  # rounded twice
    q = ops.quantize_mxfp8(got[4])
    assert same(got[5].view(U8), q.values.view(U8)) and same(got[6].view(U8), q.scale.view(U8))
    again = on_device(ops.mhc_mixes, got[0], *params, **MIXING)
    assert all(same(a, b) for a, b in zip(again, got[1:4], strict=True))
    few = slice(0, 7)  # the same bits in a smaller batch, which is cut another way
    small = tuple(m[few].contiguous() for m in mixes)
    part = on_device(ops.mhc_boundary, y[few], x[few], small, *params, weight, **MIXING)
    assert all(same(a, b[few]) for a, b in zip(part, got, strict=True))


@on_gpu
@pytest.mark.parametrize("tokens", [1, 65, 1100])
def test_a_boundary_without_mixes_has_the_bits_of_one_with(tokens: int) -> None:
    x, fn, base, scale = (t.cuda() for t in mixing(tokens, 5120))
    y, weight = (torch.randn(n, 5120, device="cuda").to(BF16) for n in (tokens, 1))
    mixes = ops.mhc_mixes(x, fn, base, scale, **MIXING)
    whole, alone = (
        ops.mhc_boundary(y, x, mixes, fn, base, scale, weight[0], mix=mix, **MIXING) for mix in (True, False)
    )
    for a, b in (
        (whole.x, alone.x),
        (whole.norm, alone.norm),
        *zip(whole.q.flat(), alone.q.flat(), strict=True),
    ):
        assert same(a.cpu(), b.cpu())
    assert not len(alone.pre) and not len(alone.post) and not len(alone.comb)


@on_gpu
@pytest.mark.parametrize("tokens", [0, 1, 65, 4096])
def test_route_and_engram_on_the_gpu(tokens: int) -> None:
    for experts, top_k in ((384, 6), (128, 3)):
        logits, bias = torch.randn(tokens, experts) * 8, torch.randn(experts)
        got = on_device(ops.topk_route, logits, bias, top_k=top_k, scale=1.5)
        want = ops.topk_route(logits, bias, top_k=top_k, scale=1.5)
        agree = (got[0] == want[0]).all(1)  # exp is not the same to the last bit everywhere
        assert tokens == 0 or agree.float().mean() > 0.999
        torch.testing.assert_close(got[1][agree], want[1][agree], rtol=1e-5, atol=1e-8)
    ids, places = torch.randint(-1, 385, (tokens, 6), dtype=I32), torch.randint(0, 500, (384, 64))
    places = places.to(torch.int16)
    want = ops.physical_experts(ids, places, source=5, step=9)
    assert same(on_device(ops.physical_experts, ids, places, source=5, step=9)[0], want)
    args, back = hashing([tokens // 2, 0, tokens - tokens // 2], [0, 7, 2], 3, torch.int32)
    want = ops.engram_hash(*args, lookback=back, image_token=7)
    assert same(on_device(ops.engram_hash, *args, lookback=back, image_token=7)[0], want)
    made, rows = table(50, 256), torch.randint(-2, 55, (tokens, 2, 24), dtype=I32)[:, 1]
    want = ops.engram_lookup(rows, made.values, made.scale)
    got = on_device(ops.engram_lookup, rows, made.values, made.scale)[0]
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(5), want.nan_to_num(5))
    pinned = [t.view(U8).pin_memory().view(t.dtype) for t in (made.values, made.scale)]
    assert same(ops.engram_lookup(rows.cuda(), *pinned).cpu().nan_to_num(5), got.nan_to_num(5))
    if tokens > 1:
        *tensors_of, dead = gating(min(tokens, 1100), 4, 5120)
        rare(on_device(ops.engram_gate, *tensors_of, dead=dead)[0], ops.engram_gate(*tensors_of, dead=dead))
