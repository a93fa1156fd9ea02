"""Follows what the ranks hold: which placement was live over which tokens, and whether slots that moved served."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from agent.engine.reference.messages import Inspection
from demo.result import Comparison
from eplb_service.dispatch import Dispatch, rank_loads
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.topology import Topology

Int64Array = npt.NDArray[np.int64]
ASSIGNMENTS_MIN = 4000
"""Fewest (token, choice) pairs of a layer that a comparison is made from: below that it is mostly sampling noise."""
COMMIT_STEPS = 12
"""About as many steps pass between a plan and its flip."""


@dataclass(slots=True)
class Span:
    """A stretch of serving under one set of rows. closed: its load is complete, the prompts have changed since.

    of_prompts_before: it was planned mostly from prompts that had changed by the time that it was live.
    """

    generation: int
    table: Table
    first_sent: Int64Array
    last_sent: Int64Array
    closed: bool = False
    of_prompts_before: bool = False
    slots_served: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def loads(self) -> npt.NDArray[np.float64]:
        """Assignments since the span began, shape (L, E)."""
        sent = self.last_sent - self.first_sent
        loads = np.zeros((self.table.num_layers, self.table.num_logical))
        for layer, row in enumerate(self.table.physical_to_logical):
            held = row >= 0
            np.add.at(loads[layer], row[held], sent[layer, held])
        return loads


@dataclass(frozen=True, slots=True)
class MovedSlots:
    """Slots that a generation filled anew, and how many of them then served tokens."""

    generation: int
    moved: int
    served: int


class Ledger:
    """Spans of serving, made from inspections of all ranks.

    planned_steps: steps of the windows that a plan is made from.
    """

    def __init__(self, *, model: str, num_logical: int, topology: Topology, planned_steps: int = 0) -> None:
        self._model = model
        self._num_logical = num_logical
        self._topology = topology
        self._fresh_steps = planned_steps // 2 + COMMIT_STEPS
        self._boundary = 0
        self._changed_at: int | None = None
        self.spans: list[Span] = []

    def offer(self, inspections: Sequence[Inspection]) -> bool:
        """Add what all ranks said; returns False when they were not all on the same rows (a flip fell in between)."""
        first = inspections[0]
        self._boundary = max(inspection.boundary for inspection in inspections)
        digests = [layer.row_digest for layer in first.layers]
        if any([layer.row_digest for layer in inspection.layers] != digests for inspection in inspections[1:]):
            return False
        rows = np.array([layer.row for layer in first.layers], np.int32)
        layer_ids = tuple(layer.layer_id for layer in first.layers)
        table = Table(self._model, layer_ids, self._num_logical, self._topology.rank_ids, rows)
        sent: Int64Array = np.array([[layer.sent for layer in inspection.layers] for inspection in inspections], np.int64).sum(
            axis=0
        )
        generation = max(layer.generation for layer in first.layers)
        if self.spans and self.spans[-1].table == table:
            if not self.spans[-1].closed:
                self.spans[-1].last_sent = sent
        else:
            flipped_at = max(layer.flip_boundary for layer in first.layers)
            stale = self._changed_at is not None and flipped_at - self._changed_at < self._fresh_steps
            self.spans.append(Span(generation, table, sent, sent, of_prompts_before=stale))
        self._note_served(self.spans[-1], inspections)
        return True

    def prompts_changed(self) -> None:
        """What comes from now on is another load: a placement is compared on the load that it was made for."""
        if self.spans:
            self.spans[-1].closed = True
            self._changed_at = self._boundary

    @property
    def steps_since_change(self) -> int:
        """Steps that are known of since the prompts changed, or since the first."""
        return self._boundary - (self._changed_at or 0)

    def _note_served(self, span: Span, inspections: Sequence[Inspection]) -> None:
        slots = span.table.slots_per_rank
        for inspection in inspections:
            position = self._topology.position_of(RankId(inspection.rank_id))
            for layer_index, layer in enumerate(inspection.layers):
                for slot, tokens in enumerate(layer.tokens_since_flip):
                    span.slots_served[layer_index, position * slots + slot] = tokens

    def settled(self) -> list[Span]:
        """The first span, and those long enough to be compared: what a rollout only passed through is left out."""
        long_enough = [span for span in self.spans[1:] if float(span.loads.sum(axis=1).min()) >= ASSIGNMENTS_MIN]
        return [*self.spans[:1], *long_enough]

    def comparisons(self, dispatch: Dispatch = Dispatch.EVEN) -> list[Comparison]:
        """Each settled span's own load, scored under the placement before it and under its own."""
        found = []
        spans = self.settled()
        for before, after in itertools.pairwise(spans):
            loads = after.loads
            found.append(
                Comparison(
                    generation=after.generation,
                    previous=before.generation,
                    tokens=int(loads.sum()),
                    layers=tuple(f"layer {layer_id}" for layer_id in after.table.layer_ids),
                    rank_loads_before=rank_loads(loads, before.table, self._topology, dispatch),
                    rank_loads_after=rank_loads(loads, after.table, self._topology, dispatch),
                    of_prompts_before=after.of_prompts_before,
                )
            )
        return found

    def moved_slots(self) -> list[MovedSlots]:
        """For each settled span but the first: slots with another expert than before, and those that then served."""
        found = []
        spans = self.settled()
        for before, after in itertools.pairwise(spans):
            changed = np.argwhere(before.table.physical_to_logical != after.table.physical_to_logical).tolist()
            filled = [(layer, slot) for layer, slot in changed if after.table.physical_to_logical[layer, slot] >= 0]
            served = sum(1 for layer, slot in filled if after.slots_served.get((layer, slot), 0) > 0)
            found.append(MovedSlots(after.generation, len(filled), served))
        return found
