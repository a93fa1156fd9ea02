"""Ports that parts of a fleet are given before they are bound."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack

from agent.engine.reference import launch
from agent.engine.reference.launch import free_port

ASK = "from agent.engine.reference.launch import free_port; print(*(free_port() for _ in range(20)))"


def test_no_port_is_given_twice_though_nobody_has_bound_it_yet() -> None:
    given = [free_port() for _ in range(20)]
    assert len(set(given)) == 20


def test_processes_that_start_together_are_given_other_ports() -> None:
    asked = [subprocess.Popen([sys.executable, "-c", ASK], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (set(process.communicate(timeout=60)[0].split()) for process in asked)
    assert len(first) == len(second) == 20
    assert not first & second


def test_a_port_that_somebody_listens_on_is_passed_over_also_when_all_near_ones_are_taken() -> None:
    with ExitStack() as stack:
        taken = set()
        for _ in range(launch._PORTS_OF_A_PROCESS + 5):
            port = free_port()
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            listener.bind(("127.0.0.1", port))
            listener.listen()
            assert port not in taken
            taken.add(port)
