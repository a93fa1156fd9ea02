"""When a fleet forms its group again, and of whom: what its launcher decides. Pure: no processes, no clock.

    SERVING ── a rank ended, stands still, or a new one has loaded ──► GATHERING ── all that are left stand ──► FORMING
       ▲                                                                  ▲  ▲                                    │ │
       └─────────────────────────── all have formed ──────────────────────┼──┼────────────────────────────────────┘ │
                                                                          │  └── one ended, or could not form ──────┘
    ENDED: too few slots for the experts, nobody left, or the same ranks fail again and again without one step

Ranks are known by their ids. What comes twice, late, or of a group that is no more changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.placement import fewest_slots

FRUITLESS_MAX = 3
"""How often the same ranks may form again without one step in between."""

FORM_WAITS = 4
"""Waits for others that a rank may have one after the other while it forms a group, its hook's among them."""


class Stage(Enum):
    """What the fleet is doing."""

    SERVING = "serving"
    GATHERING = "gathering"
    FORMING = "forming"
    ENDED = "ended"


# ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RankEnded:
    """Its process is no more. asked: it was told to stop, and had nothing left to do."""

    rank_id: RankId
    asked: bool = False


@dataclass(frozen=True, slots=True)
class RankLoaded:
    """A new rank waits to be taken in."""

    rank_id: RankId


@dataclass(frozen=True, slots=True)
class RankStands:
    """See `orders.Standing`."""

    rank_id: RankId
    number: int
    reason: str
    steps: int


@dataclass(frozen=True, slots=True)
class RankFormed:
    """It serves in group `number`."""

    rank_id: RankId
    number: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes."""


Event = RankEnded | RankLoaded | RankStands | RankFormed | Tick


# ── what is to be done ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class HaltRanks:
    """Have ranks of group `number` stand still."""

    rank_ids: tuple[RankId, ...]
    number: int


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Have these ranks, in this order, form group `number`."""

    rank_ids: tuple[RankId, ...]
    number: int


@dataclass(frozen=True, slots=True)
class KillRank:
    """End a rank that hangs."""

    rank_id: RankId
    reason: str


@dataclass(frozen=True, slots=True)
class EndFleet:
    """Have all that is left end."""

    rank_ids: tuple[RankId, ...]
    reason: str


Effect = HaltRanks | FormGroup | KillRank | EndFleet


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """The machine; state changes only in `handle`.

    Attributes:
        members: Ranks of the present group, or of the one that is forming, in its order.
        num_experts, slots_per_rank: E and S.
        gather_timeout_s: How long a rank may take to stand still once another one does: the longest step.
        form_timeout_s: How long a rank waits for others at most, each time, while it forms a group. One that waits for a rank
            that hangs gives up by itself, and stands: only who does neither for `FORM_WAITS` times as long is killed.
        number: Of the group that was last formed or ordered; the first is 0.
        newcomers: New ranks that have loaded, in that order.
        reason: Why the last group ended; of the fleet, once it has.
    """

    members: tuple[RankId, ...]
    num_experts: int
    slots_per_rank: int
    gather_timeout_s: float
    form_timeout_s: float
    number: int = 0
    stage: Stage = Stage.SERVING
    newcomers: tuple[RankId, ...] = ()
    reason: str = ""
    _standing: set[RankId] = field(default_factory=set)
    _formed: set[RankId] = field(default_factory=set)
    _reasons: dict[RankId, str] = field(default_factory=dict)
    _joining: set[RankId] = field(default_factory=set)
    _deadline_s: float = 0.0
    _changed: bool = False
    _steps: int = 0
    _fruitless: int = 0

    def __post_init__(self) -> None:
        self._formed.update(self.members)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event. now: monotonic seconds. Returns what to do, in order."""
        if self.stage is Stage.ENDED:
            return []
        match event:
            case RankEnded():
                return self._on_end(event, now)
            case RankLoaded():
                return self._on_loaded(event.rank_id, now)
            case RankStands():
                return self._on_standing(event, now)
            case RankFormed():
                return self._on_formed(event, now)
            case Tick():
                return self._on_tick(now)

    @property
    def deadline_s(self) -> float | None:
        """When the next `Tick` is due; None = no time limit runs."""
        return self._deadline_s if self.stage in (Stage.GATHERING, Stage.FORMING) else None

    @property
    def _form_s(self) -> float:
        return FORM_WAITS * self.form_timeout_s

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_end(self, event: RankEnded, now: float) -> list[Effect]:
        rank = event.rank_id
        self.newcomers = tuple(other for other in self.newcomers if other != rank)
        if rank not in self.members:
            return []
        self.members = tuple(other for other in self.members if other != rank)
        for known in (self._standing, self._formed, self._joining):
            known.discard(rank)
        if event.asked:
            return self._go_on(now) if self.stage is Stage.GATHERING else []
        self._changed = True
        why = f"rank {rank} is lost"
        if self.stage is Stage.GATHERING:
            self.reason = why  # what others said of it, before its end was seen, says less
        return self._gather(why, now)

    def _on_loaded(self, rank: RankId, now: float) -> list[Effect]:
        if rank in self.members or rank in self.newcomers:
            return []
        self.newcomers += (rank,)
        return self._gather(f"rank {rank} joins", now) if self.stage is Stage.SERVING else []

    def _on_standing(self, event: RankStands, now: float) -> list[Effect]:
        if event.number != self.number or event.rank_id not in self.members:
            return []
        self._standing.add(event.rank_id)
        self._reasons[event.rank_id] = event.reason
        self._steps = max(self._steps, event.steps)
        if self.stage is Stage.GATHERING:
            return self._go_on(now)
        return self._gather(f"rank {event.rank_id}: {event.reason}", now)

    def _on_formed(self, event: RankFormed, now: float) -> list[Effect]:
        if event.number != self.number or event.rank_id not in self.members or event.rank_id in self._standing:
            return []
        self._formed.add(event.rank_id)
        if self.stage is not Stage.FORMING or len(self._formed) < len(self.members):
            return []
        self.stage = Stage.SERVING
        self._joining.clear()
        self._changed, self._steps = False, 0
        return self._gather(f"rank {self.newcomers[0]} joins", now) if self.newcomers else []

    def _on_tick(self, now: float) -> list[Effect]:
        if self.stage is Stage.GATHERING and now >= self._deadline_s:
            late = [rank for rank in self.members if rank not in self._standing]
            what = f"it did not stand still within {self.gather_timeout_s:g} s"
        elif self.stage is Stage.FORMING and now >= self._deadline_s:
            late = [rank for rank in self.members if rank not in self._formed]
            what = f"it did not form its group within {self._form_s:g} s"
        else:
            return []
        self._deadline_s = now + self.gather_timeout_s  # for their ends to be seen
        return [KillRank(rank, what) for rank in late]

    # ── transitions ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _gather(self, reason: str, now: float) -> list[Effect]:
        """Wait until all that are left stand still."""
        effects: list[Effect] = []
        if self.stage is not Stage.GATHERING:
            patience = self._form_s if self.stage is Stage.FORMING else 0.0
            self._deadline_s = now + self.gather_timeout_s + patience
            self.stage, self.reason = Stage.GATHERING, reason
            running = tuple(rank for rank in self.members if rank not in self._standing)
            effects = [HaltRanks(running, self.number)] if running else []
        return effects + self._go_on(now)

    def _go_on(self, now: float) -> list[Effect]:
        """Once all stand: form, unless that is of no use."""
        if any(rank not in self._standing for rank in self.members):
            return []
        if not self.members or self._joining.issuperset(self.members):
            return self._end("every rank that served is lost")
        ranks = self.members + self.newcomers
        num_slots = len(ranks) * self.slots_per_rank
        if num_slots < self.num_experts:
            return self._end(
                f"{self.reason}: {self.num_experts} experts do not fit the {len(ranks)} ranks that are left x"
                f" {self.slots_per_rank} slots = {num_slots}; {fewest_slots(self.num_experts, len(ranks))}"
            )
        self._fruitless = 0 if self._changed or self.newcomers or self._steps else self._fruitless + 1
        if self._fruitless > FRUITLESS_MAX:
            last = "; ".join(f"rank {rank}: {self._reasons[rank]}" for rank in self.members)
            return self._end(f"{FRUITLESS_MAX} groups of the same ranks ended without one step, the last: {last}")
        self._joining.update(self.newcomers)
        self.members, self.newcomers = ranks, ()
        self.number += 1
        self.stage, self._deadline_s = Stage.FORMING, now + self._form_s
        self._standing.clear()
        self._formed.clear()
        self._changed, self._steps = False, 0
        return [FormGroup(ranks, self.number)]

    def _end(self, reason: str) -> list[Effect]:
        self.stage, self.reason = Stage.ENDED, reason
        return [EndFleet(self.members + self.newcomers, reason)]


def check_newcomers(known: Sequence[RankId], joining: Sequence[RankId]) -> None:
    """Raises InvalidInputError when one of the ids that are to join is taken, or given twice."""
    taken = sorted(set(known) & set(joining))
    if taken or len(set(joining)) != len(joining) or min(joining, default=0) < 0:
        raise InvalidInputError(
            f"ranks {list(joining)} cannot join: ids are unique and not negative, and of these {taken} are in the fleet already"
        )
