"""``python -m dsv41 parity`` names the place of the first difference."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41 import V41FlashConfig
from dsv41.__main__ import main
from dsv41._op import ops as registered
from dsv41.layers import weights
from dsv41.layers.attention import Attention

SMALL = ["--tokens", "7", "--decode", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoint")
    weights.write_synthetic(V41FlashConfig.micro(), place, seed=3)
    return place


def parity(*arguments: str, code: int = 0) -> dict[str, Any]:
    """The command's JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["parity", *arguments, "--device", "cpu", "--json"]) == code
    return json.loads(out.getvalue())


def test_a_checkpoint_agrees_with_the_dense_model(folder: Path) -> None:
    report = parity(str(folder), *SMALL)
    assert report["passed"] and report["first"] is None
    places = {row["where"] for row in report["rows"]}
    assert {"embedding", "head", "layer 1 engram", "layer 3 attn", "layer 5 ffn"} <= places
    assert {"layer 0 window", "layer 2 compressed", "layer 4 index_key", "logits"} <= set(report["dense"])
    assert set(report["dense"].values()) == {0.0}


def test_a_wrong_op_is_named_with_its_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op = registered()["sparse_attn"]
    right, calls = op.load("torch"), []

    def wrong(*args: Any) -> None:
        right(*args)
        calls.append(1)
        if len(calls) == 2 * 3 + 1:  # every op runs twice; layer 3 of the first chunk
            args[-3].mul_(1.01)

    monkeypatch.setitem(op._launchers, "torch", wrong)
    assert main(["parity", str(folder), *SMALL, "--device", "cpu", "--no-dense"]) == 1
    text = capsys.readouterr().out
    assert "FIRST DIFFERENCE  layer 3 attn: sparse_attn, output out [4, 4, 32] of torch: distance" in text
    assert next(line for line in text.splitlines() if line.endswith("<--")).startswith("layer 3 attn")


def test_a_wrong_layer_is_named_by_its_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Attention.project

    def wrong(self: Attention, o: torch.Tensor, *rest: Any) -> torch.Tensor:
        return project(self, o * 1.5 if self.layer == 2 else o, *rest)

    monkeypatch.setattr(Attention, "project", wrong)
    report = parity(str(folder), *SMALL, code=1)
    assert report["first"].startswith("layer 3 window: differs from the dense model by")


def test_a_synthetic_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--config", "tiny", "--device", "cpu", "--tokens", "5", "--decode", "0"]) == 0
    assert "no difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no/such/folder"], "parity: expected a checkpoint folder with config.json, got no/such/folder"),
        (["--device", "bogus"], "parity: expected --device that is here, got 'bogus'"),
        (["--tokens", "0"], "parity: expected --tokens of 1 or more, got 0"),
        (["--bound", "-1"], "parity: expected --bound of 0 or more"),
        (["--tokens", "9999"], "parity: expected at most 4096 tokens, got 10001"),
    ],
)
def test_bad_input(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        main(["parity", "--device", "cpu", *arguments])


def test_a_folder_with_other_tensors_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(V41FlashConfig.tiny().to_hf()))
    with pytest.raises(SystemExit, match=r"open_checkpoint: expected the .* tensors of this config"):
        main(["parity", str(tmp_path), "--device", "cpu"])
