"""Our own placement file: JSON that says all there is to a table; also plain maps, which say nothing but the rows.

The JSON holds `format` (marker and version), model, layer_ids, rank_ids, num_logical, physical_to_logical and, for weighted
dispatch, shares (of each slot, in the shape of the map; read back exactly). The output of `eplb plan --output json` has the
same keys and more. A plain map is a nested list or an array [layers, slots]; a single list is meant for every layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import as_numbers, short_text
from eplb_service.formats.placement_rows import PlacementRows, array_rows, rows_of
from eplb_service.ids import RankId
from eplb_service.placement import Table

FORMAT = "eplb-placement"
VERSION = 1
KEY = "physical_to_logical"


def placement_document(table: Table) -> dict[str, object]:
    """A table as plain values, in our format."""
    document: dict[str, object] = {
        "format": f"{FORMAT}/{VERSION}",
        "model": table.model,
        "layer_ids": list(table.layer_ids),
        "rank_ids": [int(rank) for rank in table.rank_ids],
        "num_logical": table.num_logical,
        "slots_per_rank": table.slots_per_rank,
        KEY: table.physical_to_logical.tolist(),
    }
    if table.shares is not None:
        document["shares"] = table.shares.tolist()
    return document


def document_bytes(table: Table) -> bytes:
    """The file of a table."""
    return json.dumps(placement_document(table)).encode() + b"\n"


def is_document(content: object) -> bool:
    """Whether a tree looks like this format; a plain list does."""
    return isinstance(content, list) or (isinstance(content, Mapping) and KEY in content)


def parse_document(content: object, where: str) -> PlacementRows:
    """A file's tree. Raises InvalidInputError when a part of it cannot be what it should."""
    if not isinstance(content, Mapping):
        return _listed_rows(content, where)
    if KEY not in content:
        raise InvalidInputError(f"{where} has no {KEY}; its keys are {sorted(map(str, content))[:8]}")
    marker = content.get("format", f"{FORMAT}/{VERSION}")
    if marker != f"{FORMAT}/{VERSION}":
        raise InvalidInputError(f"{where} is of format {marker!r}; this build reads {FORMAT}/{VERSION}")
    found = _listed_rows(content[KEY], where)
    layer_ids, rank_ids = _ids(content, "layer_ids", where), _ids(content, "rank_ids", where)
    if layer_ids is not None and len(layer_ids) != found.rows.shape[0]:
        raise InvalidInputError(f"{where}: {len(layer_ids)} layer ids but {found.rows.shape[0]} rows of {KEY}")
    num_logical, model = content.get("num_logical"), content.get("model")
    if num_logical is not None and (type(num_logical) is not int or num_logical < 1):
        raise InvalidInputError(f"{where}: num_logical must be a number >= 1; got {short_text(num_logical)}")
    if model is not None and not isinstance(model, str):
        raise InvalidInputError(f"{where}: model must be a name; got {short_text(model)}")
    return PlacementRows(
        rows=found.rows,
        layer_ids=layer_ids,
        rank_ids=None if rank_ids is None else tuple(RankId(rank) for rank in rank_ids),
        num_logical=num_logical,
        model=model,
        shares=_shares(content, where),
        for_all_layers=found.for_all_layers and layer_ids is None,
    )


def plain_rows(array: npt.NDArray[np.generic], where: str) -> PlacementRows:
    """A map without words: an array [layers, slots], or one row for every layer."""
    return PlacementRows(rows=array_rows(array, where), for_all_layers=array.ndim == 1)


def _listed_rows(tree: object, where: str) -> PlacementRows:
    """The same as lists: one for each layer, or one for all. Raises InvalidInputError naming the row and slot that is wrong."""
    if not isinstance(tree, list):
        raise InvalidInputError(
            f"{where}: a placement is a list of expert ids, for each layer or for all; got {short_text(tree)}"
        )
    for_all_layers = bool(tree) and not isinstance(tree[0], list)
    rows = rows_of(dict(enumerate([tree] if for_all_layers else tree)), where, "layer row")
    return PlacementRows(rows=array_rows(rows, where), for_all_layers=for_all_layers)


def _ids(content: Mapping[str, object], key: str, where: str) -> tuple[int, ...] | None:
    given = content.get(key)
    if given is None:
        return None
    if not isinstance(given, list) or not all(type(value) is int for value in given):
        raise InvalidInputError(f"{where}: {key} must be a list of integers; got {short_text(given)}")
    return tuple(given)


def _shares(content: Mapping[str, object], where: str) -> npt.NDArray[np.float64] | None:
    """Shares of the slots, where the document has any: what they may be, `Table` checks."""
    if content.get("shares") is None:
        return None
    return as_numbers(content["shares"], f"{where}, shares").astype(np.float64)
