"""All deployments of one planner process: found by name, made when their first rank registers or the store knows them."""

from __future__ import annotations

import asyncio

import structlog

from eplb_service import __version__
from eplb_service.control import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, Registration
from eplb_service.errors import ConflictError, EnvironmentFault, EplbError, NotFoundError, UnsupportedError
from eplb_service.ids import DeploymentId
from eplb_service.planner.context import PlannerContext
from eplb_service.planner.deployment import Deployment
from eplb_service.planner.steering import Steering

NAMES_SHOWN = 20
STOP_S = 3.0


class Planner:
    """The deployments of this process."""

    def __init__(self, context: PlannerContext, *, store_name: str) -> None:
        self.context = context
        self.version = __version__
        self.store_name = store_name
        """Where the store is, without secrets."""
        self.started_at_s = context.clock.monotonic()
        self._steerings: dict[DeploymentId, Steering] = {}
        self._refuses = "this planner is starting: its policies are not warm yet"
        self._log = structlog.get_logger("eplb.planner")

    @property
    def name(self) -> str:
        """What this planner is called."""
        return self.context.owner

    @property
    def deployments(self) -> tuple[Deployment, ...]:
        """All deployments, by name."""
        return tuple(self._steerings[name].deployment for name in sorted(self._steerings))

    async def start(self) -> None:
        """Lead every deployment that the store knows: their agents may be on their way back. Raises what the store raises."""
        for name in await self.context.store.deployments():
            if len(self._steerings) >= self.context.config.limits.deployments:
                self._log.error("deployment.left_out", deployment=name, limit=self.context.config.limits.deployments)
                continue
            self._make(name)
        self._refuses = ""

    async def stop(self) -> None:
        """Give every lead up."""
        self._refuses = "this planner is stopping: register with its successor"
        for result in await asyncio.gather(
            *(steering.stop(STOP_S) for steering in self._steerings.values()), return_exceptions=True
        ):
            if isinstance(result, BaseException):
                self._log.warning("deployment.not_stopped", reason=str(result) or type(result).__name__)

    def register(self, registration: Registration) -> int:
        """A rank says what it is; returns the protocol version to speak.

        Raises UnsupportedError (no common version), ConflictError (disagrees with peers, too many), InvalidInputError,
        StaleError, EnvironmentFault (starting or stopping: try again).
        """
        if self._refuses:
            raise EnvironmentFault(self._refuses)
        version = min(PROTOCOL_VERSION_MAX, registration.protocol_max)
        if version < max(PROTOCOL_VERSION_MIN, registration.protocol_min):
            raise UnsupportedError(
                f"rank {registration.address.rank_id} speaks protocol versions {registration.protocol_min} to"
                f" {registration.protocol_max}, this planner {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION_MAX}:"
                " upgrade the older of the two"
            )
        name = registration.deployment
        steering = self._steerings.get(name)
        if steering is not None:
            steering.deployment.register(registration)
            return version
        if len(self._steerings) >= self.context.config.limits.deployments:
            raise ConflictError(
                f"deployment {name} is one too many: this planner takes {self.context.config.limits.deployments}"
                " (limits.deployments)"
            )
        deployment = Deployment(name, self.context)
        deployment.register(registration)  # one that is refused leaves nothing behind
        self._steerings[name] = Steering(deployment)
        self._steerings[name].start()
        self._log.info("deployment.appeared", deployment=name, mode=deployment.ledger.settings.mode)
        return version

    def steering(self, name: str) -> Steering:
        """Who steers a deployment. Raises NotFoundError naming those known."""
        steering = self._steerings.get(DeploymentId(name))
        if steering is None:
            known = sorted(self._steerings)
            shown = ", ".join(known[:NAMES_SHOWN]) + (
                f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else ""
            )
            raise NotFoundError(
                f"there is no deployment {name[:128]!r}; "
                + (f"known: {shown}" if known else "no agent has registered a rank yet")
            )
        return steering

    def deployment(self, name: str) -> Deployment:
        """A deployment by name. Raises NotFoundError naming those known."""
        return self.steering(name).deployment

    def _make(self, name: DeploymentId) -> None:
        try:
            self._steerings[name] = Steering(Deployment(name, self.context))
            self._steerings[name].start()
        except EplbError as error:
            self._log.error("deployment.not_started", deployment=name, reason=str(error))
