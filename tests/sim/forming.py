"""A group of the simulated engine forms again: what its ranks tell one another, over a network with delays, and do then.

The decisions are the hook's own (`agent.hook.regroup`). In between any rank may die; a forming that did not end on all of its
ranks is given up, and another one begins from wherever each rank stands by then.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from agent.hook import chunk_events as hook
from agent.hook import regroup
from agent.hook.chunk import ChunkMachine
from agent.hook.reform import NotServed
from agent.hook.regroup import Account, Agreement, Regrouping
from eplb_service.control import Address
from eplb_service.ids import GroupId, RankId
from tests.empty_map import live_of_a_rank_that_joins
from tests.sim.model import Shape
from tests.sim.rank import Rank

if TYPE_CHECKING:
    from tests.sim.engine import Engine

TIMEOUT_S = 3.0
_BUSY_S = 0.05


class Forming:
    """One try. members: ranks of the new group, in column order; joining: those of them that come with empty slots."""

    def __init__(
        self, engine: Engine, members: list[Rank], joining: frozenset[RankId], shape: Shape, chance: random.Random
    ) -> None:
        self._engine, self.members, self._joining, self.shape = engine, members, joining, shape
        self._chance = chance
        self.group_id = GroupId(engine.group_id)
        self.is_over = False
        self._accounts: dict[Rank, dict[RankId, Account | None]] = {rank: {} for rank in members}
        self._agreed: dict[Rank, Agreement] = {}
        self._done: dict[Rank, set[RankId]] = {rank: set() for rank in members}
        self._map: dict[Rank, regroup.LiveRows] = {}

    @property
    def first_boundary(self) -> int:
        """Of the new group's first step, as far as a rank knows it by now."""
        return max((agreement.reformed.boundary for agreement in self._agreed.values()), default=0)

    def begin(self) -> None:
        """Every rank comes in its own time."""
        for rank in self.members:
            rank.is_forming = True
            self._soon(0.3, partial(self._come, rank), rank)
        self._engine.later(TIMEOUT_S, self._time_out)

    def _time_out(self) -> None:
        if not self.is_over and any(rank.is_forming for rank in self.members):
            self._engine.lose("the group did not form in time", 0.1)

    def _soon(self, longest_s: float, action: partial[None], rank: Rank) -> None:
        """Unless this try is over or the rank dead by then; a stopped rank does it when it goes on."""

        def act() -> None:
            if self.is_over or rank.is_dead:
                return
            if rank.is_stopped:
                self._engine.later(_BUSY_S, act)
            else:
                action()

        self._engine.later(0.002 + longest_s * self._chance.random(), act)

    # ── where ranks stand ────────────────────────────────────────────────────────────────────────────────────────────────

    def _come(self, rank: Rank) -> None:
        """Give up the votes of the group that was; once nothing is written any more, say where this rank stands."""
        account = None
        if rank.address.rank_id not in self._joining:
            self._engine.give_up_group(rank)
            if rank.machine.state is hook.ChunkState.FLIPPING or rank.worker.is_copying:
                self._soon(_BUSY_S, partial(self._come, rank), rank)
                return
            account = regroup.account_of(rank.machine, self._regrouping(rank), formings=rank.formings)
        for peer in self.members:
            self._soon(0.3, partial(self._hear, peer, rank.address.rank_id, account), peer)

    def _regrouping(self, rank: Rank) -> Regrouping:
        return Regrouping(before=rank.machine.shape.group_rank_ids, after=self.shape.rank_ids, joining=self._joining)

    def _hear(self, rank: Rank, teller: RankId, account: Account | None) -> None:
        known = self._accounts[rank]
        known[teller] = account
        if len(known) < len(self.members):
            return
        accounts = {peer: told for peer, told in known.items() if told is not None}
        agreement = regroup.agree(accounts, self.shape.rank_ids, vote_period=self.shape.vote_period)
        if isinstance(agreement, NotServed):
            self._engine.not_served(agreement.reason)
            return
        self._agreed[rank] = agreement
        if rank.address.rank_id in agreement.reformed.flips:
            self._engine.world.counts["flipped as the group formed"] += 1
            self._engine.handle(rank, hook.GroupFormed(flips=True, boundary=agreement.reformed.boundary))
        self._finish(rank)

    # ── what they do ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, rank: Rank) -> None:
        if rank.machine.state is hook.ChunkState.FLIPPING:
            self._soon(_BUSY_S, partial(self._finish, rank), rank)
            return
        for peer in self.members:
            self._soon(0.3, partial(self._hear_done, peer, rank.address.rank_id), peer)

    def _hear_done(self, rank: Rank, teller: RankId) -> None:
        done = self._done[rank]
        done.add(teller)
        if len(done) == len(self.members):
            if self._agreed[rank].guide == rank.address.rank_id:
                mine = regroup.live_after(rank.machine.live, rank.machine.shape.layers, self._regrouping(rank))
                for peer in self.members:
                    self._soon(0.3, partial(self._hear_map, peer, mine), peer)
            self._enter(rank)

    def _hear_map(self, rank: Rank, live: regroup.LiveRows) -> None:
        self._map[rank] = live
        self._enter(rank)

    def _enter(self, rank: Rank) -> None:
        """Be a rank of the new group, once all did what was decided and the map is known."""
        if not rank.is_forming or len(self._done[rank]) < len(self.members):
            return
        live, joins = self._map.get(rank), rank.address.rank_id in self._joining
        if live is None and (joins or self.shape.is_weighted or self._agreed[rank].guide == rank.address.rank_id):
            return
        if not joins and not self.shape.is_weighted:
            live = regroup.live_after(rank.machine.live, rank.machine.shape.layers, self._regrouping(rank))
        assert live is not None
        agreement, before = self._agreed[rank], rank.machine
        if before.state is hook.ChunkState.UNRESOLVED:
            self._engine.handle(rank, hook.GroupFormed(flips=False, boundary=agreement.reformed.boundary))
        address = Address(rank.address.rank_id, rank.address.incarnation, self.group_id)
        ledger = regroup.ledger_after(
            agreement,
            address,
            live,
            weights_version=rank.weights_version,
            off_reason="",
            before=None if joins else before.ledger,
        )
        rank.formings = agreement.formings
        self._engine.enter(rank, before.in_group(self.shape.rank_shape(address.rank_id), ledger), agreement)


def boundary_of(agreement: Agreement, _rank: Rank) -> int:
    """Of the last step that a rank of the new group counts as run."""
    return agreement.reformed.boundary - 1


def joining_machine(address: Address, shape: Shape, weights_version: int) -> ChunkMachine:
    """Of a rank whose slots are empty, before the others told it the map."""
    rank_shape = shape.rank_shape(address.rank_id)
    live = live_of_a_rank_that_joins(rank_shape.layers, shape.rank_ids, weighted=shape.is_weighted)
    return ChunkMachine(address, rank_shape, live, weights_version=weights_version, off_reason="")
