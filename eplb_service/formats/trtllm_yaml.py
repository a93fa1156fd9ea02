"""TensorRT-LLM's `moe_config.load_balancer` file: YAML of `num_slots`, `initial_global_assignments`, `layer_updates_per_iter`.

`initial_global_assignments` has a list of `num_slots` logical ids, rank-major, for every MoE layer by absolute id (those of a
drafter too); a layer that is not there stops the engine's start, or is left as it starts by itself. `layer_updates_per_iter:
0` keeps the placement. Other keys are refused by the engine. Two copies on one rank are allowed. Read from TensorRT-LLM's
public tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eplb_service.errors import EnvironmentFault, InvalidInputError
from eplb_service.formats.files import short_text
from eplb_service.formats.placement_rows import PlacementRows, check_writable, rows_of
from eplb_service.placement import Table

ENGINE = "TensorRT-LLM"
SLOTS, ASSIGNMENTS, UPDATES = "num_slots", "initial_global_assignments", "layer_updates_per_iter"
KEYS = (SLOTS, ASSIGNMENTS, UPDATES)
LAYER_MAX = 2**31 - 1


def looks_like_yaml(text: str) -> bool:
    """Whether a text may be this format: one of its keys starts a line."""
    return any(line.startswith(f"{key}:") for key in KEYS for line in text.splitlines())


def parse_yaml(text: str, where: str) -> PlacementRows:
    """A file's text. Raises InvalidInputError for other keys, layers that are there twice and what is no assignment."""
    content = _load(text, where)
    if not isinstance(content, Mapping) or not any(key in content for key in KEYS):
        got = f"keys {sorted(map(str, content))[:8]}" if isinstance(content, Mapping) else type(content).__name__
        raise InvalidInputError(
            f"{where} is no load_balancer file of TensorRT-LLM: looked for {', '.join(KEYS)} at its top; got {got}"
        )
    others = sorted(str(key) for key in content if key not in KEYS)
    if others:
        raise InvalidInputError(f"{where} has keys {others[:8]}, which TensorRT-LLM refuses; it knows {', '.join(KEYS)}")
    assignments, num_slots, updates = content.get(ASSIGNMENTS), content.get(SLOTS), content.get(UPDATES, 0)
    if type(num_slots) is not int or num_slots < 1:
        raise InvalidInputError(f"{where}: {SLOTS} must be a number >= 1; got {short_text(num_slots)}")
    if type(updates) is not int or updates < 0:
        raise InvalidInputError(f"{where}: {UPDATES} must be a number >= 0; got {short_text(updates)}")
    if not isinstance(assignments, Mapping) or not assignments:
        raise InvalidInputError(
            f"{where} has no {ASSIGNMENTS}: without them the engine starts as it likes, which is no placement"
        )
    for layer in assignments:
        if type(layer) is not int or not 0 <= layer <= LAYER_MAX:
            raise InvalidInputError(f"{where}: {ASSIGNMENTS} names layer {short_text(layer)}; layer ids are whole numbers >= 0")
    ordered = {layer: assignments[layer] for layer in sorted(assignments)}
    wrong = {layer: len(row) for layer, row in ordered.items() if isinstance(row, list) and len(row) != num_slots}
    if wrong:
        layer, length = next(iter(wrong.items()))
        raise InvalidInputError(f"{where}: layer {layer} has {length} slots, {SLOTS} is {num_slots} ({len(wrong)} such layers)")
    return PlacementRows(rows=rows_of(ordered, where), layer_ids=tuple(ordered), layer_updates_per_iter=updates)


def default_row(num_logical: int, num_ranks: int, slots_per_rank: int) -> list[int]:
    """How TensorRT-LLM fills a layer by itself: slot i of rank r holds expert (r * E // R + i) % E."""
    return [
        (rank * num_logical // num_ranks + slot) % num_logical for rank in range(num_ranks) for slot in range(slots_per_rank)
    ]


def yaml_bytes(table: Table, layer_updates_per_iter: int = 0) -> bytes:
    """The file of a table: one line a layer. Raises InvalidInputError for empty slots and shares."""
    check_writable(table, ENGINE, may_repeat=True)
    lines = [f"{SLOTS}: {table.num_physical}", f"{ASSIGNMENTS}:"]
    for layer, row in zip(table.layer_ids, table.physical_to_logical.tolist(), strict=True):
        lines.append(f"  {layer}: [{', '.join(map(str, row))}]")
    lines.append(f"{UPDATES}: {layer_updates_per_iter}")
    return "\n".join(lines).encode() + b"\n"


def _load(text: str, where: str) -> object:
    """YAML as plain values; a key that is there twice is refused, where PyYAML would take the last."""
    try:
        import yaml  # noqa: PLC0415  (only these files need it)
    except ImportError as error:
        raise EnvironmentFault(f"{where} is YAML, and PyYAML is not installed here: install eplb-service[trtllm]") from error
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]
        """Safe, and strict about repeated keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  (PyYAML's signature)
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = [key for key in keys if keys.count(key) > 1] if len(set(map(repr, keys))) < len(keys) else []
            if twice:
                line = node.start_mark.line + 1
                raise InvalidInputError(f"{where} has the key {short_text(twice[0])} twice in the mapping of line {line}")
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            return made

    try:
        loaded: object = yaml.load(text, Loader)  # noqa: S506  (a safe loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InvalidInputError(f"{where} is no valid YAML: {reason}") from error
    return loaded
