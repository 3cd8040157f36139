"""V4.1-Flash as one frozen dataclass. Hugging Face spellings appear in `V41FlashConfig.from_hf` only."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ._op import check


@dataclass(frozen=True)
class EngramConfig:
    """Conditional n-gram memory: which layers, and the shape of their tables.

    num_rows: declared rows a table, in layer order; the sum of the layer's prime moduli must equal it.
    """

    layers: tuple[int, ...] = (1, 14)
    num_rows: tuple[int, ...] = (384_006_168, 384_016_682)
    max_ngram: int = 4
    num_heads: int = 8
    head_dim: int = 256
    base: int = 16_000_000
    num_classes: int = 99_092
    pad_token: int = 2

    @property
    def columns(self) -> int:
        """Table rows read for a token and layer: (max_ngram - 1) orders times num_heads."""
        return (self.max_ngram - 1) * self.num_heads

    @property
    def width(self) -> int:
        """Values read for a token and layer."""
        return self.columns * self.head_dim


@dataclass(frozen=True)
class DraftConfig:
    """DSpark drafter ``mtp.*``: ``num_stages`` blocks with their own experts, a Markov and a confidence
    head.
    """

    num_stages: int = 3
    block_size: int = 5
    noise_token: int = 128_799
    target_layers: tuple[int, ...] = (37, 38, 39)
    markov_rank: int = 256
    num_experts: int = 128
    top_k: int = 3


@dataclass(frozen=True)
class VisionConfig:
    """Shapes of the vision tower. Only its tensor table is known here; the tower itself is out of scope."""

    num_layers: int = 32
    hidden: int = 1024
    inter: int = 2816
    patch: int = 14
    downsample: int = 3


@dataclass(frozen=True)
class V41FlashConfig:
    """Model constants. Defaults are the released checkpoint's; see `flash`, `mini`, `tiny`, `micro`.

    Layers: ``compress_ratios[i]`` is the ratio of the compressed cache that layer i *reads* (0: window only);
    ``kv_sources`` own a compressor, a compressed cache and index keys; ``index_sources`` run an indexer.
    Both are published to the layers behind them, up to the next source.
    """

    vocab_size: int = 129_280
    hidden: int = 5120
    num_layers: int = 40
    num_heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_rank: int = 1280
    o_groups: int = 8
    o_rank: int = 1024
    window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, *(2,) * 18, *(1,) * 20)
    kv_sources: tuple[int, ...] = (2, 8, 14, 20)
    index_sources: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_heads: int = 32
    index_dim: int = 128
    index_top_k: int = 512
    candidate_source: int = 20
    candidate_blocks: int = 2048
    candidate_block_size: int = 8
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    rope_factor: float = 16.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_original_positions: int = 65_536
    max_positions: int = 1_048_576
    num_streams: int = 4
    sinkhorn_iters: int = 20
    mhc_eps: float = 1e-6
    norm_eps: float = 1e-20
    num_experts: int = 384
    top_k: int = 6
    inter: int = 2304
    route_scale: float = 1.5
    route_temperature: float = 1.0
    swiglu_limit: float = 10.0
    image_token: int = 129_264
    image_token_end: int = 129_269
    # The compressed row's RoPE dimensions are rounded to bf16 before they are quantised; False keeps float32.
    round_compressed_rope: bool = True
    engram: EngramConfig = field(default_factory=EngramConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)

    def __post_init__(self) -> None:
        name = "V41FlashConfig"

        def need(condition: bool, expected: str, got: Any) -> None:
            check(condition, name, expected, got)

        need(
            len(self.compress_ratios) == self.num_layers,
            f"{self.num_layers} compress_ratios",
            self.compress_ratios,
        )
        need(set(self.compress_ratios) <= {0, 1, 2}, "compress_ratios of 0, 1 or 2", self.compress_ratios)
        need(
            set(self.kv_sources) <= set(self.index_sources), "kv_sources among index_sources", self.kv_sources
        )
        compressed = [i for i, r in enumerate(self.compress_ratios) if r]
        need(
            not compressed or (bool(self.kv_sources) and compressed[0] == self.kv_sources[0]),
            "the first compressed layer to be a kv source",
            self.kv_sources,
        )
        for i in compressed:
            source = self.kv_source(i)
            same = self.compress_ratios[i] == self.compress_ratios[source]
            need(
                same,
                f"layer {i} to read its source layer {source} at that layer's ratio",
                self.compress_ratios,
            )
        need(
            self.hidden % 32 == 0 and self.inter % 32 == 0,
            "hidden and inter multiples of 32",
            (self.hidden, self.inter),
        )
        need(
            self.head_dim % 32 == 0 and self.index_dim % 32 == 0, "head widths multiples of 32", self.head_dim
        )
        need(0 < self.rope_dim <= self.head_dim and self.rope_dim % 2 == 0, "an even rope_dim", self.rope_dim)
        need(self.rope_dim <= self.index_dim, "rope_dim within index_dim", (self.rope_dim, self.index_dim))
        need(
            self.num_heads % self.o_groups == 0,
            "num_heads a multiple of o_groups",
            (self.num_heads, self.o_groups),
        )
        need(self.top_k <= self.num_experts, "top_k within num_experts", (self.top_k, self.num_experts))
        need(
            len(self.engram.layers) == len(self.engram.num_rows),
            "a row count an engram layer",
            self.engram.num_rows,
        )
        need(
            all(0 <= i < self.num_layers for i in self.engram.layers),
            "engram layers in range",
            self.engram.layers,
        )
        need(
            all(0 <= i < self.num_layers for i in self.draft.target_layers),
            "draft target layers in range",
            self.draft.target_layers,
        )
        need(self.window >= 2 and self.num_layers >= 1, "a window of 2 or more", self.window)

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed cache ``layer`` reads."""
        return max(s for s in self.kv_sources if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection ``layer`` uses."""
        return max(s for s in self.index_sources if s <= layer)

    @property
    def first_decoder_layer(self) -> int:
        """The cut of bounded replay: the last layer that owns a compressed cache."""
        return max(self.kv_sources, default=0)

    @property
    def softmax_scale(self) -> float:
        """What multiplies attention scores: 1 / sqrt(head_dim)."""
        return self.head_dim**-0.5

    @staticmethod
    def flash(**changes: Any) -> "V41FlashConfig":
        """The released V4.1-Flash."""
        return replace(V41FlashConfig(), **changes)

    @staticmethod
    def mini(**changes: Any) -> "V41FlashConfig":
        """The real schedule, window, vocabulary, Engram classes and records; narrow, for a laptop.

        The selection sizes are small enough that top-k and candidate blocks are at work at 3,000 tokens.
        """
        small = V41FlashConfig(
            hidden=256,
            num_heads=2,
            q_rank=128,
            o_groups=2,
            o_rank=64,
            index_heads=4,
            index_top_k=64,
            candidate_blocks=128,
            max_positions=65_536,
            rope_original_positions=4096,
            num_experts=16,
            top_k=2,
            inter=128,
            engram=EngramConfig(head_dim=32, base=2000, num_rows=(50_148, 54_840)),
            draft=DraftConfig(markov_rank=64, num_experts=8, top_k=2),
            vision=VisionConfig(num_layers=1, hidden=64, inter=64),
        )
        return replace(small, **changes)

    @staticmethod
    def tiny(**changes: Any) -> "V41FlashConfig":
        """Seven layers, one of every kind, with the real records (head width 512, RoPE 64, index width
        128).
        """
        small = V41FlashConfig(
            vocab_size=512,
            hidden=128,
            num_layers=7,
            num_heads=2,
            q_rank=64,
            o_groups=2,
            o_rank=32,
            window=16,
            compress_ratios=(0, 2, 2, 2, 1, 1, 1),
            kv_sources=(1, 3, 4),
            index_sources=(1, 3, 4, 6),
            index_heads=2,
            index_top_k=8,
            candidate_source=4,
            candidate_blocks=3,
            candidate_block_size=4,
            max_positions=4096,
            rope_original_positions=256,
            num_experts=8,
            top_k=2,
            inter=64,
            image_token=500,
            image_token_end=505,
            engram=EngramConfig(
                layers=(0, 3),
                num_rows=(546, 846),
                max_ngram=3,
                num_heads=4,
                head_dim=32,
                base=50,
                num_classes=200,
            ),
            draft=DraftConfig(
                noise_token=499, target_layers=(4, 5, 6), markov_rank=32, num_experts=4, top_k=2
            ),
            vision=VisionConfig(num_layers=1, hidden=64, inter=64),
        )
        return replace(small, **changes)

    @staticmethod
    def micro(**changes: Any) -> "V41FlashConfig":
        """Dimension-generic and CPU only: records of other sizes than the real ones, for exhaustive tests."""
        small = V41FlashConfig.tiny(
            vocab_size=96,
            hidden=64,
            num_layers=6,
            num_heads=4,
            head_dim=32,
            rope_dim=8,
            q_rank=32,
            o_groups=2,
            o_rank=16,
            window=8,
            compress_ratios=(0, 0, 2, 2, 1, 1),
            kv_sources=(2, 4),
            index_sources=(2, 4, 5),
            index_heads=4,
            index_dim=32,
            index_top_k=4,
            candidate_source=4,
            candidate_blocks=2,
            candidate_block_size=2,
            max_positions=512,
            rope_original_positions=64,
            inter=32,
            image_token=90,
            image_token_end=95,
            engram=EngramConfig(
                layers=(1, 3),
                num_rows=(60, 120),
                max_ngram=3,
                num_heads=2,
                head_dim=32,
                base=11,
                num_classes=64,
            ),
            draft=DraftConfig(
                num_stages=2,
                block_size=3,
                noise_token=89,
                target_layers=(4, 5),
                markov_rank=16,
                num_experts=4,
                top_k=2,
            ),
        )
        return replace(small, **changes)

    @staticmethod
    def from_file(path: str | Path) -> "V41FlashConfig":
        """`from_hf` of a ``config.json``.

        Errors: ValueError that names the file, where it is not there, no JSON, or not this model's.
        """
        try:
            return V41FlashConfig.from_hf(json.loads(Path(path).read_text("utf-8")))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"V41FlashConfig.from_file: expected a V4.1 config in {path}, got {error}"
            ) from error

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "V41FlashConfig":
        """From ``config.json`` of the released checkpoint or from its flat ``inference/config.json``.

        Errors: ValueError that names every missing field, or the first value this library does not implement.
        """
        name = "V41FlashConfig.from_hf"
        check(isinstance(config, Mapping), name, "a config.json mapping", config)
        nested = isinstance(config.get("text_config"), Mapping)
        text: Mapping[str, Any] = {**config, **config["text_config"]} if nested else config
        missing: list[str] = []

        def get(names: str, default: Any = None) -> Any:
            """The value under the first of the spellings that is present; ``default`` None means required."""
            for spelling in names.split("|"):
                if text.get(spelling) is not None:
                    return text[spelling]
            if default is None:
                missing.append(names.replace("|", " or "))
            return default

        scaling = text.get("rope_scaling") or {}

        def rope(key: str, alias: str) -> Any:
            return scaling[key] if key in scaling else get(alias)

        for names, wanted in _IMPLEMENTED:
            value = get(names, wanted)
            check(value == wanted, name, f"{names.split('|')[0]}: {wanted!r}", value)
        quantization = config.get("quantization_config") or {}
        for key, wanted in _IMPLEMENTED_QUANTIZATION:
            value = quantization.get(key, text.get(key, wanted))
            check(value == wanted, name, f"quantization {key}: {wanted!r}", value)

        values = {ours: get(names) for ours, names in _HF_FIELDS.items()}
        engram = {ours: get(names) for ours, names in _HF_ENGRAM.items()}
        draft = {ours: get(names) for ours, names in _HF_DRAFT.items()}
        values |= {
            "rope_factor": rope("factor", "rope_factor"),
            "rope_beta_fast": rope("beta_fast", "beta_fast"),
            "rope_beta_slow": rope("beta_slow", "beta_slow"),
            "rope_original_positions": rope("original_max_position_embeddings", "original_seq_len"),
            "max_positions": get("max_position_embeddings|max_seq_len", 1_048_576),
            "route_temperature": get("gate_temp", 1.0),
            "image_token": config.get("image_token_id", text.get("image_token_id", 129_264)),
        }
        check(not missing, name, "fields " + ", ".join(missing or ["-"]), "a config without them")
        values["image_token_end"] = values["image_token"] + 5
        layers = values["num_layers"]
        values["compress_ratios"] = tuple(values["compress_ratios"])[:layers]
        vision = config.get("vision_config") or {}
        vision_values = {ours: vision[theirs] for ours, theirs in _HF_VISION.items() if theirs in vision}
        return V41FlashConfig(
            **_tuples(values),
            engram=EngramConfig(**_tuples(engram)),
            draft=DraftConfig(**_tuples(draft)),
            vision=VisionConfig(**vision_values),
        )

    def to_hf(self) -> dict[str, Any]:
        """The nested ``config.json`` form; `from_hf` of it gives an equal config."""
        text = {names.split("|")[0]: getattr(self, ours) for ours, names in _HF_FIELDS.items()}
        text |= {names.split("|")[0]: getattr(self.engram, ours) for ours, names in _HF_ENGRAM.items()}
        text |= {names.split("|")[0]: getattr(self.draft, ours) for ours, names in _HF_DRAFT.items()}
        text |= {names.split("|")[0]: wanted for names, wanted in _IMPLEMENTED}
        text["compress_ratios"] = [*self.compress_ratios, *(0,) * self.draft.num_stages]
        text["gate_temp"] = self.route_temperature
        text["max_position_embeddings"] = self.max_positions
        text["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": self.rope_factor,
            "beta_fast": self.rope_beta_fast,
            "beta_slow": self.rope_beta_slow,
            "original_max_position_embeddings": self.rope_original_positions,
        }
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            "image_token_id": self.image_token,
            "text_config": {k: list(v) if isinstance(v, tuple) else v for k, v in text.items()},
            "vision_config": {theirs: getattr(self.vision, ours) for ours, theirs in _HF_VISION.items()},
            "quantization_config": dict(_IMPLEMENTED_QUANTIZATION),
        }


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


_HF_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size|dim",
    "num_layers": "num_hidden_layers|n_layers",
    "num_heads": "num_attention_heads|n_heads",
    "head_dim": "head_dim",
    "rope_dim": "qk_rope_head_dim|rope_head_dim",
    "q_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_rank": "o_lora_rank",
    "window": "sliding_window|window_size",
    "compress_ratios": "compress_ratios",
    "kv_sources": "kv_source_layer_ids|kv_source_layers",
    "index_sources": "index_source_layer_ids|index_source_layers",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_top_k": "index_topk",
    "candidate_source": "candidate_source_layer_id|candidate_source_layer",
    "candidate_blocks": "candidate_topk_blocks",
    "candidate_block_size": "candidate_block_size",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
    "num_streams": "hc_mult",
    "sinkhorn_iters": "hc_sinkhorn_iters",
    "mhc_eps": "hc_eps",
    "norm_eps": "rms_norm_eps|norm_eps",
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok|n_activated_experts",
    "inter": "moe_intermediate_size|moe_inter_dim",
    "route_scale": "routed_scaling_factor|route_scale",
    "swiglu_limit": "swiglu_limit",
}
_HF_ENGRAM = {
    "layers": "engram_layer_ids",
    "num_rows": "engram_num_embeddings",
    "max_ngram": "engram_max_ngram_size",
    "num_heads": "engram_n_heads",
    "head_dim": "engram_head_dim",
    "base": "engram_vocab_size",
    "num_classes": "engram_compressed_vocab_size",
    "pad_token": "engram_pad_token_id|engram_pad_id",
}
_HF_DRAFT = {
    "num_stages": "num_nextn_predict_layers|n_mtp_layers",
    "block_size": "dspark_block_size",
    "noise_token": "dspark_noise_token_id",
    "target_layers": "dspark_target_layer_ids",
    "markov_rank": "dspark_markov_rank",
    "num_experts": "dspark_n_routed_experts",
    "top_k": "dspark_num_experts_per_tok|dspark_n_activated_experts",
}
_HF_VISION = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "inter": "intermediate_size",
    "patch": "patch_size",
    "downsample": "downsample_ratio",
}
# Values that the code has built in; a config that says otherwise is refused, not half obeyed.
_IMPLEMENTED: tuple[tuple[str, Any], ...] = (
    ("num_key_value_heads", 1),
    ("n_shared_experts", 1),
    ("scoring_func|score_func", "sqrtsoftplus"),
    ("topk_method", "noaux_tc"),
    ("norm_topk_prob", True),
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("tie_word_embeddings", False),
)
_IMPLEMENTED_QUANTIZATION: tuple[tuple[str, Any], ...] = (
    ("quant_method", "fp8"),
    ("activation_scheme", "dynamic"),
    ("weight_block_size", [32, 32]),
    ("scale_fmt", "ue8m0"),
    ("expert_dtype", "fp4"),
)
