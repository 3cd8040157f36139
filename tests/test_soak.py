"""A short soak in CI, and that it notices: a rollback that keeps one row too many."""

import pytest
import torch

from dsv41.layers import V41State
from tests import models, soak


def test_random_requests_leave_the_reference_state() -> None:
    done = soak.run("micro", models.model("micro"), seconds=0, requests=3, longest=20, seed=1, steps=30)
    assert not done.differing
    assert done.finished >= 3 and done.rolled_back >= 5 and done.cancelled >= 1


def test_a_wrong_carry_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback that loses the id of the last token it keeps."""
    rollback = V41State.rollback

    def wrong(self: V41State, lens: torch.Tensor) -> None:
        moved = (lens < self.lens) & (lens > 0)
        rollback(self, lens)
        for r in moved.nonzero().flatten().tolist():
            self.tokens[r, (int(lens[r]) - 1) % self.tokens.shape[1]] = 5

    monkeypatch.setattr(V41State, "rollback", wrong)
    done = soak.run("micro", models.model("micro"), seconds=0, requests=3, longest=20, seed=1, steps=30)
    assert done.differing


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_soak_on_the_gpu() -> None:
    kind = models.V41FlashConfig.tiny(hidden=256, inter=128)
    done = soak.run(kind, soak.on_gpu(kind), seconds=10, requests=4, longest=100, seed=2)
    assert done.finished and not done.differing and not done.grew()
