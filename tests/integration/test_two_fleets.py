"""Two fleets that were started under one deployment name: the first serves on, the second is refused and named."""

from __future__ import annotations

import grpc
import pytest

from eplb_service.control import Address
from eplb_service.ids import GroupId, Incarnation
from eplb_service.pb.v1 import placement_pb2
from eplb_service.rpc import convert
from tests.integration.planner_fleet import Fleet, until, until_true
from tests.integration.test_planner_loop import generation_of, planner, reach, run, status_of, warm_policies

__all__ = ["warm_policies"]


class SecondFleet(Fleet):
    """The same ranks again: other engine processes, in a group of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for rank in self.ranks:
            rank.address = Address(rank.address.rank_id, Incarnation(rank.address.incarnation + 1000), GroupId(self.group_id))


def test_a_second_fleet_is_refused_while_the_first_is_alive_and_taken_once_it_is_silent() -> None:
    """sglang#33111, vllm#53947: neither pushed out by a rival, nor locked out for good by a predecessor that is no more."""

    async def scenario() -> None:
        async with planner(rollout__rank_silence_s="0.6") as (_, address):
            async with Fleet(address, hold_flips=True) as first, SecondFleet(address, group_id=78, hold_hello=True) as second:
                await reach(first, "ready")
                first.report(first.skewed())
                await until(lambda: all(rank.armed_id for rank in first.ranks), "a rollout of the first under way")
                for _ in range(5):  # as its agents do, again and again
                    for rank in second.ranks:
                        with pytest.raises(grpc.aio.AioRpcError) as refused:
                            await second.agent.Register(convert.registration_to_pb(second.registration(rank)), timeout=2)
                        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                        said = refused.value.details() or ""
                        assert (
                            f"rank {rank.address.rank_id} of group 78 (incarnation {rank.address.incarnation} on node" in said
                        )
                        assert f"of group 77 (incarnation {1000 + rank.address.rank_id} on the same node)" in said
                first.hold_flips = False
                first.vote()
                await generation_of(first, 1, placement_pb2.GENERATION_STATE_ACTIVE)
                assert first.connections == 1
                status = await status_of(first)
                assert status.state == "ready"
                assert "a rank was refused: rank 3 of group 78" in status.reason
            # The first fleet ends without a word.
            async with SecondFleet(address, group_id=78) as second:
                await reach(second, "ready")
                assert second.all_route_alike()
                assert second.live_generations == {0}  # what it says is live, not what its predecessor had

                async def group_is_new() -> bool:
                    return {rank.address.group_id for rank in (await status_of(second)).ranks} == {78}

                await until_true(group_is_new, "the ranks of the second fleet in the status")

    run(scenario())


def test_both_fleets_at_once_end_with_one_of_them_and_no_turns_taken() -> None:
    async def scenario() -> None:
        async with (
            planner(rollout__rank_silence_s="2") as (service, address),
            Fleet(address) as first,
            SecondFleet(address, group_id=78) as second,
        ):
            made = service.planner
            assert made is not None
            await until(lambda: made.deployments, "the deployment")
            carrier = made.deployment("chat").carrier
            served = (await until(lambda: carrier.group, "one of them to be complete")).group_id
            loser = second if served == 77 else first
            asked = loser.registrations
            await until(lambda: loser.registrations >= asked + 8, "the other to ask again and again")
            assert carrier.group is not None
            assert carrier.group.group_id == served
            assert sorted((first.connections, second.connections)) == [0, 1]

    run(scenario())
