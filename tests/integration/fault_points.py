"""Failpoints that a test shuts and opens again, as often as it likes: processes stand still there meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hold:
    """Holds processes at a `hold` failpoint from `shut` to `open`. point: its name."""

    point: str
    file: Path

    @property
    def reached(self) -> bool:
        """Whether a process stands still there."""
        return self._mark.exists()

    @property
    def pid(self) -> int:
        """The process that stands still there; 0 = none."""
        try:
            return int(self._mark.read_text() or 0)
        except FileNotFoundError:
            return 0

    @property
    def setting(self) -> str:
        """For `EPLB_FAILPOINTS` of the process."""
        return f"{self.point}=hold:{self.file}"

    def shut(self) -> None:
        """Whoever comes there from now on stands still."""
        self._mark.unlink(missing_ok=True)
        self.file.touch()

    def open(self) -> None:
        """Go on."""
        self.file.unlink(missing_ok=True)

    @property
    def _mark(self) -> Path:
        return self.file.with_name(f"{self.file.name}.reached")


def hold_at(folder: Path, point: str, where: str = "") -> Hold:
    """A hold with a file of its own. where: tells processes apart that have the same point."""
    return Hold(point, folder / f"hold-{point}{where and '-'}{where}")


@contextmanager
def held(hold: Hold) -> Iterator[Hold]:
    """Shut inside the block, and open after it whatever happens."""
    hold.shut()
    try:
        yield hold
    finally:
        hold.open()
