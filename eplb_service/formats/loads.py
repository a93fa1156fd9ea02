"""What a load file is, and its loads: the one place that knows all load formats.

The content decides, not the name: `sglang` (recorder dumps), `trtllm` (statistics), `numpy`, `json`, `eplb` (our own).
Several ranks' files are given as their folder, or as a pattern such as 'dumps/*_1757*.pt'.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from eplb_service.errors import InvalidInputError
from eplb_service.formats import plain_loads, sglang_dump, trtllm_statistics
from eplb_service.formats.files import NUMPY_MAGIC, ZIP_MAGIC, names_in_zip, read_arrays, read_head, read_json, why
from eplb_service.formats.recording import LoadRecording
from eplb_service.formats.safetensors_file import is_safetensors, read_safetensors
from eplb_service.formats.sglang_dump import TokenChoices
from eplb_service.formats.torch_file import is_torch_file, read_torch

LOAD_FORMATS = ("sglang", "trtllm", "numpy", "json", "eplb")

LOOKED_FOR = (
    "looked for: sglang (.pt of the expert distribution recorder), trtllm (rank0.safetensors, …), numpy (.npy,"
    " .npz), json (loads,"
    " load_history or nested lists), eplb (.npz of `eplb load convert`)"
)
HEAD_BYTES = 64
FILES_MAX = 4096


def read_recording(path: Path, load_format: str | None = None) -> LoadRecording:
    """The loads of a file, a folder or a pattern. load_format: one of LOAD_FORMATS, None = found out.

    Raises InvalidInputError with one sentence on anything that is wrong, EnvironmentFault when a package is missing that its
    format needs.
    """
    files = files_at(path)
    found = _format_of(path, files) if load_format is None else load_format
    if found not in LOAD_FORMATS:
        raise InvalidInputError(f"{found!r} is no format of loads; they are {', '.join(LOAD_FORMATS)}")
    if found == "sglang":
        return _sglang(path, files)
    if found == "trtllm":
        return _trtllm(path, files)
    if len(files) != 1 or path.is_dir():
        raise InvalidInputError(f"{path} is {len(files)} files; {found} loads are one file")
    file = files[0]
    if found == "json" or (found == "eplb" and _is_text(file)):
        return plain_loads.json_recording(read_json(file), str(file))
    arrays = read_arrays(file)
    read = plain_loads.own_recording if found == "eplb" else plain_loads.array_recording
    return read(arrays, str(file))


def read_token_choices(path: Path) -> TokenChoices:
    """Experts that each token chose, of SGLang's `per_token` dumps: shape (tokens, layers, k). Raises as `read_recording`."""
    files = files_at(path)
    torch_files = [file for file in files if is_torch_file(file)]
    if not torch_files:
        raise InvalidInputError(f"{path} holds no token choices: looked for SGLang's dumps of mode per_token (.pt)")
    return sglang_dump.token_choices(_torch_readers(torch_files), str(path))


def files_at(path: Path) -> list[Path]:
    """The files that a path, a folder or a pattern means, by name. Raises InvalidInputError when there are none."""
    if path.is_dir():
        try:
            files = sorted(file for file in path.iterdir() if file.is_file())
        except OSError as error:
            raise InvalidInputError(f"cannot read {path}: {why(error)}") from error
        if not files:
            raise InvalidInputError(f"{path} is a folder without files; {LOOKED_FOR}")
    elif not path.exists() and glob.has_magic(str(path)):
        files = sorted(Path(name) for name in glob.glob(str(path)) if Path(name).is_file())  # noqa: PTH207  (absolute patterns too)
        if not files:
            raise InvalidInputError(f"no file matches {path}")
    else:
        head = read_head(path, HEAD_BYTES)
        if len(head) < HEAD_BYTES and not head.strip():
            raise InvalidInputError(f"{path} is empty")
        files = [path]
    if len(files) > FILES_MAX:
        raise InvalidInputError(f"{path} is {len(files)} files; at most {FILES_MAX} are read as one recording")
    return files


def _format_of(path: Path, files: list[Path]) -> str:
    """Raises InvalidInputError that says what was looked for."""
    found = {kind for file in files if (kind := _kind(file)) is not None}
    if len(files) > 1 or path.is_dir():
        several = found & {"sglang", "trtllm"}
        if len(several) == 1:
            return several.pop()
        if len(several) > 1:
            raise InvalidInputError(f"{path} holds files of SGLang and of TensorRT-LLM: give --format, or one of them")
        raise InvalidInputError(f"{path} is a folder or pattern without an engine's recording; {LOOKED_FOR}")
    if not found:
        raise InvalidInputError(f"{path} is no load file that is known here; {LOOKED_FOR}")
    return found.pop()


def _kind(file: Path) -> str | None:
    """The format of one file by its first bytes; None = none of them."""
    if trtllm_statistics.RANK_FILE.fullmatch(file.name):
        return "trtllm"
    if file.stat().st_size == 0:
        return None
    head = read_head(file, HEAD_BYTES)
    if is_torch_file(file):
        return "sglang"
    if head.startswith(NUMPY_MAGIC):
        return "numpy"
    if head.startswith(ZIP_MAGIC):
        return "eplb" if plain_loads.is_own(names_in_zip(file)) else "numpy"
    if is_safetensors(head):
        return "trtllm"
    return "json" if _is_text(file) else None


def _is_text(file: Path) -> bool:
    return read_head(file, HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")


def _torch_readers(files: list[Path]) -> Mapping[str, Callable[[], object]]:
    return {str(file): partial(read_torch, file) for file in files}


def _sglang(path: Path, files: list[Path]) -> LoadRecording:
    """Dumps of SGLang, in `.pt` or (counts as `--init-expert-location` takes them) `.json`."""
    dumps = [file for file in files if is_torch_file(file)]
    if not dumps:
        if len(files) == 1 and _is_text(files[0]):
            tree = read_json(files[0])
            if isinstance(tree, dict) and sglang_dump.is_stat(tree):
                return sglang_dump.stat_recording(tree, str(files[0]))
        raise InvalidInputError(f"{path} is no dump of SGLang's recorder: no file of torch.save, no logical_count in JSON")
    first = read_torch(dumps[0])
    if sglang_dump.is_detail(first):
        return sglang_dump.detail_recording(_torch_readers(dumps), str(path))
    if isinstance(first, dict) and sglang_dump.is_stat(first):
        if len(dumps) > 1:
            raise InvalidInputError(
                f"{path} holds {len(dumps)} dumps, {dumps[0].name} of mode stat; each of these is a recording of"
                " all ranks: give one"
            )
        return sglang_dump.stat_recording(first, str(dumps[0]))
    if isinstance(first, dict) and "physical_to_logical_map" in first:
        raise InvalidInputError(f"{dumps[0]} is a placement, not a load: give it as --current sglang:{dumps[0]}")
    keys = sorted(map(str, first))[:8] if isinstance(first, dict) else f"one {type(first).__name__}"
    raise InvalidInputError(f"{dumps[0]} is no dump of SGLang's recorder: it holds {keys}, not logical_count or records")


def _trtllm(path: Path, files: list[Path]) -> LoadRecording:
    """Statistics of TensorRT-LLM; `meta_info.json` lies beside them."""
    names = [file for file in files if trtllm_statistics.RANK_FILE.fullmatch(file.name)]
    if not names:
        raise InvalidInputError(
            f"{path} holds no rank0.safetensors, rank1.safetensors, …, as TensorRT-LLM's statistics are named"
        )
    meta = names[0].parent / trtllm_statistics.META_NAME
    ranks = {str(file): (trtllm_statistics.rank_of(file.name), partial(read_safetensors, file)) for file in names}
    return trtllm_statistics.statistics_recording(ranks, read_json(meta) if meta.is_file() else None, str(path))
