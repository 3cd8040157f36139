"""Random tensors for every name of the checkpoint table, so that the reference runs at any width."""

from typing import Any

import torch
from dsv41_reference.quant import to_mxfp4, to_mxfp8, to_mxfp8_tiles

SHARED = ("w1", "w3", "w2")


class _Maker:
    def __init__(self, cfg: Any, seed: int) -> None:
        self.cfg, self.random = cfg, torch.Generator().manual_seed(seed)
        self.weights: dict[str, torch.Tensor] = {}

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random) * std

    def put(
        self, name: str, *shape: int, std: float | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.weights[name] = self.normal(*shape, std=shape[-1] ** -0.5 if std is None else std).to(dtype)

    def norm(self, name: str, width: int) -> None:
        self.weights[name] = (1 + self.normal(width, std=0.1)).bfloat16()

    def scaled(self, name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        values, code = pair
        self.weights[name + ".weight"] = values.view(torch.int8) if values.dtype == torch.uint8 else values
        self.weights[name + ".scale"] = code.view(torch.float8_e8m0fnu)

    def linear(self, name: str, out: int, width: int) -> None:
        self.scaled(name, to_mxfp8_tiles(self.normal(out, width, std=width**-0.5)))

    def expert(self, name: str, out: int, width: int) -> None:
        self.scaled(name, to_mxfp4(self.normal(out, width, std=width**-0.5)))

    def block(self, prefix: str, num_experts: int) -> None:
        """What every backbone layer and drafter stage has."""
        cfg = self.cfg
        streams, hidden = cfg.num_streams, cfg.hidden
        self.norm(prefix + "attn_norm.weight", hidden)
        self.norm(prefix + "ffn_norm.weight", hidden)
        for side in ("attn", "ffn"):
            self.put(f"{prefix}hc_{side}_fn", streams * (2 + streams), streams * hidden, dtype=torch.float32)
            self.put(f"{prefix}hc_{side}_base", streams * (2 + streams), std=0.5, dtype=torch.float32)
            self.weights[f"{prefix}hc_{side}_scale"] = torch.tensor([0.7, 0.9, 1.1])
        attn = prefix + "attn."
        self.put(attn + "attn_sink", cfg.num_heads, std=1.0, dtype=torch.float32)
        self.linear(attn + "wq_a", cfg.q_rank, hidden)
        self.norm(attn + "q_norm.weight", cfg.q_rank)
        self.linear(attn + "wq_b", cfg.num_heads * cfg.head_dim, cfg.q_rank)
        self.linear(attn + "wkv", cfg.head_dim, hidden)
        self.norm(attn + "kv_norm.weight", cfg.head_dim)
        self.linear(attn + "wo_a", cfg.o_groups * cfg.o_rank, cfg.num_heads // cfg.o_groups * cfg.head_dim)
        self.linear(attn + "wo_b", hidden, cfg.o_groups * cfg.o_rank)
        ffn = prefix + "ffn."
        self.put(ffn + "gate.weight", num_experts, hidden)
        self.put(ffn + "gate.bias", num_experts, std=0.2, dtype=torch.float32)
        self.put(ffn + "gate.bias_vl", num_experts, std=0.2, dtype=torch.float32)
        for e in range(num_experts):
            for w in SHARED:
                self.expert(
                    f"{ffn}experts.{e}.{w}", *((hidden, cfg.inter) if w == "w2" else (cfg.inter, hidden))
                )
        for w in SHARED:
            self.linear(
                f"{ffn}shared_experts.{w}", *((hidden, cfg.inter) if w == "w2" else (cfg.inter, hidden))
            )

    def sources(self, layer: int) -> None:
        cfg, attn = self.cfg, f"layers.{layer}.attn."
        if layer in cfg.kv_sources:
            self.put(attn + "compressor.wkv.weight", cfg.head_dim, cfg.hidden)
            if cfg.compress_ratios[layer] == 2:
                self.put(attn + "compressor.wgate.weight", cfg.head_dim, cfg.hidden)
            self.norm(attn + "compressor.norm.weight", cfg.head_dim)
            self.put(attn + "indexer.wk.weight", cfg.index_dim, cfg.head_dim)
            self.norm(attn + "indexer.k_norm.weight", cfg.index_dim)
        if layer in cfg.index_sources:
            self.linear(attn + "indexer.wq_b", cfg.index_heads * cfg.index_dim, cfg.q_rank)
            self.put(attn + "indexer.weights_proj.weight", cfg.index_heads, cfg.hidden)

    def engram(self, layer: int, num_rows: int) -> None:
        cfg, name = self.cfg, f"layers.{layer}.engram."
        self.scaled(name + "embed", to_mxfp8(self.normal(num_rows, cfg.engram.head_dim)))
        self.linear(name + "wkv", (cfg.num_streams + 1) * cfg.hidden, cfg.engram.width)
        self.put(name + "q_weight", cfg.num_streams, cfg.hidden, std=1.0)
        self.put(name + "k_weight", cfg.num_streams, cfg.hidden, std=1.0)

    def draft(self) -> None:
        cfg, draft = self.cfg, self.cfg.draft
        for stage in range(draft.num_stages):
            self.block(f"mtp.{stage}.", draft.num_experts)
        self.linear("mtp.0.main_proj", cfg.hidden, len(draft.target_layers) * cfg.hidden)
        self.norm("mtp.0.main_norm.weight", cfg.hidden)
        last = f"mtp.{draft.num_stages - 1}."
        self.norm(last + "norm.weight", cfg.hidden)
        self.put(last + "markov_head.embed.weight", cfg.vocab_size, draft.markov_rank, std=1.0)
        self.put(last + "markov_head.head.weight", cfg.vocab_size, draft.markov_rank)
        self.put(last + "confidence_head.proj.weight", 1, cfg.hidden + draft.markov_rank)


def random_weights(cfg: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Checkpoint name to tensor in its stored dtype, for the text backbone and the drafter.

    Values are scaled so that activations, selection and routing are all at work.
    """
    make = _Maker(cfg, seed)
    make.put("embed.weight", cfg.vocab_size, cfg.hidden, std=1.0)
    make.put("head.weight", cfg.vocab_size, cfg.hidden)
    make.norm("norm.weight", cfg.hidden)
    for layer in range(cfg.num_layers):
        make.block(f"layers.{layer}.", cfg.num_experts)
        make.sources(layer)
    for layer, num_rows in zip(cfg.engram.layers, cfg.engram.num_rows, strict=True):
        make.engram(layer, num_rows)
    make.draft()
    return make.weights


def random_classes(cfg: Any, seed: int = 1) -> torch.Tensor:
    """[vocab_size] int32, an Engram class for each token id."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(cfg.engram.num_classes, (cfg.vocab_size,), generator=random, dtype=torch.int32)


def random_tokens(cfg: Any, num_tokens: int, seed: int = 2, images: bool = False) -> torch.Tensor:
    """[num_tokens] int64 below the image ids; ``images`` puts a span of them into the middle."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(min(cfg.image_token, cfg.vocab_size), (num_tokens,), generator=random)
    if images:
        at = num_tokens // 2
        span = torch.arange(min(4, num_tokens - at))
        tokens[at : at + 4] = torch.where(span < 2, cfg.image_token, cfg.image_token + span - 1)
    return tokens
