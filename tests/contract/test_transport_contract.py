"""What every way for experts to travel promises, whichever it is; the same tests for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from agent.transfer.mesh import GlooMesh
from agent.transfer.transport import TransferError
from eplb_service.control import Copy, LinkBytes, RefusalCode
from tests.contract.transport_ranks import RANK_IDS, SLOTS, Group, Kind, by_backup, by_gloo, by_nixl, by_reading, copy
from tests.mixed_experts import BF16, FP8, INT4, LAYERS

KINDS = {
    "gloo": Kind(by_gloo, ("a", "a", "b")),
    "reads within a node": Kind(by_reading, ("a", "a", "a")),
    "reads within nodes, gloo across": Kind(by_reading, ("a", "b", "b")),
    "nixl": Kind(by_nixl, ("a", "b", "c")),
}
BACKUP = "backup"


@pytest.fixture(params=[*KINDS, BACKUP], scope="module")
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


@pytest.fixture(scope="module")
def good(group: Group) -> list[GlooMesh]:
    """Connections for chunks that end well."""
    return group.connect()


EVERYWHERE = [
    copy(layer, (source, slot), (target, (slot + source) % SLOTS))
    for layer in LAYERS
    for source in range(3)
    for target in range(3)
    for slot in range(SLOTS)
]


def test_every_expert_of_every_layer_arrives_bit_for_bit_between_all_ranks_vllm_29162(
    group: Group, good: list[GlooMesh]
) -> None:
    group.stage(EVERYWHERE, good)


def test_the_order_of_the_copies_is_free_and_chunks_follow_one_another_on_the_same_connections(
    group: Group, good: list[GlooMesh]
) -> None:
    for copies in (EVERYWHERE[::-1], EVERYWHERE[::5], [], EVERYWHERE[::3]):
        group.stage(copies, good)


def test_a_relay_passes_on_what_another_copy_brings_whatever_the_order(group: Group, good: list[GlooMesh]) -> None:
    """Relays in a ring: each rank passes on what it gets, and waits for nobody who waits for it."""
    firsts = [copy(layer, (column, 0), ((column + 1) % 3, 1)) for layer in LAYERS for column in range(3)]
    relays = [
        copy(first.layer, ((column + 1) % 3, 1), ((column + 2) % 3, 0), relay_of=index, expert=first.expert)
        for index, first in enumerate(firsts)
        for column in [RANK_IDS.index(first.source_rank)]
    ]
    twice = copy(INT4, (1, 1), (1, 0), relay_of=2 * 3, expert=0)  # to its own rank: the expert fills two slots there
    group.stage([*firsts, *relays, twice], good)
    group.stage([*firsts, *relays[::-1], twice], good)


def failures(group: Group, copies: Sequence[Copy], meshes: list[GlooMesh], **options: object) -> dict[int, str]:
    """What each rank says of a chunk that cannot end well, by column."""
    said = {}
    for column, done in group.begin(copies, meshes, **options).items():  # type: ignore[arg-type]
        try:
            done.result(20)
        except TransferError as error:
            said[column] = f"{error.code}: {error}"
    return said


@pytest.mark.parametrize("target", [0, 1, 2])
def test_bytes_that_are_not_those_that_were_loaded_are_refused_sglang_17158(group: Group, target: int) -> None:
    meshes = group.connect()
    with group.spoiled(FP8, 0, 1):
        said = failures(group, [copy(FP8, (0, 0), (target, 0)), copy(FP8, (0, 1), (target, 1))], meshes)
    assert list(said) == [target]
    source = "a backup" if group.kind.asks_backup else "rank 10 slot 1"
    assert said[target].startswith(f"{RefusalCode.CHECKSUM}: expert 1 of {FP8} from {source}: checksum 0x")


def test_bytes_that_spoil_on_the_way_are_refused_by_whom_they_are_passed_on_to_as_well(group: Group) -> None:
    """The checksum travels from the first source: a rank that passes on does not vouch for what it got."""
    meshes = group.connect()
    with group.spoiled(BF16, 2, 0):
        said = failures(group, [copy(BF16, (2, 0), (0, 1)), copy(BF16, (0, 1), (1, 1), relay_of=0, expert=4)], meshes)
    assert sorted(said) == [0, 1]
    assert all(words.startswith(RefusalCode.CHECKSUM) for words in said.values())


def test_a_peer_that_is_away_ends_the_chunk_at_its_deadline_and_is_named(group: Group) -> None:
    """A backup needs no peer: there it is who passes on that is away."""
    firsts = [copy(INT4, (0, 1), (0, 0))] if group.kind.asks_backup else []
    away = copy(INT4, (0, 0 if firsts else 1), (1, 0), relay_of=len(firsts) - 1, expert=1)
    said = failures(group, [*firsts, away], group.connect(), timeout_s=0.15, only=[1])
    assert said[1].startswith(f"{RefusalCode.TRANSFER}: rank 10 sent no expert 1 of {INT4}")


def test_a_chunk_that_is_withdrawn_ends_at_once_and_leaves_staging_to_the_next_vllm_32881(
    group: Group, good: list[GlooMesh]
) -> None:
    meshes = group.connect()
    if group.kind.asks_backup:  # which waits for nobody
        for mesh in meshes:
            mesh.abandon()
    waiting = group.begin(EVERYWHERE, meshes, timeout_s=60, only=[1, 2])  # rank 0 never comes
    for mesh in meshes:
        mesh.abandon()
    for done in waiting.values():
        with pytest.raises(TransferError):
            done.result(10)
    group.stage(EVERYWHERE[::-1], good)  # every region again, right bytes in all of them


def test_copies_are_counted_by_the_link_that_they_take(group: Group, good: list[GlooMesh]) -> None:
    nodes = group.ranks[0].rank.nodes
    received = group.stage([copy(BF16, (column, 0), (target, 1)) for column in range(3) for target in (0, 2)], good)
    size = 0 if group.kind.asks_backup else group.ranks[0].rank.layouts[BF16].expert_bytes  # a backup is no link
    assert received[1] == LinkBytes()
    for target in (0, 2):
        near = sum(node == nodes[target] for node in nodes) - 1
        assert received[target] == LinkBytes(same_rank=size, same_node=near * size, cross_node=(2 - near) * size)
