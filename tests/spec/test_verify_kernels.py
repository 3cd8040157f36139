"""Triton kernels of drafting and verification equal the reference: interpreted, on a GPU as launched."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv41 import ops, use
from dsv41.ops.verify import RaggedSplit, Verified
from tests.tools import triton_interp

BF16, I32 = torch.bfloat16, torch.int32
interpreted = pytest.mark.skipif(not triton_interp.available(), reason="needs triton")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NAN, INF = float("nan"), float("inf")
VERIFY, DRAFT = "dsv41.ops.verify.triton_cuda", "dsv41.ops.draft.triton_cuda"
SMALL = {"CHUNK = 4096": "CHUNK = 128"}  # several chunks a row of a test


@functools.cache
def kernels() -> Any:
    return triton_interp.interpret(VERIFY, SMALL)


@functools.cache
def drafting() -> Any:
    return triton_interp.interpret(DRAFT)


def words(rows: int, vocab: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (rows, (vocab + 31) // 32 + 1), dtype=I32)


def law(rows: int) -> dict[str, Any]:
    temperature = torch.rand(rows) * 2
    temperature[0] = 0
    return {
        "temperature": temperature,
        "seeds": torch.randint(-(2**62), 2**62, (rows,)),
        "uids": torch.randperm(rows) + 2**40,
        "positions": torch.randint(0, 2**31, (rows,)),
    }


def hopeless(logits: torch.Tensor) -> torch.Tensor:
    """Rows 1 to 3 without a law."""
    if len(logits) > 4:
        logits[1, 5], logits[2, 3], logits[3] = NAN, INF, -INF
    return logits


def moved(x: Any) -> Any:
    return x.cuda() if isinstance(x, torch.Tensor) else x


def on_device(call: Callable[..., Any], *args: Any, kernel: str = "triton_cuda", **options: Any) -> Any:
    with use(kernel, call):
        return call(*map(moved, args), **{k: moved(v) for k, v in options.items()})


# ---- Markov bias ----


@interpreted
@pytest.mark.parametrize(
    "rows, vocab, rank", [(5, 200, 32), (70, 130, 256), (3, 40, 8), (0, 40, 8), (2, 9, 96)]
)
def test_markov(rows: int, vocab: int, rank: int) -> None:
    embeds, weight = torch.randn(rows, rank).to(BF16), torch.randn(vocab, rank).to(BF16)
    logits = torch.randn(rows, 3, vocab)
    want = ops.markov_bias(logits[:, 1].clone(), embeds, weight)
    others = logits[:, ::2].clone()
    drafting().markov_bias(logits[:, 1], embeds, weight)
    torch.testing.assert_close(logits[:, 1], want, rtol=2e-6, atol=2e-5)
    assert torch.equal(logits[:, ::2], others)


# ---- bitmask ----


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16, torch.float64])
def test_bitmask(dtype: torch.dtype) -> None:
    for vocab, rows in ((300, 4), (64, 2), (5, 1)):
        for masks in (rows, 1):
            logits, mask = torch.randn(rows, vocab + 3).to(dtype), words(masks, vocab)
            want = logits.clone()
            ops.apply_token_bitmask(want[:, :vocab], mask)
            kernels().apply_token_bitmask(logits[:, :vocab], mask)
            assert torch.equal(logits, want)


# ---- sampling ----


@interpreted
@pytest.mark.parametrize("rows, vocab", [(1, 40), (5, 128), (9, 300)])
def test_sample(rows: int, vocab: int) -> None:
    for dtype in (torch.float32, BF16):
        logits = hopeless((torch.randn(rows, vocab) * 3).to(dtype))
        options = law(rows)
        if rows > 4:
            options["temperature"][4] = INF
        columns = torch.randint(0, 256, (rows,), dtype=I32)
        for stream in ("draft", "emit"):
            for mask in (None, words(rows, vocab)):
                want = ops.sample_tokens(logits, columns=columns, stream=stream, bitmask=mask, **options)
                out = torch.zeros(rows, dtype=torch.int64)
                t, *keyed = options.values()
                kernels().sample_tokens(logits, t, None, None, mask, *keyed, columns, stream, out)
                assert torch.equal(out, want)
    ties = torch.zeros(2, vocab)
    ties[1, vocab // 2 :] = 1
    out = torch.zeros(2, dtype=torch.int64)
    greedy = law(2)
    _, *keyed = greedy.values()
    kernels().sample_tokens(ties, torch.zeros(2), None, None, None, *keyed, out.to(I32), "emit", out)
    assert out.tolist() == [0, vocab // 2]


def coupled(requests: int, block: int, vocab: int, trial: int) -> tuple[Any, ...]:
    """Logits whose drafts stay often: near one law, the first draft the very token."""
    random.seed(trial)
    sizes = torch.randint(0, block + 2, (requests,))
    cu = torch.cat([torch.zeros(1), sizes.cumsum(0)]).to(I32)
    logits = torch.randn(vocab) * 4 + torch.randn(int(cu[-1]), vocab) * 0.3
    if len(logits) > 4:
        logits[trial % 5] = NAN
    drafts, options = torch.randint(-1, vocab + 1, (requests, block)), law(requests)
    if trial % 3 == 0:
        options["temperature"].zero_()
    keyed = {k: v.repeat_interleave(sizes) for k, v in options.items()}
    number = torch.arange(len(logits)) - cu[:-1].repeat_interleave(sizes)
    keyed["positions"] = keyed["positions"] + 1 + number
    emitted = ops.sample_tokens(logits, **keyed) if len(logits) else torch.zeros(0, dtype=torch.int64)
    for r in range(requests):
        right = random.randint(0, min(block, int(sizes[r])))
        drafts[r, :right] = emitted[cu[r] : cu[r] + right]
    return (logits, cu, drafts), options


def outputs(requests: int, block: int) -> Verified:
    numbers = [torch.full((requests,), 7, dtype=I32) for _ in range(2)]
    return Verified(torch.full((requests, block + 1), 7), *numbers)


@interpreted
@pytest.mark.parametrize("trial", range(9))
def test_coupled(trial: int) -> None:
    requests, block, vocab = (1, 4, 7)[trial % 3], (1, 3, 5)[trial // 3], (12, 300)[trial % 2]
    args, options = coupled(requests, block, vocab, trial)
    mask = words(len(args[0]), vocab) if trial % 4 == 3 else None
    want = ops.verify_drafts(*args, mode="coupled", bitmask=mask, **options)
    got = outputs(requests, block)
    t, *keyed = options.values()
    kernels().verify_drafts(*args, None, t, t, None, None, mask, *keyed, "coupled", *got)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def chained(requests: int, block: int, vocab: int, trial: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drafts from near the target's law; greedy requests, one-hot drafts, ids and rows that are none."""
    sizes = torch.randint(0, block + 2, (requests,))
    cu = torch.cat([torch.zeros(1), sizes.cumsum(0)]).to(I32)
    base = torch.randn(vocab) * 2
    logits = base + torch.randn(int(cu[-1]), vocab) * 0.5
    draft_logits = base + torch.randn(requests, block, vocab) * 0.5
    options = law(requests)
    options["temperature"] = options["temperature"] / 2 + 0.2
    options["draft_temperature"] = torch.rand(requests) + 0.2
    drafts = torch.distributions.Categorical(logits=base.expand(requests, block, vocab)).sample()
    if trial % 3 == 0:
        options["temperature"][0], options["draft_temperature"][-1] = 0, 0
    if trial % 4 == 1 and len(logits) > 2:
        logits[1, 3], draft_logits[0, 0, 1], drafts[-1, 0] = NAN, INF, vocab
    if trial % 2 and len(logits):
        drafts[:, 0] = logits[cu[:-1].long().clamp(max=len(logits) - 1)].argmax(-1)
    options["draft_logits"] = draft_logits if trial % 4 else None
    options["bitmask"] = None if trial % 5 else words(len(logits), vocab)
    return (logits, cu, drafts), options


@interpreted
@pytest.mark.parametrize("trial", range(12))
def test_chain(trial: int) -> None:
    requests, block, vocab = (1, 4, 7)[trial % 3], (5, 3, 1)[trial // 4], (12, 300)[trial % 2]
    args, options = chained(requests, block, vocab, trial)
    want = ops.verify_drafts(*args, mode="chain", **options)
    got = outputs(requests, block)
    keyed = [options[name] for name in ("seeds", "uids", "positions")]
    kernels().verify_drafts(
        *args, options["draft_logits"], options["temperature"], options["draft_temperature"], None, None,
        options["bitmask"], *keyed, "chain", *got,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- budget ----

CONFIDENCES = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0, 1e-20, 1e-30, -0.5, 1.5, NAN, INF, -INF]
WEIGHTS = [0.5, 1.0, 2.0, NAN, 1e38, -1.0, 3e38]


def splitting(trial: int, rows: int, block: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    random.seed(trial)

    def ints(low: int, high: int, count: int = rows, dtype: torch.dtype = I32) -> torch.Tensor:
        return torch.randint(low, high, (count,), dtype=dtype)

    def confidence() -> float:
        return random.choice(CONFIDENCES) if random.random() < 0.5 else random.random()

    values = torch.tensor([[confidence() for _ in range(block)] for _ in range(rows)])
    options = {
        "lo": ints(-1, block + 1),
        "hi": ints(-1, block + 2),
        "base": ints(-1, 5),
        "bonus": ints(0, 2),
        "start": ints(0, 100, dtype=torch.int64),
        "weights": torch.tensor([random.choice(WEIGHTS) for _ in range(rows)]),
        "num_requests": ints(0, rows + 1, 1),
        "rotation": ints(-3, 9, 1),
    }
    capacities = random.choice(
        [{}, {"max_tokens": 5, "max_logits": 3}, {"max_tokens": 600, "max_logits": 20}]
    )
    given = {"rotation": ints(1, 9, 1)} if trial % 3 == 0 else options if trial % 3 == 1 else {}
    return values, ints(-2, rows * block + 3, 1), {**given, **capacities}


@interpreted
@pytest.mark.parametrize("trial", range(26))
def test_split(trial: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv41.ops.verify import api

    rows, block = (1, 3, 6, 37)[trial % 4], (1, 3, 5)[trial % 3]
    values, budget, options = splitting(trial, rows, block)
    if trial >= 24:  # ties in the middle of the order, of zeros and of products that are all but zero
        values = torch.full((9, 3), 0.5) if trial == 24 else torch.full((9, 3), 1e-20)
        values[::2, 1] = 0.5 if trial == 24 else 0
        budget = torch.tensor([14])
        options: dict[str, Any] = {"rotation": torch.tensor([5])}
    seen: list[Any] = []
    direct = api._SPLIT._call
    monkeypatch.setattr(api._SPLIT, "_call", lambda *args: seen.append(args) or direct(*args))
    want = ops.split_budget_ragged(values, budget, **options)
    got = [torch.full_like(x, 77) for x in want]
    drafting().split_budget_ragged(*seen[0][: -len(want)], *got)
    for label, a, b in zip(RaggedSplit._fields, got, want, strict=True):
        assert torch.equal(a, b), label


# ---- planted faults ----

FAULTS = {
    "nine rounds": ("tl.static_range(10)", "tl.static_range(9)", "sample"),
    "word order": (
        "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
        "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
        "sample",
    ),
    "ties to the higher id": ("(4294967295 - token.to(tl.int64))", "token.to(tl.int64)", "sample"),
    "row of NaN has a law": ("& (spoiled == 0)", "", "sample"),
    "position of the row": ("+ SHIFT + k", "+ SHIFT", "coupled"),
    "goes on behind a fall": ("running = stays", "running = running", "coupled"),
    "one draft too many": ("(k < rows - 1)", "(k < rows)", "coupled"),
    "accepts every draft": ("tl.log(_uniform(w)) < ratio", "tl.log(_uniform(w)) < 9.0", "chain"),
    "law of the wrong row": ("+ kept, 0), num_rows - 1)", ", 0), num_rows - 1)", "chain"),
    "no residual": ("(rest != none), rest, plain", "(rest != none), plain, plain", "chain"),
    "greedy is drawn": ("tl.where(token == first, 0.0", "tl.where(token >= first, 0.0", "chain"),
    "ties not rotated": ("tl.load(rotation).to(tl.int64)", "0", "split"),
    "subnormal survivals": ("tl.where(x < 1.1754943508222875e-38, 0.0, x)", "x", "split"),
    "budget off by one": ("(rank >= last) &", "(rank > last) &", "split"),
    "positions of row 0": ("first + token - begin", "first + token", "split"),
    "bit order": ("(token % 32)", "(31 - token % 32)", "bitmask"),
}


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, check = FAULTS[fault]
    if check == "split":
        broken = triton_interp.interpret(DRAFT, {old: new})
        monkeypatch.setattr(f"{__name__}.drafting", lambda: broken)
    else:
        broken = triton_interp.interpret(VERIFY, {**SMALL, old: new})
        monkeypatch.setattr(f"{__name__}.kernels", lambda: broken)

    def every_split() -> None:
        for trial in range(26):
            with pytest.MonkeyPatch.context() as patch:
                test_split(trial, patch)

    checks: dict[str, Callable[[], object]] = {
        "sample": lambda: test_sample(9, 200),
        "coupled": lambda: [test_coupled(trial) for trial in (5, 7, 8)],
        "chain": lambda: [test_chain(trial) for trial in range(9)],
        "split": every_split,
        "bitmask": lambda: test_bitmask(torch.float32),
    }
    with pytest.raises(AssertionError):
        checks[check]()


# ---- on a GPU ----


@on_gpu
@pytest.mark.parametrize("rows", [1, 7, 64, 256])
def test_on_the_gpu(rows: int) -> None:
    vocab = 129_280
    embeds, weight = torch.randn(rows, 256).to(BF16), torch.randn(vocab, 256).to(BF16)
    logits = torch.randn(rows, vocab)
    got = on_device(ops.markov_bias, logits, embeds, weight).cpu()
    torch.testing.assert_close(got, ops.markov_bias(logits.clone(), embeds, weight), rtol=1e-5, atol=1e-4)
    mask, options = words(rows, vocab), law(rows)
    got = on_device(ops.apply_token_bitmask, logits, mask).cpu()
    assert torch.equal(got, ops.apply_token_bitmask(logits.clone(), mask))
    logits = hopeless(logits)
    for given in (None, mask):
        want = ops.sample_tokens(logits, bitmask=given, **options)
        assert (
            on_device(ops.sample_tokens, logits, bitmask=given, **options).cpu() == want
        ).float().mean() > 0.98
    for trial in range(6):
        values, budget, more = splitting(trial, rows, 5)
        got = on_device(ops.split_budget_ragged, values, budget, **more)
        for a, b in zip(got, ops.split_budget_ragged(values, budget, **more), strict=True):
            assert torch.equal(a.cpu(), b)


@on_gpu
def test_modes_on_the_gpu() -> None:
    """Coupled on either kernel, the others as PyTorch runs them; captured, so that nothing waits."""
    for trial in range(6):
        args, options = coupled(7, 5, 3000, trial)
        for mode, kernel in (("coupled", "triton_cuda"), ("coupled", "torch_cuda"), ("chain", "torch_cuda")):
            want = ops.verify_drafts(*args, mode=mode, **options)
            got = on_device(ops.verify_drafts, *args, kernel=kernel, mode=mode, **options)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
        chain, more = chained(7, 5, 9000, trial)
        want = ops.verify_drafts(*chain, mode="chain", **more)
        got = on_device(ops.verify_drafts, *chain, mode="chain", **more)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
        given, keyed, out = tuple(map(moved, args)), {k: moved(v) for k, v in options.items()}, None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.verify_drafts(*given, mode="block", **keyed)
        graph.replay()
        want = ops.verify_drafts(*args, mode="block", **options)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(out, want, strict=True))
