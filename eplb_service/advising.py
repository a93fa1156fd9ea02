"""What a question of an engine that moves its own weights says about it, and what the planner goes by between questions.

The planner cannot look into such an engine: all that it knows is the map that each question comes with. So a generation is
live when the engine shows its map, never because it was told to go there.

    question comes with …                 it means
    the first map, or of another asker    FIRST     taken up as it is: generation 0
    the advised map                       FOLLOWED  that generation is live (also one that was given up before)
    the live map, nothing was advised     SAME
    the live map, or one half way to      UNDERWAY  it is told again; progress buys one more interval
      the advised one                     IGNORED   after PATIENCE intervals without progress: given up
    any other map                         OTHER     the engine restarted, or moved by itself: generation 0
    a sequence number seen before         REPEATED  the last answer again; LATE for an older one
    an origin that another one followed   RIVAL     two engines ask under one name

`look` is a pure function from state and question to the next state; numbers, maps and reasons are values.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.advice import AdviceRequest
from eplb_service.errors import InvalidInputError
from eplb_service.generation import LiveMap, as_loaded
from eplb_service.ids import GenerationNumber, RankId
from eplb_service.placement import Int32Array, Placement, Table

PATIENCE = 2
"""Questions without progress after which an engine is taken not to follow: the first may have been asked while it moved."""

REST_QUESTIONS = 4
REST_QUESTIONS_MAX = 64
"""Questions answered keep after an engine did not follow, doubled each time: whatever stops it, it is not asked to try on."""

ORIGINS_KEPT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """What an engine says of itself with each question; another one is taken up anew. See `advice.AdviceRequest`.

    num_slots: P.
    """

    model: str
    layer_ids: tuple[int, ...]
    rank_ids: tuple[int, ...]
    nodes: tuple[str, ...]
    num_logical: int
    num_slots: int
    dispatch: str
    num_groups: int
    expert_bytes: tuple[int, ...]

    @classmethod
    def of(cls, request: AdviceRequest) -> Asker:
        """Who asks."""
        same = {part.name: getattr(request, part.name) for part in dataclasses.fields(cls) if part.name != "num_slots"}
        return cls(num_slots=int(request.current.shape[1]), **same)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Asker:
        """What `dataclasses.asdict` and JSON made of one. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            model=str(tree["model"]),
            layer_ids=tuple(map(int, tree["layer_ids"])),
            rank_ids=tuple(map(int, tree["rank_ids"])),
            nodes=tuple(map(str, tree["nodes"])),
            num_logical=int(tree["num_logical"]),
            num_slots=int(tree["num_slots"]),
            dispatch=str(tree["dispatch"]),
            num_groups=int(tree["num_groups"]),
            expert_bytes=tuple(map(int, tree["expert_bytes"])),
        )

    @property
    def identity(self) -> int:
        """63 bits that tell askers apart, never 0."""
        told = hashlib.blake2b(repr(dataclasses.astuple(self)).encode(), digest_size=8).digest()
        return (int.from_bytes(told, "little") & (1 << 63) - 1) or 1

    def placement(self, rows: npt.NDArray[np.integer[Any]]) -> Placement:
        """Rows, shape (L, P), as a placement of this engine. Raises InvalidInputError when they are none."""
        ranks = tuple(RankId(rank) for rank in self.rank_ids)
        return Placement((Table(self.model, self.layer_ids, self.num_logical, ranks, rows.astype(np.int32)),))

    def fits(self, placement: Placement) -> bool:
        """Whether a placement is one of this engine."""
        if len(placement.tables) != 1:
            return False
        table = placement.tables[0]
        mine = (self.model, self.layer_ids, self.num_logical, self.rank_ids, self.num_slots)
        return mine == (table.model, table.layer_ids, table.num_logical, table.rank_ids, table.num_physical)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """What `look` needs of one. rows: shape (L, P), int32. at_s: when it came, wall clock."""

    asker: Asker
    origin: int
    sequence: int
    rows: Int32Array
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Told:
    """A generation that the engine is to go to.

    rows: shape (L, P), int32. times: answers that named it, 0 = published and not told yet. at_s: of the first of them, wall
    clock. missed: questions in a row that showed no progress towards it. arrived: layers that route by it already.
    """

    generation: GenerationNumber
    rows: Int32Array
    times: int = 0
    at_s: float = 0.0
    missed: int = 0
    arrived: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineState:
    """What is known of an advised engine.

    live: as its last question showed it. told: what it is to go to; lapsed: the last one that was given up.
    origin, sequence: of the last question; 0 = none in this life of the planner. rivals: origins that others followed.
    unfollowed: generations in a row that it did not follow; rest: questions still to be answered keep because of that.
    """

    asker: Asker
    live: LiveMap
    told: Told | None = None
    lapsed: Told | None = None
    origin: int = 0
    sequence: int = 0
    rivals: tuple[int, ...] = ()
    unfollowed: int = 0
    rest: int = 0

    @property
    def rows(self) -> Int32Array:
        """The live map, shape (L, P)."""
        return self.live.placement.tables[0].physical_to_logical


class Sight(Enum):
    """What a question shows; see the module."""

    FIRST = "first"
    SAME = "same"
    FOLLOWED = "followed"
    UNDERWAY = "underway"
    IGNORED = "ignored"
    OTHER = "other"
    REPEATED = "repeated"
    LATE = "late"
    RIVAL = "rival"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Look:
    """The answer of `look`. state: the next one. reason: one sentence, empty when there is nothing to tell.

    active: the generation that the engine showed now. stopped: one that ends here without having been shown whole.
    seconds: from its advice to this question, 0 = not known: the engine may have moved any time in between.
    """

    sight: Sight
    state: EngineState
    reason: str = ""
    active: GenerationNumber | None = None
    stopped: GenerationNumber | None = None
    seconds: float = 0.0


def look(state: EngineState | None, question: Question) -> Look:
    """What a question shows. Raises InvalidInputError for rows that are no map of the asker."""
    if state is None:
        return Look(sight=Sight.FIRST, state=_anew(question, ()))
    if question.origin == state.origin and question.sequence <= state.sequence:
        sight = Sight.REPEATED if question.sequence == state.sequence else Sight.LATE
        return Look(sight=sight, state=state, reason=f"question {question.sequence} came after {state.sequence} was answered")
    if question.origin in state.rivals:
        return Look(
            sight=Sight.RIVAL,
            state=state,
            reason="another process asks for this deployment by now: give each engine, and each of its stages, its own name",
        )
    restarted = state.origin not in (0, question.origin)
    rivals = (*state.rivals, state.origin)[-ORIGINS_KEPT:] if restarted else state.rivals
    if state.asker != question.asker:
        return _taken_up(state, question, rivals)
    state = dataclasses.replace(state, origin=question.origin, sequence=question.sequence, rivals=rivals)
    for aim in (state.told, state.lapsed):
        if aim is not None and np.array_equal(question.rows, aim.rows):
            return _followed(state, aim, question)
    if np.array_equal(question.rows, state.rows) or (
        state.told is not None and state.told.times and bool(_from_either(state, question.rows).all())
    ):
        return _on_the_way(state, question)
    return _other(state, question, restarted=restarted)


def publish(state: EngineState, generation: GenerationNumber, rows: Int32Array) -> EngineState:
    """A generation was stored: the engine is to go there. Nothing else may be under way (`give_up`)."""
    if state.told is not None:
        raise InvalidInputError(f"generation {state.told.generation} is under way: give it up before {generation}")
    return dataclasses.replace(state, told=Told(generation=generation, rows=rows), rest=0)


def answered(state: EngineState, at_s: float) -> EngineState:
    """The generation under way was named in an answer."""
    told = state.told
    if told is None:
        raise InvalidInputError("nothing is under way that an answer could name")
    told = dataclasses.replace(told, times=told.times + 1, at_s=told.at_s if told.times else at_s)
    return dataclasses.replace(state, told=told)


def give_up(state: EngineState) -> EngineState:
    """What is under way is not told again. Should the engine show it all the same, it counts."""
    return dataclasses.replace(state, told=None, lapsed=state.told or state.lapsed)


def rested(state: EngineState) -> EngineState:
    """One more question was answered keep because an engine did not follow."""
    return dataclasses.replace(state, rest=max(0, state.rest - 1))


def _anew(question: Question, rivals: tuple[int, ...]) -> EngineState:
    return EngineState(
        asker=question.asker,
        live=as_loaded(question.asker.placement(question.rows)),
        origin=question.origin,
        sequence=question.sequence,
        rivals=rivals,
    )


def _taken_up(state: EngineState, question: Question, rivals: tuple[int, ...]) -> Look:
    mine, theirs = state.asker, question.asker
    changed = [part.name for part in dataclasses.fields(Asker) if getattr(mine, part.name) != getattr(theirs, part.name)]
    return Look(
        sight=Sight.FIRST,
        state=_anew(question, rivals),
        reason=f"the engine has another {' and '.join(changed)} than before: it is taken up anew, as generation 0",
        stopped=state.told.generation if state.told is not None else None,
    )


def _followed(state: EngineState, aim: Told, question: Question) -> Look:
    table = state.live.placement.tables[0]
    rows = dict(zip(table.layers, aim.rows, strict=True))
    took_s = max(0.0, question.at_s - aim.at_s) if aim.times else 0.0
    what = f"the engine shows generation {aim.generation}"
    # One that was given up may be shown while a later one waits: that one stays.
    told = None if aim is state.told else state.told
    return Look(
        sight=Sight.FOLLOWED,
        state=dataclasses.replace(
            state, live=state.live.with_rows(rows, aim.generation), told=told, lapsed=None, unfollowed=0, rest=0
        ),
        reason=f"{what}, {took_s:.0f} s after it was told" if aim.times else what,
        active=aim.generation,
        seconds=took_s,
    )


def _from_either(state: EngineState, rows: Int32Array) -> npt.NDArray[np.bool_]:
    """Whether each layer routes as before, or as it was told. Shape (L,)."""
    told = state.told
    before: npt.NDArray[np.bool_] = (rows == state.rows).all(axis=1)
    return before if told is None else before | (rows == told.rows).all(axis=1)


def _on_the_way(state: EngineState, question: Question) -> Look:
    """The live map, or one between it and the one that was told."""
    told = state.told
    if told is None or not told.times:
        return Look(sight=Sight.SAME, state=state)
    there = (question.rows == told.rows).all(axis=1)
    moved = (question.rows != state.rows).any(axis=1)
    table = state.live.placement.tables[0]
    rows = {layer: row for layer, row, now in zip(table.layers, question.rows, moved.tolist(), strict=True) if now}
    live = state.live.with_rows(rows, told.generation) if rows else state.live
    arrived = int(there.sum())
    missed = 0 if arrived > told.arrived and rows else told.missed + 1
    told = dataclasses.replace(told, missed=missed, arrived=max(arrived, told.arrived))
    where = (
        f"{arrived} of {there.size} layers route by generation {told.generation}"
        if rows or told.arrived
        else (f"the engine does not show generation {told.generation} yet")
    )
    if missed < PATIENCE:
        return Look(sight=Sight.UNDERWAY, state=dataclasses.replace(state, live=live, told=told), reason=where)
    unfollowed = state.unfollowed + 1
    rest = min(REST_QUESTIONS_MAX, REST_QUESTIONS << min(unfollowed - 1, 8))
    return Look(
        sight=Sight.IGNORED,
        state=dataclasses.replace(state, live=live, told=None, lapsed=told, unfollowed=unfollowed, rest=rest),
        reason=(
            f"the engine did not follow: it was told {told.times} times to go to generation {told.generation}, and"
            f" {missed} questions showed no progress"
        ),
        stopped=told.generation,
        seconds=max(0.0, question.at_s - told.at_s),
    )


def _other(state: EngineState, question: Question, *, restarted: bool) -> Look:
    differing = int((question.rows != state.rows).any(axis=1).sum())
    layers = f"{differing} of {question.rows.shape[0]} layers are other than generation {state.live.newest_generation}"
    what = "the engine restarted" if restarted else "the engine moved by itself"
    # What an operator asked for, and the engine was not told yet, stays.
    kept = state.told if state.told is not None and not state.told.times else None
    stopped = state.told.generation if state.told is not None and kept is None else None
    return Look(
        sight=Sight.OTHER,
        state=dataclasses.replace(
            state,
            live=as_loaded(question.asker.placement(question.rows)),
            told=kept,
            lapsed=None if kept is not None else state.told or state.lapsed,
            rest=0,
            unfollowed=0,
        ),
        reason=f"{what}: {layers}; its map is taken up as generation 0",
        stopped=stopped,
    )
