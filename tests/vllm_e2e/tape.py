"""Which steps of the engines was a question's load counted in? Pure.

Engines of a data-parallel group step together, but how many steps each has had with requests when one of them asks is not to be
seen from outside. What each computes in them is known, so it is looked for: the load must be that of the last steps of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.vllm_e2e.plain_model import NUM_EXPERTS, NUM_LAYERS, Int64Array


@dataclass
class Tape:
    """What one engine counts, step after step of those with requests."""

    window: int
    """Steps that a load is of, at most."""
    _sums: list[Int64Array] = field(default_factory=lambda: [np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype=np.int64)])

    def add(self, steps: Int64Array) -> None:
        """The steps of a request. Shape (steps, L, E)."""
        self._sums += list(self._sums[-1] + steps.cumsum(axis=0))

    def __len__(self) -> int:
        return len(self._sums) - 1

    def loads(self, first: int, end: int) -> Int64Array:
        """Of the window after each of the steps first, …, end - 1. Shape (end - first, L, E)."""
        return np.stack([self._sums[step] - self._sums[max(0, step - self.window)] for step in range(first, end)])


Place = tuple[int, int]
"""Steps of each of the two engines."""


def places_of(load: Int64Array, tapes: tuple[Tape, Tape], since: Place, until: Place) -> Place | None:
    """Steps of each engine after which the two together have counted this load; None when they never have.

    since, until: what comes into question, both included.
    """
    one, other = (
        tape.loads(first, end + 1).reshape(end + 1 - first, -1) for tape, first, end in zip(tapes, since, until, strict=True)
    )
    left = {row.tobytes(): index for index, row in reversed(list(enumerate(other)))}
    for index, row in enumerate(load.reshape(-1) - one):
        if (found := left.get(row.tobytes())) is not None:
            return since[0] + index, since[1] + found
    return None
