"""Shares of an expert's tokens that its replicas take, under weighted dispatch: one number for every slot of a layer.

A share belongs to a slot: the shares of one expert add up to 1, an empty slot has 0. They are float32 wherever they are kept,
sent, digested or routed by, so that what the planner decided is bit for bit what every rank routes by.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError

type_of_shares = np.dtype("<f4")
Float32Array = npt.NDArray[np.float32]

SUM_TOLERANCE = 1e-5
"""How far the shares of one expert may be from 1 in sum: what float32 loses, with room."""


def checked_shares(
    shares: npt.ArrayLike, physical_to_logical: npt.NDArray[np.integer], num_logical: int, *, layers: tuple[str, ...]
) -> Float32Array:
    """Shares as float32, a copy that cannot be written. Shares and map: shape (L, P); layers: their names, for messages.

    Raises InvalidInputError, naming layer and expert, for another shape, entries that are no finite numbers >= 0, a share on
    an empty slot, and shares of an expert that do not add up to 1 within `SUM_TOLERANCE`.
    """
    given = np.asarray(shares)
    if given.shape != physical_to_logical.shape or given.dtype.kind != "f":
        raise InvalidInputError(
            f"shares must be floating-point numbers of shape (layers, slots) = {physical_to_logical.shape};"
            f" got {given.dtype} of shape {given.shape}"
        )
    with np.errstate(over="ignore"):
        frozen = given.astype(np.float32) + np.float32(0)  # -0.0 becomes 0.0: equal shares have equal bytes
    wrong = ~np.isfinite(frozen) | (frozen < 0) | ((physical_to_logical < 0) & (frozen != 0))
    if wrong.any():
        layer, slot = np.argwhere(wrong)[0].tolist()
        expert = int(physical_to_logical[layer, slot])
        held = "is empty and takes none" if expert < 0 else f"holds expert {expert}; shares are finite and >= 0"
        raise InvalidInputError(f"layer {layers[layer]}: slot {slot} has share {float(given[layer, slot])!r}, it {held}")
    sums, copies = _sums(frozen, physical_to_logical, num_logical)
    off = (copies > 0) & (np.abs(sums - 1.0) > SUM_TOLERANCE)
    if off.any():
        layer, expert = np.argwhere(off)[0].tolist()
        raise InvalidInputError(
            f"layer {layers[layer]}: the shares of expert {expert} on its {int(copies[layer, expert])} slots add up to"
            f" {float(sums[layer, expert]):.6g}; they must add up to 1 (within {SUM_TOLERANCE:g})"
        )
    frozen.setflags(write=False)
    return frozen


def as_values(shares: npt.NDArray[np.float32] | None) -> tuple[float, ...] | None:
    """Shares of a row as plain numbers, for messages; each is exactly a float32."""
    return None if shares is None else tuple(shares.tolist())


def as_array(values: Sequence[float] | None) -> Float32Array | None:
    """What `as_values` gave, as an array of shape (P,); what no float32 holds becomes infinite."""
    with np.errstate(over="ignore"):
        return None if values is None else np.array(values, np.float32)


def _sums(
    shares: Float32Array, physical_to_logical: npt.NDArray[np.integer], num_logical: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.intp]]:
    """Sum of shares and number of slots of each expert. Both of shape (L, E)."""
    shape = (physical_to_logical.shape[0], num_logical)
    layer, slot = np.nonzero(physical_to_logical >= 0)
    sums = np.zeros(shape, np.float64)
    copies = np.zeros(shape, np.intp)
    index = (layer, physical_to_logical[layer, slot])
    np.add.at(sums, index, shares[layer, slot].astype(np.float64))
    np.add.at(copies, index, 1)
    return sums, copies


def even_shares(physical_to_logical: npt.NDArray[np.integer], num_logical: int) -> Float32Array:
    """The same share for every replica of an expert: what a weighted engine starts with. Shape (L, P), float32.

    >>> even_shares(np.array([[0, 1, 1, -1]]), 2).tolist()
    [[1.0, 0.5, 0.5, 0.0]]
    """
    shares = np.zeros(physical_to_logical.shape, np.float32)
    for layer, row in enumerate(physical_to_logical):
        held = row >= 0
        counts = np.bincount(row[held], minlength=num_logical)
        shares[layer, held] = np.float32(1) / counts[row[held]].astype(np.float32)
    return shares


def replica_shares(shares: npt.NDArray[np.float32], logical_to_physical: npt.NDArray[np.integer]) -> Float32Array:
    """Shares in the order of each expert's replicas, 0 where there is none: what an engine's dispatch reads.

    Shares: shape (L, P); logical_to_physical: shape (L, E, width), -1 = no replica. Returns shape (L, E, width), float32.

    >>> replica_shares(np.array([[1, 0.25, 0.75]], np.float32), np.array([[[0, -1], [1, 2]]])).tolist()
    [[[1.0, 0.0], [0.25, 0.75]]]
    """
    layer = np.arange(shares.shape[0])[:, None, None]
    taken = shares[layer, np.maximum(logical_to_physical, 0)]
    result: Float32Array = np.where(logical_to_physical >= 0, taken, np.float32(0)).astype(np.float32)
    return result


def slot_shares(
    by_replica: npt.NDArray[np.float32], logical_to_physical: npt.NDArray[np.integer], *, num_physical: int
) -> Float32Array:
    """The way back from `replica_shares`, for one layer. Both tables: shape (E, width). Returns shape (P,), float32.

    >>> slot_shares(np.array([[1, 0], [0.25, 0.75]], np.float32), np.array([[0, -1], [1, 2]]), num_physical=4).tolist()
    [1.0, 0.25, 0.75, 0.0]
    """
    shares = np.zeros(num_physical, np.float32)
    held = logical_to_physical >= 0
    shares[logical_to_physical[held]] = by_replica[held]
    return shares
