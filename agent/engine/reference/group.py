"""The ranks that step together: their process group, and the connections by which they wake one another.

A group that was lost is left by destroying it. gloo's destructor waits for no peer, whether that was killed or stands still,
and closing its connections ends every wait of the others on this rank: one that notices a loss passes it on.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from agent.engine.reference.config import FleetConfig
from agent.engine.reference.wake import WakeMesh
from eplb_service.errors import ConflictError, DeadlineError, EnvironmentFault
from eplb_service.failpoints import reach
from eplb_service.ids import GroupId

_POLL_S = 0.01


class SupersededError(EnvironmentFault):
    """The launcher has other plans than the group that is being formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """One forming of the engine's group, as one of its ranks sees it.

    Attributes:
        number: Which forming; the first is 0.
        fleet: Its ranks, in column order of placements.
        position: This rank's place among them.
        group_id: Drawn by its first rank.
        mesh: Wakes its ranks.
    """

    number: int
    fleet: FleetConfig
    position: int
    group_id: GroupId
    mesh: WakeMesh

    def leave(self) -> None:
        """Close all connections to the other ranks; never waits for them."""
        self.mesh.close()
        leave_process_group()


def leave_process_group() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def form_group(
    fleet: FleetConfig,
    position: int,
    *,
    digest: str,
    device: torch.device,
    number: int = 0,
    timeout_s: float | None = None,
    is_superseded: Callable[[], bool] = lambda: False,
) -> RankGroup:
    """Meet the other ranks, and check that all have loaded the same model. What fails leaves no connection open.

    Args:
        fleet: The ranks of the group; the first listens at `engine_port`.
        position: This rank's place.
        digest: Of the model.
        device: Where it is.
        number: Which forming.
        timeout_s: For everything; None = the fleet's start-up.
        is_superseded: Asked while waiting for others.

    Raises:
        ConflictError: this rank holds another model than the first.
        SupersededError: the launcher has other plans.
        DeadlineError, torch.distributed.DistError: some rank did not come in time.
        RuntimeError: one was lost meanwhile.
    """
    until = time.monotonic() + (fleet.start_timeout_s if timeout_s is None else timeout_s)
    waiting = _Waiting(until, is_superseded)
    mesh: WakeMesh | None = None
    try:
        store = _open_store(fleet, position, digest, waiting)
        if number:
            reach("engine.group.formed_again")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("engine", store),
            rank=position,
            world_size=fleet.num_ranks,
            timeout=timedelta(seconds=waiting.left_s),
        )
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=fleet.step_timeout_s))
        mesh = WakeMesh(
            PrefixStore("wake", store),
            position=position,
            num_ranks=fleet.num_ranks,
            host=fleet.rendezvous_host,
            timeout_s=waiting.left_s,
        )
        group_id = GroupId(int(store.get("group_id")))
    except BaseException:
        if mesh is not None:
            mesh.close()
        leave_process_group()
        raise
    return RankGroup(number=number, fleet=fleet, position=position, group_id=group_id, mesh=mesh)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A wait for other ranks that ends at a time, or when it has become pointless."""

    until: float
    is_superseded: Callable[[], bool]

    @property
    def left_s(self) -> float:
        return max(self.until - time.monotonic(), 0.001)

    def turn(self, what: str) -> None:
        """One poll. Raises DeadlineError, naming what is missing, or SupersededError."""
        if self.is_superseded():
            raise SupersededError(f"{what}; the launcher gave this group up meanwhile")
        if time.monotonic() >= self.until:
            raise DeadlineError(f"{what} in time; look at the output of the other ranks for why they did not start")
        time.sleep(_POLL_S)


def _open_store(fleet: FleetConfig, position: int, digest: str, waiting: _Waiting) -> TCPStore:
    """The group's store, once all ranks have said there that they are here with the same model."""
    host, port, first = fleet.rendezvous_host, fleet.engine_port, position == 0
    if host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    while not first and not _listens(host, port):  # `TCPStore` would retry by itself, deaf to the launcher
        waiting.turn(f"rank {fleet.rank_ids[0]} does not listen at {host}:{port}")
    timeout = timedelta(seconds=waiting.left_s)
    store = TCPStore(host, port, fleet.num_ranks, is_master=first, timeout=timeout, wait_for_workers=False)
    if first:
        store.set("group_id", str(secrets.randbits(62) + 1))
    store.set(f"digest/{position}", digest)
    for other, rank_id in enumerate(fleet.rank_ids):
        while not store.check([f"digest/{other}"]):
            waiting.turn(f"rank {rank_id} did not come to the group")
    theirs = store.get("digest/0").decode()
    if theirs != digest:
        raise ConflictError(
            f"rank {fleet.rank_ids[position]} loaded a model with digest {digest}, rank {fleet.rank_ids[0]} one with {theirs};"
            " give all ranks the same weights"
        )
    return store


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
