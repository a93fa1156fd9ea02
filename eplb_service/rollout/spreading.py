"""Requests that may be served by several, spread so that the busiest serves as little as possible.

Greedy, those with the fewest choices first, then mended along paths: a request leaves the busiest, its place is taken from by
the next one, and so on to one with room (N. Harvey et al., Semi-matchings for bipartite graphs and load balancing, 2006). Where
all requests are of one size, nothing spreads them better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """size: bytes. servers: indices of those that may serve it, ascending, at least one."""

    size: int
    servers: tuple[int, ...]


def spread(requests: Sequence[Request], served: Sequence[int]) -> list[int]:
    """Who serves each request. served: bytes that each server serves already.

    >>> spread([Request(10, (0, 1)), Request(10, (0,)), Request(10, (1, 2))], [0, 0, 5])
    [1, 0, 2]
    """
    load = list(served)
    chosen = [-1] * len(requests)
    for index in sorted(range(len(requests)), key=lambda index: (len(requests[index].servers), -requests[index].size, index)):
        request = requests[index]
        chosen[index] = min(request.servers, key=lambda server: (load[server], server))
        load[chosen[index]] += request.size
    free = [index for index, request in enumerate(requests) if len(request.servers) > 1]
    while free and _relieve(requests, free, chosen, load):
        pass
    return chosen


def _relieve(requests: Sequence[Request], free: Sequence[int], chosen: list[int], load: list[int]) -> bool:
    """Take one request off a busiest server, where that makes no other as busy; whether it could. free: those with a choice."""
    most = max(load[chosen[index]] for index in free)
    if most < max(load):
        return False  # nobody can help the busiest
    busiest = min(chosen[index] for index in free if load[chosen[index]] == most)
    for size in sorted({requests[index].size for index in free}, reverse=True):
        path = _path([index for index in free if requests[index].size == size], requests, chosen, load, busiest, size)
        if path:
            for index, server in path:
                chosen[index] = server
            load[busiest] -= size
            load[path[0][1]] += size
            return True
    return False


def _path(
    free: Sequence[int], requests: Sequence[Request], chosen: Sequence[int], load: Sequence[int], busiest: int, size: int
) -> list[tuple[int, int]]:
    """Requests of one size and their new servers, from a server with room back to the busiest; empty when there is no way."""
    at: dict[int, list[int]] = {}
    for index in free:
        at.setdefault(chosen[index], []).append(index)
    came: dict[int, int] = {busiest: -1}
    queue = deque([busiest])
    while queue:
        server = queue.popleft()
        for index in at.get(server, ()):
            for other in requests[index].servers:
                if other in came:
                    continue
                came[other] = index
                if load[other] + size < load[busiest]:
                    path = [(index, other)]
                    while (left := chosen[path[-1][0]]) != busiest:
                        path.append((came[left], left))
                    return path
                queue.append(other)
    return []
