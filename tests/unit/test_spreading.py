"""Requests are spread as evenly as can be: against all ways to spread them."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.rollout.spreading import Request, spread


def busiest(requests: list[Request], chosen: tuple[int, ...] | list[int], served: list[int]) -> int:
    load = list(served)
    for request, server in zip(requests, chosen, strict=True):
        load[server] += request.size
    return max(load)


def choices(num_servers: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(0, num_servers - 1), min_size=1).map(lambda servers: tuple(sorted(servers)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Request], list[int]]:
    num_servers, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    requests = draw(st.lists(choices(num_servers).map(lambda servers: Request(size, servers)), max_size=6))
    return requests, draw(st.lists(st.integers(0, 7), min_size=num_servers, max_size=num_servers))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_requests_of_one_size_are_spread_as_evenly_as_possible(case: tuple[list[Request], list[int]]) -> None:
    requests, served = case
    chosen = spread(requests, served)
    assert all(server in request.servers for request, server in zip(requests, chosen, strict=True))
    every_way = itertools.product(*(request.servers for request in requests))
    assert busiest(requests, chosen, served) == min(busiest(requests, way, served) for way in every_way)
    assert chosen == spread(requests, served)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.builds(Request, st.integers(1, 9), choices(4)), min_size=1, max_size=12))
def test_requests_of_any_size_leave_the_busiest_when_one_step_helps(requests: list[Request]) -> None:
    chosen = spread(requests, [0, 0, 0, 0])
    most = busiest(requests, chosen, [0, 0, 0, 0])
    load = [sum(request.size for request, mine in zip(requests, chosen, strict=True) if mine == server) for server in range(4)]
    if load.count(most) == 1:
        top = load.index(most)
        for request, server in zip(requests, chosen, strict=True):
            if server == top:
                assert all(load[other] + request.size >= most for other in request.servers if other != top)


def test_a_request_makes_room_along_a_chain_of_others() -> None:
    """Taken one by one, the last finds 0 busy and goes there too; only if 0 gives one to 1, and 1 one to 2, all are even."""
    requests = [Request(1, (0, 1)), Request(1, (1, 2)), Request(1, (0, 1)), Request(1, (0, 1, 2))]
    served = [1, 1, 0]
    assert busiest(requests, spread(requests, served), served) == 2
    chain = [Request(1, (0, 1)), Request(1, (0, 1)), Request(1, (1, 2)), Request(1, (1, 2)), Request(1, (0,))]
    assert busiest(chain, spread(chain, [0, 0, 0]), [0, 0, 0]) == 2
