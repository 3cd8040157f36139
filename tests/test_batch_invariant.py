"""`dsv41.batch_invariant`: no number of rows changes an order of sums; on a GPU, the whole model's bits."""

import importlib

import pytest
import torch

from dsv41 import V41FlashConfig, batch_invariant
from dsv41.layers import V41Flash, V41State
from dsv41.ops.attn.api import num_splits_for, sparse_attn_scratch
from dsv41.spec import OracleDrafter, generate
from tests import soak

linear = importlib.import_module("dsv41.ops.linear.api")
TOKENS = (1, 8, 64, 128, 129, 700, 4096)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def experts(tokens: int) -> str:
    pytest.importorskip("tilelang")
    return importlib.import_module("dsv41.ops.moe.tilelang_cuda").choose_shape(tokens, 6, 48, "exact", 10.0)


CHOICES = {
    "linear": lambda n: (linear.few(n), linear.num_splits(n, 5120, 8192)),
    "grouped": lambda n: linear.group_splits(n, 8192, 4096),
    "experts": experts,
    "attention": lambda n: num_splits_for(n, 64, 128, 512),
}


@pytest.mark.parametrize("op", CHOICES)
def test_one_order_for_every_number_of_tokens(op: str) -> None:
    choose = CHOICES[op]
    usual = [choose(n) for n in TOKENS]
    with batch_invariant():
        assert {choose(n) for n in TOKENS} == {usual[-1]}
        with batch_invariant():
            pass
        assert choose(1) == usual[-1]
    assert [choose(n) for n in TOKENS] == usual and len(set(usual)) > 1


def test_scratch_follows() -> None:
    with batch_invariant():
        assert linear.block_linear_scratch(5, 5120, 8192) >= 2 * 5 * 8192  # rows in bf16
        assert sparse_attn_scratch(5, 64, 512, 128, 512) == 0


@pytest.mark.parametrize("features, k", [(384, 5120), (1, 5376), (129280, 5120), (64, 256)])
def test_shares_of_k_depend_on_the_weights_alone(features: int, k: int) -> None:
    """`linear` is always invariant: no tile moves a share. Scratch is enough for fewer rows."""
    for tokens in TOKENS:
        rows, columns, split = linear.linear_tile(tokens, features, k)
        ((_, shape),) = linear.linear_parts(tokens, features, k)
        assert rows == linear.linear_tile(1, features, k)[0] and columns in linear.TOKEN_TILES
        assert shape[0] == (-(-k // linear.share_of(features, k)) if split else 0)
        most = linear.linear_scratch(tokens, features, k)
        assert all(linear.linear_scratch(n, features, k) <= most for n in range(1, tokens, 61))
        assert most >= 4 * shape[0] * shape[1] * shape[2]


@pytest.fixture(scope="module")
def model() -> V41Flash:
    cfg = V41FlashConfig.tiny(hidden=256, inter=128)
    return soak.on_gpu(cfg, drafter=True)


def run(model: V41Flash, prompts: list[torch.Tensor], cuts: list[int]) -> list[torch.Tensor]:
    """Logits of every token of every prompt, in steps that end at ``cuts``."""
    state = V41State.allocate(model.cfg, len(prompts), 128, device="cuda")
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for begin, end in zip([0, *cuts], [*cuts, 1 << 30], strict=True):
        parts = [p[begin:end] for p in prompts]
        lens = [len(p) for p in parts]
        cu = torch.tensor([0, *lens]).cumsum(0).int().cuda()
        place = torch.cat([torch.arange(begin, begin + n) for n in lens]).int().cuda()
        out = model(torch.cat(parts), place, state, cu_seqlens=cu, max_len=max(lens))
        for kept, rows in zip(logits, out.split(lens), strict=True):
            kept.append(rows)
    return [torch.cat(kept) for kept in logits]


@needs_gpu
def test_alone_and_in_a_batch_of_64(model: V41Flash) -> None:
    """The same bits whoever else is there, and however the prompt is cut; greedy and sampled alike."""
    prompts = [torch.randint(0, 490, (20 + 7 * r % 41,), device="cuda") for r in range(64)]
    with batch_invariant():
        many = run(model, prompts, [9, 10, 11, 30])
        for r in (0, 17, 63):
            (alone,) = run(model, prompts[r : r + 1], [])
            assert torch.equal(alone, many[r])


@needs_gpu
def test_greedy_text_with_drafts_is_the_text_without(model: V41Flash) -> None:
    prompts = [torch.randint(0, 490, (5 + r,)).tolist() for r in range(16)]

    def texts(**how: object) -> list[list[int]]:
        state = V41State.allocate(model.cfg, 16, 128, drafter=True, device="cuda")
        return generate(model, state, prompts, max_new_tokens=48, **how).tokens  # type: ignore[arg-type]

    with batch_invariant():
        plain = texts()
        assert texts(drafter=model.mtp) == plain
        assert texts(drafter=model.mtp, budget=lambda step, survival: 7 * step % 40) == plain
        assert texts(chunk=3) == plain
        # A drafter that is right: most drafts stay.
        oracle = OracleDrafter(
            [p + t for p, t in zip(prompts, plain, strict=True)], 5, model.cfg.vocab_size, error=0.2
        )
        state = V41State.allocate(model.cfg, 16, 128, drafter=True, device="cuda")
        drafted = generate(model, state, prompts, max_new_tokens=48, drafter=oracle)
        assert drafted.tokens == plain and drafted.counts.steps < 30
        assert sum(drafted.counts.accepted) > 300
