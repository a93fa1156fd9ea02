"""Counting chunks gives what making them gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef, RankId
from eplb_service.placement import Placement, Table
from eplb_service.rollout.chunk_count import count_chunks
from eplb_service.rollout.chunks import plan_chunks
from eplb_service.topology import Topology

RANKS, LAYERS, EXPERTS, SLOTS = 4, 5, 6, 3


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(0, 40),
    layers_max=st.sampled_from([None, 1, 2]),
    flip_bytes_max=st.sampled_from([None, 0, 5, 20]),
    dead=st.sampled_from([frozenset(), frozenset({RankId(2)})]),
    weighted=st.booleans(),
)
def test_as_many_chunks_are_counted_as_are_made(
    seed: int, budget: int, layers_max: int | None, flip_bytes_max: int | None, dead: frozenset[RankId], *, weighted: bool
) -> None:
    random = np.random.default_rng(seed)
    rank_ids = tuple(RankId(rank) for rank in range(RANKS))
    topology = Topology(rank_ids, ("a", "a", "b", "b"), dead=dead)
    tables: list[Table] = []
    for kind in range(2):
        rows = random.integers(-1, EXPERTS, (LAYERS, RANKS * SLOTS)).astype(np.int32)
        if kind == 1:
            keep = random.random(LAYERS) < 0.4
            rows[keep] = tables[0].physical_to_logical[keep]
        table = Table("m", tuple(range(LAYERS)), EXPERTS, rank_ids, rows)
        tables.append(table.with_even_shares() if weighted else table)
    sizes = random.integers(1, 8, LAYERS).tolist()
    staging = dict.fromkeys(rank_ids, budget)
    counted = count_chunks(
        *tables,
        topology=topology,
        expert_bytes=sizes,
        staging_bytes=staging,
        layers_max=layers_max,
        flip_bytes_max=flip_bytes_max,
    )
    try:
        made: int | None = len(
            plan_chunks(
                Placement((tables[0],)),
                Placement((tables[1],)),
                topology=topology,
                expert_bytes={LayerRef("m", layer): size for layer, size in enumerate(sizes)},
                staging_bytes=staging,
                layers_max=layers_max,
                flip_bytes_max=flip_bytes_max,
            )
        )
    except InvalidInputError:
        made = None
    assert counted == made
