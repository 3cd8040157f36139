"""The four ops under torch's own checks, and the examples of the documentation."""

import doctest
import pathlib
from typing import Any

import pytest
import torch

from dsv41.ops import verify
from dsv41.ops.verify import api


def calls():
    """Every op with every optional argument, as (name, thunk)."""
    rows, vocab, one = 3, 40, torch.arange(3)
    keys: dict[str, Any] = {"seeds": one, "uids": one, "positions": one, "temperature": torch.ones(rows)}
    law: dict[str, Any] = {"top_k": one.int(), "top_p": torch.full((rows,), 0.9)}
    cu = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    drafts = torch.randint(0, vocab, (rows, 2))
    full: dict[str, Any] = {
        "draft_logits": torch.randn(rows, 2, vocab),
        "bitmask": torch.full((9, 2), -1, dtype=torch.int32),
        **law,
    }
    yield "split_budget_ragged", lambda: verify.split_budget_ragged(torch.rand(4, 5), torch.tensor([7]))
    for mode in api.MODES:
        yield (
            "verify_drafts",
            lambda m=mode: verify.verify_drafts(torch.randn(9, vocab), cu, drafts, mode=m, **keys, **full),
        )
    yield "verify_drafts", lambda: verify.verify_drafts(torch.randn(9, vocab), cu, drafts, **keys)
    yield "sample_tokens", lambda: verify.sample_tokens(torch.randn(rows, vocab), **keys, **law)
    yield (
        "apply_token_bitmask",
        lambda: verify.apply_token_bitmask(torch.randn(rows, vocab), full["bitmask"][:3]),
    )


@pytest.mark.parametrize(("name", "call"), list(calls()))
def test_schema_fake_and_compile_agree(name, call, monkeypatch):
    op = next(o for o in vars(api).values() if isinstance(o, api.Op) and o.name == name)
    seen, direct = [], op._call
    monkeypatch.setattr(op, "_call", lambda *args: (seen.append(args), direct(*args)))
    call()
    torch.library.opcheck(direct, seen[0])


def test_documented_examples_run():
    page = pathlib.Path(__file__).parents[2] / "docs" / "speculative.md"
    text = page.read_text().replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert test.examples and doctest.DocTestRunner().run(test).failed == 0
