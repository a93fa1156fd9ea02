"""Events and streams of a device, on a CPU, for engines that make them. Needs nothing: engines' own processes import it too."""

from __future__ import annotations

from typing import Any


class Event:
    """A device's event on a CPU, where everything has happened when the call returns."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def record(self, *_args: object) -> None:
        """Nothing to record."""

    def wait(self, *_args: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It happened."""
        return True

    def elapsed_time(self, _end: object) -> float:
        """No time."""
        return 0.0


class Stream(Event):
    """A device's stream on a CPU."""

    def wait_event(self, _event: object) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """It happened."""
        return event or Event()

    def wait_stream(self, _stream: object) -> None:
        """Nothing to wait for."""
