"""The fleets of a soak: one whose ranks end and start together, and one that goes on without a rank that is lost."""

from __future__ import annotations

from collections.abc import Collection

from agent.engine.reference.client import RankClient
from agent.engine.reference.config import Member
from eplb_service.ids import RankId
from tests.integration.fault_checks import NUM_EXPERTS
from tests.integration.fault_fleet import FaultFleet
from tests.integration.fault_survivors import LosingFleet
from tests.soak.requests import BookedServing, Books

HOOK_OPTIONS = {"reconnect_max_s": 0.2, "pulse_period_s": 0.3, "vote_timeout_s": 6.0}


class SoakFleet(FaultFleet):
    """Ranks end together and start together. The policy is one that plans in no time and moves much."""

    planner_arguments = ("--policy=greedy",)
    books: Books
    booked: BookedServing

    def _serving(self, clients: list[RankClient]) -> BookedServing:
        self.booked = BookedServing(clients, self.traffic, in_flight=self._in_flight, finished=self._finished, books=self.books)
        return self.booked

    @property
    def present(self) -> tuple[int, ...]:
        """Ids of the ranks that serve, in the order of their group."""
        return tuple(self.ranks.config.rank_ids)

    @property
    def is_lost(self) -> bool:
        """Whether all ranks must be started again."""
        return self.booked.num_ranks < self.num_ranks

    def replace_lost(self, *, but: Collection[int]) -> int:
        """Have new ranks join for those that are gone, where that can be; returns for how many. but: those that stay away."""
        del but
        return 0

    def is_alive(self, position: int) -> bool:
        """Whether a rank of the present life runs."""
        return position not in self.ends_of_ranks()


class SurvivingSoakFleet(LosingFleet, SoakFleet):
    """Ranks that are left go on, and new ones join."""

    def _serving(self, clients: list[RankClient]) -> BookedServing:
        self._asked = {process.pid for process in self.ranks.processes}
        return SoakFleet._serving(self, clients)

    @property
    def is_lost(self) -> bool:
        return bool(self.ranks.why_ended)

    def replace_lost(self, *, but: Collection[int]) -> int:
        begun = 0
        for rank in self._rank_ids:
            if rank not in self.present and rank not in but and not self.ranks.process(rank).is_alive():
                node = self.ranks.config.nodes[0]
                self.ranks.begin_join([Member(rank_id=RankId(rank), node=node, hook_socket=self.hook_socket)])
                self._meet([self.ranks.process(rank).pid or 0])
                begun += 1
        for position, rank in enumerate(self.present):
            process = self.ranks.process(rank)
            if process.pid not in self._asked and process.is_alive():
                self._asked.add(process.pid)
                self.booked.add(self.ranks.client(position))
        return begun

    def ends_of_ranks(self) -> dict[int, str]:
        return {
            position: self.ranks.reason(position) or f"exit code {self.ranks.process(rank).exitcode}"
            for position, rank in enumerate(self._rank_ids)
            if not self.ranks.process(rank).is_alive()
        }


def fleet_of(ranks: int, books: Books, *, survives: bool) -> SoakFleet:
    """A fleet, not yet started."""
    ids, in_flight = tuple(range(ranks)), 1 if ranks > 4 else 2
    if survives:
        spare = -(-NUM_EXPERTS // (ranks - 2)) + 1  # two ranks may be gone at once
        made: SoakFleet = SurvivingSoakFleet(rank_ids=ids, in_flight=in_flight, hook_options=HOOK_OPTIONS, slots_per_rank=spare)
    else:
        made = SoakFleet(rank_ids=ids, in_flight=in_flight, hook_options=HOOK_OPTIONS)
    made.books = books
    return made
