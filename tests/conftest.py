"""Global safety nets: seeds, poisoned memory, one thread a worker, hypothesis profiles."""

import os
import zlib

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

torch.set_num_threads(1)
# Every torch.empty is filled with NaN, 255 or INT_MAX: what is read before it is written shows.
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
