"""Why a rank takes part in no rollout: one reason for each cause, the first that stands is told."""

from __future__ import annotations

from pathlib import Path

from agent.hook.config import HookConfig

START, SWITCH, VOTE, FORM, FAILURE, CLOSE = "start", "switch", "vote", "form", "failure", "close"


class OffReasons:
    """Of one rank, by cause. switched_off: whether its machine's own switch says so, when it was looked at last.

    >>> off = OffReasons(HookConfig(socket_path="/run/eplb/agent.sock", staging_bytes=0))
    >>> off.first
    'not started'
    >>> off.note(START, ""), off.note(VOTE, "a rank left"), off.note(VOTE, "a rank left"), off.first
    (True, True, False, 'a rank left')
    """

    def __init__(self, config: HookConfig) -> None:
        self._config = config
        self._reasons = {START: "not started"}
        self.switched_off = config.off

    @property
    def first(self) -> str:
        """The one that is told; empty = the rank takes part."""
        return next((reason for reason in self._reasons.values() if reason), "")

    def of(self, cause: str) -> str:
        """Why, of one cause; empty = not for that."""
        return self._reasons.get(cause, "")

    def note(self, cause: str, reason: str) -> bool:
        """Keep a reason, empty = none any more; whether it is another than before."""
        changed = self.of(cause) != reason
        self._reasons[cause] = reason
        return changed

    def look_at_switch(self) -> str:
        """What the local off switch says: it needs no planner, no network and no restart."""
        file = self._config.off_file
        self.switched_off = self._config.off or (file is not None and Path(file).exists())
        where = "EPLB_OFF" if self._config.off else str(file)
        return f"switched off on this machine ({where})" if self.switched_off else ""
