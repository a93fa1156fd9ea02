"""Which experts go to which ranks before packing: everything everywhere, or expert groups to nodes (hierarchical planning)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.policy import exchanges, kernels
from eplb_service.policy.base import FailureDomain, PlanningProblem
from eplb_service.policy.contradictions import has_strict_groups
from eplb_service.policy.limits import Limits
from eplb_service.policy.matching import cheapest_matching

DISTINCT = True
FORBIDDEN = 1 << 32
Part = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Rank positions and the expert ids that go to them."""


def nodes_for_groups(problem: PlanningProblem, limits: Limits) -> tuple[int, ...]:
    """Indices of the nodes that serve, when groups matter, strict or soft; () when there are none."""
    if (problem.constraints.num_groups or 1) == 1:
        return ()
    return tuple(sorted(set(np.array(problem.topology.node_indices)[limits.room > 0].tolist())))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """How a table is cut into parts: the same for every layer but for which groups a node gets.

    nodes: nodes that serve, when strict groups cut layers into parts; () when planning is global, soft groups among it.
    home_nodes: nodes that serve and that groups have their homes on, strict or soft; () without groups.
    node_of: node index of each rank, shape (R,).
    kinds: ranks with equal numbers may exchange their bins, shape (R,): same node where that matters (groups, resilience by
    node), same room, capacity and own work, no pins or bars.
    """

    limits: Limits
    num_groups: int
    num_logical: int
    nodes: tuple[int, ...]
    home_nodes: tuple[int, ...]
    node_of: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int64]

    @classmethod
    def of(cls, problem: PlanningProblem, limits: Limits) -> Layout:
        """The layout of a problem; `limits_of` has checked that experts, groups, nodes and slots divide and fit."""
        nodes = nodes_for_groups(problem, limits)
        node_of = np.array(problem.topology.node_indices, np.int64)
        resilience = problem.constraints.resilience
        by_node = bool(nodes) or (resilience is not None and resilience.domain is FailureDomain.NODE)
        part_of = node_of if by_node else np.zeros_like(node_of)
        base = problem.topology.base_load or (0.0,) * node_of.size
        named = set(limits.pins[:, 1].tolist()) | set(limits.bars[:, 1].tolist())
        alone = [position if position in named else -1 for position in range(node_of.size)]
        traits = list(zip(part_of.tolist(), limits.room.tolist(), limits.capacity.tolist(), base, alone, strict=True))
        index = {trait: position for position, trait in enumerate(sorted(set(traits)))}
        return cls(
            limits=limits,
            num_groups=problem.constraints.num_groups or 1,
            num_logical=problem.current.num_logical,
            nodes=nodes if has_strict_groups(problem) else (),
            home_nodes=nodes,
            node_of=node_of,
            kinds=np.array([index[trait] for trait in traits], np.int64),
        )

    def alternatives(self, current: npt.NDArray[np.int32], load: npt.NDArray[np.float64]) -> list[list[Part]]:
        """Ways to cut a layer into parts that are planned one by one. Current row: shape (P,); load: shape (E,).

        Groups go to nodes longest first, as many to each, and, where that is another way, improved by exchanges (which mostly
        packs better, not always). Nodes of equal make-up swap what they got so that most experts stay on their node.
        """
        serving = np.flatnonzero(self.limits.room > 0)
        if not self.nodes:
            return [[(serving, np.arange(self.num_logical))]]
        size = self.num_logical // self.num_groups
        each = self.num_groups // len(self.nodes)
        group_load = load.reshape(self.num_groups, size).sum(axis=1)
        capacity = np.array(
            [self.limits.capacity[(self.node_of == node) & (self.limits.room > 0)].sum() for node in self.nodes]
        )
        room = np.full(len(self.nodes), each, np.int64)
        bins = kernels.pack(group_load, np.ones(self.num_groups, np.int64), room, capacity, each, DISTINCT)
        ways = [bins]
        improved = bins.copy()
        if exchanges.improve(improved, group_load, room, capacity, DISTINCT, self.num_groups * len(self.nodes)):
            ways = [improved, bins]
        ranks = [serving[self.node_of[serving] == node] for node in self.nodes]
        return [
            [
                (ranks[index], (np.sort(groups)[:, None] * size + np.arange(size)).reshape(-1))
                for index, groups in enumerate(self._match_nodes(way, current))
            ]
            for way in ways
        ]

    def _match_nodes(self, bins: npt.NDArray[np.int32], current: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Order the bins of groups so that most experts are already on the node that gets them."""
        size = self.num_logical // self.num_groups
        room, capacity = self.limits.room, self.limits.capacity
        makeup = [
            tuple(sorted(zip(room[self.node_of == node].tolist(), capacity[self.node_of == node].tolist(), strict=True)))
            for node in self.nodes
        ]
        cost = np.zeros((len(self.nodes), len(self.nodes)), np.int64)
        by_rank = current.reshape(self.limits.usable.shape)
        for position, node in enumerate(self.nodes):
            here = by_rank[self.node_of == node]
            present = np.unique(here[here >= 0])
            for index in range(len(self.nodes)):
                if makeup[index] != makeup[position]:
                    cost[index, position] = FORBIDDEN
                    continue
                wanted = (bins[index][:, None] * size + np.arange(size)).reshape(-1)
                away = int((~np.isin(wanted, present)).sum())
                cost[index, position] = (len(self.nodes) + 1) * away + (index != position)
        node_of_bin = cheapest_matching(cost)
        return bins[np.argsort(node_of_bin)]


def grouped_rows(problem: PlanningProblem) -> npt.NDArray[np.bool_]:
    """Whether each layer's current row has every strict group on one node. Shape (L,); all True without strict groups."""
    table, num_groups = problem.current, problem.constraints.num_groups or 1
    grouped = np.ones(table.num_layers, np.bool_)
    if not has_strict_groups(problem) or table.num_logical % num_groups:
        return grouped
    node_of_slot = np.repeat(np.array(problem.topology.node_indices), table.slots_per_rank)
    group_of = np.where(table.physical_to_logical >= 0, table.physical_to_logical // (table.num_logical // num_groups), -1)
    for group in range(num_groups):
        nodes_used = [((group_of == group) & (node_of_slot == node)).any(axis=1) for node in range(problem.topology.num_nodes)]
        grouped &= np.sum(nodes_used, axis=0) <= 1
    return grouped
