"""Where ranks are: ids, nodes, the NICs that they share, capacities, and who is dead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId, ids_text


class LinkKind(Enum):
    """How far apart two ranks are; the price of a copy or a token hop grows with it."""

    SAME_RANK = "same_rank"
    SAME_NODE = "same_node"
    CROSS_NODE = "cross_node"


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of an expert-parallel group, in column order of its placements.

    rank_ids: stable ids, unique, any order (not always 0..R-1).
    nodes: node name of each rank, same length; from registration, never from a constant.
    capacity: relative speed of each rank, > 0; None = all equal.
    dead: ids of ranks that serve nothing now; their slots are -1 in every placement.
    base_load: work of each rank that no placement moves (attention, shared experts), in mean rank loads of a layer: 0.1 = as
    busy as a tenth of the tokens that a rank serves on average; None = none.
    nics: NIC, or rail, that each rank reaches other nodes by. Names are per node: ranks share a NIC when node and name are
    equal. None = every rank has one of its own.

    >>> Topology.regular(num_ranks=4, num_nodes=2).node_of(2)
    'node1'
    """

    rank_ids: tuple[RankId, ...]
    nodes: tuple[str, ...]
    capacity: tuple[float, ...] | None = None
    dead: frozenset[RankId] = frozenset()
    base_load: tuple[float, ...] | None = None
    nics: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.rank_ids:
            raise InvalidInputError("a topology needs at least one rank; got none")
        if len(set(self.rank_ids)) != len(self.rank_ids):
            raise InvalidInputError(f"rank ids must be unique; got {list(self.rank_ids)}")
        if len(self.nodes) != len(self.rank_ids):
            raise InvalidInputError(f"{len(self.rank_ids)} ranks but {len(self.nodes)} node names; give one node for each rank")
        for name, values in (("capacities", self.capacity), ("base loads", self.base_load), ("NICs", self.nics)):
            if values is not None and len(values) != len(self.rank_ids):
                raise InvalidInputError(f"{len(self.rank_ids)} ranks but {len(values)} {name}; give one for each rank")
        if self.capacity is not None and not all(0 < value < float("inf") for value in self.capacity):
            raise InvalidInputError(
                f"capacities must be finite and > 0; got {list(self.capacity)}; declare a rank that serves nothing dead"
            )
        if self.base_load is not None and not all(0 <= value < float("inf") for value in self.base_load):
            raise InvalidInputError(f"base loads must be finite and >= 0; got {list(self.base_load)}")
        if self.nics is not None and "" in self.nics:
            without = self.rank_ids[self.nics.index("")]
            raise InvalidInputError(f"the NIC of rank {without} has no name; name the NIC of each rank, or of none")
        unknown = self.dead - set(self.rank_ids)
        if unknown:
            raise InvalidInputError(f"dead ranks {sorted(unknown)} are not among the ranks {ids_text(self.rank_ids)}")

    @classmethod
    def regular(cls, *, num_ranks: int, num_nodes: int = 1) -> Topology:
        """Ranks 0..R-1, spread over nodes in blocks as even as possible (the first nodes get the rest).

        Raises InvalidInputError when num_nodes > num_ranks or either is < 1.
        """
        if num_ranks < 1 or num_nodes < 1:
            raise InvalidInputError(f"ranks and nodes must be at least 1; got ranks={num_ranks}, nodes={num_nodes}")
        if num_nodes > num_ranks:
            raise InvalidInputError(
                f"{num_nodes} nodes for {num_ranks} ranks: a node without a rank; use --nodes {num_ranks} or fewer"
            )
        size, rest = divmod(num_ranks, num_nodes)
        nodes = [f"node{node}" for node in range(num_nodes) for _ in range(size + (node < rest))]
        return cls(tuple(RankId(rank) for rank in range(num_ranks)), tuple(nodes))

    @property
    def num_ranks(self) -> int:
        """R, dead ranks included."""
        return len(self.rank_ids)

    @property
    def node_names(self) -> tuple[str, ...]:
        """Distinct nodes in order of first appearance."""
        return tuple(dict.fromkeys(self.nodes))

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.node_names)

    @property
    def node_indices(self) -> tuple[int, ...]:
        """Node index (into `node_names`) of each rank position. Length R."""
        index = {name: position for position, name in enumerate(self.node_names)}
        return tuple(index[name] for name in self.nodes)

    @property
    def nic_indices(self) -> tuple[int, ...]:
        """Index of each rank position's NIC, in order of first appearance; 0..R-1 where every rank has its own. Length R.

        >>> Topology.regular(num_ranks=4, num_nodes=2).with_nics(1).nic_indices
        (0, 0, 1, 1)
        """
        if self.nics is None:
            return tuple(range(self.num_ranks))
        named = list(zip(self.nodes, self.nics, strict=True))
        index = {nic: position for position, nic in enumerate(dict.fromkeys(named))}
        return tuple(index[nic] for nic in named)

    @property
    def num_nics(self) -> int:
        """NICs of all nodes together."""
        return max(self.nic_indices) + 1

    def with_nics(self, num_nics: int) -> Topology:
        """The same with so many NICs on every node, each of a block of its ranks, as even as possible (the first get the rest).

        Raises InvalidInputError when num_nics is < 1 or a node has fewer ranks.
        """
        if num_nics < 1:
            raise InvalidInputError(f"NICs of a node must be at least 1; got {num_nics}")
        names = [""] * self.num_ranks
        for node in self.node_names:
            members = [position for position, name in enumerate(self.nodes) if name == node]
            if num_nics > len(members):
                raise InvalidInputError(
                    f"{num_nics} NICs for the {len(members)} ranks of node {node}: a NIC without a rank; use {len(members)} or"
                    " fewer, or name the NIC of each rank"
                )
            size, rest = divmod(len(members), num_nics)
            blocks = [nic for nic in range(num_nics) for _ in range(size + (nic < rest))]
            for position, nic in zip(members, blocks, strict=True):
                names[position] = f"nic{nic}"
        return replace(self, nics=tuple(names))

    def position_of(self, rank_id: int) -> int:
        """Column position of a rank id. Raises InvalidInputError when it is not of this group."""
        try:
            return self.rank_ids.index(RankId(rank_id))
        except ValueError:
            raise InvalidInputError(f"rank {rank_id} is not among the ranks {ids_text(self.rank_ids)}") from None

    def node_of(self, rank_id: int) -> str:
        """Node name of a rank id."""
        return self.nodes[self.position_of(rank_id)]

    def link(self, source_position: int, target_position: int) -> LinkKind:
        """Kind of the link between two rank positions."""
        if source_position == target_position:
            return LinkKind.SAME_RANK
        same = self.nodes[source_position] == self.nodes[target_position]
        return LinkKind.SAME_NODE if same else LinkKind.CROSS_NODE

    @property
    def alive(self) -> tuple[bool, ...]:
        """Whether each rank serves. Length R."""
        return tuple(rank not in self.dead for rank in self.rank_ids)

    def alive_positions(self) -> Sequence[int]:
        """Positions of ranks that are not dead, ascending."""
        return [position for position, alive in enumerate(self.alive) if alive]
