"""Which ways experts may take between the ranks of a group, chosen once at start, and the same on all of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from agent.transfer.gloo import Store, first_line
from agent.transfer.gloo_peer import GlooPeer, SendRing
from agent.transfer.local_copy import LocalCopy
from agent.transfer.memory_handles import handles_for
from agent.transfer.nixl_read import NixlAgent, NixlRead, make_agent, meet_agents
from agent.transfer.peer_memory import meet_neighbours
from agent.transfer.peer_read import PeerRead
from agent.transfer.staging import Staging
from agent.transfer.streams import Streams
from agent.transfer.transport import LocalRank, Transport
from agent.transfer.ways import Ways
from eplb_service.ids import RankId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Transports:
    """In order of preference. reads_from: ranks whose memory experts are read from."""

    all: tuple[Transport, ...]
    reads_from: tuple[RankId, ...] = ()


def sending(rank: LocalRank, ring: SendRing, streams: Streams) -> Transports:
    """What works between any ranks."""
    return Transports((LocalCopy(rank), GlooPeer(rank, ring, streams)))


def meet(
    ways: Ways, store: Store, rank: LocalRank, staging: Staging, ring: SendRing, streams: Streams, timeout_s: float
) -> Transports:
    """Find out with all ranks of the group which of the ways there are. Raises DeadlineError when a rank does not come."""
    local, gloo = sending(rank, ring, streams).all
    reading: list[Transport] = []
    reads_from: list[RankId] = []
    if ways.same_node == "read":
        neighbours = meet_neighbours(store, rank, staging, handles_for(staging.buffer.device), timeout_s)
        _tell(neighbours.problems)
        reading.append(PeerRead(rank, neighbours, streams))
        reads_from += neighbours.memory
    if ways.cross_node == "nixl" and len(set(rank.nodes)) > 1:
        agent, problem = _agent()
        reachable = meet_agents(store, rank, staging, problem if agent is None else agent, timeout_s)
        _tell(reachable.problems)
        reading.append(NixlRead(rank, reachable, agent, streams))
        reads_from += reachable.memory
    return Transports((local, *reading, gloo), tuple(sorted(reads_from)))


def _agent() -> tuple[NixlAgent | None, str]:
    """Or why there is none."""
    try:
        return make_agent(), ""
    except Exception as error:  # noqa: BLE001  # whatever keeps it from starting, experts are sent instead
        return None, f"NIXL cannot be used: {first_line(error)}"


def _tell(problems: Mapping[RankId, str]) -> None:
    for rank, problem in problems.items():
        logger.warning("hook.not_read: experts of rank %d are sent by it, not read from its memory: %s", rank, problem)
