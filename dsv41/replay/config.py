"""What bounded replay is asked to do, and every reason to refuse it.

Host-side dataclasses and integers only: this file imports neither torch nor NumPy, so an engine can validate
its launch flags before it loads anything. Source of the formulas: bounded-replay notes, `docs/replay.md`.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from enum import Enum
from math import lcm
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..config import V41FlashConfig
    from .runtime import ReplayRuntime

FirstLayerKV = Literal["segment", "all_rows"]
Policy = Literal["prompt_window", "per_chunk_tail"]
Dead = Literal["empty", "windowed"]

_FIRST_LAYER_KV = ("segment", "all_rows")
_POLICIES = ("prompt_window", "per_chunk_tail")
_DEAD = ("empty", "windowed")


class ReplayConfigError(ValueError):
    """A replay setting, request or plan that cannot give the promised result. The text says who refuses,
    the minimum, the value given and what to do: ``<name>: expected ..., got ...; ...``."""


def check(ok: bool, message: str) -> None:
    """Raise `ReplayConfigError(message)` unless `ok`."""
    if not ok:
        raise ReplayConfigError(message)


def _expected(name: str) -> str:
    who, _, argument = name.rpartition(".")
    return f"{who}: expected {argument}"


def check_int(name: str, value: object, minimum: int) -> None:
    """Refuse anything but an int of at least `minimum`; a bool is not an int here.

    Args:
        name: ``<who>.<argument>``.
        value: what was given.
        minimum: least value.
    """
    check(
        isinstance(value, int) and not isinstance(value, bool) and value >= minimum,
        f"{_expected(name)}: an int of at least {minimum}, got {value!r}; pass a whole number",
    )


def check_kind(name: str, value: object, kind: type) -> None:
    """Refuse an object of another class, before one of its missing attributes is asked for."""
    got = type(value).__name__
    check(isinstance(value, kind), f"{_expected(name)}: a {kind.__name__}, got {got}; pass one")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not one of `choices`."""
    words = ", ".join(choices)
    check(value in choices, f"{_expected(name)}: one of {words}, got {value!r}; choose one of them")


class ReplayMode(Enum):
    """Which rows of a prefill run in the decoder layers.

    OFF: all rows, true windows. COMPACT: the kept suffix only. MASK: all rows, but the kept suffix sees
        exactly what it
    would see under COMPACT; rows below it are treated as `ReplayConfig.dead` says.
    """

    OFF = "off"
    COMPACT = "compact"
    MASK = "mask"


@dataclass(frozen=True)
class ReplayGeometry:
    """The model facts the planner needs; the defaults are DeepSeek-V4.1-Flash.

    Args:
        window: sliding window in tokens, the query's own position included; at least 2.
        first_decoder_layer: number of encoder layers = id of the first decoder layer.
        num_decoder_layers: layers from `first_decoder_layer` to the end of the stack.
        draft_tokens: speculative draft tokens a step (0 without speculation).
        topk: compressed entries a query attends to; for the cost model and documentation only.
        align: a replayed prefix must start at a multiple of this (the compression ratio of the encoder, or
            the block).
    """

    window: int = 128
    first_decoder_layer: int = 20
    num_decoder_layers: int = 20
    draft_tokens: int = 5
    topk: int = 512
    align: int = 2

    def __post_init__(self) -> None:
        for name, minimum in (
            ("window", 2),
            ("first_decoder_layer", 1),
            ("num_decoder_layers", 1),
            ("draft_tokens", 0),
            ("topk", 1),
            ("align", 1),
        ):
            check_int(f"ReplayGeometry.{name}", getattr(self, name), minimum)

    @staticmethod
    def from_config(config: V41FlashConfig, draft_tokens: int | None = None) -> ReplayGeometry:
        """Geometry of a model.

        Args:
            config: the model.
            draft_tokens: drafts of the speculative setting that will run; default the config's draft block.
                Pass 0 without speculation.
        """
        first = config.first_decoder_layer
        return ReplayGeometry(
            window=config.window,
            first_decoder_layer=first,
            num_decoder_layers=config.num_layers - first,
            draft_tokens=config.draft.block_size if draft_tokens is None else draft_tokens,
            topk=config.index_top_k,
            align=lcm(*(ratio for ratio in config.compress_ratios if ratio)),
        )

    @property
    def backtrack(self) -> int:
        """Tokens a speculative step may take back: drafts + 1."""
        return self.draft_tokens + 1

    @property
    def cached_rows(self) -> int:
        """Window rows a prefill must leave behind, and the smallest ring: `window + backtrack - 1` (133).

        The first query that can follow sits at `L - backtrack` and reads down to `L - backtrack - window +
        1`.
        """
        return self.window + self.backtrack - 1

    @property
    def min_keep(self) -> int:
        """Smallest `keep` that is accepted: `window + backtrack` (134)."""
        return self.window + self.backtrack

    @property
    def recommended_keep(self) -> int:
        """`min_keep` plus one more speculative block in flight (140)."""
        return self.min_keep + self.backtrack

    def exact_keep(self, first_layer_kv: FirstLayerKV = "segment", cached_rows: int | None = None) -> int:
        """Smallest `keep` for which bounded replay is not an approximation.

            K_exact = max(C + max(d, 0) * (W - 1), W + d * (W - 1)),   d = num_decoder_layers - 1 - a
            a = 0 for "segment", 1 for "all_rows";  for d >= 0 this is max(C, W) + d * (W - 1)

        Args:
            first_layer_kv: which rows have window KV in the first decoder layer.
            cached_rows: C, how many of the last window-KV rows must be right in every layer; default
                `self.cached_rows`.

        Returns:
            Rows. At this `keep` the last row's output and the last C window-KV rows of all decoder layers
            equal mode off; one row fewer and at least one of them does not (unless the prompt is no longer
            than `keep`).
        """
        check_choice("exact_keep.first_layer_kv", first_layer_kv, _FIRST_LAYER_KV)
        rows = self.cached_rows if cached_rows is None else cached_rows
        check_int("exact_keep.cached_rows", rows, 1)
        depth = self.num_decoder_layers - 1 - (first_layer_kv == "all_rows")
        reach = self.window - 1
        return max(rows + max(depth, 0) * reach, self.window + depth * reach)

    def exact_layers(self, offset: int, first_layer_kv: FirstLayerKV = "segment") -> int:
        """How many decoder layers are exact at the row `offset` rows above a segment start greater than 0.

            min(num_decoder_layers, offset // (window - 1) + a),   a = 0 for "segment", 1 for "all_rows"

        The output of decoder layer m (counted from 0) at that row equals mode off iff the result is at least
        m + 1.
        """
        check_choice("exact_layers.first_layer_kv", first_layer_kv, _FIRST_LAYER_KV)
        check_int("exact_layers.offset", offset, 0)
        return min(self.num_decoder_layers, offset // (self.window - 1) + (first_layer_kv == "all_rows"))


def exact_keep(
    geom: ReplayGeometry, first_layer_kv: FirstLayerKV = "segment", cached_rows: int | None = None
) -> int:
    """`geom.exact_keep(...)` as a function; see there."""
    check_kind("exact_keep.geom", geom, ReplayGeometry)
    return geom.exact_keep(first_layer_kv, cached_rows)


@dataclass(frozen=True)
class ReplayConfig:
    """How the decoder side of a prefill is cut short.

    Args:
        mode: `ReplayMode` or its value; default off, because anything below `exact_keep` is an approximation.
        keep: decoder rows kept at the end of the prompt. Ignored in mode off.
        policy: "prompt_window" keeps the last `keep` rows of the whole prompt, whatever the chunks are (needs
            the prompt's end; a span without one falls back to the other policy). "per_chunk_tail" keeps the
            last `keep` rows of every chunk.
        first_layer_kv: "segment" gives the first decoder layer window KV for kept rows only; "all_rows" for
            every row (one layer more exact, needs the rows just below the segment to stay readable).
        dead: in mode mask, what rows below the segment see. "empty": nothing, so that only the sink is left
            and their attention output is 0. "windowed": their true window, so that they equal mode off.
        geometry: what to check `keep` against here; not stored. `validate` and `plan_decoder` check it again
            against the geometry they are given. Default: V4.1-Flash with 5 drafts.

    Raises:
        ReplayConfigError: unknown word, `keep` not a positive int, or (mode not off) `keep <
            geometry.min_keep`.
    """

    mode: ReplayMode = ReplayMode.OFF
    keep: int = 140
    policy: Policy = "prompt_window"
    first_layer_kv: FirstLayerKV = "segment"
    dead: Dead = "empty"
    geometry: InitVar[ReplayGeometry | None] = None

    def __post_init__(self, geometry: ReplayGeometry | None) -> None:
        if not isinstance(self.mode, ReplayMode):
            check_choice("ReplayConfig.mode", self.mode, tuple(m.value for m in ReplayMode))
            object.__setattr__(self, "mode", ReplayMode(self.mode))
        check_int("ReplayConfig.keep", self.keep, 1)
        check_choice("ReplayConfig.policy", self.policy, _POLICIES)
        check_choice("ReplayConfig.first_layer_kv", self.first_layer_kv, _FIRST_LAYER_KV)
        check_choice("ReplayConfig.dead", self.dead, _DEAD)
        self.check_keep(geometry if geometry is not None else ReplayGeometry())

    def check_keep(self, geom: ReplayGeometry) -> None:
        """Refuse a `keep` that cannot hold the window plus a speculative backtrack (mode off: any)."""
        check_kind("ReplayConfig.geometry", geom, ReplayGeometry)
        if self.mode is ReplayMode.OFF or self.keep >= geom.min_keep:
            return
        raise ReplayConfigError(
            f"ReplayConfig: expected keep: at least {geom.min_keep} = window {geom.window} + "
            f"{geom.draft_tokens} drafts + 1, "
            f"got {self.keep}; {geom.recommended_keep} is recommended",
        )

    def approximate(self, geom: ReplayGeometry) -> bool:
        """True when long prompts do not reproduce mode off: the mode is on and `keep < exact_keep`."""
        return self.mode is not ReplayMode.OFF and self.keep < geom.exact_keep(self.first_layer_kv)

    def validate(self, geom: ReplayGeometry, runtime: ReplayRuntime | None = None) -> list[str]:
        """Check this configuration once, at start.

        Args:
            geom: of the model that will run, with the speculative setting that will run.
            runtime: a `ReplayRuntime` describing the engine, or None to check `geom` alone.

        Returns:
            Warnings to log once; empty when there is nothing to say. An approximate `keep` is one of them.

        Raises:
            ReplayConfigError: on the first setting that cannot work.
        """
        self.check_keep(geom)
        notes: list[str] = []
        if self.mode is ReplayMode.OFF:
            if self.keep != ReplayConfig.keep:
                notes.append(f"keep={self.keep} is ignored in mode off; set mode compact or mask to use it")
        elif self.approximate(geom):
            notes.append(
                f"bounded replay is approximate: keep {self.keep} is below the exact keep "
                f"{geom.exact_keep(self.first_layer_kv)} of first_layer_kv={self.first_layer_kv}; the last "
                f"row is exact through {geom.exact_layers(self.keep - 1, self.first_layer_kv)} of "
                f"{geom.num_decoder_layers} decoder layers"
            )
        if runtime is not None:
            check(
                hasattr(runtime, "check"),
                f"validate: expected runtime: a ReplayRuntime or None, got {type(runtime).__name__}; pass "
                "one",
            )
            notes += runtime.check(self, geom)
        return notes

    def admit(
        self,
        *,
        prompt_logprobs: bool = False,
        prompt_hidden_states: bool = False,
        routed_experts: bool = False,
        keep_all: bool = False,
        hit_end: int = 0,
    ) -> None:
        """Refuse, when a request arrives, an output that this configuration would get wrong or not compute.

        Args:
            prompt_logprobs: log-probabilities of prompt tokens are wanted.
            prompt_hidden_states: decoder hidden states of prompt rows are wanted.
            routed_experts: expert ids of prompt rows are wanted.
            keep_all: the request's spans will be planned with `keep_all=True` (every row runs as in mode
                mask/windowed).
            hit_end: length of the cached prefix the request would reuse; its rows do not run at all.

        Raises:
            ReplayConfigError: such an output under compact or mask/empty without `keep_all`, or over cached
                rows.
        """
        wanted = [
            name
            for name, on in (
                ("prompt log-probabilities", prompt_logprobs),
                ("prompt hidden states", prompt_hidden_states),
                ("routed experts of the prompt", routed_experts),
            )
            if on
        ]
        check_int("admit.hit_end", hit_end, 0)
        if not wanted:
            return
        names = " and ".join(wanted)
        true_rows = (
            keep_all
            or self.mode is ReplayMode.OFF
            or (self.mode is ReplayMode.MASK and self.dead == "windowed")
        )
        setting = self.mode.value if self.mode is ReplayMode.COMPACT else f"{self.mode.value}/{self.dead}"
        check(
            true_rows,
            f"admit: expected every prompt row with its true window for {names}, got mode {setting}; plan "
            "this "
            f"request with keep_all=True, or use mode mask with dead=windowed, or mode off",
        )
        check(
            hit_end == 0,
            f"admit: expected every prompt row to run for {names}, got a cached prefix of {hit_end} tokens; "
            f"ignore the cache for this request",
        )
