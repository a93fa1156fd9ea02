"""The planner's side of a rollout: one machine for one deployment under one epoch (DESIGN: rollout and commit).

    WAITING ──group ready──► HELLO, INCONSISTENT (`live_replies`) ──all route by one map──► IDLE ──start──► `rollout_run`
       ▲                            ▲                                                        ▲                  │ │
       └──group lost (any state)    └──────────── ranks contradict one another ──────────────┼──────────────────┘ │
    OUTRANKED ◄──sign of another leader (any state)                                          └─────── ended ──────┘

`_ON_EVENT` and `_ON_MESSAGE` at the end say what is done with what; each part has a table of its own, and what has no entry is
dropped and counted. What holds in every state:

- A message of another life, group or chunk changes nothing. A sign of another leader ends the machine (OUTRANKED).
- Every state has a deadline, save those where nothing is waited for (WAITING, IDLE, OUTRANKED) and an engine without steps.
- `live` is what was proven: by an equal set of replies, or by the flips of all ranks. In doubt it is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

from eplb_service.control import Address, Flipped, Hello, Live, Pulse
from eplb_service.errors import InvalidInputError
from eplb_service.flip_stall import flip_bytes_max
from eplb_service.generation import AS_LOADED, LiveMap
from eplb_service.ids import ChunkId, Epoch, GenerationNumber
from eplb_service.membership.group import Group
from eplb_service.membership.machine import GroupLost, GroupReady, RankAttached, RankDetached
from eplb_service.rollout.chunk_ids import ChunkIds
from eplb_service.rollout.events import (
    NO_CHUNK,
    Alarm,
    AlarmCleared,
    AlarmCode,
    Cancel,
    Effect,
    Fenced,
    Finished,
    LiveChanged,
    Note,
    Outcome,
    Outranked,
    Persisted,
    PersistFailed,
    Progress,
    Received,
    RolloutEvent,
    RolloutSettings,
    RolloutState,
    Send,
    Start,
    Tick,
)
from eplb_service.rollout.live_replies import LiveReplies
from eplb_service.rollout.open_chunk import ChunkAnswer
from eplb_service.rollout.readiness import Readiness
from eplb_service.rollout.run import Run
from eplb_service.rollout.start import chunks_to_roll_out
from eplb_service.rollout.transitions import TRANSITIONS, summary
from eplb_service.transitions import Trail


class Rollout:
    """`handle(event, now)` → effects, in the order they must run. now: monotonic clock, seconds; never goes back.

    first_sequence: where chunk ids begin, drawn at random (`drawn_sequence`).
    generation_floor: highest generation that the store, or an earlier machine of this process, knows.
    """

    def __init__(
        self,
        epoch: Epoch,
        settings: RolloutSettings,
        *,
        first_sequence: int,
        generation_floor: GenerationNumber = AS_LOADED,
    ) -> None:
        self.epoch = epoch
        self.settings = settings
        self._trail = Trail("the rollout machine", TRANSITIONS, RolloutState.WAITING)
        self._phase = RolloutState.WAITING  # while there is no part: WAITING, IDLE or OUTRANKED
        self._since_s = 0.0
        self._group: Group | None = None
        self._ranks: Readiness | None = None
        self._part: LiveReplies | Run | None = None  # what waits, with a state and a deadline of its own
        self._live: LiveMap | None = None
        self._alarm: Alarm | None = None
        self._ids = ChunkIds(epoch, first_sequence)
        self._generation_floor = generation_floor
        self._token = 0
        self._dropped: Counter[str] = Counter()
        self._shown: Progress | None = None
        self._effects: list[Effect] = []

    # ── what the shell may look at ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> RolloutState:
        """What the machine is doing."""
        return self._phase if self._part is None else self._part.state

    @property
    def group(self) -> Group | None:
        """The ready group."""
        return self._group

    @property
    def live(self) -> LiveMap | None:
        """The live map; None before the first equal set of replies and while it is in doubt."""
        return self._live

    @property
    def open_chunk(self) -> ChunkId:
        """The chunk that ranks may act on; 0 = none."""
        return self._part.open_id if isinstance(self._part, Run) else NO_CHUNK

    @property
    def generation_floor(self) -> GenerationNumber:
        """Highest generation that the store or any rank ever saw; the next one is higher."""
        return self._generation_floor

    @property
    def alarm(self) -> Alarm | None:
        """What keeps this deployment from being rolled out to, until an equal set of live maps clears it."""
        return self._alarm

    @property
    def next_deadline(self) -> float | None:
        """When the next Tick is due; None = no timer."""
        return None if self._part is None else self._part.deadline_s

    @property
    def dropped(self) -> Mapping[str, int]:
        """Messages that changed nothing, by reason."""
        return MappingProxyType(self._dropped)

    def progress(self) -> Progress:
        """Where the machine is."""
        part = self._part
        run = part if isinstance(part, Run) else None
        return Progress(
            state=self.state,
            generation=run.generation.number if run else None,
            chunk_id=self.open_chunk,
            chunks_done=run.index if run else 0,
            chunks_total=len(run.chunks) if run else 0,
            attempt=run.tries if run else 0,
            waiting_for=part.waiting_for if part else (),
            since_s=part.since_s if part else self._since_s,
            deadline_s=self.next_deadline,
            stalled=part.stalled if part else False,
            hold=run.hold if run else "",
            last_error=part.last_error if part else "",
        )

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: RolloutEvent, now: float) -> tuple[Effect, ...]:
        """Take one event in. Raises nothing for what peers do: the effects say what follows.

        Raises BrokenInvariantError, with how it came there, for a state that may not follow: a bug.
        """
        self._effects = []
        if self._phase is not RolloutState.OUTRANKED:
            self._trail.happens(summary(event), now)
            _ON_EVENT[type(event)](self, event, now)
        shown = self.progress()
        if shown != self._shown:
            self._shown = shown
            self._effects.append(shown)
        return tuple(self._effects)

    def _on_group_ready(self, event: GroupReady, now: float) -> None:
        self._end_group("the group was formed anew", now)
        self._group = event.group
        self._ranks = Readiness(event.group)
        self._ask_all(now)

    def _on_group_lost(self, event: GroupLost, now: float) -> None:
        if self._group is None or self._group.group_id != event.group_id:
            self._drop("loss of another group")
        else:
            self._end_group(event.reason, now)

    def _end_group(self, reason: str, now: float) -> None:
        """Leave all that belongs to a group."""
        if isinstance(self._part, Run):
            self._effects += self._part.group_ended(reason, now)
        self._ids.forget_group()
        self._group = self._ranks = self._live = None
        self._enter(RolloutState.WAITING, now)

    def _on_attached(self, event: RankAttached, now: float) -> None:
        """Its stream was away: what it was sent, and what it answered, may be lost. Ask it, and say again what counts now."""
        if not self._is_of_group(event.address):
            return
        self._readiness.away -= {event.address.rank_id}
        self._effects.append(Send(Hello(to=event.address, epoch=self.epoch)))
        if isinstance(self._part, Run):
            self._note_of_rank("rank.attached", event.address, "a control stream speaks for it again")
            self._advance(self._part, self._part.attached(event.address, now), now)

    def _on_detached(self, event: RankDetached, _now: float) -> None:
        if self._is_of_group(event.address):
            self._readiness.away |= {event.address.rank_id}
            if isinstance(self._part, Run):
                self._note_of_rank("rank.detached", event.address, event.reason)

    def _note_of_rank(self, event: str, address: Address, text: str) -> None:
        """While a rollout is under way it belongs to its story."""
        self._effects.append(Note(event=event, text=text, chunk_id=self.open_chunk, rank_id=address.rank_id))

    def _on_fenced(self, event: Fenced, now: float) -> None:
        self._outranked(event.by, now)

    def _outranked(self, by: Epoch, now: float) -> None:
        """Nothing more is sent: the new leader's Hello closes what is open."""
        if isinstance(self._part, Run):
            reason = f"another planner leads this deployment with epoch {by}; ours is {self.epoch}"
            self._effects += self._part.abandon(reason, now)
        self._live = None
        self._effects.append(Outranked(by))
        self._enter(RolloutState.OUTRANKED, now)

    def _on_received(self, event: Received, now: float) -> None:
        if self._is_of_group(event.message.sender):
            _ON_MESSAGE[type(event.message)](self, event.message, now)

    def _on_tick(self, _event: Tick, now: float) -> None:
        part = self._part
        if part is None or part.deadline_s is None or now < part.deadline_s:
            return
        effects = part.overdue(now)
        if isinstance(part, Run):
            self._advance(part, effects, now)
        else:
            self._effects += effects

    # ── what ranks say ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_pulse(self, pulse: Pulse, now: float) -> None:
        self._readiness.note(pulse)
        if isinstance(self._part, Run):
            self._advance(self._part, self._part.pulsed(pulse, now), now)

    def _on_answer(self, answer: ChunkAnswer, now: float) -> None:
        part = self._part
        effects = part.answered(answer, now) if isinstance(part, Run) else None
        if isinstance(part, Run) and effects is not None:
            self._advance(part, effects, now)
        elif isinstance(answer, Flipped) and answer.chunk_id == self._ids.last_aborted:
            reason = f"rank {answer.sender.rank_id} flipped chunk {answer.chunk_id:#x}, which another closed without a flip"
            self._in_doubt(Alarm(AlarmCode.FLIP_AFTER_DISARM, reason), now)
        elif self._ids.is_foreign(answer.chunk_id):
            self._outranked(self.epoch, now)
        else:
            self._drop(f"{type(answer).__name__} while {self.state}")

    def _on_live(self, live: Live, now: float) -> None:
        live_map, part = self._heard(live, now), self._part
        if live_map is None:
            return
        if isinstance(part, LiveReplies):
            self._on_reply(part, live, live_map, now)
        elif isinstance(part, Run):
            self._advance(part, part.seen_live(live, live_map, now), now)
        elif self._live is not None and live_map.digest != self._live.digest:
            self._ask_all(now)

    def _heard(self, live: Live, now: float) -> LiveMap | None:
        """What a reply is good for in every state; None when it is not to be used, or ended the machine."""
        if live.epoch_seen > self.epoch or self._ids.is_foreign(live.closed_id) or self._ids.is_foreign(live.flipped_id):
            self._outranked(live.epoch_seen, now)
        elif live.epoch != self.epoch:
            self._drop("Live of another epoch")
        elif live.flipped_id < self._ids.last_flipped:
            self._drop("Live from before a flip")
        else:
            self._readiness.note(live)
            try:
                live_map = self._ready_group.live_map(live.layers)
            except InvalidInputError as error:
                self._in_doubt(Alarm(AlarmCode.BAD_LIVE, f"rank {live.sender.rank_id}: {error}"), now)
                return None
            self._generation_floor = max(self._generation_floor, live.generation_seen, live_map.newest_generation)
            return live_map
        return None

    # ── asking what is live ──────────────────────────────────────────────────────────────────────────────────────────────

    def _ask_all(self, now: float) -> None:
        self._live = None
        self._ids.connect_anew()
        replies = LiveReplies(
            epoch=self.epoch,
            group=self._ready_group,
            settings=self.settings,
            last_opened=self._ids.last_opened,
            trail=self._trail,
        )
        self._part = replies
        self._effects += replies.ask_all(now)

    def _on_reply(self, replies: LiveReplies, live: Live, live_map: LiveMap, now: float) -> None:
        if not replies.take(live, live_map, now):
            self._drop("Live with our last chunk open")
        elif replies.disagreement is not None:
            self._raise_alarm(replies.disagreement)
        elif replies.agreed is not None:
            self._adopt(replies.agreed, now)

    def _adopt(self, live: LiveMap, now: float) -> None:
        """All ranks say the same: that is the truth, also when the store knows nothing of it."""
        self._live = live
        if self._alarm is not None:
            self._effects.append(AlarmCleared(f"all ranks route by one map again (was: {self._alarm.reason})"))
            self._alarm = None
        reason = "all ranks reply with this map"
        self._effects.append(LiveChanged(live=live, generation_floor=self._generation_floor, reason=reason))
        self._enter(RolloutState.IDLE, now)

    def _raise_alarm(self, alarm: Alarm) -> None:
        if alarm != self._alarm:
            self._alarm = alarm
            self._effects.append(alarm)

    def _in_doubt(self, alarm: Alarm, now: float) -> None:
        """Ranks contradict one another: stop, close what is open, and ask until they agree."""
        self._raise_alarm(alarm)
        if isinstance(self._part, Run):
            self._effects += self._part.abandon(alarm.reason, now)
        if not isinstance(self._part, LiveReplies):
            self._ask_all(now)

    # ── one rollout ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_start(self, event: Start, now: float) -> None:
        generation, group, live = event.generation, self._group, self._live
        if self.state is not RolloutState.IDLE or group is None or live is None:
            self._answer_start(
                event, Outcome.NOT_STARTED, f"generation {generation.number} cannot start: the rollout machine is {self.state}"
            )
            return
        try:
            chunks = chunks_to_roll_out(
                generation,
                group=group,
                live=live,
                generation_floor=self._generation_floor,
                layers_per_chunk_max=self.settings.layers_per_chunk_max,
                flip_bytes_max=flip_bytes_max(event.stalls, self.settings.commit_stall_s_max),
            )
        except InvalidInputError as error:
            self._answer_start(event, Outcome.NOT_STARTED, str(error))
            return
        self._generation_floor = max(self._generation_floor, generation.number)
        if not chunks:
            self._answer_start(event, Outcome.ACTIVE, "every layer has its row already")
            return
        self._token += 1
        run = Run(
            generation,
            chunks,
            live=live,
            group=group,
            ranks=self._readiness,
            ids=self._ids,
            settings=self.settings,
            stalls=event.stalls,
            generation_floor=self._generation_floor,
            token=self._token,
            trail=self._trail,
            now=now,
        )
        self._part = run
        self._advance(run, run.begin(), now)

    def _answer_start(self, event: Start, outcome: Outcome, reason: str) -> None:
        self._effects.append(
            Finished(generation=event.generation.number, outcome=outcome, reason=reason, flip_boundaries=(), seconds=0.0)
        )

    def _on_persisted(self, event: Persisted, now: float) -> None:
        if isinstance(self._part, Run):
            self._advance(self._part, self._part.persisted(event.token, now), now)

    def _on_persist_failed(self, event: PersistFailed, now: float) -> None:
        if event.fenced_by is not None:
            self._outranked(event.fenced_by, now)
        elif isinstance(self._part, Run):
            self._advance(self._part, self._part.persist_failed(event.token, event.reason, now), now)

    def _on_cancel(self, event: Cancel, now: float) -> None:
        if isinstance(self._part, Run):
            self._advance(self._part, self._part.cancel(event, now), now)
        else:
            text = f"nothing is rolled out ({event.by}: {event.reason})"
            self._effects.append(Note(event="rollout.cancel_ignored", text=text))

    def _advance(self, run: Run, effects: list[Effect], now: float) -> None:
        """Take over what the run found out; leave it when it ended."""
        self._effects += effects
        self._live = run.live
        if run.ended is None:
            return
        self._enter(RolloutState.IDLE, now)
        if run.ended.alarm is not None:
            self._in_doubt(run.ended.alarm, now)
        elif run.ended.ask_again:
            self._ask_all(now)

    # ── small things ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _ready_group(self) -> Group:
        if self._group is None:
            raise self._trail.broken(f"no group while {self.state}")
        return self._group

    @property
    def _readiness(self) -> Readiness:
        if self._ranks is None:
            raise self._trail.broken(f"no group while {self.state}")
        return self._ranks

    def _is_of_group(self, address: Address) -> bool:
        if self._group is not None and self._group.addresses.get(address.rank_id) == address:
            return True
        self._drop("of another group or life")
        return False

    def _enter(self, phase: RolloutState, now: float) -> None:
        self._trail.enter(phase)
        self._part = None
        self._phase = phase
        self._since_s = now

    def _drop(self, why: str) -> None:
        self._dropped[why] += 1


# ── what is done with what ───────────────────────────────────────────────────────────────────────────────────────────────

_ON_EVENT: Mapping[type, Callable[[Rollout, Any, float], None]] = {
    GroupReady: Rollout._on_group_ready,
    GroupLost: Rollout._on_group_lost,
    RankAttached: Rollout._on_attached,
    RankDetached: Rollout._on_detached,
    Received: Rollout._on_received,
    Start: Rollout._on_start,
    Cancel: Rollout._on_cancel,
    Persisted: Rollout._on_persisted,
    PersistFailed: Rollout._on_persist_failed,
    Fenced: Rollout._on_fenced,
    Tick: Rollout._on_tick,
}

_ON_MESSAGE: Mapping[type, Callable[[Rollout, Any, float], None]] = {
    Live: Rollout._on_live,
    Pulse: Rollout._on_pulse,
    **dict.fromkeys(get_args(ChunkAnswer), Rollout._on_answer),
}
"""From ranks of the group."""
