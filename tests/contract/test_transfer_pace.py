"""Real copies keep the pace: never faster than allowed, held back while an engine is under pressure, and right all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest

from agent.transfer.pace import Pressure
from agent.transfer.transport import TransferError
from eplb_service.control import Throttle
from tests.contract.transport_ranks import RANK_IDS, WAIT_S, Group, Kind, by_gloo, by_reading, copy
from tests.mixed_experts import LAYERS

KINDS = {"gloo": Kind(by_gloo, ("a", "a", "b")), "reads within a node": Kind(by_reading, ("a", "a", "a"))}
COPIES = [copy(layer, (source, 0), ((source + 1) % 3, 1)) for layer in LAYERS for source in range(3)]
RELAYS = [
    copy(first.layer, ((column + 1) % 3, 1), ((column + 2) % 3, 0), relay_of=index, expert=first.expert)
    for index, first in enumerate(COPIES)
    for column in [RANK_IDS.index(first.source_rank)]
]


@pytest.fixture(params=list(KINDS), scope="module")
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group.make(KINDS[request.param])
    yield made
    made.close()


@pytest.fixture(autouse=True)
def calm(group: Group) -> Iterator[None]:
    yield
    for rank in group.ranks:
        rank.transfer.pressure = Pressure()


def test_no_rank_sends_faster_than_allowed_whatever_it_passes_on_vllm_36271(group: Group) -> None:
    """Each rank sends and passes on one expert of each layer: at this rate that takes 0.4 s, at full speed far less."""
    meshes, copies = group.connect(), [*COPIES, *RELAYS]
    layouts = group.ranks[0].rank.layouts
    sent = 2 * sum(layouts[layer].expert_bytes for layer in LAYERS)
    began = time.monotonic()
    group.stage(copies, meshes, throttle=Throttle(bytes_per_s=sent / 0.4))
    assert time.monotonic() - began >= 0.4


def test_experts_wait_while_an_engine_is_under_pressure_vllm_43219(group: Group) -> None:
    meshes, asked = group.connect(), count()
    group.ranks[1].transfer.pressure.ask = lambda: next(asked) < 10
    group.stage(COPIES, meshes)
    pressure = group.ranks[1].transfer.pressure
    assert pressure.pauses == 1
    assert pressure.paused_s > 0
    assert next(asked) == 10 + len(LAYERS), "asked until it was over, then once before each of the other experts"
    assert group.ranks[0].transfer.pressure.pauses == 0


def test_pressure_that_lasts_ends_the_chunk_at_its_deadline_and_says_so(group: Group) -> None:
    meshes = group.connect()
    group.ranks[1].transfer.pressure.ask = lambda: True
    running = group.begin(COPIES, meshes, timeout_s=0.3)
    with pytest.raises(TransferError, match=r"reported pressure for 0\.\d+ s, until the deadline of the chunk"):
        running[1].result(WAIT_S)
    with pytest.raises(TransferError, match="rank 20 sent no expert"):
        running[2].result(WAIT_S)


def test_a_chunk_that_is_withdrawn_while_it_is_held_back_ends_at_once(group: Group) -> None:
    meshes, held = group.connect(), threading.Event()

    def under_pressure() -> bool:
        held.set()
        return True

    group.ranks[1].transfer.pressure.ask = under_pressure
    running = group.begin(COPIES, meshes, timeout_s=1000.0)
    assert held.wait(WAIT_S)
    meshes[1].abandon()
    with pytest.raises(TransferError, match="withdrawn while it was held back"):
        running[1].result(WAIT_S)
    with pytest.raises(TransferError, match="rank 20 sent no expert"):
        running[2].result(WAIT_S)
