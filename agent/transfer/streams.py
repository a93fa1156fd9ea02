"""Order between the engine's compute stream, the staging stream and the host: one small interface, two implementations.

On CUDA these are a side stream and events; on a device without streams every call runs to its end at once, so the same
code path holds and its call order can be tested on a CPU. What differs is timed alike: events know when they were reached.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from eplb_service.errors import BrokenInvariantError, DeadlineError, InvalidInputError

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = 0
"""Of a stream: CUDA knows none lower, and torch's default is the same. An engine that wants to be ahead of copies for certain
runs its model on a stream of priority -1."""

STREAMS_OF_A_POOL = 32
"""torch hands its streams of one priority out in turn: the 33rd is the first again."""

_THREAD_LOCAL_CAPTURE = 1
"""`cudaStreamCaptureModeThreadLocal`."""


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

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Time of the device between two points that are reached, both recorded `timed`; never blocks."""
        ...


class Streams(Protocol):
    """What the hook asks of a device."""

    def bind_thread(self) -> None:
        """For a thread of the hook's own, before it touches the device.

        Makes the device current: a thread starts on device 0, wherever the weights are (vllm#22179). And lets the thread use
        the device while the engine captures a graph.
        """
        ...

    def on_side_stream(self) -> AbstractContextManager[object]:
        """Work inside goes to the staging stream."""
        ...

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """Work inside goes to the engine's stream."""
        ...

    def record(self, *, timed: bool = False) -> DeviceEvent:
        """Mark this point of the current stream. timed: `DeviceEvent.seconds_since` will be asked."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory that asynchronous copies can use. Shape (num_bytes,), uint8."""
        ...


class _Reached:
    """An event of a device that has finished whenever a call returns."""

    def __init__(self) -> None:
        self._at_s = time.monotonic()

    def is_reached(self) -> bool:
        return True

    def wait_host(self) -> None:
        return

    def hold_current_stream(self) -> None:
        return

    def seconds_since(self, earlier: DeviceEvent) -> float:
        if not isinstance(earlier, _Reached):
            raise BrokenInvariantError(f"{type(earlier).__name__} is an event of another device")
        return self._at_s - earlier._at_s


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

    def record(self, *, timed: bool = False) -> DeviceEvent:  # noqa: ARG002  # the clock of a host costs nothing
        """Everything before has run."""
        return _Reached()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Plain memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)


class _CudaEvent:
    """Asked in any thread: the device is current while it is."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def is_reached(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait_host(self) -> None:
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def hold_current_stream(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def seconds_since(self, earlier: DeviceEvent) -> float:
        if not isinstance(earlier, _CudaEvent):
            raise BrokenInvariantError(f"{type(earlier).__name__} is an event of another device")
        with torch.cuda.device(self._device):
            return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaStreams:
    """A CUDA device: the engine's stream, and one of our own for staging."""

    def __init__(self, device: torch.device, compute: torch.cuda.Stream) -> None:
        self._device = device
        self._compute = compute
        self._side = _stream_beside(compute, device)

    def bind_thread(self) -> None:
        """Make the device current in this thread, and let captures of others be."""
        torch.cuda.set_device(self._device)
        spare_captures()

    def on_side_stream(self) -> AbstractContextManager[object]:
        """Device and staging stream."""
        return _on_stream(self._device, self._side)

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """Device and the engine's stream."""
        return _on_stream(self._device, self._compute)

    def record(self, *, timed: bool = False) -> DeviceEvent:
        """An event on the current stream. A thread that waits for it sleeps, and takes no core from the engine."""
        event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _CudaEvent(event, self._device)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


def _stream_beside(compute: torch.cuda.Stream, device: torch.device) -> torch.cuda.Stream:
    """A stream of the lowest priority that is not the engine's own, whatever torch's pool hands out.

    Raises BrokenInvariantError when there is none.
    """
    for _ in range(STREAMS_OF_A_POOL + 1):
        stream = torch.cuda.Stream(device, priority=LOWEST_PRIORITY)  # type: ignore[no-untyped-call]
        if stream.cuda_stream != compute.cuda_stream:
            return stream
    raise BrokenInvariantError(f"{STREAMS_OF_A_POOL + 1} streams of {device} are all the engine's own")


def spare_captures() -> None:
    """Let this thread use the device while another thread captures a graph, without ending that capture.

    torch captures in CUDA's global mode: then a query of an event, or a wait, of any thread breaks the capture, but not of one
    whose own mode is local to it (`cudaThreadExchangeStreamCaptureMode`, which torch does not offer).
    """
    major = str(torch.version.cuda).split(".")[0]
    try:
        exchange = ctypes.CDLL(f"libcudart.so.{major}").cudaThreadExchangeStreamCaptureMode
    except (OSError, AttributeError) as error:
        logger.warning("hook.captures: the engine must not capture graphs while experts are copied: %s", error)
        return
    error_code = exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL_CAPTURE)))
    if error_code:
        logger.warning("hook.captures: the engine must not capture graphs while experts are copied: CUDA error %d", error_code)


@contextmanager
def _on_stream(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def streams_for(device: torch.device, compute: torch.cuda.Stream | None) -> Streams:
    """The implementation for the device that holds the weights.

    Raises InvalidInputError for a device with streams whose engine names none: nothing would order copies with its kernels.
    """
    if device.type == "cuda":
        if compute is None:
            raise InvalidInputError(
                f"the weights are on {device} and compute_stream() is None: return the stream that runs the model, which may be"
                " torch.cuda.current_stream()"
            )
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

    def record(self, streams: Streams, *, timed: bool = False) -> None:
        """The producer: mark the current stream and let consumers through. timed: see `Streams.record`."""
        self._event = streams.record(timed=timed)
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

    def seconds_since(self, earlier: EventPair) -> float:
        """Time of the device between two that are reached. Raises BrokenInvariantError for one that was not recorded."""
        if self._event is None or earlier._event is None:
            raise BrokenInvariantError("the time between two events is asked for, and one of them was never recorded")
        return self._event.seconds_since(earlier._event)

    def _wait_recorded(self, timeout_s: float) -> DeviceEvent:
        if not self._recorded.wait(timeout_s) or self._event is None:
            raise DeadlineError(f"an event was not recorded within {timeout_s:g} s")
        return self._event
