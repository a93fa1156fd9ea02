"""SGLang's `--init-expert-location` file: JSON of exactly one key, `physical_to_logical_map`, [L, P]. Read from SGLang 0.5.23.

Row i is layer i of the model, dense ones too: what stands in those is not used. The engine passes all keys on as arguments,
so that any other key stops its start. Two copies of an expert on one rank collapse into one when weights are loaded, while
other ranks still send tokens to both: refused here, on reading too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from eplb_service.errors import InvalidInputError
from eplb_service.formats.placement_rows import PlacementRows, array_rows, check_writable, rows_of
from eplb_service.placement import Table

KEY = "physical_to_logical_map"
ENGINE = "SGLang"
SUFFIX = ".json"
"""How a name must end that is given to --init-expert-location: `.pt` is read with torch, any other text is taken for JSON."""


def is_map(content: object) -> bool:
    """Whether a tree looks like this format."""
    return isinstance(content, Mapping) and KEY in content


def parse_map(content: Mapping[str, object], where: str) -> PlacementRows:
    """A file's tree (JSON, or `.pt` with an array). Raises InvalidInputError for other keys and what is no map."""
    others = sorted(str(key) for key in content if key != KEY)
    if others or KEY not in content:
        raise InvalidInputError(
            f"{where} must have the key {KEY} and no other, as SGLang's --init-expert-location takes it; it has"
            f" {sorted(map(str, content))[:8]}"
        )
    value = content[KEY]
    if isinstance(value, np.ndarray):
        rows = array_rows(value, where)
    else:
        if not isinstance(value, list):
            raise InvalidInputError(f"{where}: {KEY} must be a list of rows, one a layer; got {type(value).__name__}")
        rows = rows_of(dict(enumerate(value)), where)
    return PlacementRows(rows=rows, layer_ids=tuple(range(rows.shape[0])), num_layers=rows.shape[0])


def default_row(num_logical: int, num_ranks: int, slots_per_rank: int) -> list[int]:
    """How SGLang fills a layer by itself: slot i holds expert i % E."""
    return [slot % num_logical for slot in range(num_ranks * slots_per_rank)]


def map_bytes(table: Table, num_layers: int | None) -> bytes:
    """The file of a table. num_layers: rows, dense layers too; None = up to the last MoE layer.

    Raises InvalidInputError for empty slots, shares and two copies on one rank.
    """
    check_writable(table, ENGINE, may_repeat=False)
    count = max(table.layer_ids) + 1 if num_layers is None else num_layers
    if count <= max(table.layer_ids):
        raise InvalidInputError(f"{count} layers for SGLang's file, but the placement has layer {max(table.layer_ids)}")
    unused = default_row(table.num_logical, table.num_ranks, table.slots_per_rank)
    moe = dict(zip(table.layer_ids, table.physical_to_logical.tolist(), strict=True))
    return json.dumps({KEY: [moe.get(layer, unused) for layer in range(count)]}).encode() + b"\n"
