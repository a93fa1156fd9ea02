"""What the planner keeps of a deployment in the store, and under which names.

    settings            mode, pause, policy, drained ranks: what changes at run time and wins over the configuration
    live                the live map as last known
    loaded              the placement that the engine loaded by itself, once it was seen
    rollout             the rollout that was begun last, and how it ended
    learned             what the deployment taught: costs of steps and moves, the horizon, how much of a promise comes true
    previous            what was live before the last generation, to compare it with
    advised             who asks, and with which layers and ranks, where an engine moves its own weights (`advised.Asker`)
    generation/<n>      one published generation and what became of it
    events/<n>          the journal of its rollout (`rollout.journal`)
    request/<digest>    the answer to an idempotency key; `requests` lists the newest of them, so that the oldest can go

Values are JSON; placements and live maps are encoded by `generation_codec`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from eplb_service.errors import BrokenInvariantError

SETTINGS, LIVE, LOADED, ROLLOUT, REQUESTS = "settings", "live", "loaded", "rollout", "requests"
LEARNED, PREVIOUS, ADVISED = "learned", "previous", "advised"
GENERATIONS = "generation/"
EVENTS = "events/"
REQUESTS_KEPT = 1024
KEY_CHARACTERS_MAX = 128

T = TypeVar("T")

_TYPES: dict[str, type] = {"str": str, "bool": bool, "int": int, "tuple[int, ...]": list}
"""Types of fields, by the name of their annotation, that are checked when a document is read."""


def generation_name(number: int) -> str:
    """`generation/12`."""
    return f"{GENERATIONS}{number}"


def events_name(number: int) -> str:
    """`events/12`."""
    return f"{EVENTS}{number}"


def request_name(key: str) -> str:
    """Where the answer to an idempotency key is: keys are free text, names are not."""
    return "request/" + hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator changes while the planner runs. drained: ids of ranks that are to hold nothing, ascending."""

    mode: str
    policy: str
    paused: bool = False
    pause_reason: str = ""
    drained: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRecord:
    """A gate's answer (or an operator's order), with its time on the wall clock."""

    move: bool
    code: str
    reason: str
    decided_at_s: float
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The answer to an idempotency key. asked: what was asked, so that a key is not used for something else."""

    key: str
    asked: str
    generation: int
    verdict: VerdictRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDocument:
    """The rollout that was begun last. outcome: empty while it runs."""

    epoch: int
    generation: int
    digest: str
    num_chunks: int
    num_layers: int
    outcome: str = ""
    reason: str = ""


def encode(value: Any) -> bytes:
    """One of the classes above as JSON. Numbers that JSON lacks (NaN, infinities) are left out of `numbers`."""
    return json.dumps(_plain(asdict(value)), sort_keys=True, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if not (isinstance(item, float) and not math.isfinite(item))}
    return value


def decode(kind: type[T], data: bytes, name: str) -> T:
    """A document as its class; unknown keys of a later release are left out.

    Raises BrokenInvariantError when it is not what it should be.
    """
    try:
        tree = json.loads(data)
        known = {found.name: found for found in fields(kind)}  # type: ignore[arg-type]  # dataclasses, all of them
        values = {key: value for key, value in tree.items() if key in known}
        if "verdict" in values:
            values["verdict"] = VerdictRecord(**values["verdict"])
        for key, value in values.items():
            if not isinstance(value, _TYPES.get(str(known[key].type), object)):
                raise TypeError(f"{key} is {str(value)[:40]!r}, expected {known[key].type}")  # noqa: TRY301  (said below)
            if isinstance(value, list) and known[key].type == "tuple[int, ...]":
                values[key] = tuple(int(item) for item in value)
        return kind(**values)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenInvariantError(f"document {name!r} in the store cannot be read ({error}): {data[:80]!r}") from None


Loads = tuple[npt.NDArray[np.float64], ...]
"""Tokens of each table, shape (L, E)."""


def pack_loads(loads: Loads) -> list[dict[str, Any]]:
    """Loads as plain values, in single precision."""
    return [
        {"shape": list(load.shape), "data": base64.b64encode(load.astype("<f4").tobytes()).decode("ascii")} for load in loads
    ]


def unpack_loads(packed: Any) -> Loads:
    """What `pack_loads` gave. Raises ValueError, TypeError or KeyError for anything else."""
    loads = tuple(
        np.frombuffer(base64.b64decode(part["data"], validate=True), "<f4").astype(np.float64).reshape(part["shape"])
        for part in packed
    )
    if not all(load.ndim == 2 and np.isfinite(load).all() and (load >= 0).all() for load in loads):
        raise ValueError("a load is not finite, or negative, or no table")
    return loads


def encode_previous(generation: int, placement: bytes, loads: Loads) -> bytes:
    """What was live before a generation, and the load that it was planned for.

    placement: as `generation_codec.encode_placement` gives it.
    """
    tree = {"generation": generation, "placement": placement.decode(), "loads": pack_loads(loads)}
    return json.dumps(tree, separators=(",", ":")).encode()


def decode_previous(data: bytes) -> tuple[int, bytes, Loads]:
    """What `encode_previous` was given. Raises BrokenInvariantError when it cannot be read."""
    try:
        tree = json.loads(data)
        return int(tree["generation"]), str(tree["placement"]).encode(), unpack_loads(tree["loads"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BrokenInvariantError(f"document {PREVIOUS!r} in the store cannot be read ({error}): {data[:80]!r}") from None


def decode_requests(data: bytes | None) -> list[str]:
    """Names of the answers that are kept, oldest first."""
    try:
        names = json.loads(data) if data else []
    except (ValueError, RecursionError):
        names = []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def encode_requests(names: list[str]) -> bytes:
    """See `decode_requests`."""
    return json.dumps(names, separators=(",", ":")).encode()
