"""Keeps the lead of one deployment: takes it, renews it, notices when it is lost, takes it again when it is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from eplb_service.errors import ConflictError, EnvironmentFault, EplbError, FencedError
from eplb_service.ids import DeploymentId, Epoch
from eplb_service.store.base import Leadership, Store

RETRY_S = 0.5
FAULT_PAUSE_S = 1.0
FAULT_PAUSE_MAX_S = 60.0
"""A lead that cannot begin is tried again more and more rarely. What shows without the lead (a damaged document in the store)
is looked at before it is taken: each lead takes an epoch."""


class Led(Protocol):
    """What leads."""

    async def check(self) -> None:
        """Whether the lead could begin, as far as that shows without it. Raises what `begin` would."""
        ...

    async def begin(self, leadership: Leadership) -> None:
        """The lead was taken: load what the store knows and start."""
        ...

    async def end(self, reason: str) -> None:
        """The lead was lost or is given up: stop sending and writing."""
        ...

    def displaced(self, reason: str) -> None:
        """The lead that was lost is another planner's now."""
        ...


class Leading:
    """The lead of one deployment, as a task. on_health: called with why the store does not answer, empty when it does."""

    def __init__(
        self,
        deployment: DeploymentId,
        store: Store,
        led: Led,
        *,
        owner: str,
        lease_s: float,
        new_id: Callable[[], str],
        on_health: Callable[[str], None],
    ) -> None:
        self.epoch = Epoch(0)
        """Epoch that is led in; 0 = none."""
        self.why_not = "the store was not asked yet"
        """Why nothing is led; empty while it is."""
        self._deployment, self._store, self._led = deployment, store, led
        self._owner, self._name, self._lease_s = owner, owner, lease_s
        self._new_id, self._on_health = new_id, on_health
        self._floor = 0
        self._has_led = False
        self._lost: asyncio.Future[str] | None = None
        self._leadership: Leadership | None = None
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("eplb.planner").bind(deployment=deployment)

    def start(self) -> None:
        """Begin to try."""
        self._task = asyncio.create_task(self._run(), name=f"lead of {self._deployment}")

    def lose(self, reason: str, *, floor: int = 0, fenced: bool = False) -> None:
        """The lead is lost, or must be taken anew with an epoch above `floor`. Idempotent until it was taken again.

        fenced: the store refused us. Should another planner go by our name (a mistake), the lead would go to and fro: from
        now on we are told apart, and wait until its lease lapses.
        """
        if fenced:
            self._owner = f"{self._name[:100]}~{self._new_id()[:8]}"
        self._floor = max(self._floor, floor)
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    async def stop(self, timeout_s: float) -> None:
        """Give the lead up, so that another planner need not wait for the lease to lapse."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            await self._end("the planner stops")
            try:
                async with asyncio.timeout(timeout_s):
                    await self._store.resign(leadership)
            except (EplbError, TimeoutError) as error:
                self._log.warning("lead.not_resigned", reason=str(error) or f"no answer within {timeout_s:.1f} s")

    async def _run(self) -> None:
        pause_s = RETRY_S
        while True:
            await self._until_it_could_begin()
            self._leadership = await self._take()
            self._lost = asyncio.get_running_loop().create_future()
            self.epoch, self.why_not = self._leadership.epoch, ""
            self._floor = max(self._floor, self.epoch)
            self._has_led = True
            self._log.info("lead.taken", epoch=self.epoch)
            try:
                await self._led.begin(self._leadership)
                pause_s = RETRY_S
                reason = await self._hold(self._leadership, self._lost)
            except EnvironmentFault as error:
                self._on_health(str(error))
                reason = str(error)
                pause_s = RETRY_S
            except EplbError as error:
                reason, pause_s = str(error), min(FAULT_PAUSE_MAX_S, 2 * pause_s)
            except Exception as error:  # noqa: BLE001  (a bug must not leave a deployment without a planner for ever)
                self._log.exception("lead.failed")
                reason, pause_s = f"{type(error).__name__} inside the planner; see its log", min(FAULT_PAUSE_MAX_S, 2 * pause_s)
            self._leadership = None
            self._log.warning("lead.lost", epoch=self.epoch, reason=reason)
            await self._end(reason)
            await asyncio.sleep(pause_s)

    async def _end(self, reason: str) -> None:
        self.epoch, self.why_not = Epoch(0), reason
        await self._led.end(reason)

    async def _until_it_could_begin(self) -> None:
        """Wait, without the lead and its epoch, for as long as what the store holds speaks against it."""
        pause_s, said = RETRY_S, ""
        while True:
            try:
                await self._led.check()
            except EnvironmentFault as error:
                self._on_health(str(error))
                self.why_not, pause_s = str(error), RETRY_S
            except EplbError as error:
                self._on_health("")
                self.why_not, pause_s = str(error), min(FAULT_PAUSE_MAX_S, 2 * pause_s)
                if self.why_not != said:
                    self._log.error("lead.not_possible", reason=self.why_not)
            else:
                self._on_health("")
                return
            said = self.why_not
            await asyncio.sleep(pause_s)

    async def _take(self) -> Leadership:
        """Ask until the lead is ours. The write id stays while an answer may have been lost."""
        write_id = self._new_id()
        said = ""
        while True:
            try:
                leadership = await self._store.lead(
                    self._deployment, owner=self._owner, lease_s=self._lease_s, floor=self._floor, write_id=write_id
                )
            except ConflictError as error:
                self._on_health("")
                if self._has_led:
                    self._has_led = False
                    self._led.displaced(str(error))
                self.why_not, write_id, pause_s = str(error), self._new_id(), min(RETRY_S, self._lease_s / 4)
            except EnvironmentFault as error:
                self._on_health(str(error))
                self.why_not, pause_s = str(error), RETRY_S
            except EplbError as error:
                self.why_not, write_id, pause_s = str(error), self._new_id(), FAULT_PAUSE_S
            else:
                self._on_health("")
                return leadership
            if self.why_not.partition(" and its lease has")[0] != said:
                said = self.why_not.partition(" and its lease has")[0]
                self._log.info("lead.awaited", reason=self.why_not)
            await asyncio.sleep(pause_s)

    async def _hold(self, leadership: Leadership, lost: asyncio.Future[str]) -> str:
        """Renew until lost; returns why."""
        while True:
            done, _ = await asyncio.wait([lost], timeout=leadership.lease_s / 3)
            if done:
                return lost.result()
            try:
                await self._store.renew(leadership)
                self._on_health("")
            except FencedError as error:
                self._on_health("")
                self.lose(str(error), fenced=True)
                return str(error)
            except EnvironmentFault as error:
                # Nobody can lead while the store is away; whoever leads after it came back fences our writes.
                self._on_health(str(error))
