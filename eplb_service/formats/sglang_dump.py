"""SGLang's recorder dumps (`/dump_expert_distribution_record`), as trees of numpy arrays. Read from SGLang 0.5.23.

Mode `stat` (and `stat_approx`): one file, `logical_count` int32 [buffer, L, E], a row of the buffer for each forward pass.
Rank 0 wrote it after adding up all ranks: each row becomes a window. The buffer is a ring: its order is not time, and rows
that were not filled are zero.

Mode `per_pass`: one file a rank, `records` of `forward_pass_id`, `rank`, `gatherer_key`, `global_physical_count` [L, P], and
`last_physical_to_logical_map` [L, P]. A rank counts what it dispatched (or, under DeepEP low latency, what its own slots
received), by physical expert. Counts become logical by the map of their own file, then ranks are added up (`rank_counts`);
each pass is a window. The map is that of the moment of the dump: record without rebalancing in between.

Mode `per_token`: the same, and `topk_ids_of_layer` int32 [L, tokens, 8] of physical experts, -1 where there is none.

L is all layers of the model by absolute id; dense ones have no counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import short_text
from eplb_service.formats.rank_counts import RankCounts, digest_of, merged_counts
from eplb_service.formats.recording import Float64Array, LoadRecording, checked_counts, engine_recording

RECORD_KEYS = ("forward_pass_id", "rank", "global_physical_count")
MAP_KEY = "last_physical_to_logical_map"
ADVICE = "is it a file of SGLang's expert distribution recorder (modes stat, per_pass, per_token)?"


def is_stat(tree: object) -> bool:
    """Whether a tree is a dump of mode `stat`, or what `--init-expert-location` takes as counts."""
    return isinstance(tree, Mapping) and "logical_count" in tree


def is_detail(tree: object) -> bool:
    """Whether a tree is a dump of mode `per_pass` or `per_token`."""
    return isinstance(tree, Mapping) and ("records" in tree or MAP_KEY in tree)


def stat_recording(tree: Mapping[str, object], where: str) -> LoadRecording:
    """Loads of a `stat` dump; a count of shape (L, E) is one window. Raises InvalidInputError for what is no count."""
    array = tree["logical_count"]
    array = np.array(array) if isinstance(array, list) else array
    if isinstance(array, np.ndarray) and array.ndim == 2:
        array = array[None]
    counts = checked_counts(array, f"{where}, logical_count", ("window", "layer", "expert"))
    return engine_recording(
        counts, source="SGLang, mode stat", where=where, layer_ids=range(counts.shape[1]), has_dense_rows=True
    )


def detail_recording(files: Mapping[str, Callable[[], object]], where: str) -> LoadRecording:
    """Loads of the `per_pass` or `per_token` dumps of all ranks. files: by name, how to read each; where: what they are of.

    Raises InvalidInputError when the files do not belong together, or one of them cannot be what it should.
    """
    modes: set[str] = set()

    def reader(name: str, read: Callable[[], object]) -> Callable[[], RankCounts]:
        def counts() -> RankCounts:
            dump = _dump(read(), name)
            modes.update("per_token" if "topk_ids_of_layer" in record else "per_pass" for record in dump.records)
            if len(files) == 1:
                _check_not_local(dump)
            return _rank_counts(dump)

        return counts

    made = merged_counts([reader(name, read) for name, read in files.items()], what="pass", where=where)
    mode = " and ".join(sorted(modes))
    return engine_recording(
        made.counts,
        source=f"SGLang, mode {mode}",
        where=where,
        layer_ids=range(made.counts.shape[1]),
        has_dense_rows=True,
        notes=made.notes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoices:
    """Experts that tokens were sent to. experts: shape (tokens, L, k), int32, logical ids; layer_ids: of the L MoE layers."""

    experts: npt.NDArray[np.int32]
    layer_ids: tuple[int, ...]


def token_choices(files: Mapping[str, Callable[[], object]], where: str) -> TokenChoices:
    """The choices of every token of `per_token` dumps, each token once: for which experts are used together.

    Padding and tokens without a full choice in every MoE layer are left out. Raises InvalidInputError for dumps of another
    mode.
    """
    leaders = merged_counts(
        [lambda name=name, read=read: _rank_counts(_dump(read(), name)) for name, read in files.items()],  # type: ignore[misc]
        what="pass",
        where=where,
    ).leaders
    parts: list[npt.NDArray[np.int32]] = []
    for name, read in files.items():
        dump = _dump(read(), name)
        if dump.rank not in leaders:
            continue
        for index, record in enumerate(dump.records):
            if "topk_ids_of_layer" not in record:
                raise InvalidInputError(
                    f"{name}, record {index} has no topk_ids_of_layer: record in mode per_token for choices"
                )
            parts.append(_logical_choices(record["topk_ids_of_layer"], dump, f"{name}, record {index}, topk_ids_of_layer"))
    chosen = np.concatenate(parts, axis=0) if parts else np.zeros((0, 0, 0), np.int32)
    has_experts = (chosen >= 0).any(axis=(0, 2))
    used = (chosen >= 0).any(axis=(0, 1))
    kept = chosen[:, has_experts][:, :, used]
    whole = kept[(kept >= 0).all(axis=(1, 2))]
    if not whole.size:
        raise InvalidInputError(
            f"{where}: no token has a choice in every MoE layer: start the engine's recording, serve requests, then dump it"
        )
    return TokenChoices(experts=whole, layer_ids=tuple(int(layer) for layer in np.flatnonzero(has_experts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dump:
    """A `per_pass` or `per_token` file. physical_to_logical: shape (L, P), int64."""

    where: str
    rank: int
    records: Sequence[Mapping[str, object]]
    physical_to_logical: npt.NDArray[np.int64]
    num_logical: int


def _dump(tree: object, where: str) -> _Dump:
    lacking = [key for key in ("records", MAP_KEY) if not isinstance(tree, Mapping) or key not in tree]
    if not isinstance(tree, Mapping) or lacking:
        raise InvalidInputError(f"{where} has no {' and no '.join(lacking)}; {ADVICE}")
    records = tree["records"]
    if not isinstance(records, list) or not all(isinstance(record, Mapping) for record in records):
        raise InvalidInputError(f"{where}: records must be a list of records; got {type(records).__name__}")
    if not records:
        raise InvalidInputError(
            f"{where} holds no pass: start the recording (/start_expert_distribution_record), serve requests, then dump it"
        )
    for index, record in enumerate(records):
        lacking = [key for key in RECORD_KEYS if key not in record]
        if lacking:
            raise InvalidInputError(f"{where}, record {index} has no {' and no '.join(lacking)}; {ADVICE}")
        for key in ("forward_pass_id", "rank"):
            if type(record[key]) is not int or record[key] < 0:
                raise InvalidInputError(f"{where}, record {index}: {key} must be a number >= 0; got {short_text(record[key])}")
    ranks = sorted({record["rank"] for record in records})
    if len(ranks) != 1:
        raise InvalidInputError(f"{where} holds records of ranks {ranks}; SGLang writes one file a rank")
    mapped = _map(tree[MAP_KEY], f"{where}, {MAP_KEY}")
    return _Dump(
        where=where, rank=ranks[0], records=records, physical_to_logical=mapped, num_logical=int(mapped.max(initial=0)) + 1
    )


def _map(array: object, where: str) -> npt.NDArray[np.int64]:
    """A physical-to-logical map that names every expert in every layer."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != 2 or array.size == 0:
        got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidInputError(f"{where} must be whole numbers of shape (layers, slots); got {got}")
    bad = np.argwhere((array < 0) | (array >= array.shape[1]))
    if bad.size:
        layer, slot = bad[0].tolist()
        raise InvalidInputError(
            f"{where}: layer {layer} slot {slot} holds expert {array[layer, slot]}; {array.shape[1]} slots hold experts 0 to"
            f" {array.shape[1] - 1} at most"
        )
    mapped = array.astype(np.int64)
    num_logical = int(mapped.max()) + 1
    for layer, row in enumerate(mapped):
        missing = np.flatnonzero(np.bincount(row, minlength=num_logical) == 0)
        if missing.size:
            raise InvalidInputError(f"{where}: layer {layer} has no slot for expert {missing[0]} ({missing.size} are missing)")
    return mapped


def _rank_counts(dump: _Dump) -> RankCounts:
    """A file's passes, in logical counts; what several gatherers counted in one pass is added up."""
    passes: dict[int, Float64Array] = {}
    digests: dict[int, bytes] = {}
    seen: set[tuple[int, str]] = set()
    for index, record in enumerate(dump.records):
        where = f"{dump.where}, record {index}"
        pass_id, key = record["forward_pass_id"], str(record.get("gatherer_key", ""))
        assert isinstance(pass_id, int)
        if (pass_id, key) in seen:
            raise InvalidInputError(f"{where}: pass {pass_id} of rank {dump.rank} is there twice")
        seen.add((pass_id, key))
        counts = checked_counts(record["global_physical_count"], f"{where}, global_physical_count", ("layer", "slot"))
        if counts.shape != dump.physical_to_logical.shape:
            raise InvalidInputError(
                f"{where} counts {counts.shape[0]} layers x {counts.shape[1]} slots, but {MAP_KEY} has shape"
                f" {dump.physical_to_logical.shape}"
            )
        logical = _to_logical(counts, dump)
        passes[pass_id] = passes[pass_id] + logical if pass_id in passes else logical
        digests[pass_id] = digests.get(pass_id, b"") + digest_of(counts)
    return RankCounts(rank=dump.rank, where=dump.where, passes=passes, digests=digests)


def _check_not_local(dump: _Dump) -> None:
    """Raises InvalidInputError when the only file has counts of its own rank's slots alone, as under DeepEP low latency."""
    num_physical = dump.physical_to_logical.shape[1]
    used = np.zeros(num_physical, bool)
    for record in dump.records:
        counts = record["global_physical_count"]
        if isinstance(counts, np.ndarray) and counts.shape == dump.physical_to_logical.shape:
            used |= counts.any(axis=0)
    slots = np.flatnonzero(used)
    for width in range(1, num_physical // 2 + 1):
        if slots.size and num_physical % width == 0 and slots[0] // width == slots[-1] // width == dump.rank:
            raise InvalidInputError(
                f"{dump.where} counts slots {slots[0]} to {slots[-1]} of {num_physical} alone, those of rank"
                f" {dump.rank}: give the"
                " folder with the files of all ranks"
            )


def _to_logical(counts: Float64Array, dump: _Dump) -> Float64Array:
    logical = np.zeros((counts.shape[0], dump.num_logical), np.float64)
    np.add.at(logical, (np.arange(counts.shape[0])[:, None], dump.physical_to_logical), counts)
    return logical


def _logical_choices(array: object, dump: _Dump, where: str) -> npt.NDArray[np.int32]:
    """Physical choices [L, tokens, k] as logical ones [tokens, L, k]; -1 stays."""
    num_layers, num_physical = dump.physical_to_logical.shape
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != 3 or array.shape[0] != num_layers:
        got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidInputError(f"{where} must be whole numbers of shape ({num_layers}, tokens, k); got {got}")
    bad = np.argwhere((array < -1) | (array >= num_physical))
    if bad.size:
        layer, token, choice = bad[0].tolist()
        raise InvalidInputError(
            f"{where}: layer {layer} token {token} choice {choice} is {array[layer, token, choice]}; slots run from 0 to"
            f" {num_physical - 1} (-1 is none): record with fusion of shared experts off"
        )
    chosen = dump.physical_to_logical[np.arange(num_layers)[:, None, None], array]
    return np.where(array < 0, -1, chosen).astype(np.int32).transpose(1, 0, 2)
