"""numpy arrays on the wire: shape, dtype, packed little-endian items; what does not fit is refused with the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.pb.v1 import common_pb2

AnyArray = npt.NDArray[Any]

WIRE_DTYPES: dict[str, np.dtype[Any]] = {
    "i4": np.dtype("<i4"),
    "i8": np.dtype("<i8"),
    "u8": np.dtype("<u8"),
    "f4": np.dtype("<f4"),
    "f8": np.dtype("<f8"),
}
"""Names that `Array.dtype` may hold."""

DIMENSIONS_MAX = 8
ITEMS_MAX = 1 << 31


def array_to_pb(array: AnyArray, field: str) -> common_pb2.Array:
    """Pack an array. Raises InvalidInputError for a dtype that does not travel, naming `field`.

    >>> array_to_pb(np.array([[1, 2]], np.int32), "row").dtype
    'i4'
    """
    name = f"{array.dtype.kind}{array.dtype.itemsize}"
    if name not in WIRE_DTYPES or array.ndim > DIMENSIONS_MAX:
        raise InvalidInputError(
            f"{field}: {array.dtype} of {array.ndim} dimensions does not travel;"
            f" use one of {', '.join(WIRE_DTYPES)} and at most {DIMENSIONS_MAX} dimensions"
        )
    packed = np.ascontiguousarray(array, dtype=WIRE_DTYPES[name])
    return common_pb2.Array(shape=array.shape, dtype=name, data=packed.tobytes())


def array_from_pb(message: common_pb2.Array, field: str, *, dtypes: str, shape: Sequence[int | str]) -> AnyArray:
    """Unpack an array, read-only, without a copy.

    Args:
        message: the array; one that was left out has dtype "" and is refused as such.
        field: name of the field for messages.
        dtypes: accepted kinds of items, letters of "iuf".
        shape: expected extents; a word stands for any extent and names the axis in messages.

    Raises:
        InvalidInputError: dtype, shape or length do not fit; the message names the field and the numbers.

    >>> array_from_pb(array_to_pb(np.arange(4), "x"), "x", dtypes="i", shape=("items",)).tolist()
    [0, 1, 2, 3]
    """
    dtype = WIRE_DTYPES.get(message.dtype)
    if dtype is None or dtype.kind not in dtypes:
        accepted = [name for name, known in WIRE_DTYPES.items() if known.kind in dtypes]
        raise InvalidInputError(f"{field}: dtype {message.dtype[:20]!r}; expected {' or '.join(accepted)}")
    extents = tuple(message.shape)
    expected = f"({', '.join(str(extent) for extent in shape)})"
    if len(extents) != len(shape) or any(
        isinstance(wanted, int) and wanted != extent for wanted, extent in zip(shape, extents, strict=True)
    ):
        raise InvalidInputError(f"{field}: shape {extents[:DIMENSIONS_MAX]}; expected {expected}")
    if math.prod(max(extent, 1) for extent in extents) > ITEMS_MAX:  # an extent of 0 hides the others, but not from numpy
        raise InvalidInputError(f"{field}: shape {extents} is too large; at most {ITEMS_MAX} items")
    size = math.prod(extents) * dtype.itemsize
    if size != len(message.data):
        raise InvalidInputError(
            f"{field}: {len(message.data)} bytes of data, but shape {extents} of {message.dtype} takes {size}"
        )
    return np.frombuffer(message.data, dtype).reshape(extents)
