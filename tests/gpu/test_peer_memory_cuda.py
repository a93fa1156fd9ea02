"""Reading experts out of another process's CUDA memory through IPC handles: two processes on one device."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection, wait

import pytest
import torch

from agent.engine.port import SlotTensor
from agent.hook.manifest import settled
from agent.transfer.checksum import checksum
from agent.transfer.memory_handles import CudaHandles
from agent.transfer.staging import ExpertLayout, stored
from agent.transfer.streams import CudaStreams
from eplb_service.ids import LayerRef
from tests.mixed_experts import LAYERS, slot_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

WAIT_S = 60.0
EXPERTS = (4, 2, 7)


def test_experts_of_every_type_and_view_are_read_from_another_process_vllm_29162() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own_experts, args=(theirs,), daemon=True)
    owner.start()
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        handles, streams = CudaHandles(device), CudaStreams(device, torch.cuda.current_stream(device))
        assert wait([ours], WAIT_S)
        for model, layer_id, exported in ours.recv():
            layer = LayerRef(model, layer_id)
            expected = settled(slot_tensors(layer, EXPERTS))
            layout = ExpertLayout.of(layer, expected)
            read = {}
            for name, (handle, offset, shape, strides) in exported.items():
                memory, dtype = handles.open(handle), stored(expected[name].data).dtype
                typed = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
                read[name] = SlotTensor(typed.as_strided(shape, strides, offset))
            for slot in range(len(EXPERTS)):
                region = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
                with streams.on_side_stream():
                    layout.pack(read, slot, region)
                    found = checksum(region)
                    streams.record().wait_host()
                here = torch.zeros(layout.num_bytes, dtype=torch.uint8)
                layout.pack(expected, slot, here)
                assert torch.equal(region.cpu(), here)
                assert int(found) == int(checksum(here))
    finally:
        ours.send("done")
        owner.join(WAIT_S)
        if owner.is_alive():
            owner.kill()


def own_experts(pipe: Connection) -> None:
    """The other process: experts on the device, their handles said, until it is told to end."""
    device = torch.device("cuda", torch.cuda.current_device())
    handles = CudaHandles(device)
    kept = []
    said = []
    for layer in LAYERS:
        exported, loaded = {}, settled(slot_tensors(layer, EXPERTS))
        for packed in ExpertLayout.of(layer, loaded).tensors:
            data = stored(loaded[packed.name].data)
            size = 1 + sum((length - 1) * stride for length, stride in zip(data.shape, data.stride(), strict=True))
            memory = torch.zeros(data.storage_offset() + size, dtype=data.dtype, device=device)
            there = memory.as_strided(data.shape, data.stride(), data.storage_offset())
            there.copy_(data)
            torch.cuda.synchronize()
            handle = handles.export(there.untyped_storage())
            assert handle is not None
            kept.append(memory)
            exported[packed.name] = (handle, there.storage_offset(), list(there.shape), list(there.stride()))
        said.append((layer.model, layer.layer_id, exported))
    pipe.send(said)
    if wait([pipe], 4 * WAIT_S):
        pipe.recv()
