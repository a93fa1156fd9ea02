"""Shares from the planner's rollout to the tokens: real ranks with a weighted engine serve, shares flip, tokens follow them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from agent.engine.reference.client import RankClient
from agent.engine.reference.launch import launch_ranks
from agent.engine.reference.messages import Inspection
from agent.engine.reference.model import checkpoint_digests
from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.placement import Placement, Table
from eplb_service.rollout.events import Outcome
from tests.integration.hook_fleet import FakeAgent
from tests.integration.reference_fleet import WAIT_S, Answer, expected, fleet_config, prompts_for, serve
from tests.integration.reference_models import UNEVEN, uneven
from tests.integration.rollout_driver import RolloutDriver

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

NUM_RANKS = 4
NEW_TOKENS = 6
ROUNDING = 4
"""Most tokens of one rank that a slot is off its share: what lies before the first and after the last ticket counted."""


@dataclass
class Serving:
    """Requests to all ranks, one batch after another, and everything that was answered."""

    clients: Mapping[int, RankClient]
    answers: dict[int, Answer] = field(default_factory=dict)
    requests: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def batch(self, size: int = NUM_RANKS) -> None:
        ids = list(itertools.islice(self._ids, size))
        requests = {i: (i % NUM_RANKS, prompt) for i, prompt in prompts_for(ids).items()}
        self.requests |= requests
        self.answers |= serve(self.clients, requests, NEW_TOKENS)

    def inspect(self) -> list[Inspection]:
        return [client.inspect(timeout_s=WAIT_S) for client in self.clients.values()]


@dataclass
class Fleet:
    serving: Serving
    driver: RolloutDriver


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Four weighted ranks, 10 experts in 16 slots: experts 0 to 5 have two replicas each."""
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        agent = FakeAgent(f"{directory}/agent.sock")
        config = fleet_config(
            directory,
            model="uneven",
            num_ranks=NUM_RANKS,
            first_rank_id=4,
            dispatch=Dispatch.WEIGHTED,
            vote_period=2,
            hook_sockets=(agent.path,) * NUM_RANKS,
            log_to_files=True,
        )
        with launch_ranks(config, preload=["agent.hook.hook"]) as ranks:
            agent.until(lambda: len(agent.registrations) == NUM_RANKS, "registration of all ranks")
            yield Fleet(Serving({position: ranks.client(position) for position in range(NUM_RANKS)}), RolloutDriver(agent))
            ranks.stop(timeout_s=WAIT_S)
        agent.close()  # fails when a hook said what the wire does not carry


def with_shares(table: Table, seed: int) -> Table:
    """The same slots; each expert's tokens are split at random, coarsely enough to tell."""
    weights = np.random.default_rng(seed).integers(1, 6, table.physical_to_logical.shape).astype(np.float64)
    shares = np.zeros(weights.shape, np.float32)
    for layer, row in enumerate(table.physical_to_logical):
        held = row >= 0
        totals = np.bincount(row[held], weights=weights[layer, held], minlength=table.num_logical)
        shares[layer, held] = (weights[layer, held] / totals[row[held]]).astype(np.float32)
    return table.with_shares(shares)


def check_tokens_follow_shares(before: list[Inspection], after: list[Inspection], table: Table) -> None:
    """What every rank sent to every slot is the slot's share of what it sent to that expert; slots computed what was sent."""
    assert table.shares is not None
    for index, layer_id in enumerate(table.layer_ids):
        row, shares = table.row(layer_id), table.shares[index]
        arrived = np.zeros(row.size, np.int64)
        for old, new in zip(before, after, strict=True):
            sent = np.subtract(new.layers[index].sent, old.layers[index].sent)
            of_expert = np.bincount(row, weights=sent, minlength=table.num_logical)[row]
            assert of_expert.min() > 0
            off = np.abs(sent - of_expert * shares)
            assert off.max() < ROUNDING, f"layer {layer_id} rank {new.rank_id}: {sent.tolist()} for shares {shares.tolist()}"
            arrived += sent
        computed = [
            np.subtract(new.layers[index].tokens, old.layers[index].tokens) for old, new in zip(before, after, strict=True)
        ]
        assert np.concatenate(computed).tolist() == arrived.tolist()
        even = np.bincount(row, weights=arrived, minlength=table.num_logical)[row] / np.bincount(row)[row]
        assert np.abs(arrived - even).max() > 5 * ROUNDING, "an even split would have passed too"


def check_slots_and_maps(inspections: list[Inspection], placement: Placement) -> None:
    model = uneven()
    digests = placement.row_digests()
    for index, (layer, _, row) in enumerate(placement.layers()):
        assert {inspection.layers[index].row_digest for inspection in inspections} == {digests[layer]}
        checkpoint = checkpoint_digests(model, layer.layer_id)
        held = [digest for inspection in inspections for digest in inspection.layers[index].slot_digests]
        assert held == [checkpoint[expert] for expert in row.tolist()]


def test_a_weighted_engine_starts_with_even_shares(fleet: Fleet) -> None:
    live = fleet.driver.until_live()
    assert fleet.driver.group.is_weighted
    assert live.placement == live.placement.without_shares().with_even_shares()
    fleet.serving.batch()
    check_slots_and_maps(fleet.serving.inspect(), live.placement)


def test_tokens_follow_the_shares_of_a_generation_that_moves_experts_too(fleet: Fleet) -> None:
    live = fleet.driver.until_live()
    (table,) = live.placement.tables
    row = np.random.default_rng(3).permutation(table.row(table.layer_ids[0]))
    rows = np.stack([row, row[::-1]])
    moved = Table(table.model, table.layer_ids, table.num_logical, table.rank_ids, rows)
    target = Placement((with_shares(moved, 5),))
    finished = fleet.driver.roll_out(target, fleet.serving.batch)
    assert finished.outcome is Outcome.ACTIVE, finished
    assert sum(fleet.driver.staged_bytes(stage) for stage in fleet.driver.stages) > 0
    before = fleet.serving.inspect()
    check_slots_and_maps(before, target)
    fleet.serving.batch(60)
    check_tokens_follow_shares(before, fleet.serving.inspect(), target.tables[0])


def test_a_generation_of_shares_alone_flips_without_moving_a_byte_and_tokens_follow(fleet: Fleet) -> None:
    live = fleet.driver.until_live()
    (table,) = live.placement.tables
    target = Placement((with_shares(table, 11),))
    assert live.differing_layers(target) == table.layers
    known, flipped_before = len(fleet.driver.stages), fleet.serving.inspect()[0].layers[0].flip_boundary
    finished = fleet.driver.roll_out(target, fleet.serving.batch)
    assert finished.outcome is Outcome.ACTIVE, finished
    (stage,) = fleet.driver.stages[known:]
    assert stage.copies == ()
    assert [change.new_row for change in stage.layers] == [tuple(row.tolist()) for row in table.physical_to_logical]
    assert fleet.driver.staged_bytes(stage) == 0
    before = fleet.serving.inspect()
    (boundary,) = finished.flip_boundaries
    assert {layer.flip_boundary for inspection in before for layer in inspection.layers} == {boundary}
    assert boundary > flipped_before
    check_slots_and_maps(before, target)
    fleet.serving.batch(60)
    check_tokens_follow_shares(before, fleet.serving.inspect(), target.tables[0])


def test_a_generation_without_shares_is_not_started_on_a_weighted_engine(fleet: Fleet) -> None:
    live = fleet.driver.until_live()
    finished = fleet.driver.roll_out(live.placement.without_shares(), fleet.serving.batch)
    assert finished.outcome is Outcome.NOT_STARTED
    assert "the engine dispatches by shares and the placement has none" in finished.reason
    fitted = fleet.driver.group.with_fitting_shares(live.placement.without_shares())
    finished = fleet.driver.roll_out(fitted, fleet.serving.batch)
    assert finished.outcome is Outcome.ACTIVE, finished
    check_slots_and_maps(fleet.serving.inspect(), live.placement.without_shares().with_even_shares())


def test_everything_that_was_served_is_what_the_model_generates_alone(fleet: Fleet) -> None:
    """Last in this file: every token before, between and after the flips."""
    serving = fleet.serving
    serving.batch()
    assert {i: answer.tokens for i, answer in serving.answers.items()} == expected("uneven", serving.requests, NEW_TOKENS)
    vectors = {generations for answer in serving.answers.values() for generations in answer.generations}
    assert len(vectors) >= 3, "requests lived through flips"


@pytest.mark.parametrize("dispatch", [Dispatch.NEAREST, Dispatch.WEIGHTED])
def test_any_dispatch_generates_the_same(dispatch: Dispatch) -> None:
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        config = fleet_config(directory, model="uneven", num_ranks=3, dispatch=dispatch)
        with launch_ranks(config) as ranks:
            serving = Serving({position: ranks.client(position) for position in range(3)})
            requests = {i: (i % 3, prompt) for i, prompt in prompts_for(range(6)).items()}
            answers = serve(serving.clients, requests, NEW_TOKENS)
            (first, *_) = serving.inspect()
            ranks.stop(timeout_s=WAIT_S)
    assert {i: answer.tokens for i, answer in answers.items()} == expected("uneven", requests, NEW_TOKENS)
    assert (first.layers[0].shares is not None) == (dispatch is Dispatch.WEIGHTED)
    assert sum(first.layers[0].sent) == UNEVEN.top_k * first.real_tokens


def test_a_dispatch_that_the_reference_engine_has_not_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="dispatch is 'hashed'; this engine has even, nearest, weighted"):
        fleet_config("/nowhere", model="uneven", num_ranks=2, dispatch="hashed")
