"""The deployment that is simulated: ranks, layers, experts; what a slot holds is written as one number."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from agent.hook.stage_check import LayerShape, RankShape
from eplb_service.control import CAPABILITY_RESTORE, Address, LayerInfo, LiveLayer, ModelInfo, Registration
from eplb_service.coverage import unreachable
from eplb_service.generation import LiveMap
from eplb_service.ids import DeploymentId, LayerRef, Phase, RankId
from eplb_service.placement import Int32Array, Placement, Table
from eplb_service.replica_shares import Float32Array, as_array

DEPLOYMENT = DeploymentId("sim")
LAYERS = tuple(LayerRef("m", layer_id) for layer_id in (1, 2, 3))
EXPERT_BYTES = 10
GARBAGE = -1
"""What a slot holds after bytes of something else were written to it."""


def weights_of(expert: int, version: int) -> int:
    """The bytes of an expert's tensors, as one number: those of another version of the weights are others."""
    return expert + 1000 * version


@dataclass(frozen=True)
class Shape:
    """What stays the same through all lives of the engine. ranks: of a group that formed again; empty = numbered through."""

    num_ranks: int
    slots_per_rank: int
    num_logical: int
    vote_period: int
    is_weighted: bool = False
    first_rank: int = 0
    num_nodes: int = 2
    ranks: tuple[RankId, ...] = ()

    @classmethod
    def drawn(cls, chance: random.Random, *, num_ranks: int, is_weighted: bool) -> Shape:
        """A small one."""
        slots = chance.choice([2, 3])
        return cls(
            num_ranks=num_ranks,
            slots_per_rank=slots,
            num_logical=num_ranks * slots - chance.choice([1, 2]),
            vote_period=chance.choice([1, 2, 3]),
            is_weighted=is_weighted,
            first_rank=chance.choice([0, 4]),
        )

    @cached_property
    def rank_ids(self) -> tuple[RankId, ...]:
        """In column order."""
        return self.ranks or tuple(RankId(self.first_rank + position) for position in range(self.num_ranks))

    @property
    def num_slots(self) -> int:
        """Of all ranks, in one layer."""
        return self.num_ranks * self.slots_per_rank

    @property
    def staging_bytes(self) -> int:
        """Every layer fits alone, two seldom do."""
        return self.slots_per_rank * EXPERT_BYTES

    def of_group(self, ranks: tuple[RankId, ...]) -> Shape:
        """The same deployment with other ranks."""
        return dataclasses.replace(self, num_ranks=len(ranks), ranks=ranks)

    def node_of(self, rank_id: int) -> str:
        """Where a rank runs; its agent process is of the same name."""
        return f"A{rank_id % self.num_nodes}"

    def linear(self) -> Placement:
        """What an engine loads by itself."""
        table = Table.linear(
            model="m",
            layer_ids=[layer.layer_id for layer in LAYERS],
            num_logical=self.num_logical,
            rank_ids=self.rank_ids,
            slots_per_rank=self.slots_per_rank,
        )
        return Placement((table.with_even_shares() if self.is_weighted else table,))

    def live_map(self, layers: tuple[LiveLayer, ...]) -> LiveMap:
        """What a rank routes by, as a map."""
        rows = {layer.layer: np.array(layer.row, np.int32) for layer in layers}
        shares = {layer.layer: given for layer in layers if (given := as_array(layer.shares)) is not None}
        return LiveMap(self.linear().with_rows(rows, shares), tuple(layer.generation for layer in layers))

    def rank_shape(self, rank_id: RankId) -> RankShape:
        """What a rank's machine knows of itself."""
        layer = LayerShape(num_logical=self.num_logical, slots=self.slots_per_rank, expert_bytes=EXPERT_BYTES)
        return RankShape(
            rank_id=rank_id,
            group_rank_ids=self.rank_ids,
            layers=dict.fromkeys(LAYERS, layer),
            replica_table_width=self.num_slots,
            staging_bytes=self.staging_bytes,
            weighted=self.is_weighted,
        )

    def registration(self, address: Address, weights_version: int, *, restores: bool = False) -> Registration:
        """What a rank says of itself."""
        layers = tuple(
            LayerInfo(
                layer_id=layer.layer_id, num_logical=self.num_logical, slots=self.slots_per_rank, expert_bytes=EXPERT_BYTES
            )
            for layer in LAYERS
        )
        return Registration(
            deployment=DEPLOYMENT,
            address=address,
            node=self.node_of(address.rank_id),
            group_rank_ids=self.rank_ids,
            phase=Phase.DECODE,
            stage=0,
            models=(ModelInfo(name="m", digest="d", manifest_digest="t", layers=layers),),
            capacity=1.0,
            dispatch="weighted" if self.is_weighted else "even",
            vote_period=self.vote_period,
            window_steps=8,
            sub_windows=1,
            staging_bytes=self.staging_bytes,
            replica_table_width=self.num_slots,
            weights_version=weights_version,
            capabilities=(CAPABILITY_RESTORE,) if restores else (),
        )

    # ── targets ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def random_target(self, live: LiveMap, chance: random.Random) -> Placement:
        """Some layers, and all that lost experts, get another covering row; under weighted dispatch shares too."""
        rows, shares = {}, {}
        lost = unreachable(live.placement)
        for layer in sorted({*lost, *chance.sample(LAYERS, chance.randint(1, len(LAYERS)))}):
            if self.is_weighted and layer not in lost and chance.random() < 0.4:
                shares[layer] = self._random_shares(live.placement.row(layer), chance)
                continue
            spare = live.placement.row(layer).size - self.num_logical
            row = [*range(self.num_logical), *(chance.randint(-1, self.num_logical - 1) for _ in range(spare))]
            chance.shuffle(row)
            rows[layer] = np.array(row, np.int32)
            if self.is_weighted:
                shares[layer] = self._random_shares(rows[layer], chance)
        return live.placement.with_rows(rows, shares)

    def turned_target(self, live: LiveMap, layers: tuple[LayerRef, ...], by: int) -> Placement:
        """Rows of some layers turned round by some slots: another placement each time, and easy to read."""
        return live.placement.with_rows({layer: np.roll(live.placement.row(layer), by) for layer in layers})

    def whole_target(self, live: LiveMap) -> Placement:
        """Every expert once, from the first slot on, and the first ones again."""
        rows = {}
        for layer in LAYERS:
            size = live.placement.row(layer).size
            rows[layer] = np.arange(size, dtype=np.int32) % self.num_logical
        return live.placement.with_rows(rows)

    def swapped_target(self, live: LiveMap, one: int, other: int) -> Placement:
        """The first layer with two slots changed for one another."""
        row = live.placement.row(LAYERS[0]).copy()
        row[[one, other]] = row[[other, one]]
        return live.placement.with_rows({LAYERS[0]: row})

    def _random_shares(self, row: Int32Array, chance: random.Random) -> Float32Array:
        """Each expert's tokens split at random over its slots. Shape (P,)."""
        weights = np.array([chance.randint(1, 4) for _ in row], np.float64)
        totals = np.bincount(row[row >= 0], weights=weights[row >= 0], minlength=self.num_logical)
        held = np.where(row >= 0, totals[row], 1.0)
        shares: Float32Array = np.where(row >= 0, weights / held, 0.0).astype(np.float32)
        return shares
