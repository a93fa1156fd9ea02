"""What a registration must satisfy: by itself, and beside those of its group.

Planning on ranks that disagree about the model would move the wrong weights: a fallback loader that reports one expert
where its peers report 256 is refused here, by name and number, and not found later by an index out of range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

from eplb_service.control import (
    PROTOCOL_VERSION_MAX,
    PROTOCOL_VERSION_MIN,
    PROTOCOL_VERSION_OF_SHARES,
    ModelInfo,
    Registration,
)
from eplb_service.dispatch import Dispatch
from eplb_service.errors import ConflictError, InvalidInputError, UnsupportedError
from eplb_service.placement import fewest_slots

_RANK_ID_MAX = 65535
SLOTS_MAX = 1 << 26
"""Slots of all layers of all ranks; a large deployment has two million."""


def check_registration(registration: Registration, deployment: str) -> None:
    """Raise InvalidInputError unless this rank can be planned for at all; UnsupportedError when no protocol is common."""
    rank = registration.address.rank_id
    ids = registration.group_rank_ids
    if registration.deployment != deployment:
        raise InvalidInputError(f"rank {rank} registers for {registration.deployment!r}, not {deployment!r}")
    _check_protocol(registration)
    if rank not in ids or len(set(ids)) != len(ids) or not all(0 <= member <= _RANK_ID_MAX for member in ids):
        raise InvalidInputError(
            f"rank {rank} names the group {list(ids)}: give each rank once, itself among them, ids 0..{_RANK_ID_MAX}"
        )
    if not registration.node:
        raise InvalidInputError(f"rank {rank} names no node: ranks of one node are told by it")
    if not (isfinite(registration.capacity) and registration.capacity > 0):
        raise InvalidInputError(f"rank {rank} has capacity {registration.capacity}; give a finite number > 0")
    if registration.dispatch not in set(Dispatch):
        raise InvalidInputError(f"rank {rank} dispatches by {registration.dispatch!r}; known are {', '.join(Dispatch)}")
    for name in ("vote_period", "window_steps", "sub_windows", "replica_table_width"):
        if getattr(registration, name) < 1:
            raise InvalidInputError(f"rank {rank} has {name} {getattr(registration, name)}; it must be at least 1")
    if registration.staging_bytes < 0 or registration.weights_version < 0:
        raise InvalidInputError(
            f"rank {rank} has staging_bytes {registration.staging_bytes} and weights_version {registration.weights_version};"
            " both must be 0 or more"
        )
    _check_models(registration)


def _check_protocol(registration: Registration) -> None:
    rank = registration.address.rank_id
    theirs = f"{registration.protocol_min}..{registration.protocol_max}"
    if registration.protocol_max < PROTOCOL_VERSION_MIN or registration.protocol_min > PROTOCOL_VERSION_MAX:
        raise UnsupportedError(
            f"rank {rank} speaks protocol {theirs}, this planner {PROTOCOL_VERSION_MIN}..{PROTOCOL_VERSION_MAX}:"
            " upgrade the older side"
        )
    if registration.dispatch == Dispatch.WEIGHTED and registration.protocol_max < PROTOCOL_VERSION_OF_SHARES:
        raise UnsupportedError(
            f"rank {rank} dispatches by shares and speaks protocol {theirs}; shares came with {PROTOCOL_VERSION_OF_SHARES}:"
            " upgrade the rank"
        )


def _check_models(registration: Registration) -> None:
    rank, num_ranks = registration.address.rank_id, len(registration.group_rank_ids)
    slots = sum(layer.slots for model in registration.models for layer in model.layers)
    if slots * num_ranks > SLOTS_MAX:
        raise InvalidInputError(
            f"rank {rank} registers {slots} slots in all its layers: {slots * num_ranks} on {num_ranks} ranks, at most"
            f" {SLOTS_MAX} can be planned for"
        )
    names = [model.name for model in registration.models]
    if not names or len(set(names)) != len(names) or not all(names):
        raise InvalidInputError(f"rank {rank} registers the models {names}: name at least one, and each once")
    for model in registration.models:
        layer_ids = [layer.layer_id for layer in model.layers]
        if not layer_ids:
            raise InvalidInputError(
                f"rank {rank} registers model {model.name!r} with 0 MoE layers: nothing to balance; check that the"
                " engine built its expert layers, or leave the model out"
            )
        if len(set(layer_ids)) != len(layer_ids) or min(layer_ids) < 0:
            raise InvalidInputError(
                f"rank {rank} registers layers {layer_ids} of model {model.name!r}: ids are unique and >= 0"
            )
        for layer in model.layers:
            if min(layer.num_logical, layer.slots, layer.expert_bytes) < 1:
                raise InvalidInputError(
                    f"rank {rank}, layer {layer.layer_id} of model {model.name!r}: E={layer.num_logical}, slots={layer.slots},"
                    f" expert_bytes={layer.expert_bytes}; each must be at least 1"
                )
            num_physical = layer.slots * len(registration.group_rank_ids)
            if num_physical < layer.num_logical:
                raise InvalidInputError(
                    f"rank {rank}, layer {layer.layer_id} of model {model.name!r}: {len(registration.group_rank_ids)} ranks x"
                    f" {layer.slots} slots = {num_physical} cannot hold {layer.num_logical} experts;"
                    f" {fewest_slots(layer.num_logical, len(registration.group_rank_ids))}"
                )


def check_agreement(registration: Registration, peers: Iterable[Registration], *, weights_too: bool) -> None:
    """Raise ConflictError, with both values and both ranks, when a rank disagrees with a peer of its group.

    weights_too: whether the weights versions must be equal (while a group forms; later they change one after another).
    """
    known = list(peers)
    _check_nics(registration, known)
    for peer in known:
        found = _disagreement(registration, peer, weights_too=weights_too)
        if found is not None:
            what, mine, theirs = found
            raise ConflictError(
                f"rank {registration.address.rank_id} registers {what} {mine}, but rank {peer.address.rank_id} of the same"
                f" group has {theirs}: all ranks of a group must agree; check how each was started"
            )


def _check_nics(registration: Registration, peers: Sequence[Registration]) -> None:
    """Ranks of a node name a NIC all or none: one that forgot it would seem to have a whole NIC for itself."""
    rank, node = registration.address.rank_id, registration.node
    for peer in peers:
        if peer.node == node and bool(peer.nic) != bool(registration.nic):
            mine, theirs = (repr(one.nic) if one.nic else "none" for one in (registration, peer))
            raise ConflictError(
                f"rank {rank} registers NIC {mine}, but rank {peer.address.rank_id} of the same node {node} has {theirs}: give"
                " every rank of a node the name of its NIC (EPLB_NIC), or none of them"
            )


_SHARED = (
    ("group_rank_ids", "the group"),
    ("phase", "phase"),
    ("stage", "pipeline stage"),
    ("vote_period", "vote period K ="),
    ("window_steps", "window steps W ="),
    ("sub_windows", "sub-windows"),
    ("dispatch", "dispatch"),
)


def _disagreement(mine: Registration, theirs: Registration, *, weights_too: bool) -> tuple[str, object, object] | None:
    for name, what in _SHARED:
        values = getattr(mine, name), getattr(theirs, name)
        if values[0] != values[1]:
            return what, *(list(value) if isinstance(value, tuple) else value for value in values)  # type: ignore[return-value]
    if mine.protocol_min > theirs.protocol_max or mine.protocol_max < theirs.protocol_min:
        return (
            "protocol",
            f"{mine.protocol_min}..{mine.protocol_max}",
            f"{theirs.protocol_min}..{theirs.protocol_max}",
        )
    if weights_too and mine.weights_version != theirs.weights_version:
        return "weights version", mine.weights_version, theirs.weights_version
    return _models_disagreement(mine.models, theirs.models)


def _models_disagreement(mine: Sequence[ModelInfo], theirs: Sequence[ModelInfo]) -> tuple[str, object, object] | None:
    names = [model.name for model in mine], [model.name for model in theirs]
    if names[0] != names[1]:
        return "models", *names
    for model, other in zip(mine, theirs, strict=True):
        if len(model.layers) != len(other.layers):
            return f"model {model.name!r} with L =", len(model.layers), len(other.layers)
        for layer, peer_layer in zip(model.layers, other.layers, strict=True):
            for name, what in (
                ("layer_id", "layer id"),
                ("num_logical", "E ="),
                ("slots", "slots ="),
                ("expert_bytes", "expert bytes ="),
            ):
                if getattr(layer, name) != getattr(peer_layer, name):
                    where = f"model {model.name!r} layer {layer.layer_id} with {what}"
                    return where, getattr(layer, name), getattr(peer_layer, name)
        for name, what in (("digest", "digest"), ("manifest_digest", "tensor manifest digest")):
            tensor = _tensor_disagreement(model, other) if name == "manifest_digest" else None
            if tensor is not None:
                return tensor
            if getattr(model, name) != getattr(other, name):
                return f"model {model.name!r} with {what}", repr(getattr(model, name)), repr(getattr(other, name))
    return None


def _tensor_disagreement(mine: ModelInfo, theirs: ModelInfo) -> tuple[str, object, object] | None:
    """The first tensor in which two ranks differ; None = in none, or a rank does not say what its tensors are."""
    here, there = _tensors_by_layer(mine), _tensors_by_layer(theirs)
    for layer_id in sorted(here.keys() & there.keys()):
        for name in sorted(here[layer_id].keys() | there[layer_id].keys()):
            found = here[layer_id].get(name, "missing"), there[layer_id].get(name, "missing")
            if found[0] != found[1]:
                return f"model {mine.name!r} layer {layer_id} with tensor {name}:", *found
    return None


def _tensors_by_layer(model: ModelInfo) -> dict[int, dict[str, str]]:
    return {layer_id: dict(part.tensors) for part in model.tensors for layer_id in part.layer_ids}
