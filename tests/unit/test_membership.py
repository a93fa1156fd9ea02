"""Groups form from what ranks say of themselves; ranks that disagree are refused by name and number."""

from __future__ import annotations

import dataclasses

import pytest

from eplb_service.control import Address, LayerInfo, LayerTensors, LiveLayer, ModelInfo, Registration
from eplb_service.errors import ConflictError, InvalidInputError, NotFoundError, StaleError, UnsupportedError
from eplb_service.generation import LiveMap
from eplb_service.ids import DeploymentId, GenerationNumber, GroupId, Incarnation, LayerRef, Phase, RankId
from eplb_service.membership.machine import (
    Attached,
    Detached,
    Gone,
    Group,
    GroupLost,
    GroupReady,
    Membership,
    MembershipChange,
    RankAttached,
    RankDetached,
    Ready,
    Registered,
    Waiting,
    WeightsSeen,
)
from eplb_service.membership.rivals import SILENCE_S

DEPLOYMENT = DeploymentId("chat")


def layers(num: int = 2, *, num_logical: int = 6, slots: int = 4, expert_bytes: int = 100) -> tuple[LayerInfo, ...]:
    return tuple(
        LayerInfo(layer_id=3 + index, num_logical=num_logical, slots=slots, expert_bytes=expert_bytes) for index in range(num)
    )


WEIGHT, SCALE = ("weight", "float8_e4m3fn [8, 4] expert linear"), ("scale", "float32 [2] expert linear")
TENSORS = (LayerTensors(layer_ids=(3, 4), tensors=(SCALE, WEIGHT)),)
TENSORS_ELSEWHERE = (LayerTensors(layer_ids=(4,), tensors=(SCALE, WEIGHT)), LayerTensors(layer_ids=(3,), tensors=(WEIGHT,)))


def model(name: str = "v3", **changes: object) -> ModelInfo:
    made = ModelInfo(name=name, digest="arch", manifest_digest="tensors", layers=layers(), tensors=TENSORS)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def rank(
    rank_id: int, *, ids: tuple[int, ...] = (0, 1), incarnation: int = 1, group: int = 1, **changes: object
) -> Registration:
    made = Registration(
        deployment=DEPLOYMENT,
        address=Address(RankId(rank_id), Incarnation(incarnation), GroupId(group)),
        node=f"node{rank_id // 2}",
        group_rank_ids=tuple(RankId(member) for member in ids),
        phase=Phase.DECODE,
        stage=0,
        models=(model(),),
        capacity=1.0,
        dispatch="even",
        vote_period=8,
        window_steps=64,
        sub_windows=4,
        staging_bytes=1000,
        replica_table_width=8,
        weights_version=1,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def join(membership: Membership, *registrations: Registration, now: float = 0.0) -> list[MembershipChange]:
    changes: list[MembershipChange] = []
    for registration in registrations:
        changes += membership.handle(Registered(registration), now)
        changes += membership.handle(Attached(registration.address), now)
    return changes


def status_of(membership: Membership) -> Waiting | Ready:
    return membership.status


def ready(*registrations: Registration) -> tuple[Membership, Group]:
    membership = Membership(DEPLOYMENT)
    (change,) = join(membership, *registrations)
    assert isinstance(change, GroupReady)
    return membership, change.group


def test_a_group_is_ready_when_every_named_rank_is_registered_and_attached() -> None:
    membership = Membership(DEPLOYMENT)
    assert membership.status == Waiting(None, ())
    assert membership.handle(Registered(rank(1)), 5.0) == ()
    assert membership.status == Waiting(GroupId(1), ((RankId(0), "not registered"), (RankId(1), "no control stream")), 5.0)
    assert membership.handle(Attached(rank(1).address), 6.0) == ()
    assert membership.handle(Registered(rank(0)), 7.0) == ()
    status = membership.status
    assert isinstance(status, Waiting)
    assert status.reason == "waiting for rank 0 (no control stream)"
    (change,) = membership.handle(Attached(rank(0).address), 8.0)
    assert isinstance(change, GroupReady)
    assert [registration.address.rank_id for registration in change.group.registrations] == [0, 1]
    assert status_of(membership) == Ready(change.group)


def test_stable_rank_ids_need_not_start_at_0() -> None:  # vllm-ascend#10486
    ids = (6, 4, 7, 5)
    _, group = ready(*(rank(rank_id, ids=ids) for rank_id in (4, 5, 6, 7)))
    assert group.rank_ids == ids
    assert list(group.addresses) == list(ids)
    assert group.topology.nodes == ("node3", "node2", "node3", "node2")


def test_nodes_come_from_registration_never_from_a_constant() -> None:  # FastDeploy#5923
    ids = tuple(range(20))
    _, group = ready(*(rank(rank_id, ids=ids, node="big" if rank_id < 12 else "small") for rank_id in ids))
    assert group.topology.node_names == ("big", "small")
    assert group.topology.node_indices == (0,) * 12 + (1,) * 8


def test_layers_of_equal_experts_and_slots_form_a_table() -> None:
    mixed = model(layers=(*layers(2), LayerInfo(layer_id=1, num_logical=5, slots=3, expert_bytes=7)))
    drafter = model("drafter", layers=layers(1))
    _, group = ready(rank(0, models=(mixed, drafter)), rank(1, models=(mixed, drafter)))
    assert [(table.model, table.layer_ids, table.num_logical, table.slots) for table in group.tables] == [
        ("v3", (1,), 5, 3),
        ("v3", (3, 4), 6, 4),
        ("drafter", (3,), 6, 4),
    ]
    assert group.expert_bytes[LayerRef("v3", 1)] == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"models": (model(layers=layers(num_logical=1)),)},
            r"rank 1 registers .*'v3' layer 3 with E = 1, but rank 0 .* has 6",
        ),
        ({"models": (model(layers=layers(1)),)}, r"with L = 1, but rank 0 of the same group has 2"),
        ({"models": (model(layers=layers(slots=5)),)}, r"slots = 5, but rank 0 .* has 4"),
        ({"models": (model(layers=layers(expert_bytes=7)),)}, r"expert bytes = 7, but rank 0 .* has 100"),
        ({"models": (model(digest="other"),)}, r"digest 'other', but rank 0 .* has 'arch'"),
        ({"models": (model(manifest_digest="other"),)}, r"tensor manifest digest 'other', but rank 0 .* has 'tensors'"),
        (
            {"models": (model(manifest_digest="other", tensors=TENSORS_ELSEWHERE),)},
            r"model 'v3' layer 3 with tensor scale: missing, but rank 0 .* has float32 \[2\] expert linear: all ranks",
        ),
        ({"models": (model("r1"),)}, r"models \['r1'\], but rank 0 .* has \['v3'\]"),
        ({"vote_period": 9}, r"vote period K = 9, but rank 0 .* has 8"),
        ({"window_steps": 9}, r"window steps W = 9, but rank 0 .* has 64"),
        ({"phase": Phase.PREFILL}, r"phase prefill, but rank 0 .* has decode"),
        ({"dispatch": "nearest"}, r"dispatch nearest, but rank 0 .* has even"),
        ({"group_rank_ids": (RankId(1), RankId(0))}, r"the group \[1, 0\], but rank 0 .* has \[0, 1\]"),
        ({"weights_version": 2}, r"weights version 2, but rank 0 .* has 1"),
        ({"nic": "mlx5_0"}, r"rank 1 registers NIC 'mlx5_0', but rank 0 of the same node node0 has none: .*EPLB_NIC"),
    ],
)
def test_a_rank_that_disagrees_with_a_peer_is_refused_with_both_values(changes: dict[str, object], said: str) -> None:
    # sglang#6081: one rank fell back to another implementation and reported 1 expert instead of 256
    membership = Membership(DEPLOYMENT)
    join(membership, rank(0))
    before = membership.status
    with pytest.raises(ConflictError, match=said):
        membership.handle(Registered(rank(1, **changes)), 1.0)  # type: ignore[arg-type]
    assert membership.status == before
    assert isinstance(join(membership, rank(1))[-1], GroupReady)


def test_nics_of_a_node_are_named_by_all_of_its_ranks_or_none() -> None:
    ids = (0, 1, 2, 3)
    nics = {0: "rail0", 1: "rail0"}
    _, group = ready(*(rank(rank_id, ids=ids, nic=nics.get(rank_id, "")) for rank_id in ids))
    assert group.topology.nodes == ("node0", "node0", "node1", "node1")
    assert group.topology.nic_indices == (0, 0, 1, 2)  # node1 names none: each of its ranks has its own
    _, unnamed = ready(*(rank(rank_id, ids=ids) for rank_id in ids))
    assert unnamed.topology.nics is None
    membership = Membership(DEPLOYMENT)
    join(membership, rank(0, nic="rail0"))
    with pytest.raises(ConflictError, match="rank 1 registers NIC none, but rank 0 of the same node node0 has 'rail0'"):
        membership.handle(Registered(rank(1)), 1.0)


def test_protocol_ranges_without_a_common_version_are_refused() -> None:
    membership = Membership(DEPLOYMENT)
    join(membership, rank(0))
    with pytest.raises(UnsupportedError, match=r"protocol 4\.\.5, this planner 1\.\.3"):
        membership.handle(Registered(rank(1, protocol_min=4, protocol_max=5)), 0.0)


def test_a_rank_of_the_release_before_shares_joins_unless_its_dispatch_is_weighted() -> None:
    _, group = ready(rank(0, protocol_max=1), rank(1))
    assert (group.protocol, group.fan_out) == (1, False)
    assert ready(rank(0), rank(1))[1].fan_out
    with pytest.raises(UnsupportedError, match=r"dispatches by shares and speaks protocol 1\.\.1; shares came with 2"):
        Membership(DEPLOYMENT).handle(Registered(rank(0, dispatch="weighted", protocol_max=1)), 0.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": (model(layers=()),)}, "model 'v3' with 0 MoE layers"),  # vllm#40740
        ({"models": ()}, "name at least one"),
        (
            {"models": (model(layers=layers(num_logical=9)),)},  # vllm#52435: named is the least that is right
            r"2 ranks x 4 slots = 8 cannot hold 9 experts; use at least 5 slots per rank \(10 slots, 1 redundant experts\)",
        ),
        ({"models": (model(layers=layers(expert_bytes=0)),)}, "expert_bytes=0"),
        ({"models": (model(layers=layers(1) * 2),)}, "ids are unique"),
        ({"group_rank_ids": (RankId(0), RankId(2))}, "itself among them"),
        ({"group_rank_ids": (RankId(1), RankId(1))}, "each rank once"),
        ({"capacity": float("nan")}, "capacity nan"),
        ({"vote_period": 0}, "vote_period 0"),
        ({"dispatch": "lucky"}, "dispatches by 'lucky'; known are even, hashed"),
        ({"node": ""}, "names no node"),
        ({"deployment": DeploymentId("other")}, "registers for 'other', not 'chat'"),
        ({"staging_bytes": -1}, "staging_bytes -1"),
        (
            {"models": (model(layers=layers(2, slots=1 << 30)),)},
            "registers 2147483648 slots in all its layers: 4294967296 on 2 ranks, at most 67108864",
        ),
    ],
)
def test_a_registration_that_cannot_be_used_says_why(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        Membership(DEPLOYMENT).handle(Registered(rank(1, **changes)), 0.0)  # type: ignore[arg-type]


def test_a_rank_without_staging_makes_the_group_observe_only() -> None:
    _, group = ready(rank(0), rank(1, staging_bytes=0))
    assert group.observe_only == "rank 1 allocated no staging"
    _, group = ready(rank(0), rank(1))
    assert group.observe_only == ""


def test_a_new_life_replaces_the_old_and_the_old_one_is_stale() -> None:
    membership, _ = ready(rank(0), rank(1))
    assert membership.handle(Registered(rank(1, incarnation=2)), SILENCE_S) == (
        GroupLost(GroupId(1), "rank 1 restarted (incarnation 2)"),
    )
    with pytest.raises(StaleError, match="newer life of rank 1 replaced incarnation 1"):
        membership.handle(Registered(rank(1)), SILENCE_S)
    with pytest.raises(StaleError):
        membership.handle(Attached(rank(1).address), SILENCE_S)
    (change,) = membership.handle(Attached(rank(1, incarnation=2).address), SILENCE_S)
    assert isinstance(change, GroupReady)


def test_a_new_group_supersedes_the_old_and_its_stragglers_are_dropped() -> None:
    membership, _ = ready(rank(0), rank(1))
    assert membership.handle(Registered(rank(0, group=2)), 1.0) == (GroupLost(GroupId(1), "group 2 superseded it"),)
    with pytest.raises(StaleError, match="group 1, which group 2 superseded"):
        membership.handle(Registered(rank(1)), 1.0)
    with pytest.raises(StaleError):
        membership.handle(Attached(rank(1).address), 1.0)
    assert membership.handle(Gone(rank(1).address, "late"), 1.0) == ()
    assert membership.handle(Detached(rank(0).address, "late"), 1.0) == ()
    assert isinstance(join(membership, rank(0, group=2), rank(1, group=2))[-1], GroupReady)


def test_a_broken_stream_does_not_end_the_group() -> None:
    membership, group = ready(rank(0), rank(1))
    address = rank(1).address
    assert membership.handle(Detached(address, "reset"), 1.0) == (RankDetached(address, "reset"),)
    assert membership.handle(Detached(address, "reset"), 1.0) == ()
    assert membership.status == Ready(group, (RankId(1),))
    assert membership.handle(Registered(rank(1)), 2.0) == ()
    assert membership.handle(Attached(address), 2.0) == (RankAttached(address),)
    assert membership.status == Ready(group)


def test_a_rank_that_is_gone_ends_the_group_and_is_waited_for() -> None:
    membership, _ = ready(rank(0), rank(1))
    assert membership.handle(Gone(rank(1).address, "exit 9"), 4.0) == (GroupLost(GroupId(1), "rank 1 is gone: exit 9"),)
    assert membership.status == Waiting(GroupId(1), ((RankId(1), "gone: exit 9"),), 4.0)
    (change,) = join(membership, rank(1, incarnation=2))
    assert isinstance(change, GroupReady)


def test_other_settings_of_a_known_rank_form_the_group_anew() -> None:
    membership, _ = ready(rank(0), rank(1))
    lost, formed = membership.handle(Registered(rank(1, staging_bytes=5)), 1.0)
    assert isinstance(lost, GroupLost)
    assert isinstance(formed, GroupReady)
    assert formed.group.staging_bytes == {0: 1000, 1: 5}


def test_weights_that_change_one_rank_after_another_do_not_lock_a_rank_out() -> None:
    membership, _ = ready(rank(0), rank(1))
    assert membership.handle(Registered(rank(1, weights_version=2)), 1.0) == ()  # reconnects, its peer's news is on its way
    forming = Membership(DEPLOYMENT)
    join(forming, rank(0))
    with pytest.raises(ConflictError, match="weights version 2"):
        forming.handle(Registered(rank(1, weights_version=2)), 1.0)
    forming.handle(WeightsSeen(rank(0).address, 2), 2.0)
    assert isinstance(join(forming, rank(1, weights_version=2))[-1], GroupReady)


def test_attaching_before_registering_is_told() -> None:
    with pytest.raises(NotFoundError, match="rank 1 attaches before it registered"):
        Membership(DEPLOYMENT).handle(Attached(rank(1).address), 0.0)


def live_layers(group: Group, **changes: object) -> tuple[LiveLayer, ...]:
    from eplb_service.placement import Placement, Table

    table = group.tables[0]
    linear = Table.linear(
        model=table.model, layer_ids=table.layer_ids, num_logical=6, rank_ids=group.rank_ids, slots_per_rank=table.slots
    )
    made = [
        LiveLayer(layer=layer, generation=GenerationNumber(2), digest=digest, row=tuple(linear.row(layer.layer_id).tolist()))
        for layer, digest in Placement((linear,)).row_digests().items()
    ]
    made[0] = dataclasses.replace(made[0], **changes)  # type: ignore[arg-type]
    return tuple(reversed(made))


def weighted_layers(group: Group, **changes: object) -> tuple[LiveLayer, ...]:
    even = ready(rank(0), rank(1))[1].live_map(live_layers(group))
    layers = LiveMap(even.placement.with_even_shares(), even.generations).layers
    return (dataclasses.replace(layers[0], **changes), *layers[1:])  # type: ignore[arg-type]


def test_a_live_map_has_shares_under_weighted_dispatch_and_only_there() -> None:
    _, weighted = ready(rank(0, dispatch="weighted"), rank(1, dispatch="weighted"))
    live = weighted.live_map(weighted_layers(weighted))
    assert live.placement == live.placement.without_shares().with_even_shares()
    with pytest.raises(InvalidInputError, match="layer v3/3 has no shares; dispatch 'weighted' wants shares"):
        weighted.live_map(live_layers(weighted))
    with pytest.raises(InvalidInputError, match="layer v3/3 has 2 shares for 8 slots"):
        weighted.live_map(weighted_layers(weighted, shares=(0.5, 0.5)))
    with pytest.raises(InvalidInputError, match="layer v3/3: the shares of expert 0 on its 2 slots add up to 2"):
        weighted.live_map(weighted_layers(weighted, shares=(1.0,) * 8))
    with pytest.raises(InvalidInputError, match="layer v3/3 claims digest"):
        weighted.live_map(weighted_layers(weighted, shares=(0.75, 0.5, 1.0, 1.0, 1.0, 1.0, 0.25, 0.5)))
    _, even = ready(rank(0), rank(1))
    with pytest.raises(InvalidInputError, match="layer v3/3 has shares; dispatch 'even' wants none"):
        even.live_map(weighted_layers(even))


def test_a_placement_is_fitted_to_the_dispatch_of_its_group_or_refused() -> None:
    _, weighted = ready(rank(0, dispatch="weighted"), rank(1, dispatch="weighted"))
    _, even = ready(rank(0), rank(1))
    bare = even.live_map(live_layers(even)).placement
    assert even.with_fitting_shares(bare) is bare
    assert weighted.with_fitting_shares(bare) == bare.with_even_shares()
    assert weighted.with_fitting_shares(bare.with_even_shares()) == bare.with_even_shares()
    with pytest.raises(
        InvalidInputError, match="the placement has shares and the engine's dispatch is 'even', which knows none"
    ):
        even.with_fitting_shares(bare.with_even_shares())


def test_a_live_map_is_put_in_the_order_of_the_tables() -> None:
    _, group = ready(rank(0), rank(1))
    live = group.live_map(live_layers(group))
    assert [layer.layer_id for layer in live.row_digests] == [3, 4]
    assert live.generations == (2, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"digest": 5}, "layer v3/3 claims digest 0x5"),
        ({"row": (0, 1)}, "row of layer v3/3 has 2 slots, the group 8"),
        ({"layer": LayerRef("v3", 9)}, "v3/3 is missing or unknown"),
        ({"layer": LayerRef("v3", 4)}, "missing or unknown"),
    ],
)
def test_a_live_map_that_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    _, group = ready(rank(0), rank(1))
    with pytest.raises(InvalidInputError, match=said):
        group.live_map(live_layers(group, **changes))
