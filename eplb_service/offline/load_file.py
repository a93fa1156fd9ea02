"""Reads expert loads from a file: `.npy`, `.npz` or `.json`, as (W, L, E); a matrix is one window.

JSON may be the nested list itself, `{"loads": …}`, or `{"load_history": [{"logical_expert_load": [[…]]}, …]}`, one entry a
window. Whatever is wrong with a file is one sentence.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError

Float64Array = npt.NDArray[np.float64]

NUMPY_MAGIC = b"\x93NUMPY"

LOAD_NAMES = ("loads", "counts", "logical_count", "load")
"""Array names looked for in an `.npz` of several arrays, in this order."""


def read_json(path: Path) -> object:
    """Content of a JSON file. Raises InvalidInputError when it cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read {path}: {_why(error)}") from error
    if not text.strip():
        raise InvalidInputError(f"{path} is empty")
    try:
        parsed: object = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidInputError(f"{path} is no valid JSON: {error}") from error
    return parsed


def read_array(path: Path, names_wanted: tuple[str, ...] = LOAD_NAMES) -> npt.NDArray[np.generic]:
    """The array of an `.npy` or `.npz` file; pickled objects are refused, never loaded.

    Of an `.npz`, the only array, else the first that has one of the names wanted.
    """
    try:
        if path.stat().st_size == 0:
            raise InvalidInputError(f"{path} is empty")
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            names = list(loaded.files)
            name = names[0] if len(names) == 1 else next((name for name in names_wanted if name in names), None)
            if name is None:
                raise InvalidInputError(f"{path} holds {len(names)} arrays {names}; name the loads one of {list(names_wanted)}")
            array: npt.NDArray[np.generic] = loaded[name]
            return array
    except (OSError, EOFError) as error:
        raise InvalidInputError(f"cannot read {path}: {_why(error)}") from error
    except (ValueError, zipfile.BadZipFile) as error:
        if not _head(path).startswith((NUMPY_MAGIC, b"PK")):
            raise InvalidInputError(f"{path} is no numpy file: save it with numpy.save, or as .json") from error
        reason = "it holds Python objects, not numbers" if "pickle" in str(error).lower() else str(error)
        raise InvalidInputError(f"cannot read {path} as a numpy file: {reason}") from error


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(NUMPY_MAGIC))


def _why(error: Exception) -> str:
    """An operating system's reason without its path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _json_loads(path: Path) -> npt.NDArray[np.generic]:
    """Loads of a JSON file in any of its forms."""
    content = read_json(path)
    if isinstance(content, dict):
        if "loads" in content:
            content = content["loads"]
        elif "load_history" in content:
            history = content["load_history"]
            if not isinstance(history, list) or not history:
                raise InvalidInputError(f"{path}: load_history must be a list of at least one entry")
            for index, entry in enumerate(history):
                if not isinstance(entry, dict) or "logical_expert_load" not in entry:
                    raise InvalidInputError(f"{path}: entry {index} of load_history has no logical_expert_load")
            content = [entry["logical_expert_load"] for entry in history]
        else:
            raise InvalidInputError(
                f"{path} has keys {sorted(content)[:8]}; expected loads, load_history, or a plain nested list"
            )
    return as_numbers(content, str(path))


def as_numbers(content: object, where: str) -> npt.NDArray[np.generic]:
    """A nested list as an array of numbers. Raises InvalidInputError when rows differ in length or hold other things."""
    try:
        array = np.array(content)
    except (ValueError, OverflowError) as error:
        raise InvalidInputError(f"{where}: rows differ in length, or are no numbers ({str(error)[:80]})") from error
    if array.dtype.kind not in "iuf":
        raise InvalidInputError(f"{where}: expected numbers; got values of type {array.dtype}")
    return array


def checked_loads(array: npt.NDArray[np.generic], where: str) -> Float64Array:
    """Loads as (W, L, E), float64. Raises InvalidInputError on a wrong shape or type, negative, NaN or infinite values."""
    if array.dtype.kind not in "iuf":
        raise InvalidInputError(f"{where}: loads must be numbers; got {array.dtype}")
    if array.ndim not in (2, 3):
        raise InvalidInputError(
            f"{where}: loads must have shape (layers, experts) or (windows, layers, experts); got {array.shape}"
        )
    if array.size == 0:
        raise InvalidInputError(f"{where} is empty: loads of shape {array.shape} hold no number")
    loads = np.array(array, np.float64)
    loads = loads[None] if loads.ndim == 2 else loads
    bad = np.argwhere(~np.isfinite(loads) | (loads < 0))
    if bad.size:
        window, layer, expert = bad[0].tolist()
        raise InvalidInputError(
            f"{where}: window {window} layer row {layer} expert {expert} is {loads[window, layer, expert]}"
            f" ({len(bad)} such values); loads must be finite and >= 0"
        )
    return loads


def _check_name(path: Path) -> None:
    """Raises InvalidInputError for what is no file, or none that is read here."""
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder; give a .npy, .npz or .json file")
    if not path.exists():
        raise InvalidInputError(f"there is no file {path}")
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz", ".json"):
        raise InvalidInputError(f"{path} ends in {suffix or 'nothing'}; loads are read from .npy, .npz or .json")


def read_loads(path: Path) -> Float64Array:
    """Loads of a file, shape (W, L, E), float64. Raises InvalidInputError with one sentence on anything that is wrong."""
    _check_name(path)
    return checked_loads(_json_loads(path) if path.suffix.lower() == ".json" else read_array(path), str(path))


SOURCE_NAMES = ("source_loads", "sources", *LOAD_NAMES)


def read_source_loads(path: Path, *, num_layers: int, num_logical: int, num_ranks: int) -> Float64Array:
    """Tokens that each rank sent, shape (L, R, E), float64; a file of shape (windows, L, R, E) is summed over its windows.

    Of an `.npz` or JSON object, the entry named one of SOURCE_NAMES. Raises InvalidInputError with one sentence otherwise.
    """
    _check_name(path)
    if path.suffix.lower() == ".json":
        content = read_json(path)
        if isinstance(content, dict):
            name = next((name for name in SOURCE_NAMES if name in content), None)
            if name is None:
                raise InvalidInputError(f"{path} has keys {sorted(content)[:8]}; expected source_loads, or a plain nested list")
            content = content[name]
        array = as_numbers(content, str(path))
    else:
        array = read_array(path, SOURCE_NAMES)
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
