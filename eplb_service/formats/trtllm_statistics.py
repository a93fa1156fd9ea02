"""TensorRT-LLM's expert statistics (`EXPERT_STATISTIC_ITER_RANGE`, `EXPERT_STATISTIC_PATH`): `rank{r}.safetensors`,
`meta_info.json`.

A rank's file has a tensor `"{iteration}_{layer}"` of counts [E] for each iteration and MoE layer (absolute ids): what this
rank's tokens chose, of logical experts. Ranks are added up as `rank_counts` says, each iteration is a window.
`meta_info.json`, of rank 0, says `num_experts` and `num_experts_per_token`. Read from TensorRT-LLM's public tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import short_text
from eplb_service.formats.rank_counts import RankCounts, digest_of, merged_counts
from eplb_service.formats.recording import Float64Array, LoadRecording, checked_counts, engine_recording
from eplb_service.ids import ids_text

Arrays = Mapping[str, npt.NDArray[np.generic]]

META_NAME = "meta_info.json"
RANK_FILE = re.compile(r"rank(\d+)\.safetensors")
KEY = re.compile(r"(\d{1,18})_(\d{1,9})")


def rank_of(file_name: str) -> int:
    """The rank that wrote a file. Raises InvalidInputError for another name."""
    found = RANK_FILE.fullmatch(file_name)
    if found is None:
        raise InvalidInputError(
            f"{file_name} is not named rank0.safetensors, rank1.safetensors, …, as TensorRT-LLM's statistics are"
        )
    return int(found[1])


def statistics_recording(files: Mapping[str, tuple[int, Callable[[], Arrays]]], meta: object, where: str) -> LoadRecording:
    """Loads of the statistics of all ranks. files: by name, the rank and how to read its tensors; meta: None = not there.

    Ranks of pipeline stages have different layers: a layer that a rank never counts is no work of its. Iterations that lack a
    layer are left out. Raises InvalidInputError when files do not belong together, or one of them cannot be what it should.
    """
    num_experts = _num_experts(meta, where)
    layers = sorted({layer for name, (_, read) in files.items() for _, layer in _keys(read(), name)})

    def reader(name: str, rank: int, read: Callable[[], Arrays]) -> Callable[[], RankCounts]:
        def counts() -> RankCounts:
            passes = _passes(read(), layers, num_experts, name)
            digests = {iteration: digest_of(found) for iteration, found in passes.items()}
            return RankCounts(rank=rank, where=name, passes=passes, digests=digests)

        return counts

    made = merged_counts([reader(name, rank, read) for name, (rank, read) in files.items()], what="iteration", where=where)
    return engine_recording(
        made.counts,
        source="TensorRT-LLM statistics",
        where=where,
        layer_ids=layers,
        has_dense_rows=False,
        notes=made.notes,
    )


def _num_experts(meta: object, where: str) -> int | None:
    if meta is None:
        return None
    count = meta.get("num_experts") if isinstance(meta, dict) else None
    if type(count) is not int or count < 1:
        raise InvalidInputError(f"{where}, {META_NAME}: num_experts must be a number >= 1; got {short_text(count)}")
    return count


def _keys(arrays: Arrays, where: str) -> dict[tuple[int, int], str]:
    """(iteration, layer) of every tensor, and its name."""
    if not arrays:
        raise InvalidInputError(f"{where} holds no tensor: did the engine reach EXPERT_STATISTIC_ITER_RANGE?")
    found: dict[tuple[int, int], str] = {}
    for name in arrays:
        parts = KEY.fullmatch(name)
        if parts is None:
            raise InvalidInputError(
                f"{where} has a tensor {short_text(name)}; TensorRT-LLM's statistics name them ITERATION_LAYER, such as 100_3"
            )
        key = int(parts[1]), int(parts[2])
        if key in found:
            raise InvalidInputError(f"{where}: iteration {key[0]} has layer {key[1]} twice ({found[key]} and {name})")
        found[key] = name
    return found


def _passes(arrays: Arrays, layers: list[int], num_experts: int | None, where: str) -> dict[int, Float64Array]:
    """Iterations that hold every layer that this rank has; other layers are zero."""
    keys = _keys(arrays, where)
    width = num_experts if num_experts is not None else max(array.size for array in arrays.values())
    mine = sorted({layer for _, layer in keys})
    index = {layer: position for position, layer in enumerate(layers)}
    passes: dict[int, Float64Array] = {}
    for iteration in sorted({iteration for iteration, _ in keys}):
        if any((iteration, layer) not in keys for layer in mine):
            continue
        counts = np.zeros((len(layers), width), np.float64)
        for layer in mine:
            name = keys[iteration, layer]
            row = checked_counts(arrays[name], f"{where}, tensor {name}", ("expert",))
            if row.size != width:
                origin = f"{META_NAME} says" if num_experts is not None else "another tensor has"
                raise InvalidInputError(
                    f"{where}: iteration {iteration} layer {layer} counts {row.size} experts; {origin} {width}"
                )
            counts[index[layer]] = row
        passes[iteration] = counts
    if not passes:
        raise InvalidInputError(f"{where}: no iteration holds all of its layers {ids_text(mine)}")
    return passes
