"""What an agent process itself tells the planner about its ranks, beside what the ranks say (`control.FromRank`)."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.control import Address, FromRank
from eplb_service.ids import DeploymentId


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """This process speaks for these ranks, registered before; the planner says Hello to each of them.

    The first message of a control stream. On the same stream it adds ranks that registered later, and a rank listed again
    is said Hello to again (its hook was linked anew, facts may have been lost).
    """

    deployment: DeploymentId
    ranks: tuple[Address, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The rank's hook is no longer linked to this process: the engine ended, or their link broke."""

    sender: Address
    reason: str


FromAgent = Attach | Gone | FromRank
