"""Global safety nets: seeds, poisoned memory, one thread a worker, hypothesis profiles."""

import os
import zlib
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def _emulates(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that says which ops it emulates did so, or fails."""
    named = {op for mark in request.node.iter_markers("emulates") for op in mark.args}
    if not named:
        yield
        return
    from tests.tools import ascend_emu

    ascend_emu.LAUNCHED.clear()
    yield
    missing = sorted(named - ascend_emu.LAUNCHED)
    assert not missing, f"the test emulates no kernel of {missing}"
