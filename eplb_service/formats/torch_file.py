"""Files of `torch.save` as plain trees: dicts, lists, numbers, text and numpy arrays. Pickled objects are refused, never
loaded.

The one place in the service that imports torch, when such a file is read.
"""

from __future__ import annotations

import math
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from eplb_service.errors import EnvironmentFault, InvalidInputError
from eplb_service.formats.files import VALUES_MAX, ZIP_MAGIC, check_size, names_in_zip, read_head, why

if TYPE_CHECKING:
    import torch

FILE_BYTES_MAX = 64 * 2**30
"""Most bytes that a file unpacks to; a tensor is mapped into memory, not read, until it is used."""

LEGACY_MAGIC = b"\x80"
DEPTH_MAX = 20


def is_torch_file(path: Path) -> bool:
    """Whether a file is what `torch.save` writes: a zip archive with `data.pkl`, or (before 1.6) a bare pickle.

    Raises InvalidInputError for an archive that is cut short.
    """
    head = read_head(path, 2)
    if head.startswith(LEGACY_MAGIC):
        return True
    return head.startswith(ZIP_MAGIC) and any(name.rsplit("/", 1)[-1] == "data.pkl" for name in names_in_zip(path))


def read_torch(path: Path) -> object:
    """The tree in a file, tensors as numpy arrays.

    Raises InvalidInputError when it holds pickled objects, is cut short or larger than the bounds; EnvironmentFault when
    torch is not installed.
    """
    head = read_head(path, 2)
    try:
        import torch  # noqa: PLC0415  (large; only these files need it)
    except ImportError as error:
        raise EnvironmentFault(
            f"{path} is a file of torch, which is not installed here: install eplb-service[sglang], or torch itself"
        ) from error
    is_zip = head == ZIP_MAGIC
    try:
        if is_zip:
            _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of pickles that it then refuses
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except InvalidInputError:
        raise
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {why(error)}") from error
    except Exception as error:  # torch raises what its parts raise: RuntimeError, UnpicklingError, EOFError, KeyError, …
        reason = str(error).strip()
        if "weights" in reason.lower() or "unsupported" in reason.lower():
            raise InvalidInputError(
                f"{path} holds pickled Python objects, which are never loaded here: a recording holds tensors and"
                " plain values alone"
            ) from error
        first = reason.splitlines()[0][:120] if reason else type(error).__name__
        raise InvalidInputError(f"cannot read {path} as a file of torch: {first}") from error
    return _plain(loaded, str(path), 0, torch)


def _check_archive(path: Path) -> None:
    """Raises InvalidInputError for an archive that unpacks to more than it should. `torch.save` compresses nothing."""
    with zipfile.ZipFile(path) as archive:
        total = sum(member.file_size for member in archive.infolist())
        packed = any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())
    if packed or total > FILE_BYTES_MAX:
        raise InvalidInputError(
            f"{path} unpacks to {total:,} bytes{' and is compressed' if packed else ''}: torch.save compresses"
            " nothing, and at most"
            f" {FILE_BYTES_MAX:,} bytes are read"
        )


def _plain(value: object, where: str, depth: int, torch_module: object) -> object:
    if depth > DEPTH_MAX:
        raise InvalidInputError(f"{where} is nested more than {DEPTH_MAX} deep")
    if isinstance(value, dict):
        return {key: _plain(item, where, depth + 1, torch_module) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1, torch_module) for item in value]
    if isinstance(value, torch_module.Tensor):  # type: ignore[attr-defined]
        return _array(value, where)
    return value


def _array(tensor: torch.Tensor, where: str) -> object:
    """A tensor as an array that shares its memory; its shape may claim more than is stored (stride 0), so it is bounded."""
    shape = tuple(tensor.shape)
    if math.prod(shape) > VALUES_MAX:
        check_size(shape, where)
    try:
        return tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise InvalidInputError(
            f"{where} holds a tensor of {tensor.dtype} and layout {tensor.layout}, which is no count"
        ) from error
