"""What a rank does when a step, or the forming of a group, fails. Pure."""

from __future__ import annotations

from enum import Enum

from eplb_service.errors import EnvironmentFault, EplbError


class Reaction(Enum):
    """What to do."""

    STAND = "stand"  # close all connections, say so, and wait for the launcher to name another group
    LEAVE = "leave"  # end this process: the others lose a rank, no more


def reaction_to(error: Exception, *, survives: bool) -> Reaction:
    """What a rank does about an error.

    error: an EplbError, or the RuntimeError by which torch says that a collective failed. One that the model raised looks the
        same: the launcher ends a fleet whose groups fail again and again without one step.
    survives: `FleetConfig.survives`.

    Lost peers, deadlines and commits whose outcome is unknown are of the surroundings: another group ends them. A broken
    invariant, or ranks that disagree about the model, would be the same in any group.
    """
    if not survives:
        return Reaction.LEAVE
    if isinstance(error, EplbError) and not isinstance(error, EnvironmentFault):
        return Reaction.LEAVE
    return Reaction.STAND
