"""Frames of the Unix socket between a hook and its agent process: length-prefixed, JSON head, raw arrays, no pickle.

    magic "EPL1" | head length u32 | payload length u32 | head (JSON, UTF-8) | payload (array items back to back)

The head is `{"kind": class name, "body": fields, "arrays": [[dtype, shape], …]}`. A body mirrors the dataclass: nested
dataclasses are objects, tuples are lists, enums their values, an array is `{"array": index}`. Decoding follows the type
hints and refuses what does not fit, naming the field: a frame is input from another process. Both sides are of one release
(the agent process says which in `Welcome`), so a frame needs no version of its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import numpy as np

from eplb_service.errors import InvalidInputError

MAGIC = b"EPL1"
HEAD = struct.Struct("<4sII")
HEAD_BYTES_MAX = 64 << 20
PAYLOAD_BYTES_MAX = 1 << 30
_DTYPES = ("<i4", "<i8", "<u8", "<f4", "<f8")


def encode(message: object) -> bytes:
    """One frame for a dataclass instance (control messages, registrations, load reports, …)."""
    arrays: list[np.ndarray[Any, Any]] = []
    body = _to_json(message, arrays)
    described = [[array.dtype.newbyteorder("<").str, list(array.shape)] for array in arrays]
    head = json.dumps({"kind": type(message).__name__, "body": body, "arrays": described}, separators=(",", ":")).encode()
    payload = b"".join(np.ascontiguousarray(a, a.dtype.newbyteorder("<")).tobytes() for a in arrays)
    return HEAD.pack(MAGIC, len(head), len(payload)) + head + payload


def frame_lengths(prefix: bytes) -> tuple[int, int]:
    """Head and payload length from a frame's first `HEAD.size` bytes. Raises InvalidInputError for what is no frame."""
    magic, head_length, payload_length = HEAD.unpack(prefix)
    if magic != MAGIC:
        raise InvalidInputError(f"not a frame: it starts with {magic!r}, expected {MAGIC!r}; is this the agent's socket?")
    if head_length > HEAD_BYTES_MAX or payload_length > PAYLOAD_BYTES_MAX:
        raise InvalidInputError(
            f"frame too large: head {head_length} of at most {HEAD_BYTES_MAX} bytes,"
            f" payload {payload_length} of at most {PAYLOAD_BYTES_MAX}"
        )
    return head_length, payload_length


class Decoder:
    """Turns frames into instances of the given dataclasses.

    >>> from eplb_service.control import Arm
    >>> Decoder([Arm]).kinds
    ('Arm',)
    """

    def __init__(self, classes: typing.Iterable[type]) -> None:
        self._classes = {cls.__name__: cls for cls in classes}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the messages that are understood."""
        return tuple(self._classes)

    def decode(self, head: bytes, payload: bytes) -> object:
        """The message of one frame. Raises InvalidInputError naming the field that does not fit."""
        try:
            parsed = json.loads(head)
            kind, body, described = parsed["kind"], parsed["body"], parsed["arrays"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidInputError(f"frame head of {len(head)} bytes is not the expected JSON: {error}") from None
        cls = self._classes.get(kind) if isinstance(kind, str) else None
        if cls is None:
            raise InvalidInputError(f"unknown frame kind {str(kind)[:80]!r}; expected one of {', '.join(self._classes)}")
        arrays = _read_arrays(described, payload)
        return _parser(cls)(body, arrays, kind)


def _to_json(value: object, arrays: list[np.ndarray[Any, Any]]) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _to_json(getattr(value, f.name), arrays) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.ndarray):
        if value.dtype.newbyteorder("<").str not in _DTYPES:
            raise InvalidInputError(f"arrays of {value.dtype} do not travel in frames; use one of {', '.join(_DTYPES)}")
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, (tuple, list)):
        return [_to_json(item, arrays) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _to_json(item, arrays) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _read_arrays(described: object, payload: bytes) -> list[np.ndarray[Any, Any]]:
    if not isinstance(described, list):
        raise InvalidInputError("frame head: `arrays` must be a list")
    arrays, offset = [], 0
    for entry in described:
        if not (isinstance(entry, list) and len(entry) == 2 and entry[0] in _DTYPES and isinstance(entry[1], list)):
            raise InvalidInputError(f"frame head: bad array description {str(entry)[:80]}")
        dtype, shape = np.dtype(entry[0]), entry[1]
        if len(shape) > 8 or not all(type(extent) is int and 0 <= extent <= PAYLOAD_BYTES_MAX for extent in shape):
            raise InvalidInputError(f"frame head: bad array shape {str(shape)[:80]}")
        # An extent of 0 makes any others fit the payload, but not numpy.
        if math.prod(max(extent, 1) for extent in shape) > PAYLOAD_BYTES_MAX:
            raise InvalidInputError(f"frame head: an array of shape {shape} is too large; at most {PAYLOAD_BYTES_MAX} items")
        count = math.prod(shape)
        size = count * dtype.itemsize
        if offset + size > len(payload):
            raise InvalidInputError(f"frame payload of {len(payload)} bytes is too short for an array of shape {shape}")
        arrays.append(np.frombuffer(payload, dtype, count, offset).reshape(shape))
        offset += size
    if offset != len(payload):
        raise InvalidInputError(f"frame payload has {len(payload)} bytes but its arrays only {offset}")
    return arrays


_Parse = Callable[[Any, "list[np.ndarray[Any, Any]]", str], Any]


def _refuse(path: str, expected: str, value: object) -> InvalidInputError:
    return InvalidInputError(f"frame field {path}: expected {expected}, got {str(value)[:80]!r}")


@cache
def _parser(hint: Any) -> _Parse:
    """A function that turns parsed JSON into a value of the hinted type, or refuses it."""
    if isinstance(hint, NewType):
        return _parser(hint.__supertype__)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(hint)
    if hint is np.ndarray or origin is np.ndarray:
        return _array
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass(hint)
    if origin is tuple:
        return _tuple(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    return _scalar(hint)


def _union(hint: Any) -> _Parse:
    options = [option for option in get_args(hint) if option is not types.NoneType]

    def parse(value: Any, arrays: list[np.ndarray[Any, Any]], path: str) -> Any:
        if value is None and types.NoneType in get_args(hint):
            return None
        for option in options:
            try:
                return _parser(option)(value, arrays, path)
            except InvalidInputError:
                continue
        raise _refuse(path, str(hint), value)

    return parse


def _array(value: Any, arrays: list[np.ndarray[Any, Any]], path: str) -> Any:
    index = value.get("array") if isinstance(value, dict) else None
    if type(index) is not int or not 0 <= index < len(arrays):
        raise _refuse(path, f"a reference to one of {len(arrays)} arrays", value)
    return arrays[index]


def _dataclass(cls: type) -> _Parse:
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    optional = {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
    }

    def parse(value: Any, arrays: list[np.ndarray[Any, Any]], path: str) -> Any:
        if not isinstance(value, dict):
            raise _refuse(path, f"an object ({cls.__name__})", value)
        unknown = set(value) - set(names)
        missing = set(names) - set(value) - optional
        if unknown or missing:
            raise InvalidInputError(f"frame field {path}: unknown fields {sorted(unknown)[:5]}, missing {sorted(missing)}")
        fields = {name: _parser(hints[name])(value[name], arrays, f"{path}.{name}") for name in names if name in value}
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"frame field {path}: {error}") from None

    return parse


def _tuple(hint: Any) -> _Parse:
    args = get_args(hint)
    repeated = len(args) == 2 and args[1] is Ellipsis

    def parse(value: Any, arrays: list[np.ndarray[Any, Any]], path: str) -> Any:
        if not isinstance(value, list) or (not repeated and len(value) != len(args)):
            raise _refuse(path, "a list" if repeated else f"a list of {len(args)}", value)
        if repeated:
            item = _parser(args[0])
            return tuple(item(entry, arrays, path) for entry in value)
        return tuple(_parser(arg)(entry, arrays, path) for arg, entry in zip(args, value, strict=True))

    return parse


def _mapping(hint: Any) -> _Parse:
    _, item_hint = get_args(hint)

    def parse(value: Any, arrays: list[np.ndarray[Any, Any]], path: str) -> Any:
        if not isinstance(value, dict):
            raise _refuse(path, "an object", value)
        return {key: _parser(item_hint)(item, arrays, f"{path}.{key}") for key, item in value.items()}

    return parse


def _enum(cls: type[Enum]) -> _Parse:
    def parse(value: Any, _arrays: list[np.ndarray[Any, Any]], path: str) -> Any:
        try:
            return cls(value)
        except ValueError:
            raise _refuse(path, f"one of {[member.value for member in cls]}", value) from None

    return parse


def _scalar(hint: Any) -> _Parse:
    def parse(value: Any, _arrays: list[np.ndarray[Any, Any]], path: str) -> Any:
        if hint is float and type(value) is int:
            return float(value)
        if type(value) is not hint or (hint is int and not -(1 << 63) <= value < 1 << 64):
            raise _refuse(path, getattr(hint, "__name__", str(hint)), value)
        return value

    return parse


# ── what is said on the link beside `eplb_service.control` and load reports ──────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Agent process → hook, first frame: its release; a hook of another release closes the link and stays observe-only."""

    version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationAnswer:
    """Agent process → hook: what the planner said to this rank's registration (reason is empty when it was accepted)."""

    accepted: bool
    reason: str
