"""What a soak leaves in the store: keys that are known, each no longer than what is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis

from eplb_service.store.base import JOURNAL_KEPT, REPLIES_KEPT

DOCUMENTS_MAX = 64
"""Of a deployment beside those of its generations: settings, what was learned, the live map."""
DOCUMENTS_OF_A_GENERATION = 4
GENERATIONS_KEPT = 1000


@dataclass(slots=True)
class StoreKeys:
    """told: for people; wrong: what should not be there, or not so many of it."""

    told: str
    wrong: list[str] = field(default_factory=list)


def keys_of(socket: Path, deployment: str, *, generations: int) -> StoreKeys:
    """Look into the store behind the planner's back. generations: how many were published."""
    with Redis(unix_socket_path=str(socket)) as client:
        names = sorted(key.decode() for key in client.keys("*"))
        prefix = f"eplb:{{{deployment}}}:"
        kept = min(generations, GENERATIONS_KEPT)
        documents = DOCUMENTS_MAX + DOCUMENTS_OF_A_GENERATION * kept
        bounds = {"fence": 8, "values": documents, "versions": documents, "replies": 2 * REPLIES_KEPT}
        bounds |= {"reply_order": REPLIES_KEPT, "journal": JOURNAL_KEPT}
        wrong, told = [], []
        for name in names:
            short = name.removeprefix(prefix)
            length = _length(client, name)
            told.append(f"{short} {length}")
            if name == "eplb:deployments":
                bound = 1
            elif short == name:
                wrong.append(f"key {name} in the store is of no deployment")
                continue
            else:
                bound = bounds.get(short, documents if short.startswith("names:") else -1)
            if not 0 <= length <= bound:
                wrong.append(f"key {name} in the store has {length} entries, at most {bound} are kept")
    return StoreKeys(f"{len(names)} keys: {', '.join(told)}", wrong)


def _length(client: Redis, name: str) -> int:
    found = client.type(name)
    kind = found.decode() if isinstance(found, bytes) else found
    counted = {"hash": client.hlen, "list": client.llen, "set": client.scard, "zset": client.zcard}.get(kind)
    return int(counted(name)) if counted is not None else -1
