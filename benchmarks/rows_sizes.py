"""Other sizes and skews than the standard work: a policy that is tuned to one input shows here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.measuring import percent, proposal_of, share_of_slots
from benchmarks.rows_moves import layers_over
from benchmarks.standard import Float64Array, problem_of
from eplb_service.policy.base import Effort, PlanningProblem

TARGET = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A size and a kind of load. load: from (generator, layers, experts) to tokens, shape (L, E)."""

    title: str
    layers: int
    experts: int
    ranks: int
    slots: int
    load: Callable[[np.random.Generator, int, int], Float64Array]

    def problem(self) -> PlanningProblem:
        """From the linear placement, to the target."""
        load = self.load(np.random.default_rng(17), self.layers, self.experts)
        effort = Effort.NORMAL
        return problem_of(load, num_ranks=self.ranks, slots_per_rank=self.slots, max_imbalance=TARGET, effort=effort)


def log_normal(sigma: float) -> Callable[[np.random.Generator, int, int], Float64Array]:
    """Expert loads whose logarithm is normal."""
    return lambda random, layers, experts: np.exp(random.normal(0, sigma, (layers, experts))) * 1000


def power_law(random: np.random.Generator, layers: int, experts: int) -> Float64Array:
    """The r-th hottest expert has 1 / r of the hottest's load; in another order in each layer."""
    ranked = 1e5 / np.arange(1, experts + 1)
    return np.array([random.permutation(ranked) for _ in range(layers)])


def one_hot(random: np.random.Generator, layers: int, experts: int) -> Float64Array:
    """One expert has half of all tokens."""
    load = np.exp(random.normal(0, 0.5, (layers, experts))) * 1000
    load[np.arange(layers), random.integers(0, experts, layers)] = load.sum(axis=1)
    return load


def ties(random: np.random.Generator, layers: int, experts: int) -> Float64Array:
    """Only three different loads."""
    return random.choice([100.0, 200.0, 800.0], (layers, experts))


def zeros(random: np.random.Generator, layers: int, experts: int) -> Float64Array:
    """Half of the experts idle, and every fifth layer."""
    load = np.exp(random.normal(0, 1, (layers, experts))) * 1000 * (random.random((layers, experts)) < 0.5)
    load[::5] = 0
    return load


CASES = (
    Case(title="log-normal, sigma 0.2", layers=58, experts=256, ranks=32, slots=9, load=log_normal(0.2)),
    Case(title="log-normal, sigma 0.5", layers=58, experts=256, ranks=32, slots=9, load=log_normal(0.5)),
    Case(title="log-normal, sigma 2", layers=58, experts=256, ranks=32, slots=9, load=log_normal(2.0)),
    Case(title="power law", layers=58, experts=256, ranks=32, slots=9, load=power_law),
    Case(title="one expert with half of all tokens", layers=58, experts=256, ranks=32, slots=10, load=one_hot),
    Case(title="ties: three loads", layers=58, experts=256, ranks=32, slots=9, load=ties),
    Case(title="zeros: idle experts and layers", layers=58, experts=256, ranks=32, slots=9, load=zeros),
    Case(title="log-normal, sigma 1", layers=1, experts=64, ranks=8, slots=9, load=log_normal(1.0)),
    Case(title="log-normal, sigma 1", layers=24, experts=32, ranks=8, slots=5, load=log_normal(1.0)),
    Case(title="log-normal, sigma 1", layers=48, experts=128, ranks=16, slots=9, load=log_normal(1.0)),
    Case(title="log-normal, sigma 1", layers=58, experts=256, ranks=64, slots=5, load=log_normal(1.0)),
    Case(title="log-normal, sigma 1", layers=58, experts=256, ranks=144, slots=2, load=log_normal(1.0)),
    Case(title="log-normal, sigma 1", layers=58, experts=256, ranks=320, slots=1, load=log_normal(1.0)),
    Case(title="log-normal, sigma 1", layers=58, experts=256, ranks=18, slots=16, load=log_normal(1.0)),
    Case(title="log-normal, sigma 1", layers=94, experts=512, ranks=64, slots=9, load=log_normal(1.0)),
)

COLUMNS = (
    "load",
    "layers x experts",
    "ranks x slots",
    "best possible",
    "full plan",
    "to 1.02: moves",
    "share of slots",
    "layers over",
    "time",
)


def size_row(case: Case) -> tuple[str, ...]:
    """One line: what is possible, what greedy reaches from nothing, and what minmove moves to the target."""
    problem = case.problem()
    full, _ = proposal_of("greedy", problem)
    proposal, cpu_s = proposal_of("minmove", problem)
    reachable = sum(bound <= TARGET for bound in proposal.lower_bound.per_layer)
    over = layers_over(proposal, TARGET) - (case.layers - reachable)
    beyond = f" (+{case.layers - reachable} beyond reach)" if reachable < case.layers else ""
    return (
        case.title,
        f"{case.layers} x {case.experts}",
        f"{case.ranks} x {case.slots}",
        f"{proposal.lower_bound.worst:.4f}",
        f"{full.predicted.worst:.4f}",
        f"{proposal.moves.experts:,}",
        percent(share_of_slots(proposal.moves, proposal.placement)),
        f"{over}{beyond}",
        f"{cpu_s:.1f} s",
    )
