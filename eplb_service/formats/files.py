"""JSON and numpy files as plain values; files written whole. Nothing in a file is trusted: no pickles, no sizes that only a
header claims.

A file may say that it holds more than there is memory: what numpy and zip headers declare is compared with the bounds here
before anything is allocated.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from eplb_service.errors import EnvironmentFault, InvalidInputError

NUMPY_MAGIC = b"\x93NUMPY"
ZIP_MAGIC = b"PK"

VALUES_MAX = 2**28
"""Most numbers in one array: 17,000 windows of 61 layers x 256 experts; 2 GiB as float64."""

JSON_BYTES_MAX = 512 * 2**20
"""Largest JSON or YAML file."""


def read_head(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a file. Raises InvalidInputError when there is no such file, it cannot be read or it is empty."""
    if not path.exists():
        raise InvalidInputError(f"there is no file {path}")
    try:
        with path.open("rb") as file:
            head = file.read(num_bytes)
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {why(error)}") from error
    if not head:
        raise InvalidInputError(f"{path} is empty")
    return head


def read_text(path: Path) -> str:
    """A text file, UTF-8. Raises InvalidInputError when it cannot be read, is empty or larger than JSON_BYTES_MAX."""
    try:
        size = path.stat().st_size
        if size > JSON_BYTES_MAX:
            raise InvalidInputError(
                f"{path} has {size:,} bytes; text files are read up to {JSON_BYTES_MAX:,}: save the numbers as .npz instead"
            )
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {why(error)}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is no text: byte {error.start} is not UTF-8") from error
    if not text.strip():
        raise InvalidInputError(f"{path} is empty")
    return text


def read_json(path: Path) -> object:
    """Content of a JSON file. Raises InvalidInputError when it cannot be read or parsed, or has a key twice."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> object:
    """JSON text as plain values. Raises InvalidInputError when it is none, or an object has a key twice."""

    def without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InvalidInputError(f"{where} has the key {short_text(twice)} twice in one object")
        return found

    try:
        parsed: object = json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} is no valid JSON: {error}") from error
    return parsed


def read_arrays(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    """Arrays of an `.npy` (under the name "") or `.npz` file; pickled objects are refused, never loaded.

    Raises InvalidInputError when it is neither, is cut short, or declares more than VALUES_MAX values.
    """
    head = read_head(path, len(NUMPY_MAGIC))
    if not head.startswith((NUMPY_MAGIC, ZIP_MAGIC)):
        raise InvalidInputError(f"{path} is no numpy file: save it with numpy.save, or as .json")
    try:
        if head == NUMPY_MAGIC:
            with path.open("rb") as file:
                _check_header(file, path.stat().st_size, str(path))
            return {"": np.load(path, allow_pickle=False)}
        _check_members(path)
        with np.load(path, allow_pickle=False) as loaded:
            return {name: loaded[name] for name in loaded.files}
    except InvalidInputError:
        raise
    except (OSError, EOFError) as error:
        raise InvalidInputError(f"cannot read {path}: {why(error)}") from error
    except Exception as error:  # numpy, zipfile, zlib and lzma raise what they like for files that are damaged
        reason = "it holds Python objects, not numbers" if "pickle" in str(error).lower() else " ".join(str(error).split())
        raise InvalidInputError(f"cannot read {path} as a numpy file: {reason}") from error


def names_in_zip(path: Path) -> list[str]:
    """Names of the members of a file that starts as a zip archive (.npz, .pt). Raises InvalidInputError when it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except Exception as error:  # zipfile raises what it likes
        raise InvalidInputError(
            f"cannot read {path}: it starts like an archive of numpy or torch, but the list of contents that ends one is not"
            f" in its {path.stat().st_size:,} bytes: was it cut short? copy it again"
        ) from error


def _check_members(path: Path) -> None:
    """Every array of an `.npz`, by its header. A zip's own sizes bound what is ever unpacked of it."""
    names_in_zip(path)
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                raise InvalidInputError(f"{path} holds {short_text(member.filename)}, which is no array of numpy")
            with archive.open(member) as file:
                _check_header(file, member.file_size, f"{path}, {member.filename}")


def _check_header(file: IO[bytes], num_bytes: int, where: str) -> None:
    """Raises InvalidInputError when an array is larger than VALUES_MAX, or than what follows its header."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"its format has version {version[0]}.{version[1]}; 1.0 and 2.0 are read")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, not numbers (pickle)")
    check_size(shape, where)
    if dtype.itemsize * math.prod(shape) > num_bytes:
        raise ValueError(f"it declares shape {shape} of {dtype}, more than its {num_bytes:,} bytes hold")


def check_size(shape: tuple[int, ...], where: str) -> None:
    """Raises InvalidInputError when an array of this shape has more than VALUES_MAX values."""
    if math.prod(shape) > VALUES_MAX:
        raise InvalidInputError(
            f"{where} declares shape {shape}, {math.prod(shape):,} values; at most {VALUES_MAX:,} are read:"
            f" record fewer steps, or sum them into windows"
        )


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file whole, by a temporary one of its own name beside it. Raises EnvironmentFault when that fails."""
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # noqa: PTH101  # mkstemp makes it private; what is written here is no secret
        os.replace(temporary, path)  # noqa: PTH105  # one atomic rename
        temporary = None
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def as_numbers(content: object, where: str) -> npt.NDArray[np.generic]:
    """A nested list as an array of numbers. Raises InvalidInputError when rows differ in length or hold other things."""
    try:
        array = np.array(content)
    except (ValueError, OverflowError) as error:
        raise InvalidInputError(f"{where}: rows differ in length, or are no numbers ({str(error)[:80]})") from error
    if array.dtype.kind not in "iuf":
        flat = array.reshape(-1).tolist()
        wrong = [value for value in flat if not isinstance(value, (int, float)) or isinstance(value, bool)]
        got = short_text(wrong[0]) if wrong else f"{max(flat, key=abs)}, which is beyond 64 bits"
        raise InvalidInputError(f"{where}: expected numbers; got {got}")
    return array


def why(error: Exception) -> str:
    """An operating system's reason without its path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def short_text(value: object) -> str:
    """A value of a file, as it is shown in a sentence: on one line, and not longer than one."""
    text = json.dumps(value, default=repr) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:50]}… ({len(value) if isinstance(value, (list, str, dict)) else 1} values)"
