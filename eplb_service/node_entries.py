"""Which residencies are new, how far their nearest source is, and which rank of a node an expert enters by.

An expert that several ranks of a node need, and that no rank of the node holds, crosses to the node once and is passed on there
(one expert to N places was seen to cost N sends, vllm-ascend#2820, #2952). Which of the ranks takes it in is decided here, for
the copies that are carried out and for the bytes that moves are priced by alike: by the NIC that the layer loads least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.topology import Topology

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What each rank gets in one layer that it did not hold. All of shape (R, E).

    moved: it holds the expert after, and did not before. near: a rank of its node that serves holds it. far: only ranks of
    other nodes do. crossing: those of `far` that come from another node; the rest of them is passed on within the node.
    """

    moved: BoolArray
    near: BoolArray
    far: BoolArray
    crossing: BoolArray

    @property
    def without_source(self) -> BoolArray:
        """Residencies of experts that no serving rank holds."""
        return self.moved & ~self.near & ~self.far

    @property
    def passed_on(self) -> BoolArray:
        """Residencies that another rank of the node passes on."""
        return self.far & ~self.crossing


class NodeEntries:
    """Arrivals of the layers of one table, told in table order: what earlier layers brought over each NIC counts when NICs tie.

    fan_out: an expert crosses to a node once; else once to each of its ranks. into_nics: bytes that crossed so far, by
    `Topology.nic_indices`.

    >>> entries = NodeEntries(Topology.regular(num_ranks=4, num_nodes=2), fan_out=True)
    >>> before, after = np.array([[True], [False], [False], [False]]), np.ones((4, 1), np.bool_)
    >>> arrivals = entries.arrivals(before, after, expert_bytes=10)
    >>> arrivals.near[:, 0].tolist(), arrivals.crossing[:, 0].tolist(), arrivals.passed_on[:, 0].tolist()
    ([False, True, False, False], [False, False, True, False], [False, False, False, True])
    """

    def __init__(self, topology: Topology, *, fan_out: bool) -> None:
        self._alive = np.array(topology.alive)
        self._node_of = np.array(topology.node_indices)
        self._nic_of = np.array(topology.nic_indices)
        self._ranks_of = (np.arange(topology.num_nodes)[:, None] == self._node_of).astype(np.float32)  # (N, R), 1 = its rank
        self._fan_out = fan_out
        self.into_nics: Int64Array = np.zeros(topology.num_nics, np.int64)

    def arrivals(self, before: BoolArray, after: BoolArray, *, expert_bytes: int) -> Arrivals:
        """Of the next layer. before, after: whether a rank holds an expert, shape (R, E) (`moves.residencies`)."""
        held = before & self._alive[:, None]
        moved = after & ~before
        near = moved & (self._count_on_nodes(held) > 0)[self._node_of]
        far = moved & ~near & held.any(axis=0)
        crossing = self._entering(far) if self._fan_out else far
        np.add.at(self.into_nics, self._nic_of, crossing.sum(axis=1) * expert_bytes)
        return Arrivals(moved, near, far, crossing)

    def _count_on_nodes(self, marked: BoolArray) -> npt.NDArray[np.float32]:
        """Marked ranks of each node. Marked: shape (R, E). Returns shape (N, E); whole numbers."""
        counts: npt.NDArray[np.float32] = self._ranks_of @ marked.astype(np.float32)
        return counts

    def _entering(self, far: BoolArray) -> BoolArray:
        """One rank for each expert and node that needs it: by the NIC with the least of this layer, then of all, then first."""
        needing = self._count_on_nodes(far)
        entering: BoolArray = far & (needing == 1)[self._node_of]
        into_nics = np.zeros(self.into_nics.size, np.int64)
        np.add.at(into_nics, self._nic_of, entering.sum(axis=1))
        for expert, node in np.argwhere(needing.T > 1).tolist():
            ranks = np.flatnonzero(far[:, expert] & (self._node_of == node)).tolist()
            chosen = min(ranks, key=lambda rank: (into_nics[self._nic_of[rank]], self.into_nics[self._nic_of[rank]], rank))
            into_nics[self._nic_of[chosen]] += 1
            entering[chosen, expert] = True
        return entering
