"""How fast experts leave a rank: no faster than the planner allows, and not at all while the engine reports pressure.

Copies share memory and links with serving: copies at full speed were seen to hold up steps (vllm#36271, vllm#43219). The pace
is kept between experts, by the worker that sends them: a rank sends no more bytes in a second, and no more of its time, than
the chunk's throttle says. Both ends of a copy wait with the chunk's deadline, which allows for the throttle
(`Throttle.seconds`); a pause that outlasts the deadline ends the chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eplb_service.control import Throttle

POLL_S = 0.005
"""Between two looks at the engine's pressure, and at whether the chunk was withdrawn."""


class Pace:
    """When the next expert may leave. Pure: times are seconds on any clock that does not go back.

    Between two experts lies at least the time that the second takes at the allowed rate, and time spent on experts is followed
    by as much rest as the share asks for. Nothing is saved up: a slow expert lets no later one leave early.

    >>> pace = Pace(Throttle(bytes_per_s=100.0), now=0.0)
    >>> pace.ready_at(50, now=0.0)
    0.5
    >>> pace.left(now=0.5)
    >>> pace.ready_at(50, now=0.6)
    1.0
    """

    def __init__(self, throttle: Throttle, now: float) -> None:
        self._throttle = throttle
        self._left_s = self._resumed_s = now

    def ready_at(self, num_bytes: int, now: float) -> float:
        """When so many bytes may leave; not before now."""
        throttle, ready_s = self._throttle, now
        if throttle.bytes_per_s:
            ready_s = max(ready_s, self._left_s + num_bytes / throttle.bytes_per_s)
        busy_s = now - self._resumed_s
        return max(ready_s, now + busy_s * (1 / throttle.time_share - 1))

    def left(self, now: float, *, num_bytes: int = 1) -> None:
        """They leave now. num_bytes: 0 = nothing goes to another rank, which the rate does not count."""
        self._resumed_s = now
        if num_bytes:
            self._left_s = now


@dataclass(slots=True)
class Pressure:
    """What the engine says of its pressure, and how often and how long in all that held experts back.

    ask: whether it is under pressure now, called from the thread that sends; None = the engine says nothing.
    """

    ask: Callable[[], bool] | None = None
    pauses: int = 0
    paused_s: float = 0.0


class Pacer:
    """Keeps the pace of one chunk on its worker thread.

    wait: waits so many seconds, or less when the chunk is withdrawn; then it returns True. deadline: the chunk's, on the clock.
    """

    def __init__(
        self,
        throttle: Throttle,
        *,
        clock: Callable[[], float],
        wait: Callable[[float], bool],
        deadline: float,
        pressure: Pressure,
    ) -> None:
        self._clock, self._wait, self._deadline, self._pressure = clock, wait, deadline, pressure
        self._pace = Pace(throttle, clock())

    def before_expert(self, num_bytes: int) -> None:
        """Returns when the next expert may leave. num_bytes: that go to another rank; 0 = it stays on this one.

        Raises RuntimeError when the chunk is withdrawn meanwhile, and when its deadline passes.
        """
        self._wait_until(self._pace.ready_at(num_bytes, self._clock()))
        if self._pressure.ask is not None and self._pressure.ask():
            self._pause(self._pressure.ask)
        self._pace.left(self._clock(), num_bytes=num_bytes)

    def waited(self) -> None:
        """The time since the last expert left was spent waiting for others: no rest is owed for it."""
        self._pace.left(self._clock(), num_bytes=0)

    def _wait_until(self, ready_s: float) -> None:
        while (now := self._clock()) < ready_s:
            if now >= self._deadline:
                raise RuntimeError("the allowed rate left experts over at the deadline of the chunk")
            self._wait_or_end(min(ready_s, self._deadline) - now)

    def _pause(self, under_pressure: Callable[[], bool]) -> None:
        began_s = self._clock()
        self._pressure.pauses += 1
        try:
            while under_pressure():
                if (now := self._clock()) >= self._deadline:
                    raise RuntimeError(
                        f"the engine reported pressure for {now - began_s:.3g} s, until the deadline of the chunk"
                    )
                self._wait_or_end(min(POLL_S, self._deadline - now))
        finally:
            self._pressure.paused_s += self._clock() - began_s

    def _wait_or_end(self, seconds: float) -> None:
        if self._wait(seconds):
            raise RuntimeError("withdrawn while it was held back")
