"""Which way experts take: chosen by what ranks can read of one another, alike on all of them; the rest is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent.transfer import memory_handles, transports
from agent.transfer.gloo import Store, local_store
from agent.transfer.gloo_peer import GlooPeer, SendRing
from agent.transfer.local_copy import LocalCopy
from agent.transfer.memory_handles import HandleError, SharedHostHandles, allocate_shared
from agent.transfer.nixl_read import NixlRead, Reachable, meet_agents
from agent.transfer.peer_memory import meet_neighbours
from agent.transfer.peer_read import PeerRead
from agent.transfer.staging import Staging
from agent.transfer.streams import DeviceEvent, HostStreams, Streams
from agent.transfer.transport import LocalRank, TransferError, Transport
from agent.transfer.transports import Transports
from agent.transfer.ways import Ways
from eplb_service.errors import DeadlineError
from tests.contract.transport_ranks import RANK_IDS, Group, Kind, by_gloo, copy
from tests.mixed_experts import BF16, INT4

WAYS = Ways(same_node="read", cross_node="nixl")


def meet(rank: LocalRank, staging: Staging, streams: Streams, store: Store) -> Transports:
    ring = SendRing.allocate(rank.layouts, torch.device("cpu"), streams)
    return transports.meet(WAYS, store, rank, staging, ring, streams, 10)


def ranks_of(group: Group, change: Callable[[int, LocalRank], LocalRank]) -> list[Transports]:
    """What each rank of a group finds, when something about some of them is changed."""
    store = local_store()
    with ThreadPoolExecutor(len(group.ranks)) as pool:
        finding = [
            pool.submit(meet, change(column, rank.rank), rank.staging, HostStreams(), store)
            for column, rank in enumerate(group.ranks)
        ]
        return [found.result(20) for found in finding]


def way(found: Transports, source: int, target: int) -> type[Transport]:
    wanted = copy(BF16, (source, 0), (target, 1))
    return type(next(transport for transport in found.all if transport.carries(wanted)))


@pytest.fixture(scope="module")
def group() -> Any:
    made = Group.make(Kind(by_gloo, ("a", "a", "b")))
    yield made
    made.close()


def test_neighbours_read_and_the_rest_is_sent_where_nixl_is_not_and_all_ranks_choose_alike(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise ImportError("No module named 'nixl'")

    monkeypatch.setattr(transports, "make_agent", missing)
    found = ranks_of(group, lambda _, rank: rank)
    for each in found:
        ways = {(source, target): way(each, source, target) for source in range(3) for target in range(3)}
        assert ways[0, 1] is ways[1, 0] is PeerRead
        assert {ways[pair] for pair in ((0, 2), (2, 0), (1, 2), (2, 1))} == {GlooPeer}
        assert ways[1, 1] is LocalCopy
    assert [each.reads_from for each in found] == [(20,), (10,), ()]
    assert (
        "experts of rank 30 are sent by it, not read from its memory: NIXL cannot be used: No module named 'nixl'"
        in caplog.text
    )


def test_memory_that_cannot_be_exported_is_named_and_its_experts_are_sent(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transports, "make_agent", lambda: 1 // 0)

    def plain_weights(column: int, rank: LocalRank) -> LocalRank:
        if column != 1:
            return rank
        plain = {
            name: replace(tensor, data=tensor.data.clone()) if name == "weight" else tensor
            for name, tensor in rank.tensors[BF16].items()
        }
        return replace(rank, tensors={**rank.tensors, BF16: plain})

    found = ranks_of(group, plain_weights)
    for each in found:
        assert way(each, 1, 0) is GlooPeer
        assert way(each, 0, 1) is PeerRead
    said = f"not read from its memory: tensor weight of layer {BF16} is not in memory that other processes can read"
    assert f"experts of rank 20 are sent by it, {said}" in caplog.text


def test_a_rank_that_does_not_say_what_it_shares_ends_the_wait_at_its_deadline(group: Group) -> None:
    rank = group.ranks[0]
    with pytest.raises(DeadlineError, match=r"rank 20 did not say within 0\.05 s"):
        meet_neighbours(local_store(), rank.rank, rank.staging, SharedHostHandles(), 0.05)


def test_a_handle_of_another_container_is_not_taken_for_the_owners_trtllm_7377(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same process id and file number, another file: a namesake."""
    handles = SharedHostHandles()
    owners, namesakes = allocate_shared(64), allocate_shared(64)
    owners.fill_(7)
    exported = handles.export(owners.untyped_storage())
    other = handles.export(namesakes.untyped_storage())
    assert exported is not None
    assert other is not None
    assert handles.open(exported).tolist() == [7] * 64
    number = str(memory_handles._segments[owners.untyped_storage().data_ptr()].descriptor)
    namesake = str(memory_handles._segments[namesakes.untyped_storage().data_ptr()].descriptor)
    with pytest.raises(HandleError, match="is not the one that exported its memory"):
        handles.open(exported.replace(f", {number},", f", {namesake},"))
    with pytest.raises(HandleError, match="cannot be opened"):
        handles.open(exported.replace(f", {number},", ", 999999,"))


def test_a_reader_never_writes_into_its_neighbours_memory() -> None:
    handles, owners = SharedHostHandles(), allocate_shared(16)
    exported = handles.export(owners.untyped_storage())
    assert exported is not None
    read = handles.open(exported)
    owners.fill_(3)
    assert read.tolist() == [3] * 16  # what the owner writes later is read
    read.fill_(9)
    assert owners.tolist() == [3] * 16


# ── order of calls on a device ───────────────────────────────────────────────────────────────────────────────────────────


class Device(HostStreams):
    """Streams and handles that write down what is asked of them."""

    kind = "host"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._handles = SharedHostHandles()

    def on_side_stream(self) -> AbstractContextManager[object]:
        @contextmanager
        def side() -> Any:
            self.calls.append("enter side stream")
            yield
            self.calls.append("leave side stream")

        return side()

    def record(self, *, timed: bool = False) -> DeviceEvent:
        self.calls.append("record")
        return _Waited(self.calls)

    def export(self, storage: torch.UntypedStorage) -> str | None:
        self.calls.append("export")
        return self._handles.export(storage)

    def open(self, handle: str) -> torch.Tensor:
        self.calls.append("open")
        return self._handles.open(handle)


class _Waited:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def is_reached(self) -> bool:
        return True

    def wait_host(self) -> None:
        self.calls.append("host waits")

    def hold_current_stream(self) -> None:
        self.calls.append("stream waits")

    def seconds_since(self, earlier: DeviceEvent) -> float:
        raise NotImplementedError("nothing of a transfer is timed by events")


def test_handles_are_opened_once_and_a_source_says_that_staging_may_be_read_only_when_its_device_is_through() -> None:
    devices: dict[int, Device] = {}

    def on_device(rank: LocalRank, staging: Staging, streams: Streams, store: Store) -> Sequence[Transport]:
        device = devices[rank.rank_id] = Device()
        neighbours = meet_neighbours(store, rank, staging, device, 10)
        return LocalCopy(rank), PeerRead(rank, neighbours, device)

    group = Group.make(Kind(on_device, ("a", "a", "a")))
    try:
        storages = devices[10].calls.count("export")
        assert devices[10].calls == ["export"] * storages + ["open"] * 2 * storages
        meshes = group.connect()
        first = copy(BF16, (0, 0), (1, 0))
        for _ in range(3):
            for device in devices.values():
                device.calls.clear()
            group.stage([first, copy(BF16, (1, 0), (2, 1), relay_of=0, expert=0)], meshes)
            assert devices[10].calls == []  # a live slot needs no wait
            assert devices[20].calls == ["record", "host waits"]  # what it passes on is complete before the word leaves
            assert devices[30].calls == []
    finally:
        group.close()


def test_nixl_carries_what_lies_as_it_is_packed_and_every_relay(group: Group) -> None:
    """Column-major weights are sent; a relay lies packed in staging, whatever the slots look like."""
    links = frozenset((source, target) for source in RANK_IDS for target in RANK_IDS if source != target)
    layers = {rank: frozenset({INT4}) for rank in RANK_IDS}
    nixl = NixlRead(group.ranks[0].rank, Reachable(links, layers, {}, {}), None, HostStreams())
    assert nixl.carries(copy(INT4, (0, 0), (1, 0)))
    assert not nixl.carries(copy(BF16, (0, 0), (1, 0)))
    assert nixl.carries(copy(BF16, (0, 0), (1, 0), relay_of=0, expert=3))
    assert not nixl.carries(copy(INT4, (1, 0), (1, 1)))


class SlowAgent:
    """A NIXL agent whose reads are under way until they are let end, and which cannot be made to forget them before."""

    def __init__(self) -> None:
        self.began, self.may_end, self.refusals = threading.Event(), threading.Event(), 0

    def register_memory(self, reg_list: list[torch.Tensor]) -> None:
        return

    def get_agent_metadata(self) -> bytes:
        return b""

    def add_remote_agent(self, metadata: bytes) -> str:
        return "there"

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> list[tuple[int, int, int]]:
        return descs

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str) -> str:
        assert (operation, remote_agent) == ("READ", "there")
        return "handle"

    def transfer(self, handle: str) -> str:
        self.began.set()
        return "PROC"

    def check_xfer_state(self, handle: str) -> str:
        return "PROC"

    def release_xfer_handle(self, handle: str) -> None:
        if not self.may_end.is_set():
            self.refusals += 1
            if self.refusals == 3:
                self.may_end.set()
            raise RuntimeError("the transfer is active")


def test_staging_is_not_free_while_a_read_that_was_given_up_may_still_write_vllm_32881() -> None:
    """Withdrawn in the middle of a read over NIXL: the chunk ends at once, and staging once the read cannot write any more."""
    agents: dict[int, SlowAgent] = {}

    def over_nixl(rank: LocalRank, staging: Staging, streams: Streams, store: Store) -> Sequence[Transport]:
        agents[rank.rank_id] = SlowAgent()
        reachable = meet_agents(store, rank, staging, agents[rank.rank_id], 10)
        return LocalCopy(rank), NixlRead(rank, reachable, agents[rank.rank_id], streams)

    group = Group.make(Kind(over_nixl, ("a", "b", "c")))
    try:
        meshes = group.connect()
        running = group.begin([copy(INT4, (0, 0), (1, 0))], meshes, timeout_s=60)
        assert agents[20].began.wait(10)
        meshes[1].abandon()
        with pytest.raises(TransferError, match="expert 0 of mixed/2 was not read from rank 10"):
            running[1].result(10)  # the rank has quiesced when this ends
        assert agents[20].refusals == 3
    finally:
        group.close()
