"""A narrow model's prefill and steps with drafts, every kernel once, for compute-sanitizer on a GPU:

python -m tests.tools.sanitize_step  # compiles
TOOL="compute-sanitizer --kernel-name-exclude kns=at6native --tool"  # without PyTorch's own: minutes
$TOOL memcheck python -m tests.tools.sanitize_step
$TOOL racecheck python -m tests.tools.sanitize_step racecheck
"""

import sys
import time
from typing import Any

import torch

from dsv41 import V41FlashConfig
from dsv41.layers import V41State
from dsv41.spec import DecodeGraphs
from tests import models
from tests.tools import sanitize_attn, sanitize_index


def main() -> None:
    """Runs everything once; what it computes is tested elsewhere."""
    start, device = time.time(), "cuda" if torch.cuda.is_available() else "cpu"
    if "racecheck" in sys.argv:
        sanitize_attn.all_arrive()
        sanitize_index.meet_at_mbarriers()
    cfg = V41FlashConfig.tiny(hidden=256, inter=128)
    model: Any = models.build(cfg, drafter=True).to(device).pack()
    for layer in cfg.engram.layers:
        store = model.layers[layer].engram.store
        store.values, store.scale = (
            t.view(torch.uint8).to(device).view(t.dtype) for t in (store.values, store.scale)
        )
    state = V41State.allocate(cfg, 3, 256, drafter=True, device=device)
    inputs = torch.empty(100, model.mtp.input_width, dtype=torch.bfloat16, device=device)
    place = torch.cat([torch.arange(n) for n in (65, 34, 1)]).int().to(device)
    cu = torch.tensor([0, 65, 99, 100], dtype=torch.int32, device=device)
    tokens = torch.arange(100, device=device) * 7 % 490
    last = cu[1:].long() - 1
    logits = model(tokens, place, state, cu_seqlens=cu, max_len=65, rows=last, draft_inputs=inputs)
    model.mtp.write_context(inputs, place, state, cu_seqlens=cu)
    print(f"prefill, {time.time() - start:.0f} s", flush=True)
    graphs = DecodeGraphs(model, state, drafter=model.mtp)
    for r, length in enumerate((65, 34, 1)):
        graphs.admit(r, logits[r].argmax(), length=length, left=9, temperature=0.5 * (r % 2), seed=r)
    # Racecheck takes a minute a step; the others have the same kernels for other numbers of rows.
    for budget in (3,) if "racecheck" in sys.argv else (3, None, 0):
        graphs.step(budget).read()
        print(f"step, {time.time() - start:.0f} s", flush=True)
    print(f"done, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
