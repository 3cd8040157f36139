"""The router and the budget's split on Hopper: in the emulator; on a GPU the ops' own tests run them."""

from typing import Any

import pytest
import torch

from dsv41 import ops
from dsv41.ops.draft import tilelang_cuda as draft
from dsv41.ops.route import tilelang_cuda as route
from dsv41.ops.verify import api
from tests.spec.test_verify_kernels import splitting
from tests.tools.cuda_emu import SHARED, EmulationError, available, emulate

ROUTE, SPLIT = route.source(), draft.source()
pytestmark = pytest.mark.skipif(not available(), reason="needs g++")


def check_route(source: str = ROUTE, experts: int = 384, top_k: int = 6) -> None:
    torch.manual_seed(0)
    logits, bias, vision = torch.randn(7, experts) * 8, torch.randn(experts), torch.randn(experts)
    logits[0, 3], logits[1], logits[2], logits[3, 5] = 30, 0, -1e4, torch.nan
    logits[4, 2], logits[5, 1] = torch.inf, -torch.inf
    image = torch.arange(7) % 3 == 0
    cases: list[dict[str, Any]] = [{}, {"image_bias": vision, "image": image}, {"temperature": 0.7}]
    flat = torch.zeros_like(logits), torch.zeros_like(bias)  # all of one value
    for logits, bias, options in [*((logits, bias, case) for case in cases), (*flat, {})]:
        want = ops.topk_route(logits, bias, top_k=top_k, scale=1.5, **options)
        ids, weights = torch.zeros(7, top_k, dtype=torch.int32), torch.zeros(7, top_k)
        mask, temperature = options.get("image"), options.get("temperature", 1.0)
        args = [logits, experts, bias, options.get("image_bias")]
        args += [None if mask is None else mask.view(torch.uint8), temperature, 1.5, ids, top_k, weights]
        call = route.route_call(experts, top_k, temperature == 1)
        emulate(source, call, [*args, top_k, 7], grid=2, threads=128, shared_bytes=16)
        assert torch.equal(ids, want[0])
        torch.testing.assert_close(weights, want[1], rtol=2e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("experts, top_k", [(384, 6), (12, 4), (128, 3)])
def test_route(experts: int, top_k: int) -> None:
    check_route(ROUTE, experts, top_k)


def check_split(trial: int, monkeypatch: pytest.MonkeyPatch, source: str = SPLIT) -> None:
    torch.manual_seed(trial)
    rows, block = (1, 3, 6, 37)[trial % 4], (1, 3, 5)[trial % 3]
    options: dict[str, Any]
    values, budget, options = splitting(trial, rows, block)
    if trial in (24, 25):  # ties of zeros, and of products that are all but zero
        values = torch.full((9, 3), 0.5) if trial == 24 else torch.full((9, 3), 1e-20)
        values[::2, 1] = 0.5 if trial == 24 else 0
        budget, options = torch.tensor([14]), {"rotation": torch.tensor([5])}
    elif trial > 25:  # ties, in rows that take turns
        values, budget = torch.randint(0, 3, (60, 5)).float() / 2, torch.tensor([97])
        options = {"rotation": torch.tensor([trial]), "num_requests": torch.tensor([2 * trial])}
    seen: list[Any] = []
    direct = api._SPLIT._call
    with monkeypatch.context() as patch:
        patch.setattr(api._SPLIT, "_call", lambda *args: seen.append(args) or direct(*args))
        want = ops.split_budget_ragged(values, budget, **options)
    given = [x if x.is_floating_point() or i == 5 else x.int() for i, x in enumerate(seen[0][:10])]
    got = [torch.full_like(x, 77) for x in want]
    places = (values.shape[0], got[4].numel(), got[5].numel())
    call, size = draft.split_call(values.shape[1], 64, given[5].dtype == torch.int64)
    args = [given[0], values.stride(0), *given[1:], *got, *places, SHARED]
    emulate(source, call, args, grid=1 + trial % 2, threads=64, shared_bytes=size)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("trial", range(0, 28, 3))
def test_split(trial: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_split(trial, monkeypatch)


ROUTE_FAULTS = {
    "ties to the higher id": ("key[i][j] > best", "key[i][j] >= best"),
    "bias in the weights": (
        "value(*at<const float>(from, mine ? chosen : 0))",
        "value(*at<const float>(beta, mine ? chosen : 0))",
    ),
    "bias of texts": ("? image_bias : bias", "? bias : bias"),
    "NaN last": ("score != score ? 0x7FFFFFFF", "score != score ? LOWEST + 1"),
}
SPLIT_FAULTS = {
    "ties not rotated": (
        "row >= start_row ? earlier - first_ties : earlier - first_ties + all_ties",
        "earlier",
    ),
    "subnormal survivals": ("x < 1.17549435e-38f ? 0.0f : x", "x"),
    "all ties": ("min(max(left - mine, 0), ties)", "ties"),
    "larger ones alone": ("ties += key[j] == last", "ties += 0"),
    "positions of row 0": ("(of ? ends_q[of - 1] : 0)", "0"),
    "one half of the places": ("turn ^= 1;", ""),
}


@pytest.mark.parametrize("fault", [*ROUTE_FAULTS, *SPLIT_FAULTS])
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (old, new), text = (ROUTE_FAULTS[fault], ROUTE) if fault in ROUTE_FAULTS else (SPLIT_FAULTS[fault], SPLIT)
    assert old in text
    with pytest.raises((AssertionError, EmulationError)):
        if fault in ROUTE_FAULTS:
            check_route(text.replace(old, new))
        for trial in range(28 if fault in SPLIT_FAULTS else 0):
            check_split(trial, monkeypatch, text.replace(old, new))
