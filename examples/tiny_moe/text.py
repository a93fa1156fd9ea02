"""Kinds of text that every machine with this environment has: what the tiny MoE learns from and is asked to continue.

Nothing is copied into the repository: files are read where Python, its packages and their headers lie; logs are written by
`logs.py`. Files are split by a hash of their path: four in five teach, the fifth is held out for prompts and measurements.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from examples.tiny_moe.config import TinyMoeError
from examples.tiny_moe.logs import log_text

KINDS: Final[tuple[str, ...]] = ("code", "prose", "headers", "logs")

_FILE_BYTES_MAX = {"code": 65_536, "prose": 524_288, "headers": 65_536}
_LOG_FILE_BYTES = 65_536
_HELD_OUT_LOG_SEED = 1_000_000
_HEADER_SUFFIXES = frozenset({".h", ".hpp", ".cuh"})
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "encodings", "test", "idlelib", "__pycache__"})
_PROSE_NAMES = ("licen", "copying", "notice", "authors", "readme", "metadata", "changes", "changelog", "news")


def corpus(kind: str, *, max_bytes: int) -> bytes:
    """Training text of a kind: the same bytes at every call on one machine (other packages give other bytes).

    Args:
        kind: One of `KINDS`.
        max_bytes: Stop after so many bytes; less is returned where the machine has less.

    Raises:
        TinyMoeError: unknown kind, or this machine has no text of it.
    """
    return _joined(kind, held_out=False, max_bytes=max_bytes)


def held_out(kind: str, *, max_bytes: int) -> bytes:
    """Text of a kind that `corpus` never returns, for measuring. Arguments and errors as of `corpus`."""
    return _joined(kind, held_out=True, max_bytes=max_bytes)


def prompts(kind: str, count: int, *, length: int, seed: int) -> list[bytes]:
    """Pieces of held-out text, each beginning at a line.

    Args:
        kind: One of `KINDS`.
        count: How many.
        length: Bytes of each.
        seed: Chooses the pieces; the same seed gives the same pieces on one machine.

    Raises:
        TinyMoeError: unknown kind, a negative count, a length below 1, or too little text of that kind here.
    """
    if count < 0 or length < 1:
        raise TinyMoeError(f"asked for {count} prompts of {length} bytes; both must be positive")
    text = _prompt_text(kind)
    if len(text) < length:
        raise TinyMoeError(f"only {len(text)} bytes of held-out {kind} on this machine, prompts need {length}")
    starts = [0] + [index + 1 for index in _newlines(text) if index + 1 + length <= len(text)]
    choose = random.Random(f"{kind}:{seed}")
    return [text[start : start + length] for start in (choose.choice(starts) for _ in range(count))]


@functools.lru_cache(maxsize=len(KINDS))
def _prompt_text(kind: str) -> bytes:
    return held_out(kind, max_bytes=1_000_000)


def _newlines(text: bytes) -> Iterator[int]:
    index = text.find(b"\n")
    while index >= 0:
        yield index
        index = text.find(b"\n", index + 1)


def _joined(kind: str, *, held_out: bool, max_bytes: int) -> bytes:
    if kind not in KINDS:
        raise TinyMoeError(f"unknown kind of text {kind!r}; the kinds are {', '.join(KINDS)}")
    pieces: list[bytes] = []
    total = 0
    for piece in _pieces(kind, held_out=held_out):
        if total >= max_bytes:
            break
        pieces.append(piece)
        total += len(piece)
    if not pieces:
        raise TinyMoeError(f"this machine has no text of kind {kind}; install the project's environment (numpy, torch)")
    return b"".join(pieces)[:max_bytes]


def _pieces(kind: str, *, held_out: bool) -> Iterator[bytes]:
    if kind == "logs":
        first = _HELD_OUT_LOG_SEED if held_out else 0
        for seed in range(first, first + 256):
            yield log_text(seed, max_bytes=_LOG_FILE_BYTES)
        return
    for path, name in _files(kind):
        if _is_held_out(name) == held_out:
            piece = _read(path, _FILE_BYTES_MAX[kind])
            if piece:
                yield piece


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(f"teach:{name}".encode()).digest()[0] < 256 // 5


def _read(path: Path, max_bytes: int) -> bytes:
    """At most `max_bytes` from the head of a file; nothing when it cannot be read or is not text."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes)
    except OSError:
        return b""
    return b"" if b"\0" in data else data


@functools.lru_cache(maxsize=len(KINDS))
def _files(kind: str) -> tuple[tuple[Path, str], ...]:
    """Files of a kind with the name that orders and splits them: mixed by hash, so that no package comes first."""
    paths = sysconfig.get_paths()
    stdlib, packages = Path(paths["stdlib"]), Path(paths["purelib"])
    if kind == "code":
        found = [entry for entry in _walk(stdlib) if entry[0].suffix == ".py" and entry[0].parent.name != "pydoc_data"]
    elif kind == "prose":
        found = [entry for entry in _walk(packages) if _is_prose(*entry)]
        found += [entry for entry in _walk(stdlib) if entry[0].suffix == ".txt" or entry[1] == "pydoc_data/topics.py"]
    else:
        roots = (packages / "numpy", packages / "torch")
        found = [entry for root in roots for entry in _walk(root) if entry[0].suffix in _HEADER_SUFFIXES]
    return tuple(sorted(found, key=lambda entry: hashlib.sha256(b"order" + entry[1].encode()).digest()))


def _walk(root: Path) -> list[tuple[Path, str]]:
    """Files below a directory with their path relative to it, without other people's code, tables and test data."""
    found: list[tuple[Path, str]] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            found.append((path, path.relative_to(root).as_posix()))
    return found


def _is_prose(path: Path, name: str) -> bool:
    if path.suffix in {".py", ".so", ".pyc", ".h", ".json", ".js", ".css"}:
        return False
    in_metadata = ".dist-info/" in name and path.name.lower().startswith(_PROSE_NAMES)
    return in_metadata or path.suffix in {".rst", ".md"}
