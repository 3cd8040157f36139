"""The drafter's op: the Markov bias."""

import pytest
import torch

from dsv41.ops import markov_bias


def inputs(requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    embeds, weight = torch.randn(requests, 8).to(torch.bfloat16), torch.randn(40, 8).to(torch.bfloat16)
    return torch.randn(requests, 3, 40)[:, 1], embeds, weight  # one row of every block: strided


@pytest.mark.parametrize("requests", [0, 1, 5])
def test_closed_form(requests: int) -> None:
    logits, embeds, weight = inputs(requests)
    want = logits.double() + embeds.double() @ weight.double().T
    out = markov_bias(logits, embeds, weight)
    assert out is logits
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)


def test_operator_contract() -> None:
    torch.library.opcheck(torch.ops.dsv41.markov_bias.default, inputs(2))


def test_errors() -> None:
    logits, embeds, weight = inputs(2)
    with pytest.raises(ValueError, match=r"markov_bias: expected weight: \[\*, \*\] bfloat16, got"):
        markov_bias(logits, embeds, weight.float())
    with pytest.raises(ValueError, match=r"markov_bias: expected embeds: \[\*, 8\] bfloat16, got"):
        markov_bias(logits, embeds[:, :4].contiguous(), weight)
    with pytest.raises(ValueError, match=r"markov_bias: expected logits: \[2, 40\] float32, got"):
        markov_bias(logits[:, :39].contiguous(), embeds, weight)
