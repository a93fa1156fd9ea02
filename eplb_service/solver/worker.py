"""The process in which policies run: `python -m eplb_service.solver.worker FD PARENT_PID MEMORY_BYTES POLICY…`.

It dies with its parent, may not use more memory than allowed, and sends one reply for each problem. Started by `solver.Solver`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from eplb_service.errors import CallerError, EplbError, InvalidInputError, NotFoundError, UnsupportedError
from eplb_service.parent_death import die_with_parent
from eplb_service.policy.base import PlanningProblem, Policy
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy, warm_up_policy
from eplb_service.solver.frames import LENGTH, encode_reply

CALLER_ERRORS: dict[type[CallerError], str] = {
    InvalidInputError: "invalid_input",
    NotFoundError: "not_found",
    UnsupportedError: "unsupported",
}


def limit_memory(memory_bytes: int) -> None:
    """Bound this process's data: more raises MemoryError here instead of waking the machine's out-of-memory killer.

    Linux counts private writable mappings in RLIMIT_DATA; elsewhere the whole address space is bounded.
    """
    kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    _, hard = resource.getrlimit(kind)
    soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(kind, (soft, hard))


def answer(policies: dict[str, Policy], request: tuple[int, str, PlanningProblem]) -> bytes:
    """The reply to one request (number, policy's name, problem): a plan that passed `verify`, or why there is none."""
    number, name, problem = request
    head: dict[str, Any] = {"number": number}
    started = time.perf_counter()
    try:
        if name not in policies:
            policies[name] = load_policy(name)
        raw = run_policy(policies[name], problem)
        head["solve_s"] = time.perf_counter() - started
        verify(problem, raw, policy=name, solve_s=head["solve_s"])
        return encode_reply(head, raw)
    except CallerError as error:
        kind = next((word for known, word in CALLER_ERRORS.items() if isinstance(error, known)), "invalid_input")
        return encode_reply({**head, "error": kind, "message": str(error)})
    except EplbError as error:
        return encode_reply({**head, "error": "policy_failed", "message": str(error)})
    except MemoryError:
        return encode_reply({**head, "error": "policy_failed", "message": f"policy {name!r} ran out of memory"})
    except Exception as error:  # noqa: BLE001  # a policy is foreign code and may raise anything
        message = f"policy {name!r} raised {type(error).__name__}: {str(error)[:500]}"
        return encode_reply({**head, "error": "policy_failed", "message": message})


def warm_up(names: Sequence[str]) -> tuple[dict[str, Policy], dict[str, str]]:
    """Load and run each named policy once. Returns those that work, and why the others do not."""
    policies: dict[str, Policy] = {}
    faults: dict[str, str] = {}
    for name in names:
        try:
            policy = load_policy(name)
            warm_up_policy(policy, name)
            policies[name] = policy
        except EplbError as error:
            faults[name] = str(error)
        except Exception as error:  # noqa: BLE001  # a policy is foreign code and may raise anything
            faults[name] = f"policy {name!r} raised {type(error).__name__}: {str(error)[:500]}"
    return policies, faults


def _read(channel: socket.socket, size: int) -> bytes | None:
    """Exactly `size` bytes, None at the end of the stream."""
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(1 << 20, size - len(parts)))
        if not part:
            return None
        parts += part
    return bytes(parts)


def serve(channel: socket.socket, names: Sequence[str], memory_bytes: int) -> None:
    """Warm up, say so, then answer problems until the parent closes the socket."""
    policies, faults = warm_up(names)
    limit_memory(memory_bytes)
    channel.sendall(encode_reply({"ready": sorted(policies), "faults": faults}))
    while (length := _read(channel, LENGTH.size)) is not None:
        payload = _read(channel, LENGTH.unpack(length)[0])
        if payload is None:
            return
        # The parent, our own program, pickled it; nothing else holds the other end of this socket.
        request = pickle.loads(payload)  # noqa: S301
        channel.sendall(answer(policies, request))


def main(arguments: Sequence[str]) -> None:
    """Entry point. What policies print goes to standard error."""
    fd, parent_pid, memory_bytes = (int(argument) for argument in arguments[:3])
    die_with_parent(parent_pid)
    os.dup2(2, 1)
    with socket.socket(fileno=fd) as channel, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(channel, arguments[3:], memory_bytes)


if __name__ == "__main__":
    main(sys.argv[1:])
