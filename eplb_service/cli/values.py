"""Values of options that are more than a number or a word: sizes, experts on ranks, numbers for ranks, ranges.

Each function is the `type` of an option. It reads what is typed on a command line and what a TOML file holds (numbers, lists,
tables), and raises click.BadParameter with what was wrong and an example.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from eplb_service.errors import InvalidInputError
from eplb_service.policy.base import ExpertOnRank, FailureDomain, Resilience

if TYPE_CHECKING:
    from eplb_service.formats.placements import PlacementPath

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SLOTS_SWEPT_MAX = 64
NUMBER_FILES = (".json", ".npy", ".npz")


def _refuse(message: str) -> NoReturn:
    raise click.BadParameter(message)


def size(value: object) -> int:
    """Bytes, at least 0: `2GiB`, `500 MB`, `44040192`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(value).lower())
    if found is None or found[2] not in UNITS or isinstance(value, bool):
        _refuse(f"{value!r} is no size; give bytes, or a number with KiB, MiB, GiB, KB, MB or GB, such as 2GiB")
    return math.floor(float(found[1]) * UNITS[found[2]]) if "." in found[1] else int(found[1]) * UNITS[found[2]]


def expert_on_rank(value: object) -> ExpertOnRank:
    """`12@3`: expert 12 on rank 3 in every layer; `12@3/5`: in layer 5."""
    try:
        return ExpertOnRank.parse(str(value))
    except InvalidInputError as error:
        _refuse(str(error))


def rank_slot(value: object) -> tuple[int, int]:
    """`3:8`: slot 8 of rank 3."""
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", str(value))
    if found is None:
        _refuse(f"{value!r} is not RANK:SLOT, such as 3:8")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """A number for every rank in order, or for some by id (the others have the default of what it is)."""

    listed: tuple[float, ...] | None = None
    by_rank: tuple[tuple[int, float], ...] = ()

    def for_ranks(self, num_ranks: int, default: float, what: str) -> tuple[float, ...]:
        """One number for each of ranks 0..R-1. Raises InvalidInputError when the numbers do not fit the ranks."""
        if self.listed is not None:
            if len(self.listed) != num_ranks:
                raise InvalidInputError(f"{len(self.listed)} {what} for {num_ranks} ranks: give one a rank, or RANK=VALUE,…")
            return self.listed
        values = [default] * num_ranks
        for rank, value in self.by_rank:
            if not 0 <= rank < num_ranks:
                raise InvalidInputError(f"{what} name rank {rank}, but ranks run from 0 to {num_ranks - 1}")
            values[rank] = value
        return tuple(values)


def rank_numbers(value: object) -> RankNumbers:
    """`1,1,0.5,1`, `3=0.5,7=0.5`, or a file (.json, .npy) with a number for each rank."""
    try:
        if isinstance(value, Mapping):
            return RankNumbers(by_rank=tuple(sorted((int(rank), float(number)) for rank, number in value.items())))
        if isinstance(value, (list, tuple)):
            return RankNumbers(listed=tuple(float(number) for number in value))
        text = str(value).strip()
        if Path(text).suffix.lower() in NUMBER_FILES:
            return RankNumbers(listed=_numbers_in(Path(text)))
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts or not all("=" in part for part in parts):
            return RankNumbers(listed=tuple(float(part) for part in parts))
        pairs = sorted((int(rank), float(number)) for rank, number in (part.split("=", 1) for part in parts))
    except InvalidInputError as error:
        _refuse(str(error))
    except (TypeError, ValueError):
        _refuse(f"{value!r} is no list of numbers (1,1,0.5,…), RANK=VALUE,… or a .json or .npy file with one for each rank")
    twice = [rank for (rank, _), (other, _) in itertools.pairwise(pairs) if rank == other]
    if twice:
        _refuse(f"{value!r} names rank {twice[0]} twice")
    return RankNumbers(by_rank=tuple(pairs))


def _numbers_in(path: Path) -> tuple[float, ...]:
    """The list of numbers in a file. Raises InvalidInputError when it holds something else."""
    from eplb_service.formats.files import as_numbers, read_arrays, read_json  # noqa: PLC0415
    from eplb_service.formats.plain_loads import chosen_array  # noqa: PLC0415

    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}")
    is_json = path.suffix.lower() == ".json"
    array = as_numbers(read_json(path), str(path)) if is_json else chosen_array(read_arrays(path), str(path), ("numbers",))
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InvalidInputError(f"{path} must hold a list of one number for each rank; it has shape {array.shape}")
    return tuple(float(number) for number in array.tolist())


def resilience(value: object) -> Resilience:
    """Experts that must outlive a loss: `all`, `0.2`, `20%`; of a node, or of a rank with `:rank`."""
    share_text, _, domain_text = str(value).strip().partition(":")
    domains = [domain.value for domain in FailureDomain]
    if domain_text and domain_text not in domains:
        _refuse(f"{domain_text!r} is nothing that may be lost; it is one of {', '.join(domains)}")
    try:
        share = 1.0 if share_text == "all" else float(share_text.rstrip("%")) / (100.0 if share_text.endswith("%") else 1.0)
        return Resilience(hot_share=share, domain=FailureDomain(domain_text or "node"))
    except ValueError:
        _refuse(f"{value!r} is no share of the experts: give all, 0.2 or 20%, then :rank or :node")
    except InvalidInputError as error:
        _refuse(str(error))


def slot_range(value: object) -> range:
    """Slots per rank to try, `8..12`: both ends are meant."""
    found = re.fullmatch(r"\s*(\d+)\s*(?:\.\.|-)\s*(\d+)\s*", str(value))
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        _refuse(f"{value!r} is no range of slots per rank; give FROM..TO, such as 8..12")
    chosen = range(int(found[1]), int(found[2]) + 1)
    if len(chosen) > SLOTS_SWEPT_MAX:
        _refuse(f"{len(chosen)} choices of slots per rank; at most {SLOTS_SWEPT_MAX} are tried")
    return chosen


def nodes(value: object) -> int | tuple[str, ...]:
    """How many nodes, or the node of each rank by name: `4`, `a,a,a,b,b`."""
    return _number_or_names(value, "node", "a number of nodes")


def nics(value: object) -> int | tuple[str, ...]:
    """How many NICs every node has, or the NIC of each rank by name: `4`, `x,x,y,y`."""
    return _number_or_names(value, "NIC", "the NICs of a node as a number")


def _number_or_names(value: object, thing: str, number: str) -> int | tuple[str, ...]:
    """How many of something, or the one of each rank by name."""
    parts = [str(part).strip() for part in value] if isinstance(value, (list, tuple)) else str(value).split(",")
    names = tuple(part.strip() for part in parts)
    if len(names) == 1 and re.fullmatch(r"-?\d+", names[0]):
        return int(names[0])
    if not all(names):
        _refuse(f"{value!r} leaves a rank without a {thing}; give {number}, or the {thing} of each rank: a,a,b,b")
    return names


def placement_file(value: object) -> PlacementPath:
    """`[FORMAT:]PATH` of a placement: `plan.json`, `sglang:map.json`, `trtllm:balancer.yaml`."""
    from eplb_service.formats.placements import placement_path  # noqa: PLC0415  (keeps `eplb plan --help` quick)

    try:
        return placement_path(str(value))
    except InvalidInputError as error:
        _refuse(str(error))


def layer_ids(value: object) -> tuple[int, ...]:
    """Absolute ids of MoE layers, ascending: `3..60`, `1,3,5..7`."""
    found: list[int] = []
    for part in str(value).split(","):
        ends = re.fullmatch(r"\s*(\d{1,6})\s*(?:(?:\.\.|-)\s*(\d{1,6})\s*)?", part)
        if ends is None:
            _refuse(f"{value!r} is no list of layer ids, such as 3..60 or 1,3,5")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    if not found or found != sorted(set(found)):
        _refuse(f"{value!r} must name layers in ascending order, each once, such as 3..60")
    return tuple(found)
