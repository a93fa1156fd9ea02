"""What a store says when it refuses: the same sentence from every implementation."""

from __future__ import annotations

from collections.abc import Mapping

from eplb_service.errors import BrokenInvariantError, ConflictError, FencedError
from eplb_service.store.base import EPOCH_MAX, Leadership, Write


def lead_held(owner: str, epoch: int, left_s: float) -> ConflictError:
    """Another planner's lease is alive."""
    return ConflictError(
        f"planner {owner!r} leads in epoch {epoch} and its lease has {left_s:.3f} s left: "
        "stop it, or try again when the lease has lapsed"
    )


def epochs_used_up(epoch: int) -> BrokenInvariantError:
    """No epoch is left to lead in."""
    return BrokenInvariantError(f"epoch {epoch} is above the highest, {EPOCH_MAX}: start a new deployment id")


def fenced_write(epoch: int, current: int, owner: str) -> FencedError:
    """A write of a leader that leads no more."""
    return FencedError(f"write in epoch {epoch} refused: {_leads(current, owner)}; lead again before writing")


def fenced_renew(leadership: Leadership, current: int, owner: str) -> FencedError:
    """A lease that cannot be extended."""
    return FencedError(
        f"lease of {leadership.owner!r} in epoch {leadership.epoch} is lost: {_leads(current, owner)}; lead again"
    )


def conflicting_versions(write: Write, found: Mapping[str, int]) -> ConflictError:
    """A document was written by someone else in between; `found` maps the names that differ to their versions."""
    differences = ", ".join(f"{name} has version {found[name]}, expected {write.expects[name]}" for name in sorted(found))
    return ConflictError(f"nothing written: {differences} (0 = absent); read again and decide anew")


def reused_write_id(write_id: str) -> ConflictError:
    """One id, two contents."""
    return ConflictError(f"write id {write_id!r} was used for another request: give each request an id of its own")


def _leads(current: int, owner: str) -> str:
    if current == 0:
        return "the store knows no leader of this deployment (epoch 0)"
    if not owner:
        return f"the leader of epoch {current} has resigned"
    return f"planner {owner!r} leads in epoch {current}"
