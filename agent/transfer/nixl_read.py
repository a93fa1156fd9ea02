"""Experts are read out of the memory of any other rank over NIXL (UCX: RDMA between nodes), when that package is there.

As in `peer_read` the source only says that an expert may be read; its NIC, or the progress thread of its NIXL agent, does the
rest. Slots are read as they lie: a layer whose tensors are not contiguous within a slot on the source travels another way.
"""

from __future__ import annotations

import base64
import importlib
import json
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from agent.transfer.gloo import Store, first_line
from agent.transfer.one_sided import Links, OneSidedRead, agree_on_links, memory_said_by
from agent.transfer.staging import Staging, stored
from agent.transfer.streams import Streams
from agent.transfer.transport import LocalRank, StagedCopy, TransferError, Transit
from eplb_service.control import Copy, RefusalCode
from eplb_service.ids import LayerRef, RankId

POLL_S = 0.0005
_WARN_EVERY_S = 10.0
_BACKEND = "UCX"

logger = logging.getLogger(__name__)


class NixlAgent(Protocol):
    """What is used of `nixl_agent` (nixl 1.x). States of a transfer: DONE, PROC, ERR."""

    def register_memory(self, reg_list: list[torch.Tensor]) -> Any:
        """Let memory take part in transfers."""
        ...

    def get_agent_metadata(self) -> bytes:
        """What others need to reach this agent's memory."""
        ...

    def add_remote_agent(self, metadata: bytes) -> str | bytes:
        """Its name, for transfers."""
        ...

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any:
        """Descriptors of (address, bytes, device)."""
        ...

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str) -> Any:
        """Prepare a transfer; returns its handle."""
        ...

    def transfer(self, handle: Any) -> str:
        """Begin it."""
        ...

    def check_xfer_state(self, handle: Any) -> str:
        """How it stands."""
        ...

    def release_xfer_handle(self, handle: Any) -> None:
        """Forget it; raises while it is under way and cannot be ended."""
        ...


def make_agent() -> NixlAgent:
    """An agent of our own. Raises ImportError without the package, RuntimeError when it cannot start."""
    api = importlib.import_module("nixl._api")
    agent: NixlAgent = api.nixl_agent(f"eplb-{uuid.uuid4().hex}", api.nixl_agent_config(backends=[_BACKEND]))
    return agent


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Where the experts of another rank lie. agent: its name here. slots: (address of slot 0, bytes between slots) by tensor.

    A layer that cannot be read slot by slot is left out. staging: address of its buffer.
    """

    agent: str
    device: int
    kind: str
    staging: int
    slots: Mapping[LayerRef, Mapping[str, tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Reachable:
    """Who can read whom over NIXL. links: pairs (source, target). layers: of each source, those that can be read from slots.

    Both are the same on all ranks. memory: of the ranks that this one can read. problems: why another cannot be read here.
    """

    links: Links
    layers: Mapping[RankId, frozenset[LayerRef]]
    memory: Mapping[RankId, RemoteMemory]
    problems: Mapping[RankId, str]


def meet_agents(store: Store, rank: LocalRank, staging: Staging, agent: NixlAgent | str, timeout_s: float) -> Reachable:
    """Exchange addresses with the ranks of other nodes. agent: of this rank, or why it has none.

    Raises DeadlineError when a rank does not come in time.
    """
    store.set(f"nixl/{rank.rank_id}", json.dumps({"problem": agent} if isinstance(agent, str) else _say(rank, staging, agent)))
    memory: dict[RankId, RemoteMemory] = {}
    problems: dict[RankId, str] = {}
    layers: dict[RankId, frozenset[LayerRef]] = {}
    for peer in rank.group_rank_ids:
        said = json.loads(memory_said_by(store, f"nixl/{peer}", peer, timeout_s))
        slots = {LayerRef(model, layer_id): _pairs(of) for model, layer_id, of in said.get("layers", [])}
        layers[peer] = frozenset(slots)
        if rank.nodes[rank.column(peer)] == rank.nodes[rank.column(rank.rank_id)]:
            continue
        if isinstance(agent, str) or "problem" in said:
            problems[peer] = str(said.get("problem", agent))
            continue
        try:
            name = agent.add_remote_agent(base64.b64decode(said["metadata"]))
        except Exception as error:  # noqa: BLE001  # its errors have no common type but Exception
            problems[peer] = first_line(error)
            continue
        as_text = name.decode() if isinstance(name, bytes) else name
        memory[peer] = RemoteMemory(as_text, said["device"], said["kind"], said["staging"], slots)
    return Reachable(agree_on_links(store, "nixl-reads", rank, memory, timeout_s), layers, memory, problems)


def _pairs(described: Mapping[str, list[int]]) -> dict[str, tuple[int, int]]:
    return {name: (address, step) for name, (address, step) in described.items()}


def _say(rank: LocalRank, staging: Staging, agent: NixlAgent) -> dict[str, Any]:
    """Register everything that may be read, and say where it is."""
    memory = {staging.buffer.untyped_storage().data_ptr(): staging.buffer}
    layers = []
    for layer in sorted(rank.layouts):
        data = {packed.name: stored(rank.tensors[layer][packed.name].data) for packed in rank.layouts[layer].tensors}
        for tensor in data.values():
            storage = tensor.untyped_storage()
            bytes_ = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            memory.setdefault(storage.data_ptr(), bytes_)
        if all(tensor[0].is_contiguous() for tensor in data.values()):
            places = {name: [tensor.data_ptr(), tensor.stride(0) * tensor.element_size()] for name, tensor in data.items()}
            layers.append([layer.model, layer.layer_id, places])
    agent.register_memory(list(memory.values()))
    device, kind = _device(staging.buffer)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    return {"metadata": metadata, "device": device, "kind": kind, "staging": staging.buffer.data_ptr(), "layers": layers}


def _device(memory: torch.Tensor) -> tuple[int, str]:
    return (memory.get_device(), "VRAM") if memory.is_cuda else (0, "DRAM")


class NixlRead(OneSidedRead):
    """A `Transport` between ranks whose agents reach one another."""

    def __init__(self, rank: LocalRank, reachable: Reachable, agent: NixlAgent | None, streams: Streams) -> None:
        super().__init__(rank, reachable.links, streams)
        self._reachable, self._agent = reachable, agent
        self._reading: Any = None

    def carries(self, copy: Copy) -> bool:
        """Copies of which the target reaches the source, and the source's slots, or its staging, lie as they are packed."""
        return super().carries(copy) and (copy.is_relay or copy.layer in self._reachable.layers[copy.source_rank])

    def take(self, arrival: StagedCopy, transit: Transit) -> None:
        """Read it; what is not read is padding, which is zero."""
        copy, region = arrival.copy, arrival.region.device
        offset = self._told(arrival, transit)
        region.zero_()
        self._streams.record().wait_host()
        self._read(copy, region, offset, transit)

    def quiesce(self) -> None:
        """Wait until a read that was under way can write no more: until then staging is not free, however long that takes."""
        super().quiesce()
        waited_s = 0.0
        while self._reading is not None and not self._ended():
            time.sleep(POLL_S)
            waited_s += POLL_S
            if waited_s >= _WARN_EVERY_S:
                logger.warning("hook.not_quiesced: a read over NIXL that was given up is still under way; staging waits for it")
                waited_s = 0.0

    def _read(self, copy: Copy, region: torch.Tensor, offset: int, transit: Transit) -> None:
        agent = self._agent
        if agent is None:
            raise TransferError(RefusalCode.TRANSFER, "this rank has no NIXL agent")
        memory = self._reachable.memory[copy.source_rank]
        layout = self._rank.layouts[copy.layer]
        base, (device, kind) = region.data_ptr(), _device(region)
        if offset >= 0:
            here, there = [(base, layout.num_bytes, device)], [(memory.staging + offset, layout.num_bytes, memory.device)]
        else:
            places = memory.slots[copy.layer]
            here = [(base + packed.offset, packed.num_bytes, device) for packed in layout.tensors]
            there = [
                (places[packed.name][0] + copy.source_slot * places[packed.name][1], packed.num_bytes, memory.device)
                for packed in layout.tensors
            ]
        what = f"expert {copy.expert} of {copy.layer} was not read from rank {copy.source_rank}"
        transit.check(what)
        local, remote = agent.get_xfer_descs(here, kind), agent.get_xfer_descs(there, memory.kind)
        try:
            self._reading = agent.initialize_xfer("READ", local, remote, memory.agent)
            state = agent.transfer(self._reading)
            while state == "PROC":
                transit.check(what)
                transit.mesh.wait(POLL_S)
                state = agent.check_xfer_state(self._reading)
        except TransferError:
            raise
        except Exception as error:  # its errors have no common type but Exception
            raise TransferError(RefusalCode.TRANSFER, f"{what}: {first_line(error)}") from error
        if state != "DONE":
            raise TransferError(RefusalCode.TRANSFER, f"{what}: NIXL says {state}")
        self._ended()

    def _ended(self) -> bool:
        """Whether the read is over and forgotten."""
        agent, reading = self._agent, self._reading
        if agent is None or reading is None:
            return True
        try:
            agent.release_xfer_handle(reading)
        except Exception:  # noqa: BLE001  # it is still under way and cannot be ended yet
            return False
        self._reading = None
        return True
