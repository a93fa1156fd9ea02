"""Rules of the protocol that can be switched off one by one: the checkers must see what each of them prevents.

Each has a script among `tests/scenarios` that holds with the rule and shows the violation without it, and is found again by
search: seeds are run with the rule off until one fails. A rule whose loss nothing shows is either not needed or not checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from unittest.mock import patch

from agent.hook import ballot, chunk, regroup
from agent.hook import chunk_events as hook
from agent.hook.chunk import ChunkMachine
from agent.hook.chunk_ledger import Ledger
from agent.hook.reform import NotServed, Reformed, Standing, decide
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
from tests.sim import forming, planner, staging
from tests.sim.minimise import failure_of
from tests.sim.profile import Fixed
from tests.sim.run import Run

Patches = Sequence[tuple[object, str, object]]


@dataclass(frozen=True)
class Mutation:
    """One rule, switched off. rule: what is lost. patches: (owner, attribute, replacement).

    focus: what a search for its violation does not leave to the seeds: the surroundings that the rule is about (`profile.py`).
    """

    rule: str
    patches: Callable[[], Patches]
    focus: Fixed = field(default_factory=dict)

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
    """The first seed that fails, by a violation and not by an error of what took the rule's place.

    Nothing is scripted: the rule is off, and random courses of its surroundings are run under the checkers of every run. The
    same seed must hold with the rule on.
    """
    for seed in seeds:
        with mutation.patched():
            violation = failure_of(Run(seed, fixed=mutation.focus))
        if violation is not None and violation.__cause__ is None and failure_of(Run(seed, fixed=mutation.focus)) is None:
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


# ── a group that forms again ─────────────────────────────────────────────────────────────────────────────────────────────


def _flips_are_not_finished() -> Patches:
    real = decide

    def forgetful(standings: Sequence[Standing], *, vote_period: int) -> Reformed | NotServed:
        decided = real(standings, vote_period=vote_period)
        return dataclasses.replace(decided, flips=frozenset()) if isinstance(decided, Reformed) else decided

    return [(regroup, "decide", forgetful)]


def _stale_staging_is_flipped() -> Patches:
    real_decide, real_formed = decide, ChunkMachine._on_group_formed

    def blind(standings: Sequence[Standing], *, vote_period: int) -> Reformed | NotServed:
        return real_decide([dataclasses.replace(one, can_flip=True) for one in standings], vote_period=vote_period)

    def eager(self: ChunkMachine, event: hook.GroupFormed, now: float) -> None:
        self._stale_weights = False
        real_formed(self, event, now)

    return [(regroup, "decide", blind), (chunk._ACTIONS, hook.GroupFormed, eager)]  # type: ignore[list-item]


def _staging_goes_with_the_group() -> Patches:
    real = ChunkMachine._on_group_ended

    def hasty(self: ChunkMachine, event: hook.GroupEnded, now: float) -> None:
        real(self, event, now)
        if self._state is hook.ChunkState.UNRESOLVED:
            self._out.append(hook.ReleaseStaging(self.open_id))

    return [(chunk._ACTIONS, hook.GroupEnded, hasty)]  # type: ignore[list-item]


def _forgets(**numbers: int) -> Callable[[], Patches]:
    def patches() -> Patches:
        real = regroup.ledger_after

        def forgetful(*arguments: Any, **named: Any) -> Ledger:
            ledger = real(*arguments, **named)
            for name, number in numbers.items():
                setattr(ledger, name, number)
            return ledger

        return [(regroup, "ledger_after", forgetful)]

    return patches


def _boundaries_are_not_agreed() -> Patches:
    return [(forming, "boundary_of", lambda agreement, rank: rank.boundary)]


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


_SURE_COPIES: Fixed = {"fail_share": 0.0, "corrupt_share": 0.0, "memory_share": 0.0, "slow_copy_share": 0.0}
_OLD_MESSAGES: Fixed = {
    **_SURE_COPIES,
    "num_ranks": 2,
    "drop_share": 0.0,
    "repeat_share": 0.8,
    "repeats": 6,
    "repeat_s": 6.0,
    "is_through_agents": False,
}
"""Two ranks, and a network that brings messages again and again for long, past everything that keeps planners apart."""
_CRASHES: Fixed = {
    **_OLD_MESSAGES,
    "kinds": ("rank crashes", "rank crashes in a vote"),
    "num_incidents": 7,
    "restart_s": (0.02, 0.1),
}
_TWO_COPIES: Fixed = {
    "num_ranks": 2,
    "fail_share": 0.4,
    "slow_copy_share": 0.5,
    "corrupt_share": 0.0,
    "memory_share": 0.0,
    "stage_timeout_s": 4.0,
    "plan_s": 0.3,
}
"""Copies of which one fails early and the other takes long."""
_TWO_LEADERS: Fixed = {**_SURE_COPIES, "num_ranks": 2, "num_incidents": 6, "cancel_share": 0.0, "is_through_agents": False}
_FORMINGS: Fixed = {
    **_SURE_COPIES,
    "can_reform": True,
    "has_backups": True,
    "kinds": ("rank crashes in a vote", "ranks stopped in a vote", "several ranks crash in a vote", "reloads"),
    "num_incidents": 7,
    "restart_s": (0.05, 0.3),
    "plan_s": 0.3,
}

MUTATIONS: dict[str, Mutation] = {
    "one id is enough": Mutation("a vote passes only when every rank cast the id", _one_id_is_enough),
    "unknown is no": Mutation("a rank that cannot know how its vote ended runs no further step", _unknown_is_no),
    "flip when known": Mutation("a passed chunk flips at the boundary of the next vote", _flip_when_known),
    "disarmed during a vote": Mutation("Disarmed is said only after a vote already cast is resolved", _disarmed_during_vote),
    "no tombstone": Mutation(
        "a closed id is never staged or armed again",
        _no_tombstone,
        {
            **_OLD_MESSAGES,
            "kinds": ("planners cut off",),
            "faulty_messages": ("Arm", "Stage"),
            "cancel_share": 0.8,
            "plan_s": 4.0,
        },
    ),
    "obeys older epochs": Mutation(
        "a chunk of an epoch below the highest seen is refused",
        _obeys_older_epochs,
        {
            **_TWO_LEADERS,
            "kinds": ("take-overs",),
            "faulty_messages": ("Live", "Stage"),
            "drop_share": 0.3,
            "repeat_share": 0.0,
            "slow_share": 0.5,
            "slow_s": 3.0,
        },
    ),
    "replies with an open chunk": Mutation("Hello is answered only while no chunk is open", _replies_with_an_open_chunk),
    "messages of another life": Mutation(
        "what is addressed to another life or group is dropped",
        _message_of_another_life,
        {**_CRASHES, "faulty_messages": ("Arm", "Stage"), "cancel_share": 0.0, "plan_s": 2.0},
    ),
    "busy is ignored": Mutation(
        "one open chunk on a rank",
        _busy_is_ignored,
        {**_TWO_COPIES, "num_incidents": 0, "faulty_messages": ("Disarm",), "drop_share": 0.5, "repeat_share": 0.0},
    ),
    "staging is not quiesced": Mutation(
        "staging is used again only after a cancelled copy ended",
        _staging_is_not_quiesced,
        {**_TWO_COPIES, "num_incidents": 0, "drop_share": 0.0, "quiesce_s": 3.0},
    ),
    "old rows are not compared": Mutation(
        "a chunk starts from the row that the rank routes by",
        _old_rows_are_not_compared,
        {
            **_TWO_LEADERS,
            "kinds": ("store and rank lost, the leader deaf",),
            "drop_share": 0.0,
            "repeat_share": 0.0,
            "slow_share": 0.0,
            "restart_s": (0.02, 0.1),
            "can_reform": False,
            "lease_s": 6.0,
            "plan_s": 1.5,
        },
    ),
    "weights may change": Mutation("a new weights version closes what is staged or armed", _weights_may_change),
    "no checksums": Mutation("what was copied is compared with what was sent", _no_checksums),
    "one flip for all": Mutation("a chunk is done when every rank said Flipped", _one_flip_for_all),
    "silence is a withdrawal": Mutation("a chunk is given up only with a proof that it never flips", _silence_is_a_withdrawal),
    "first reply counts": Mutation(
        "the live map is what all ranks reply", _first_reply_counts, {"kinds": ("planners killed", "take-overs")}
    ),
    "answers of another group": Mutation(
        "the planner drops what another life or group says",
        _answers_of_another_group,
        {**_CRASHES, "faulty_messages": ("Live",), "plan_s": 0.3},
    ),
    "sends before the store has it": Mutation("persist before send", _sends_before_the_store_has_it),
    "numbers of the store alone": Mutation("the next generation is 1 + max(store, all ranks)", _numbers_of_the_store_alone),
    "all leaders count from one": Mutation(
        "chunk ids begin at random within an epoch",
        _all_leaders_count_from_one,
        {"kinds": ("leaders of one epoch", "stores lost", "take-overs"), "num_incidents": 7},
    ),
    "publishing overwrites": Mutation(
        "a generation is published only where there is none",
        _publishing_overwrites,
        {"kinds": ("leaders of one epoch", "stores lost", "take-overs"), "num_incidents": 7},
    ),
    "flips are not finished": Mutation(
        "as a group forms again, a chunk that one rank flipped is flipped by all that voted for it",
        _flips_are_not_finished,
        _FORMINGS,
    ),
    "stale staging is flipped": Mutation(
        "as a group forms again, nothing is flipped that was staged of other weights", _stale_staging_is_flipped, _FORMINGS
    ),
    "staging goes with the group": Mutation(
        "what was voted for stays in staging until the group formed again", _staging_goes_with_the_group, _FORMINGS
    ),
    "tombstone is not carried over": Mutation(
        "ids that are closed stay closed in the next group", _forgets(closed_id=0), _FORMINGS
    ),
    "numbers are not carried over": Mutation(
        "a rank knows the highest epoch and generation in the next group too",
        _forgets(epoch_seen=0, generation_seen=0),
        _FORMINGS,
    ),
    "boundaries are not agreed": Mutation(
        "all ranks of a group that formed again go on at one boundary", _boundaries_are_not_agreed, _FORMINGS
    ),
}
"""By name; docs/consistency.md lists them."""
