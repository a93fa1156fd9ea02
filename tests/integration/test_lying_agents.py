"""Agents that lie to a planner over gRPC: refused or waited for, named in the status, and never believed over the others."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field

import grpc

from eplb_service.attach import Attach, FromAgent
from eplb_service.control import Armed, Flipped, LinkBytes, Live, Staged
from eplb_service.ids import DeploymentId, Epoch, LayerRef, chunk_id
from eplb_service.pb.v1 import agent_pb2, placement_pb2
from eplb_service.rpc import convert
from eplb_service.window.report import LoadReport
from tests.integration.planner_fleet import Fleet, until, until_true
from tests.integration.test_planner_loop import generation_of, planner, reach, run, status_of, warm_policies

__all__ = ["warm_policies"]
LIAR = 2


@dataclass
class LyingFleet(Fleet):
    """A fleet whose rank 2 says other things than it does. lie: which."""

    lie: str = ""
    told: list[FromAgent] = field(default_factory=list)

    def _say(self, message: FromAgent) -> None:
        mine = getattr(message, "sender", None) == self.ranks[LIAR].address
        if not mine or not self.lie:
            super()._say(message)
            return
        match message, self.lie:
            case Flipped(), "wrong digest":
                super()._say(dataclasses.replace(message, digests=tuple((layer, 7) for layer, _ in message.digests)))
            case Flipped() | Live(), "never flipped":
                self.told.append(message)
            case Staged(), "staged twice":  # and rank 3's never comes
                super()._say(message)
                super()._say(message)
            case Armed(), "flipped unasked":
                pass
            case Staged(), "flipped unasked":
                rows = self.ranks[LIAR].staged
                assert rows is not None
                digests = tuple((change.layer, change.new_digest) for change in rows.layers)
                super()._say(Flipped(sender=message.sender, chunk_id=rows.chunk_id, boundary=3, digests=digests, stall_s=0.0))
            case _:
                super()._say(message)


def rows_of(fleet: Fleet) -> list[dict[LayerRef, tuple[int, ...]]]:
    return [dict(rank.rows) for rank in fleet.ranks]


def test_a_flip_to_a_digest_of_its_own_is_an_alarm_that_names_the_rank_until_all_agree() -> None:
    """vllm-ascend#4417: told as done, and nothing was."""

    async def scenario() -> None:
        async with planner() as (_, address), LyingFleet(address, lie="wrong digest") as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            stopped = await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_STOPPED)
            assert "rank 2 says that it flipped chunk" in stopped.stop_reason
            fleet.lie = ""
            await reach(fleet, "ready")  # all ranks were asked, and route alike
            assert fleet.all_route_alike()
            told = (await fleet.placement.GetRolloutEvents(_events(fleet), timeout=5)).events
            assert told[-1].event == "rollout.finished"
            assert "rank 2 says that it flipped" in told[-1].text

    run(scenario())


def _events(fleet: Fleet) -> placement_pb2.GetRolloutEventsRequest:
    return placement_pb2.GetRolloutEventsRequest(deployment=fleet.deployment, generation=1)


def test_flips_that_are_never_told_are_waited_for_by_name_and_asked_for_again() -> None:
    """vllm#57883, sglang#22788: one rank that keeps silent is seen, and no other map is believed meanwhile."""
    quick = {"rollout__arm_ttl_s": "0.1", "rollout__slowest_step_s": "0.01", "rollout__disarm_timeout_s": "0.1"}

    async def scenario() -> None:
        async with planner(**quick) as (_, address), LyingFleet(address) as fleet:
            await reach(fleet, "ready")
            fleet.lie = "never flipped"
            fleet.report(fleet.skewed())
            await until(lambda: fleet.told, "a flip that is not told")

            async def stalled() -> bool:
                rollout = (await status_of(fleet)).rollout
                return rollout.stalled and list(rollout.waiting_for) == [LIAR]

            await until_true(stalled, "the rollout to be seen as stalled by rank 2")
            fleet.lie = ""
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)  # asked again, it tells
            assert fleet.all_route_alike()
            told = (await fleet.placement.GetRolloutEvents(_events(fleet), timeout=5)).events
            assert any(event.event == "chunk.awaited" and "ranks 2 did not answer" in event.text for event in told)

    run(scenario())


def test_staged_twice_does_not_stand_for_a_rank_that_is_silent() -> None:
    async def scenario() -> None:
        async with (
            planner(rollout__stage_timeout_s="0.1", rollout__tries_max="1") as (_, address),
            LyingFleet(address, lie="staged twice", hold_staging=True) as fleet,
        ):
            await reach(fleet, "ready")
            rows = rows_of(fleet)
            fleet.report(fleet.skewed())
            await until(lambda: all(rank.staged for rank in fleet.ranks), "a chunk to be staged")
            for rank in fleet.ranks[:3]:
                assert rank.staged is not None
                fleet._say(Staged(sender=rank.address, chunk_id=rank.staged.chunk_id, seconds=0.1, received=LinkBytes()))
            stopped = await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_STOPPED)
            assert "ranks 3 did not stage it within" in stopped.stop_reason
            assert rows_of(fleet) == rows
            assert not any(rank.armed_id for rank in fleet.ranks)

    run(scenario())


def test_a_flip_that_nobody_armed_stops_the_rollout_and_names_the_rank() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), LyingFleet(address, lie="flipped unasked") as fleet:
            await reach(fleet, "ready")
            rows = rows_of(fleet)
            fleet.report(fleet.skewed())
            stopped = await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_STOPPED)
            assert "rank 2 flipped chunk" in stopped.stop_reason
            assert "never armed" in stopped.stop_reason
            assert rows_of(fleet) == rows
            fleet.lie = ""
            await reach(fleet, "ready")

    run(scenario())


def test_a_stream_of_another_deployment_speaks_for_nobody_here() -> None:
    """vllm-plugin-das#70: what is of another must not be written over one's own."""

    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet, Fleet(address, deployment="other", group_id=5) as other:
            await reach(fleet, "ready")
            await reach(other, "ready")
            rows = rows_of(fleet)
            for rank in other.ranks:
                stream = fleet.agent.Control()
                attach = Attach(deployment=DeploymentId("chat"), ranks=(rank.address,))
                await stream.write(convert.from_agent_to_pb(attach))
                assert await stream.code() is grpc.StatusCode.NOT_FOUND
                assert f"rank {rank.address.rank_id} attaches before it registered here" in (await stream.details() or "")
            # Facts of ranks of another deployment, on a stream that is well known here, are nobody's.
            for rank in fleet.ranks:
                gone = Flipped(sender=rank.address, chunk_id=chunk_id(Epoch(1), 1), boundary=3, digests=(), stall_s=0.0)
                other._out.put_nowait(gone)
            report = convert.report_to_pb(DeploymentId("chat"), _report_of(other))
            (reply,) = [reply async for reply in fleet.agent.Report(iter([report]), timeout=5)]
            assert (reply.accepted, reply.code) == (False, "wrong_group")
            assert "rank 0 reports for group 5 but serves in 77" in reply.reason
            fleet.report(fleet.skewed())
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            assert rows_of(fleet) != rows
            assert other.live_generations == {0}
            assert (fleet.connections, other.connections) == (1, 1)

    run(scenario())


def _report_of(fleet: Fleet) -> LoadReport:
    """A load report as this fleet's first rank would send it."""
    queue: asyncio.Queue[agent_pb2.LoadReport] = asyncio.Queue()
    fleet._reports, before = queue, fleet._reports
    fleet.report(fleet.even())
    fleet._reports = before
    return convert.report_from_pb(queue.get_nowait())[1]
