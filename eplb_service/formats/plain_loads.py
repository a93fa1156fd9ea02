"""Loads as plain arrays: `.npy`, `.npz` and JSON of anybody's scripts, and our own recordings.

Our own recording is an `.npz` with `loads` (W, L, E), `layer_ids` (L) and, as text of no dimension, `format` and `source`;
written by `eplb load convert`. JSON is `{"loads": …}`, with `layer_ids` or without, `{"load_history":
[{"logical_expert_load": [[…]]}, …]}` of one entry a window, or the nested list itself.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import as_numbers, short_text
from eplb_service.formats.recording import LoadRecording, checked_loads, recording_of

LOAD_NAMES = ("loads", "counts", "logical_count", "load")
"""Array names looked for in an `.npz` of several arrays, in this order."""

PLACEMENT_KEYS = {"physical_to_logical", "physical_to_logical_map", "layer_list"}
"""Keys of placement files, which are given for loads by mistake."""

OWN_FORMAT = "eplb-load/1"
OWN_SOURCE = "recording of eplb"

Arrays = Mapping[str, npt.NDArray[np.generic]]


def is_own(names: Collection[str]) -> bool:
    """Whether the members of an `.npz` are those of a recording of ours."""
    return {"format.npy", "loads.npy"} <= set(names)


def own_recording(arrays: Arrays, where: str) -> LoadRecording:
    """A recording of ours. Raises InvalidInputError when it is of another version, or its parts do not fit."""
    marker = _text(arrays.get("format", np.array("")))
    if marker != OWN_FORMAT or "loads" not in arrays or "layer_ids" not in arrays:
        raise InvalidInputError(
            f"{where} is of format {short_text(marker)} with arrays {sorted(arrays)}; this build reads"
            f" {OWN_FORMAT}, which has loads"
            " and layer_ids"
        )
    loads = checked_loads(arrays["loads"], f"{where}, loads")
    layers = _layer_ids(arrays["layer_ids"].tolist(), loads.shape[1], where)
    source = _text(arrays["source"]) if "source" in arrays else ""
    made = recording_of(loads, source=OWN_SOURCE + (f", of {source}" if source else ""), layer_ids=layers, has_dense_rows=False)
    num_layers = arrays.get("num_layers")
    if num_layers is None:
        return made
    if num_layers.shape != () or num_layers.dtype.kind not in "iu" or int(num_layers) <= max(layers):
        raise InvalidInputError(
            f"{where}: num_layers must be a number above its layer ids; got {short_text(num_layers.tolist())}"
        )
    return LoadRecording(
        source=made.source,
        loads=made.loads,
        layer_ids=made.layer_ids,
        has_layer_ids=True,
        num_layers=int(num_layers),
        dense_layer_ids=made.dense_layer_ids,
    )


def own_bytes(recording: LoadRecording) -> bytes:
    """A recording in our format. Equal recordings give equal bytes on one version of numpy."""
    parts: dict[str, npt.NDArray[np.generic]] = {
        "format": np.array(OWN_FORMAT),
        "source": np.array(recording.source.removeprefix(f"{OWN_SOURCE}, of ")),
        "loads": recording.loads,
        "layer_ids": np.array(recording.layer_ids, np.int64),
    }
    if recording.num_layers is not None:
        parts["num_layers"] = np.array(recording.num_layers, np.int64)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **parts)
    return buffer.getvalue()


def array_recording(arrays: Arrays, where: str) -> LoadRecording:
    """Loads of an `.npy` or `.npz`: the only array, else the first that has one of LOAD_NAMES."""
    return recording_of(checked_loads(chosen_array(arrays, where, LOAD_NAMES), where), source="numpy array")


def chosen_array(arrays: Arrays, where: str, names_wanted: tuple[str, ...]) -> npt.NDArray[np.generic]:
    """The only array, else the first that has one of the names wanted. Raises InvalidInputError when there is none."""
    names = list(arrays)
    name = names[0] if len(names) == 1 else next((name for name in names_wanted if name in names), None)
    if name is None:
        raise InvalidInputError(f"{where} holds {len(names)} arrays {names}; name the loads one of {list(names_wanted)}")
    return arrays[name]


def json_recording(content: object, where: str) -> LoadRecording:
    """Loads of a JSON document in any of its forms. Raises InvalidInputError for another."""
    layer_ids, source = None, "JSON list"
    if isinstance(content, dict):
        if "loads" in content:
            layer_ids, source = content.get("layer_ids"), "JSON loads"
            content = content["loads"]
        elif "load_history" in content:
            content, source = _history(content["load_history"], where), "JSON load_history"
        elif PLACEMENT_KEYS & set(content):
            raise InvalidInputError(f"{where} is a placement, not a load: give it as --current {where}")
        else:
            raise InvalidInputError(
                f"{where} has keys {sorted(content)[:8]}; expected loads, load_history, or a plain nested list"
            )
    loads = checked_loads(as_numbers(content, where), where)
    if layer_ids is None:
        return recording_of(loads, source=source)
    return recording_of(loads, source=source, layer_ids=_layer_ids(layer_ids, loads.shape[1], where), has_dense_rows=False)


def _history(history: object, where: str) -> list[object]:
    if not isinstance(history, list) or not history:
        raise InvalidInputError(f"{where}: load_history must be a list of at least one entry")
    for index, entry in enumerate(history):
        if not isinstance(entry, dict) or "logical_expert_load" not in entry:
            raise InvalidInputError(f"{where}: entry {index} of load_history has no logical_expert_load")
    return [entry["logical_expert_load"] for entry in history]


def _layer_ids(given: object, num_layers: int, where: str) -> tuple[int, ...]:
    """Ids of the rows: ascending, unique, one for each."""
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        raise InvalidInputError(f"{where}: layer_ids must be a list of whole numbers; got {short_text(given)}")
    if len(given) != num_layers:
        raise InvalidInputError(f"{where}: {len(given)} layer ids for {num_layers} layers of loads")
    if given != sorted(set(given)) or given[0] < 0:
        raise InvalidInputError(f"{where}: layer ids must be ascending, unique and >= 0; got {short_text(given)}")
    return tuple(given)


def _text(array: npt.NDArray[np.generic]) -> str:
    return str(array) if array.dtype.kind == "U" and array.shape == () else ""
