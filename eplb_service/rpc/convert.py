"""Between protobuf and our own values: the one place that planner, agent process and CLI import conversions from.

Every `*_from_pb` raises InvalidInputError for a message that cannot be used, naming the field and the numbers; every
`*_to_pb` does so for a value that does not fit the wire. Registrations are converted here, control messages in
`convert_control`, placements in `convert_placement`, load reports in `convert_report`, single fields in `fields`.
"""

from __future__ import annotations

from collections.abc import Sequence

from eplb_service.control import LayerInfo, LayerTensors, ModelInfo, Registration
from eplb_service.errors import InvalidInputError
from eplb_service.pb.v1 import agent_pb2
from eplb_service.policy.magnitudes import EXPERT_BYTES_MAX
from eplb_service.rpc import fields
from eplb_service.rpc.convert_control import (
    from_agent_from_pb,
    from_agent_to_pb,
    link_bytes_to_pb,
    to_rank_from_pb,
    to_rank_to_pb,
)
from eplb_service.rpc.convert_placement import placement_from_pb, placement_to_pb, table_from_pb, table_to_pb
from eplb_service.rpc.convert_report import report_from_pb, report_to_pb
from eplb_service.rpc.fields import (
    EXTENT_MAX,
    PHASES,
    address_from_pb,
    address_to_pb,
    layer_from_pb,
    layer_to_pb,
    phase_to_pb,
    whole,
)

__all__ = [
    "address_from_pb",
    "address_to_pb",
    "from_agent_from_pb",
    "from_agent_to_pb",
    "layer_from_pb",
    "layer_to_pb",
    "link_bytes_to_pb",
    "phase_to_pb",
    "placement_from_pb",
    "placement_to_pb",
    "registration_from_pb",
    "registration_to_pb",
    "report_from_pb",
    "report_to_pb",
    "table_from_pb",
    "table_to_pb",
    "to_rank_from_pb",
    "to_rank_to_pb",
]

CAPABILITIES_MAX = 256


def registration_to_pb(value: Registration) -> agent_pb2.RegisterRequest:
    """What a rank says of itself."""
    return agent_pb2.RegisterRequest(
        protocol_min=whole("protocol_min", value.protocol_min, most=EXTENT_MAX),
        protocol_max=whole("protocol_max", value.protocol_max, most=EXTENT_MAX),
        capabilities=[fields.name("capabilities", word) for word in value.capabilities],
        deployment=fields.deployment_id("deployment", value.deployment),
        phase=phase_to_pb(value.phase),
        stage=whole("stage", value.stage, most=EXTENT_MAX),
        models=[_model_to_pb(model) for model in value.models],
        address=address_to_pb(value.address),
        node=fields.name("node", value.node),
        group_rank_ids=[fields.rank_id("group_rank_ids", rank) for rank in value.group_rank_ids],
        capacity=value.capacity,
        vote_period=whole("vote_period", value.vote_period, most=EXTENT_MAX),
        window_steps=whole("window_steps", value.window_steps, most=EXTENT_MAX),
        sub_windows=whole("sub_windows", value.sub_windows, most=EXTENT_MAX),
        staging_bytes=whole("staging_bytes", value.staging_bytes),
        replica_table_width=whole("replica_table_width", value.replica_table_width, most=EXTENT_MAX),
        weights_version=whole("weights_version", value.weights_version),
        dispatch=fields.name("dispatch", value.dispatch),
        nic=_nic(value.nic),
    )


def registration_from_pb(message: agent_pb2.RegisterRequest) -> Registration:
    """What a rank says of itself. Raises InvalidInputError for what no engine can be."""
    whole("group_rank_ids", len(message.group_rank_ids), most=fields.RANK_ID_MAX + 1)
    whole("models.layers", sum(len(model.layers) for model in message.models), most=fields.LAYERS_MAX)
    whole("capabilities", len(message.capabilities), most=CAPABILITIES_MAX)
    ranks = tuple(fields.rank_id("group_rank_ids", rank) for rank in message.group_rank_ids)
    address = address_from_pb(message.address)
    if len(set(ranks)) != len(ranks) or address.rank_id not in ranks:
        raise InvalidInputError(
            f"group_rank_ids: {list(ranks)[:64]} must be unique and hold the rank itself, {address.rank_id}"
        )
    if not message.models or len({model.name for model in message.models}) != len(message.models):
        raise InvalidInputError(f"models: {len(message.models)} models; expected at least one, with unique names")
    if not 1 <= message.protocol_min <= message.protocol_max:
        raise InvalidInputError(f"protocol_min, protocol_max: {message.protocol_min} to {message.protocol_max} is no range")
    return Registration(
        deployment=fields.deployment_id("deployment", message.deployment),
        address=address,
        node=fields.name("node", message.node),
        group_rank_ids=ranks,
        phase=fields.choice("phase", message.phase, PHASES),
        stage=whole("stage", message.stage, most=EXTENT_MAX),
        models=tuple(_model_from_pb(model, f"models[{i}]") for i, model in enumerate(message.models)),
        capacity=_capacity(message.capacity),
        dispatch=fields.name("dispatch", message.dispatch),
        vote_period=whole("vote_period", message.vote_period, least=1, most=EXTENT_MAX),
        window_steps=whole("window_steps", message.window_steps, least=1, most=EXTENT_MAX),
        sub_windows=whole("sub_windows", message.sub_windows, least=1, most=EXTENT_MAX),
        staging_bytes=whole("staging_bytes", message.staging_bytes),
        replica_table_width=whole("replica_table_width", message.replica_table_width, least=1, most=EXTENT_MAX),
        weights_version=whole("weights_version", message.weights_version),
        capabilities=tuple(fields.name("capabilities", word) for word in message.capabilities),
        nic=_nic(message.nic),
        protocol_min=message.protocol_min,
        protocol_max=message.protocol_max,
    )


def _capacity(value: float) -> float:
    """Relative speed of a rank."""
    if not 0 < value < float("inf"):
        raise InvalidInputError(f"capacity: {value}; expected a finite number > 0 (1 = as the others)")
    return float(value)


def _nic(value: str) -> str:
    """Name of a NIC; empty = the rank's own."""
    return fields.name("nic", value) if value else ""


def _model_to_pb(model: ModelInfo) -> agent_pb2.ModelInfo:
    layers = [
        agent_pb2.LayerInfo(
            layer_id=whole("layers.layer_id", layer.layer_id, most=EXTENT_MAX),
            num_logical=whole("layers.num_logical", layer.num_logical, most=EXTENT_MAX),
            slots=whole("layers.slots", layer.slots, most=EXTENT_MAX),
            expert_bytes=whole("layers.expert_bytes", layer.expert_bytes, most=EXPERT_BYTES_MAX),
        )
        for layer in model.layers
    ]
    return agent_pb2.ModelInfo(
        name=fields.name("model.name", model.name),
        digest=fields.name("model.digest", model.digest),
        manifest_digest=fields.name("model.manifest_digest", model.manifest_digest),
        layers=layers,
        tensors=[_tensors_to_pb(value) for value in model.tensors],
    )


TENSORS_MAX = 1 << 16
"""Tensors in one registration's manifest of a model."""


def _tensors_to_pb(value: LayerTensors) -> agent_pb2.LayerTensors:
    """Names that are too long are cut: they are for people."""
    tensors = [
        agent_pb2.LayerTensors.Tensor(
            name=fields.text(name, most=fields.NAME_CHARACTERS_MAX),
            description=fields.text(description, most=fields.NAME_CHARACTERS_MAX),
        )
        for name, description in value.tensors
    ]
    ids = [whole("tensors.layer_ids", layer_id, most=EXTENT_MAX) for layer_id in value.layer_ids]
    return agent_pb2.LayerTensors(layer_ids=ids, tensors=tensors)


def _tensors_from_pb(messages: Sequence[agent_pb2.LayerTensors], field: str) -> tuple[LayerTensors, ...]:
    whole(f"{field}: number of layers", sum(len(message.layer_ids) for message in messages), most=fields.LAYERS_MAX)
    whole(f"{field}: number of tensors", sum(len(message.tensors) for message in messages), most=TENSORS_MAX)
    return tuple(
        LayerTensors(
            layer_ids=tuple(message.layer_ids),
            tensors=tuple(
                (fields.name(f"{field}.name", tensor.name), fields.name(f"{field}.description", tensor.description))
                for tensor in message.tensors
            ),
        )
        for message in messages
    )


def _model_from_pb(message: agent_pb2.ModelInfo, field: str) -> ModelInfo:
    fields.ascending(f"{field}.layers.layer_id", [layer.layer_id for layer in message.layers])
    layers = tuple(
        LayerInfo(
            layer_id=layer.layer_id,
            num_logical=whole(f"{field}.layers[{i}].num_logical", layer.num_logical, least=1, most=EXTENT_MAX),
            slots=whole(f"{field}.layers[{i}].slots", layer.slots, least=1, most=EXTENT_MAX),
            expert_bytes=whole(f"{field}.layers[{i}].expert_bytes", layer.expert_bytes, least=1, most=EXPERT_BYTES_MAX),
        )
        for i, layer in enumerate(message.layers)
    )
    return ModelInfo(
        name=fields.name(f"{field}.name", message.name),
        digest=fields.name(f"{field}.digest", message.digest),
        manifest_digest=fields.name(f"{field}.manifest_digest", message.manifest_digest),
        layers=layers,
        tensors=_tensors_from_pb(message.tensors, f"{field}.tensors"),
    )
