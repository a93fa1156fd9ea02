"""vllm-ascend's expert map (`expert_map_path`, `expert_map_record_path`): JSON of layers, of devices, of expert ids.

`{"moe_layer_count", "layer_list": [{"layer_id", "device_count", "device_list": [{"device_id", "device_expert": [ids]}]}]}`.
The engine goes by position: `layer_list` is the MoE layers in order, which it numbers from 0 without dense ones,
`device_list` the ranks of the EP group. All devices have as many experts, no expert twice. Read from vllm-ascend's public
tree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import short_text
from eplb_service.formats.placement_rows import PlacementRows, check_writable, rows_of
from eplb_service.placement import Table

ENGINE = "vllm-ascend"
LAYERS, COUNT = "layer_list", "moe_layer_count"


def is_map(content: object) -> bool:
    """Whether a tree looks like this format."""
    return isinstance(content, Mapping) and LAYERS in content


def parse_map(content: Mapping[str, object], where: str) -> PlacementRows:
    """A file's tree. Raises InvalidInputError when counts and lists disagree, or ids are out of order."""
    layers = content.get(LAYERS)
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
        raise InvalidInputError(f"{where}: {LAYERS} must be a list of at least one layer; got {short_text(layers)}")
    if content.get(COUNT) != len(layers):
        raise InvalidInputError(f"{where}: {COUNT} is {short_text(content.get(COUNT))}, but {LAYERS} has {len(layers)} layers")
    ids = [layer.get("layer_id") for layer in layers]
    if not all(type(layer) is int and layer >= 0 for layer in ids) or ids != sorted(set(ids)):
        raise InvalidInputError(f"{where}: layer_id of the layers must be ascending, unique and >= 0; got {short_text(ids)}")
    rows: dict[int, object] = {}
    shape: tuple[int, int] | None = None
    for layer, entry in zip(ids, layers, strict=True):
        devices = _devices(entry, f"{where}: layer {layer}")
        for device, experts in enumerate(devices):
            shape = shape or (len(devices), len(experts))
            if (len(devices), len(experts)) != shape:
                raise InvalidInputError(
                    f"{where}: layer {layer} device {device} is one of {len(devices)} and has {len(experts)}"
                    " experts; the first layer"
                    f" has {shape[0]} devices of {shape[1]}"
                )
        rows[layer] = [expert for experts in devices for expert in experts]
    assert shape is not None
    is_moe_index = ids == list(range(len(ids)))
    return PlacementRows(
        rows=rows_of(rows, where),
        layer_ids=None if is_moe_index else tuple(ids),
        num_ranks=shape[0],
    )


def _devices(entry: Mapping[str, object], where: str) -> list[list[object]]:
    """Expert ids of each device of a layer."""
    devices = entry.get("device_list")
    if not isinstance(devices, list) or not devices or not all(isinstance(device, dict) for device in devices):
        raise InvalidInputError(f"{where}: device_list must be a list of at least one device; got {short_text(devices)}")
    if entry.get("device_count") != len(devices):
        raise InvalidInputError(
            f"{where}: device_count is {short_text(entry.get('device_count'))}, but device_list has {len(devices)}"
        )
    found = []
    for position, device in enumerate(devices):
        if device.get("device_id") != position:
            raise InvalidInputError(
                f"{where}: device_id {short_text(device.get('device_id'))} stands at position {position}; the"
                " engine goes by position"
            )
        experts = device.get("device_expert")
        if not isinstance(experts, list) or not experts:
            raise InvalidInputError(
                f"{where} device {position}: device_expert must be a list of expert ids; got {short_text(experts)}"
            )
        found.append(experts)
    return found


def map_bytes(table: Table) -> bytes:
    """The file of a table. Raises InvalidInputError for empty slots, shares and two copies on one rank."""
    check_writable(table, ENGINE, may_repeat=False)
    layers = [
        {
            "layer_id": index,
            "device_count": table.num_ranks,
            "device_list": [{"device_id": device, "device_expert": experts} for device, experts in enumerate(by_device)],
        }
        for index, by_device in enumerate(table.by_rank().tolist())
    ]
    return json.dumps({COUNT: table.num_layers, LAYERS: layers}, indent=1).encode() + b"\n"
