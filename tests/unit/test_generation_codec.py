"""What the store holds comes back as it was, and nothing else comes back at all."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service import generation_codec
from eplb_service.errors import BrokenInvariantError, EplbError, UnsupportedError
from eplb_service.flip_stall import FlipStall
from eplb_service.generation import Generation, GenerationState, LiveMap
from eplb_service.generation_codec import (
    decode_generation,
    decode_live_map,
    decode_placement,
    encode_generation,
    encode_live_map,
    encode_placement,
)
from eplb_service.ids import Epoch, GenerationNumber, RankId
from eplb_service.imbalance import Imbalance
from eplb_service.moves import MoveSummary
from eplb_service.placement import Placement, Table
from eplb_service.topology import LinkKind


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    ranks = tuple(RankId(rank) for rank in draw(st.lists(st.integers(0, 65535), min_size=1, max_size=4, unique=True)))
    tables = []
    for number in range(draw(st.integers(1, 3))):
        num_logical, slots, layers = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
        cells = st.lists(
            st.integers(-1, num_logical - 1), min_size=layers * slots * len(ranks), max_size=layers * slots * len(ranks)
        )
        rows = np.array(draw(cells), np.int32).reshape(layers, -1)
        tables.append(Table(f"modél {number}", tuple(range(number, number + layers)), num_logical, ranks, rows))
    placement = Placement(tuple(tables))
    return placement.with_even_shares() if draw(st.booleans()) else placement


def generation_of(placement: Placement) -> Generation:
    imbalance = Imbalance((1.0, 1.5))
    moves = MoveSummary(
        experts=3,
        slots_rewritten=4,
        layers=1,
        bytes_by_link={LinkKind.SAME_RANK: 1, LinkKind.SAME_NODE: 2, LinkKind.CROSS_NODE: 3},
        bytes_without_source=4,
        bytes_into_busiest_rank=5,
        bytes_into_busiest_nic=6,
    )
    return Generation(
        number=GenerationNumber(7),
        placement=placement,
        created_at_s=1.7e9,
        reason='move: "worst layer" 1.5 → 1.0',
        policy="greedy",
        epoch=Epoch(3),
        before=imbalance,
        predicted=imbalance,
        lower_bound=Imbalance(()),
        moves=moves,
        state=GenerationState.ACTIVE,
        stop_reason="",
        active_at_s=1.7e9 + 1,
        flip_boundaries=(4, 8),
        rollout_s=0.25,
        observed=imbalance,
        flip_stall=FlipStall(expected_s=0.002, limit_s=0.01, measured_s=0.003),
        copied_s=0.125,
        copy_held_steps=True,
    )


@given(placements())
def test_everything_comes_back_as_it_was(placement: Placement) -> None:
    assert decode_placement(encode_placement(placement)) == placement
    generation = generation_of(placement)
    assert decode_generation(encode_generation(generation)) == generation
    begun = dataclasses.replace(generation, flip_stall=FlipStall(expected_s=0.002), copied_s=0.0)
    assert decode_generation(encode_generation(begun)) == begun
    fresh = dataclasses.replace(generation, observed=None, flip_stall=None, active_at_s=None, state=GenerationState.PUBLISHED)
    assert decode_generation(encode_generation(fresh)) == fresh
    layers = sum(table.num_layers for table in placement.tables)
    live = LiveMap(placement, tuple(GenerationNumber(number) for number in range(layers)))
    assert decode_live_map(encode_live_map(live)) == live


SMALL = Placement((Table.linear(model="m", layer_ids=(0, 1), num_logical=4, rank_ids=(0, 1), slots_per_rank=2),))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"7", b"\xff", b"{}", b'{"format":1}', b"[" * 100_000])
def test_bytes_that_are_no_document_are_damage_with_a_reason(data: bytes) -> None:
    for decode in (decode_placement, decode_generation, decode_live_map):
        with pytest.raises(BrokenInvariantError, match="is damaged: "):
            decode(data)


def test_map_that_was_changed_does_not_pass_its_checksum() -> None:
    tree = json.loads(encode_placement(SMALL))
    other = Placement((SMALL.tables[0].with_rows({0: np.array([1, 0, 2, 3])}),))
    tree["body"]["placement"] = json.loads(encode_placement(other))["body"]["placement"]
    with pytest.raises(BrokenInvariantError, match="stored placement is damaged: its checksum"):
        decode_placement(json.dumps(tree).encode())


def test_large_map_is_packed() -> None:
    table = Table.linear(model="m", layer_ids=range(58), num_logical=256, rank_ids=range(32), slots_per_rank=9)
    assert len(encode_placement(Placement((table,)))) < table.physical_to_logical.nbytes / 2


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_no_altered_byte_goes_unseen(position: int, flip: int) -> None:
    made = generation_of(SMALL)
    data = bytearray(encode_generation(made))
    data[position % len(data)] ^= flip
    try:
        again = decode_generation(bytes(data))
    except EplbError as error:
        said = str(error)
    else:
        assert again == made  # the same JSON, spelled in another way
        said = "stored generation"
    assert "stored generation" in said


def altered(**changes: object) -> bytes:
    """A document whose checksum is right and whose content is not."""
    body = json.loads(encode_generation(generation_of(SMALL)))["body"] | changes
    return generation_codec._sealed("eplb.generation", {name: value for name, value in body.items() if value != "absent"})


def test_generation_of_an_earlier_release_knows_no_nics() -> None:
    moves = json.loads(encode_generation(generation_of(SMALL)))["body"]["moves"]
    assert moves.pop("bytes_into_busiest_nic") == 6
    earlier = decode_generation(altered(moves=moves))
    assert earlier.moves == dataclasses.replace(generation_of(SMALL).moves, bytes_into_busiest_nic=0)


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
def test_damaged_document_names_what_is_wrong(changes: dict[str, object], said: str) -> None:
    with pytest.raises(BrokenInvariantError, match=said):
        decode_generation(altered(**changes))


def test_map_whose_bytes_do_not_fit_its_shape_is_damaged() -> None:
    tables = json.loads(encode_generation(generation_of(SMALL)))["body"]["placement"]
    tables[0]["physical_to_logical"]["shape"] = [3, 4]
    with pytest.raises(BrokenInvariantError, match=r"map of shape \[3, 4\] in 32 bytes"):
        decode_generation(altered(placement=tables))


def test_newer_version_is_told_from_damage() -> None:
    envelope = json.loads(encode_generation(generation_of(SMALL))) | {"version": 3}
    with pytest.raises(UnsupportedError, match="format version 3, this planner reads up to 2: upgrade it"):
        decode_generation(json.dumps(envelope).encode())


def test_only_documents_with_shares_are_of_the_version_that_earlier_planners_refuse() -> None:
    split = SMALL.tables[0].with_rows({0: np.array([0, 1, 0, 3]), 1: np.array([0, 1, 2, 3])})
    shares = np.array([[0.3, 1, 0.7, 1], [1, 1, 1, 1]], np.float32)
    placement = Placement((split.with_shares(shares),))
    tree = json.loads(encode_placement(placement))
    assert tree["version"] == 2
    assert json.loads(encode_placement(SMALL))["version"] == 1
    assert "shares" not in json.loads(encode_placement(SMALL))["body"]["placement"][0]
    read = decode_placement(encode_placement(placement)).tables[0].shares
    assert read is not None
    assert read.tobytes() == shares.tobytes()
    del tree["body"]["placement"][0]["shares"]
    with pytest.raises(BrokenInvariantError, match="claims placement digest"):
        decode_placement(generation_codec._sealed("eplb.placement", tree["body"]))


def test_document_of_a_release_that_knew_no_shares_is_read() -> None:
    """Written by it; the bytes of today's documents without shares are the same."""
    body = (
        b'{"digest":"0682bb177fe8449ee3f7b367926e34b4","placement":[{"layer_ids":[0,1],"model":"m","num_logical":4,"physical_to_logical":{"data":"eJxjYGBgYARiJiBmZoAAZD4AANAADQ==",'
        b'"shape":[2,4]},"rank_ids":[0,1]}]}'
    )
    old = b'{"body":' + body + b',"checksum":"fe5b2780faf5ac7019983cddda20e775","format":"eplb.placement","version":1}'
    assert decode_placement(old) == SMALL
    assert encode_placement(SMALL) == old


def test_one_kind_of_document_is_not_taken_for_another() -> None:
    with pytest.raises(BrokenInvariantError, match=r"no document of format 'eplb\.generation'"):
        decode_generation(encode_placement(SMALL))
