"""Generations, live maps and placements as bytes for the store, and back, checked by their digests.

JSON, so that a person can read what was decided and why; only the maps themselves are packed (`<i4`, zlib, base64), since a
large deployment has two million slots. `format` is raised when a reader of an earlier release would misread.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from eplb_service.errors import BrokenInvariantError, EplbError
from eplb_service.generation import Generation, GenerationState, LiveMap
from eplb_service.ids import Epoch, GenerationNumber, RankId
from eplb_service.imbalance import Imbalance
from eplb_service.moves import MoveSummary
from eplb_service.placement import Placement, Table, type_of_map
from eplb_service.topology import LinkKind

FORMAT = 1
COMPRESSION = 1
"""Maps are small integers in runs: the fastest level takes most of it."""

_READ_FAULTS = (ValueError, TypeError, KeyError, AttributeError, IndexError, zlib.error, EplbError)


def encode_placement(placement: Placement) -> bytes:
    """A placement by itself."""
    return _dump(_placement_tree(placement))


def decode_placement(data: bytes) -> Placement:
    """What `encode_placement` gave. Raises BrokenInvariantError for anything else."""
    return _read(data, "placement", _placement)


def encode_live_map(live: LiveMap) -> bytes:
    """A live map: rows, and the generation of each layer."""
    return _dump({**_placement_tree(live.placement), "generations": list(live.generations)})


def decode_live_map(data: bytes) -> LiveMap:
    """What `encode_live_map` gave. Raises BrokenInvariantError for anything else."""
    return _read(data, "live map", lambda tree: LiveMap(_placement(tree), tuple(map(GenerationNumber, tree["generations"]))))


def encode_generation(generation: Generation) -> bytes:
    """A generation and what became of it."""
    return _dump(
        {
            **_placement_tree(generation.placement),
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
            "observed": None if generation.observed is None else list(generation.observed.per_layer),
        }
    )


def decode_generation(data: bytes) -> Generation:
    """What `encode_generation` gave. Raises BrokenInvariantError for anything else."""
    return _read(data, "generation", _generation)


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
    )


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
    )


def _placement_tree(placement: Placement) -> dict[str, Any]:
    return {"digest": placement.digest(), "tables": [_table_tree(table) for table in placement.tables]}


def _table_tree(table: Table) -> dict[str, Any]:
    packed = zlib.compress(np.ascontiguousarray(table.physical_to_logical, dtype=type_of_map).tobytes(), COMPRESSION)
    return {
        "model": table.model,
        "layer_ids": list(table.layer_ids),
        "num_logical": table.num_logical,
        "rank_ids": list(table.rank_ids),
        "num_slots": table.num_physical,
        "physical_to_logical": base64.b64encode(packed).decode("ascii"),
    }


def _placement(tree: Mapping[str, Any]) -> Placement:
    placement = Placement(tuple(_table(part) for part in tree["tables"]))
    digest = placement.digest()
    if digest != tree["digest"]:
        raise ValueError(f"its tables have digest {digest}, it claims {tree['digest']}")
    return placement


def _table(tree: Mapping[str, Any]) -> Table:
    layer_ids = tuple(map(int, tree["layer_ids"]))
    packed = zlib.decompress(base64.b64decode(tree["physical_to_logical"], validate=True))
    array = np.frombuffer(packed, type_of_map).reshape(len(layer_ids), int(tree["num_slots"]))
    ranks = tuple(RankId(int(rank)) for rank in tree["rank_ids"])
    return Table(str(tree["model"]), layer_ids, int(tree["num_logical"]), ranks, array)


def _dump(tree: dict[str, Any]) -> bytes:
    return json.dumps({"format": FORMAT, **tree}, separators=(",", ":"), allow_nan=False).encode()


def _read(data: bytes, what: str, build: Any) -> Any:
    try:
        tree = json.loads(data)
        if tree["format"] != FORMAT:
            raise ValueError(f"it has format {tree['format']!r}, this release reads {FORMAT}")
        return build(tree)
    except _READ_FAULTS as error:
        raise BrokenInvariantError(
            f"a stored {what} of {len(data)} bytes cannot be read: {type(error).__name__}: {error}; it begins {data[:60]!r}"
        ) from None
