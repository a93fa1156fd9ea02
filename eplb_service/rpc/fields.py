"""Checks of single fields on their way to and from the wire: each refusal names the field, its value and what fits."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from eplb_service.control import Address
from eplb_service.errors import InvalidInputError
from eplb_service.ids import DeploymentId, GroupId, Incarnation, LayerRef, Phase, RankId
from eplb_service.pb.v1 import common_pb2

TEXT_CHARACTERS_MAX = 4096
NAME_CHARACTERS_MAX = 256
RANK_ID_MAX = 65535
LAYERS_MAX = 4096
"""Layers in one message, over all its models or tables: reading more of them would hold up everybody else."""
EXTENT_MAX = (1 << 31) - 1
BITS_63_MAX = (1 << 63) - 1
EPOCH_MAX = (1 << 31) - 1

_DEPLOYMENT = re.compile(r"[A-Za-z0-9._-]{1,128}")
_T = TypeVar("_T")


def whole(field: str, value: int, *, least: int = 0, most: int = BITS_63_MAX) -> int:
    """An integer within [least, most]."""
    if not least <= value <= most:
        raise InvalidInputError(f"{field}: {value} is out of range; expected {least} to {most}")
    return int(value)


def seconds(field: str, value: float, *, above_zero: bool = False) -> float:
    """A finite duration in seconds, >= 0 (or > 0)."""
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        raise InvalidInputError(f"{field}: {value} s; expected a finite number {'> 0' if above_zero else '>= 0'}")
    return float(value)


def text(value: str, *, most: int = TEXT_CHARACTERS_MAX) -> str:
    """Free text, mended and cut to what travels: a long or odd reason must not cost the message that carries it."""
    mended = value.encode("utf-8", "replace").decode("utf-8")
    return mended if len(mended) <= most else mended[: most - 1] + "…"


def name(field: str, value: str) -> str:
    """A name that identifies something: not empty, printable, at most NAME_CHARACTERS_MAX characters."""
    if not value or len(value) > NAME_CHARACTERS_MAX or not value.isprintable():
        raise InvalidInputError(
            f"{field}: {value[:40]!r} of {len(value)} characters; expected 1 to {NAME_CHARACTERS_MAX} printable characters"
        )
    return value


def deployment_id(field: str, value: str) -> DeploymentId:
    """A deployment's name: letters, digits, '.', '_', '-'; at most 128."""
    if not _DEPLOYMENT.fullmatch(value):
        raise InvalidInputError(
            f"{field}: {value[:40]!r} of {len(value)} characters; expected 1 to 128 letters, digits, '.', '_' or '-'"
        )
    return DeploymentId(value)


def number(field: str, value: float, *, above: float, most: float = math.inf) -> float:
    """A finite number within bounds, the lower one exclusive."""
    if not above < value <= most or not math.isfinite(value):
        limit = f" and at most {most:g}" if math.isfinite(most) else ""
        raise InvalidInputError(f"{field}: {value}; expected a finite number above {above:g}{limit}")
    return value


def rank_id(field: str, value: int) -> RankId:
    """A stable rank id, 0..65535."""
    return RankId(whole(field, value, most=RANK_ID_MAX))


def choice(field: str, value: int, table: Mapping[int, _T]) -> _T:
    """The meaning of an enum's number; "unspecified" and numbers of a later release are refused."""
    if value not in table:
        raise InvalidInputError(f"{field}: {value} is not one of {', '.join(f'{k} ({v})' for k, v in table.items())}")
    return table[value]


PHASES: dict[int, Phase] = {
    common_pb2.PHASE_PREFILL: Phase.PREFILL,
    common_pb2.PHASE_DECODE: Phase.DECODE,
    common_pb2.PHASE_MIXED: Phase.MIXED,
}


def phase_to_pb(phase: Phase) -> common_pb2.Phase:
    """Wire number of a phase."""
    return {meaning: number for number, meaning in PHASES.items()}[phase]  # type: ignore[return-value]  # enum values are ints


def address_to_pb(address: Address) -> common_pb2.Address:
    """One life of one rank."""
    return common_pb2.Address(
        rank_id=rank_id("address.rank_id", address.rank_id),
        incarnation=whole("address.incarnation", address.incarnation),
        group_id=whole("address.group_id", address.group_id),
    )


def address_from_pb(message: common_pb2.Address, field: str = "address") -> Address:
    """One life of one rank. Raises InvalidInputError naming the field that does not fit."""
    return Address(
        rank_id(f"{field}.rank_id", message.rank_id),
        Incarnation(whole(f"{field}.incarnation", message.incarnation)),
        GroupId(whole(f"{field}.group_id", message.group_id)),
    )


def layer_to_pb(layer: LayerRef, field: str = "layer") -> common_pb2.Layer:
    """A layer by model name and absolute id."""
    return common_pb2.Layer(
        model=name(f"{field}.model", layer.model), layer_id=whole(f"{field}.layer_id", layer.layer_id, most=EXTENT_MAX)
    )


def layer_from_pb(message: common_pb2.Layer, field: str = "layer") -> LayerRef:
    """A layer by model name and absolute id. Raises InvalidInputError naming the field that does not fit."""
    return LayerRef(name(f"{field}.model", message.model), whole(f"{field}.layer_id", message.layer_id, most=EXTENT_MAX))


def ascending(field: str, values: Sequence[int]) -> tuple[int, ...]:
    """Absolute layer ids: ascending, unique."""
    ids = tuple(whole(field, value, most=EXTENT_MAX) for value in values)
    for before, after in itertools.pairwise(ids):
        if after <= before:
            raise InvalidInputError(f"{field}: {after} comes after {before}; layer ids ascend and are unique")
    return ids
