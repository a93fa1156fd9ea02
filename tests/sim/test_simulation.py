"""The normal suite's share of the simulation: `python -m tests.sim --seeds 5000` runs more."""

from __future__ import annotations

from collections import Counter

import pytest

from agent.hook import chunk_events as hook
from agent.hook.chunk import ChunkMachine
from eplb_service.control import Disarm, Disarmed, Flipped, Live
from eplb_service.errors import EplbError
from eplb_service.generation import LiveMap
from eplb_service.rollout import open_chunk
from eplb_service.rollout.events import RolloutState
from eplb_service.rollout.live_replies import LiveReplies
from eplb_service.rollout.open_chunk import FlippedEverywhere, NeverFlips, OpenChunk
from tests.sim.run import Run
from tests.sim.world import ViolationError

NUM_SEEDS = 200


def held(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += Run(seed).go()
    return counts


def test_invariants_hold_and_everything_resolves_under_faults() -> None:
    counts = held(range(NUM_SEEDS))
    # what a run that never got anywhere would also "hold"
    assert counts["flips of ranks"] > 3 * NUM_SEEDS
    assert counts["finished active"] > NUM_SEEDS
    assert counts["live maps checked"] > NUM_SEEDS
    for happened in (
        "cancels",
        "chunk.aborted",
        "finished stopped",
        "continued",
        "idle spells",
        "messages lost",
        "outranked",
        "planners killed",
        "rank crashes",
        "reloads",
        "shares alone flipped",
        "stores lost",
        "streams broken",
        "take-overs",
    ):
        assert counts[happened] > NUM_SEEDS // 20, f"{happened}: {counts[happened]} in {NUM_SEEDS} seeds"


def test_a_seed_replays_to_the_same_trace() -> None:
    runs = [Run(11), Run(11)]
    for run in runs:
        run.go()
    assert list(runs[0].world.trace) == list(runs[1].world.trace)


def broken(seeds: range) -> str:
    """The first violation that a broken rule leads to; a mistake in the broken rule itself is none."""
    for seed in seeds:
        try:
            Run(seed).go()
        except ViolationError as violation:
            if not isinstance(violation.__cause__, ViolationError | EplbError):
                raise
            return str(violation)
    return ""


def test_a_planner_that_takes_one_flip_for_all_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OpenChunk._on_flipped

    def hasty(self: OpenChunk, message: Flipped, now: float) -> None:
        real(self, message, now)
        if self.outcome is None:
            self.outcome = FlippedEverywhere(message.boundary)

    for state in (RolloutState.ARMED, RolloutState.DISARMING):
        monkeypatch.setitem(open_chunk._ON_ANSWER, (Flipped, state), hasty)
    found = broken(range(60))
    assert "for live" in found or "invariant" in found
    assert "replay: python -m tests.sim --seed" in found


def test_a_planner_that_takes_silence_for_a_withdrawal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OpenChunk._withdraw

    def impatient(self: OpenChunk, reason: str, now: float) -> None:
        real(self, reason, now)
        self.outcome = NeverFlips(reason=reason)

    monkeypatch.setattr(OpenChunk, "_withdraw", impatient)
    assert broken(range(100))


def test_a_rank_that_flips_on_a_failed_vote_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ChunkMachine.handle

    def rash(self: ChunkMachine, event: hook.Event, now: float) -> list[hook.Effect]:
        if isinstance(event, hook.VoteResolved) and event.outcome is hook.Outcome.FAILED:
            event = hook.VoteResolved(event.chunk_id, hook.Outcome.PASSED)
        return real(self, event, now)

    monkeypatch.setattr(ChunkMachine, "handle", rash)
    found = broken(range(60))
    assert "invariant 1" in found or "answered Disarmed and flipped" in found


def test_a_rank_that_answers_disarmed_while_its_vote_is_open_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ChunkMachine.handle

    def eager(self: ChunkMachine, event: hook.Event, now: float) -> list[hook.Effect]:
        voting = self.state is hook.ChunkState.VOTING
        effects = real(self, event, now)
        if voting and isinstance(event, hook.Received) and isinstance(event.message, Disarm):
            effects.append(hook.Send(Disarmed(sender=event.message.to, chunk_id=event.message.chunk_id)))
        return effects

    monkeypatch.setattr(ChunkMachine, "handle", eager)
    found = broken(range(150))
    assert "answered Disarmed and flipped" in found or "flip_after_disarm" in found


def test_a_planner_that_adopts_the_first_reply_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LiveReplies.take

    def hasty(self: LiveReplies, live: Live, live_map: LiveMap, now: float) -> bool:
        for rank in self._group.rank_ids:
            self._replies.setdefault(rank, live_map)
        return real(self, live, live_map, now)

    monkeypatch.setattr(LiveReplies, "take", hasty)
    found = broken(range(200))
    assert "for live" in found
