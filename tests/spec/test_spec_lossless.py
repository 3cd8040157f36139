"""Losslessness by exact enumeration: vocabulary 3, block 3, two requests, every draft and every outcome.

The emitted law is assembled from the very functions that the sampler uses, under the real split and budgets,
and compared with the target's law. Policies that may not be used are in the same table, as controls that must
be caught.
"""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from dsv41_reference.verify import accept_log_probability, block_accept_probability, residual_law

from dsv41.spec import (
    StepCost,
    solve_budget,
    solve_budget_early_stop,
    solve_budget_lossless,
    split_budget,
    survival,
)

VOCAB, BLOCK = 3, 3
DRAFTS = list(itertools.product(range(VOCAB), repeat=BLOCK))
PREFIXES = [p for n in range(BLOCK + 1) for p in itertools.product(range(VOCAB), repeat=n)]


class Request:
    """Random laws of one request for every prefix, and confidences that see only the tokens before them."""

    def __init__(self, rng, *, saturated=False, one_hot=False):
        self.p = {x: rng.dirichlet(np.full(VOCAB, 0.7)) for x in PREFIXES}
        self.q = {x: rng.dirichlet(np.full(VOCAB, 0.7)) for x in PREFIXES}
        if one_hot:
            self.q = {x: np.eye(VOCAB)[law.argmax()] for x, law in self.q.items()}
        values = [0.3, 1.0] if saturated else [0.05, 0.4, 0.7, 0.95, 1.0]
        self.c = {x: float(rng.choice(values)) for x in PREFIXES}
        self.target = np.array([self.chance(self.p, x) for x in DRAFTS])
        self.proposal = np.array([self.chance(self.q, x) for x in DRAFTS])
        self.emitted = functools.cache(self._emitted)

    @staticmethod
    def chance(law, x):
        return math.prod(law[x[:k]][x[k]] for k in range(BLOCK))

    def confidences(self, x):
        return [self.c[x[:k]] for k in range(BLOCK)]

    def after(self, prefix, first=None):
        """Law over texts that start with ``prefix``, the next token drawn from ``first``, the rest from p."""
        law = np.zeros(len(DRAFTS))
        for i, y in enumerate(DRAFTS):
            if y[: len(prefix)] == prefix:
                rest = [self.p[y[:k]][y[k]] for k in range(len(prefix), BLOCK)]
                if first is not None and rest:
                    rest[0] = first[y[len(prefix)]]
                law[i] = math.prod(rest)
        return law

    def _emitted(self, x, length, rule):
        """Law over texts, given the drafts and how many of them are verified."""
        log_p, log_q = (
            [torch.from_numpy(law[x[:k]]).log() for k in range(BLOCK)] for law in (self.p, self.q)
        )
        ratio = [float(log_p[k][x[k]] - log_q[k][x[k]]) for k in range(BLOCK)]
        if rule == "chain":
            law, reached = np.zeros(len(DRAFTS)), 1.0
            for k in range(length):
                chance = float(accept_log_probability(log_p[k][x[k]], log_q[k][x[k]]).exp())
                if chance < 1:
                    law += reached * (1 - chance) * self.after(x[:k], self.residual(0.0, log_p[k], log_q[k]))
                reached *= chance
            return law + reached * self.after(x[:length])
        rho = [0.0]
        for k in range(length):
            rho.append(min(0.0, rho[-1] + ratio[k]))
        chance = [1.0]
        for k in range(1, length + 1):
            log_rho = torch.tensor(rho[k], dtype=torch.float64)
            if k == length:
                chance.append(float(log_rho.exp()))
            else:
                mass = residual_law(log_rho + log_p[k], log_q[k])[1]
                chance.append(float(block_accept_probability(log_rho, mass)))
        law, rejected = np.zeros(len(DRAFTS)), 1.0
        for k in range(length, -1, -1):  # the longest prefix whose own test passes
            here = rejected * chance[k]
            if here > 0:
                first = None if k == length else self.residual(rho[k], log_p[k], log_q[k])
                law += here * self.after(x[:k], first)
            rejected *= 1 - chance[k]
        return law

    @staticmethod
    def residual(log_rho, log_p, log_q):
        log_r, mass = residual_law(log_rho + log_p, log_q)
        return (log_r - mass).exp().numpy()


def random_cost(rng):
    sizes = np.sort(rng.choice(np.arange(2, 2 + 2 * BLOCK), size=4, replace=False))
    sizes[-1] = 2 + 2 * BLOCK
    return StepCost(sizes, 1 + np.cumsum(rng.choice([0.05, 0.5, 1.0], size=4)))


def deeper_first(c, budget):
    """The split with its tie order reversed inside a row, counting winners per row: forbidden."""
    a = survival(c)[0]
    order = sorted((-a[i, j], -j, i) for i in range(2) for j in range(BLOCK))
    lengths = np.zeros(2, int)
    for *_, i in order[:budget]:
        lengths[i] += 1
    return lengths


# Each takes (confidences [2, 3], cost, rng-drawn constants) and gives the lengths.
ALLOWED = {
    "fixed K": lambda c, cost, k: split_budget(c, k, rotation=k),
    "fixed K, floors, caps, weights": lambda c, cost, k: split_budget(
        c, k, lo=[1, 0], hi=[3, 2], weights=[1, 2]
    ),
    "pinned": lambda c, cost, k: split_budget(c, k, lo=[3, 0], hi=[3, 3]),
    "early stop": lambda c, cost, k: split_budget(
        c, solve_budget_early_stop(survival(c)[0], cost, base_tokens=2)
    ),
    "first confidences": lambda c, cost, k: split_budget(
        c, solve_budget_lossless(cost, base_tokens=2, first=c[:, 0], prior=np.array([0.9, 0.5]))
    ),
    "stale block": lambda c, cost, k: split_budget(
        c,
        solve_budget_lossless(
            cost, base_tokens=2, stale=survival(np.array([[0.9, 0.2 * (k % 5), 0.7]] * 2))[0]
        ),
    ),
    "threshold on c": lambda c, cost, k: np.cumprod(c >= 0.5, axis=1).sum(1),
    "threshold on a": lambda c, cost, k: (survival(c)[0] > 0.1 * k).sum(1),
}
FORBIDDEN = {
    "search over current confidences": lambda c, cost, k: split_budget(
        c, solve_budget(survival(c)[0], cost, base_tokens=2)
    ),
    "deeper-first ties": lambda c, cost, k: deeper_first(c, k),
}


def joint_law(requests, policy, cost, k, rule, *, stop=None, same_noise=False, argmax=False):
    """Law of both requests' texts together, [27, 27]."""
    cached = {}

    def lengths(x0, x1):
        c = np.array([requests[0].confidences(x0), requests[1].confidences(x1)])
        if c.tobytes() not in cached:
            cached[c.tobytes()] = [int(n) for n in policy(c, cost, k)]
        cut = list(cached[c.tobytes()])
        if (
            stop is not None
        ):  # nothing is verified behind a stop token; that may depend on the stop token itself
            cut = [min(n, x.index(stop) + 1) if stop in x else n for n, x in zip(cut, (x0, x1), strict=True)]
        return cut

    law = np.zeros((len(DRAFTS),) * 2)
    pairs = [(x, x) for x in DRAFTS] if same_noise else itertools.product(DRAFTS, DRAFTS)
    if argmax:
        best = []
        for request in requests:
            x = ()
            for _ in range(BLOCK):
                x += (int(request.q[x].argmax()),)
            best.append(x)
        pairs = [tuple(best)]
    for x0, x1 in pairs:
        weight = 1.0 if argmax else requests[0].proposal[DRAFTS.index(x0)]
        if not (argmax or same_noise):
            weight *= requests[1].proposal[DRAFTS.index(x1)]
        if weight > 0:
            n0, n1 = lengths(x0, x1)
            law += weight * np.outer(requests[0].emitted(x0, n0, rule), requests[1].emitted(x1, n1, rule))
    return law


def total_variation(requests, law):
    return 0.5 * np.abs(law - np.outer(requests[0].target, requests[1].target)).sum()


def instances(seed, count, **options):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield (
            (Request(rng, **options), Request(rng, **options)),
            random_cost(rng),
            int(rng.integers(1, 2 * BLOCK)),
        )


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_allowed_policies_are_exact_and_forbidden_ones_are_caught(rule):
    worst = dict.fromkeys([*ALLOWED, "stop tokens", "one-hot drafts, any policy"], 0.0)
    caught = dict.fromkeys([*FORBIDDEN, "same noise in two requests", "argmax drafts tested as sampled"], 0.0)
    for requests, cost, k in itertools.chain(instances(1, 3), instances(2, 4, saturated=True)):

        def distance(policy, requests=requests, cost=cost, k=k, **options):
            return total_variation(requests, joint_law(requests, policy, cost, k, rule, **options))

        for name, policy in ALLOWED.items():
            worst[name] = max(worst[name], distance(policy))
        worst["stop tokens"] = max(worst["stop tokens"], distance(ALLOWED["fixed K"], stop=1))
        for name, policy in FORBIDDEN.items():
            for other in {k} if caught[name] > 0.01 else range(1, 2 * BLOCK):
                caught[name] = max(caught[name], distance(policy, k=other))
        name = "argmax drafts tested as sampled"
        caught[name] = max(caught[name], distance(ALLOWED["fixed K"], argmax=True))
        # The same laws and draft noise in request 1, whose second confidence then tells what request 0
        # drafted.
        twin = copy.copy(requests[0])
        twin.c = {x: 1.0 if not x else 0.05 + 0.95 * (x[0] == k % VOCAB) for x in PREFIXES}
        pair = (requests[0], twin)
        law = joint_law(pair, ALLOWED["fixed K"], cost, 2, rule, same_noise=True)
        name = "same noise in two requests"
        # The marginal of request 0 is already wrong; that the two texts are correlated is not even counted.
        caught[name] = max(caught[name], 0.5 * np.abs(law.sum(1) - pair[0].target).sum())
    for requests, cost, k in instances(3, 2, one_hot=True):
        for policy in FORBIDDEN.values():
            distance_now = total_variation(requests, joint_law(requests, policy, cost, k, rule))
            name = "one-hot drafts, any policy"
            worst[name] = max(worst[name], distance_now)
    for name, value in worst.items():
        print(f"{rule:<6} allowed    {value:9.2e}  {name}")
    for name, value in caught.items():
        print(f"{rule:<6} forbidden  {value:9.2e}  {name}")
    assert max(worst.values()) < 1e-12, worst
    assert min(caught.values()) > 0.01, caught


def test_counter_example_of_the_paper():
    """Searching over the current drafts turns (0.7, 0.3) into (0.85, 0.15); early stop does not."""
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    cost = StepCost([1, 2, 3], [1.0, 1 / 0.5, 1 / 0.45])
    laws = {}
    for name, solve in (("search", solve_budget), ("early stop", solve_budget_early_stop)):
        law = np.zeros(2)
        for x, c2 in ((0, 0.9), (1, 0.0)):
            length = solve(survival(np.array([[0.8, c2]]))[0], cost, base_tokens=1)
            kept = min(1.0, p[x] / q[x]) if length else 0.0
            rest = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum() if length else p
            law += 0.5 * (kept * np.eye(2)[x] + (1 - kept) * rest)
        laws[name] = law
    assert laws["search"] == pytest.approx([0.85, 0.15])
    assert laws["early stop"] == pytest.approx([0.7, 0.3])
