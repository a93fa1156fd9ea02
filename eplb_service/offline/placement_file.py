"""Placements in files: our JSON, read and written; plain `.npy` maps (L, P) and the output of `eplb plan`, read.

The JSON holds `format` (marker and version), model, layer_ids, rank_ids, num_logical, physical_to_logical and, for weighted
dispatch, shares (of each slot, in the shape of the map; read back exactly). Files are replaced whole: a reader sees the old or
the new one, also when the writer is killed, and two writers do not mix.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.errors import EnvironmentFault, InvalidInputError
from eplb_service.ids import RankId
from eplb_service.offline.load_file import as_numbers, read_array, read_json
from eplb_service.placement import Table

FORMAT = "eplb-placement"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a file must agree with, and is taken to describe where it does not say: an `.npy` map has no ids at all.

    layer_ids: None = the file's own, else 0..L-1. rank_ids: in column order.
    """

    model: str
    num_layers: int
    num_logical: int
    rank_ids: tuple[RankId, ...]
    layer_ids: tuple[int, ...] | None = None


def placement_document(table: Table) -> dict[str, object]:
    """A table as plain values, in our format."""
    document: dict[str, object] = {
        "format": f"{FORMAT}/{VERSION}",
        "model": table.model,
        "layer_ids": list(table.layer_ids),
        "rank_ids": [int(rank) for rank in table.rank_ids],
        "num_logical": table.num_logical,
        "slots_per_rank": table.slots_per_rank,
        "physical_to_logical": table.physical_to_logical.tolist(),
    }
    if table.shares is not None:
        document["shares"] = table.shares.tolist()
    return document


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file whole, by a temporary one of its own name beside it. Raises EnvironmentFault when that fails."""
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # noqa: PTH101  # mkstemp makes it private; a placement is no secret
        os.replace(temporary, path)  # noqa: PTH105  # one atomic rename
        temporary = None
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def write_placement(path: Path, table: Table) -> None:
    """Write a table in our format. Raises EnvironmentFault when the file cannot be written."""
    write_atomically(path, json.dumps(placement_document(table)).encode() + b"\n")


def read_placement(path: Path, expected: Expectation) -> Table:
    """A table from our JSON, from a plan's output or from an `.npy` of shape (L, P).

    What the file says must agree with what is expected; what it does not say is taken from there. Raises InvalidInputError with
    one sentence otherwise.
    """
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}")
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".json"):
        raise InvalidInputError(f"{path} ends in {suffix or 'nothing'}; placements are read from .json or .npy")
    content: object = {"physical_to_logical": read_array(path)} if suffix == ".npy" else read_json(path)
    document = content if isinstance(content, dict) else {"physical_to_logical": content}
    if "physical_to_logical" not in document:
        raise InvalidInputError(f"{path} has no physical_to_logical; its keys are {sorted(document)[:8]}")
    _check_document(document, expected, str(path))
    array = document["physical_to_logical"]
    array = array if isinstance(array, np.ndarray) else as_numbers(array, str(path))
    shares = _shares(document, str(path))
    return _table(array, shares, expected, _layer_ids(document, expected, str(path)), str(path))


def _check_document(content: Mapping[str, object], expected: Expectation, where: str) -> None:
    """Format, model shape and ranks of a document against what is expected."""
    marker = content.get("format", f"{FORMAT}/{VERSION}")
    if marker != f"{FORMAT}/{VERSION}":
        raise InvalidInputError(f"{where} is of format {marker!r}; this build reads {FORMAT}/{VERSION}")
    wanted: dict[str, object] = {"rank_ids": [int(rank) for rank in expected.rank_ids], "num_logical": expected.num_logical}
    if expected.layer_ids is not None:
        wanted["layer_ids"] = list(expected.layer_ids)
    for key, value in wanted.items():
        if key in content and content[key] != value:
            raise InvalidInputError(f"{where} has {key} {_short(content[key])}, expected {_short(value)}")


def _layer_ids(content: Mapping[str, object], expected: Expectation, where: str) -> tuple[int, ...]:
    """Layer ids that are expected, else the document's, else 0..L-1."""
    if expected.layer_ids is not None:
        return expected.layer_ids
    given = content.get("layer_ids", list(range(expected.num_layers)))
    if not isinstance(given, list) or not all(isinstance(layer, int) for layer in given):
        raise InvalidInputError(f"{where}: layer_ids must be a list of integers; got {_short(given)}")
    return tuple(given)


def _shares(content: Mapping[str, object], where: str) -> npt.NDArray[np.float64] | None:
    """Shares of the slots, where the document has any: what they may be, `Table` checks."""
    if content.get("shares") is None:
        return None
    return as_numbers(content["shares"], f"{where}, shares").astype(np.float64)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}… ({len(value) if isinstance(value, list) else 1} values)"


def _table(
    array: npt.NDArray[np.generic],
    shares: npt.NDArray[np.float64] | None,
    expected: Expectation,
    layer_ids: tuple[int, ...],
    where: str,
) -> Table:
    """The map as a table that covers every expert, or InvalidInputError."""
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"{where}: a placement holds expert ids, which are integers; got {array.dtype}")
    if array.ndim == 2 and array.shape[0] != expected.num_layers:
        raise InvalidInputError(f"{where}: a placement of {array.shape[0]} layers, expected {expected.num_layers}")
    try:
        table = Table(expected.model, layer_ids, expected.num_logical, expected.rank_ids, array.astype(np.int64))
        table = table if shares is None else table.with_shares(shares)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from error
    missing = table.uncovered()
    if missing:
        layer, expert = missing[0]
        raise InvalidInputError(f"{where}: layer {layer.layer_id} has no slot for expert {expert} ({len(missing)} are missing)")
    return table
