"""What waits for the agent process: both queues have a bound, and nothing here ever blocks the engine."""

from __future__ import annotations

import threading
from collections import deque

from eplb_service.control import FromRank
from eplb_service.window.report import LoadReport

MESSAGES_MAX = 1024


class Outbox:
    """Messages and load windows on their way out; filled by the engine's threads, emptied by the link.

    Messages are kept only while the agent process is attached: one that comes back is told the present state instead.
    A full ring drops its oldest window and counts it (sglang#18587: an unbounded one ate the host's memory).
    """

    def __init__(self, ring_windows: int) -> None:
        self._lock = threading.Lock()
        self._messages: deque[FromRank] = deque(maxlen=MESSAGES_MAX)
        self._windows: deque[LoadReport] = deque()
        self._ring_windows = ring_windows
        self._attached = False
        self._has_news = False
        self.windows_dropped = 0
        self.windows_sent = 0

    def put(self, message: FromRank) -> None:
        """Queue a message, if anybody is there."""
        with self._lock:
            if self._attached:
                self._messages.append(message)
                self._has_news = True

    def put_window(self, report: LoadReport) -> None:
        """Queue a window; the oldest one makes room."""
        with self._lock:
            if len(self._windows) >= self._ring_windows:
                self._windows.popleft()
                self.windows_dropped += 1
            self._windows.append(report)
            self._has_news = True

    def drop_window(self) -> None:
        """Count a window that could not even be queued."""
        with self._lock:
            self.windows_dropped += 1

    def attach(self) -> None:
        """The agent process is there: messages are kept from now on."""
        with self._lock:
            self._attached = True

    def detach(self, *, windows_unsent: int) -> None:
        """It is gone: what was meant for it is forgotten, windows stay. windows_unsent: taken, but not wholly sent."""
        with self._lock:
            self._attached = False
            self._messages.clear()
            self.windows_sent -= windows_unsent
            self.windows_dropped += windows_unsent

    def take_news(self) -> bool:
        """Whether something was queued since the last call: the link needs no other wake-up."""
        if not self._has_news:
            return False
        with self._lock:
            self._has_news = False
        return True

    def take(self) -> FromRank | LoadReport | None:
        """The next thing to send: messages before windows."""
        with self._lock:
            if self._messages:
                return self._messages.popleft()
            if self._windows:
                self.windows_sent += 1
                return self._windows.popleft()
            return None

    def __len__(self) -> int:
        with self._lock:
            return len(self._messages) + len(self._windows)
