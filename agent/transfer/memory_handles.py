"""Memory of this rank that other processes of its node can read: handles of it, and memory of theirs by their handles.

On CUDA these are IPC handles, made by torch, which knows where in an allocation a storage lies. On a CPU it is memory that
`allocate_shared` gave: it has no name, so that nothing of it is left after a crash and no two jobs meet (TensorRT-LLM#7377).
Memory that cannot be exported (of a pool whose pages come and go, or plain host memory) has no handle; its experts travel
another way.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class HandleError(RuntimeError):
    """A peer's memory cannot be opened here."""


class MemoryHandles(Protocol):
    """What one-sided reads need of a kind of memory. kind: a word; handles of one kind mean nothing to another."""

    kind: str

    def export(self, storage: torch.UntypedStorage) -> str | None:
        """A handle for the other processes of this node; None when this memory cannot be read by others."""
        ...

    def open(self, handle: str) -> torch.Tensor:
        """The memory behind a peer's handle. Shape (n,), uint8; to be read only. Raises HandleError."""
        ...


def boot_id() -> str:
    """The same on all processes of one kernel; empty where that cannot be told."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


# ── CUDA ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class CudaHandles:
    """CUDA IPC through torch's own sharing of storages, which all of `torch.multiprocessing` rests on."""

    kind = "cuda-ipc"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def export(self, storage: torch.UntypedStorage) -> str | None:
        """Its allocation's IPC handle and where in it the storage lies."""
        shared: Any = storage
        try:
            _device, *parts = shared._share_cuda_()
        except RuntimeError:
            return None
        return json.dumps([base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in parts])

    def open(self, handle: str) -> torch.Tensor:
        """Map it for this rank's own device, whatever number the peer's has over there."""
        parts = [base64.b64decode(part) if isinstance(part, str) else part for part in json.loads(handle)]
        storages: Any = torch.UntypedStorage
        try:
            storage = storages._new_shared_cuda(self._device.index, *parts)
        except RuntimeError as error:
            raise HandleError(f"CUDA IPC handle cannot be opened on {self._device}: {error}") from error
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


# ── host memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Segment:
    descriptor: int
    num_bytes: int


_segments: dict[int, _Segment] = {}  # by address; as long as the process lives, like the memory


def allocate_shared(num_bytes: int) -> torch.Tensor:
    """Zeroed host memory that other processes of the node can be let read. Shape (num_bytes,), uint8.

    An engine on CPUs that keeps its slots in such memory lets its experts be copied within a node by one read.
    """
    descriptor = os.memfd_create("eplb", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, max(num_bytes, 1))
    memory = torch.frombuffer(mmap.mmap(descriptor, max(num_bytes, 1)), dtype=torch.uint8)
    _segments[memory.untyped_storage().data_ptr()] = _Segment(descriptor, max(num_bytes, 1))
    return memory[:num_bytes]


class SharedHostHandles:
    """Memory of `allocate_shared`, found by peers through the owner's open files."""

    kind = "host"

    def export(self, storage: torch.UntypedStorage) -> str | None:
        """Where the owner has it open, and which file that is."""
        segment = _segments.get(storage.data_ptr())
        if segment is None:
            return None
        inode = os.fstat(segment.descriptor).st_ino
        return json.dumps([os.getpid(), segment.descriptor, inode, segment.num_bytes])

    def open(self, handle: str) -> torch.Tensor:
        """Map it; the number of the file proves that this is the owner's, not a namesake in another container."""
        pid, number, inode, num_bytes = json.loads(handle)
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise HandleError(f"memory of process {pid} cannot be opened: {error}") from error
        try:
            found = os.fstat(descriptor)
            if (found.st_ino, found.st_size) != (inode, num_bytes):
                raise HandleError(f"process {pid} here is not the one that exported its memory")
            # Private: a write by mistake stays here. The owner's writes are seen, on Linux, in every page not written here.
            return torch.frombuffer(mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        finally:
            os.close(descriptor)


def handles_for(device: torch.device) -> MemoryHandles:
    """The kind of handles for memory of a device."""
    return CudaHandles(device) if device.type == "cuda" else SharedHostHandles()
