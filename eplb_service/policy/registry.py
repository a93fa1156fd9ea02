"""Finds policies by name: entry points of the group `eplb.policies`, so that a plug-in package adds its own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from eplb_service.errors import EnvironmentFault, NotFoundError, PolicyFailedError
from eplb_service.policy.base import Policy

GROUP = "eplb.policies"


def _entries() -> Mapping[str, EntryPoint]:
    """Entry points by name, sorted; of two with one name the one whose target sorts first."""
    ordered = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value), reverse=True)
    return {entry.name: entry for entry in ordered}


def policy_names() -> tuple[str, ...]:
    """Names of all policies installed, sorted."""
    return tuple(sorted(_entries()))


def load_policy(name: str) -> Policy:
    """The policy of a name.

    Raises NotFoundError listing the names that exist, EnvironmentFault when what it needs is not installed, PolicyFailedError
    when it cannot be made or is no policy.
    """
    entry = _entries().get(name)
    if entry is None:
        known = ", ".join(policy_names()) or "none is installed"
        raise NotFoundError(f"there is no policy {name!r}; known policies: {known}")
    try:
        made = entry.load()()
    except ImportError as error:
        raise EnvironmentFault(
            f"policy {name!r} needs a package that is not installed: {error}; install eplb-service[planner]"
        ) from error
    except Exception as error:
        raise PolicyFailedError(
            f"policy {name!r} ({entry.value}) could not be made: {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(made, "plan", None)):
        raise PolicyFailedError(f"policy {name!r} ({entry.value}) has no plan method")
    policy: Policy = made
    return policy
