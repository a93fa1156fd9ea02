"""What all lines of tables of faults share: the fleet that they run on, how a rollout is brought to a phase, how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from eplb_service.cli.generations import state_text
from tests.integration.fault_fleet import POINTS, FaultFleet, Phase
from tests.integration.fault_points import Hold, held

FleetT = TypeVar("FleetT", bound=FaultFleet)


@contextmanager
def four_ranks(kind: type[FleetT]) -> Iterator[FleetT]:
    """A fleet for all lines of a module; nothing is left of it after the block."""
    options = {"reconnect_max_s": 0.2, "pulse_period_s": 0.3, "vote_timeout_s": 6.0}
    running = kind(rank_ids=(0, 1, 2, 3), in_flight=2, hook_options=options)
    with running:
        running.start_service()
        yield running
        running.stop_ranks()
    assert running.all_left() == []


@contextmanager
def told(line: str) -> Iterator[None]:
    """What fails in the block tells the line."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{line}\n{error}") from error


@contextmanager
def brought_to(fleet: FaultFleet, phase: Phase) -> Iterator[tuple[int, Hold | None]]:
    """A generation that is on its way stands in a phase: its number, and what holds it there till the block ends.

    0 and None where nothing is on its way.
    """
    if phase is Phase.IDLE:
        yield 0, None
        return
    with held(fleet.holds[POINTS[phase]]) as hold:
        number = fleet.order_another()
        fleet.until(lambda: hold.reached, f"generation {number} to come to {hold.point}")
        yield number, hold


def how_it_ended(fleet: FaultFleet, number: int) -> tuple[str, str]:
    """State of a generation at its end, and why it was stopped; both empty for number 0."""
    if not number:
        return "", ""
    view = fleet.until_over(number)
    ended = state_text(view.state)
    assert ended != "stopped" or view.stop_reason, f"generation {number} stopped without a reason"
    return ended, view.stop_reason


def check_nothing_left_behind(fleet: FaultFleet) -> None:
    """No file, process or shared memory lies about that no part of a fleet that runs needs."""
    left = fleet.left_behind()
    assert not left, f"left behind: {left}"
