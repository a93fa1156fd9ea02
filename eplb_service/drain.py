"""Draining: ranks that are to be stopped hold no expert alone, and where the engine knows empty slots, none at all.

A drained rank serves until it is stopped: it is a source of copies, and its own tokens are routed like those of any other
rank. To plans it is what a dead rank is, a rank without slots, so that what policies do for survivors is what they do here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from eplb_service.ids import RankId
from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT, Placement, Table
from eplb_service.topology import Topology


class DrainState(StrEnum):
    """How far a drained rank is."""

    DRAINING = "draining"  # experts are to be moved off it still
    SAFE_TO_STOP = "safe_to_stop"
    ABSENT = "absent"  # not of the group: stopped, or not there yet
    UNKNOWN = "unknown"  # what ranks hold is not known now


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDrain:
    """What a drained rank holds still. held: (layer, expert) pairs; alone: those of them that no rank that stays has."""

    rank_id: RankId
    held: int
    alone: int

    def state(self, *, may_keep: bool) -> DrainState:
        """may_keep: copies of experts that also live elsewhere may stay, since the engine knows no empty slot."""
        done = self.alone == 0 and (may_keep or not self.held)
        return DrainState.SAFE_TO_STOP if done else DrainState.DRAINING

    def sentence(self, *, may_keep: bool) -> str:
        """For people.

        >>> RankDrain(rank_id=RankId(3), held=0, alone=0).sentence(may_keep=False)
        'rank 3 holds no expert that another has not: safe to stop'
        """
        if self.state(may_keep=may_keep) is DrainState.SAFE_TO_STOP:
            copies = f" ({self.held} copies stay on it: the engine knows no empty slot)" if self.held else ""
            return f"rank {self.rank_id} holds no expert that another has not: safe to stop{copies}"
        alone = f"{self.alone} of them live on no rank that stays" if self.alone else "all of them live elsewhere too"
        return f"rank {self.rank_id} holds {self.held} experts over all layers, {alone}: do not stop it yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedRank:
    """A drained rank for people: how far it is, with a sentence. held, alone: as in `RankDrain`, 0 where not known."""

    rank_id: RankId
    state: DrainState
    sentence: str
    held: int = 0
    alone: int = 0


def left_on(placement: Placement, drained: AbstractSet[RankId]) -> tuple[RankDrain, ...]:
    """What each drained rank of a placement holds, in column order. An expert that only drained ranks hold is alone on each.

    >>> table = Table("m", (0,), 2, (RankId(0), RankId(1)), np.array([[0, -1, 0, 1]], np.int32))
    >>> left_on(Placement((table,)), {RankId(1)})
    (RankDrain(rank_id=1, held=2, alone=1),)
    """
    ranks = placement.rank_ids
    stays = np.array([rank not in drained for rank in ranks])
    held, alone = np.zeros((2, len(ranks)), np.int64)
    for table in placement.tables:
        there = residencies(table.physical_to_logical, num_ranks=table.num_ranks, num_logical=table.num_logical)
        copies = (there & stays[:, None]).sum(axis=1, dtype=np.int64)
        held += there.sum(axis=(0, 2))
        alone += (there & (copies == 0)[:, None, :]).sum(axis=(0, 2))
    return tuple(
        RankDrain(rank_id=rank, held=int(held[position]), alone=int(alone[position]))
        for position, rank in enumerate(ranks)
        if rank in drained
    )


def staying(topology: Topology, drained: AbstractSet[RankId]) -> Topology:
    """The ranks as plans are to see them: those drained have no slots."""
    return replace(topology, dead=topology.dead | (frozenset(topology.rank_ids) & drained))


def serving(topology: Topology, placement: Placement, drained: AbstractSet[RankId]) -> Topology:
    """The ranks as load is spread over them: those drained that hold nothing any more serve no expert."""
    if not drained or placement.rank_ids != topology.rank_ids:
        return topology
    return staying(topology, {left.rank_id for left in left_on(placement, drained) if not left.held})


def why_not_drained(tables: Iterable[Table], drained: AbstractSet[RankId]) -> str:
    """Why the ranks that stay cannot hold all experts, with the least number of slots that could; empty when they can."""
    for table in tables:
        stay = [rank for rank in table.rank_ids if rank not in drained]
        slots = len(stay) * table.slots_per_rank
        if slots >= table.num_logical:
            continue
        least_ranks = -(-table.num_logical // table.slots_per_rank)
        more = f"let at least {least_ranks} ranks stay" if least_ranks <= table.num_ranks else "add ranks"
        if not stay:
            return f"no rank would stay for the {table.num_logical} experts of a layer of model {table.model!r}: {more}"
        return (
            f"the ranks that stay ({listed(stay)}) have {len(stay)} x {table.slots_per_rank} = {slots} slots for the"
            f" {table.num_logical} experts of a layer of model {table.model!r}, at least {table.num_logical} slots are needed:"
            f" {more}, or start them with at least {-(-table.num_logical // len(stay))} slots each"
        )
    return ""


def why_off_limits(before: Placement, after: Placement, drained: AbstractSet[RankId]) -> str:
    """The first expert that a change would bring to a drained rank, as a sentence; empty when it brings none."""
    for old, new in zip(before.tables, after.tables, strict=True):
        if not old.same_shape(new):
            continue
        shape = {"num_ranks": old.num_ranks, "num_logical": old.num_logical}
        held, wanted = (residencies(one.physical_to_logical, **shape) for one in (old, new))
        brought = np.asarray(wanted & ~held)
        brought[:, [rank not in drained for rank in old.rank_ids]] = False
        if brought.any():
            layer, position, expert = np.argwhere(brought)[0].tolist()
            rank = old.rank_ids[position]
            return (
                f"it puts expert {expert} of layer {old.layers[layer]} on rank {rank}, which is drained: `eplb undrain {rank}`"
                " first"
            )
    return ""


def keeping_drained(table: Table, live: Table, drained: AbstractSet[RankId]) -> Table:
    """A plan over the ranks that stay, in which those drained keep what they hold now: for engines that know no empty slot.

    What stays there are copies: the plan has a slot for every expert elsewhere. Under weighted dispatch they take no tokens.
    """
    positions = [position for position, rank in enumerate(live.rank_ids) if rank in drained]
    rows = table.by_rank().copy()
    rows[:, positions] = live.by_rank()[:, positions]
    flat = rows.reshape(table.num_layers, -1)
    return Table(table.model, table.layer_ids, table.num_logical, table.rank_ids, flat, table.shares)


def is_drained(placement: Placement, drained: AbstractSet[RankId], *, may_keep: bool) -> bool:
    """Whether nothing is left to move off the drained ranks of a placement. may_keep: see `RankDrain.state`."""
    return all(left.state(may_keep=may_keep) is DrainState.SAFE_TO_STOP for left in left_on(placement, drained))


def drained_ranks(
    drained: AbstractSet[RankId], live: Placement | None, *, may_keep: bool, why_unknown: str
) -> tuple[DrainedRank, ...]:
    """Every drained rank, ascending. live: what ranks said that they route by; None = not known, why_unknown says why."""
    left = {} if live is None else {found.rank_id: found for found in left_on(live, drained)}
    shown = []
    for rank in sorted(drained):
        if live is None:
            unknown = f"what rank {rank} holds is not known ({why_unknown}): do not stop it yet"
            shown.append(DrainedRank(rank_id=rank, state=DrainState.UNKNOWN, sentence=unknown))
        elif rank not in left:
            absent = f"rank {rank} is not of the group; should it join, nothing is moved to it"
            shown.append(DrainedRank(rank_id=rank, state=DrainState.ABSENT, sentence=absent))
        else:
            found = left[rank]
            state, sentence = found.state(may_keep=may_keep), found.sentence(may_keep=may_keep)
            shown.append(DrainedRank(rank_id=rank, state=state, sentence=sentence, held=found.held, alone=found.alone))
    return tuple(shown)


def knows_no_empty_slot(placement: Placement) -> bool:
    """Whether every slot of a placement holds an expert."""
    return not any((table.physical_to_logical == EMPTY_SLOT).any() for table in placement.tables)


def listed(ranks: Sequence[RankId]) -> str:
    """Rank ids for a sentence."""
    return ", ".join(str(rank) for rank in ranks)
