"""The memory plan is what the modules and the state really allocate, byte for byte."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from dsv41 import V41FlashConfig, plan_memory
from dsv41.__main__ import main
from dsv41.layers import V41Flash, V41State
from dsv41.layers.engram import TokenMap
from dsv41.layers.moe import Experts
from dsv41.layers.weights import expected_tensors
from dsv41.memory import DEVICES, GIB, Allocations, MemoryPlan, state_bytes
from dsv41.ops.exchange import usual_capacity
from tests import models


@pytest.fixture(scope="module")
def flash() -> MemoryPlan:
    """V4.1-Flash at full width on an H200, 8 ranks."""
    return plan_memory(V41FlashConfig.flash(), DEVICES["H200"], ep=8, host_bytes=64 * GIB)


def resident(state: V41State) -> int:
    """Bytes of a real state, counted from its allocator's side: by address, not by view."""
    pools = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (
            *(c.pages for c in state.windows),
            *(c.pages for c in (*state.compressed.values(), *state.index_keys.values())),
            *state.carry.values(),
            state.lens,
            state.written,
            state.tokens,
            state.page_table,
        )
    }
    return sum(pools.values())


@pytest.mark.parametrize("size", ["tiny", "mini"])
@pytest.mark.parametrize("drafter", [False, True])
def test_weights_and_state_are_what_a_run_allocates(size: str, drafter: bool) -> None:
    cfg = getattr(V41FlashConfig, size)()
    plan = plan_memory(cfg, GIB, step_tokens=32, max_requests=3, max_context=512, drafter=drafter)
    model = V41Flash(cfg, drafter=drafter)
    classes = TokenMap.synthetic(cfg.vocab_size, cfg.engram.num_classes, 0).ids
    assert sum(plan.weights.values()) == sum(p.nbytes for p in model.parameters()) + classes.nbytes
    for requests, pages in ((1, 0), (1, 3), (3, 8)):
        state = V41State.allocate(cfg, requests, 64 * pages, drafter=drafter)
        want = requests * (plan.request_bytes + pages * plan.block_bytes)
        assert resident(state) == state_bytes(state) == want


def test_full_width_weights_are_the_checkpoint(flash: MemoryPlan) -> None:
    """Against the table of names, which no module had a hand in."""
    sizes = {n: math.prod(s) * d.itemsize for n, (s, d) in expected_tensors(V41FlashConfig.flash()).items()}
    tables = sum(size for name, size in sizes.items() if ".engram.embed." in name)
    experts = sum(size for name, size in sizes.items() if ".ffn.experts." in name and name[:3] != "mtp")
    assert tables == 264 * (384_006_168 + 384_016_682)
    weights = sum(flash.weights.values()) - flash.weights["tables of classes and experts"]
    assert weights == sum(sizes.values()) - tables - experts + experts // 8
    assert tables // 8 <= flash.engram_bytes <= 1.001 * tables / 8
    assert flash.block_bytes == 64 * 890 + 4  # records and one entry of the page table


def test_what_fits_fits_and_one_more_does_not(flash: MemoryPlan) -> None:
    small = plan_memory(V41FlashConfig.tiny(), 4 * 10**8, max_requests=1000, step_tokens=8, reserve=0)
    for plan, cfg, context in ((flash, V41FlashConfig.flash(), 10**6), (small, V41FlashConfig.tiny(), 100)):
        count = plan.requests(context)
        assert 0 < count < plan.max_requests or plan is flash

        def size(n: int, cfg: Any = cfg, context: int = context) -> int:
            return state_bytes(V41State.allocate(cfg, n, context, drafter=True, device="meta"))

        assert size(count) <= plan.room and (size(count + 1) > plan.room or count == plan.max_requests)
        tokens = plan.tokens(count)
        assert plan.request_bytes * count + tokens // plan.block * plan.block_bytes <= plan.room
    assert small.requests(200) <= small.requests(100)
    assert small.tokens(1) == small.max_context and small.tokens(2) == 2 * small.tokens(1)
    most = small.max_requests
    assert small.tokens(most) < small.tokens(most - 1) < most * small.max_context


def test_where_memory_goes(flash: MemoryPlan) -> None:
    on_device = dataclasses.replace(flash, engram="device")
    assert flash.engram == "host" and on_device.fixed - flash.fixed == flash.engram_bytes
    assert flash.host_room == 64 * GIB - flash.engram_bytes
    # Streams of 4 x bf16, the rows of the exchange (out, in, in and out of the experts), scratch of ops.
    rows = 8 * usual_capacity(4096, 6, 8)
    least = 4096 * 40_960 + rows * (2 * 5296 + 2 * 10_240)
    assert least < flash.prefill < 3 * least
    tiny = V41FlashConfig.tiny()
    small: dict[str, Any] = {"step_tokens": 64, "max_requests": 8}
    eager = plan_memory(tiny, GIB, **small, graphs=False)
    captured = plan_memory(tiny, 10**6, **small, host_bytes=1000, engram="host", ep=4)
    assert captured.graphs == captured.decode and eager.graphs == 0 < eager.decode
    assert captured.weights["routed experts"] * 4 == eager.weights["routed experts"]
    assert plan_memory(tiny, GIB, **{**small, "step_tokens": 512}).prefill > eager.prefill
    assert captured.room < 0 and captured.requests(4096) == captured.tokens(1) == 0
    assert "does not fit" in str(captured) and "host memory are missing" in str(captured)


def test_allocations_count_memory_and_not_views() -> None:
    given = torch.zeros(1000)
    with Allocations() as counted:
        given.view(10, 100)[3:].t()
        assert counted.peak == 0
        a = torch.empty(100, dtype=torch.uint8)
        b = a.view(10, 10)
        del a
        assert counted.now == 100
        c = torch.empty(50, dtype=torch.uint8)
        del b, c
        assert counted.now == 0
        torch.empty(20, dtype=torch.uint8)
    assert counted.peak == 150


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_takes_what_the_plan_says() -> None:
    cfg = V41FlashConfig.tiny(hidden=256, inter=128)
    requests, tokens = 8, 2048
    plan = plan_memory(cfg, GIB, step_tokens=tokens, max_requests=requests, max_context=1024, drafter=False)
    model: Any = models.build(cfg).cuda()
    for layer in cfg.engram.layers:
        store = model.layers[layer].engram.store
        store.values, store.scale = (
            t.view(torch.uint8).cuda().view(t.dtype) for t in (store.values, store.scale)
        )
    for module in model.modules():
        if isinstance(module, Experts):
            module.pack()
    ids = torch.randint(0, 490, (tokens,), device="cuda")
    positions = torch.arange(tokens // requests, dtype=torch.int32, device="cuda").repeat(requests)
    cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * (tokens // requests)
    for _ in range(2):  # the first call compiles
        before = torch.cuda.memory_allocated()
        state = V41State.allocate(cfg, requests, 1024, device="cuda")
        held = torch.cuda.memory_allocated()
        assert held - before <= requests * plan.request_bytes + requests * 16 * plan.block_bytes + 64 * 512
        torch.cuda.reset_peak_memory_stats()
        model(ids, positions, state, cu_seqlens=cu, max_len=tokens, rows=cu[1:].long() - 1)
        used = torch.cuda.max_memory_allocated() - held
        del state
    assert used <= 1.1 * plan.prefill


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"device_bytes": 0}, "device_bytes: an integer of 1 or more, got 0"),
        ({"device_bytes": 1.5e9}, "device_bytes: an integer"),
        ({"ep": 0}, "ep: an integer of 1 or more"),
        ({"ep": 3}, "8 experts and copies that 3 ranks share evenly"),
        ({"redundant": 1}, "redundant: 0 to 0 copies for 1 ranks, no expert twice on one, got 1"),
        ({"redundant": 1, "ep": 2}, "9 experts and copies that 2 ranks share evenly"),
        ({"engram": "tape"}, "engram: one of device, host, disk, got tape"),
        ({"engram_ranks": 7}, "engram_ranks: one of [1, 2, 3, 4, 8], got 7"),
        ({"block": 3}, "block: an even number"),
        ({"max_context": 10**9}, "max_context: up to 4096"),
        ({"step_tokens": 0}, "step_tokens: an integer of 1 or more"),
        ({"reserve": -1}, "reserve: an integer of 0 or more"),
        ({"cfg": None}, "cfg: V41FlashConfig"),
    ],
)
def test_bad_input(arguments: dict[str, Any], sentence: str) -> None:
    given: Any = {"cfg": V41FlashConfig.tiny(), "device_bytes": GIB, "max_requests": 2, **arguments}
    with pytest.raises(ValueError) as error:
        plan_memory(**given)
    assert str(error.value).startswith("plan_memory: expected ") and sentence in str(error.value)


def test_questions_that_cannot_be_answered(flash: MemoryPlan) -> None:
    with pytest.raises(ValueError, match="context: an integer of 1 to 1048576, got 0"):
        flash.requests(0)
    with pytest.raises(ValueError, match="requests: an integer of 1 to 64, got 0"):
        flash.tokens(0)


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(V41FlashConfig.tiny().to_hf()))
    small = ["plan", "--config", str(config), "--requests", "4", "--step", "32", "--context", "128"]
    assert main([*small, "--device", "H200"]) == 0
    assert "routed experts" in capsys.readouterr().out
    assert main([*small, "--device-gib", "1", "--json", "--ep", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "device"
    with pytest.raises(SystemExit, match="8 experts and copies that 3 ranks"):
        main([*small, "--ep", "3"])
    for sentence, wrong in {
        "--device-gib above 0, got nan": ["--device-gib", "nan"],
        "--device-gib above 0, got 0.0": ["--device-gib", "0"],
        "--host-gib of at least 0, got nan": ["--host-gib", "nan"],
        "--context of 1 to .* tokens, got": ["--context", "4096", "999999999"],
        "expected a V4.1 config in .*absent": ["--config", "absent"],
    }.items():
        with pytest.raises(SystemExit, match=sentence):
            main([*small, *wrong])
