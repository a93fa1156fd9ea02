"""What the adviser in an engine can be told: one variable switches it on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from eplb_service.errors import InvalidInputError

SWITCH = "EPLB_ADVISER"
TIMEOUT_S_MAX = 60.0
"""Other ranks wait in a collective while one asks: far below the time-outs of their groups."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,96}")
"""A deployment's name has at most 128 characters; the rest is for stage and model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviserConfig:
    """Settings of the adviser; the same on every rank of a group, except the path.

    socket_path: Unix socket of the node's agent process. deployment: name at the planner; None = from the model's.
    timeout_s: how long one question may take, from connecting to the answer.

    >>> AdviserConfig.from_environment({"EPLB_ADVISER": "/run/eplb/agent.sock"}).timeout_s
    5.0
    """

    socket_path: str
    deployment: str | None = None
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.socket_path:
            raise InvalidInputError(f"{SWITCH} is empty; set it to the Unix socket of this node's agent process")
        if self.deployment is not None and not _NAME.fullmatch(self.deployment):
            raise InvalidInputError(
                f"EPLB_DEPLOYMENT={self.deployment[:120]!r} is no name of a deployment;"
                " use 1 to 96 letters, digits, '.', '_', '-'"
            )
        if not 0 < self.timeout_s <= TIMEOUT_S_MAX:
            raise InvalidInputError(
                f"EPLB_ADVISER_TIMEOUT_S={self.timeout_s:g} must be above 0 and at most {TIMEOUT_S_MAX:g} seconds:"
                " all ranks wait while one asks"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> AdviserConfig:
        """Settings from the EPLB_* variables of `VARIABLES`. Raises InvalidInputError naming the one that cannot be used."""
        timeout = environ.get("EPLB_ADVISER_TIMEOUT_S", "") or "5"
        try:
            timeout_s = float(timeout)
        except ValueError:
            raise InvalidInputError(f"EPLB_ADVISER_TIMEOUT_S={timeout!r} is not a number") from None
        return cls(socket_path=environ.get(SWITCH, ""), deployment=environ.get("EPLB_DEPLOYMENT") or None, timeout_s=timeout_s)


VARIABLES = (SWITCH, "EPLB_DEPLOYMENT", "EPLB_ADVISER_TIMEOUT_S")
"""What is read from the environment; docs/adviser.md has a table of them."""


def deployment_name(config: AdviserConfig, model: str, *parts: str) -> str:
    """Name at the planner: as configured, else the last part of the model's; then stage, layers, … where there are several.

    >>> deployment_name(AdviserConfig(socket_path="s"), "deepseek-ai/DeepSeek-V3", "stage1")
    'DeepSeek-V3.stage1'
    """
    base = config.deployment or re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rsplit("/", 1)[-1])[:96] or "model"
    return ".".join((base, *parts))
