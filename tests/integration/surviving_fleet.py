"""The whole loop around ranks that go on when one is lost, and take new ones in: requests and checks follow the group."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from agent.engine.reference.client import RankClient
from agent.engine.reference.config import Member
from agent.engine.reference.messages import Inspection
from demo.oracle import Served
from demo.serving import Serving
from eplb_service.errors import EnvironmentFault
from eplb_service.ids import RankId
from tests.integration.whole_fleet import WAIT_S, WholeFleet

FORM_S = 30.0


class SurvivingServing(Serving):
    """Requests at ranks of which some may be gone. What a lost rank had under way is judged as far as it came."""

    def pump(self, now: float, *, wait_s: float = 0.0) -> None:
        for position in reversed(range(len(self._clients))):
            try:
                self._pump_one(position, now, wait_s)
            except EnvironmentFault:
                self._clients.pop(position).close()
                for request_id, request in self._open.pop(position).items():
                    came = (tuple(request.tokens), tuple(request.boundaries), tuple(request.generations))
                    self._finished(Served(request_id, request.prompt.kind, request.prompt.text, *came))

    def _pump_one(self, position: int, now: float, wait_s: float) -> None:
        client = self._clients[position]
        while self.accepting and len(self._open[position]) < self._in_flight:
            self._submit(position, client)
        for message in client.receive(timeout_s=wait_s / len(self._clients)):
            self._take(position, message, now)

    def add(self, client: RankClient) -> None:
        """A rank joined, as the last of the group."""
        self._clients.append(client)
        self._open.append({})

    @property
    def num_ranks(self) -> int:
        return len(self._clients)


class SurvivingFleet(WholeFleet):
    """A `WholeFleet` that loses ranks and gets new ones."""

    serving: SurvivingServing

    @property
    def engine_options(self) -> Mapping[str, Any]:
        return {"survives": True, "form_timeout_s": FORM_S}

    @property
    def rank_environments(self) -> Mapping[int, Mapping[str, str]]:
        return {}

    def _serving(self, clients: list[RankClient]) -> SurvivingServing:
        return SurvivingServing(clients, self.traffic, in_flight=self._in_flight, finished=self._finished)

    def lose(self, rank_id: int) -> float:
        """`kill -9`; returns when, in monotonic seconds."""
        left = tuple(rank for rank in self.ranks.config.rank_ids if rank != rank_id)
        self.ranks.process(rank_id).kill()
        at = time.monotonic()
        self.until(lambda: self.ranks.config.rank_ids == left, f"a group without rank {rank_id}")
        self.until(lambda: self.serving.num_ranks == len(left), f"the end of rank {rank_id}'s connections")
        return at

    def join(self, rank_id: int, node: str) -> None:
        """Have a new rank join, serving meanwhile."""
        newcomer = Member(rank_id=RankId(rank_id), node=node, hook_socket=self.hook_socket)
        wanted = (*self.ranks.config.rank_ids, newcomer.rank_id)
        self.ranks.begin_join([newcomer])
        self.until(lambda: self.ranks.config.rank_ids == wanted, f"rank {rank_id} to join")
        self.ranks.wait_for_ranks(wanted, timeout_s=WAIT_S)
        self.serving.add(self.ranks.client(len(wanted) - 1))

    def is_covered(self) -> bool:
        """Whether every layer of every rank's map has every expert."""
        return all(lacks(inspection) == 0 for inspection in self.serving.inspect())

    def ranks_of_the_planner(self) -> tuple[int, ...]:
        """Of the group that it plans for."""
        status = self.status()
        return () if status is None else tuple(int(rank.address.rank_id) for rank in status.ranks)


def lacks(inspection: Inspection, num_experts: int = 32) -> int:
    """Experts that no slot holds, over all layers."""
    return sum(num_experts - len(set(layer.row) - {-1}) for layer in inspection.layers)


def held_by(inspection: Inspection, position: int) -> int:
    """Slots of the rank at a position of the group that hold an expert, over all layers."""
    return sum(
        expert >= 0
        for layer in inspection.layers
        for expert in layer.row[position * len(layer.slot_digests) : (position + 1) * len(layer.slot_digests)]
    )
