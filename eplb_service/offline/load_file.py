"""Reads where tokens come from: source loads, of `eplb plan --source-load`. Loads themselves are read in `formats`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import as_numbers, read_arrays, read_json
from eplb_service.formats.plain_loads import LOAD_NAMES, chosen_array

Float64Array = npt.NDArray[np.float64]

SOURCE_NAMES = ("source_loads", "sources", *LOAD_NAMES)


def read_source_loads(
    path: Path,
    *,
    num_layers: int,
    num_logical: int,
    num_ranks: int,
    num_rows: int | None = None,
    positions: Sequence[int] = (),
) -> Float64Array:
    """Tokens that each rank sent, shape (L, R, E), float64; a file of shape (windows, L, R, E) is summed over its windows.

    num_rows, positions: a file may have this many layers instead, dense ones too, of which those at positions are the L.

    Of an `.npz` or JSON object, the entry named one of SOURCE_NAMES. Raises InvalidInputError with one sentence otherwise.
    """
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder; give a .npy, .npz or .json file")
    if not path.exists():
        raise InvalidInputError(f"there is no file {path}")
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz", ".json"):
        raise InvalidInputError(f"{path} ends in {suffix or 'nothing'}; source loads are read from .npy, .npz or .json")
    if path.suffix.lower() == ".json":
        content = read_json(path)
        if isinstance(content, dict):
            name = next((name for name in SOURCE_NAMES if name in content), None)
            if name is None:
                raise InvalidInputError(f"{path} has keys {sorted(content)[:8]}; expected source_loads, or a plain nested list")
            content = content[name]
        array = as_numbers(content, str(path))
    else:
        array = chosen_array(read_arrays(path), str(path), SOURCE_NAMES)
    if num_rows not in (None, num_layers) and array.ndim in (3, 4) and array.shape[-3] == num_rows:
        array = np.take(array, list(positions), axis=-3)
    expected = (num_layers, num_ranks, num_logical)
    if array.dtype.kind not in "iuf" or array.shape[-3:] != expected or array.ndim not in (3, 4):
        axes = {expected[index] for index in (0, 1)}
        turned = array.ndim == 3 and array.shape == (num_ranks, num_layers, num_logical) and len(axes) == 2
        raise InvalidInputError(
            f"{path}: source loads must be numbers of shape (layers, ranks, experts) = {expected}, or of several windows of"
            f" that; got {array.dtype} of shape {array.shape}{': its first two axes are swapped' if turned else ''}"
        )
    sources = np.array(array, np.float64)
    bad = np.argwhere(~np.isfinite(sources) | (sources < 0))
    if bad.size:
        at = tuple(bad[0].tolist())
        layer, rank, expert = at[-3:]
        raise InvalidInputError(
            f"{path}: layer row {layer} rank {rank} expert {expert} is {sources[at]} ({len(bad)} such values);"
            f" source loads must be finite and >= 0"
        )
    total: Float64Array = sources.sum(axis=0) if sources.ndim == 4 else sources
    return total
