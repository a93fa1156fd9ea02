"""Two fleets under one deployment name: the one that lives stays, the one that restarted gets in (sglang#33111)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.control import Registration
from eplb_service.errors import ConflictError, EplbError, StaleError
from eplb_service.ids import GroupId
from eplb_service.membership.machine import (
    Attached,
    Detached,
    Gone,
    GroupLost,
    GroupReady,
    Heard,
    Membership,
    MembershipEvent,
    Ready,
    Registered,
    WeightsSeen,
)
from tests.unit.test_membership import DEPLOYMENT, join, rank, ready

SILENCE_S = 10.0


def second(rank_id: int, *, node: str = "elsewhere", **changes: object) -> Registration:
    return rank(rank_id, **({"group": 2, "incarnation": 7, "node": node} | changes))  # type: ignore[arg-type]


def group_id(membership: Membership) -> int | None:
    status = membership.status
    return status.group.group_id if isinstance(status, Ready) else status.group_id


def test_a_second_fleet_beside_a_live_one_is_refused_and_both_are_named() -> None:
    membership, group = ready(rank(0), rank(1))
    with pytest.raises(ConflictError) as refused:
        membership.handle(Registered(second(1)), 5.0)
    assert str(refused.value) == (
        "rank 1 of group 2 (incarnation 7 on node elsewhere) registers, but rank 1 of group 1 (incarnation 1 on node node0) of"
        " deployment chat is alive: two fleets cannot share a name; give one of them another, or stop the first: once it is"
        " silent for 10 s the other is taken"
    )
    assert membership.status == Ready(group)
    assert membership.handle(Registered(rank(1)), 6.0) == ()  # the first goes on as before


@pytest.mark.parametrize("node", ["elsewhere", "node0"])
def test_whatever_a_rank_says_keeps_its_place_and_its_silence_gives_it_away(node: str) -> None:
    membership, _ = ready(rank(0), rank(1))
    membership.handle(WeightsSeen(rank(1).address, 1), 20.0)
    membership.handle(Heard(rank(1).address), 25.0)
    membership.handle(Attached(rank(1).address), 30.0)
    with pytest.raises(ConflictError, match="rank 1 of group 1"):
        membership.handle(Registered(second(1, node=node)), 30.0 + SILENCE_S - 0.001)
    (lost,) = membership.handle(Registered(second(1, node=node)), 30.0 + SILENCE_S)
    assert lost == GroupLost(GroupId(1), "group 2 superseded it")
    with pytest.raises(StaleError, match="group 1, which group 2 superseded"):
        membership.handle(Registered(rank(1)), 41.0)


def test_a_fleet_that_restarted_on_its_nodes_takes_over_at_once() -> None:
    membership, _ = ready(rank(0), rank(1))
    membership.handle(Gone(rank(1).address, "exit 9"), 1.0)
    membership.handle(Registered(second(1, node="node0")), 1.5)  # rank 0's old engine was not stopped yet
    assert group_id(membership) == 2
    membership.handle(Attached(second(1, node="node0").address), 1.5)
    assert isinstance(join(membership, second(0, node="node0"), now=2.0)[-1], GroupReady)


def test_a_link_that_was_lost_for_a_moment_lets_no_other_fleet_in() -> None:
    """sglang#22872: what is said while a rank is away must not decide over it."""
    membership, _ = ready(rank(0), rank(1))
    membership.handle(Gone(rank(1).address, "the hook closed the link"), 1.0)
    with pytest.raises(ConflictError, match="rank 1 of group 1"):
        membership.handle(Registered(second(1)), 1.5)
    assert isinstance(join(membership, rank(1), now=2.0)[-1], GroupReady)
    membership.handle(Gone(rank(1).address, "exit 9"), 3.0)
    membership.handle(Registered(second(1)), 3.0 + SILENCE_S)  # moved to another node
    assert group_id(membership) == 2


def test_an_agent_process_that_is_away_leaves_its_ranks_alive_until_they_are_silent_for_long() -> None:
    membership, _ = ready(rank(0), rank(1))
    for number in (0, 1):
        membership.handle(Detached(rank(number).address, "reset"), 1.0)
    with pytest.raises(ConflictError):
        membership.handle(Registered(second(0)), 5.0)
    membership.handle(Heard(rank(0).address), 9.0)  # its load reports still come
    with pytest.raises(ConflictError):
        membership.handle(Registered(second(0)), 12.0)
    membership.handle(Registered(second(0)), 9.0 + SILENCE_S)
    assert group_id(membership) == 2


def test_a_group_that_re_forms_in_place_speaks_for_itself_and_brings_new_ranks_along() -> None:
    """sglang#33111, vllm#38862: ranks keep their ids and lives, the group is another, in whatever order they come."""
    membership, _ = ready(rank(0), rank(1))
    grown = [rank(number, ids=(0, 1, 2), group=2, incarnation=3 if number == 2 else 1) for number in range(3)]
    with pytest.raises(ConflictError):  # nobody of the old group said yet that it formed anew
        membership.handle(Registered(grown[2]), 1.0)
    assert membership.handle(Registered(grown[1]), 1.0) == (GroupLost(GroupId(1), "group 2 superseded it"),)
    membership.handle(Attached(grown[1].address), 1.0)
    assert isinstance(join(membership, grown[2], grown[0], now=2.0)[-1], GroupReady)


def test_survivors_of_a_dead_rank_0_re_form_without_it() -> None:
    """vllm#38862: the first rank is the one that died."""
    membership, _ = ready(rank(0), rank(1))
    for _ in range(3):  # the news comes three times
        membership.handle(Gone(rank(0).address, "killed"), 1.0)
    assert isinstance(join(membership, rank(1, ids=(1,), group=2, models=_fitting()), now=1.5)[-1], GroupReady)


def _fitting() -> tuple[object, ...]:
    (made,) = rank(1).models
    return (dataclasses.replace(made, layers=tuple(dataclasses.replace(layer, slots=6) for layer in made.layers)),)


def test_fleets_that_form_at_the_same_time_do_not_take_turns() -> None:
    membership = Membership(DEPLOYMENT)
    join(membership, rank(0))
    for number in range(5):
        with pytest.raises(ConflictError):
            membership.handle(Registered(second(number % 2)), float(number))
        membership.handle(Heard(rank(0).address), float(number))
    assert isinstance(join(membership, rank(1), now=5.0)[-1], GroupReady)


def test_a_fleet_that_died_while_it_formed_is_followed_by_the_next() -> None:
    membership = Membership(DEPLOYMENT)
    join(membership, rank(0))
    membership.handle(Gone(rank(0).address, "exit 1"), 1.0)
    membership.handle(Registered(second(1, node="node0")), 1.1)
    assert group_id(membership) == 2


def test_a_second_life_of_a_rank_that_is_alive_is_refused_within_the_group_too() -> None:
    membership, group = ready(rank(0), rank(1))
    with pytest.raises(ConflictError, match=r"incarnation 9 on node elsewhere.*incarnation 1 on node node0"):
        membership.handle(Registered(rank(1, incarnation=9, node="elsewhere")), 1.0)
    assert membership.status == Ready(group)
    membership.handle(Gone(rank(1).address, "exit 9"), 2.0)
    assert isinstance(join(membership, rank(1, incarnation=9), now=2.1)[-1], GroupReady)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["register", "attach", "heard", "gone", "detached"]),
        st.integers(0, 1),
        st.booleans(),  # of the second fleet
        st.floats(0.0, 6.0),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None, database=None)
@given(EVENTS)
def test_a_rank_that_is_heard_is_never_pushed_out(events: list[tuple[str, int, bool, float]]) -> None:
    """Whatever comes in whatever order: while a rank of the group that serves is heard, no other life takes its place."""
    membership, now = Membership(DEPLOYMENT), 0.0
    heard: dict[tuple[int, bool], float] = {}
    for name, number, is_second, pause_s in events:
        now += pause_s
        registration = second(number) if is_second else rank(number)
        address = registration.address
        before = group_id(membership)
        events_by_name: dict[str, MembershipEvent] = {
            "register": Registered(registration),
            "attach": Attached(address),
            "heard": Heard(address),
            "gone": Gone(address, "x"),
            "detached": Detached(address, "x"),
        }
        try:
            membership.handle(events_by_name[name], now)
        except EplbError:
            assert group_id(membership) == before
            continue
        belongs = group_id(membership) == address.group_id
        if group_id(membership) != before and before is not None:
            assert name == "register"
            assert now - heard.get((number, not is_second), -SILENCE_S) >= SILENCE_S
        if name == "gone":
            heard.pop((number, is_second), None)
        elif belongs and name != "detached" and (name == "register" or (number, is_second) in heard):
            heard[number, is_second] = now
