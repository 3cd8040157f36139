"""Rows of the demo about bounded replay: what is exact in every mode, and how far the rest is off."""

from dataclasses import replace

import torch
from dsv41_reference import accumulate, keep_weights

from .demo import Report, largest
from .layers import V41Flash, V41State
from .replay import ReplayConfig, ReplayGeometry, ReplayMode, plan_encoder_hit
from .replay.chunked import plan_prompt, prefill

TOKENS, KEEP = 300, 140
SHORT_HIT, LONG_HIT = 128, 192
SHORT_DECODER, EXACT_TOKENS = 3, 330


def replay_stages(report: Report, model: V41Flash, ids: torch.Tensor) -> None:
    """All rows.

    Args:
        report: receives them.
        model: loaded.
        ids: [num_tokens] the demo's text, repeated where it is too short.
    """
    text = ids.repeat(-(-EXACT_TOKENS // len(ids)))
    prompt, cfg = text[:TOKENS], model.cfg
    compact = ReplayConfig(ReplayMode.COMPACT, KEEP)
    with accumulate(torch.float64), keep_weights():
        off, states = run(model, prompt, ReplayConfig())
        report.add("replay off", TOKENS, None, f"every row runs in all {cfg.num_layers} layers")

        kept, compact_states = run(model, prompt, compact)
        exact = entries_equal(states, compact_states)
        proves = f"{KEEP} decoder rows; last logits off by this, all cached entries up to layer 20 exact"
        report.add("replay compact", TOKENS, largest(kept[-1], off[-1]), proves, exact)

        masked, _ = run(model, prompt, ReplayConfig(ReplayMode.MASK, KEEP))
        difference = largest(masked[-KEEP:], kept)
        report.add("replay mask", TOKENS, difference, "all rows run, the kept ones = compact, bit for bit")

        short = shorter(model, cfg.first_decoder_layer + SHORT_DECODER)
        geometry = ReplayGeometry.from_config(short.cfg)
        keep = geometry.exact_keep("all_rows")
        config = ReplayConfig(ReplayMode.COMPACT, keep, first_layer_kv="all_rows")
        want, want_state = run(short, text[:EXACT_TOKENS], ReplayConfig())
        got, got_state = run(short, text[:EXACT_TOKENS], config)
        rings = (want_state.windows, got_state.windows)
        same = all(torch.equal(a.pages, b.pages) for a, b in zip(*rings, strict=True))
        proves = (
            f"{SHORT_DECODER} decoder layers, keep {keep} of {EXACT_TOKENS}: logits and all window rows = off"
        )
        difference = largest(got[-1], want[-1])
        report.add("replay exact keep", EXACT_TOKENS, difference, proves, difference == 0 and same)

        for hit, against in ((SHORT_HIT, kept[-1]), (LONG_HIT, off[-1])):
            logits, unchanged = from_hit(model, prompt, hit, compact)
            plan = plan_encoder_hit(ReplayGeometry.from_config(cfg), hit, TOKENS, KEEP)
            difference = largest(logits, against)
            what = "last logits = compact" if plan.is_exact else "last logits off by this"
            proves = f"{hit} tokens cached, {len(plan.rows)} rows run: {what}, cached entries untouched"
            good = unchanged and (difference == 0 or not plan.is_exact)
            report.add("replay prefix hit", TOKENS, difference, proves, good)


def run(model: V41Flash, prompt: torch.Tensor, config: ReplayConfig) -> tuple[torch.Tensor, V41State]:
    """Logits of every row that runs in the last layer, and the caches, after one forward."""
    state = V41State.allocate(model.cfg, 1, len(prompt))
    geometry = ReplayGeometry.from_config(model.cfg)
    ((_, _, plan),) = plan_prompt(config, geometry, len(prompt))
    place = torch.arange(len(prompt), dtype=torch.int32)
    return model(prompt, place, state, rows=torch.arange(plan.plan.num_rows)[-KEEP:], replay=plan), state


def from_hit(
    model: V41Flash, prompt: torch.Tensor, hit: int, config: ReplayConfig
) -> tuple[torch.Tensor, bool]:
    """Last logits of a request that shares another's first pages, and whether these stay as they were."""
    state = V41State.allocate(model.cfg, 2, len(prompt))
    prefill(model, prompt[:hit], state, config)
    pages = hit // state.block
    state.page_table[1, :pages] = state.page_table[0, :pages]
    caches = [*state.compressed.values(), *state.index_keys.values()]
    before = [cache.pages[:pages].clone() for cache in caches]
    logits = prefill(model, prompt, state, config, request=1, hit_end=hit)
    return logits[0], all(torch.equal(a, b.pages[:pages]) for a, b in zip(before, caches, strict=True))


def entries_equal(a: V41State, b: V41State) -> bool:
    """All compressed entries and index keys, and the window rows of the encoder, are equal to the bit."""
    caches = [(a.compressed[i], b.compressed[i]) for i in a.cfg.kv_sources]
    caches += [(a.index_keys[i], b.index_keys[i]) for i in a.cfg.kv_sources]
    caches += list(zip(a.windows, b.windows, strict=True))[: a.cfg.first_decoder_layer]
    return all(torch.equal(x.pages, y.pages) for x, y in caches)


def shorter(model: V41Flash, num_layers: int) -> V41Flash:
    """The first layers of a model as a model of their own, which shares its parameters."""
    cfg = model.cfg
    with torch.device("meta"):
        short = V41Flash(
            replace(
                cfg,
                num_layers=num_layers,
                compress_ratios=cfg.compress_ratios[:num_layers],
                index_sources=tuple(i for i in cfg.index_sources if i < num_layers),
                draft=replace(cfg.draft, target_layers=(num_layers - 1,)),
            ),
            model.token_map,
        )
    short.embed, short.norm, short.head = model.embed, model.norm, model.head
    short.layers = model.layers[:num_layers]
    return short
