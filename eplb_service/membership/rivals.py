"""Two fleets under one deployment name: whether a registration may take the place of the ranks that are known.

A fleet that restarted must get in promptly; a second one that was started beside the first, under its name, must not push it
out, or the two would push each other out for ever. Whoever registers takes the place of a rank (its own id, in an earlier
group or life), so it is that rank's silence that decides, and where there is none, the silence of all.

- A rank that re-forms its group (same incarnation) speaks for itself.
- A rank whose agent process said that it is gone may be followed on its node at once, from another node after `silence_s`: it
  may have lost its link for a moment only.
- Any other counts as alive for `silence_s` after it was last heard, with or without a control stream: an engine serves on while
  its agent process is away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eplb_service.control import Registration

SILENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Member:
    """A rank that is known. last_s: when it was last heard, or said to be gone; monotonic."""

    registration: Registration
    last_s: float
    is_gone: bool = False


def alive_rival(newcomer: Registration, members: Iterable[Member], *, now: float, silence_s: float) -> Registration | None:
    """The rank that is alive and in whose place the newcomer cannot come; None when it may."""
    known = {member.registration.address.rank_id: member for member in members}
    before = known.get(newcomer.address.rank_id)
    if before is None:
        present = (member for member in known.values() if not member.is_gone)
        return next((member.registration for member in present if now - member.last_s < silence_s), None)
    if before.registration.address.incarnation == newcomer.address.incarnation:
        return None
    if before.is_gone and before.registration.node == newcomer.node:
        return None
    return before.registration if now - before.last_s < silence_s else None


def refusal(newcomer: Registration, rival: Registration, silence_s: float) -> str:
    """Both fleets by name, and what to do."""
    mine, theirs = newcomer.address, rival.address
    where = "on the same node" if newcomer.node == rival.node else f"on node {rival.node}"
    return (
        f"rank {mine.rank_id} of group {mine.group_id} (incarnation {mine.incarnation} on node {newcomer.node}) registers, but"
        f" rank {theirs.rank_id} of group {theirs.group_id} (incarnation {theirs.incarnation} {where}) of deployment"
        f" {newcomer.deployment} is alive: two fleets cannot share a name; give one of them another, or stop the first: once it"
        f" is silent for {silence_s:g} s the other is taken"
    )
