"""Keeps the planner busy from a thread of its own, as an operator with a script would: watches it, and orders generations."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from eplb_service.cli.client import PlannerClient, planner_client
from eplb_service.cli.generations import state_text
from eplb_service.errors import EplbError
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from tests.integration.fault_checks import History

CALL_TIMEOUT_S = 5.0
PERIOD_S = 0.25
LISTED_MAX = 1000
LIVE = "went live on every rank"


@dataclass(slots=True)
class Orders:
    """What came of them. wrong: what must not be, as sentences; ends: of all generations, at the last look."""

    placed: int = 0
    refused: int = 0
    away: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    stop_reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def committed(self) -> int:
        """Generations that went live on every rank."""
        return self.ends[LIVE]


class Operator:
    """Orders a balanced placement and the loaded one in turn, whenever nothing is under way."""

    def __init__(self, address: str, deployment: str) -> None:
        self.orders = Orders()
        self.history = History()
        self.ordering = True
        self._address, self._deployment = address, deployment
        self._status: Any = None
        self._balanced_next = True
        self.looks = 0
        """How often the planner has told how it stands."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join(4 * CALL_TIMEOUT_S)

    @property
    def status(self) -> Any:
        """`DeploymentStatus` as last heard; None while the planner does not answer."""
        return self._status

    @property
    def is_quiet(self) -> bool:
        """Whether all ranks are there and nothing is under way, as last heard."""
        status = self._status
        return status is not None and status.state == "ready" and all(rank.state == "live" for rank in status.ranks)

    def _run(self) -> None:
        with planner_client(self._address, timeout_s=CALL_TIMEOUT_S) as client:
            while not self._stop.wait(PERIOD_S):
                try:
                    self._look(client)
                    self.looks += 1
                    if self.ordering and self.is_quiet:
                        self._order(client)
                except EplbError:
                    self._status = None
                    self.orders.away += 1
                except AssertionError as error:  # of the history
                    self.orders.wrong.append(str(error))

    def _look(self, client: PlannerClient) -> None:
        reply = client.call(client.admin.Status, admin_pb2.StatusRequest())
        mine = [view for view in reply.deployments if view.deployment == self._deployment]
        self._status = mine[0] if mine else None
        if not mine:
            return
        self.history.see_epoch(mine[0].epoch)
        if not mine[0].epoch:
            return  # it does not lead: it knows no generations yet
        request = placement_pb2.ListGenerationsRequest(deployment=self._deployment, limit=LISTED_MAX)
        views = [view for view in client.call(client.placement.ListGenerations, request).generations if view.generation]
        self.history.see(views, all_listed=len(views) < LISTED_MAX)
        ends: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for view in views:
            if view.active_at_s:  # also of one that a later one has superseded since
                ends[LIVE] += 1
            elif view.stop_reason:
                ends["stopped"] += 1
                reasons[view.stop_reason.partition(";")[0]] += 1
            else:
                ends[state_text(view.state)] += 1
                if state_text(view.state) == "stopped":
                    self.orders.wrong.append(f"generation {view.generation} was stopped without a reason")
        self.orders.ends, self.orders.stop_reasons = ends, reasons

    def _order(self, client: PlannerClient) -> None:
        key = uuid.uuid4().hex
        try:
            if self._balanced_next:
                request = admin_pb2.RebalanceRequest(deployment=self._deployment, idempotency_key=key, force=True)
                client.call(client.admin.Rebalance, request)
            else:
                back = admin_pb2.RollbackRequest(deployment=self._deployment, generation=0, idempotency_key=key)
                client.call(client.admin.Rollback, back)
        except EplbError:
            self.orders.refused += 1
        else:
            self.orders.placed += 1
        self._balanced_next = not self._balanced_next
