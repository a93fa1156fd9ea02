"""How long flips hold up steps: learned from flips, and what follows for how chunks are cut.

    stall = fixed part + seconds for each byte x bytes that the flip writes on the rank that it writes most on

A step waits for its slowest rank, and like devices write at like rates, so one line serves a group. It is drawn through the
last flips by medians (Theil and Sen): a flip that a pause fell into does not bend it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

ASSUMED_FLIP_BYTES_PER_S = 1e10
"""Until flips were measured: what the memory of a slow host does. A GPU's copies a hundred times as fast."""

FLIP_BYTES_MIN = 1 << 20
"""Flips of fewer bytes measure what a flip takes by itself, not what a byte takes."""

SPREAD_MIN = 0.2
"""The largest flip must be larger than the smallest by this share of it, or the two parts are not told apart."""

FLIPS_MIN = 4

ROOM_MIN = 0.1
"""Share of the limit that a chunk's bytes may always take: where a flip by itself takes it all, cutting finer saves little."""

ERRORS_CLEAR = 2.0
"""A chunk is cut so that the limit stands clear of what is expected by so many standard errors of one flip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallModel:
    """What a flip takes. error_s: standard error of one flip. num_flips: that it was learned from; 0 = assumed.

    >>> model = StallModel(fixed_s=0.001, seconds_per_byte=1e-9)
    >>> round(model.seconds(1_000_000), 6)
    0.002
    >>> model.bytes_within(0.003)
    2000000
    """

    fixed_s: float
    seconds_per_byte: float
    error_s: float = 0.0
    num_flips: int = 0

    def seconds(self, staged_bytes: int) -> float:
        """Expected stall of a flip that writes so many bytes on a rank."""
        return self.fixed_s + self.seconds_per_byte * staged_bytes

    def bytes_within(self, limit_s: float) -> int:
        """Bytes that a flip may write on a rank so that it stays within the limit, clear of noise; see ROOM_MIN."""
        room_s = max(limit_s - self.fixed_s - ERRORS_CLEAR * self.error_s, ROOM_MIN * limit_s)
        return int(round(room_s / self.seconds_per_byte, 3))

    def __str__(self) -> str:
        origin = f"over {self.num_flips} flips" if self.num_flips else "assumed, no flip was measured"
        return f"a flip takes {self.fixed_s * 1e3:.3g} ms and {self.seconds_per_byte * 1e12:.3g} ms for each GB ({origin})"


ASSUMED = StallModel(fixed_s=0.0, seconds_per_byte=1 / ASSUMED_FLIP_BYTES_PER_S)


def fit_stalls(flips: Sequence[tuple[int, float]]) -> StallModel:
    """The line through flips of (bytes, seconds).

    While their bytes hardly differ, all of the time is put down to the bytes where these are many, and none where they are few:
    either way a larger flip is not expected to be faster than it may turn out.
    """
    if not flips:
        return ASSUMED
    largest, smallest = max(size for size, _ in flips), min(size for size, _ in flips)
    apart = max(SPREAD_MIN * largest, FLIP_BYTES_MIN)
    fixed_s, per_byte = 0.0, 0.0
    if len(flips) >= FLIPS_MIN and largest - smallest >= apart:
        slopes = [
            (late - early) / (more - less)
            for (less, early), (more, late) in combinations(sorted(flips), 2)
            if more - less >= apart / 2
        ]
        per_byte = median(slopes)
        fixed_s = median(seconds - per_byte * size for size, seconds in flips)
    if per_byte <= 0 or fixed_s < 0:
        large = [(size, seconds) for size, seconds in flips if size >= FLIP_BYTES_MIN]
        if large:
            fixed_s, per_byte = 0.0, median(seconds / size for size, seconds in large)
        else:
            fixed_s, per_byte = median(seconds for _, seconds in flips), ASSUMED.seconds_per_byte
    if per_byte <= 0:  # a clock that saw nothing
        per_byte = ASSUMED.seconds_per_byte
    error_s = 1.4826 * median(abs(seconds - fixed_s - per_byte * size) for size, seconds in flips)
    return StallModel(fixed_s=fixed_s, seconds_per_byte=per_byte, error_s=error_s, num_flips=len(flips))


@dataclass(slots=True)
class Stalls:
    """Time that flips held up steps, of each of the last chunks that of its slowest rank, and the bytes that it wrote.

    staged_bytes: of the rank that staged most, where that is known.
    """

    chunks: dict[int, float] = field(default_factory=dict)
    staged_bytes: dict[int, int] = field(default_factory=dict)
    kept: int = 32

    def add(self, chunk_id: int, seconds: float, staged_bytes: int | None = None) -> None:
        """A rank flipped, or all did. Times that are none are left out."""
        if not 0 <= seconds < float("inf"):
            return
        self.chunks[chunk_id] = max(seconds, self.chunks.get(chunk_id, 0.0))
        if staged_bytes is not None:
            self.staged_bytes[chunk_id] = staged_bytes
        while len(self.chunks) > self.kept:
            oldest = next(iter(self.chunks))
            del self.chunks[oldest]
            self.staged_bytes.pop(oldest, None)

    def mean_s(self) -> float | None:
        """None until a chunk flipped."""
        return sum(self.chunks.values()) / len(self.chunks) if self.chunks else None

    def model(self) -> StallModel:
        """What a flip takes, from those whose bytes are known."""
        return fit_stalls([(size, self.chunks[chunk]) for chunk, size in self.staged_bytes.items() if chunk in self.chunks])


def flip_bytes_max(model: StallModel, limit_s: float | None) -> int | None:
    """For `plan_chunks`; None = no limit."""
    return None if limit_s is None else model.bytes_within(limit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFlip:
    """A chunk that flipped on all ranks. staged_bytes: of the rank that staged most; measured_s: as the slowest told."""

    chunk_id: int
    staged_bytes: int
    expected_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipStall:
    """How long the longest flip of a generation holds up steps.

    expected_s: when its chunks were cut. limit_s: `rollout.commit_stall_ms_max` then, None = no limit. measured_s: None until
    one flipped.
    """

    expected_s: float
    limit_s: float | None = None
    measured_s: float | None = None

    @property
    def over_s(self) -> float:
        """By how much it is expected to exceed the limit: layers cannot be cut."""
        return max(0.0, self.expected_s - self.limit_s) if self.limit_s is not None else 0.0

    def followed_by(self, later: FlipStall) -> FlipStall:
        """Of a generation whose rollout was continued: the longest of both."""
        measured = [stall.measured_s for stall in (self, later) if stall.measured_s is not None]
        return FlipStall(
            expected_s=max(self.expected_s, later.expected_s),
            limit_s=later.limit_s,
            measured_s=max(measured) if measured else None,
        )

    def __str__(self) -> str:
        told = f"{self.measured_s * 1e3:.3g} ms, " if self.measured_s is not None else ""
        limit = ""
        if self.over_s:
            limit = f": {self.over_s * 1e3:.3g} ms over the limit of {(self.limit_s or 0) * 1e3:g} ms, as a layer is not cut"
        elif self.limit_s is not None:
            limit = f", limit {self.limit_s * 1e3:g} ms"
        return f"{told}{self.expected_s * 1e3:.3g} ms expected{limit}"
