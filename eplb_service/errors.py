"""The tree of errors; one table (`rpc/status.py`) maps it to gRPC codes.

    EplbError
    ├── CallerError             the caller's fault: fix the input and try again
    │   ├── InvalidInputError       a value, file, flag or message that cannot be used
    │   ├── NotFoundError           names something that does not exist
    │   ├── ConflictError           contradicts what is there (an agent that disagrees with its peers, a reused key)
    │   └── UnsupportedError        asked for something that this peer or build cannot do
    ├── StaleError              superseded: an older epoch, incarnation, group or generation
    │   └── FencedError             a newer planner leads this deployment
    ├── EnvironmentFault        the surroundings failed: store, network, disk, memory, deadline
    │   ├── StoreUnavailableError
    │   ├── DeadlineError
    │   └── PolicyFailedError       a policy raised, ran out of time or memory, or returned nonsense
    └── BrokenInvariantError    a bug or corrupted state; carries the history that led there

"No" is a value with a reason (a gate's verdict, a refused report), not an exception. A message says what was wrong, with
the numbers, and what to do.
"""

from __future__ import annotations


class EplbError(Exception):
    """Root of every error that this project raises on purpose."""


class CallerError(EplbError):
    """The caller's fault: fix the input and try again."""


class InvalidInputError(CallerError):
    """A value, file, flag or message that cannot be used."""


class NotFoundError(CallerError):
    """Names something that does not exist."""


class ConflictError(CallerError):
    """Contradicts what is already there."""


class UnsupportedError(CallerError):
    """Asks for something that this peer or build cannot do."""


class StaleError(EplbError):
    """Superseded: an older epoch, incarnation, group or generation."""


class FencedError(StaleError):
    """A newer planner leads this deployment."""


class EnvironmentFault(EplbError):  # noqa: N818  (the tree above reads better without a second "Error")
    """The surroundings failed: store, network, disk, memory, deadline."""


class StoreUnavailableError(EnvironmentFault):
    """The store did not answer, or refused us."""


class DeadlineError(EnvironmentFault):
    """A wait reached its deadline."""


class PolicyFailedError(EnvironmentFault):
    """A policy raised, ran out of time or memory, or returned nonsense."""


class BrokenInvariantError(EplbError):
    """A bug or corrupted state; the message carries the history that led there."""
