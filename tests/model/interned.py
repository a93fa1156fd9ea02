"""Values by number: each that is told apart by its key is kept once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Interned(Generic[T]):
    """Numbers from 1 on; 0 is nobody's."""

    def __init__(self, key: Callable[[T], Hashable]) -> None:
        self._key = key
        self._numbers: dict[Hashable, int] = {}
        self._values: list[T] = []

    def number(self, value: T) -> int:
        """Its number; that of an equal one that was there before."""
        key = self._key(value)
        found = self._numbers.get(key)
        if found is None:
            self._values.append(value)
            found = self._numbers[key] = len(self._values)
        return found

    def __getitem__(self, number: int) -> T:
        return self._values[number - 1]

    def __len__(self) -> int:
        return len(self._values)
