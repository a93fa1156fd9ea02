"""Conversions to and from protobuf: what goes in comes out, and what cannot be is refused with its field and numbers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from eplb_service.attach import Attach, FromAgent, Gone
from eplb_service.control import (
    Address,
    Arm,
    Armed,
    Committed,
    Copy,
    Disarm,
    Disarmed,
    Flipped,
    Hello,
    LayerChange,
    LayerInfo,
    LayerTensors,
    LinkBytes,
    Live,
    LiveLayer,
    ModelInfo,
    Pulse,
    RefusalCode,
    Refused,
    Registration,
    Stage,
    Staged,
    Throttle,
    ToRank,
)
from eplb_service.errors import InvalidInputError
from eplb_service.ids import ChunkId, DeploymentId, Epoch, GenerationNumber, GroupId, Incarnation, LayerRef, Phase, RankId
from eplb_service.pb.v1 import agent_pb2, common_pb2
from eplb_service.placement import Placement, Table
from eplb_service.policy.magnitudes import EXPERT_BYTES_MAX
from eplb_service.rpc.arrays import array_from_pb, array_to_pb
from eplb_service.rpc.convert import (
    address_from_pb,
    from_agent_from_pb,
    from_agent_to_pb,
    placement_from_pb,
    placement_to_pb,
    registration_from_pb,
    registration_to_pb,
    report_from_pb,
    report_to_pb,
    table_from_pb,
    table_to_pb,
    to_rank_from_pb,
    to_rank_to_pb,
)
from eplb_service.window.report import CountBasis, LoadReport, Semantics, TableCounts

BITS_63 = st.integers(0, (1 << 63) - 1)
CHUNKS = st.integers(1, (1 << 63) - 1).map(ChunkId)
RANKS = st.integers(0, 65535).map(RankId)
EPOCHS = st.integers(0, (1 << 31) - 1)
SMALL = st.integers(0, (1 << 31) - 1)
SECONDS = st.floats(0, 1e6)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=12)
ADDRESSES = st.builds(Address, RANKS, BITS_63, BITS_63)
LAYERS = st.builds(LayerRef, NAMES, SMALL)
ROWS = st.lists(st.integers(-1, 300), min_size=1, max_size=12).map(tuple)
SHARES = st.none() | st.lists(st.floats(0, 1, width=32), min_size=1, max_size=12).map(tuple)
LINK_BYTES = st.builds(LinkBytes, same_rank=BITS_63, same_node=BITS_63, cross_node=BITS_63)


def tuples(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=3).map(tuple)


TO_RANK: st.SearchStrategy[ToRank] = st.one_of(
    st.builds(Hello, to=ADDRESSES, epoch=EPOCHS),
    st.builds(Arm, to=ADDRESSES, chunk_id=CHUNKS),
    st.builds(Disarm, to=ADDRESSES, chunk_id=CHUNKS, epoch=EPOCHS),
    st.builds(
        Stage,
        to=ADDRESSES, chunk_id=CHUNKS, generation=st.integers(1, 1 << 40), weights_version=BITS_63, mesh_id=BITS_63,
        layers=tuples(st.builds(
            LayerChange, layer=LAYERS, old_digest=BITS_63, new_digest=BITS_63, new_row=ROWS, new_shares=SHARES,
        )),
        copies=tuples(st.builds(
            Copy, layer=LAYERS, expert=SMALL, source_rank=RANKS, source_slot=SMALL, target_rank=RANKS, target_slot=SMALL,
            relay_of=st.integers(-1, 1 << 20),
        )),
        stage_timeout_s=st.floats(1e-3, 1e6), arm_ttl_s=st.floats(1e-3, 1e6),
        throttle=st.builds(
            Throttle, bytes_per_s=st.just(0.0) | st.floats(1e-3, 1e15), time_share=st.floats(0.0, 1.0, exclude_min=True)
        ),
    ),
)  # fmt: skip

FROM_AGENT: st.SearchStrategy[FromAgent] = st.one_of(
    st.builds(
        Attach,
        deployment=st.just("moe-1.prod_x"),
        ranks=st.lists(ADDRESSES, max_size=3, unique_by=lambda address: address.rank_id).map(tuple),
    ),
    st.builds(Gone, sender=ADDRESSES, reason=TEXT),
    st.builds(
        Live,
        sender=ADDRESSES, epoch=EPOCHS, epoch_seen=EPOCHS, generation_seen=BITS_63, closed_id=BITS_63, flipped_id=BITS_63,
        boundary=BITS_63, weights_version=BITS_63, voting=st.booleans(), off_reason=TEXT,
        layers=tuples(st.builds(LiveLayer, layer=LAYERS, generation=BITS_63, digest=BITS_63, row=ROWS, shares=SHARES)),
    ),
    st.builds(Staged, sender=ADDRESSES, chunk_id=CHUNKS, seconds=SECONDS, received=LINK_BYTES),
    st.builds(Refused, sender=ADDRESSES, chunk_id=CHUNKS, code=st.sampled_from(RefusalCode), reason=TEXT),
    st.builds(Armed, sender=ADDRESSES, chunk_id=CHUNKS),
    st.builds(Committed, sender=ADDRESSES, chunk_id=CHUNKS, boundary=BITS_63),
    st.builds(
        Flipped, sender=ADDRESSES, chunk_id=CHUNKS, boundary=BITS_63, digests=tuples(st.tuples(LAYERS, BITS_63)),
        stall_s=SECONDS,
    ),
    st.builds(Disarmed, sender=ADDRESSES, chunk_id=CHUNKS),
    st.builds(
        Pulse, sender=ADDRESSES, boundary=BITS_63, idle=st.booleans(), voting=st.booleans(), off_reason=TEXT,
        windows_dropped=BITS_63, weights_version=BITS_63,
    ),
)  # fmt: skip

LAYER = LayerInfo(layer_id=3, num_logical=8, slots=3, expert_bytes=1024)
REGISTRATION = Registration(
    deployment=DeploymentId("moe"),
    address=Address(RankId(4), Incarnation(11), GroupId(12)),
    node="node-a",
    group_rank_ids=(RankId(9), RankId(4)),
    phase=Phase.DECODE,
    stage=1,
    models=(
        ModelInfo(
            name="target",
            digest="d0",
            manifest_digest="m0",
            layers=(LAYER, replace(LAYER, layer_id=5)),
            tensors=(LayerTensors(layer_ids=(LAYER.layer_id, 5), tensors=(("weight", "float32 [2] expert linear"),)),),
        ),
    ),
    capacity=0.5,
    dispatch="even",
    vote_period=4,
    window_steps=64,
    sub_windows=2,
    staging_bytes=0,
    replica_table_width=4,
    weights_version=3,
    capabilities=("commit",),
)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(TO_RANK)
@settings(max_examples=150, deadline=None)
def test_orders_come_out_as_they_went_in(order: ToRank) -> None:
    assert to_rank_from_pb(over_the_wire(to_rank_to_pb(order))) == order


@given(FROM_AGENT)
@settings(max_examples=250, deadline=None)
def test_facts_come_out_as_they_went_in(fact: FromAgent) -> None:
    assert from_agent_from_pb(over_the_wire(from_agent_to_pb(fact))) == fact


ANY_INT = st.integers(-2, 2) | st.integers()
ANY_TEXT = st.text(max_size=8)
ANY_LAYER = st.builds(LayerRef, ANY_TEXT, ANY_INT)
ANY_ROW = st.lists(ANY_INT, max_size=3).map(tuple)
ANY_SENDER = st.builds(Address, ANY_INT, ANY_INT, ANY_INT) | st.just(Address(RankId(1), Incarnation(1), GroupId(1)))
HOSTILE: st.SearchStrategy[FromAgent] = st.one_of(
    st.builds(Armed, sender=ANY_SENDER, chunk_id=ANY_INT),
    st.builds(Committed, sender=ANY_SENDER, chunk_id=ANY_INT, boundary=ANY_INT),
    st.builds(
        Staged, sender=ANY_SENDER, chunk_id=ANY_INT, seconds=st.floats(), received=st.builds(LinkBytes, same_rank=ANY_INT),
    ),
    st.builds(Refused, sender=ANY_SENDER, chunk_id=ANY_INT, code=st.sampled_from(RefusalCode), reason=ANY_TEXT),
    st.builds(
        Flipped, sender=ANY_SENDER, chunk_id=ANY_INT, boundary=ANY_INT, digests=tuples(st.tuples(ANY_LAYER, ANY_INT)),
        stall_s=st.floats(),
    ),
    st.builds(
        Live, sender=ANY_SENDER, epoch=ANY_INT, epoch_seen=ANY_INT, generation_seen=st.just(0), closed_id=ANY_INT,
        flipped_id=st.just(0), boundary=st.just(0), weights_version=st.just(0), voting=st.booleans(), off_reason=ANY_TEXT,
        layers=tuples(st.builds(LiveLayer, layer=ANY_LAYER, generation=ANY_INT, digest=ANY_INT, row=ANY_ROW)),
    ),
)  # fmt: skip


@given(HOSTILE)
@settings(max_examples=300, deadline=None)
def test_what_one_end_sends_the_other_end_can_read(fact: FromAgent) -> None:
    """A fact of one hook that the planner could not read would end the control stream of all ranks of the node."""
    try:
        message = from_agent_to_pb(fact)
    except InvalidInputError:
        return
    assert type(from_agent_from_pb(over_the_wire(message))) is type(fact)


def test_messages_whose_fields_are_all_zero_keep_their_kind() -> None:
    nobody = Address(RankId(0), Incarnation(0), GroupId(0))
    pulse = Pulse(
        sender=nobody, boundary=0, idle=False, voting=False, off_reason="", windows_dropped=0, weights_version=0
    )  # fmt: skip
    assert from_agent_from_pb(over_the_wire(from_agent_to_pb(pulse))) == pulse
    hello = Hello(to=nobody, epoch=Epoch(0))
    assert to_rank_from_pb(over_the_wire(to_rank_to_pb(hello))) == hello


def test_registration_comes_out_as_it_went_in() -> None:
    for registration in (REGISTRATION, replace(REGISTRATION, nic="mlx5_0")):
        assert registration_from_pb(over_the_wire(registration_to_pb(registration))) == registration


def test_a_rank_of_an_earlier_release_sends_no_nic_and_has_its_own() -> None:
    now = registration_to_pb(replace(REGISTRATION, nic="mlx5_0"))
    earlier = agent_pb2.RegisterRequest.FromString(now.SerializeToString())
    earlier.ClearField("nic")
    assert registration_from_pb(over_the_wire(earlier)) == REGISTRATION
    assert registration_to_pb(REGISTRATION) == earlier  # nothing more goes to a planner of an earlier release either


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deployment": "a b"}, "deployment: 'a b' of 3 characters"),
        ({"deployment": "x" * 129}, "of 129 characters; expected 1 to 128"),
        ({"node": ""}, "node: '' of 0 characters"),
        ({"group_rank_ids": (RankId(9),)}, "group_rank_ids: [9] must be unique and hold the rank itself, 4"),
        ({"group_rank_ids": (RankId(4), RankId(4))}, "group_rank_ids: [4, 4] must be unique"),
        ({"group_rank_ids": (RankId(4), RankId(65536))}, "group_rank_ids: 65536 is out of range; expected 0 to 65535"),
        ({"models": ()}, "models: 0 models; expected at least one"),
        ({"models": REGISTRATION.models * 2}, "models: 2 models"),
        ({"capacity": 0.0}, "capacity: 0.0; expected a finite number > 0"),
        ({"capacity": float("nan")}, "capacity: nan"),
        ({"vote_period": 0}, "vote_period: 0 is out of range; expected 1"),
        ({"sub_windows": 0}, "sub_windows: 0 is out of range"),
        ({"window_steps": -1}, "window_steps: -1 is out of range"),
        ({"staging_bytes": -5}, "staging_bytes: -5 is out of range"),
        ({"weights_version": 1 << 63}, f"weights_version: {1 << 63} is out of range"),
        ({"protocol_min": 2, "protocol_max": 1}, "2 to 1 is no range"),
        ({"dispatch": "a\nb"}, "dispatch: 'a\\nb' of 3 characters; expected 1 to 256 printable"),
        ({"node": "a\ud800"}, "expected 1 to 256 printable"),
        ({"nic": "n" * 257}, "of 257 characters; expected 1 to 256 printable"),
        ({"nic": "mlx5\n0"}, "nic: 'mlx5\\n0' of 6 characters; expected 1 to 256 printable"),
    ],
)  # fmt: skip
def test_registrations_that_no_engine_can_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        registration_from_pb(over_the_wire(registration_to_pb(replace(REGISTRATION, **change))))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((LAYER, LAYER), "models[0].layers.layer_id: 3 comes after 3"),
        ((replace(LAYER, num_logical=0),), "models[0].layers[0].num_logical: 0 is out of range; expected 1"),
        ((replace(LAYER, slots=0),), "models[0].layers[0].slots: 0"),
        ((replace(LAYER, expert_bytes=0),), "models[0].layers[0].expert_bytes: 0"),
        ((replace(LAYER, expert_bytes=EXPERT_BYTES_MAX + 1),), f"expected 0 to {EXPERT_BYTES_MAX}"),
        ((LAYER,) * 4097, "models.layers: 4097 is out of range; expected 0 to 4096"),
    ],
)
def test_layers_that_cannot_be_are_refused(layers: tuple[LayerInfo, ...], message: str) -> None:
    models = (replace(REGISTRATION.models[0], layers=layers),)
    with pytest.raises(InvalidInputError) as refusal:
        registration_from_pb(registration_to_pb(replace(REGISTRATION, models=models)))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        (agent_pb2.ControlFromAgent(), "message of rank 0 is empty"),
        (agent_pb2.ControlFromAgent(armed=agent_pb2.Armed()), "armed.chunk_id: 0 is out of range"),
        (
            agent_pb2.ControlFromAgent(refused=agent_pb2.Refused(chunk_id=1, code="mood")),
            "refused.code: 'mood'; expected one of busy",
        ),
        (agent_pb2.ControlFromAgent(address=common_pb2.Address(rank_id=70000)), "empty"),
        (
            agent_pb2.ControlFromAgent(address=common_pb2.Address(rank_id=70000), pulse=agent_pb2.Pulse()),
            "address.rank_id: 70000 is out of range; expected 0 to 65535",
        ),
        (
            agent_pb2.ControlFromAgent(flipped=agent_pb2.Flipped(chunk_id=1, stall_s=float("nan"))),
            "flipped.stall_s: nan s; expected a finite number >= 0",
        ),
        (
            agent_pb2.ControlFromAgent(live=agent_pb2.Live(layers=[agent_pb2.LiveLayer(layer=common_pb2.Layer(model="m"))])),
            "live.layers[0].row: dtype ''; expected i4 or i8",
        ),
        (agent_pb2.ControlFromAgent(pulse=agent_pb2.Pulse(boundary=1 << 63)), f"pulse.boundary: {1 << 63} is out of range"),
        (
            agent_pb2.ControlFromAgent(attach=agent_pb2.Attach(deployment="moe", ranks=[common_pb2.Address(rank_id=3)] * 2)),
            "attach.ranks: 2 addresses name a rank more than once",
        ),
        (
            agent_pb2.ControlFromAgent(attach=agent_pb2.Attach(deployment="moe", ranks=[common_pb2.Address()] * 65537)),
            "attach.ranks: 65537 is out of range; expected 0 to 65536",
        ),
        (
            agent_pb2.ControlFromAgent(live=agent_pb2.Live(layers=[agent_pb2.LiveLayer()] * 4097)),
            "live.layers: 4097 is out of range; expected 0 to 4096",
        ),
        (
            agent_pb2.ControlFromAgent(flipped=agent_pb2.Flipped(digests=[agent_pb2.RowDigest()] * 4097)),
            "flipped.digests: 4097 is out of range; expected 0 to 4096",
        ),
    ],
)  # fmt: skip
def test_facts_that_cannot_be_are_refused(envelope: agent_pb2.ControlFromAgent, message: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        from_agent_from_pb(over_the_wire(envelope))
    assert message in str(refusal.value)


TIMED = {"chunk_id": 5, "generation": 1, "stage_timeout_s": 1.0, "arm_ttl_s": 1.0}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({}, "stage.chunk_id: 0 is out of range"),
        ({"chunk_id": 5}, "stage.generation: 0 is out of range; expected 1"),
        ({"chunk_id": 5, "generation": 1}, "stage.stage_timeout_s: 0.0 s; expected a finite number > 0"),
        ({"chunk_id": 5, "generation": 1, "stage_timeout_s": 1.0, "arm_ttl_s": float("inf")}, "stage.arm_ttl_s: inf s"),
        (
            {
                "chunk_id": 5,
                "generation": 1,
                "copies": [agent_pb2.Copy(layer=common_pb2.Layer(model="m"), source_rank=1 << 20)],
            },
            "stage.copies[0].source_rank: 1048576 is out of range",
        ),
        ({**TIMED, "bytes_per_s": 0.0}, "stage.bytes_per_s: 0.0; expected a finite number above 0"),
        ({**TIMED, "bytes_per_s": float("inf")}, "stage.bytes_per_s: inf; expected a finite number above 0"),
        ({**TIMED, "time_share": 1.5}, "stage.time_share: 1.5; expected a finite number above 0 and at most 1"),
        ({**TIMED, "time_share": float("nan")}, "stage.time_share: nan; expected a finite number above 0 and at most 1"),
    ],
)
def test_stages_that_cannot_be_are_refused(stage: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        to_rank_from_pb(over_the_wire(agent_pb2.ControlToAgent(stage=agent_pb2.Stage(**stage))))
    assert message in str(refusal.value)


def test_a_value_that_does_not_fit_the_wire_is_refused_before_it_is_sent() -> None:
    sender = REGISTRATION.address
    with pytest.raises(InvalidInputError, match=r"committed.boundary: -1 is out of range"):
        from_agent_to_pb(Committed(sender=sender, chunk_id=ChunkId(1), boundary=-1))
    with pytest.raises(InvalidInputError, match=r"live.layers.row: 4294967296 is out of range"):
        from_agent_to_pb(_live((1 << 32,)))
    for share in (0.1, 1e300, float("nan"), float("inf")):
        with pytest.raises(InvalidInputError, match=re.escape(f"live.layers.shares: {share!r} is no finite float32")):
            from_agent_to_pb(_live((1,), (share,)))


def _live(row: tuple[int, ...], shares: tuple[float, ...] | None = None) -> Live:
    layer = LiveLayer(layer=LayerRef("m", 0), generation=GenerationNumber(0), digest=1, row=row, shares=shares)
    return Live(
        sender=REGISTRATION.address, epoch=Epoch(1), epoch_seen=Epoch(1), generation_seen=GenerationNumber(0),
        closed_id=ChunkId(0), flipped_id=ChunkId(0), boundary=0, weights_version=0, voting=True, off_reason="", layers=(layer,),
    )  # fmt: skip


def test_a_reason_that_is_too_long_or_not_text_travels_mended() -> None:
    """A hook's reason may hold anything that JSON can, lone surrogates too; losing the Refused would cost a deadline."""
    refused = Refused(sender=REGISTRATION.address, chunk_id=ChunkId(1), code=RefusalCode.TRANSFER, reason="\ud800" + "x" * 9000)
    arrived = from_agent_from_pb(over_the_wire(from_agent_to_pb(refused)))
    assert isinstance(arrived, Refused)
    assert arrived.reason == "?" + "x" * 4094 + "…"


# ── arrays ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    hnp.arrays(
        st.sampled_from(["<i4", "<i8", "<u8", "<f4", "<f8", ">i4"]), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)
    )
)
@settings(max_examples=100, deadline=None)
def test_arrays_come_out_as_they_went_in(array: np.ndarray[Any, Any]) -> None:
    arrived = array_from_pb(over_the_wire(array_to_pb(array, "x")), "x", dtypes="iuf", shape=array.shape)
    assert arrived.dtype.kind == array.dtype.kind
    np.testing.assert_array_equal(arrived, array)
    assert not arrived.flags.writeable


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (common_pb2.Array(shape=[2], dtype="i4", data=b"1234"), "x: 4 bytes of data, but shape (2,) of i4 takes 8"),
        (common_pb2.Array(shape=[2, 2], dtype="i4", data=b"1" * 16), "x: shape (2, 2); expected (L)"),
        (common_pb2.Array(shape=[2], dtype="f4", data=b"1" * 8), "x: dtype 'f4'; expected i4 or i8"),
        (common_pb2.Array(shape=[2], dtype="O", data=b"1" * 8), "x: dtype 'O'; expected i4 or i8"),
        (common_pb2.Array(shape=[1 << 31], dtype="i8", data=b""), "takes 17179869184"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_with_the_numbers(message: common_pb2.Array, complaint: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        array_from_pb(message, "x", dtypes="i", shape=("L",))
    assert complaint in str(refusal.value)


def test_array_that_holds_nothing_but_is_too_large_for_numpy_is_refused() -> None:
    message = common_pb2.Array(shape=[(1 << 32) - 1, 0, (1 << 32) - 1], dtype="i8")
    with pytest.raises(InvalidInputError, match=r"x: shape \(4294967295, 0, 4294967295\) is too large; at most"):
        array_from_pb(message, "x", dtypes="i", shape=("V", 0, "E"))


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([True]), np.array([1], np.int16), np.array([None])])
def test_arrays_of_other_types_do_not_travel(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"counts: .* does not travel; use one of i4, i8"):
        array_to_pb(array, "counts")


# ── placements ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def table(model: str = "m", layers: tuple[int, ...] = (1, 4)) -> Table:
    return Table.linear(model=model, layer_ids=layers, num_logical=5, rank_ids=(7, 3), slots_per_rank=3)


def test_placements_come_out_as_they_went_in() -> None:
    placement = Placement((table(), table("draft", (0,))))
    assert placement_from_pb(over_the_wire(placement_to_pb(placement))) == placement


def test_a_placement_that_is_not_what_its_digest_says_is_refused() -> None:
    message = placement_to_pb(Placement((table(),)))
    row = np.array([[0, 1, 2, 3, 4, 1], [0, 1, 2, 3, 4, 0]], np.int32)
    message.tables[0].physical_to_logical.data = row.tobytes()
    with pytest.raises(InvalidInputError, match=r"its tables have digest .* but it claims"):
        placement_from_pb(message)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"layer_ids": [1]}, "tables[0].physical_to_logical: shape (2, 6); expected (1, P)"),
        ({"layer_ids": [4, 1]}, "tables[0].layer_ids: 1 comes after 4"),
        ({"rank_ids": [1, 2, 3, 4]}, "6 slots do not divide over 4 ranks"),
        ({"rank_ids": [1, 1]}, "rank ids must be unique"),
        ({"num_logical": 4}, "holds expert 4"),
        ({"num_logical": 0}, "num_logical: 0 is out of range"),
        ({"model": ""}, "tables[0].model: '' of 0 characters"),
    ],
)
def test_tables_that_cannot_be_are_refused(change: dict[str, Any], complaint: str) -> None:
    message = placement_to_pb(Placement((table(),)))
    for field in change:
        message.tables[0].ClearField(field)
    message.tables[0].MergeFrom(common_pb2.Table(**change))
    with pytest.raises(InvalidInputError) as refusal:
        placement_from_pb(message)
    assert complaint in str(refusal.value)


def test_an_empty_placement_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"placement.tables: 0 is out of range; expected 1"):
        placement_from_pb(common_pb2.Placement())


def test_shares_travel_in_the_table_bit_for_bit_and_are_absent_without() -> None:
    bare = table()
    third = np.float32(1) / np.float32(3)
    shares = bare.with_even_shares().shares
    assert shares is not None
    shares = shares.copy()
    row = bare.physical_to_logical[0].tolist()
    pair = next([slot for slot, held in enumerate(row) if held == expert] for expert in row if row.count(expert) == 2)
    shares[0, pair] = third, np.float32(1) - third
    sent = bare.with_shares(shares)
    arrived = table_from_pb(over_the_wire(table_to_pb(sent)))
    assert arrived == sent
    assert arrived.shares is not None
    assert arrived.shares.tobytes() == shares.tobytes()
    assert not table_to_pb(bare).HasField("shares")
    placement = Placement((sent,))
    assert placement_from_pb(over_the_wire(placement_to_pb(placement))).digest() == placement.digest()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dtype": "i4"}, "table.shares: dtype 'i4'; expected f4 or f8"),
        ({"shape": [1, 12]}, "table.shares: shape (1, 12); expected (2, 6)"),
        ({"data": np.full(12, np.nan, np.float32).tobytes()}, "table: layer"),
        ({"data": np.zeros(12, np.float32).tobytes()}, "they must add up to 1"),
    ],
)
def test_shares_that_cannot_be_are_refused(change: dict[str, Any], complaint: str) -> None:
    message = table_to_pb(table().with_even_shares())
    for field, value in change.items():
        message.shares.ClearField(field)
        message.shares.MergeFrom(common_pb2.Array(**{field: value}))
    with pytest.raises(InvalidInputError) as refusal:
        table_from_pb(message)
    assert complaint in str(refusal.value)


# ── load reports ─────────────────────────────────────────────────────────────────────────────────────────────────────────

COUNTS = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
REPORT = LoadReport(
    rank_id=RankId(4), incarnation=Incarnation(11), group_id=GroupId(12), window_index=5, boundary_begin=320,
    boundary_end=384, forward_passes=60, tokens=900, semantics=Semantics.GLOBAL_TOKENS, phase=Phase.PREFILL,
    live_digest_begin=1, live_digest_end=(1 << 63) - 1,
    tables=(TableCounts(model="m", layer_ids=(1, None, 7), counts=COUNTS),), warmup=True, basis=CountBasis.CONVERTED_AT_END,
    step_time_min_s=0.1, step_time_mean_s=0.2, step_time_max_s=0.3,
)  # fmt: skip


def test_reports_come_out_as_they_went_in() -> None:
    deployment, arrived = report_from_pb(over_the_wire(report_to_pb(DeploymentId("moe"), REPORT)))
    assert deployment == "moe"
    np.testing.assert_array_equal(arrived.tables[0].counts, COUNTS)
    assert arrived.tables[0].layer_ids == (1, None, 7)
    assert replace(arrived, tables=()).__repr__() == replace(REPORT, tables=()).__repr__()


def test_counts_that_are_no_integers_arrive_so_that_the_planner_can_say_so() -> None:
    odd = replace(REPORT, tables=(TableCounts(model="m", layer_ids=(1,), counts=np.full((1, 1, 4), np.nan)),))
    _, arrived = report_from_pb(over_the_wire(report_to_pb(DeploymentId("moe"), odd)))
    assert arrived.tables[0].counts.dtype == np.float64


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"deployment": "no/slash"}, "report.deployment: 'no/slash'"),
        ({"window_index": 1 << 63}, "report.window_index: 9223372036854775808 is out of range"),
        ({"semantics": 0}, "report.semantics: 0 is not one of 1 (local_tokens), 2 (global_tokens)"),
        ({"phase": 9}, "report.phase: 9 is not one of 1 (prefill)"),
        ({"basis": 2}, "report.basis: 2 is not one of"),
        ({"tables": [agent_pb2.TableCounts(model="m", layer_ids=[1 << 31])]}, "report.tables[0].layer_ids: 2147483648"),
        (
            {"tables": [agent_pb2.TableCounts(model="m", layer_ids=[1], counts=array_to_pb(COUNTS, ""))]},
            "report.tables[0].counts: shape (2, 3, 4); expected (sub-windows, 1, E)",
        ),
        ({"tables": [agent_pb2.TableCounts(model="m")] * 257}, "report.tables: 257 is out of range; expected 0 to 256"),
        (
            {"tables": [agent_pb2.TableCounts(model="m", layer_ids=range(2049))] * 2},
            "report.tables.layer_ids: 4098 is out of range; expected 0 to 4096",
        ),
    ],
)
def test_reports_that_cannot_be_read_are_refused(change: dict[str, Any], complaint: str) -> None:
    message = report_to_pb(DeploymentId("moe"), REPORT)
    for field in change:
        message.ClearField(field)
    message.MergeFrom(agent_pb2.LoadReport(**change))
    with pytest.raises(InvalidInputError) as refusal:
        report_from_pb(over_the_wire(message))
    assert complaint in str(refusal.value)


CONVERSIONS: list[tuple[Any, Callable[[Any], object]]] = [
    (agent_pb2.ControlFromAgent, from_agent_from_pb),
    (agent_pb2.ControlToAgent, to_rank_from_pb),
    (agent_pb2.RegisterRequest, registration_from_pb),
    (agent_pb2.LoadReport, report_from_pb),
    (common_pb2.Placement, placement_from_pb),
    (common_pb2.Address, address_from_pb),
]


@pytest.mark.parametrize(("cls", "convert"), CONVERSIONS, ids=lambda value: value.__name__)
@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_no_bytes_crash_the_conversions(cls: Any, convert: Callable[[Any], object], noise: bytes) -> None:
    with contextlib.suppress(DecodeError, InvalidInputError):  # gRPC answers the first, the planner the second
        convert(cls.FromString(noise))
