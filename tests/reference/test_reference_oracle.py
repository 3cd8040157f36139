"""Which keys a query attends to, and what comes out, against loops over scalars."""

import math

import pytest
import torch
from dsv41_reference import dense

pytestmark = pytest.mark.usefixtures("float64")


class Recorder:
    """Calls a function of the model and keeps what went in and came out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.function, self.calls = getattr(dense, name), []
        monkeypatch.setattr(dense, name, self)

    def __call__(self, *args):
        out = self.function(*args)
        self.calls.append((args, out))
        return out


def scalar_scores(q, weight, keys, row):
    """Σ_h ω_h relu(q_h · k_j) of one query, a loop over entries and heads, rounded to float32."""
    q, weight, keys = q[row].double().tolist(), weight[row].double().tolist(), keys.double().tolist()
    scores = []
    for key in keys:
        dots = [math.fsum(a * b for a, b in zip(head, key, strict=True)) for head in q]
        score = math.fsum(w * max(d, 0.0) for w, d in zip(weight, dots, strict=True))
        scores.append(torch.tensor(score, dtype=torch.float64).float().item())
    return scores


def best(scored: list[tuple[float, int]], count: int) -> list[int]:
    """The indices of the ``count`` best, ascending; the lower index on ties."""
    return sorted(i for _, i in sorted(scored, key=lambda pair: (-pair[0], pair[1]))[:count])


def test_selected_sets(small, monkeypatch):
    cfg = small.cfg
    recorder = Recorder(monkeypatch, "index_scores")
    small.model().forward(small.tokens, block=len(small.tokens))
    blocks_of: dict[int, list[int]] = {}
    dropped = 0
    for layer, ((q, weight, keys), _) in zip(cfg.index_sources, recorder.calls, strict=True):
        assert torch.equal(keys, small.trace[f"index_key.{cfg.kv_source(layer)}"])
        for p in range(len(small.tokens)):
            visible = range((p + 1) // cfg.compress_ratios[layer])
            scores = scalar_scores(q, weight, keys, p)
            allowed = list(visible)
            size = cfg.candidate_block_size
            if layer == cfg.candidate_source:
                blocks = sorted({j // size for j in visible})
                scored = [(max(scores[j] for j in visible if j // size == b), b) for b in blocks]
                newest = (len(visible) - 1) // size
                scored = [(math.inf if b == newest else s, b) for s, b in scored]
                blocks_of[p] = best(scored, cfg.candidate_blocks)
            elif layer > cfg.candidate_source:
                allowed = [j for j in visible if j // size in blocks_of[p]]
                dropped += len(visible) - len(allowed)
            chosen = best([(scores[j], j) for j in allowed], cfg.index_top_k)
            padded = chosen + [-1] * (cfg.index_top_k - len(chosen))
            assert small.trace[f"selected.{layer}"][p].tolist() == padded, (layer, p)
    assert dropped > 0


def test_attended_keys_and_outputs(small, monkeypatch):
    """A gather by position and list, a loop over heads and keys: the same values as the masked form."""
    cfg, trace = small.cfg, small.trace
    recorder = Recorder(monkeypatch, "attend")
    small.model().forward(small.tokens, block=len(small.tokens))
    for layer, ((q, _, _, sink, scale), out) in enumerate(recorder.calls):
        for p in (0, 1, 2, 7, 8, 20, 23, 44):
            rows = [trace[f"window.{layer}"][j] for j in range(max(0, p - cfg.window + 1), p + 1)]
            if cfg.compress_ratios[layer]:
                chosen = trace[f"selected.{cfg.index_source(layer)}"][p].tolist()
                rows += [trace[f"compressed.{cfg.kv_source(layer)}"][j] for j in chosen if j >= 0]
            keys = torch.stack(rows).double()
            for head in range(cfg.num_heads):
                z = [math.fsum((q[p, head].double() * k).tolist()) * scale for k in keys]
                peak = max(*z, sink[head].item())
                e = [math.exp(v - peak) for v in z]
                total = math.fsum(e) + math.exp(sink[head].item() - peak)
                rounded = torch.tensor(e).bfloat16().double()
                expected = (rounded[:, None] * keys).sum(0) / total
                torch.testing.assert_close(out[p, head].double(), expected, rtol=2**-8, atol=1e-7)


def test_ratio_two_sees_an_entry_with_its_second_token(small):
    lists = small.trace["selected.2"]
    assert lists[0].eq(-1).all()
    assert lists[1].tolist() == lists[2].tolist() == [0, -1, -1, -1]
    assert lists[3].tolist() == [0, 1, -1, -1]
