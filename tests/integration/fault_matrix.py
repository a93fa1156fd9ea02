"""What a fleet must do when a part of it fails in some way in some phase: a table, and how one line of it is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tests.integration.fault_fleet import Fault, FaultFleet, Part, Phase
from tests.integration.fault_lines import brought_to, check_nothing_left_behind, how_it_ended, told
from tests.integration.fault_points import Hold
from tests.integration.whole_fleet import HELD_POSITION

TOKENS = 60
"""Served while a fault lasts: about ten steps of four ranks, two votes."""


class Serving(StrEnum):
    """What requests see of the fault."""

    GOES_ON = "goes on"
    WAITS = "waits, then goes on"
    RESTARTS = "ends with a reason on every rank, and the fleet starts again"
    WAITS_OR_RESTARTS = "waits and goes on, or ends with a reason on every rank"


class Chunk(StrEnum):
    """What becomes of the chunk under way before the fault ends."""

    NONE = "there is none"
    RESTS = "flips nowhere"
    FLIPS = "flips everywhere"
    EITHER = "flips on all ranks or on none"


@dataclass(frozen=True, slots=True)
class Cell:
    """One line. lasting: beyond the deadlines of those who wait for the part. ends: states in which its generation may end."""

    part: Part
    fault: Fault
    phase: Phase
    serving: Serving
    chunk: Chunk
    ends: frozenset[str]
    lasting: bool = False

    def __str__(self) -> str:
        lasting = "-past-deadlines" if self.lasting else ""
        return f"{self.part}-{self.fault}{lasting}-{self.phase}"

    def told(self) -> str:
        """The line, for people."""
        ends = " or ".join(sorted(self.ends)) or "-"
        return f"{self!s}: serving {self.serving}; the chunk {self.chunk}; its generation ends {ends}"


FINISHED = frozenset({"active", "superseded"})
OVER = FINISHED | {"stopped"}


def table() -> Iterator[Cell]:
    """Every part, fault and phase."""
    for part in (Part.PLANNER, Part.STORE, Part.AGENT):
        for fault in Fault:
            for phase in Phase:
                yield service_cell(part, fault, phase)
    for phase in Phase:
        chunk = Chunk.NONE if phase is Phase.IDLE else Chunk.EITHER
        none: frozenset[str] = frozenset() if phase is Phase.IDLE else OVER
        finished = none & FINISHED
        yield Cell(Part.RANK, Fault.KILL, phase, Serving.RESTARTS, chunk, none)
        yield Cell(Part.RANK, Fault.STOP, phase, Serving.WAITS, chunk, finished)
        yield Cell(Part.RANK, Fault.CUT, phase, Serving.WAITS, chunk, finished)
        yield Cell(Part.RANK, Fault.STOP, phase, Serving.WAITS_OR_RESTARTS, chunk, none, lasting=True)
        yield Cell(Part.RANK, Fault.CUT, phase, Serving.WAITS_OR_RESTARTS, chunk, none, lasting=True)


def service_cell(part: Part, fault: Fault, phase: Phase) -> Cell:
    """A part without which the engine serves on. Before the vote nothing flips; from the vote on nothing can hold it up."""
    if phase is Phase.IDLE:
        return Cell(part, fault, phase, Serving.GOES_ON, Chunk.NONE, frozenset())
    chunk = Chunk.RESTS if phase in (Phase.STAGING, Phase.ARMED) else Chunk.FLIPS
    # The store may be away and the planner goes on; whoever else is away for long makes the chunk late.
    ends = FINISHED if part is Part.STORE else OVER
    return Cell(part, fault, phase, Serving.GOES_ON, chunk, ends)


# ── how a line is tried ──────────────────────────────────────────────────────────────────────────────────────────────────


def try_cell(fleet: FaultFleet, cell: Cell) -> str:
    """Run one line; returns how its generation ended, empty when there was none. Raises AssertionError that tells the line."""
    with told(cell.told()):
        return _try(fleet, cell)


def _try(fleet: FaultFleet, cell: Cell) -> str:
    fleet.until_ready()
    with brought_to(fleet, cell.phase) as (number, hold):
        end = fleet.strike(cell.part, cell.fault)
        if cell.part is Part.RANK:
            _under_a_fault_of_a_rank(fleet, cell, hold)
        else:
            _under_a_fault_of_the_service(fleet, cell, hold, number)
        end()
    if cell.part is Part.RANK:
        _after_a_fault_of_a_rank(fleet, cell)
    ended, why = how_it_ended(fleet, number)
    assert not number or ended in cell.ends, f"generation {number} ended {ended}: {why}"
    fleet.until_ready()
    fleet.settle()
    fleet.prove_life_once()
    check_nothing_left_behind(fleet)
    return ended


def _under_a_fault_of_the_service(fleet: FaultFleet, cell: Cell, hold: Hold | None, number: int) -> None:
    if hold is not None and cell.phase in (Phase.VOTING, Phase.FLIPPING):
        hold.open()  # it is the model's thread that stands there: nothing is served before
    fleet.serve_tokens(TOKENS)
    if cell.chunk is Chunk.RESTS:
        assert not is_routed_by(fleet, number), f"a layer flipped to generation {number}"
    elif cell.chunk is Chunk.FLIPS:
        fleet.until(lambda: is_routed_by(fleet, number), f"generation {number} to be routed by")
    if hold is not None:
        hold.open()
        fleet.serve_tokens(TOKENS)


def _under_a_fault_of_a_rank(fleet: FaultFleet, cell: Cell, hold: Hold | None) -> None:
    """Nobody is served meanwhile: steps are taken together."""
    if hold is not None:
        hold.open()
    if cell.serving is Serving.RESTARTS:
        fleet.until(lambda: len(fleet.ends_of_ranks()) == fleet.num_ranks, "every rank to end")
        ends = fleet.ends_of_ranks()
        silent = [position for position in ends if position != HELD_POSITION and not fleet.ranks.reason(position)]
        assert not silent, f"ranks at {silent} left no reason: {ends}"
    elif cell.lasting:
        fleet.until(fleet.someone_gave_up, "ranks to give up votes or themselves")
    else:
        fleet.last(1.0)


def _after_a_fault_of_a_rank(fleet: FaultFleet, cell: Cell) -> None:
    if cell.serving is not Serving.WAITS_OR_RESTARTS:
        return
    fleet.until_served_or_ended(TOKENS)
    ends = fleet.ends_of_ranks()
    if ends:
        fleet.until(lambda: len(fleet.ends_of_ranks()) == fleet.num_ranks, f"every rank to end, as others did: {ends}")
        assert all(fleet.ranks.reason(position) for position in range(fleet.num_ranks)), fleet.ends_of_ranks()
        fleet.restart_ranks()
    elif fleet.votes_are_off():
        fleet.restart_ranks()


def is_routed_by(fleet: FaultFleet, number: int) -> bool:
    """Whether a layer is routed by a generation, as the first rank has it."""
    return any(layer.generation == number for layer in fleet.serving.inspect()[0].layers)
