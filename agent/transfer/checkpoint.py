"""The checkpoint as a source of experts: only the tensors of the wanted expert are read, and made into what the engine holds.

Safetensors files are read directly: a length of 8 bytes, a JSON header with the place of every tensor, the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agent.transfer.staging import ExpertLayout
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef

HEADER_BYTES_MAX = 100_000_000
_LENGTH_BYTES = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row along the first axis of a tensor: of those of a layer's experts that are stored as one."""

    name: str
    index: int


PartsOf = Callable[[LayerRef, int], Sequence[str | Row]]
"""Names, in the checkpoint, of all that an expert is made from; of a row, which is handed over under its tensor's name."""

Finish = Callable[[LayerRef, int, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""The engine's post-processing: an expert's tensors as in the checkpoint → as in one of its slots, by the slots' names."""


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Checkpoint:
    """An `ExpertSource` over safetensors files, whose headers are read when the first expert is wanted.

    bytes_read: of tensors, so far.
    """

    name = "checkpoint"

    def __init__(self, files: Sequence[Path], parts_of: PartsOf, finish: Finish) -> None:
        self._files, self._parts_of, self._finish = tuple(files), parts_of, finish
        self._places: dict[str, _Place] | None = None
        self.bytes_read = 0

    def read(self, layer: LayerRef, expert: int, layout: ExpertLayout, region: torch.Tensor) -> bool:
        """Read, finish and pack one expert. Raises InvalidInputError for a file or a result that cannot be used."""
        values = self.values(layer, expert)
        if values is None:
            return False
        layout.pack_values(values, region)
        return True

    def values(self, layer: LayerRef, expert: int) -> Mapping[str, torch.Tensor] | None:
        """One expert's tensors as a slot holds them, None where the files have no part of it. Raises InvalidInputError."""
        places = self._known()
        rows: dict[str, int | None] = {}
        for part in self._parts_of(layer, expert):
            rows |= {part.name: part.index} if isinstance(part, Row) else {part: None}
        missing = [name for name in rows if name not in places]
        if len(missing) == len(rows):
            return None
        if missing:
            raise InvalidInputError(f"the checkpoint has a part of expert {expert} of {layer}, but no {', '.join(missing[:4])}")
        parts = {
            name: self._tensor(places[name] if row is None else _row(places[name], name, row)) for name, row in rows.items()
        }
        return self._finish(layer, expert, parts)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor of the files, by its name. Raises InvalidInputError for a file that cannot be used."""
        return {name: place.shape for name, place in self._known().items()}

    def _known(self) -> Mapping[str, _Place]:
        if self._places is None:
            self._places = {name: place for path in self._files for name, place in _header(path).items()}
        return self._places

    def _tensor(self, place: _Place) -> torch.Tensor:
        data = bytearray(place.num_bytes)
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.offset)
            view, filled = memoryview(data), 0
            while filled < place.num_bytes:
                count = file.readinto(view[filled:])
                if not count:
                    raise InvalidInputError(f"{place.path} is cut short: {place.num_bytes - filled} bytes are missing")
                filled += count
        self.bytes_read += place.num_bytes
        if not data:
            return torch.zeros(place.shape, dtype=place.dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(place.dtype).view(place.shape)


def _row(place: _Place, name: str, index: int) -> _Place:
    """Where a row of a tensor lies. Raises InvalidInputError when there is no such row."""
    if not place.shape or not 0 <= index < place.shape[0]:
        raise InvalidInputError(f"{place.path}: tensor {name} of shape {list(place.shape)} has no row {index}")
    num_bytes = place.num_bytes // place.shape[0]
    return _Place(place.path, place.offset + index * num_bytes, num_bytes, place.dtype, place.shape[1:])


def _header(path: Path) -> dict[str, _Place]:
    """Where each tensor of a file lies. Raises InvalidInputError when it is no safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(HEADER_BYTES_MAX, size - _LENGTH_BYTES):
            raise InvalidInputError(f"{path} of {size} bytes is no safetensors file: its header would have {length} bytes")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise InvalidInputError(f"{path} is no safetensors file: its header is no JSON ({error})") from error
    first = _LENGTH_BYTES + length
    places = {}
    for name, entry in header.items():
        if name != "__metadata__":
            places[name] = _place(path, name, entry, first, size)
    return places


def _place(path: Path, name: str, entry: Mapping[str, object], first: int, size: int) -> _Place:
    dtype = _DTYPES.get(str(entry.get("dtype")))
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if dtype is None or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise InvalidInputError(f"{path}: tensor {name} of type {entry.get('dtype')} cannot be read")
    begin, end = (int(offset) for offset in offsets)
    extents = tuple(int(extent) for extent in shape)
    wanted = dtype.itemsize
    for extent in extents:
        wanted *= extent
    if not 0 <= begin <= end <= size - first or end - begin != wanted:
        raise InvalidInputError(
            f"{path}: tensor {name} of {wanted} bytes is said to lie at {begin} to {end} of {size - first}; the file is damaged"
        )
    return _Place(path, first + begin, wanted, dtype, extents)


def files_of(folder: Path) -> tuple[Path, ...]:
    """All safetensors files of a folder, in the order of their names. Raises InvalidInputError when there is none."""
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise InvalidInputError(f"{folder} holds no .safetensors file")
    return files
