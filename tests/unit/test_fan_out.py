"""The planner lets experts cross to a node once wherever all ranks know relays, and prices moves accordingly."""

from __future__ import annotations

import dataclasses

from eplb_service.control import PROTOCOL_VERSION_OF_RELAYS, Stage
from eplb_service.generation import as_loaded
from eplb_service.ids import DeploymentId
from eplb_service.membership.group import Group
from eplb_service.planner.asked import group_of
from eplb_service.planner.proposing import moves_between
from eplb_service.rollout.chunks import plan_chunks
from eplb_service.rollout.events import Persist, Persisted, Start
from eplb_service.rollout.machine import Rollout
from eplb_service.topology import LinkKind
from tests.unit.test_advising import ASKER
from tests.unit.test_rollout import EPOCH, SETTINGS, Script, generation, group, of, placement

LIVE = placement((0, 1, 2, 1, 2, 1), (0, 1, 2, 1, 2, 1))
TARGET = placement((0, 1, 2, 0, 0, 1), (0, 1, 2, 0, 0, 1))
"""Expert 0 of both layers is new on both ranks of the second node."""


def two_nodes(*protocols: int) -> Group:
    return Group.of(
        tuple(
            dataclasses.replace(registration, node=node, protocol_max=protocol)
            for registration, node, protocol in zip(group().registrations, ("a", "b", "b"), protocols, strict=True)
        )
    )


NEW, OLD = PROTOCOL_VERSION_OF_RELAYS, PROTOCOL_VERSION_OF_RELAYS - 1


def stages_of(ready: Group) -> list[Stage]:
    script = Script(Rollout(EPOCH, SETTINGS, first_sequence=1), ready)
    script.hear(*script.lives(as_loaded(LIVE)))
    (persist,) = of(script.do(Start(generation(1, TARGET))), Persist)
    script.do(Persisted(persist.token))
    return script.stages()


def test_an_expert_is_passed_on_by_the_rank_that_got_it() -> None:
    ready = two_nodes(NEW, NEW, NEW)
    assert ready.fan_out
    for stage in stages_of(ready):
        assert [(copy.source_rank, copy.target_rank, copy.relay_of) for copy in stage.copies] == [(4, 5, -1), (5, 6, 0)]


def test_one_rank_of_an_older_release_keeps_every_copy_from_a_live_slot() -> None:
    ready = two_nodes(NEW, NEW, OLD)
    assert not ready.fan_out
    for stage in stages_of(ready):
        assert [(copy.source_rank, copy.target_rank, copy.relay_of) for copy in stage.copies] == [(4, 5, -1), (4, 6, -1)]


def test_moves_are_priced_as_they_are_carried() -> None:
    for ready in (two_nodes(NEW, NEW, NEW), two_nodes(NEW, NEW, OLD)):
        chunks = plan_chunks(
            LIVE,
            TARGET,
            topology=ready.topology,
            expert_bytes=ready.expert_bytes,
            staging_bytes=ready.staging_bytes,
            fan_out=ready.fan_out,
        )
        carried = {kind: sum(chunk.traffic.by_link[kind] for chunk in chunks) for kind in LinkKind}
        assert moves_between(LIVE, TARGET, ready).bytes_by_link == carried
        assert carried[LinkKind.CROSS_NODE] == (20 if ready.fan_out else 40)


def test_an_engine_that_moves_its_own_weights_is_not_taken_to_pass_them_on() -> None:
    assert not group_of(DeploymentId("d"), ASKER).fan_out
