"""What each rank of a group says of itself before one asks: a table of numbers, a row for each rank, the same on all. Pure."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from agent.adviser.answer_check import EngineRules
from agent.adviser.call import Call
from eplb_service.advice import map_digest

Int64Array = npt.NDArray[np.int64]

PROTOCOL = 1
NAME_BYTES = 48
_COLUMNS = (
    "protocol", "release", "number", "failed", "resizing", "idle", "digest",
    "layers", "slots", "experts", "ranks", "groups", "rank_id", "node",
)  # fmt: skip
_AT = {name: index for index, name in enumerate(_COLUMNS)}
_NAME_AT = len(_COLUMNS)
WIDTH = 24
"""int64 in a row; the same in every release, so that ranks of two releases can tell one another."""
_SAME = {
    "protocol": "use different protocols",
    "release": "have different releases of eplb-service",
    "number": "are not in the same call",
    "layers": "have maps of different shapes",
    "slots": "have maps of different shapes",
    "experts": "have different numbers of experts",
    "ranks": "were called for different numbers of ranks",
    "groups": "have different numbers of expert groups",
    "digest": "do not route by the same map",
}


def number_of(text: str) -> int:
    """63 bits that stand for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & ((1 << 63) - 1)


def row_of(call: Call, *, number: int, rank_id: int, node: str, name: str, release: str) -> Int64Array:
    """A rank's row. Shape (WIDTH,), int64. node: what its node alone has (its boot id); name: for people."""
    values = {
        "protocol": PROTOCOL,
        "release": number_of(release),
        "number": number,
        "resizing": int(bool(call.resizing)),
        "idle": int(call.idle),
        "digest": map_digest(call.current),
        "layers": call.current.shape[0],
        "slots": call.current.shape[1],
        "experts": call.num_logical,
        "ranks": call.num_ranks,
        "groups": call.num_groups,
        "rank_id": rank_id,
        "node": number_of(node),
    }
    row = np.zeros(WIDTH, dtype=np.int64)
    for column, value in values.items():
        row[_AT[column]] = value
    row[_NAME_AT : _NAME_AT + NAME_BYTES // 8] = np.frombuffer(name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"), "<i8")
    return row


def failed_row() -> Int64Array:
    """Row of a rank that could not make its own."""
    row = np.zeros(WIDTH, dtype=np.int64)
    row[_AT["failed"]] = 1
    return row


def failed_ranks(table: Int64Array) -> list[int]:
    """Positions of the ranks that could not make their row. Table: shape (R, WIDTH)."""
    return [int(rank) for rank in np.flatnonzero(table[:, _AT["failed"]])]


def difference(table: Int64Array) -> str:
    """In what ranks differ from rank 0, one sentence; empty = in nothing. Table: shape (R, WIDTH)."""
    for column, what in _SAME.items():
        values = table[:, _AT[column]]
        others = np.flatnonzero(values != values[0])
        if len(others):
            return f"ranks {shown([0, *others.tolist()])} {what} ({column} {values[0]} and {values[others[0]]})"
    if table[0, _AT["ranks"]] != len(table):
        return f"the engine asks for {table[0, _AT['ranks']]} ranks; its group has {len(table)}"
    return ""


def is_resizing(table: Int64Array) -> bool:
    """Whether some rank has a map with slots that hold nothing."""
    return bool(table[:, _AT["resizing"]].any())


def is_idle(table: Int64Array) -> bool:
    """Whether rank 0, which would ask, has no load to ask about."""
    return bool(table[0, _AT["idle"]])


def rank_ids(table: Int64Array) -> tuple[int, ...]:
    """Ids of the ranks in column order; positions where they do not tell ranks apart. Table: shape (R, WIDTH)."""
    ids = tuple(int(value) for value in table[:, _AT["rank_id"]])
    fine = len(set(ids)) == len(ids) and all(0 <= value < 1 << 16 for value in ids)
    return ids if fine else tuple(range(len(ids)))


def nodes(table: Int64Array) -> tuple[str, ...]:
    """Name of each rank's node, length R: its first rank's host name, numbered where two nodes have the same."""
    name_of: dict[int, str] = {}
    for row in table:
        node = int(row[_AT["node"]])
        if node in name_of:
            continue
        raw = row[_NAME_AT : _NAME_AT + NAME_BYTES // 8].astype("<i8").tobytes().rstrip(b"\0")
        name = raw.decode(errors="replace") or "node"
        name_of[node] = name if name not in name_of.values() else f"{name}-{len(name_of) + 1}"
    return tuple(name_of[int(row[_AT["node"]])] for row in table)


def rules_of(table: Int64Array, call: Call) -> EngineRules:
    """What the engine asks of a map, the same on all ranks.

    Groups stay on one node only where the engine does so itself: where they divide by the nodes (DeepSeek EPLB's rule).
    """
    names = nodes(table)
    num_nodes, num_groups = len(set(names)), call.num_groups
    kept = num_nodes > 1 and num_groups > 1 and num_groups % num_nodes == 0 and call.num_logical % num_groups == 0
    return EngineRules(
        num_logical=call.num_logical,
        nodes=names,
        num_groups=num_groups if kept else 1,
        replicas_max=call.replicas_max,
        distinct_on_rank=call.distinct_on_rank,
    )


def shown(ranks: list[int]) -> str:
    """Positions of ranks for people: the first few."""
    return ", ".join(str(rank) for rank in ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
