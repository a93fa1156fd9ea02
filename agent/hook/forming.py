"""How the hooks of a group that forms again agree: what they tell one another over its store, in which order, and by when.

    1. how each comes: from the group that was, or with empty slots
    2. where those that were in it stand (`regroup.Account`), from which each decides the same (`regroup.agree`)
    3. that each has done what was decided: whoever had to flip a chunk flipped it
    4. from one of them the map, for those that join and, under weighted dispatch, for all; and the checksums of all experts

Nothing of a rank's memory changes in here: it is tried again, with any other ranks, from where the rank stands by then.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agent.engine.port import EngineDescription
from agent.hook import rendezvous
from agent.hook.chunk import ChunkMachine
from agent.hook.loaded_check import KnownExperts
from agent.hook.reform import NotServed, Standing
from agent.hook.regroup import Account, Agreement, LiveRows, Regrouping, account_of, agree, live_after
from agent.hook.stage_check import LayerShape
from agent.transfer.gloo import Store, first_line, said_by
from eplb_service.control import LiveLayer
from eplb_service.errors import ConflictError, DeadlineError, EnvironmentFault
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, GroupId, LayerRef, RankId


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank that was in a group is: its machine, its engine standing still, and how many formings led there."""

    machine: ChunkMachine
    formings: int


class Forming:
    """One try of one rank to form a group. place: where it was; None = it joins.

    Every method raises DeadlineError naming the rank that did not come in time, or did not come as far.
    """

    def __init__(self, description: EngineDescription, place: Place | None, *, timeout_s: float) -> None:
        self._description, self._place, self._timeout_s = description, place, timeout_s
        self._regrouping: Regrouping | None = None
        self._agreement: Agreement | None = None
        self._told: set[str] = set()
        self.store: Store = rendezvous.open_store(description, timeout_s)

    def agree(self, vote_period: int) -> Agreement:
        """What all ranks do. Raises EnvironmentFault when none of them may serve on, with the reason."""
        joining = self._joining()
        place, group = self._place, self._description.group_rank_ids
        mine: dict[str, Any] | None = None
        if place is not None:
            self._regrouping = Regrouping(before=place.machine.shape.group_rank_ids, after=group, joining=joining)
            mine = asdict(account_of(place.machine, self._regrouping, formings=place.formings))
        told = self._exchange("stands", json.dumps(mine))
        accounts = {rank: _account_from(json.loads(said)) for rank, said in told.items() if rank not in joining}
        agreement = agree(accounts, group, vote_period=vote_period)
        if isinstance(agreement, NotServed):
            raise EnvironmentFault(f"no rank of group {self._description.address.group_id:#x} may serve: {agreement.reason}")
        self._agreement = agreement
        return agreement

    def done(self, problem: str) -> None:
        """This rank did what was decided, or could not. Raises EnvironmentFault when any rank could not."""
        told = self._exchange("done", problem)
        problems = [f"rank {rank}: {said}" for rank, said in told.items() if said]
        if problems:
            raise EnvironmentFault(f"the group did not form again ({'; '.join(problems)})")

    def live(self, layers: Mapping[LayerRef, LayerShape], *, weighted: bool) -> LiveRows:
        """What all layers are routed by in the new group, the same on all ranks."""
        guide = self._agreed.guide
        mine: LiveRows | None = None
        if self._place is not None and self._regrouping is not None:
            mine = live_after(self._place.machine.live, layers, self._regrouping)
        if guide == self._me and mine is not None:
            self._say("map", json.dumps([_layer_to(layer) for layer in mine.values()]))
        if mine is not None and (guide == self._me or not weighted):
            return mine
        theirs = {layer.layer: layer for layer in map(_layer_from, json.loads(self._said("map", guide)))}
        if theirs.keys() != layers.keys():
            raise ConflictError(
                f"rank {guide} routes {len(theirs)} layers, this rank serves {len(layers)}, or other ones: not of one model"
            )
        return {layer: theirs[layer] for layer in layers}

    def known(self, mine: KnownExperts) -> KnownExperts:
        """The checksums of all experts, from the first rank that has them; mine: what this rank has, for its weights now."""
        told = self._exchange("knows", json.dumps([mine.weights_version, mine.digest]))
        having = {rank: json.loads(told[rank]) for rank in self._description.group_rank_ids if json.loads(told[rank])[1]}
        if not having:
            return mine
        teller, (version, digest) = next(iter(having.items()))
        if teller == self._me:
            self._say("known", mine.to_json())
        if mine.digest == digest or mine.weights_version != version:
            return mine
        return KnownExperts.from_json(self._said("known", teller))

    def give_up(self, why: str) -> None:
        """Tell the others what this rank has not told them yet: that it fails, and why. They need not wait for it."""
        with contextlib.suppress(DeadlineError):  # the rendezvous is gone: nobody can be told
            for topic in [topic for topic in _MISSING if topic not in self._told]:
                self._say(topic, f"{_FAILED}{why}")

    @contextlib.contextmanager
    def telling_of_failure(self) -> Iterator[None]:
        """Where the block fails, the others are told so, rather than wait for this rank."""
        try:
            yield
        except Exception as error:
            self.give_up(first_line(error))
            raise

    # ── small parts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _me(self) -> RankId:
        return self._description.address.rank_id

    @property
    def _agreed(self) -> Agreement:
        if self._agreement is None:
            raise ConflictError("ranks agree before they do anything else")
        return self._agreement

    def _joining(self) -> frozenset[RankId]:
        told = self._exchange("comes", rendezvous.JOINS if self._place is None else rendezvous.STAYS)
        loaded = sorted(rank for rank, how in told.items() if how == rendezvous.LOADED)
        if loaded:
            raise EnvironmentFault(
                f"rank {', '.join(map(str, loaded))} starts with experts that it loaded, in a group that serves: start it"
                " with empty slots, as one that joins (EngineDescription.joins)"
            )
        return frozenset(rank for rank, how in told.items() if how == rendezvous.JOINS)

    def _exchange(self, topic: str, mine: str) -> dict[RankId, str]:
        """What every rank says of a topic."""
        self._say(topic, mine)
        return {rank: self._said(topic, rank) for rank in self._description.group_rank_ids}

    def _say(self, topic: str, text: str) -> None:
        self._told.add(topic)
        try:
            self.store.set(f"{topic}/{self._me}", text)
        except RuntimeError as error:
            raise DeadlineError(self._lost(first_line(error))) from error

    def _said(self, topic: str, rank: RankId) -> str:
        host = self._description.group_rank_ids[0]
        silent = (
            f"rank {rank} {_MISSING[topic]} within {self._timeout_s:g} s, or the rendezvous of rank {host} ended:"
            " form the group again"
        )
        said = said_by(self.store, f"{topic}/{rank}", self._timeout_s, silent)
        if said.startswith(_FAILED):
            raise EnvironmentFault(f"rank {rank} failed: {said.removeprefix(_FAILED)}")
        return said

    def _lost(self, why: str) -> str:
        return f"the rendezvous that rank {self._description.group_rank_ids[0]} hosts ended ({why}): form the group again"


_FAILED = "!"
_MISSING = {
    "comes": "did not come to the group that forms again",
    "stands": "did not say where it stands",
    "done": "did not do what the ranks decided",
    "map": "did not say what layers are routed by",
    "knows": "did not say what it knows of the experts' checksums",
    "known": "did not say what the experts' checksums are",
}
"""What a rank did not do, by topic."""


def _account_from(said: dict[str, Any]) -> Account:
    standing = said["standing"]
    plain = {"flipped_id": ChunkId(standing["flipped_id"]), "cast_id": ChunkId(standing["cast_id"])}
    return Account(
        standing=Standing(**{**standing, **plain, "rank_id": RankId(standing["rank_id"])}),
        group_id=GroupId(said["group_id"]),
        group_rank_ids=tuple(RankId(rank) for rank in said["group_rank_ids"]),
        formings=said["formings"],
        closed_id=ChunkId(said["closed_id"]),
        epoch_seen=Epoch(said["epoch_seen"]),
        generation_seen=GenerationNumber(said["generation_seen"]),
    )


def _layer_to(live: LiveLayer) -> list[Any]:
    return [live.layer.model, live.layer.layer_id, live.generation, live.digest, live.row, live.shares]


def _layer_from(said: list[Any]) -> LiveLayer:
    model, layer_id, generation, digest, row, shares = said
    return LiveLayer(
        layer=LayerRef(model, layer_id),
        generation=GenerationNumber(generation),
        digest=digest,
        row=tuple(row),
        shares=None if shares is None else tuple(shares),
    )
