"""Rules of the protocol that can be switched off one by one: the checkers must see what each of them prevents.

Each has a script among `tests/scenarios` that holds with the rule and shows the violation without it, and is found again by
search: seeds are run with the rule off until one fails. A rule whose loss nothing shows is either not needed or not checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any
from unittest.mock import patch

from agent.hook import ballot, chunk
from agent.hook import chunk_events as hook
from agent.hook.chunk import ChunkMachine
from agent.hook.chunk_ledger import Ledger
from agent.hook.stage_check import check_stage
from eplb_service.control import Disarm, Disarmed, Flipped, Live, RefusalCode
from eplb_service.generation import AS_LOADED, LiveMap
from eplb_service.ids import ChunkId
from eplb_service.rollout import machine, open_chunk
from eplb_service.rollout.events import Effect, RolloutState
from eplb_service.rollout.live_replies import LiveReplies
from eplb_service.rollout.machine import Rollout
from eplb_service.rollout.open_chunk import FlippedEverywhere, NeverFlips, OpenChunk
from eplb_service.rollout.run import Run as RolloutRun
from eplb_service.store.base import Write
from eplb_service.store.memory import DeploymentState
from tests.sim import planner, staging
from tests.sim.minimise import failure_of
from tests.sim.run import Run

Patches = Sequence[tuple[object, str, object]]


@dataclass(frozen=True)
class Mutation:
    """One rule, switched off. rule: what is lost. patches: (owner, attribute, replacement).

    kinds: faults that a search looks at; empty = all, as in any run.
    """

    rule: str
    patches: Callable[[], Patches]
    kinds: tuple[str, ...] = ()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """While this lasts, the rule is off, and with it the tables of transitions: checkers must see what comes of it."""
        tables: Patches = [
            (chunk, "TRANSITIONS", _anything(hook.ChunkState)),
            (machine, "TRANSITIONS", _anything(RolloutState)),
        ]
        with ExitStack() as stack:
            for owner, name, replacement in [*tables, *self.patches()]:
                if isinstance(owner, dict):
                    stack.enter_context(patch.dict(owner, {name: replacement}))
                else:
                    stack.enter_context(patch.object(owner, name, replacement))
            yield


def _anything(states: type[Enum]) -> dict[Enum, dict[Enum, str]]:
    return {state: dict.fromkeys(states, "") for state in states}


@dataclass(frozen=True)
class Found:
    """A seed that fails with a rule off."""

    seed: int
    reason: str


def search(mutation: Mutation, seeds: range) -> Found | None:
    """The first seed that fails, by a violation and not by an error of what took the rule's place."""
    with mutation.patched():
        for seed in seeds:
            violation = failure_of(Run(seed, kinds=mutation.kinds))
            if violation is not None and violation.__cause__ is None:
                return Found(seed, str(violation).partition("\n")[0][:160])
    return None


# ── the vote ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _one_id_is_enough() -> Patches:
    def read(minimum: Sequence[int], *, boundary: int, chunk: ChunkId) -> tuple[hook.Outcome, str]:
        low, negative_high, _, negative_high_id = minimum
        if low != -negative_high:
            return hook.Outcome.DIVERGED, ""
        return (hook.Outcome.PASSED if -negative_high_id == chunk != hook.NO_CHUNK else hook.Outcome.FAILED), ""

    return [(ballot, "read_ballot", read)]


def _unknown_is_no() -> Patches:
    real = ChunkMachine._on_vote_resolved

    def rash(self: ChunkMachine, event: hook.VoteResolved, now: float) -> None:
        if event.outcome is hook.Outcome.UNKNOWN:
            event = dataclasses.replace(event, outcome=hook.Outcome.FAILED)
        real(self, event, now)

    return [(chunk._ACTIONS, hook.VoteResolved, rash)]  # type: ignore[list-item]


def _flip_when_known() -> Patches:
    real = ChunkMachine._on_vote_resolved

    def eager(self: ChunkMachine, event: hook.VoteResolved, now: float) -> None:
        real(self, event, now)
        if self._state is hook.ChunkState.COMMITTED:
            self._on_flip_due(hook.FlipDue(self._ledger.boundary), now)

    return [(chunk._ACTIONS, hook.VoteResolved, eager)]  # type: ignore[list-item]


def _disarmed_during_vote() -> Patches:
    real = ChunkMachine._on_disarm

    def eager(self: ChunkMachine, disarm: Disarm) -> None:
        voting = self._state is hook.ChunkState.VOTING
        real(self, disarm)
        if voting:
            self._send(Disarmed(sender=self._address, chunk_id=disarm.chunk_id))

    return [(ChunkMachine, "_on_disarm", eager)]


# ── what a rank keeps ────────────────────────────────────────────────────────────────────────────────────────────────────


def _no_tombstone() -> Patches:
    return [(Ledger, "close", lambda self, chunk_id: None)]


def _obeys_older_epochs() -> Patches:
    return [(Ledger, "is_stale", lambda self, chunk_id: False)]


def _replies_with_an_open_chunk() -> Patches:
    def hasty(self: ChunkMachine) -> None:
        if self._hello is not None:
            said, self._hello = self._hello, None
            self._send(self._ledger.reply(said.epoch))

    return [(ChunkMachine, "_answer_hello", hasty)]


def _message_of_another_life() -> Patches:
    real = ChunkMachine._on_received

    def deaf(self: ChunkMachine, event: hook.Received, now: float) -> None:
        real(self, hook.Received(dataclasses.replace(event.message, to=self._address)), now)

    return [(chunk._ACTIONS, hook.Received, deaf)]  # type: ignore[list-item]


def _ignore_ends_of_others() -> tuple[object, str, object]:
    """A worker's end of a chunk that is not open any more says nothing, so that the mutated machine lives on."""
    real = ChunkMachine._on_staging_end

    def tolerant(self: ChunkMachine, event: hook.StagingDone | hook.StagingFailed, now: float) -> None:
        if event.chunk_id == self.open_id and self._state in (hook.ChunkState.STAGING, hook.ChunkState.QUIESCING):
            real(self, event, now)

    return (chunk._ACTIONS, hook.StagingDone, tolerant)  # type: ignore[return-value]


def _busy_is_ignored() -> Patches:
    real = ChunkMachine._on_stage

    def greedy(self: ChunkMachine, stage: Any, now: float) -> None:
        if self._state is hook.ChunkState.STAGING and stage.chunk_id > self.open_id:
            self._forget_open()
        real(self, stage, now)

    owner, key, tolerant = _ignore_ends_of_others()
    return [(ChunkMachine, "_on_stage", greedy), (owner, key, tolerant), (owner, hook.StagingFailed, tolerant)]  # type: ignore[list-item]


def _staging_is_not_quiesced() -> Patches:
    real = ChunkMachine._close

    def hasty(self: ChunkMachine, answers: Any) -> None:
        real(self, answers)
        if self._state is hook.ChunkState.QUIESCING:
            self._forget_open()

    owner, key, tolerant = _ignore_ends_of_others()
    return [(ChunkMachine, "_close", hasty), (owner, key, tolerant), (owner, hook.StagingFailed, tolerant)]  # type: ignore[list-item]


def _old_rows_are_not_compared() -> Patches:
    def lenient(*arguments: Any) -> Any:
        refusal = check_stage(*arguments)
        return None if refusal is not None and refusal[0] is RefusalCode.OLD_DIGEST else refusal

    return [(chunk, "check_stage", lenient)]


def _weights_may_change() -> Patches:
    def blind(self: ChunkMachine, event: hook.Boundary, now: float) -> None:
        self._ledger.boundary = event.boundary
        self._ledger.weights_version = event.weights_version
        self._expire(now)

    return [(chunk._ACTIONS, hook.Boundary, blind)]  # type: ignore[list-item]


def _no_checksums() -> Patches:
    return [(staging.StagingWorker, "_differs", lambda self, job: False)]


# ── the planner ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _one_flip_for_all() -> Patches:
    real = OpenChunk._on_flipped

    def hasty(self: OpenChunk, message: Flipped, now: float) -> None:
        real(self, message, now)
        if self.outcome is None:
            self.outcome = FlippedEverywhere(message.boundary)

    states = (RolloutState.ARMED, RolloutState.DISARMING)
    return [(open_chunk._ON_ANSWER, (Flipped, state), hasty) for state in states]  # type: ignore[misc]


def _silence_is_a_withdrawal() -> Patches:
    real = OpenChunk._withdraw

    def impatient(self: OpenChunk, reason: str, now: float) -> None:
        real(self, reason, now)
        self.outcome = NeverFlips(reason=reason)

    return [(OpenChunk, "_withdraw", impatient)]


def _first_reply_counts() -> Patches:
    real = LiveReplies.take

    def hasty(self: LiveReplies, live: Live, live_map: LiveMap, now: float) -> bool:
        for rank in self._group.rank_ids:
            self._replies.setdefault(rank, live_map)
        return real(self, live, live_map, now)

    return [(LiveReplies, "take", hasty)]


def _answers_of_another_group() -> Patches:
    def deaf(self: Rollout, address: Any) -> bool:
        return self._group is not None and address.rank_id in self._group.addresses

    return [(Rollout, "_is_of_group", deaf)]


def _sends_before_the_store_has_it() -> Patches:
    real = RolloutRun.begin

    def hasty(self: RolloutRun) -> list[Effect]:
        return [*self.persisted(self._token, self._started_s), *real(self)]

    return [(RolloutRun, "begin", hasty)]


def _numbers_of_the_store_alone() -> Patches:
    return [(Rollout, "generation_floor", property(lambda self: AS_LOADED))]


def _all_leaders_count_from_one() -> Patches:
    return [(planner, "first_sequence", lambda chance: 1)]


def _publishing_overwrites() -> Patches:
    real = DeploymentState.write

    def blind(self: DeploymentState, write: Write) -> dict[str, int]:
        return real(self, dataclasses.replace(write, expects={}))

    return [(DeploymentState, "write", blind)]


MUTATIONS: dict[str, Mutation] = {
    "one id is enough": Mutation("a vote passes only when every rank cast the id", _one_id_is_enough),
    "unknown is no": Mutation("a rank that cannot know how its vote ended runs no further step", _unknown_is_no),
    "flip when known": Mutation("a passed chunk flips at the boundary of the next vote", _flip_when_known),
    "disarmed during a vote": Mutation("Disarmed is said only after a vote already cast is resolved", _disarmed_during_vote),
    "no tombstone": Mutation(
        "a closed id is never staged or armed again", _no_tombstone, ("planners cut off", "streams broken")
    ),
    "obeys older epochs": Mutation(
        "a chunk of an epoch below the highest seen is refused", _obeys_older_epochs, ("take-overs",)
    ),
    "replies with an open chunk": Mutation("Hello is answered only while no chunk is open", _replies_with_an_open_chunk),
    "messages of another life": Mutation(
        "what is addressed to another life or group is dropped", _message_of_another_life, ("rank crashes",)
    ),
    "busy is ignored": Mutation("one open chunk on a rank", _busy_is_ignored, ("streams broken", "take-overs")),
    "staging is not quiesced": Mutation(
        "staging is used again only after a cancelled copy ended",
        _staging_is_not_quiesced,
        ("planners killed", "reloads", "take-overs"),
    ),
    "old rows are not compared": Mutation(
        "a chunk starts from the row that the rank routes by", _old_rows_are_not_compared, ("stores lost", "take-overs")
    ),
    "weights may change": Mutation("a new weights version closes what is staged or armed", _weights_may_change),
    "no checksums": Mutation("what was copied is compared with what was sent", _no_checksums),
    "one flip for all": Mutation("a chunk is done when every rank said Flipped", _one_flip_for_all),
    "silence is a withdrawal": Mutation("a chunk is given up only with a proof that it never flips", _silence_is_a_withdrawal),
    "first reply counts": Mutation(
        "the live map is what all ranks reply", _first_reply_counts, ("planners killed", "take-overs")
    ),
    "answers of another group": Mutation(
        "the planner drops what another life or group says", _answers_of_another_group, ("rank crashes", "streams broken")
    ),
    "sends before the store has it": Mutation("persist before send", _sends_before_the_store_has_it),
    "numbers of the store alone": Mutation("the next generation is 1 + max(store, all ranks)", _numbers_of_the_store_alone),
    "all leaders count from one": Mutation(
        "chunk ids begin at random within an epoch", _all_leaders_count_from_one, ("stores lost", "take-overs")
    ),
    "publishing overwrites": Mutation(
        "a generation is published only where there is none", _publishing_overwrites, ("stores lost", "take-overs")
    ),
}
"""By name; docs/consistency.md lists them."""
