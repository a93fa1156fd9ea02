"""What is stored of a deployment: settings, generations and their journals, each write by the present leadership."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from eplb_service.drain import listed
from eplb_service.errors import StoreUnavailableError
from eplb_service.generation import Generation
from eplb_service.ids import ChunkId, DeploymentId, RankId
from eplb_service.planner.context import PlannerContext
from eplb_service.planner.documents import Settings
from eplb_service.planner.journals import Journals
from eplb_service.planner.leading import Leading
from eplb_service.planner.ledger import Ledger
from eplb_service.planner.write_lane import WriteLane
from eplb_service.rollout.journal import JournalEvent


class Recorded:
    """The part of a deployment that writes. Who wants to know of changes waits for them (`wait_for_change`)."""

    leading: Leading

    def __init__(self, name: DeploymentId, context: PlannerContext) -> None:
        planning = context.config.planning
        self.name = name
        self.context = context
        self.ledger = Ledger(name, context.store, Settings(mode=planning.mode, policy=planning.policy))
        self.journals = Journals(name, context.store)
        self.lane: WriteLane | None = None
        """Writes of the present leadership; None while there is none."""
        self._settings = asyncio.Lock()
        self._changed = asyncio.Event()
        self._log = structlog.get_logger("eplb.planner").bind(deployment=name)

    async def wait_for_change(self) -> None:
        """Return at the next change of the live map, a generation or the settings."""
        await self._changed.wait()

    def announce(self) -> None:
        """Wake those who wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def change_settings(self, change: Callable[[Settings], Settings]) -> Settings:
        """Store settings that were changed; one change after another. Raises what `commit` raises: then nothing changed."""
        async with self._settings:
            settings = change(self.ledger.settings)
            await self.commit(self.ledger.settings_puts(settings).puts)
            self.ledger.settings = settings
        paused = "paused" if settings.paused else "not paused"
        drained = f", drained ranks {listed(sorted(map(RankId, settings.drained)))}" if settings.drained else ""
        self._log.info(
            "settings.changed",
            mode=settings.mode,
            paused=settings.paused,
            reason=settings.pause_reason,
            drained=list(settings.drained),
        )
        self.note("settings.changed", f"mode {settings.mode}, {paused}{drained}")
        self.announce()
        return settings

    async def commit(
        self, puts: dict[str, bytes], expects: dict[str, int] | None = None, deletes: tuple[str, ...] = ()
    ) -> None:
        """Store this before going on. Raises ConflictError when this planner does not lead, and what the lane raises."""
        if self.lane is None:
            raise StoreUnavailableError(f"this planner does not lead {self.name}: {self.leading.why_not}")
        await self.lane.commit(puts, expects=expects, deletes=deletes)

    def became(self, generation: Generation) -> None:
        """What became of a generation: recorded behind."""
        self.ledger.keep(generation)
        self.behind(self.ledger.generation_puts(generation))

    def dropped(self, generation: Generation, why: str) -> None:
        """A published generation is not rolled out, or not any further: recorded behind."""
        self._log.warning("rollout.dropped", generation=generation.number, reason=why)
        self.note("rollout.dropped", f"generation {generation.number} {why}")
        self.journals.end()
        self.became(generation.stopped(why))

    def behind(self, puts: dict[str, bytes], failpoint: str = "") -> None:
        """Store this when the store can."""
        if self.lane is not None:
            self.lane.behind(puts, failpoint=failpoint)

    def note(self, event: str, text: str, *, chunk_id: ChunkId | None = None, rank_id: RankId | None = None) -> None:
        """Something happened: written behind, into the journal of the generation under way too."""
        if self.lane is None:
            return
        noted = JournalEvent(
            at_s=self.context.clock.wall(),
            epoch=self.lane.epoch,
            event=event,
            text=text,
            chunk_id=chunk_id,
            rank_id=rank_id,
        )
        entry = {"at_s": noted.at_s, "epoch": noted.epoch, "event": event, "text": text, "chunk": chunk_id, "rank": rank_id}
        self.lane.note({key: value for key, value in entry.items() if value is not None})
        puts = self.journals.note(noted)
        if puts:
            self.behind(puts)
