"""Breadth-first search of every state that can be reached, with the shortest way to whatever is wrong."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)
Step = tuple[str, S]
"""What happens, and the state after it."""


class WrongStateError(Exception):
    """Raised by a successor function: an invariant broke in this step."""


@dataclass(frozen=True)
class Explored(Generic[S]):
    """What was found. is_complete: no state is left out. ends: names of end conditions that were seen, with their number."""

    states: int
    transitions: int
    seconds: float
    is_complete: bool
    ends: dict[str, int]

    def __str__(self) -> str:
        word = "complete" if self.is_complete else "cut off"
        return f"{self.states} states, {self.transitions} transitions, {word}, {self.seconds:.1f} s of CPU"


def explore(
    start: S,
    steps: Callable[[S], Iterable[Step[S]]],
    *,
    describe: Callable[[S], str] = lambda _: "",
    states_max: int = 5_000_000,
) -> Explored[S]:
    """Every reachable state. Raises WrongStateError with the shortest way to a step that raises it.

    describe: a name for what is seen in a state, counted; empty = nothing.
    """
    began_s = time.process_time()
    parents: dict[S, tuple[S, str] | None] = {start: None}
    queue: deque[S] = deque([start])
    transitions = 0
    ends: dict[str, int] = {}
    while queue and len(parents) <= states_max:
        state = queue.popleft()
        try:
            for label, following in steps(state):
                transitions += 1
                if following not in parents:
                    parents[following] = (state, label)
                    queue.append(following)
        except WrongStateError as error:
            way = "\n".join(f"{number:3}. {label}" for number, label in enumerate(_way(parents, state), 1))
            raise WrongStateError(f"{error}\nafter {len(parents)} states; the shortest way there:\n{way}") from None
        seen = describe(state)
        if seen:
            ends[seen] = ends.get(seen, 0) + 1
    return Explored(len(parents), transitions, time.process_time() - began_s, not queue, ends)


def _way(parents: dict[S, tuple[S, str] | None], key: S) -> list[str]:
    labels = []
    while (parent := parents[key]) is not None:
        key, label = parent
        labels.append(label)
    return labels[::-1]
