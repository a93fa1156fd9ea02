"""One rank of the simulated engine, and where its messages go."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from agent.hook import chunk_events as hook
from agent.hook.chunk import ChunkMachine
from eplb_service.control import Address, FromRank, LiveLayer
from eplb_service.generation import live_digest
from eplb_service.ids import LayerRef
from tests.sim.model import LAYERS, Shape
from tests.sim.world import Clock

if TYPE_CHECKING:
    from tests.sim.staging import StagingWorker


class Wires(Protocol):
    """Where ranks' messages go."""

    def say(self, rank: Rank, message: FromRank) -> None:
        """A rank's hook sends this."""

    def formed(self) -> None:
        """A new life of the engine began."""

    def formed_again(self, rank: Rank) -> None:
        """A rank goes on in another group: it registers anew."""

    def gone(self, address: Address) -> None:
        """A rank's process ended."""


@dataclass(slots=True, eq=False)
class Rank:
    """One rank: its machine, and what its device really holds and routes by.

    cast: boundary and id of a vote whose outcome it does not know. is_cut_off: that vote will not be told to it any more.
    is_new: it joins, and was in no group yet. is_forming: it takes part in a forming that did not end here yet.
    is_standing: it runs no step until the group formed again. shape: of the group that it is in. formings: how many led there.
    ready: its step is through and it may pass the next boundary. backlog: what arrived while its process was stopped.
    """

    shape: Shape
    position: int
    address: Address
    machine: ChunkMachine
    clock: Clock
    slots: dict[LayerRef, list[int]]
    routed: dict[LayerRef, LiveLayer]
    boundary: int = -1
    is_ready: bool = True
    is_dead: bool = False
    is_stopped: bool = False
    is_leaving: bool = False
    is_voter_off: bool = False
    is_cut_off: bool = False
    is_forming: bool = False
    is_new: bool = False
    is_standing: bool = False
    formings: int = 0
    weights_version: int = 1
    cast: tuple[int, int] | None = None
    backlog: list[hook.Event] = field(default_factory=list)
    digest: int = 0
    worker: StagingWorker = field(init=False)

    def __post_init__(self) -> None:
        self.map_changed()

    def map_changed(self) -> None:
        """The tables were written."""
        self.digest = live_digest({layer: live.digest for layer, live in self.routed.items()})


@dataclass(frozen=True)
class Pace:
    """How an engine steps by itself. step_s: mean time of a step. None in `Engine`: a script steps it."""

    step_s: float
    chance: random.Random


def layers_of(rank: Rank) -> tuple[LiveLayer, ...]:
    """What a rank routes by, in order."""
    return tuple(rank.routed[layer] for layer in LAYERS)
