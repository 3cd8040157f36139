"""One small model for the tests of this folder; building its weights is most of a test's time."""

import dataclasses

import pytest
import torch
from dsv41_reference.model import V41Reference
from dsv41_reference.numerics import accumulate
from reference_weights import random_classes, random_tokens, random_weights

from dsv41.config import V41FlashConfig


@dataclasses.dataclass(frozen=True)
class Small:
    """A configuration, its random weights, and one traced float64 pass over tokens with an image span."""

    cfg: V41FlashConfig
    weights: dict[str, torch.Tensor]
    classes: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    trace: dict[str, torch.Tensor]

    def model(self, changed: dict[str, torch.Tensor] | None = None, **config: object) -> V41Reference:
        """The model again, with some tensors or configuration fields replaced."""
        cfg = dataclasses.replace(self.cfg, **config)  # type: ignore[arg-type]
        return V41Reference(cfg, self.weights | (changed or {}), self.classes)


@pytest.fixture(scope="session")
def small() -> Small:
    cfg = V41FlashConfig.micro()
    weights, classes, tokens = random_weights(cfg), random_classes(cfg), random_tokens(cfg, 45, images=True)
    trace: dict[str, torch.Tensor] = {}
    with accumulate(torch.float64):
        logits = V41Reference(cfg, weights, classes).forward(tokens, trace=trace)
    return Small(cfg, weights, classes, tokens, logits, trace)


@pytest.fixture
def float64():
    """Compute in float64 inside the test."""
    with accumulate(torch.float64):
        yield
