"""How long an engine takes to go where it was told: watched from outside, since its policy has returned before the copy begins.

A thread looks, a hundred times a second and only while an engine moves, whether it still does: whether the call that asked
the policy is still on its thread's stack, or whether the engine itself says so in a variable. Nothing of the engine is touched,
and nothing on a device: a look costs microseconds.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from agent.transfer.gloo import first_line

LOOK_S = 0.01
LONGEST_S = 900.0
"""An engine that takes longer is not watched any more: how long it takes is not known then."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCopy:
    """What an engine did with an answer. held_steps: no step ran meanwhile, since a forward pass waited for it."""

    generation: int
    seconds: float
    held_steps: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrying:
    """How to see that an engine still carries an answer out: by either.

    calling: the call that does it, or a part of it, holds up its thread. beside: it goes on between, or beside, steps.
    """

    calling: Callable[[], bool] | None = None
    beside: Callable[[], bool] | None = None


def on_stack(frame: FrameType) -> Callable[[], bool]:
    """Whether a call of the present thread has not returned. The call's variables are kept alive as long as this is."""
    thread = threading.get_ident()

    def runs() -> bool:
        now = sys._current_frames().get(thread)
        while now is not None:
            if now is frame:
                return True
            now = now.f_back
        return False

    return runs


class CopyWatch:
    """The last copy of each deployment that this process asks for. A look that fails ends that watch, and is never raised."""

    def __init__(self, *, look_s: float = LOOK_S, longest_s: float = LONGEST_S) -> None:
        self._look_s, self._longest_s = look_s, longest_s
        self._lock = threading.Lock()
        self._seen: dict[str, EngineCopy] = {}
        self._under_way: dict[str, int] = {}

    def begin(self, deployment: str, generation: int, carrying: Carrying) -> None:
        """The engine was told to go to a generation, and begins now."""
        with self._lock:
            self._under_way[deployment] = generation
            self._seen.pop(deployment, None)
        arguments = (deployment, generation, carrying, time.monotonic())
        threading.Thread(target=self._watch, args=arguments, name=f"eplb-copy-watch {generation}", daemon=True).start()

    def last(self, deployment: str) -> EngineCopy | None:
        """The copy that ended last; None = there was none, it is under way still, or its end was not seen."""
        with self._lock:
            return self._seen.get(deployment)

    def _watch(self, deployment: str, generation: int, carrying: Carrying, began_s: float) -> None:
        held_steps = True
        try:
            while _goes_on(carrying.calling) or _goes_on(carrying.beside):
                held_steps = held_steps and _goes_on(carrying.calling)
                if time.monotonic() - began_s > self._longest_s:
                    logger.warning(
                        "adviser: generation %d of %s is carried out for more than %.0f s: not watched any more",
                        generation, deployment, self._longest_s,
                    )  # fmt: skip
                    return
                time.sleep(self._look_s)
        except Exception as error:  # noqa: BLE001  (the engine's own objects: of another release, or gone)
            logger.info("adviser: how long generation %d takes is not known: %s", generation, first_line(error))
            return
        copy = EngineCopy(generation=generation, seconds=time.monotonic() - began_s, held_steps=held_steps)
        with self._lock:
            if self._under_way.get(deployment) == generation:
                self._seen[deployment] = copy


def _goes_on(looks: Callable[[], bool] | None) -> bool:
    return looks is not None and looks()
