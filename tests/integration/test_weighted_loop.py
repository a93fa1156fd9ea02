"""The whole loop over a weighted engine: a rebalance is planned with shares, stored, rolled out, shown, and rolled back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from agent.engine.reference.messages import Inspection
from eplb_service.cli.generations import state_text
from eplb_service.dispatch import Dispatch
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from eplb_service.placement import Placement
from eplb_service.rpc.convert import placement_from_pb
from tests.integration.whole_fleet import DEPLOYMENT, WholeFleet

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[WholeFleet]:
    options = {"reconnect_max_s": 0.2, "pulse_period_s": 0.3, "nic": "rail0"}
    with WholeFleet(rank_ids=(4, 5), in_flight=3, hook_options=options, dispatch=Dispatch.WEIGHTED) as running:
        running.start_service()
        yield running
        running.stop_ranks()


def placement_of(fleet: WholeFleet, generation: int) -> Placement:
    """A generation's placement as the planner tells it; 0 = what is live."""
    request = placement_pb2.GetPlacementRequest(deployment=DEPLOYMENT, generation=generation)
    found: list[Placement] = []

    def told() -> bool:
        view = fleet.call(lambda client: client.call(client.placement.GetPlacement, request))
        found.extend([] if view is None else [placement_from_pb(view.placement)])
        return bool(found)

    fleet.until(told, f"the placement of generation {generation}")
    return found[0]


def follows(before: list[Inspection], after: list[Inspection], placement: Placement) -> None:
    """Ranks route by exactly this placement, and what each sent to a slot since is the slot's share of its expert's tokens."""
    for index, (layer, table, row) in enumerate(placement.layers()):
        shares = table.shares_row(layer.layer_id)
        assert shares is not None
        for old, new in zip(before, after, strict=True):
            assert new.layers[index].row_digest == placement.row_digests()[layer]
            sent = np.subtract(new.layers[index].sent, old.layers[index].sent)
            of_expert = np.bincount(row[row >= 0], weights=sent[row >= 0], minlength=table.num_logical)
            wanted = np.where(row >= 0, of_expert[row] * shares, 0.0)
            assert np.abs(sent - wanted).max() < 6, f"layer {layer} rank {new.rank_id}"


def test_the_nic_that_a_hook_is_given_reaches_the_planner(fleet: WholeFleet) -> None:
    fleet.until(
        lambda: (status := fleet.status()) is not None and [rank.nic for rank in status.ranks] == ["rail0", "rail0"],
        "both ranks with their NIC",
    )


def test_a_rebalance_of_a_weighted_engine_carries_shares_from_the_plan_to_the_tokens(fleet: WholeFleet) -> None:
    loaded = placement_of(fleet, 0)
    assert loaded == loaded.without_shares().with_even_shares()
    fleet.serve_tokens(150)
    fleet.until(lambda: (status := fleet.status()) is not None and status.window_tokens > 0, "a window to plan from")
    number = fleet.rebalance()
    view = fleet.until_over(number)
    assert state_text(view.state) == "active", view
    planned = placement_of(fleet, number)
    assert planned.has_shares
    assert placement_of(fleet, 0) == planned
    fleet.settle()
    before = list(fleet.serving.inspect())
    fleet.serve_tokens(200)
    fleet.settle()
    follows(before, list(fleet.serving.inspect()), planned)


def test_a_planner_that_is_killed_and_a_rollback_keep_shares(fleet: WholeFleet) -> None:
    live = placement_of(fleet, 0)
    fleet.kill(fleet.planner)
    fleet.serve_tokens(20)
    fleet.bring_back(fleet.planner)
    fleet.until_ready()
    assert placement_of(fleet, 0) == live
    newest = max(fleet.generations())
    assert placement_of(fleet, newest) == live, "read back from the store"
    request = admin_pb2.RollbackRequest(deployment=DEPLOYMENT, generation=0, idempotency_key=uuid.uuid4().hex)
    number = fleet._order(lambda client: client.call(client.admin.Rollback, request))
    assert state_text(fleet.until_over(number).state) == "active"
    fleet.settle()
    back = placement_of(fleet, 0)
    assert back == back.without_shares().with_even_shares()
    assert back.digest() != live.digest()
