"""What the documents say is true: their examples run, their generated parts are fresh, their links lead
somewhere.
"""

import re
import runpy
from pathlib import Path

import pytest
import torch

from dsv41 import support
from dsv41._op import ops
from dsv41.bench import plot, tables

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_examples_run(page: Path) -> None:
    names: dict[str, object] = {"__name__": page.stem}
    torch.manual_seed(0)
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.S | re.M):
        if ">>>" not in block:  # sessions are doctests, run by their own tests
            exec(compile(block, str(page), "exec"), names)
    assert page.read_text("utf-8").strip()


RECIPES = re.split(r"^## ", (ROOT / "docs" / "engines.md").read_text("utf-8"), flags=re.M)[1:]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda text: text.split("\n", 1)[0])
def test_a_recipe_needs_no_other(recipe: str) -> None:
    names: dict[str, object] = {"__name__": "recipe"}
    for block in re.findall(r"^```python\n(.*?)^```", recipe, re.S | re.M):
        exec(compile(block, "engines.md", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


PARTS = {
    "formula": r"^    \S.* = ",
    "guarantees": "^Guarantees: ",
    "bytes": r"[Ll]ayout|bytes",
    "example": "^```python",
    "measured": "^## Measured",
    "support": "<!-- support of ",
    "API": r"automodule:: dsv41\.ops\.",
}


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "ops").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_of_ops_has_all_its_parts(page: Path) -> None:
    text = page.read_text("utf-8")
    missing = [name for name, form in PARTS.items() if not re.search(form, text, re.M)]
    assert not missing


def test_support_tables_are_fresh() -> None:
    pages, families = support.documents(), set()
    for page in pages:
        text = page.read_text("utf-8")
        assert support.refresh(text) == text, f"{page.name}: run python -m dsv41.support"
        families |= set(re.findall(r"<!-- support of (\w+):", text))
    assert families == {op.package.split(".")[2] for op in ops().values()}, "a page for every family of ops"
    assert ROOT / "README.md" in pages


def test_every_file_of_results_is_explained() -> None:
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    missing = [p.name for p in (ROOT / "docs" / "results").glob("*.jsonl") if f"`{p.name}`" not in text]
    assert not missing


def test_drawings_are_fresh() -> None:
    drawings = runpy.run_path(str(ROOT / "docs" / "figures.py"))["DRAWINGS"]
    for name, draw in drawings.items():
        made = (ROOT / "docs" / "img" / f"{name}.svg").read_text("utf-8")
        assert str(draw()) == made, "run python docs/figures.py"


def test_tables_of_results_are_fresh() -> None:
    for page in (ROOT / "docs" / "h200.md", ROOT / "README.md"):
        text = page.read_text("utf-8")
        assert tables.refresh(text) == text, "run python -m dsv41.bench.tables"
    picture = (ROOT / "docs" / "img" / "h200.svg").read_text("utf-8")
    assert tables.picture() == picture, "run python -m dsv41.bench.tables"


def test_the_picture_shows_what_it_is_given() -> None:
    """A bar to the right of 1 where it is faster, to the left where slower, and none without a peer."""
    row = {"us": 10.0, "case": "one", "share": 0.5}
    empty: dict[str, list[plot.Row]] = {name: [] for name in ("moe", "attn", "linear")}
    for peer, colour in ((20.0, plot.FAST), (5.0, plot.SLOW), (None, plot.SHARE)):
        bars = re.findall(
            r'<rect x="([\d.]+)".* width="([\d.]+)".*fill="(#\w+)"',
            plot.svg({**empty, "index": [{**row, "peer_us": peer}]}),
        )
        first, last = bars[0], bars[-1]
        assert first[2] == colour and float(last[1]) == plot.PANEL / 2
        if peer:  # an octave of four
            start = plot.LABEL + plot.PANEL / 4
            assert (
                float(first[0]) == (start if peer > 10 else plot.LABEL) and float(first[1]) == plot.PANEL / 4
            )


def test_the_cpu_example_has_twenty_lines_at_most() -> None:
    block = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.S | re.M)[0]
    assert len([line for line in block.splitlines() if line.strip()]) <= 20
