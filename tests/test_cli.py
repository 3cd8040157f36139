"""What every command says to files and numbers that cannot be: one line, exit code 2, no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsv41 import V41FlashConfig
from dsv41.__main__ import program
from dsv41.bench import PARTS

BAD_FILES: dict[str, bytes] = {
    "absent": b"",
    "folder": b"",
    "empty": b"",
    "broken.json": b"{bad",
    "bytes.json": b"\xff\xfe\x00",
    "text.json": b'"x"',
    "list.json": b'["a", [1]]',
    "rows.jsonl": b'{"op": "decode", "context": 4096, "drafts": "all"}\n',
}
COMMANDS_WITH_FILES = (
    ["bench", "throughput", "--cost", "FILE"],
    ["bench", "throughput", "--counts", "FILE"],
    ["bench", "step", "--saved", "FILE"],
    ["plan", "--config", "FILE"],
    ["eplb", "plan", "FILE", "--gpus", "2"],
    ["parity", "FILE", "--device", "cpu"],
)
WRONG_NUMBERS = (
    *(["bench", part, "--json", "no/such/folder/rows.jsonl"] for part in PARTS),
    ["bench", "throughput", "--requests", "-1"],
    ["bench", "throughput", "--requests", "1000000000"],
    ["bench", "throughput", "--acceptance", "nan"],
    ["bench", "throughput", "--plot", "no/such/folder/chart.png"],
    ["bench", "cpu", "--tokens", "0"],
    ["bench", "linear", "--tokens", "64", "-3"],
    ["bench", "rows", "--host-gb", "inf"],
    ["plan", "--ep", "-1"],
    ["plan", "--requests", "0"],
    ["plan", "--context", "-4"],
    ["plan", "--device-gib", "nan"],
    ["demo", "--tokens", "-1"],
    ["demo", "no/such/file"],
    ["parity", "--tokens", "-1"],
    ["parity", "--device", "nowhere"],
    ["doctor", "--target", "cuda:x"],
    ["doctor", "--no-such-option"],
)


def said(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that must be refused."""
    monkeypatch.setattr(sys, "argv", ["dsv41", *arguments])
    try:
        code = program()
    except SystemExit as end:  # argparse's own
        code = end.code
    shown = capsys.readouterr()
    lines = (shown.err or shown.out).splitlines()
    assert code == 2 and lines
    assert len(lines) == 1 or lines[0].startswith("usage: ")
    return lines[-1]


@pytest.mark.parametrize("command", COMMANDS_WITH_FILES, ids=lambda c: " ".join(c[:3]))
@pytest.mark.parametrize("file", BAD_FILES)
def test_files(
    command: list[str],
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / file
    if file == "folder":
        place.mkdir()
    elif file != "absent":
        place.write_bytes(BAD_FILES[file])
    line = said([str(place) if word == "FILE" else word for word in command], monkeypatch, capsys)
    assert ": expected " in line and any(word in line for word in (place.name, "--counts", "weight"))


@pytest.mark.parametrize("arguments", WRONG_NUMBERS, ids=" ".join)
def test_numbers_and_places(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(arguments, monkeypatch, capsys)
    assert ": expected " in line or "unrecognized arguments" in line


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors.index.json", "part.safetensors"])
def test_checkpoints(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V41FlashConfig.tiny().to_hf()))
    index = {"weight_map": {"embed.weight": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / broken).write_text("{bad")
    line = said(["parity", str(tmp_path), "--device", "cpu"], monkeypatch, capsys)
    assert ": expected " in line and str(tmp_path) in line


def test_a_shell_sees_it() -> None:
    run = [sys.executable, "-m", "dsv41", "plan", "--config", "no/such/file"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and "expected a V4.1 config in no/such/file" in done.stderr


def test_other_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ValueError("not a refusal")

    monkeypatch.setattr("dsv41.doctor.parse_target", broken)
    monkeypatch.setattr(sys, "argv", ["dsv41", "doctor", "--target", "cpu"])
    with pytest.raises(ValueError, match="not a refusal"):
        program()
