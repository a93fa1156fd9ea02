"""Tells the models of one engine apart (a target and its drafter): an engine's policy is not told which one it is for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Seen:
    """One model: what its map should be at the next call, and when it was called last."""

    expected: int
    called: int


@dataclass(slots=True)
class Models:
    """The models that have called so far.

    Engines call for all of their models in the same order in each interval, each with its own map. Shapes tell most apart: a
    drafter has fewer layers. Of models of one shape, the one whose map is as we left it; among equals the one that has not been
    called for longest. `most` bounds how many of one shape there can be: 1 where the engine has no drafter, so that a map that
    changed without us (a restart of a worker, half of a move) never makes a second model.

    >>> models = Models(most=2)
    >>> models.of((58, 288), 11), models.of((1, 288), 11)
    (0, 0)
    """

    most: int
    _calls: int = 0
    _seen: dict[tuple[int, ...], list[_Seen]] = field(default_factory=dict)

    def of(self, shape: tuple[int, ...], digest: int) -> int:
        """Which of the models of this shape called, from 0. digest: of the map that it routes by."""
        self._calls += 1
        seen = self._seen.setdefault(shape, [])
        fitting = [index for index, model in enumerate(seen) if model.expected == digest]
        if not fitting and len(seen) < self.most:
            seen.append(_Seen(digest, self._calls))
            return len(seen) - 1
        found = min(fitting or range(len(seen)), key=lambda index: seen[index].called)
        seen[found].called = self._calls
        seen[found].expected = digest
        return found

    def left_at(self, shape: tuple[int, ...], index: int, digest: int) -> None:
        """The engine was told to route this model by a map with this digest."""
        self._seen[shape][index].expected = digest
