"""How the hooks of one group find one another: a store of their own, with a deadline, apart from the engine's groups.

The hook of `group_rank_ids[0]` hosts it. Keys carry the group id, so a group that forms anew never reads what an earlier one
wrote.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType

from agent.engine.port import EngineDescription
from agent.transfer.gloo import Store, first_line, prefixed, said_by, tcp_store
from eplb_service.errors import ConflictError, DeadlineError

_RETRY_S = 0.05


def open_store(description: EngineDescription, timeout_s: float) -> Store:
    """The group's store. Raises DeadlineError when it cannot be hosted or reached in time."""
    host, port = description.rendezvous_host, description.rendezvous_port
    is_host = description.address.rank_id == description.group_rank_ids[0]
    until = time.monotonic() + timeout_s
    try:
        if not is_host:
            _until_listening(host, port, until)
        store = tcp_store(host, port, is_host=is_host, timeout_s=max(until - time.monotonic(), 1.0))
    except (RuntimeError, OSError) as error:
        what = "host" if is_host else "reach"
        raise DeadlineError(
            f"cannot {what} the hooks' rendezvous at {host}:{port} within {timeout_s:g} s ({first_line(error)});"
            f" the host of rank {description.group_rank_ids[0]} must be able to listen there"
        ) from error
    return prefixed(f"eplb/{description.address.group_id}", store)


def _until_listening(host: str, port: int, until: float) -> None:
    """Wait for the host. `TCPStore` would retry on its own clock, for longer than it was told.

    Raises OSError when nobody listens in time.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.05)).close()
        except OSError:
            if time.monotonic() >= until:
                raise
            time.sleep(_RETRY_S)
        else:
            return


LOADED, JOINS, STAYS = "loaded", "joins", "stays"
"""How a rank comes into a group: with what it loaded, with empty slots, or from a group that was."""


def come(store: Store, description: EngineDescription, how: str) -> None:
    """Tell the others how this rank comes into the group."""
    store.set(f"comes/{description.address.rank_id}", how)


Parts = Mapping[str, Mapping[str, str]]


def compare(
    store: Store,
    description: EngineDescription,
    mine: Mapping[str, str],
    timeout_s: float,
    *,
    parts: Parts = MappingProxyType({}),
) -> None:
    """Prove that all ranks say the same of every name.

    parts: what some names are made of. It is read from another rank only where the two differ, to say in which part.

    Raises ConflictError naming what differs and where, DeadlineError when a rank does not come.
    """
    me = description.address.rank_id
    store.set(f"parts/{me}", json.dumps({name: dict(of) for name, of in parts.items()}, sort_keys=True))
    store.set(f"facts/{me}", json.dumps(dict(mine), sort_keys=True))
    for rank in description.group_rank_ids:
        silent = f"rank {rank} did not come to the hooks' rendezvous within {timeout_s:g} s"
        theirs: dict[str, str] = json.loads(said_by(store, f"facts/{rank}", timeout_s, silent))
        differ = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
        if differ:
            their_parts: Parts = json.loads(store.get(f"parts/{rank}")) if parts else {}
            pairs = "; ".join(_difference(name, mine, theirs, parts, their_parts) for name in differ[:4])
            more = f" and {len(differ) - 4} more" if len(differ) > 4 else ""
            raise ConflictError(f"rank {me} and rank {rank} disagree about {pairs}{more}; all ranks must be equal in these")


def _difference(name: str, mine: Mapping[str, str], theirs: Mapping[str, str], parts: Parts, their_parts: Parts) -> str:
    """In which part, or by which value, two ranks differ in a name."""
    if name not in parts or name not in their_parts:
        return f"{name}: {mine.get(name)} here, {theirs.get(name)} there"
    here, there = parts[name], their_parts[name]
    differ = [part for part in sorted({*here, *there}) if here.get(part) != there.get(part)]
    told = ", ".join(f"{part} is {here.get(part, 'missing')} here, {there.get(part, 'missing')} there" for part in differ[:3])
    return f"{name}: {told}" + (f", {len(differ) - 3} more" if len(differ) > 3 else "")
