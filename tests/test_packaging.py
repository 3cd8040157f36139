"""What is installed is what is in the repository: types, data and device sources travel in the wheel."""

import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path

import dsv41
from dsv41.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_file_of_the_packages_is_shipped() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    for base, package in ((ROOT, "dsv41"), (ROOT / "reference", "dsv41_reference")):
        folder = base / package
        files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        lost = [
            str(file.relative_to(base))
            for file in files
            if file.suffix != ".py"
            and not any(fnmatch.fnmatch(str(file.relative_to(folder)), p) for p in patterns[package])
            and not any(fnmatch.fnmatch(file.name, p) for p in patterns["*"])
        ]
        assert not lost, f"package-data of pyproject.toml leaves out {lost}"
        assert (folder / "py.typed").exists()
        assert all(
            (path / "__init__.py").exists() for path in {file.parent for file in files} if path.name != "data"
        )


def test_the_version_has_an_entry_in_the_changelog() -> None:
    entries = (ROOT / "CHANGELOG.md").read_text("utf-8").split("\n## ")[1:]
    entries = entries[1:] if entries[0].startswith("Unreleased\n") else entries
    assert entries[0].startswith(f"{dsv41.__version__}\n")


def test_what_is_pinned_is_what_the_extras_ask_for() -> None:
    """CI installs with constraints.txt: a package that an extra names has its version there."""
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = {
        entry.split(";")[0].split("[")[0].split("=")[0].rstrip("><~! ")
        for name in ("text", "plot", "eplb", "grammar", "docs", "dev")
        for entry in extras[name]
    }
    assert wanted - {"dsv41"} <= pinned


def test_the_command_line_starts() -> None:
    """``python -m dsv41 --help`` names every command."""
    done = subprocess.run(
        [sys.executable, "-m", "dsv41", "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in done.stdout for name in COMMANDS)
