"""Configs: both spellings of the released checkpoint, refusals, and the whole model on the meta device."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from dsv41 import V41FlashConfig
from dsv41.config import EngramConfig
from dsv41.layers import V41Flash
from dsv41.layers.weights import expected_tensors, parameter_counts

RATIOS = [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0]
# Fields with one name in both files.
COMMON: dict[str, Any] = {
    "vocab_size": 129280,
    "head_dim": 512,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "compress_ratios": RATIOS,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 384,
    "swiglu_limit": 10.0,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_vocab_size": 16000000,
    "engram_compressed_vocab_size": 99092,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
}
NESTED: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "text_config": {
        **COMMON,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-20,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2304,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 3,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}
FLAT: dict[str, Any] = {
    **COMMON,
    "dim": 5120,
    "n_layers": 40,
    "n_heads": 64,
    "rope_head_dim": 64,
    "window_size": 128,
    "kv_source_layers": [2, 8, 14, 20],
    "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer": 20,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_seq_len": 65536,
    "norm_eps": 1e-20,
    "n_activated_experts": 6,
    "moe_inter_dim": 2304,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "engram_pad_id": 2,
    "n_mtp_layers": 3,
    "dspark_n_activated_experts": 3,
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with ``a.b`` set, or left out where the value is ``...``."""
    first, _, rest = path.partition(".")
    copy = dict(config)
    copy[first] = changed(config[first], rest, value) if rest else value
    if copy[first] is ...:
        del copy[first]
    return copy


@pytest.mark.parametrize("spelling", [NESTED, FLAT], ids=["nested", "flat"])
def test_released_config(spelling: dict[str, Any]) -> None:
    assert V41FlashConfig.from_hf(spelling) == V41FlashConfig.flash()


@pytest.mark.parametrize("kind", ["flash", "mini", "tiny", "micro"])
def test_round_trip(kind: str) -> None:
    cfg = getattr(V41FlashConfig, kind)()
    assert V41FlashConfig.from_hf(cfg.to_hf()) == cfg
    assert hash(cfg) == hash(dataclasses.replace(cfg))


def test_every_field_is_read() -> None:
    """Each number of the released file changes the config: none is taken from a default unseen."""
    known = V41FlashConfig.flash()
    sizes = {  # multiples that keep the config consistent
        "vocab_size": 129312, "hidden_size": 5152, "num_attention_heads": 128, "head_dim": 544,
        "qk_rope_head_dim": 32, "o_groups": 16, "index_head_dim": 160, "moe_intermediate_size": 2336,
        "num_hidden_layers": 39, "n_routed_experts": 385,
    }  # fmt: skip
    skipped = {
        "num_key_value_heads",
        "n_shared_experts",
        "norm_topk_prob",
        "attention_bias",
        "tie_word_embeddings",
    }
    for name, value in NESTED["text_config"].items():
        if name in skipped or not isinstance(value, (int, float)):
            continue
        new = sizes.get(name, value * 2 if name == "rms_norm_eps" else value + 1)
        config = changed(NESTED, f"text_config.{name}", new)
        if name == "num_hidden_layers":
            config = changed(config, "text_config.dspark_target_layer_ids", [36, 37, 38])
        assert V41FlashConfig.from_hf(config) != known, name
    for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        assert V41FlashConfig.from_hf(changed(NESTED, f"text_config.rope_scaling.{name}", 7)) != known, name
    for path, value in (
        ("image_token_id", 5),
        ("vision_config.patch_size", 16),
        ("text_config.gate_temp", 2.0),
    ):
        assert V41FlashConfig.from_hf(changed(NESTED, path, value)) != known, path


def test_the_schedule_is_sliced_and_derived() -> None:
    cfg = V41FlashConfig.from_hf(NESTED)
    assert len(cfg.compress_ratios) == 40
    assert [cfg.kv_source(i) for i in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [cfg.index_source(i) for i in (2, 13, 23, 24, 39)] == [2, 8, 20, 24, 36]
    assert cfg.first_decoder_layer == 20 and cfg.softmax_scale == 512**-0.5
    assert (cfg.engram.columns, cfg.engram.width) == (24, 6144)
    assert (cfg.image_token, cfg.image_token_end) == (129264, 129269)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (
        changed(changed(NESTED, "text_config.q_lora_rank", ...), "text_config.hidden_size", ...),
        "expected fields hidden_size or dim, q_lora_rank, got",
    ),
    "block size": (
        changed(NESTED, "quantization_config.weight_block_size", [128, 128]),
        r"quantization weight_block_size: \[32, 32\], got \[128, 128\]",
    ),
    "expert dtype": (
        changed(NESTED, "quantization_config.expert_dtype", "fp8"),
        "expert_dtype: 'fp4', got fp8",
    ),
    "scale format": (changed(FLAT, "scale_fmt", "float32"), "scale_fmt: 'ue8m0', got float32"),
    "scoring": (
        changed(NESTED, "text_config.scoring_func", "sigmoid"),
        "scoring_func: 'sqrtsoftplus', got sigmoid",
    ),
    "scoring alias": (changed(FLAT, "score_func", "softmax"), "scoring_func: 'sqrtsoftplus', got softmax"),
    "kv heads": (changed(NESTED, "text_config.num_key_value_heads", 2), "num_key_value_heads: 1, got 2"),
    "shared experts": (changed(NESTED, "text_config.n_shared_experts", 2), "n_shared_experts: 1, got 2"),
    "tied": (
        changed(NESTED, "text_config.tie_word_embeddings", True),
        "tie_word_embeddings: False, got True",
    ),
    "ratio": (
        changed(NESTED, "text_config.compress_ratios", [0, 0, *[4] * 38]),
        "compress_ratios of 0, 1 or 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        V41FlashConfig.from_hf(config)


INCONSISTENT: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"num_layers": 6}, "6 compress_ratios"),
    "sources": ({"kv_sources": (1, 2, 3, 4)}, "kv_sources among index_sources"),
    "first": ({"kv_sources": (3, 4)}, "the first compressed layer to be a kv source"),
    "mixed": (
        {"compress_ratios": (0, 2, 2, 2, 1, 1, 2)},
        "layer 6 to read its source layer 4 at that layer's ratio",
    ),
    "hidden": ({"hidden": 100}, "hidden and inter multiples of 32"),
    "heads": ({"head_dim": 500}, "head widths multiples of 32"),
    "rope": ({"rope_dim": 63}, "an even rope_dim"),
    "index rope": ({"index_dim": 32}, "rope_dim within index_dim"),
    "groups": ({"o_groups": 3}, "num_heads a multiple of o_groups"),
    "top_k": ({"top_k": 9}, "top_k within num_experts"),
    "engram rows": ({"engram": EngramConfig(layers=(0,), num_rows=())}, "a row count an engram layer"),
    "engram layers": ({"engram": EngramConfig(layers=(7,), num_rows=(1,))}, "engram layers in range"),
    "window": ({"window": 1}, "a window of 2 or more"),
}


@pytest.mark.parametrize("case", INCONSISTENT)
def test_inconsistent(case: str) -> None:
    changes, message = INCONSISTENT[case]
    with pytest.raises(ValueError, match=f"V41FlashConfig: expected .*{message}.*, got"):
        V41FlashConfig.tiny(**changes)


def test_drafter_targets_exist() -> None:
    draft = dataclasses.replace(V41FlashConfig.tiny().draft, target_layers=(7,))
    with pytest.raises(ValueError, match="draft target layers in range"):
        V41FlashConfig.tiny(draft=draft)


# The released model, without its memory.


def test_flash_on_the_meta_device() -> None:
    """Every text tensor under its official name, shape and type; building takes seconds (5 s measured)."""
    cfg = V41FlashConfig.flash()
    with torch.device("meta"):
        model = V41Flash(cfg)
    made = {name: (tuple(x.shape), x.dtype) for name, x in model.checkpoint_tensors().items()}
    for layer in cfg.engram.layers:  # the tables stay in their stores
        for part in ("weight", "scale"):
            name = f"layers.{layer}.engram.embed.{part}"
            made[name] = expected_tensors(cfg)[name]
    wanted = {k: v for k, v in expected_tensors(cfg).items() if not k.startswith("mtp.")}
    assert made == {k: (tuple(shape), dtype) for k, (shape, dtype) in wanted.items()}


def test_flash_by_numbers() -> None:
    """The figures of the released checkpoint: tensors, parameters in all and by type, bytes."""
    cfg = V41FlashConfig.flash()
    table = expected_tensors(cfg, vision=True)
    assert (len(table), len(expected_tensors(cfg))) == (96_085, 95_819)
    counts = parameter_counts(cfg, vision=True)
    scales = counts.pop(torch.float8_e8m0fnu)
    assert sum(counts.values()) == 763_205_315_794
    assert counts == {
        torch.int8: 557_171_343_360,
        torch.float8_e4m3fn: 204_015_223_296,
        torch.bfloat16: 1_976_441_856,
        torch.float32: 42_307_282,
    }
    assert scales == 23_563_015_184
    assert sum(math.prod(shape) * dtype.itemsize for shape, dtype in table.values()) == 510_286_023_000


def test_text_and_drafter_by_numbers() -> None:
    cfg = V41FlashConfig.flash()

    def count(*prefixes: str) -> int:
        return sum(
            math.prod(shape) * (2 if dtype == torch.int8 else 1)
            for name, (shape, dtype) in expected_tensors(cfg, vision=True).items()
            if name.startswith(prefixes) and dtype != torch.float8_e8m0fnu
        )

    tables = 196_613_849_600
    assert count("mtp.") == 14_225_362_530
    assert count("vision.", "aligner.", "image_") == 485_268_480
    assert count("layers.", "embed.", "head.", "norm.") == 551_880_835_184 + tables
