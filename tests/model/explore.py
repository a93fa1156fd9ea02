"""Breadth-first search of every state that can be reached, with a short way to whatever is wrong.

A state may be split in a core and a set of what it has to its disposal (messages that may arrive, faults that may still
happen). Of two states with one core the one that has more can do all that the other can, so that the other is left out.
"""

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
    """What was found. is_complete: nothing that can be reached was left out, save what another state can do too.

    states: explored. ends: names of end conditions that were seen, with their number.
    """

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
    split: Callable[[S], tuple[Hashable, int]] = lambda state: (state, 0),
    describe: Callable[[S], str] = lambda _: "",
    states_max: int = 5_000_000,
) -> Explored[S]:
    """Every reachable state. Raises WrongStateError with a way to a step that raises it, the shortest without `split`.

    split: core of a state, and as bits what it has to its disposal. describe: a name for what is seen in a state, counted;
    empty = nothing.
    """
    began_s = time.process_time()
    parents: dict[S, tuple[S, str] | None] = {start: None}
    core, has = split(start)
    most: dict[Hashable, list[int]] = {core: [has]}
    queue: deque[tuple[S, Hashable, int]] = deque([(start, core, has)])
    states = transitions = 0
    ends: dict[str, int] = {}
    while queue and states <= states_max:
        state, core, has = queue.popleft()
        if has not in most[core]:
            continue  # one that has more was found meanwhile
        states += 1
        try:
            for label, following in steps(state):
                transitions += 1
                if following in parents:
                    continue
                core, has = split(following)
                if _is_new(most.setdefault(core, []), has):
                    parents[following] = (state, label)
                    queue.append((following, core, has))
        except WrongStateError as error:
            way = "\n".join(f"{number:3}. {label}" for number, label in enumerate(_way(parents, state), 1))
            raise WrongStateError(f"{error}\nafter {len(parents)} states; the shortest way there:\n{way}") from None
        seen = describe(state)
        if seen:
            ends[seen] = ends.get(seen, 0) + 1
    return Explored(states, transitions, time.process_time() - began_s, not queue, ends)


def _is_new(most: list[int], has: int) -> bool:
    """Whether none of these sets holds this one; then it is noted, and those that it holds are dropped."""
    if any(has & ~known == 0 for known in most):
        return False
    most[:] = [known for known in most if known & ~has]
    most.append(has)
    return True


def _way(parents: dict[S, tuple[S, str] | None], key: S) -> list[str]:
    labels = []
    while (parent := parents[key]) is not None:
        key, label = parent
        labels.append(label)
    return labels[::-1]
