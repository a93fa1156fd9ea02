"""What comes of rollouts: the start stored before anything is sent, every end recorded, an unfinished one resumed.

This is what a `Carrier` tells (`Carried`) of one deployment; it ends in the ledger, the write lane, the journal and metrics.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import structlog

from eplb_service import control
from eplb_service.coverage import why_uncovered
from eplb_service.errors import EplbError, FencedError
from eplb_service.generation import RESTORE, Generation, GenerationState, LiveMap
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, RankId
from eplb_service.membership.machine import Group
from eplb_service.planner.documents import RolloutDocument
from eplb_service.planner.drained_view import why_off_limits
from eplb_service.planner.proposing import same_shape
from eplb_service.rollout.events import Finished, LiveChanged, Outcome, Persist, Persisted, PersistFailed
from eplb_service.topology import LinkKind
from eplb_service.window.report import Accepted

if TYPE_CHECKING:
    from eplb_service.planner.deployment import Deployment


class Outcomes:
    """Records what the rollout machine of one deployment brings about."""

    def __init__(self, deployment: Deployment) -> None:
        self.rollout_since_s: float | None = None
        """Since when something is being rolled out; monotonic."""
        self._deployment = deployment
        self._resumable: Generation | None = None
        self._observing: GenerationNumber | None = None
        self._shown: object = None
        self._uncovered = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("eplb.planner").bind(deployment=deployment.name)

    def begin(self, unfinished: Generation | None) -> None:
        """A leadership begins (or ended, with None). unfinished: what the one before did not finish."""
        self._deployment.restoring.start_over()
        self._resumable, self.rollout_since_s = unfinished, None

    def forget_unfinished(self, reason: str) -> None:
        """What a leader before did not finish is not to be resumed."""
        generation, self._resumable = self._resumable, None
        if generation is not None:
            self._deployment.dropped(generation, f"not resumed by the new leader: {reason}")

    def window_closed(self, closed: Accepted) -> None:
        """Compare the first full window under a new generation with what was predicted."""
        live, group = self._deployment.known_live, self._deployment.group
        if self._observing is None or live is None or group is None:
            return
        observed = self._deployment.load.observed(live, group, closed, self._deployment.context.gate.min_coverage)
        if observed is None:
            return
        generation, self._observing = self._deployment.ledger.generations.get(self._observing), None
        if generation is not None:
            self._deployment.became(dataclasses.replace(generation, observed=observed))
            self._log.info(
                "generation.observed",
                generation=generation.number,
                predicted_worst=round(generation.predicted.worst, 4) if generation.predicted.per_layer else None,
                observed_worst=round(observed.worst, 4),
            )

    def count(self, message: control.FromRank) -> None:
        """What a message adds to the metrics."""
        metrics = self._deployment.context.metrics
        self._deployment.learning.heard(message, self._deployment.carrier.group)
        if isinstance(message, control.Staged):
            received = message.received
            links = {
                LinkKind.SAME_RANK.value: received.same_rank,
                LinkKind.SAME_NODE.value: received.same_node,
                LinkKind.CROSS_NODE.value: received.cross_node,
            }
            metrics.bytes_received(self._deployment.name, links)
        elif isinstance(message, control.Flipped):
            metrics.flip_stalled(self._deployment.name, message.stall_s)

    # ── what the carrier tells (`Carried`) ───────────────────────────────────────────────────────────────────────────────

    def persist(self, effect: Persist) -> None:
        """The start of a rollout must be stored before anything of it is sent."""
        task = asyncio.create_task(self._persist(effect), name=f"start of rollout of {self._deployment.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _persist(self, effect: Persist) -> None:
        record, lane = effect.record, self._deployment.lane
        generation = self._deployment.ledger.generations.get(record.generation)
        if lane is None or generation is None:
            self._deployment.carrier.feed(PersistFailed(effect.token, "the lead was given up"))
            return
        rolling = generation.rolling_out(record.stall)
        document = RolloutDocument(
            epoch=record.epoch,
            generation=record.generation,
            digest=record.digest,
            num_chunks=record.num_chunks,
            num_layers=record.num_layers,
        )
        try:
            await lane.commit(
                {**self._deployment.ledger.rollout_puts(document), **self._deployment.ledger.generation_puts(rolling)}
            )
        except FencedError as error:
            self._deployment.carrier.feed(PersistFailed(effect.token, str(error), fenced_by=Epoch(record.epoch + 1)))
        except EplbError as error:
            self._deployment.carrier.feed(PersistFailed(effect.token, str(error)))
        else:
            if self._deployment.ledger.generations.get(record.generation) is generation:
                self._deployment.ledger.keep(rolling)
            self._deployment.carrier.feed(Persisted(effect.token))

    def live_changed(self, effect: LiveChanged) -> None:
        """The live map is known, or a chunk flipped: recorded behind."""
        flipped = effect.boundary is not None
        if effect.flip is not None:
            self._deployment.learning.flipped(effect.flip)
            self._deployment.context.metrics.chunk_stalled(self._deployment.name, effect.flip)
        self._deployment.behind(
            self._deployment.ledger.live_puts(effect.live), failpoint="planner.flipped.recorded" if flipped else ""
        )
        if flipped:
            self._deployment.context.metrics.chunk_ended(self._deployment.name, "flipped")
            self._deployment.load.live_passed(effect.live)
        else:
            self._deployment.load.live_known(effect.live)
            self._watch_for_observed(effect.live)
        self._log.info("live.changed", generation=effect.live.newest_generation, boundary=effect.boundary, reason=effect.reason)
        self._tell_unreachable()
        self._deployment.load.look(effect.live, self._deployment.group)
        self._deployment.plan_wanted.set()
        self._deployment.announce()

    def _tell_unreachable(self) -> None:
        """Experts that live on no rank are an error in the log, once; and so is that they are back."""
        why = why_uncovered(self._deployment.restoring.lost, "no token that chooses them can be served")
        if why and why != self._uncovered:
            self._log.error("experts.unreachable", reason=why)
            self._deployment.note("experts.unreachable", why)
        elif self._uncovered and not why:
            self._log.info("experts.reachable")
            self._deployment.note("experts.reachable", "every expert lives on a rank again")
        self._uncovered = why

    def rollout_finished(self, effect: Finished) -> None:
        """A rollout ended: recorded behind."""
        generation = self._deployment.ledger.generations.get(effect.generation)
        active = effect.outcome is Outcome.ACTIVE
        self._log.log(
            20 if active else 30,
            "rollout.finished",
            generation=effect.generation,
            outcome=effect.outcome.value,
            reason=effect.reason,
            seconds=round(effect.seconds, 3),
        )
        self._deployment.note("rollout.finished", f"generation {effect.generation} {effect.outcome.value}: {effect.reason}")
        self._deployment.journals.end()
        self._deployment.last_error = "" if active else f"generation {effect.generation}: {effect.reason}"
        self.rollout_since_s = None
        live = self._deployment.known_live
        if live is not None:
            self._deployment.load.live_known(live)
        if generation is None:
            return
        if generation.policy == RESTORE:
            self._deployment.restoring.ended(effect)
        if active:
            self._became_active(generation, effect)
        else:
            stopped = generation.stopped(
                effect.reason, flip_boundaries=effect.flip_boundaries, rollout_s=effect.seconds, stall=effect.stall
            )
            self._deployment.became(stopped)
        self._deployment.context.metrics.generation_ended(
            self._deployment.name, "active" if active else "stopped", generation.moves.experts if active else 0
        )
        self._deployment.announce()

    def _became_active(self, generation: Generation, effect: Finished) -> None:
        for number in sorted(self._deployment.ledger.generations):
            other = self._deployment.ledger.generations[number]
            if number < generation.number and other.state in (GenerationState.ACTIVE, GenerationState.STOPPED):
                self._deployment.became(other.superseded())
        now_s = self._deployment.context.clock.wall()
        active = generation.active(
            at_s=now_s, flip_boundaries=effect.flip_boundaries, rollout_s=effect.seconds, stall=effect.stall
        )
        self._deployment.became(active)
        self._observing = generation.number
        self._deployment.store_learned()

    def _watch_for_observed(self, live: LiveMap) -> None:
        """After a restart: the live generation may still lack what was observed under it."""
        generation = self._deployment.ledger.generations.get(live.newest_generation)
        if generation is not None and generation.state is GenerationState.ACTIVE and generation.observed is None:
            self._observing = generation.number if live.placement.digest() == generation.digest else None

    def outranked(self, epoch: Epoch) -> None:
        """Ranks (or the store) saw a higher epoch: lead anew above it, if the lead is free."""
        self._deployment.leading.lose(f"ranks have seen epoch {epoch}", floor=epoch)

    def machine_failed(self, reason: str) -> None:
        """The rollout machine broke: lead anew with a fresh one, which asks the ranks what is live."""
        self._deployment.last_error = reason
        self._log.error("rollout.machine_failed", reason=reason)
        self._deployment.leading.lose(reason)

    def noted(self, event: str, text: str, chunk_id: ChunkId, rank_id: RankId | None) -> None:
        """For the journal; the chunk's own events are also logged."""
        if event == "chunk.aborted":
            self._deployment.context.metrics.chunk_ended(self._deployment.name, "aborted")
        self._log.info(event, chunk=f"{chunk_id:#x}" if chunk_id else None, rank=rank_id, text=text)
        self._deployment.note(event, text, chunk_id=chunk_id or None, rank_id=rank_id)

    def progressed(self) -> None:
        """The machine may have become free: resume what a predecessor left unfinished."""
        progress = self._deployment.carrier.progress
        if progress is not None and progress.generation is not None and self.rollout_since_s is None:
            self.rollout_since_s = self._deployment.context.clock.monotonic()
        if self._resumable is not None and self._deployment.is_free:
            generation, self._resumable = self._resumable, None
            self._resume(generation)
        shown = (
            None if progress is None else (progress.state, progress.generation, progress.chunks_done, self._deployment.is_free)
        )
        if shown != self._shown:
            self._shown = shown
            self._deployment.plan_wanted.set()
            self._deployment.announce()

    def group_changed(self, group: Group | None) -> None:
        """A group formed, or is no more."""
        self._deployment.restoring.start_over()
        self._deployment.load.group_changed(group)
        if group is not None:
            self._deployment.learning.group_changed()
        self._observing = None
        self._deployment.note(
            "group.changed", f"group {group.group_id} of {len(group.rank_ids)} ranks" if group else "no group"
        )

    def _resume(self, generation: Generation) -> None:
        """Carry on with the layers of a generation that are not live yet, or say why not."""
        rollout, live = self._deployment.carrier.rollout, self._deployment.live
        if rollout is None or live is None:
            return
        age_s = self._deployment.context.clock.wall() - generation.created_at_s
        why = ""
        if self._deployment.ledger.settings.paused:
            why = "the deployment is paused"
        elif not same_shape(live.placement, generation.placement):
            why = "the group has other ranks, layers or slots now"
        elif why_off_limits(self._deployment, generation.placement):
            why = why_off_limits(self._deployment, generation.placement)
        elif rollout.generation_floor > generation.number:
            why = f"ranks have seen generation {rollout.generation_floor}"
        elif age_s > self._deployment.context.config.rollout.resume_age_s:
            why = f"it was decided {age_s:.0f} s ago (rollout.resume_age_s)"
        if why:
            self._deployment.dropped(generation, f"not resumed by the new leader: {why}")
            return
        self._log.info("rollout.resumed", generation=generation.number, epoch=self._deployment.leading.epoch)
        self._deployment.note("rollout.resumed", f"generation {generation.number}")
        self._deployment.begin_rollout(generation)
