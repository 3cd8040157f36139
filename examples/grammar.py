"""Text under a grammar, with drafts: XGrammar's bitmasks into dsv41's verification.

``pip install 'dsv41[grammar]'``, then ``python examples/grammar.py``. A set bit is a token id that the
grammar allows. The mask of a row depends on the text and the drafts before it, so a draft that the grammar
forbids never stays.
"""

from collections.abc import Callable, Sequence

import torch
import xgrammar as xgr

GRAMMAR = r"""
root ::= "{" pair ("," pair)? "}"
pair ::= [a-c]+ ":" number
number ::= [0-9] [0-9]? [0-9]?
"""


def token_mask(
    compiled: xgr.CompiledGrammar, vocab_size: int, prompts: Sequence[Sequence[int]]
) -> Callable[[int, list[int]], torch.Tensor]:
    """What ``dsv41.spec.generate`` takes as ``bitmask``: the allowed tokens behind a request's text."""
    matchers = [xgr.GrammarMatcher(compiled) for _ in prompts]
    seen: list[list[int]] = [[] for _ in prompts]  # what each matcher has accepted

    def mask(request: int, text: list[int]) -> torch.Tensor:
        matcher, have, want = matchers[request], seen[request], text[len(prompts[request]) :]
        same = next((i for i, pair in enumerate(zip(have, want, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(have), len(want)) if same is None else same
        if len(have) > same:
            matcher.rollback(len(have) - same)  # drafts that fell
            del have[same:]
        allowed = xgr.allocate_token_bitmask(1, vocab_size)
        for token in want[same:]:
            if matcher.is_terminated() or not matcher.accept_token(token):
                return allowed.fill_(-1)[0]  # behind a forbidden draft: a row that nothing is drawn from
            have.append(token)
        if matcher.is_terminated():
            return allowed.fill_(-1)[0]
        matcher.fill_next_token_bitmask(allowed)
        return allowed[0]

    return mask


def main() -> None:
    """A narrow model of random weights speaks the grammar anyway."""
    from dsv41 import V41FlashConfig
    from dsv41.bench.cpu import synthetic_model
    from dsv41.layers import V41State
    from dsv41.spec.generate import OracleDrafter, generate

    cfg = V41FlashConfig.micro()
    letters = "{}:,abc0123456789 "
    vocabulary = [letters[i] if i < len(letters) else f"<{i}>" for i in range(cfg.vocab_size)]
    stop = cfg.vocab_size - 1
    info = xgr.TokenizerInfo(vocabulary, vocab_size=cfg.vocab_size, stop_token_ids=[stop])
    compiled = xgr.GrammarCompiler(info).compile_grammar(GRAMMAR)

    model, prompts = synthetic_model(cfg), [[20, 21, 22], [30]]
    guess = [vocabulary.index(c) for c in "{ab:12,c:3}"] + [stop]  # a drafter that knows the form
    drafter = OracleDrafter([p + guess for p in prompts], cfg.draft.block_size, cfg.vocab_size)
    result = generate(
        model,
        V41State.allocate(cfg, len(prompts), 64),
        prompts,
        max_new_tokens=24,
        drafter=drafter,
        temperature=1.0,
        stop_ids=[stop],
        bitmask=token_mask(compiled, cfg.vocab_size, prompts),
    )
    for tokens, stopped in zip(result.tokens, result.stopped, strict=True):
        text = "".join(vocabulary[t] for t in tokens if t != stop)
        print(f"{text}  ({'complete' if stopped else 'cut'})")
    print(f"drafts accepted, by their number in a step: {result.counts.lengths.tolist()}")


if __name__ == "__main__":
    main()
