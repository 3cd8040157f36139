"""The exact optimum of small instances, by mixed-integer programming (HiGHS through SciPy)."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array


def optimum(w: np.ndarray, slots: int, ranks: int, seconds: float = 20.0) -> tuple[float, float]:
    """Smallest possible largest rank load (equal split, distinct), and the dual bound that proves it.

    x[e, g, c] = 1 when expert e has c copies and one is on rank g; y[e, c] = 1 when it has c copies.
    """
    experts, size = len(w), slots // ranks
    most = min(ranks, slots - experts + 1)
    x = np.arange(experts * ranks * most).reshape(experts, ranks, most)
    y = x.size + np.arange(experts * most).reshape(experts, most)
    peak = x.size + y.size
    rows: list[tuple[np.ndarray, np.ndarray, float, float]] = []
    counts = np.arange(1, most + 1)
    for e in range(experts):
        rows.append((y[e], np.ones(most), 1, 1))
        for c in range(most):
            rows.append((np.append(x[e, :, c], y[e, c]), np.append(np.ones(ranks), -(c + 1.0)), 0, 0))
    for g in range(ranks):
        rows.append((x[:, g].ravel(), np.ones(experts * most), size, size))
        load = (w[:, None] / counts).ravel()
        rows.append((np.append(x[:, g].ravel(), peak), np.append(load, -1.0), -np.inf, 0))
    i = np.concatenate([np.full(len(cols), n) for n, (cols, *_) in enumerate(rows)])
    j = np.concatenate([cols for cols, *_ in rows])
    v = np.concatenate([values for _, values, *_ in rows])
    matrix = coo_array((v, (i, j)), shape=(len(rows), peak + 1)).tocsr()
    cost = np.zeros(peak + 1)
    cost[peak] = 1
    integral = np.ones(peak + 1)
    integral[peak] = 0
    upper = np.ones(peak + 1)
    upper[peak] = np.inf
    low: Any = np.array([r[2] for r in rows])  # SciPy's annotations know only scalars here
    high: Any = np.array([r[3] for r in rows])
    ends: Any = (np.zeros(peak + 1), upper)
    constraints, bounds = LinearConstraint(matrix, low, high), Bounds(*ends)
    result = milp(
        cost,
        constraints=constraints,
        integrality=integral,
        bounds=bounds,
        options={"time_limit": seconds, "mip_rel_gap": 1e-4},
    )
    return float(result.fun), float(result.mip_dual_bound)
