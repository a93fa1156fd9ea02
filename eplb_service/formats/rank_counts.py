"""Counts of several ranks for the same passes: what is added up, and what is the same tokens counted again.

Under data-parallel attention each rank counts the tokens that it sent (or received): ranks are added up. Where all ranks of a
tensor- parallel group see the same tokens, each of them counts all of these, and adding up would count every token once a
rank. Files say neither, but the counts do: ranks whose counts are equal in every layer of every pass counted the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import check_size
from eplb_service.formats.recording import Float64Array
from eplb_service.ids import ids_text

RANKS_MAX = 65_536
"""Most ranks of a recording: more than any fleet, and few enough to name those that are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """What one file of one rank holds.

    passes: by id, counts of logical experts of shape (L, E). digests: by id, of the counts as the rank made them: of physical
    experts where it counts those, since ranks that count what their own slots got may have equal logical counts.
    """

    rank: int
    where: str
    passes: Mapping[int, Float64Array]
    digests: Mapping[int, bytes]


def digest_of(counts: Float64Array) -> bytes:
    """Digest of counts: equal where all of them are."""
    return hashlib.blake2b(counts.tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedCounts:
    """Counts over all ranks. counts: shape (passes, L, E), in the order of pass_ids; notes: what was left out or taken once.

    leaders: one rank of each set of ranks that counted the same tokens.
    """

    counts: Float64Array
    pass_ids: tuple[int, ...]
    leaders: tuple[int, ...]
    notes: tuple[str, ...]


def merged_counts(files: Sequence[Callable[[], RankCounts]], *, what: str, where: str) -> MergedCounts:
    """Counts of all ranks for the passes that all of them recorded. what: `pass` or `iteration`; where: the folder, pattern or
    file that they are of; both for the sentences.

    Each file is read twice, so that only one is in memory at a time. Raises InvalidInputError when a rank is missing or has a
    pass twice, files differ in layers or experts, or no pass is in all of them.
    """
    digests, shape = _digests(files, what)
    ranks = tuple(sorted(digests))
    _check_ranks(ranks, where)
    common = set.intersection(*(set(mine) for mine in digests.values())) if digests else set()
    if not common:
        raise InvalidInputError(
            f"{where}: no {what} was recorded by all of the {len(ranks)} ranks: are these files of one recording?"
        )
    pass_ids = tuple(sorted(common))
    check_size((len(pass_ids), *shape), f"the recording of {len(ranks)} ranks")
    same: dict[tuple[bytes, ...], list[int]] = {}
    for rank in ranks:
        same.setdefault(tuple(digests[rank][pass_id] for pass_id in pass_ids), []).append(rank)
    leaders = tuple(sorted(group[0] for group in same.values()))
    index = {pass_id: position for position, pass_id in enumerate(pass_ids)}
    total = np.zeros((len(pass_ids), *shape), np.float64)
    for read in files:
        found = read()
        if found.rank in leaders:
            for pass_id in common & set(found.passes):
                total[index[pass_id]] += found.passes[pass_id]
    left_out = len({pass_id for mine in digests.values() for pass_id in mine} - common)
    groups = [group for group in same.values() if len(group) > 1]
    notes = [_same_text(groups, what)] if groups else []
    if left_out:
        plural = "passes" if what == "pass" else f"{what}s"
        notes.append(f"{left_out:,} {plural} that not every rank recorded are left out")
    return MergedCounts(counts=total, pass_ids=pass_ids, leaders=leaders, notes=tuple(notes))


def _digests(files: Sequence[Callable[[], RankCounts]], what: str) -> tuple[dict[int, dict[int, bytes]], tuple[int, ...]]:
    """Rank -> pass -> digest of its counts, and the shape that all counts have."""
    digests: dict[int, dict[int, bytes]] = {}
    shape: tuple[int, ...] = ()
    first_file = ""
    for read in files:
        found = read()
        mine = digests.setdefault(found.rank, {})
        for pass_id, counts in found.passes.items():
            if not shape:
                shape, first_file = counts.shape, found.where
            if counts.shape != shape:
                raise InvalidInputError(
                    f"{found.where}: {counts.shape[0]} layers x {counts.shape[1]} experts in {what} {pass_id}, but"
                    f" {first_file} has {shape[0]} x {shape[1]}: these are not ranks of one model"
                )
            if pass_id in mine:
                raise InvalidInputError(
                    f"{found.where}: {what} {pass_id} of rank {found.rank} is there twice, once in another file: give the files"
                    " of one recording, by a pattern such as 'dumps/*_1757*.pt'"
                )
            mine[pass_id] = found.digests[pass_id]
    return digests, shape


def _check_ranks(ranks: tuple[int, ...], where: str) -> None:
    most = max(ranks, default=-1)
    if most >= RANKS_MAX:
        raise InvalidInputError(f"{where} has a file of rank {most:,}; ranks are read up to {RANKS_MAX - 1:,}")
    missing = tuple(sorted(set(range(most + 1)) - set(ranks)))
    if missing:
        raise InvalidInputError(
            f"{where} has files of {_ranks_text(ranks)} but none of {_ranks_text(missing)}, whose tokens would be missing: give"
            " the folder with the files of all ranks"
        )


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ids_text(ranks)}"


def _same_text(groups: Sequence[Sequence[int]], what: str) -> str:
    sets = " / ".join(ids_text(tuple(group)) for group in groups[:4]) + (" / …" if len(groups) > 4 else "")
    each = "each set is" if len(groups) > 1 else "they are"
    return f"ranks {sets} counted the same tokens in every {what}: {each} taken once"
