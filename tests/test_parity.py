"""Ops compared in place: a whole step agrees, and a wrong kernel is named."""

from typing import Any

import pytest
import torch

from dsv41 import V41FlashConfig, ops, parity
from dsv41._op import ops as registered
from dsv41.layers import V41State
from dsv41.layers.moe import Experts
from tests import models
from tests.tolerance import ATTN_DISTANCE, DOT_BF16

NOISY = ("sample_tokens", "verify_drafts")


def test_a_step_agrees_with_itself():
    cfg = V41FlashConfig.tiny()
    model = models.build(cfg)
    state = V41State.allocate(cfg, 1, 32)
    with parity.compare(*NOISY) as rows:
        model(torch.arange(9), torch.arange(9, dtype=torch.int32), state)
    assert {"sparse_attn", "mxfp4_moe", "block_linear", "write_cache"} <= {row.op for row in rows}
    assert all(row.value == 0 and row.kernel == "torch" for row in rows)
    assert "mxfp4_moe" in parity.report(rows)


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch):
    op = registered()["rms_norm"]
    right = op.load("torch")
    calls = []

    def wrong(*args: Any) -> None:
        right(*args)
        calls.append(1)
        if len(calls) == 1:  # the kernel's call, before the reference's
            args[-1].mul_(1.5)

    monkeypatch.setitem(op._launchers, "torch", wrong)
    with parity.compare() as rows:
        ops.rms_norm(torch.randn(3, 8).bfloat16(), torch.ones(8).bfloat16(), eps=1e-6)
    assert rows[0].op == "rms_norm" and rows[0].value > 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_kernel_of_a_step_agrees_in_place():
    cfg = V41FlashConfig.tiny(hidden=256, inter=128)
    model = models.build(cfg).cuda()
    plain = {}
    for layer in cfg.engram.layers:
        block: Any = model.layers[layer]
        store = block.engram.store
        store.values, store.scale = (
            t.view(torch.uint8).cuda().view(t.dtype) for t in (store.values, store.scale)
        )
    for module in model.modules():
        if isinstance(module, Experts):
            tensors = tuple(t.clone() for t in module.mxfp4.flat()[:4])
            module.pack()
            plain[module.mxfp4.w13.data_ptr()] = tensors
    state = V41State.allocate(cfg, 2, 256, device="cuda")
    tokens = torch.randint(0, 490, (100,), device="cuda")
    positions = torch.cat([torch.arange(70), torch.arange(30)]).int().cuda()
    cu = torch.tensor([0, 70, 100], dtype=torch.int32, device="cuda")
    with parity.compare(*NOISY, plain=plain) as rows:
        model(tokens, positions, state, cu_seqlens=cu, max_len=70)
        cu = torch.arange(3, dtype=torch.int32, device="cuda")
        model(torch.tensor([3, 9], device="cuda"), state.lens.clone(), state, cu_seqlens=cu, max_len=1)
    assert all(row.kernel != "torch" for row in rows), parity.report(rows)
    bound = {"sparse_attn": ATTN_DISTANCE}
    wrong = [r for r in rows if r.differs(bound.get(r.op, DOT_BF16))]
    assert not wrong, parity.report(wrong)
