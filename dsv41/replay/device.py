"""A plan as torch tensors on a device. Imports torch, hence not imported by `dsv41.replay` itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from .plan import ReplayPlan
from .prefill import ReplayHooks, run_prefill


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """`ReplayPlan` for kernels; names, shapes and meaning as there, row arrays padded to P =
    `plan.padded_to`.

    Attributes:
        plan: the host plan.
        rows: [M] int64. `first_layer_rows`: int64.
        positions: [P] int64, 0 in padding.
        cu_seqlens_q: [R + 1] int32. `seq_lens`, `cached_lens`, `logits_row`: [R] int32.
        floor: [P] int32, `plan.floor_rows()`. `first_layer_floor`: [P] int32,
            `plan.floor_rows(first_layer=True)`.
        row_to_request: [P] int32, -1 in padding.
        attends: [P] bool.
        encoder_floor: [N] int32, `plan.encoder_floor_rows()`. `writes_entries`: [N] bool.
    """

    plan: ReplayPlan
    rows: torch.Tensor
    first_layer_rows: torch.Tensor
    positions: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    cached_lens: torch.Tensor
    logits_row: torch.Tensor
    floor: torch.Tensor
    first_layer_floor: torch.Tensor
    row_to_request: torch.Tensor
    attends: torch.Tensor
    encoder_floor: torch.Tensor
    writes_entries: torch.Tensor

    def run(self, hooks: ReplayHooks) -> torch.Tensor | None:
        """`run_prefill` of this plan; no host transfer. How a model that is given a plan runs its parts."""
        return run_prefill(self.plan, hooks, rows=self.rows)

    def gather(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[N, ...] on this device -> [P, ...]; no host transfer. See `ReplayPlan.gather`."""
        return self.plan.gather(*tensors, rows=self.rows)

    def scatter(
        self,
        values: torch.Tensor,
        out: torch.Tensor | None = None,
        fill: Literal["nan", "zero"] | None = "nan",
    ) -> torch.Tensor:
        """[P, ...] on this device -> [N, ...]; no host transfer. See `ReplayPlan.scatter`."""
        return self.plan.scatter(values, out, fill, rows=self.rows)


def to_device(plan: ReplayPlan, device: torch.device | str) -> DevicePlan:
    """Copy the plan's arrays to `device`; on the CPU the tensors own their memory too."""

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, device=device)

    positions = np.zeros(plan.padded_to, np.int64)
    positions[: plan.num_rows] = plan.positions
    return DevicePlan(
        plan=plan,
        rows=tensor(plan.rows),
        first_layer_rows=tensor(plan.first_layer_rows),
        positions=tensor(positions),
        cu_seqlens_q=tensor(plan.cu_seqlens_q),
        seq_lens=tensor(plan.seq_lens),
        cached_lens=tensor(plan.cached_lens),
        logits_row=tensor(plan.logits_row),
        floor=tensor(plan.floor_rows()),
        first_layer_floor=tensor(plan.floor_rows(first_layer=True)),
        row_to_request=tensor(plan.row_to_request()),
        attends=tensor(plan.attends),
        encoder_floor=tensor(plan.encoder_floor_rows()),
        writes_entries=tensor(plan.writes_entries()),
    )
