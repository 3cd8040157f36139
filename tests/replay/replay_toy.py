"""A small encoder-decoder stack that runs bounded replay by the planner's fields, in two kinds of values.

`Structure`: the value of a row is the identity of its whole computation tree. Two rows are equal exactly when
they were computed from the same inputs through the same sets of keys, so equality is the theorem itself.
`Numeric`: float64 vectors, random weights, attention with a sink, rotary phases, a top-k of shared entries.

Both start every cache slot as poison. Structure raises when one is read; Numeric carries NaN into the output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from dsv41.replay import (
    ReplayConfig,
    ReplayGeometry,
    ReplayHooks,
    ReplayPlan,
    RequestSpan,
    plan_decoder,
    run_prefill,
)


def examples(count: int) -> settings:
    """Hypothesis settings of all replay tests: no verdict may depend on how busy the machine is."""
    return settings(deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow])


Keys = list[tuple[int, Any]]  # (absolute position, value)


class Structure:
    """Values are ids of computation trees."""

    poison = -1
    dtype, width = np.int64, ()

    def __init__(self) -> None:
        self._ids: dict[tuple, int] = {}

    def node(self, *key: Any) -> int:
        return self._ids.setdefault(key, len(self._ids) + 1)

    def check(self, value: Any) -> int:
        assert value != self.poison, "a poisoned value was read"
        return int(value)

    def embed(self, token: int, position: int) -> int:
        return self.node("embed", token)

    def kv(self, layer: int, x: Any, position: int) -> int:
        return self.node("kv", layer, self.check(x), position)

    def layer(self, layer: int, x: Any, position: int, window: Keys, entries: Keys) -> int:
        seen = tuple((p, self.check(v)) for p, v in window)
        return self.node(
            "layer", layer, self.check(x), position, seen, tuple(self.check(v) for _, v in entries)
        )


class Numeric:
    """Values are float64 vectors; one row at a time, so that results do not depend on the batch."""

    poison = np.nan
    dtype, width = np.float64, (4,)
    top_k = 3

    def __init__(self, num_layers: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = rng.normal(size=(64, 4))
        self.w = rng.normal(size=(num_layers + 1, 5, 4, 4)) * 0.6
        self.sink = rng.normal(size=num_layers + 1)

    def embed(self, token: int, position: int) -> np.ndarray:
        return self.embedding[token]

    def kv(self, layer: int, x: Any, position: int) -> np.ndarray:
        return self._rotate(np.tanh(self.w[layer, 0] @ x), position)

    def layer(self, layer: int, x: Any, position: int, window: Keys, entries: Keys) -> np.ndarray:
        q = self._rotate(np.tanh(self.w[layer, 1] @ x), position)  # bounded: no key's weight rounds away
        keys = [v for _, v in window]
        if entries:
            table = np.array([v for _, v in entries])
            keys.extend(
                table[np.sort(np.argsort(-(table @ (self.w[layer, 2] @ x)), kind="stable")[: self.top_k])]
            )
        attended = np.zeros(4)
        if keys:
            table = np.array(keys)
            weights = np.exp(table @ q)
            attended = self._rotate(weights @ table / (weights.sum() + np.exp(self.sink[layer])), -position)
        x = x + self.w[layer, 3] @ attended
        return x + np.tanh(self.w[layer, 4] @ x)

    @staticmethod
    def _rotate(x: np.ndarray, position: int) -> np.ndarray:
        c, s = np.cos(position * np.array([0.9, 0.11])), np.sin(position * np.array([0.9, 0.11]))
        return np.concatenate([x[:2] * c - x[2:] * s, x[2:] * c + x[:2] * s])


@dataclass
class State:
    """Caches of one request; `window[layer]` maps a slot to (position, value)."""

    tokens: np.ndarray
    window: list[dict[int, tuple[int, Any]]]
    entries: list[dict[int, Any]]  # of the encoder source (layer 1) and of the first decoder layer
    entry_writes: list[Counter] = field(default_factory=lambda: [Counter(), Counter()])
    out: dict[int, Any] = field(default_factory=dict)

    def window_at(self, layer: int, position: int) -> Any:
        """What the cache holds for a position, or None when that row is not there."""
        held = [value for p, value in self.window[layer].values() if p == position]
        return held[0] if held else None


class Toy:
    """An encoder-decoder stack; all layers but the first also read shared entries."""

    def __init__(self, values: Any, geom: ReplayGeometry, ring: int | None = None) -> None:
        self.values, self.geom, self.ring = values, geom, ring
        self.encoder, self.layers = (
            geom.first_decoder_layer,
            geom.first_decoder_layer + geom.num_decoder_layers,
        )

    def state(self, tokens: Sequence[int] | np.ndarray) -> State:
        return State(np.asarray(tokens), [{} for _ in range(self.layers)], [{}, {}])

    # -- one forward, through the plan --

    def step(
        self,
        cfg: ReplayConfig,
        batch: Sequence[tuple[State, RequestSpan]],
        pad: int = 0,
        write_from: Iterable[int] | None = None,
    ) -> ReplayPlan:
        """Run one forward. `write_from[r]`: entries of request r are written from here on (prefix hits)."""
        plan = plan_decoder(cfg, self.geom, [span for _, span in batch])
        plan = plan.pad(plan.num_rows + pad)
        states = [state for state, _ in batch]
        starts = [0] * len(batch) if write_from is None else list(write_from)
        rows = [(r, p) for r, (_, span) in enumerate(batch) for p in range(span.end - span.q_len, span.end)]
        first_kv: list[dict[int, Any]] = [
            {} for _ in states
        ]  # layer 20's window KV, in hand until it has been read

        def encode_all(plan: ReplayPlan) -> tuple[np.ndarray, np.ndarray]:
            x = [self.values.embed(int(states[r].tokens[p]), p) for r, p in rows]
            for layer in range(self.encoder):
                if layer == 1:
                    self._write_entries(0, layer, rows, x, states, starts)
                kv: list[dict[int, Any]] = [{} for _ in states]
                for (r, p), value in zip(rows, x, strict=True):
                    kv[r][p] = self.values.kv(layer, value, p)
                low = [max(int(plan.encoder_floor[r]), p - self.geom.window + 1) for r, p in rows]
                spans = [(a, p + 1 - a) for (_, p), a in zip(rows, low, strict=True)]
                x = self._attend(layer, rows, x, spans, states, kv, 0 if layer else None)
                self._write_window(plan, "all", layer, rows, states, kv)
            position = np.array([p for _, p in rows], np.int64)
            return np.array(x, self.values.dtype).reshape(len(rows), *self.values.width), position

        def write_global_kv(boundary: tuple[Any, ...], plan: ReplayPlan) -> None:
            x, position = boundary
            self._write_entries(1, self.encoder, rows, x, states, starts)
            for i in plan.first_layer_rows:
                first_kv[rows[i][0]][int(position[i])] = self.values.kv(self.encoder, x[i], int(position[i]))

        def decode_rows(kept: tuple[Any, ...], plan: ReplayPlan) -> np.ndarray:
            x = np.array(kept[0])
            x[plan.is_padding] = self.values.poison
            request, attends = plan.row_to_request(), plan.attends
            np.testing.assert_array_equal(kept[1][: plan.num_rows], plan.positions)
            self._poison_below_floors(plan, states)
            live = [(int(request[i]), int(plan.positions[i])) for i in range(plan.num_rows)]
            for layer in range(self.encoder, self.layers):
                first = layer == self.encoder
                kv: list[dict[int, Any]] = first_kv if first else [{} for _ in states]
                if not first:
                    for i, (r, p) in enumerate(live):
                        kv[r][p] = self.values.kv(layer, x[i], p)
                low, length = plan.window_spans(first_layer=first)
                assert not length[plan.num_rows :].any()
                spans = list(zip(low.tolist(), length.tolist(), strict=True))
                y = np.full_like(x, self.values.poison)
                for i, value in enumerate(self._attend(layer, live, x, spans, states, kv, 1, attends)):
                    y[i] = value
                if not first:
                    self._write_window(plan, "kept", layer, live, states, kv)
                x = y
            return x

        out = run_prefill(plan, ReplayHooks(encode_all, write_global_kv, decode_rows))
        self._write_window(plan, "first_layer", self.encoder, rows, states, first_kv)
        for i in range(plan.num_rows):
            assert out is not None
            r = int(plan.row_to_request()[i])
            states[r].out[int(plan.positions[i])] = out[i]
        return plan

    def _attend(self, layer, rows, x, spans, states, kv, source, attends=None) -> list[Any]:
        out = []
        for i, (r, p) in enumerate(rows):
            low, length = spans[i]
            window = [(j, self._window(states[r], layer, kv[r], j)) for j in range(low, low + length)]
            entries: Keys = []
            if source is not None and (attends is None or attends[i]):
                entries = [(c, states[r].entries[source].get(c, self._poison())) for c in range(p + 1)]
            out.append(self.values.layer(layer, x[i], p, window, entries))
        return out

    def _window(self, state: State, layer: int, in_batch: dict[int, Any], position: int) -> Any:
        if position in in_batch:
            return in_batch[position]
        held, value = state.window[layer].get(self._slot(position), (position, self._poison()))
        return value if held == position else self._poison()

    def _write_window(self, plan: ReplayPlan, which: Any, layer: int, rows, states, kv) -> None:
        for i, slot in zip(*plan.ring_writes(self.ring or 1 << 30, which), strict=True):
            r, p = rows[i]
            states[r].window[layer][int(slot)] = (p, kv[r][p])

    def _write_entries(self, source, layer, rows, x, states, starts) -> None:
        for i, (r, p) in enumerate(rows):
            if p >= starts[r]:
                states[r].entries[source][p] = self.values.kv(self.layers - 1, x[i], p)
                states[r].entry_writes[source][p] += 1

    def _poison_below_floors(self, plan: ReplayPlan, states: list[State]) -> None:
        """A floor promises that nothing below it is read: destroy that, where no row runs below."""
        for r, state in enumerate(states):
            if plan.dead[r] or plan.n_kept[r] == 0:
                continue
            for layer in range(self.encoder, self.layers):
                floor = plan.first_layer_floor[r] if layer == self.encoder else plan.swa_floor[r]
                for slot, (p, _) in state.window[layer].items():
                    if p < floor:
                        state.window[layer][slot] = (p, self._poison())

    def _slot(self, position: int) -> int:
        return position % self.ring if self.ring else position

    def _poison(self) -> Any:
        return np.full(self.values.width, self.values.poison) if self.values.width else self.values.poison

    # -- whole prompts --

    def prefill(
        self,
        cfg: ReplayConfig,
        tokens: Sequence[int] | np.ndarray,
        cuts: Iterable[int] = (),
        pad: int = 0,
        **span: Any,
    ) -> State:
        """Prefill `tokens` in chunks that end at `cuts` and at the prompt's end."""
        state = self.state(tokens)
        length = len(state.tokens)
        edges = sorted({*cuts, length} - {0})
        for start, end in zip([0, *edges], edges, strict=False):
            request = RequestSpan(end - start, end, **{"target_end": length, **span})
            self.step(cfg, [(state, request)], pad)
        return state

    # -- the definition, written without a planner --

    def define(
        self, tokens: Sequence[int] | np.ndarray, s: int = 0, all_rows: bool = False
    ) -> list[dict[int, Any]]:
        """Inputs of every layer, then the output, by position.

        Decoder rows below `s` do not exist and windows are cut at `s` (in the first decoder layer only
        when not `all_rows`); entries are never cut. `s = 0` is the full prefill.
        """
        x = {p: self.values.embed(int(t), p) for p, t in enumerate(tokens)}
        history, entries = [dict(x)], {}
        for layer in range(self.layers):
            decoder = layer >= self.encoder
            if layer in (1, self.encoder):
                entries = {p: self.values.kv(self.layers - 1, v, p) for p, v in x.items()}
            floor = s if layer > self.encoder or (decoder and not all_rows) else 0
            kv = {p: self.values.kv(layer, v, p) for p, v in x.items()}
            y = {}
            for p in x:
                if decoder and p < s:
                    continue
                window = [(j, kv[j]) for j in range(max(floor, p - self.geom.window + 1, 0), p + 1)]
                seen = [(c, entries[c]) for c in range(p + 1)] if layer else []
                y[p] = self.values.layer(layer, x[p], p, window, seen)
            x = y
            history.append(dict(x))
        return history


def same(a: Any, b: Any) -> bool:
    """Bit equality of two toy values; False when one is absent."""
    return a is not None and b is not None and bool(np.array_equal(np.asarray(a), np.asarray(b)))
