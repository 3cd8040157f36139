"""The examples run, and the engine among them serves what each request would get alone."""

import random
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate

from dsv41 import demo
from dsv41.layers import V41State
from tests import models

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)


def is_greedy(prompt: list[int], new: list[int]) -> bool:
    """Whether ``new`` is the greedy text behind ``prompt``, by one pass over both in a state of its own."""
    model, text = models.model("micro"), torch.tensor(prompt + new)
    state = V41State.allocate(model.cfg, 1, len(text))
    rows = torch.arange(len(prompt) - 1, len(text) - 1)
    place = torch.arange(len(text), dtype=torch.int32)
    return model(text, place, state, rows=rows).argmax(1).tolist() == new


@pytest.mark.parametrize("pages", [40, 5], ids=["room", "preemption"])
def test_engine_serves_what_requests_get_alone(pages: int) -> None:
    # In float64 a row's result does not depend on its batch, so texts can be compared.
    with accumulate(torch.float64):
        serve_at_random(pages)


def serve_at_random(pages: int) -> None:
    example = load("engine")
    model = models.model("micro")
    engine = example["Engine"](model, slots=4, pages=pages, max_tokens=64, block=8, chunk=20)
    draw = random.Random(pages)
    wanted: list[Any] = []
    given = [[draw.randrange(90) for _ in range(draw.randint(1, 24))] for _ in range(7)]
    ended, preempted, rows = [], 0, []
    while given or engine.running or engine.waiting:
        if given and draw.random() < 0.5:
            wanted.append(engine.submit(given.pop(), draw.randint(1, 9)))
        if draw.random() < 0.05 and engine.running:
            victim = draw.choice(engine.running)
            engine.cancel(victim)
            wanted.remove(victim)
        before = set(engine.running)
        finished = engine.step()
        preempted += len(before - set(engine.running) - set(finished))
        ended += finished
        rows.append(len(engine.running))
        held = sorted(p for r in engine.running for p in r.pages)
        assert sorted(held + engine.free_pages) == list(range(pages))  # no page is lost or held twice
        assert len(engine.running) + len(engine.free_slots) == 4
        used = engine.state.page_table[engine.state.page_table >= 0].tolist()
        assert sorted(used) == held
    assert max(rows) >= 3
    assert set(ended) == set(wanted) and (preempted > 0) == (pages == 5)
    assert sorted(engine.free_pages) == list(range(pages))
    for request in wanted:
        assert len(request.new) == request.max_new and is_greedy(request.prompt, request.new)


def test_engine_refuses_what_never_fits() -> None:
    engine = load("engine")["Engine"](models.model("micro"), slots=1, pages=2, max_tokens=64, block=8)
    for prompt, count in (([], 1), ([1] * 17, 1), ([1], 0), ([1] * 9, 9)):
        with pytest.raises(ValueError, match="submit: expected 1 to 16 tokens"):
            engine.submit(prompt, count)
    waits = engine.submit([1] * 16, 1)
    engine.cancel(waits)
    assert engine.step() == [] and not engine.waiting


def test_engine_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    load("engine")["main"]()
    assert capsys.readouterr().out.count("prompt tokens ->") == 3


def test_grammar_example_speaks_the_grammar(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xgrammar", reason="pip install 'dsv41[grammar]'")
    load("grammar")["main"]()
    *texts, counts = capsys.readouterr().out.splitlines()
    form = re.compile(r"\{[a-c]+:\d{1,3}(,[a-c]+:\d{1,3})?\}  \(complete\)|\{[a-c]+.*  \(cut\)")
    assert len(texts) == 2 and all(form.fullmatch(text) for text in texts), texts
    assert counts.startswith("drafts accepted")


def test_a_pool_smaller_than_all_requests() -> None:
    """What the engine stands on: pages of a pool, given out by the caller."""
    cfg = models.config("micro")
    state = V41State.allocate(cfg, 3, 64, block=8, pages=5)
    assert (state.page_table == -1).all() and state.page_table.shape == (3, 8)
    assert {c.pages.shape[0] for c in state.compressed.values()} == {5}
    whole = V41State.allocate(cfg, 3, 64, block=8)
    assert whole.page_table.flatten().tolist() == list(range(24))
    with pytest.raises(ValueError, match="pages: an integer of 0 or more"):
        V41State.allocate(cfg, 3, 64, pages=-1)


def test_demo_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"the package tokenizers .pip install 'dsv41.text.'"):
        demo.tokenizer_file()
