"""Placement files of all formats, read and written: the one place that knows them.

A file is named `[FORMAT:]PATH`. Without a format its content decides on reading, and `eplb` is written. Files are replaced
whole: a reader sees the old or the new one, also when the writer is killed, and two writers do not mix.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eplb_service.errors import BrokenInvariantError, InvalidInputError
from eplb_service.formats import eplb_json, sglang_map, trtllm_yaml, vllm_ascend_map
from eplb_service.formats.files import NUMPY_MAGIC, parse_json, read_arrays, read_head, read_text, write_atomically
from eplb_service.formats.placement_rows import (
    Expectation,
    PlacementFile,
    PlacementRows,
    check_writable,
    placement_from_rows,
)
from eplb_service.formats.torch_file import is_torch_file, read_torch
from eplb_service.ids import RankId
from eplb_service.placement import Table

PLACEMENT_FORMATS = ("eplb", "sglang", "trtllm", "vllm-ascend")

DEFAULT_ROWS: dict[str, Callable[[int, int, int], list[int]]] = {
    "sglang": sglang_map.default_row,
    "trtllm": trtllm_yaml.default_row,
}
"""How an engine fills a layer that its file leaves out; other formats have no such layers."""

LOOKED_FOR = (
    "looked for: eplb (JSON with physical_to_logical, or a list or .npy [layers, slots]), sglang (JSON with"
    " physical_to_logical_map),"
    " trtllm (YAML with num_slots), vllm-ascend (JSON with layer_list)"
)


@dataclass(frozen=True, slots=True)
class PlacementPath:
    """A file and its format; None = found out by its content, `eplb` when it is written."""

    path: Path
    format: str | None = None

    def __str__(self) -> str:
        return str(self.path)


def placement_path(text: str) -> PlacementPath:
    """`[FORMAT:]PATH`. A drive letter or a folder before the colon is no format.

    Raises InvalidInputError for a format that does not exist, and for no path.
    """
    prefix, colon, rest = text.partition(":")
    if colon and prefix in PLACEMENT_FORMATS:
        if not rest:
            raise InvalidInputError(f"{text!r} names a format and no file; give {prefix}:PATH")
        return PlacementPath(Path(rest), prefix)
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]+", prefix) and not Path(text).exists():
        raise InvalidInputError(
            f"{prefix!r} is no format of placements; they are {', '.join(PLACEMENT_FORMATS)} (for a file of that"
            f" name: ./{text})"
        )
    if not text:
        raise InvalidInputError("a placement file needs a name")
    return PlacementPath(Path(text))


def read_placement(source: PlacementPath, expected: Expectation, *, fill: str | None = None) -> PlacementFile:
    """A placement that agrees with what is expected; what a file does not say is taken from there.

    fill: format whose engine starts the layers that the file does not have; None = the file's own. Raises InvalidInputError
    with one sentence otherwise, naming layer and slot; EnvironmentFault when a package is missing that the format needs.
    """
    given, found = _rows(source)
    default_row = _default_row(given, expected, fill or found)
    made = placement_from_rows(given, expected, str(source), default_row)
    if found in ("sglang", "vllm-ascend", "trtllm"):
        try:
            check_writable(made.table, found, may_repeat=found == "trtllm")
        except InvalidInputError as error:
            raise InvalidInputError(f"{source}: {error}") from error
    return made


def _default_row(given: PlacementRows, expected: Expectation, engine: str) -> list[int] | None:
    """How an engine starts a layer of these slots; None = nobody knows."""
    ranks = expected.rank_ids or given.rank_ids or tuple(RankId(rank) for rank in range(given.num_ranks or 0))
    num_slots = given.rows.shape[1]
    if engine not in DEFAULT_ROWS or not ranks or num_slots % len(ranks):
        return None
    num_logical = expected.num_logical or given.num_logical or int(given.rows.max()) + 1
    return DEFAULT_ROWS[engine](max(1, num_logical), len(ranks), num_slots // len(ranks))


def ranks_in(source: PlacementPath, slots_per_rank: int) -> tuple[RankId, ...] | None:
    """Ranks that a file is for: it names them, or has slots for so many; None = it has not. Raises as `read_placement` does."""
    given, _ = _rows(source)
    if given.rank_ids is not None:
        return given.rank_ids
    if given.num_ranks is None and given.rows.shape[1] % slots_per_rank:
        return None
    return tuple(RankId(rank) for rank in range(given.num_ranks or given.rows.shape[1] // slots_per_rank))


def placement_bytes(
    table: Table, placement_format: str, *, num_layers: int | None = None, layer_updates_per_iter: int = 0
) -> bytes:
    """A table in a format. num_layers: of SGLang's file, dense layers too. Raises InvalidInputError for what it cannot say."""
    if placement_format == "sglang":
        return sglang_map.map_bytes(table, num_layers)
    if placement_format == "trtllm":
        return trtllm_yaml.yaml_bytes(table, layer_updates_per_iter)
    if placement_format == "vllm-ascend":
        return vllm_ascend_map.map_bytes(table)
    return eplb_json.document_bytes(table)


def format_to_write(target: PlacementPath) -> str:
    """The format that a file is written in.

    Raises InvalidInputError when its name says YAML and no format was given, and for a name that SGLang would not open.
    """
    if target.format is None and target.path.suffix.lower() in (".yaml", ".yml"):
        raise InvalidInputError(f"{target} is to be YAML, but the default format is eplb's JSON; say trtllm:{target}")
    if target.format == "sglang" and not target.path.name.endswith(sglang_map.SUFFIX):
        raise InvalidInputError(
            f"{target}: SGLang opens a JSON file only where its name ends in {sglang_map.SUFFIX} (another name it takes for the"
            f" JSON itself); say sglang:{target.path.with_suffix(sglang_map.SUFFIX)}"
        )
    return target.format or "eplb"


def write_placement(
    target: PlacementPath, table: Table, *, num_layers: int | None = None, layer_updates_per_iter: int = 0
) -> None:
    """Write a table, read the bytes back, and only then replace the file.

    Raises InvalidInputError for what the format cannot say, EnvironmentFault when the file cannot be written.
    """
    chosen = format_to_write(target)
    content = placement_bytes(table, chosen, num_layers=num_layers, layer_updates_per_iter=layer_updates_per_iter)
    expected = Expectation(model=table.model, num_logical=table.num_logical, rank_ids=table.rank_ids, layer_ids=table.layer_ids)
    again = placement_from_rows(_parse(content.decode(), chosen, str(target)), expected, str(target)).table
    if again != table:
        raise BrokenInvariantError(f"{target} in format {chosen} would not read back as it is; nothing was written")
    write_atomically(target.path, content)


def _rows(source: PlacementPath) -> tuple[PlacementRows, str]:
    """What a file says, and its format."""
    path, where = source.path, str(source)
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder; a placement is one file")
    head = read_head(path, len(NUMPY_MAGIC))
    if head == NUMPY_MAGIC and source.format in (None, "eplb"):
        return eplb_json.plain_rows(read_arrays(path)[""], where), "eplb"
    if is_torch_file(path) and source.format in (None, "sglang"):
        tree = read_torch(path)
        if not isinstance(tree, dict) or not sglang_map.is_map(tree):
            raise InvalidInputError(f"{path} is no placement of SGLang: looked for {sglang_map.KEY} in it")
        return sglang_map.parse_map(tree, where), "sglang"
    try:
        text = read_text(path)
    except InvalidInputError as error:
        raise error if source.format else InvalidInputError(f"{error}; {LOOKED_FOR}") from error
    found = source.format or _format_of(text, where)
    return _parse(text, found, where), found


def _format_of(text: str, where: str) -> str:
    """Raises InvalidInputError that says what was looked for."""
    if text.lstrip()[:1] not in ("{", "["):
        if trtllm_yaml.looks_like_yaml(text):
            return "trtllm"
        raise InvalidInputError(f"{where} is no placement file that is known here; {LOOKED_FOR}")
    content = parse_json(text, where)
    kinds = (("sglang", sglang_map.is_map), ("vllm-ascend", vllm_ascend_map.is_map), ("eplb", eplb_json.is_document))
    for name, is_it in kinds:
        if is_it(content):
            return name
    keys = sorted(content)[:8] if isinstance(content, dict) else []
    raise InvalidInputError(f"{where} has keys {keys} and is no placement file that is known here; {LOOKED_FOR}")


def _parse(text: str, placement_format: str, where: str) -> PlacementRows:
    if placement_format == "trtllm":
        return trtllm_yaml.parse_yaml(text, where)
    content = parse_json(text, where)
    if placement_format == "eplb":
        return eplb_json.parse_document(content, where)
    if not isinstance(content, dict):
        raise InvalidInputError(f"{where} is no file of {placement_format}: it holds a {type(content).__name__}, not an object")
    parse = sglang_map.parse_map if placement_format == "sglang" else vllm_ascend_map.parse_map
    return parse(content, where)
