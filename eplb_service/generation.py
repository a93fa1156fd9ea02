"""Generations and the live map: what was published, and what each layer really routes by.

A `Generation` is numbered, immutable and published once; its identity is (number, placement digest). What happens to it
(rolled out, active, stopped half way, superseded) is a new value with another state, never another placement. A `LiveMap` is
a vector of generations, one per layer: a rollout that stops half way leaves some layers on old rows and some on new.

`generation_codec` turns both into bytes for the store.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from eplb_service.control import LiveLayer
from eplb_service.errors import BrokenInvariantError, InvalidInputError
from eplb_service.flip_stall import FlipStall
from eplb_service.ids import Epoch, GenerationNumber, LayerRef
from eplb_service.imbalance import Imbalance
from eplb_service.moves import MoveSummary
from eplb_service.placement import Placement
from eplb_service.replica_shares import as_values
from eplb_service.validation import Observation

AS_LOADED = GenerationNumber(0)
"""Names the rows that the engine loaded by itself."""

ROLLBACK, DRAIN, RESTORE = "rollback", "drain", "restore"
ORDERED = frozenset({ROLLBACK, DRAIN, RESTORE})
"""What `Generation.policy` says where no policy was asked for balance: such a generation promises none, and is not judged."""


class GenerationState(StrEnum):
    """Where a generation is in its life."""

    PUBLISHED = "published"  # decided and stored; nothing moved yet
    ROLLING_OUT = "rolling_out"
    ACTIVE = "active"  # live on all layers of all ranks
    STOPPED = "stopped"  # given up before every layer had it: the live map says which do
    SUPERSEDED = "superseded"  # a later generation was published, or took its layers


_NEXT_STATES: Mapping[GenerationState, frozenset[GenerationState]] = {
    GenerationState.PUBLISHED: frozenset(
        {GenerationState.ROLLING_OUT, GenerationState.ACTIVE, GenerationState.STOPPED, GenerationState.SUPERSEDED}
    ),
    # again ROLLING_OUT: a new leader continues what its predecessor began
    GenerationState.ROLLING_OUT: frozenset(
        {GenerationState.ROLLING_OUT, GenerationState.ACTIVE, GenerationState.STOPPED, GenerationState.SUPERSEDED}
    ),
    GenerationState.ACTIVE: frozenset({GenerationState.SUPERSEDED}),
    GenerationState.STOPPED: frozenset(
        {GenerationState.ROLLING_OUT, GenerationState.ACTIVE, GenerationState.STOPPED, GenerationState.SUPERSEDED}
    ),
    GenerationState.SUPERSEDED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A published placement of a deployment, and what became of it.

    digest: of the placement (hex BLAKE2b-16); computed, so that it cannot disagree.
    created_at_s, active_at_s: wall clock of the planner, seconds since 1970. epoch: of the planner that published it.
    before, predicted, lower_bound: imbalance of the load that it was planned for, one entry per layer in table order.
    promised_gain: fall of imbalance that the gate believed in, mean over layers by load; None = it was not the gate's choice.
    gain_share: share of the plan's own promise that this is (what earlier plans taught).
    observed: of the first full window after it became active. observations: of the first full windows, compared with what the
    placement before it would have shown there. judgement: one sentence on that, and outcome its word; empty while pending.
    flip_boundaries: step boundaries at which its chunks flipped. rollout_s: seconds from the decision to the last flip.
    flip_stall: how long the longest of them held up steps; None until its chunks are cut.
    copied_s: that an engine which moves its own weights took for it, 0 = not known; copy_held_steps: no step ran meanwhile.
    """

    number: GenerationNumber
    placement: Placement
    created_at_s: float
    reason: str
    policy: str
    epoch: Epoch
    before: Imbalance
    predicted: Imbalance
    lower_bound: Imbalance
    moves: MoveSummary
    state: GenerationState = GenerationState.PUBLISHED
    stop_reason: str = ""
    active_at_s: float | None = None
    flip_boundaries: tuple[int, ...] = ()
    rollout_s: float = 0.0
    promised_gain: float | None = None
    gain_share: float = 1.0
    observed: Imbalance | None = None
    observations: tuple[Observation, ...] = ()
    outcome: str = ""
    judgement: str = ""
    flip_stall: FlipStall | None = None
    copied_s: float = 0.0
    copy_held_steps: bool = False
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        if self.number < 1:
            raise InvalidInputError(f"generations are numbered from 1; got {self.number} (0 is what the engine loaded)")
        object.__setattr__(self, "digest", self.placement.digest())

    def rolling_out(self, stall: FlipStall | None = None) -> Generation:
        """The same, while its chunks are carried out (begun, or continued by a new leader). stall: expected."""
        return self._moved_to(GenerationState.ROLLING_OUT, stop_reason="", flip_stall=self._stall_with(stall))

    def active(
        self, *, at_s: float, flip_boundaries: tuple[int, ...], rollout_s: float, stall: FlipStall | None = None
    ) -> Generation:
        """The same, live on every layer. flip_boundaries: of this rollout, added to those of one that it continued."""
        return self._moved_to(
            GenerationState.ACTIVE,
            stop_reason="",
            active_at_s=at_s,
            flip_boundaries=self.flip_boundaries + flip_boundaries,
            rollout_s=self.rollout_s + rollout_s,
            flip_stall=self._stall_with(stall),
        )

    def stopped(
        self, reason: str, *, flip_boundaries: tuple[int, ...] = (), rollout_s: float = 0.0, stall: FlipStall | None = None
    ) -> Generation:
        """The same, given up before every layer had it."""
        return self._moved_to(
            GenerationState.STOPPED,
            stop_reason=reason,
            flip_boundaries=self.flip_boundaries + flip_boundaries,
            rollout_s=self.rollout_s + rollout_s,
            flip_stall=self._stall_with(stall),
        )

    def _stall_with(self, later: FlipStall | None) -> FlipStall | None:
        """Of the longest flip, with those of a rollout that goes on."""
        if self.flip_stall is None or later is None:
            return later or self.flip_stall
        return self.flip_stall.followed_by(later)

    def superseded(self) -> Generation:
        """The same, after a later generation took its place."""
        return self._moved_to(GenerationState.SUPERSEDED)

    def _moved_to(self, state: GenerationState, **changes: object) -> Generation:
        if state not in _NEXT_STATES[self.state]:
            raise BrokenInvariantError(f"generation {self.number} is {self.state} and cannot become {state}")
        return dataclasses.replace(self, state=state, **changes)  # type: ignore[arg-type]


def live_digest(row_digests: Mapping[LayerRef, int]) -> int:
    """Digest of a whole live map, from the digests of its rows. Unsigned 63 bits, never 0 (0 = unknown).

    BLAKE2b-8 over the row digests (<u8) in ascending order of (model, layer id), top bit cleared, 0 replaced by 1. The
    generation numbers are not part of it: it says what is routed, not why.
    """
    ordered = [row_digests[layer] for layer in sorted(row_digests)]
    encoded = np.array(ordered, dtype="<u8").tobytes()
    value = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")
    return (value & (1 << 63) - 1) or 1


@dataclass(frozen=True)
class LiveMap:
    """What every layer of a deployment routes by now, and which generation put it there.

    generations: of each layer, in the order of `placement.layers()`; 0 = as loaded. Equal when rows and generations are.
    """

    placement: Placement
    generations: tuple[GenerationNumber, ...]

    def __post_init__(self) -> None:
        num_layers = sum(table.num_layers for table in self.placement.tables)
        if len(self.generations) != num_layers:
            raise InvalidInputError(f"{len(self.generations)} generations for {num_layers} layers: a live map has one for each")

    @cached_property
    def row_digests(self) -> Mapping[LayerRef, int]:
        """Digest of each layer's row, in table order."""
        return self.placement.row_digests()

    @cached_property
    def digest(self) -> int:
        """See `live_digest`."""
        return live_digest(self.row_digests)

    @property
    def layer_generations(self) -> Mapping[LayerRef, GenerationNumber]:
        """The generation of each layer, in table order."""
        layers = (layer for layer, _, _ in self.placement.layers())
        return dict(zip(layers, self.generations, strict=True))

    @property
    def newest_generation(self) -> GenerationNumber:
        """The highest generation that any layer routes by; 0 when nothing was ever flipped."""
        return max(self.generations)

    @property
    def layers(self) -> tuple[LiveLayer, ...]:
        """The vector of (layer, generation, digest, row, shares), in table order."""
        return tuple(
            LiveLayer(
                layer=layer,
                generation=generation,
                digest=self.row_digests[layer],
                row=tuple(row.tolist()),
                shares=as_values(table.shares_row(layer.layer_id)),
            )
            for (layer, table, row), generation in zip(self.placement.layers(), self.generations, strict=True)
        )

    def differing_layers(self, target: Placement) -> tuple[LayerRef, ...]:
        """Layers whose row, or shares, in `target` are others, in table order. Other shares alone cost no moves."""
        theirs = target.row_digests()
        if theirs.keys() != self.row_digests.keys():
            raise InvalidInputError(
                f"the placement has {len(theirs)} layers, or other ones, than the {len(self.row_digests)} live"
            )
        return tuple(layer for layer, digest in self.row_digests.items() if theirs[layer] != digest)

    def with_rows(
        self,
        rows: Mapping[LayerRef, npt.NDArray[np.integer]],
        generation: GenerationNumber,
        shares: Mapping[LayerRef, npt.NDArray[np.float32]] | None = None,
    ) -> LiveMap:
        """The map after some layers flipped to rows, shares or both of a generation; see `Table.with_rows`."""
        flipped = {*rows, *(shares or {})}
        generations = (generation if layer in flipped else previous for layer, previous in self.layer_generations.items())
        return LiveMap(self.placement.with_rows(rows, shares), tuple(generations))


def as_loaded(placement: Placement) -> LiveMap:
    """The live map of an engine that nothing was ever flipped on."""
    layers: Iterable[object] = placement.layers()
    return LiveMap(placement, tuple(AS_LOADED for _ in layers))
