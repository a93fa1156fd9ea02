"""Order between the engine's compute stream, the staging stream and the host: one small interface, two implementations.

On CUDA these are a side stream and events; on a device without streams every call runs to its end at once, so the same
code path holds and its call order can be tested on a CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from eplb_service.errors import DeadlineError


class DeviceEvent(Protocol):
    """A point in a device's work."""

    def is_reached(self) -> bool:
        """Whether all work before it is done; never blocks."""
        ...

    def wait_host(self) -> None:
        """Block this thread until it is reached."""
        ...

    def hold_current_stream(self) -> None:
        """Let later work on this thread's current stream wait for it; the host goes on."""
        ...


class Streams(Protocol):
    """What the hook asks of a device."""

    def bind_thread(self) -> None:
        """Make the device current in this thread: a thread starts on device 0, wherever the weights are (vllm#22179)."""
        ...

    def on_side_stream(self) -> AbstractContextManager[object]:
        """Work inside goes to the staging stream."""
        ...

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """Work inside goes to the engine's stream."""
        ...

    def record(self) -> DeviceEvent:
        """Mark this point of the current stream."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory that asynchronous copies can use. Shape (num_bytes,), uint8."""
        ...


class _Reached:
    """An event of a device that has finished whenever a call returns."""

    def is_reached(self) -> bool:
        return True

    def wait_host(self) -> None:
        return

    def hold_current_stream(self) -> None:
        return


class HostStreams:
    """A device without streams."""

    def bind_thread(self) -> None:
        """Nothing to bind."""

    def on_side_stream(self) -> AbstractContextManager[object]:
        """Runs at once."""
        return nullcontext()

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """Runs at once."""
        return nullcontext()

    def record(self) -> DeviceEvent:
        """Everything before has run."""
        return _Reached()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Plain memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait_host(self) -> None:
        self._event.synchronize()

    def hold_current_stream(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class CudaStreams:
    """A CUDA device: the engine's stream, and one of our own for staging."""

    def __init__(self, device: torch.device, compute: torch.cuda.Stream) -> None:
        self._device = device
        self._compute = compute
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bind_thread(self) -> None:
        """Make the device current in this thread."""
        torch.cuda.set_device(self._device)

    def on_side_stream(self) -> AbstractContextManager[object]:
        """Device and staging stream."""
        return _on_stream(self._device, self._side)

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """Device and the engine's stream."""
        return _on_stream(self._device, self._compute)

    def record(self) -> DeviceEvent:
        """An event on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return _CudaEvent(event)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


@contextmanager
def _on_stream(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def streams_for(device: torch.device, compute: torch.cuda.Stream | None) -> Streams:
    """The implementation for the device that holds the weights."""
    if device.type == "cuda" and compute is not None:
        return CudaStreams(device, compute)
    return HostStreams()


class EventPair:
    """A device event that can be waited for before it is recorded.

    Waiting on a CUDA event that nobody recorded yet is a no-op (vllm#37601). Here a host event says "recorded" first: a
    consumer blocks on the host until then, with a deadline, and only then on the device.
    """

    def __init__(self) -> None:
        self._recorded = threading.Event()
        self._event: DeviceEvent | None = None

    def record(self, streams: Streams) -> None:
        """The producer: mark the current stream and let consumers through."""
        self._event = streams.record()
        self._recorded.set()

    @property
    def is_recorded(self) -> bool:
        """Whether the producer was there."""
        return self._recorded.is_set()

    def hold_current_stream(self, timeout_s: float) -> None:
        """Let the current stream wait. Raises DeadlineError when nobody records in time."""
        self._wait_recorded(timeout_s).hold_current_stream()

    def wait_host(self, timeout_s: float) -> None:
        """Block until the device is through. Raises DeadlineError when nobody records in time."""
        self._wait_recorded(timeout_s).wait_host()

    def is_reached(self) -> bool:
        """Whether it was recorded and the device is through; never blocks."""
        return self._event is not None and self._recorded.is_set() and self._event.is_reached()

    def _wait_recorded(self, timeout_s: float) -> DeviceEvent:
        if not self._recorded.wait(timeout_s) or self._event is None:
            raise DeadlineError(f"an event was not recorded within {timeout_s:g} s")
        return self._event
