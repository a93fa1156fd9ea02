"""Invariants of a fleet that serves, checked from what its ranks hold and what they answered."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from agent.engine.reference.messages import Inspection
from agent.engine.reference.model import expert_digest
from demo.model import load
from demo.oracle import Served

NUM_EXPERTS = 32


@dataclass
class History:
    """What was seen of generations and epochs, checked whenever more is seen."""

    digests: dict[int, str] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    epoch: int = 0

    def see(self, views: Sequence[Any], *, all_listed: bool = True) -> None:
        """Invariant 4: a generation is never changed or lost, and each new one has a higher number than all before.

        all_listed: whether `views` are all generations from the first on, or the newest alone.
        """
        newest = max(self.digests, default=0)
        listed = {int(view.generation) for view in views}
        oldest = 0 if all_listed else min(listed)
        lost = {number for number in self.digests if number >= oldest} - listed
        assert not lost, f"generations {sorted(lost)} are no longer known"
        for view in sorted(views, key=lambda view: int(view.generation)):
            if view.generation not in self.digests:
                assert view.generation > newest, f"generation {view.generation} is new after {newest}"
            assert self.digests.setdefault(view.generation, view.placement_digest) == view.placement_digest
            assert self.epochs.setdefault(view.generation, view.epoch) == view.epoch
        epochs = [self.epochs[number] for number in sorted(self.epochs)]
        assert epochs == sorted(epochs), f"epochs of generations go back: {self.epochs}"

    def see_epoch(self, epoch: int) -> None:
        """The epoch that a planner says it leads in."""
        if epoch:  # 0 = does not lead yet
            assert epoch >= self.epoch, f"epoch {epoch} after {self.epoch}"
            self.epoch = epoch


def check_maps(inspections: Sequence[Inspection]) -> None:
    """Invariants 1 and 3: one map on all ranks, and every expert in it."""
    maps = {tuple((layer.generation, layer.row_digest) for layer in inspection.layers) for inspection in inspections}
    assert len(maps) == 1, f"ranks route by different maps: {maps}"
    for layer in inspections[0].layers:
        assert set(layer.row) - {-1} == set(range(NUM_EXPERTS)), f"layer {layer.layer_id} does not cover every expert"


def check_slots(inspections: Sequence[Inspection]) -> None:
    """Invariant 2: every slot that the map names holds exactly its expert's tensors."""
    right = checkpoint_digests()
    for position, inspection in enumerate(inspections):
        for layer in inspection.layers:
            slots = len(layer.slot_digests)
            held = layer.row[position * slots : (position + 1) * slots]
            for slot, (expert, digest) in enumerate(zip(held, layer.slot_digests, strict=True)):
                if expert >= 0:
                    where = f"rank {inspection.rank_id} layer {layer.layer_id} slot {slot}"
                    assert digest == right[layer.layer_id, expert], f"{where} does not hold expert {expert}"


def check_boundaries(served: Iterable[Served]) -> None:
    """Invariants 1 and 4: at every step one vector of generations on all ranks, and no layer's ever goes back.

    served: requests of one life of a fleet, which counts its steps from 0.
    """
    routed_by: dict[int, tuple[int, ...]] = {}
    for request in served:
        for boundary, generations in zip(request.boundaries, request.generations, strict=True):
            known = routed_by.setdefault(boundary, generations)
            assert known == generations, f"at step {boundary} ranks routed by {known} and {generations}"
    ordered = [routed_by[boundary] for boundary in sorted(routed_by)]
    for earlier, later in itertools.pairwise(ordered):
        assert all(a <= b for a, b in zip(earlier, later, strict=True)), f"generations go back: {earlier}, then {later}"


def rows_of(inspection: Inspection) -> list[tuple[int, ...]]:
    """Physical to logical of every layer."""
    return [layer.row for layer in inspection.layers]


@cache
def checkpoint_digests() -> dict[tuple[int, int], int]:
    """(layer id, expert) → digest of all its tensors, from the weights on disk."""
    model = load()
    found = {}
    for layer_id in model.moe_layer_ids():
        stacked = model.expert_tensors(layer_id)
        for expert in range(model.config.num_experts):
            found[layer_id, expert] = expert_digest({name: tensor[expert] for name, tensor in stacked.items()})
    return found
