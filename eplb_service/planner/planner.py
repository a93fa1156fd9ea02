"""All deployments of one planner process: found by name, made when a control stream speaks for a rank that registered, their
engine asks, or the store knows them.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import structlog

from eplb_service import __version__
from eplb_service.advice import Advice, AdviceRequest
from eplb_service.control import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, Registration
from eplb_service.errors import ConflictError, EnvironmentFault, EplbError, NotFoundError, UnsupportedError
from eplb_service.ids import DeploymentId
from eplb_service.planner import documents
from eplb_service.planner.advised import AdvisedDeployment
from eplb_service.planner.answering import Answering
from eplb_service.planner.context import PlannerContext
from eplb_service.planner.deployment import Deployment
from eplb_service.planner.newcomers import Newcomers
from eplb_service.planner.steering import Steering

NAMES_SHOWN = 20
STOP_S = 3.0

AnySteering = TypeVar("AnySteering", bound=Steering)


class Planner:
    """The deployments of this process."""

    def __init__(self, context: PlannerContext, *, store_name: str) -> None:
        self.context = context
        self.version = __version__
        self.store_name = store_name
        """Where the store is, without secrets."""
        self.started_at_s = context.clock.monotonic()
        self._steerings: dict[DeploymentId, Steering] = {}
        self._newcomers = Newcomers(context.config.limits.deployments)
        self._refuses = "this planner is starting: its policies are not warm yet"
        self._log = structlog.get_logger("eplb.planner")

    @property
    def name(self) -> str:
        """What this planner is called."""
        return self.context.owner

    @property
    def deployments(self) -> tuple[Deployment, ...]:
        """All deployments, by name, those too that no control stream speaks for yet."""
        found = [steering.deployment for steering in (*self._steerings.values(), *self._newcomers.steerings)]
        return tuple(sorted(found, key=lambda deployment: deployment.name))

    async def start(self) -> None:
        """Lead every deployment that the store knows: their agents may be on their way back. Raises what the store raises."""
        for name in await self.context.store.deployments():
            if len(self._steerings) >= self.context.config.limits.deployments:
                self._log.error("deployment.left_out", deployment=name, limit=self.context.config.limits.deployments)
                continue
            await self._make(name)
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
        self._check_room(name)
        now = self.context.clock.monotonic()
        newcomer = self._newcomers.get(name, now) or Steering(Deployment(name, self.context))
        newcomer.deployment.register(registration)  # one that is refused leaves nothing behind
        left_out = self._newcomers.keep(newcomer, now)
        if left_out is not None:
            self._log.warning("deployment.left_out", deployment=left_out, limit=self.context.config.limits.deployments)
        return version

    def attached(self, deployment: Deployment) -> None:
        """A control stream speaks for a rank of this deployment. Raises ConflictError when it is one too many."""
        if deployment.name in self._steerings:
            return
        self._check_room(deployment.name)
        newcomer = self._newcomers.take(deployment.name)
        if newcomer is not None and newcomer.deployment is deployment:
            self._appear(newcomer)

    async def ask(self, request: AdviceRequest) -> Advice:
        """An engine that moves its own weights asks what to do.

        Raises InvalidInputError, ConflictError (too many deployments, ranks that link have this name, a rival asks),
        EnvironmentFault (starting or stopping, or another planner leads: keep the map).
        """
        if self._refuses:
            raise EnvironmentFault(self._refuses)
        name = request.deployment
        steering = self._known(name)
        if steering is None:
            if len(request.rank_ids) > self.context.config.limits.ranks:
                raise ConflictError(
                    f"deployment {name} names {len(request.rank_ids)} ranks; this planner takes at most"
                    f" {self.context.config.limits.ranks} (limits.ranks)"
                )
            self._check_room(name)
            steering = self._appear(Answering(AdvisedDeployment(name, self.context)))
        if not isinstance(steering, Answering):
            raise ConflictError(
                f"deployment {name} is one of ranks that link: give the engine that moves its own weights another name"
            )
        return await steering.ask(request)

    def _known(self, name: DeploymentId) -> Steering | None:
        """Who steers a deployment, also one that no control stream speaks for yet."""
        return self._steerings.get(name) or self._newcomers.get(name, self.context.clock.monotonic())

    def steering(self, name: str) -> Steering:
        """Who steers a deployment. Raises NotFoundError naming those known."""
        steering = self._known(DeploymentId(name))
        if steering is None:
            known = sorted(self._steerings)
            shown = ", ".join(known[:NAMES_SHOWN]) + (
                f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else ""
            )
            raise NotFoundError(
                f"there is no deployment {name[:128]!r}; "
                + (f"known: {shown}" if known else "no agent has registered a rank yet, and no engine has asked")
            )
        return steering

    def deployment(self, name: str) -> Deployment:
        """A deployment by name. Raises NotFoundError naming those known."""
        return self.steering(name).deployment

    async def _make(self, name: DeploymentId) -> None:
        """Take up a deployment of the store."""
        advised = documents.ADVISED in await self.context.store.read(name, (documents.ADVISED,))
        try:
            self._steerings[name] = (
                Answering(AdvisedDeployment(name, self.context)) if advised else Steering(Deployment(name, self.context))
            )
            self._steerings[name].start()
        except EplbError as error:
            self._log.error("deployment.not_started", deployment=name, reason=str(error))

    def _appear(self, steering: AnySteering) -> AnySteering:
        """Take up a deployment that was just heard of."""
        deployment = steering.deployment
        self._steerings[deployment.name] = steering
        steering.start()
        self._log.info("deployment.appeared", deployment=deployment.name, mode=deployment.ledger.settings.mode)
        return steering

    def _check_room(self, name: DeploymentId) -> None:
        limit = self.context.config.limits.deployments
        if len(self._steerings) >= limit:
            raise ConflictError(f"deployment {name} is one too many: this planner takes {limit} (limits.deployments)")
