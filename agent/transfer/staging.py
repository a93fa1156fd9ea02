"""Where experts wait before a flip: one buffer, allocated once, and the packing of an expert's tensors into bytes.

An expert is packed as its EXPERT tensors in manifest order, each at a multiple of ALIGN_BYTES, zero-filled to a multiple of
that, empty tensors left out. Bytes are moved as they are: a tensor is read as integers of its width, so that no type needs
arithmetic (fp8, packed int4), and a broadcast axis (stride 0) is stored once. One packed expert is one region of staging, one
message between ranks, and what a checksum covers: no tensor of an expert can be left behind (sglang#17158), and each layer
has its own layout (vllm-ascend#11120).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from agent.engine.port import SlotTensor, TensorKind
from agent.transfer.streams import Streams
from eplb_service.errors import EnvironmentFault, InvalidInputError
from eplb_service.ids import LayerRef

ALIGN_BYTES = 16
REGION_ALIGN_BYTES = 256


_RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


def stored(data: torch.Tensor) -> torch.Tensor:
    """What of a slot tensor is memory: every broadcast axis after that of the slots has one entry, values are raw integers.

    >>> stored(torch.ones(2, 1).expand(2, 3)).shape
    torch.Size([2, 1])
    """
    for axis in range(1, data.dim()):
        if data.stride(axis) == 0 and data.shape[axis] > 1:
            data = data.narrow(axis, 0, 1)
    return data.detach().view(_RAW_DTYPES[data.element_size()])


def is_broadcast_over_slots(data: torch.Tensor) -> bool:
    """Whether all slots are one and the same memory."""
    return data.dim() > 0 and data.shape[0] > 1 and data.stride(0) == 0 and data.numel() > 0


def _overlaps(data: torch.Tensor) -> bool:
    """Whether entries may share memory: sorted by stride, an axis must step over all that the axes before it span."""
    span = 1
    for stride, size in sorted((data.stride(axis), data.shape[axis]) for axis in range(data.dim()) if data.shape[axis] > 1):
        if stride < span:
            return True
        span = stride * (size - 1) + span
    return False


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Where one tensor of an expert lies in its packed bytes. dtype, shape: of one slot as it is `stored`."""

    name: str
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How the experts of one layer are packed. num_bytes: packed, with padding; expert_bytes: without."""

    tensors: tuple[PackedTensor, ...]
    num_bytes: int
    expert_bytes: int

    @classmethod
    def of(cls, layer: LayerRef, tensors: Mapping[str, SlotTensor]) -> ExpertLayout:
        """The layout for a layer's slot tensors.

        Raises InvalidInputError when they disagree about the number of slots, or when writing one slot would write others.
        """
        packed, offset, expert_bytes = [], 0, 0
        mine = {
            name: stored(tensor.data)
            for name, tensor in tensors.items()
            if tensor.kind is TensorKind.EXPERT and tensor.data.numel()
        }
        for name, data in sorted(mine.items()):
            if _overlaps(data):
                raise InvalidInputError(
                    f"layer {layer}: entries of {name} share memory (shape {tuple(data.shape)}, strides {data.stride()}):"
                    " writing one expert would write others; declare it SHARED if it is one for all slots"
                )
        slots = {data.shape[0] for data in mine.values() if data.dim()}
        if len(slots) > 1:
            raise InvalidInputError(f"layer {layer}: expert tensors disagree about the number of slots: {sorted(slots)}")
        for name, data in sorted(mine.items()):
            size = data[0].numel() * data.element_size()
            packed.append(PackedTensor(name, offset, size, data.dtype, tuple(data.shape[1:])))
            offset = _align(offset + size, ALIGN_BYTES)
            expert_bytes += size
        return cls(tuple(packed), offset, expert_bytes)

    def view(self, region: torch.Tensor, tensor: PackedTensor) -> torch.Tensor:
        """The tensor inside packed bytes, without a copy. region: shape (num_bytes,), uint8."""
        return region[tensor.offset : tensor.offset + tensor.num_bytes].view(tensor.dtype).view(tensor.shape)

    def pack(self, tensors: Mapping[str, SlotTensor], slot: int, region: torch.Tensor) -> None:
        """Copy one slot's tensors into packed bytes on the same device; strided and offset views are read as they are."""
        self._zero_padding(region)
        for tensor in self.tensors:
            self.view(region, tensor).copy_(stored(tensors[tensor.name].data)[slot])

    def pack_values(self, values: Mapping[str, torch.Tensor], region: torch.Tensor) -> None:
        """Copy one expert's tensors, as they would be in a slot, into packed bytes on the same device.

        Raises InvalidInputError when one is missing or is not what the slots hold.
        """
        self._zero_padding(region)
        for tensor in self.tensors:
            value = values.get(tensor.name)
            found = None if value is None else stored(value.unsqueeze(0))[0]
            if found is None or found.dtype != tensor.dtype or tuple(found.shape) != tensor.shape:
                what = "missing" if value is None else f"{value.dtype} of {tuple(value.shape)}"
                raise InvalidInputError(
                    f"tensor {tensor.name} is {what}; a slot holds {tensor.num_bytes} bytes of shape {tensor.shape}"
                )
            self.view(region, tensor).copy_(found)

    def _zero_padding(self, region: torch.Tensor) -> None:
        """It is part of the checksum. Nothing else is written twice: that would cost a third of the device's copy rate."""
        ends = [*(tensor.offset for tensor in self.tensors[1:]), self.num_bytes]
        for tensor, end in zip(self.tensors, ends, strict=True):
            if tensor.offset + tensor.num_bytes < end:
                region[tensor.offset + tensor.num_bytes : end].zero_()

    def unpack(self, region: torch.Tensor, tensors: Mapping[str, SlotTensor], slot: int) -> None:
        """Copy packed bytes into one slot's tensors, in place."""
        for tensor in self.tensors:
            stored(tensors[tensor.name].data)[slot].copy_(self.view(region, tensor), non_blocking=True)


class Staging:
    """The staging buffer of one rank. `take` hands out regions of the present chunk, `clear` takes all of them back.

    budget_bytes: bytes of experts (without padding) that fit at the same time; the buffer is larger by the padding.
    allocate: host memory for experts on a CPU, so many bytes, zeroed; None = plain.
    """

    def __init__(
        self,
        budget_bytes: int,
        layouts: Mapping[LayerRef, ExpertLayout],
        device: torch.device,
        streams: Streams,
        *,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        ratio = max(
            (_align(x.num_bytes, REGION_ALIGN_BYTES) / x.expert_bytes for x in layouts.values() if x.expert_bytes), default=1
        )
        size = _align(int(budget_bytes * ratio) + 1, REGION_ALIGN_BYTES)
        self._layouts = layouts
        self._used = 0
        try:
            if device.type == "cpu" and allocate is not None:
                self._buffer = allocate(size)
            else:
                self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
            self._host = streams.host_buffer(size) if device.type != "cpu" else self._buffer
        except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
            raise EnvironmentFault(f"staging of {size} bytes cannot be allocated on {device}: {error}") from error

    @property
    def buffer(self) -> torch.Tensor:
        """All of it, on the weights' device. Shape (num_bytes,), uint8."""
        return self._buffer

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self._buffer.numel()

    def take(self, layer: LayerRef) -> Region:
        """Room for one expert of a layer. Raises InvalidInputError when the buffer is full (the budget was checked before)."""
        layout = self._layouts[layer]
        if self._used + layout.num_bytes > self._buffer.numel():
            raise InvalidInputError(
                f"staging of {self._buffer.numel()} bytes is full: {self._used} used, {layout.num_bytes} wanted"
            )
        span = slice(self._used, self._used + layout.num_bytes)
        self._used = _align(span.stop, REGION_ALIGN_BYTES)
        return Region(self._buffer[span], self._host[span], span.start)

    def clear(self) -> None:
        """Take all regions back; nothing may write to them or read from them any more."""
        self._used = 0


@dataclass(frozen=True, slots=True)
class Region:
    """Room for one packed expert: on the weights' device, and the same bytes on the host (one and the same on a CPU).

    offset: of its first byte in the buffer.
    """

    device: torch.Tensor
    host: torch.Tensor
    offset: int

    def to_device(self) -> None:
        """Bring what is on the host to the device, in order of the current stream."""
        copy_if_apart(self.host, self.device)

    def to_host(self) -> None:
        """The other way."""
        copy_if_apart(self.device, self.host)


def copy_if_apart(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy in order of the current stream; host and device memory of a CPU are one and the same, and stay as they are."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source, non_blocking=True)
