"""Generations and live maps: identity, states, digests (their bytes: `test_generation_codec`)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eplb_service.errors import BrokenInvariantError, InvalidInputError
from eplb_service.flip_stall import FlipStall
from eplb_service.generation import Generation, GenerationState, LiveMap, as_loaded, live_digest
from eplb_service.ids import Epoch, GenerationNumber, LayerRef, RankId
from eplb_service.imbalance import Imbalance
from eplb_service.moves import MoveSummary
from eplb_service.placement import Placement, Table, row_digest
from eplb_service.topology import LinkKind


def placement(rows: list[list[int]] | None = None, model: str = "m") -> Placement:
    rows = rows or [[0, 1, 2, 0], [2, 1, 0, -1]]
    table = Table(model, tuple(range(3, 3 + len(rows))), 3, (RankId(4), RankId(5)), np.array(rows, np.int32))
    drafter = Table("drafter", (0,), 2, (RankId(4), RankId(5)), np.array([[0, 1]], np.int32))
    return Placement((table, drafter))


def generation(number: int = 7, *, reason: str = "drift", **changes: object) -> Generation:
    even = Imbalance((1.5, 1.25, 1.0))
    made = Generation(
        number=GenerationNumber(number),
        placement=placement(),
        created_at_s=1_700_000_000.123456,
        reason=reason,
        policy="greedy",
        epoch=Epoch(3),
        before=even,
        predicted=Imbalance((1.1, 0.1 + 0.2, 1.0)),
        lower_bound=even,
        moves=MoveSummary(
            experts=2,
            slots_rewritten=3,
            layers=2,
            bytes_by_link=dict.fromkeys(LinkKind, 1 << 40),
            bytes_without_source=0,
            bytes_into_busiest_rank=5,
        ),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_identity_is_number_and_digest_of_the_placement() -> None:
    assert generation().digest == placement().digest()
    with pytest.raises(InvalidInputError, match="numbered from 1; got 0"):
        generation(0)


def test_a_generation_that_stopped_half_way_can_be_continued_and_keeps_its_flips() -> None:
    stopped = generation().rolling_out().stopped("rank 2 refused", flip_boundaries=(16,), rollout_s=2.0)
    assert stopped.state is GenerationState.STOPPED
    assert stopped.stop_reason == "rank 2 refused"
    active = stopped.rolling_out().active(at_s=5.0, flip_boundaries=(32, 48), rollout_s=1.5)
    assert (active.state, active.stop_reason, active.flip_boundaries, active.rollout_s) == (
        GenerationState.ACTIVE,
        "",
        (16, 32, 48),
        3.5,
    )


def test_a_continued_generation_tells_of_the_longest_flip_of_both_rollouts() -> None:
    begun = generation().rolling_out(FlipStall(expected_s=0.004, limit_s=0.01))
    assert begun.flip_stall == FlipStall(expected_s=0.004, limit_s=0.01)
    stopped = begun.stopped("rank 2 refused", stall=FlipStall(expected_s=0.004, limit_s=0.01, measured_s=0.007))
    active = stopped.rolling_out(FlipStall(expected_s=0.002, limit_s=0.005)).active(
        at_s=5.0, flip_boundaries=(), rollout_s=1.5, stall=FlipStall(expected_s=0.002, limit_s=0.005, measured_s=0.003)
    )
    assert active.flip_stall == FlipStall(expected_s=0.004, limit_s=0.005, measured_s=0.007)


def test_an_active_generation_never_becomes_anything_but_superseded() -> None:
    active = generation().active(at_s=1.0, flip_boundaries=(), rollout_s=0.0)
    with pytest.raises(BrokenInvariantError, match="generation 7 is active and cannot become rolling_out"):
        active.rolling_out()
    assert active.superseded().state is GenerationState.SUPERSEDED
    with pytest.raises(BrokenInvariantError, match="superseded and cannot become stopped"):
        active.superseded().stopped("late")


def test_live_map_names_the_generation_of_every_layer() -> None:
    live = as_loaded(placement())
    assert live.newest_generation == 0
    layer = LayerRef("m", 4)
    after = live.with_rows({layer: np.array([0, 1, 2, 2], np.int32)}, GenerationNumber(9))
    assert after.generations == (0, 9, 0)
    assert after.newest_generation == 9
    assert after.differing_layers(live.placement) == (layer,)
    assert after.digest != live.digest
    assert [(row.layer, row.generation, row.digest) for row in after.layers] == [
        (ref, number, row_digest(ref, row)) for (ref, _, row), number in zip(after.placement.layers(), (0, 9, 0), strict=True)
    ]


def test_live_digest_does_not_depend_on_the_order_of_layers() -> None:
    digests = {LayerRef("m", 1): 5, LayerRef("m", 2): 6, LayerRef("a", 9): 7}
    assert live_digest(digests) == live_digest(dict(reversed(digests.items())))
    assert live_digest(digests) != live_digest(digests | {LayerRef("m", 1): 6, LayerRef("m", 2): 5})
    assert 0 < live_digest(digests) < 1 << 63


def test_live_map_wants_one_generation_for_each_layer() -> None:
    with pytest.raises(InvalidInputError, match="1 generations for 3 layers"):
        LiveMap(placement(), (GenerationNumber(1),))
