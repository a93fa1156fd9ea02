"""What ranks of a node know of one another's memory: where the tensors of every slot lie, and who can read them.

Each rank says in the store what it exports, opens what its neighbours export, and says whose memory it could open. So all ranks
know alike between which of them experts are read rather than sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agent.transfer.gloo import Store, first_line
from agent.transfer.memory_handles import HandleError, MemoryHandles, boot_id
from agent.transfer.one_sided import Links, agree_on_links, memory_said_by
from agent.transfer.staging import Staging, stored
from agent.transfer.transport import LocalRank
from eplb_service.ids import LayerRef, RankId


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of another rank, mapped here: read only. tensors: as `stored`, all slots; staging: its whole staging buffer."""

    tensors: Mapping[LayerRef, Mapping[str, torch.Tensor]]
    staging: torch.Tensor


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Who can read whom. links: pairs (source, target), the same on all ranks. memory: of those that this rank can read.

    problems: why a rank of this node cannot be read here.
    """

    links: Links
    memory: Mapping[RankId, PeerMemory]
    problems: Mapping[RankId, str]


def meet_neighbours(store: Store, rank: LocalRank, staging: Staging, handles: MemoryHandles, timeout_s: float) -> Neighbours:
    """Exchange memory with the ranks of this node. Raises DeadlineError when a rank of the group does not come in time."""
    store.set(f"memory/{rank.rank_id}", _export(rank, staging, handles))
    node = dict(zip(rank.group_rank_ids, rank.nodes, strict=True))
    memory: dict[RankId, PeerMemory] = {}
    problems: dict[RankId, str] = {}
    for peer in rank.group_rank_ids:
        exported = memory_said_by(store, f"memory/{peer}", peer, timeout_s)
        if peer == rank.rank_id or node[peer] != node[rank.rank_id]:
            continue
        try:
            memory[peer] = _open(exported, rank, handles)
        except HandleError as error:
            problems[peer] = first_line(error)
    return Neighbours(agree_on_links(store, "reads", rank, memory, timeout_s), memory, problems)


def _export(rank: LocalRank, staging: Staging, handles: MemoryHandles) -> str:
    """What a rank says of its memory: JSON; with a reason instead of tensors when it can export none."""
    places: dict[int, int] = {}
    exported: list[str] = []

    def place(data: torch.Tensor, what: str) -> int:
        storage = data.untyped_storage()
        if storage.data_ptr() not in places:
            handle = handles.export(storage)
            if handle is None:
                raise HandleError(f"{what} is not in memory that other processes can read")
            places[storage.data_ptr()] = len(exported)
            exported.append(handle)
        return places[storage.data_ptr()]

    said: dict[str, Any] = {"kind": handles.kind, "boot": boot_id()}
    try:
        said["staging"] = place(staging.buffer, "staging")
        said["layers"] = [
            [
                layer.model,
                layer.layer_id,
                {packed.name: _described(rank, layer, packed.name, place) for packed in rank.layouts[layer].tensors},
            ]
            for layer in sorted(rank.layouts)
        ]
        said["handles"] = exported
    except HandleError as error:
        said = {"kind": handles.kind, "boot": boot_id(), "problem": str(error)}
    return json.dumps(said)


def _described(rank: LocalRank, layer: LayerRef, name: str, place: Any) -> list[Any]:
    data = stored(rank.tensors[layer][name].data)
    index = place(data, f"tensor {name} of layer {layer}")
    return [index, data.storage_offset(), list(data.shape), list(data.stride())]


def _open(text: str, rank: LocalRank, handles: MemoryHandles) -> PeerMemory:
    """Raises HandleError when a peer exported nothing that can be read here."""
    said = json.loads(text)
    if "problem" in said:
        raise HandleError(said["problem"])
    if (said["kind"], said["boot"]) != (handles.kind, boot_id()):
        raise HandleError(f"it shares {said['kind']} memory of another machine or kind; this rank reads {handles.kind} memory")
    opened = [handles.open(handle) for handle in said["handles"]]
    tensors: dict[LayerRef, dict[str, torch.Tensor]] = {}
    for model, layer_id, described in said["layers"]:
        layer = LayerRef(model, layer_id)
        dtypes = {packed.name: packed.dtype for packed in rank.layouts[layer].tensors}
        tensors[layer] = {
            name: _typed(opened[index], dtypes[name]).as_strided(shape, strides, offset)
            for name, (index, offset, shape, strides) in described.items()
        }
    return PeerMemory(tensors, opened[said["staging"]])


def _typed(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as whole entries of a type."""
    size = torch.empty(0, dtype=dtype).element_size()
    return memory[: memory.numel() // size * size].view(dtype)
