"""A thousand chunks over every way that experts take leave no memory, file, thread or shared memory behind (tokenspeed#251).

The whole of a rank, flips included, is in tests/unit/test_hook_growth.py; here are all ways, also those that it does not take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from agent.transfer.mesh import GlooMesh
from agent.transfer.transport import TransferError
from eplb_service.control import Copy, RefusalCode
from tests.contract.test_transport_contract import BACKUP, KINDS
from tests.contract.transport_ranks import SLOTS, WAIT_S, Group, Kind, by_backup, copy
from tests.mixed_experts import LAYERS
from tests.unit.test_hook_growth import GROWTH_BYTES, held

CHUNKS, WARM_UP, FAILS_EVERY, CHECKED_EVERY = 1000, 200, 100, 50


@pytest.fixture(params=["gloo", "reads within a node", "nixl", BACKUP])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    if request.param == "nixl":
        pytest.importorskip("nixl._api", reason="the nixl package is not here")
    if request.param == BACKUP:
        kind = Kind(by_backup(tmp_path_factory.mktemp("checkpoint")), ("a", "a", "b"), asks_backup=True)
    else:
        kind = KINDS[request.param]
    made = Group.make(kind)
    yield made
    made.close()


def copies_of(number: int) -> list[Copy]:
    """Within a rank, to the two others, and passed on by one of them; of another layer each time."""
    layer, slot = LAYERS[number % len(LAYERS)], number % SLOTS
    return [
        copy(layer, (0, slot), (0, 1 - slot)),
        copy(layer, (0, slot), (1, slot)),
        copy(layer, (1, slot), (2, slot)),
        copy(layer, (1, slot), (2, 1 - slot), relay_of=1, expert=slot),
    ]


def fails(group: Group, copies: Sequence[Copy], meshes: Sequence[GlooMesh]) -> list[GlooMesh]:
    """A chunk of which an expert is not what was loaded. Returns new connections, as after any failure."""
    first = copies[0]
    with group.spoiled(first.layer, 0, first.source_slot):
        ends = [done.exception(2 * WAIT_S) for done in group.begin(copies, meshes).values()]
    codes = {end.code for end in ends if isinstance(end, TransferError)}
    assert RefusalCode.CHECKSUM in codes
    for rank in group.ranks:
        for mesh in rank.meshes:
            mesh.abandon()
        rank.meshes.clear()
    return group.connect()


def test_a_thousand_chunks_leave_nothing_behind_whichever_way_they_go_tokenspeed_251(group: Group) -> None:
    meshes, before = group.connect(), dict[str, int]()
    for number in range(1, CHUNKS + 1):
        copies = copies_of(number)
        if number % FAILS_EVERY == 0:
            meshes = fails(group, copies_of(0), meshes)  # of a layer that every way can spoil
        elif number % CHECKED_EVERY == 1:
            group.stage(copies, meshes)
        else:
            for done in group.begin(copies, meshes).values():
                done.result(2 * WAIT_S)
        if number == WARM_UP:
            before = held()
    after = held()
    assert after["bytes"] - before["bytes"] <= GROWTH_BYTES, (before, after)
    assert {**after, "bytes": 0} == {**before, "bytes": 0}
