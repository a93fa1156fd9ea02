"""Generations, live maps and placements as bytes for the store, and back: no altered byte goes unseen.

    {"format": "eplb.generation", "version": 1, "checksum": BLAKE2b-16 of the body as it is spelled here, "body": {…}}

JSON, so that a person can read what was decided and why; only the maps themselves, and the shares of their slots, are packed
(`<i4` and `<f4`, zlib, base64), since a large deployment has two million slots. `version` is raised when a reader of an earlier
release would misread: a document has version 2 when its placement has shares, else 1, as it always had.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

import numpy as np

from eplb_service.errors import BrokenInvariantError, EplbError, UnsupportedError
from eplb_service.flip_stall import FlipStall
from eplb_service.generation import Generation, GenerationState, LiveMap
from eplb_service.ids import Epoch, GenerationNumber, RankId
from eplb_service.imbalance import Imbalance
from eplb_service.moves import MoveSummary
from eplb_service.placement import Placement, Table, type_of_map
from eplb_service.replica_shares import type_of_shares
from eplb_service.topology import LinkKind
from eplb_service.validation import Observation

VERSION, VERSION_WITH_SHARES = 1, 2
PLACEMENT, LIVE_MAP, GENERATION = "eplb.placement", "eplb.live_map", "eplb.generation"
COMPRESSION = 6

_READ_FAULTS = (ValueError, TypeError, AttributeError, IndexError, zlib.error, EplbError)

T = TypeVar("T")


def encode_placement(placement: Placement) -> bytes:
    """A placement by itself."""
    return _sealed(PLACEMENT, {"digest": placement.digest(), "placement": _tables(placement)}, version=_version(placement))


def decode_placement(data: bytes) -> Placement:
    """What `encode_placement` gave. Raises BrokenInvariantError for damage, UnsupportedError for a later release's."""
    return _read(data, PLACEMENT, _placement)


def encode_live_map(live: LiveMap) -> bytes:
    """A live map: rows, and the generation of each layer."""
    body = {"placement": _tables(live.placement), "digest": live.placement.digest(), "generations": list(live.generations)}
    return _sealed(LIVE_MAP, body, version=_version(live.placement))


def decode_live_map(data: bytes) -> LiveMap:
    """What `encode_live_map` gave. Raises BrokenInvariantError for damage, UnsupportedError for a later release's."""
    return _read(data, LIVE_MAP, lambda body: LiveMap(_placement(body), tuple(map(GenerationNumber, body["generations"]))))


def encode_generation(generation: Generation) -> bytes:
    """A generation and what became of it."""
    return _sealed(
        GENERATION,
        {
            "placement": _tables(generation.placement),
            "digest": generation.digest,
            "number": generation.number,
            "created_at_s": generation.created_at_s,
            "reason": generation.reason,
            "policy": generation.policy,
            "epoch": generation.epoch,
            "before": list(generation.before.per_layer),
            "predicted": list(generation.predicted.per_layer),
            "lower_bound": list(generation.lower_bound.per_layer),
            "moves": generation.moves.to_json(),
            "state": generation.state.value,
            "stop_reason": generation.stop_reason,
            "active_at_s": generation.active_at_s,
            "flip_boundaries": list(generation.flip_boundaries),
            "rollout_s": generation.rollout_s,
            "promised_gain": generation.promised_gain,
            "gain_share": generation.gain_share,
            "observed": None if generation.observed is None else list(generation.observed.per_layer),
            "observations": [asdict(observation) for observation in generation.observations],
            "outcome": generation.outcome,
            "judgement": generation.judgement,
            "flip_stall": None if generation.flip_stall is None else asdict(generation.flip_stall),
            "copied_s": generation.copied_s,
            "copy_held_steps": generation.copy_held_steps,
        },
        version=_version(generation.placement),
    )


def decode_generation(data: bytes) -> Generation:
    """What `encode_generation` gave. Raises BrokenInvariantError for damage, UnsupportedError for a later release's."""
    return _read(data, GENERATION, _generation)


def _generation(tree: Mapping[str, Any]) -> Generation:
    return Generation(
        number=GenerationNumber(tree["number"]),
        placement=_placement(tree),
        created_at_s=float(tree["created_at_s"]),
        reason=str(tree["reason"]),
        policy=str(tree["policy"]),
        epoch=Epoch(tree["epoch"]),
        before=_imbalance(tree["before"]),
        predicted=_imbalance(tree["predicted"]),
        lower_bound=_imbalance(tree["lower_bound"]),
        moves=_moves(tree["moves"]),
        state=GenerationState(tree["state"]),
        stop_reason=str(tree["stop_reason"]),
        active_at_s=None if tree["active_at_s"] is None else float(tree["active_at_s"]),
        flip_boundaries=tuple(map(int, tree["flip_boundaries"])),
        rollout_s=float(tree["rollout_s"]),
        observed=None if tree["observed"] is None else _imbalance(tree["observed"]),
        # What follows was added later: a generation stored by an earlier release lacks it.
        promised_gain=None if tree.get("promised_gain") is None else float(tree["promised_gain"]),
        gain_share=float(tree.get("gain_share", 1.0)),
        observations=tuple(_observation(part) for part in tree.get("observations", [])),
        outcome=str(tree.get("outcome", "")),
        judgement=str(tree.get("judgement", "")),
        flip_stall=None if tree.get("flip_stall") is None else _flip_stall(tree["flip_stall"]),
        copied_s=float(tree.get("copied_s", 0.0)),
        copy_held_steps=bool(tree.get("copy_held_steps", False)),
    )


def _flip_stall(tree: Mapping[str, Any]) -> FlipStall:
    values = {name: None if tree[name] is None else float(tree[name]) for name in ("expected_s", "limit_s", "measured_s")}
    if any(value is not None and not 0 <= value < math.inf for value in values.values()):
        raise ValueError(f"stall of a flip {values} is no time")
    return FlipStall(expected_s=float(tree["expected_s"]), limit_s=values["limit_s"], measured_s=values["measured_s"])


def _observation(tree: Mapping[str, Any]) -> Observation:
    values = {part.name: float(tree[part.name]) for part in fields(Observation) if part.name != "window_index"}
    if not all(math.isfinite(value) for value in values.values()):
        raise ValueError(f"observation {values} is not finite")
    return Observation(window_index=int(tree["window_index"]), **values)


def _imbalance(values: list[float]) -> Imbalance:
    layers = tuple(float(value) for value in values)
    if not all(math.isfinite(value) for value in layers):
        raise ValueError(f"imbalance {layers} is not finite")
    return Imbalance(layers)


def _moves(tree: Mapping[str, Any]) -> MoveSummary:
    return MoveSummary(
        experts=int(tree["experts"]),
        slots_rewritten=int(tree["slots_rewritten"]),
        layers=int(tree["layers"]),
        bytes_by_link={kind: int(tree["bytes_by_link"][kind.value]) for kind in LinkKind},
        bytes_without_source=int(tree["bytes_without_source"]),
        bytes_into_busiest_rank=int(tree["bytes_into_busiest_rank"]),
        bytes_into_busiest_nic=int(tree.get("bytes_into_busiest_nic", 0)),  # added later
    )


def _tables(placement: Placement) -> list[dict[str, Any]]:
    return [_table_tree(table) for table in placement.tables]


def _table_tree(table: Table) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "model": table.model,
        "layer_ids": list(table.layer_ids),
        "num_logical": table.num_logical,
        "rank_ids": list(table.rank_ids),
        "physical_to_logical": _packed(table.physical_to_logical, type_of_map),
    }
    if table.shares is not None:
        tree["shares"] = _packed(table.shares, type_of_shares)
    return tree


def _packed(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    packed = zlib.compress(np.ascontiguousarray(array, dtype=dtype).tobytes(), COMPRESSION)
    return {"shape": list(array.shape), "data": base64.b64encode(packed).decode("ascii")}


def _placement(body: Mapping[str, Any]) -> Placement:
    placement = Placement(tuple(_table(part) for part in body["placement"]))
    digest = placement.digest()
    if digest != body["digest"]:
        raise ValueError(f"it claims placement digest {body['digest']}, its maps have {digest}")
    return placement


def _table(tree: Mapping[str, Any]) -> Table:
    array = _unpacked(tree["physical_to_logical"], type_of_map)
    shares = _unpacked(tree["shares"], type_of_shares) if "shares" in tree else None
    ranks = tuple(RankId(int(rank)) for rank in tree["rank_ids"])
    return Table(str(tree["model"]), tuple(map(int, tree["layer_ids"])), int(tree["num_logical"]), ranks, array, shares)


def _unpacked(stored: Mapping[str, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    shape = [int(extent) for extent in stored["shape"]]
    unpacked = zlib.decompress(base64.b64decode(stored["data"], validate=True))
    if len(shape) != 2 or math.prod(shape) * dtype.itemsize != len(unpacked):
        raise ValueError(f"a map of shape {shape} in {len(unpacked)} bytes")
    return np.frombuffer(unpacked, dtype).reshape(shape)


# ── the envelope ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _spell(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()


def _checksum(body: Any) -> str:
    return hashlib.blake2b(_spell(body), digest_size=16).hexdigest()


def _version(placement: Placement) -> int:
    """Version of a document that holds this placement."""
    return VERSION_WITH_SHARES if placement.has_shares else VERSION


def _sealed(document_format: str, body: dict[str, Any], *, version: int = VERSION) -> bytes:
    """The document of a body."""
    return _spell({"format": document_format, "version": version, "checksum": _checksum(body), "body": body})


def _opened(data: bytes, document_format: str) -> Any:
    """The body of a document. Raises UnsupportedError for one of a later release, BrokenInvariantError for damage."""
    what = "stored " + document_format.removeprefix("eplb.").replace("_", " ")
    try:
        envelope = json.loads(data)
    except (ValueError, RecursionError):  # the second: nested deeper than anything that is written
        raise BrokenInvariantError(f"{what} is damaged: {len(data)} bytes that are no JSON") from None
    if not isinstance(envelope, dict) or envelope.get("format") != document_format:
        raise BrokenInvariantError(f"{what} is damaged: it is no document of format {document_format!r}")
    if envelope.get("version") not in (VERSION, VERSION_WITH_SHARES):
        raise UnsupportedError(
            f"{what} has format version {envelope.get('version')}, this planner reads up to {VERSION_WITH_SHARES}: upgrade it"
        )
    body = envelope.get("body")
    try:
        checksum = _checksum(body)
    except ValueError as error:  # NaN, infinity or half a surrogate pair: never written
        raise BrokenInvariantError(f"{what} is damaged: {error}") from None
    if envelope.get("checksum") != checksum or set(envelope) != {"format", "version", "checksum", "body"}:
        raise BrokenInvariantError(f"{what} is damaged: its checksum is not that of its body")
    return body


def _read(data: bytes, document_format: str, build: Callable[[Any], T]) -> T:
    body = _opened(data, document_format)
    what = "stored " + document_format.removeprefix("eplb.").replace("_", " ")
    try:
        return build(body)
    except KeyError as error:
        raise BrokenInvariantError(f"{what} is damaged: {error} is missing") from None
    except _READ_FAULTS as error:
        raise BrokenInvariantError(f"{what} is damaged: {error}") from None
