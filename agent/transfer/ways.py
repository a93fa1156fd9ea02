"""What an operator chooses: how experts may go between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.errors import InvalidInputError

SAME_NODE_WAYS = ("send", "read")
CROSS_NODE_WAYS = ("send", "nixl")


@dataclass(frozen=True, slots=True)
class Ways:
    """How experts go between ranks of a node, and between nodes; what cannot go so is sent over gloo."""

    same_node: str = "send"
    cross_node: str = "send"

    def __post_init__(self) -> None:
        for name, way, known in (
            ("same_node_copies", self.same_node, SAME_NODE_WAYS),
            ("cross_node_copies", self.cross_node, CROSS_NODE_WAYS),
        ):
            if way not in known:
                raise InvalidInputError(f"{name} is {way!r}; EPLB_{name.upper()} may be {' or '.join(known)}")
