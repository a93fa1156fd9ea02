"""A map and what ranks remember, carried into another group: ranks are lost, ranks join, experts stay in the slots they are in.

Rows name slots by column, and columns are those of a group. When the group forms again

- the column of a rank that is left goes with its rank id, with what its slots hold;
- the columns of ranks that are gone disappear, and with them what only they held: such an expert has no slot then;
- a rank that joins starts with empty slots, also under the id of one that is gone.

Under weighted dispatch the replicas of an expert that lost one share its tokens in the proportion that they had. Ranks may
come by different ways (one finished a forming that another did not), which rounds shares differently: all take them from one.

What is decided of chunks, and whether all maps are equal: `reform.decide`. Here is what makes maps comparable, and a rank's
new memory. All of it is pure and the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agent.hook.chunk import ChunkMachine
from agent.hook.chunk_events import NO_CHUNK
from agent.hook.chunk_ledger import Ledger
from agent.hook.reform import NotServed, Reformed, Standing, decide, standing_of
from agent.hook.stage_check import LayerShape
from eplb_service.control import Address, LiveLayer
from eplb_service.errors import InvalidInputError
from eplb_service.generation import live_digest
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, GroupId, LayerRef, RankId
from eplb_service.placement import EMPTY_SLOT, row_digest
from eplb_service.replica_shares import Float32Array, as_array, as_values, even_shares

LiveRows = Mapping[LayerRef, LiveLayer]
Layers = Mapping[LayerRef, LayerShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """From which columns to which. before: ranks of the group that was; after: of the new one, in column order.

    joining: ranks of the new group that come with empty slots.

    >>> Regrouping(before=(4, 7, 9), after=(9, 4, 5), joining=frozenset({5})).columns
    (2, 0, None)
    """

    before: tuple[RankId, ...]
    after: tuple[RankId, ...]
    joining: frozenset[RankId] = frozenset()

    @property
    def columns(self) -> tuple[int | None, ...]:
        """The column that each new one was before; None = its slots are empty."""
        was = {rank: column for column, rank in enumerate(self.before) if rank not in self.joining}
        return tuple(was.get(rank) for rank in self.after)


def row_after(row: Sequence[int], slots: int, regrouping: Regrouping) -> tuple[int, ...]:
    """A row in the columns of the new group.

    >>> row_after((0, 1, 2, 3, 0, 2), 2, Regrouping(before=(4, 7, 9), after=(9, 4, 5)))
    (0, 2, 0, 1, -1, -1)
    """
    empty = (EMPTY_SLOT,) * slots
    return tuple(
        expert
        for column in regrouping.columns
        for expert in (empty if column is None else row[column * slots : (column + 1) * slots])
    )


def live_after(live: LiveRows, layers: Layers, regrouping: Regrouping) -> dict[LayerRef, LiveLayer]:
    """What every layer routes by in the new group; generations stay. Raises InvalidInputError for a row of another length."""
    return {layer: _layer_after(known, layers[layer], regrouping) for layer, known in live.items()}


def _layer_after(live: LiveLayer, shape: LayerShape, regrouping: Regrouping) -> LiveLayer:
    if len(live.row) != shape.slots * len(regrouping.before):
        raise InvalidInputError(
            f"layer {live.layer}: row of {len(live.row)} slots for {len(regrouping.before)} ranks of {shape.slots} slots"
        )
    row = row_after(live.row, shape.slots, regrouping)
    shares = _shares_after(live, row, shape, regrouping)
    return replace(live, row=row, shares=as_values(shares), digest=row_digest(live.layer, np.array(row, np.int32), shares))


def _shares_after(live: LiveLayer, row: Sequence[int], shape: LayerShape, regrouping: Regrouping) -> Float32Array | None:
    """Shares of experts that kept all replicas stay to the bit; those of others add up to 1 again, even where all were 0."""
    before = as_array(live.shares)
    if before is None:
        return None
    slots = shape.slots
    after = np.zeros(len(row), np.float32)
    for new, old in enumerate(regrouping.columns):
        if old is not None:
            after[new * slots : (new + 1) * slots] = before[old * slots : (old + 1) * slots]
    held = np.array(row, np.int32)
    even = even_shares(held[None], shape.num_logical)[0]
    for expert in sorted({expert for expert in row if expert >= 0}):
        mine = held == expert
        if int(mine.sum()) < live.row.count(expert):
            total = float(after[mine].astype(np.float64).sum())
            after[mine] = (after[mine].astype(np.float64) / total).astype(np.float32) if total > 0 else even[mine]
    return after


def routed_digest(live: LiveRows) -> int:
    """Digest of slots and generations of a map, without shares: what ranks that come by different ways must agree about."""
    return live_digest(
        {layer: row_digest(layer, np.array((*_halves(known), *known.row), np.int32)) for layer, known in live.items()}
    )


def _halves(known: LiveLayer) -> tuple[int, int]:
    return known.generation >> 31, known.generation & (1 << 31) - 1


def uncovered(live: LiveRows, layers: Layers) -> int:
    """How many experts, over all layers, have no slot."""
    return sum(layers[layer].num_logical - len(set(known.row) - {EMPTY_SLOT}) for layer, known in live.items())


# ── what ranks tell one another ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a rank that was in a group tells the ranks of the new one. A rank that joins has none.

    standing: with digests of slots and generations in the new group's columns (`routed_digest`).
    group_id, group_rank_ids: of the last group that it formed. formings: how many formings led to that one.
    closed_id, epoch_seen, generation_seen: see `Ledger`.
    """

    standing: Standing
    group_id: GroupId
    group_rank_ids: tuple[RankId, ...]
    formings: int
    closed_id: ChunkId
    epoch_seen: Epoch
    generation_seen: GenerationNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks of the new group go on from.

    reformed: who flips what first, and where boundaries go on. guide: the rank whose map all take, the first that has one.
    The rest: the highest that any rank knows, so that numbers never go back on any.
    """

    reformed: Reformed
    guide: RankId
    formings: int
    flipped_id: ChunkId
    closed_id: ChunkId
    epoch_seen: Epoch
    generation_seen: GenerationNumber


def account_of(machine: ChunkMachine, regrouping: Regrouping, *, formings: int) -> Account:
    """What the rank of a chunk machine has to say, when its engine runs no step."""
    ledger, layers = machine.ledger, machine.shape.layers
    plain = standing_of(machine, ledger.address.rank_id)
    now = routed_digest(live_after(machine.live, layers, regrouping))
    after = now if plain.cast_id == NO_CHUNK else routed_digest(live_after(machine.live_after_open, layers, regrouping))
    return Account(
        standing=replace(plain, live_digest=now, digest_after=after),
        group_id=ledger.address.group_id,
        group_rank_ids=machine.shape.group_rank_ids,
        formings=formings,
        closed_id=ledger.closed_id,
        epoch_seen=ledger.epoch_seen,
        generation_seen=ledger.generation_seen,
    )


def agree(accounts: Mapping[RankId, Account], group: Sequence[RankId], *, vote_period: int) -> Agreement | NotServed:
    """What the ranks of a new group do, from what those of them that were in one before say; the others join.

    group: of the new group, in column order. Raises InvalidInputError for an account of a rank outside of it.
    """
    strangers = sorted(set(accounts) - set(group))
    if strangers:
        raise InvalidInputError(f"ranks {strangers} have accounts but are not in the group of ranks {list(group)}")
    ranks = [rank for rank in group if rank in accounts]
    if not ranks:
        return NotServed(
            reason="every rank of the group joins it, so none has a map: start them with the experts that they load"
        )
    told = [accounts[rank] for rank in ranks]
    apart = _apart(told)
    if apart:
        return NotServed(reason=apart)
    reformed = decide([account.standing for account in told], vote_period=vote_period)
    if isinstance(reformed, NotServed):
        return reformed
    return Agreement(
        reformed=reformed,
        guide=ranks[0],
        formings=max(account.formings for account in told) + 1,
        flipped_id=max(reformed.chunk_id, *(account.standing.flipped_id for account in told)),
        closed_id=max(reformed.closed_id, *(account.closed_id for account in told)),
        epoch_seen=max(account.epoch_seen for account in told),
        generation_seen=max(account.generation_seen for account in told),
    )


def _apart(told: Sequence[Account]) -> str:
    """Which rank a group formed without, and may have served without; empty = none.

    A forming may fail on some of its ranks only. Those still stand where they stood, and no step of the others can have ended
    without them; a rank that was left out knows nothing of what was flipped since.
    """
    for late in told:
        for early in told:
            rank = early.standing.rank_id
            was_there = early.formings < late.formings and rank in late.group_rank_ids
            if early.formings <= late.formings and early.group_id != late.group_id and not was_there:
                return (
                    f"rank {rank} comes from group {early.group_id:#x}; rank {late.standing.rank_id} was in group"
                    f" {late.group_id:#x} of ranks {list(late.group_rank_ids)} since, without it: start rank {rank} anew as one"
                    " that joins, and form the group again"
                )
    return ""


# ── what a rank remembers then ───────────────────────────────────────────────────────────────────────────────────────────


def ledger_after(
    agreement: Agreement,
    address: Address,
    live: LiveRows,
    *,
    weights_version: int,
    off_reason: str,
    before: Ledger | None = None,
) -> Ledger:
    """The memory that a rank goes on with in the new group. live: in its columns. before: of the rank; None = it joins."""
    heard = Ledger(address, {}, weights_version, "") if before is None else before  # a planner may have spoken meanwhile
    ledger = Ledger(
        address,
        dict(live),
        weights_version,
        off_reason,
        closed_id=max(agreement.closed_id, heard.closed_id),
        epoch_seen=max(agreement.epoch_seen, heard.epoch_seen),
        generation_seen=max(agreement.generation_seen, heard.generation_seen),
        boundary=agreement.reformed.boundary - 1,
    )
    ledger.remember(agreement.flipped_id, before)
    return ledger
