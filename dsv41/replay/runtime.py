"""Start-up checks of bounded replay against the engine and the model around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .config import ReplayConfig, ReplayGeometry, ReplayMode, check, check_choice, check_int

if TYPE_CHECKING:
    from ..config import V41FlashConfig


@dataclass(frozen=True)
class ReplayRuntime:
    """What `ReplayConfig.validate` must know about the model and the engine; describe only what you have.

    The model defaults are DeepSeek-V4.1-Flash, the engine defaults are a plain single-device engine with
    paged windows.

    Args:
        max_model_len: longest sequence in tokens, or None.
        kv_source_layers: ids of the layers that own a compressor.
        compress_ratios: ratio of the compressed cache each backbone layer reads; 0 = window only.
        engram_layers: ids of the Engram layers.
        encoder_window: sliding window of the encoder layers, or None when it equals the geometry's.
        draft_windows: window of each drafter layer, None for a layer that is not sliding.
        draft_target_rows: rows of the target's decoder layers the drafter reads at the end of a prompt.
        pipeline_starts: first layer of every pipeline stage.
        sequence_parallel: rows are split over ranks inside a layer.
        micro_batches: micro-batches a step is cut into.
        rows_agreed: the engine re-agrees on row counts after the cut (needed by the two settings above).
        context_parallel: ranks one sequence is split over.
        window_storage: "paged" or "ring".
        ring_capacity: slots of a window ring; required with "ring".
        graph_trim_threshold: fewest batch rows for which a captured graph drops decoder rows, or None.
        capture_sizes: row counts of captured graphs.
        max_batched_tokens: most rows in one step, or None.
        encoder_replay: prefix hits are replayed through the encoder.
        encoder_replay_rows: fixed replay length of a hit, or None for `plan_encoder_hit`'s own.
        block_size: tokens a block of the prefix cache.
        windows_prefix_cached: window caches are registered as prefix-cacheable.
        can_pad_compressed: the runner can leave out compressed and index-key writes of replayed rows.
    """

    max_model_len: int | None = None
    kv_source_layers: Sequence[int] = (2, 8, 14, 20)
    compress_ratios: Sequence[int] = (0, 0, *(2,) * 18, *(1,) * 20)
    engram_layers: Sequence[int] = (1, 14)
    encoder_window: int | None = None
    draft_windows: Sequence[int | None] = ()
    draft_target_rows: int = 0
    pipeline_starts: Sequence[int] = (0,)
    sequence_parallel: bool = False
    micro_batches: int = 1
    rows_agreed: bool = False
    context_parallel: int = 1
    window_storage: Literal["paged", "ring"] = "paged"
    ring_capacity: int | None = None
    graph_trim_threshold: int | None = None
    capture_sizes: Sequence[int] = ()
    max_batched_tokens: int | None = None
    encoder_replay: bool = False
    encoder_replay_rows: int | None = None
    block_size: int = 2
    windows_prefix_cached: bool = False
    can_pad_compressed: bool = True

    def __post_init__(self) -> None:
        check_choice("ReplayRuntime.window_storage", self.window_storage, ("paged", "ring"))
        for name in ("micro_batches", "context_parallel", "block_size"):
            check_int(f"ReplayRuntime.{name}", getattr(self, name), 1)
        check_int("ReplayRuntime.draft_target_rows", self.draft_target_rows, 0)
        for name in ("max_model_len", "ring_capacity", "max_batched_tokens", "encoder_replay_rows"):
            if getattr(self, name) is not None:
                check_int(f"ReplayRuntime.{name}", getattr(self, name), 1)

    @staticmethod
    def from_config(config: V41FlashConfig, **engine: Any) -> ReplayRuntime:
        """The model half from its configuration, the engine half from keywords (fields of this class)."""
        return ReplayRuntime(
            kv_source_layers=config.kv_sources,
            compress_ratios=config.compress_ratios,
            engram_layers=config.engram.layers,
            **{"max_model_len": config.max_positions, **engine},
        )

    def check(self, cfg: ReplayConfig, geom: ReplayGeometry) -> list[str]:
        """Refuse what cannot work here; return the warnings. `ReplayConfig.validate` is the way to call it.

        The ring and the encoder side are checked in every mode, the rest only when the decoder side is on.
        """
        notes: list[str] = []
        if cfg.mode is not ReplayMode.OFF:
            _check_model(geom, self)
            _check_drafter(cfg, self)
            _check_parallel(geom, self)
            _check_graphs(cfg, self)
            if self.max_model_len is not None and cfg.keep > self.max_model_len:
                notes.append(
                    f"keep {cfg.keep} is longer than max_model_len {self.max_model_len}: no row is ever "
                    f"dropped; lower keep or use mode off"
                )
        _check_ring(cfg, geom, self)
        if self.encoder_replay:
            _check_encoder_side(geom, self)
        return notes


def _check_model(geom: ReplayGeometry, runtime: ReplayRuntime) -> None:
    first = geom.first_decoder_layer
    sources, ratios = tuple(runtime.kv_source_layers), tuple(runtime.compress_ratios)
    check(
        len(sources) > 0,
        "ReplayRuntime: expected at least 1 compressed-KV source layer, got none; use mode off for this "
        "model",
    )
    check(
        max(sources) == first,
        f"ReplayRuntime: expected the last compressed-KV source to be the first decoder layer {first}, got "
        f"{max(sources)}; a later source would miss the dropped rows, an earlier one means the cut is "
        "misplaced: set "
        f"first_decoder_layer to {max(sources)}",
    )
    # Written as a start, not a length: models list the ratios of draft layers behind the backbone's.
    end = first + geom.num_decoder_layers
    check(
        len(ratios) >= end,
        f"ReplayRuntime: expected compress_ratios of {end} layers, got {len(ratios)}: there must be at "
        "least 1 layer after "
        f"the cut; check num_decoder_layers",
    )
    check(
        ratios[first] > 0,
        f"ReplayRuntime: expected the first decoder layer {first} to read the compressed cache it writes, "
        "got "
        f"ratio {ratios[first]}; use mode off for this model",
    )
    odd = [layer for layer in range(first, end) if ratios[layer] != ratios[first]]
    check(
        not odd,
        f"ReplayRuntime: expected all decoder layers to read the compressed cache of layer {first} at its "
        f"ratio {ratios[first]}, got ratio {ratios[odd[0]] if odd else 0} at layer {odd[0] if odd else 0}; "
        "use mode off for this "
        "model",
    )
    late = [layer for layer in runtime.engram_layers if layer >= first]
    check(
        not late,
        f"ReplayRuntime: expected Engram layers below the first decoder layer {first}, got {late}; dropped "
        f"rows would skip their lookup: use mode off for this model",
    )
    check(
        runtime.encoder_window in (None, geom.window),
        f"ReplayRuntime: expected equal encoder and decoder windows, got {runtime.encoder_window} and "
        f"{geom.window}; use mode off for this model",
    )


def _check_drafter(cfg: ReplayConfig, runtime: ReplayRuntime) -> None:
    windows = tuple(runtime.draft_windows)
    check(
        None not in windows,
        f"ReplayRuntime: expected sliding windows in every drafter layer, got a full one at draft layer "
        f"{windows.index(None) if None in windows else 0}; turn the drafter or replay off",
    )
    widest = max((w for w in windows if w is not None), default=0)
    check(
        widest <= cfg.keep,
        f"ReplayConfig: expected keep: at least the widest draft window {widest}, got {cfg.keep}; raise keep",
    )
    check(
        runtime.draft_target_rows <= cfg.keep,
        f"ReplayConfig: expected keep: at least the {runtime.draft_target_rows} target rows that the drafter "
        f"reads, got {cfg.keep}; raise keep",
    )


def _check_parallel(geom: ReplayGeometry, runtime: ReplayRuntime) -> None:
    first, end = geom.first_decoder_layer, geom.first_decoder_layer + geom.num_decoder_layers
    inside = [start for start in runtime.pipeline_starts if first < start < end]
    check(
        not inside,
        "ReplayRuntime: expected no pipeline stage to start inside the decoder layers "
        f"{first + 1}..{end - 1}, "
        f"got {inside}; cut at layer {first} or below",
    )
    for name, on in (
        ("sequence parallelism", runtime.sequence_parallel),
        (f"{runtime.micro_batches} micro-batches", runtime.micro_batches > 1),
    ):
        check(
            not on or runtime.rows_agreed,
            f"ReplayRuntime: expected ranks that re-agree on row counts after the cut under {name}, got "
            f"rows_agreed=False; add the exchange or use mode off",
        )
    check(
        runtime.context_parallel == 1 or geom.window >= 2 * runtime.context_parallel,
        f"ReplayRuntime: expected window: at least 2 x context_parallel = {2 * runtime.context_parallel}, "
        "got "
        f"{geom.window}; use at most {geom.window // 2} context-parallel ranks",
    )


def _check_graphs(cfg: ReplayConfig, runtime: ReplayRuntime) -> None:
    threshold = runtime.graph_trim_threshold
    check(
        threshold is None or threshold > cfg.keep,
        f"ReplayRuntime: expected graph_trim_threshold: at least {cfg.keep + 1} = keep + 1, got {threshold}; "
        f"a smaller batch has nothing to trim: raise it",
    )
    most = runtime.max_batched_tokens
    largest = max(runtime.capture_sizes, default=0)
    check(
        most is None or largest <= most,
        f"ReplayRuntime: expected capture_sizes: at most max_batched_tokens {most}, got {largest}; drop the "
        f"larger ones",
    )


def _check_ring(cfg: ReplayConfig, geom: ReplayGeometry, runtime: ReplayRuntime) -> None:
    if runtime.window_storage != "ring":
        return
    capacity = runtime.ring_capacity
    least, why = geom.cached_rows, f"window {geom.window} + {geom.draft_tokens} drafts"
    if cfg.mode is not ReplayMode.OFF and cfg.first_layer_kv == "all_rows":
        least, why = (
            cfg.keep + geom.window - 1,
            f"keep {cfg.keep} + window {geom.window} - 1 for first_layer_kv=all_rows",
        )
    check(
        capacity is not None and capacity >= least,
        f"ReplayRuntime: expected ring_capacity: at least {least} = {why}, got {capacity}; enlarge the ring "
        "or page the windows",
    )


def _check_encoder_side(geom: ReplayGeometry, runtime: ReplayRuntime) -> None:
    rows = runtime.encoder_replay_rows
    check(
        rows is None or rows >= geom.window,
        f"ReplayRuntime: expected encoder_replay_rows: at least the window {geom.window}, got {rows}; raise "
        "it or leave it None",
    )
    check(
        runtime.block_size % geom.align == 0,
        f"ReplayRuntime: expected block_size: a multiple of {geom.align}, got {runtime.block_size}; a hit "
        "must not split a compressed pair",
    )
    check(
        not runtime.windows_prefix_cached,
        "ReplayRuntime: expected window caches that are not prefix-cacheable with encoder replay, got "
        "windows_prefix_cached=True; unregister them: their content depends on where a replay began",
    )
    check(
        runtime.can_pad_compressed,
        "ReplayRuntime: expected a runner that can leave out compressed writes of replayed rows, got "
        "can_pad_compressed=False; turn encoder replay off",
    )
