"""Generations, live maps and their bytes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.errors import BrokenInvariantError, EplbError, InvalidInputError, UnsupportedError
from eplb_service.generation import Generation, GenerationState, LiveMap, as_loaded, live_digest
from eplb_service.generation_codec import decode_generation, decode_live_map, encode_generation, encode_live_map
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


@given(
    reason=st.text(max_size=20),
    rows=st.lists(st.lists(st.integers(-1, 2), min_size=4, max_size=4), min_size=1, max_size=3),
    floats=st.lists(st.floats(1, 1e9, allow_nan=False), min_size=1, max_size=3),
    state=st.sampled_from(GenerationState),
    observed=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_bytes_give_back_the_same_generation(
    reason: str, rows: list[list[int]], floats: list[float], state: GenerationState, observed: bool
) -> None:
    text = reason.encode("utf-8", "replace").decode()
    imbalance = Imbalance(tuple(floats))
    made = generation(
        reason=text,
        placement=placement(rows),
        predicted=imbalance,
        state=state,
        observed=imbalance if observed else None,
        active_at_s=floats[0] if observed else None,
        flip_boundaries=(3, 1 << 40),
        stop_reason=text,
    )
    again = decode_generation(encode_generation(made))
    assert again == made
    assert again.digest == made.digest
    assert encode_generation(again) == encode_generation(made)


def test_bytes_give_back_the_same_live_map() -> None:
    live = as_loaded(placement()).with_rows({LayerRef("m", 4): np.array([0, 1, 2, 2], np.int32)}, GenerationNumber(9))
    again = decode_live_map(encode_live_map(live))
    assert (again, again.digest) == (live, live.digest)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
@settings(max_examples=120, deadline=None)
def test_no_altered_byte_goes_unseen(position: int, flip: int) -> None:
    made = generation()
    data = bytearray(encode_generation(made))
    data[position % len(data)] ^= flip
    try:
        read = decode_generation(bytes(data))
    except EplbError:
        return
    assert read == made  # only where the same JSON is spelled in another way


@pytest.mark.parametrize("keep", [0, 1, 50, 400])
def test_a_cut_document_says_that_it_is_no_json(keep: int) -> None:
    with pytest.raises(BrokenInvariantError, match=f"damaged: {keep} bytes that are no JSON"):
        decode_generation(encode_generation(generation())[:keep])


def altered(**changes: object) -> bytes:
    """A document whose checksum is right and whose content is not."""
    from eplb_service import generation_codec

    envelope = json.loads(encode_generation(generation()))
    body = envelope["body"] | changes
    body = {name: value for name, value in body.items() if value != "absent"}
    return generation_codec._sealed("eplb.generation", body)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"digest": "00"}, "claims placement digest 00, its maps have"),
        ({"moves": "absent"}, "'moves' is missing"),
        ({"state": "flying"}, "'flying' is not a valid GenerationState"),
        ({"number": 0}, "numbered from 1; got 0"),
        ({"placement": []}, "damaged"),
    ],
)
def test_a_damaged_document_names_what_is_wrong(changes: dict[str, object], said: str) -> None:
    with pytest.raises(BrokenInvariantError, match=said):
        decode_generation(altered(**changes))


def test_a_map_whose_bytes_do_not_fit_its_shape_is_damaged() -> None:
    tables = json.loads(encode_generation(generation()))["body"]["placement"]
    tables[0]["physical_to_logical"]["shape"] = [3, 4]
    with pytest.raises(BrokenInvariantError, match=r"map of shape \[3, 4\] in 32 bytes"):
        decode_generation(altered(placement=tables))


def test_a_newer_version_is_told_from_damage() -> None:
    envelope = json.loads(encode_generation(generation())) | {"version": 2}
    with pytest.raises(UnsupportedError, match="format version 2, this planner reads 1"):
        decode_generation(json.dumps(envelope).encode())


def test_one_kind_of_document_is_not_taken_for_another() -> None:
    with pytest.raises(BrokenInvariantError, match=r"no document of format 'eplb\.generation'"):
        decode_generation(encode_live_map(as_loaded(placement())))
    with pytest.raises(BrokenInvariantError, match="no document of format"):
        decode_live_map(b"[1, 2]")
