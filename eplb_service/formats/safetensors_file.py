"""The safetensors format: an unsigned 64-bit little-endian length, a JSON header of that length, then raw buffers.

Format: https://huggingface.co/docs/safetensors. The header is `{"name": {"dtype", "shape", "data_offsets": [begin, end]}, …,
"__metadata__"?: {…}}`; offsets count from the end of the header. Only integers and plain floats are read here.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import VALUES_MAX, parse_json, read_head, short_text, why

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""As the format's own reader has it."""

FILE_BYTES_MAX = 8 * VALUES_MAX

DTYPES = {
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
}


def is_safetensors(head: bytes) -> bool:
    """Whether a file that starts like this may be one: a believable length, then a JSON object."""
    return len(head) > LENGTH_BYTES and head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and 2 <= _length(head) <= HEADER_BYTES_MAX


def read_safetensors(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays of a file, by name. Raises InvalidInputError when it is cut short, or says what cannot be."""
    read_head(path, 1)
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise InvalidInputError(f"{path} has {size:,} bytes; at most {FILE_BYTES_MAX:,} are read: record fewer iterations")
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {why(error)}") from error
    return parse_safetensors(content, str(path))


def parse_safetensors(content: bytes, where: str) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays in a file's bytes, by name; they share its memory. Raises InvalidInputError as `read_safetensors` does."""
    if not is_safetensors(content):
        raise InvalidInputError(f"{where} is no safetensors file: it does not start with the length of a JSON header")
    start = LENGTH_BYTES + _length(content)
    if start > len(content):
        raise InvalidInputError(f"{where} is cut short: its header takes {start:,} bytes, the file has {len(content):,}")
    try:
        text = content[LENGTH_BYTES:start].decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{where} is no safetensors file: its header is no UTF-8 text") from error
    header = parse_json(text, f"{where}, header")
    if not isinstance(header, dict):
        raise InvalidInputError(f"{where} is no safetensors file: its header is no JSON object")
    return {
        name: _array(entry, memoryview(content)[start:], f"{where}, tensor {short_text(name)}")
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _length(head: bytes) -> int:
    return int.from_bytes(head[:LENGTH_BYTES], "little")


def _array(entry: object, buffers: memoryview, where: str) -> npt.NDArray[np.generic]:
    """One tensor of the header, from its buffer."""
    if not isinstance(entry, dict):
        raise InvalidInputError(f"{where}: its entry in the header is {short_text(entry)}, not an object")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if dtype is None:
        raise InvalidInputError(f"{where} has dtype {short_text(entry.get('dtype'))}; counts are read as {', '.join(DTYPES)}")
    shape, offsets = _whole(entry.get("shape")), _whole(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise InvalidInputError(
            f"{where}: shape and data_offsets must be lists of whole numbers >= 0, two offsets;"
            f" got {short_text(entry.get('shape'))} and {short_text(entry.get('data_offsets'))}"
        )
    begin, end = offsets
    needed = dtype.itemsize * math.prod(shape)
    if end - begin != needed:
        raise InvalidInputError(f"{where}: shape {shape} of {dtype} takes {needed:,} bytes, its offsets span {end - begin:,}")
    if end > len(buffers):
        raise InvalidInputError(
            f"{where} ends at byte {end:,} of the data, of which there are {len(buffers):,}: is it cut short?"
        )
    return np.frombuffer(buffers[begin:end], dtype).reshape(shape)


def _whole(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers >= 0, else None."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)
