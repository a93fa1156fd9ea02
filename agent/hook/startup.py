"""What a hook learns before its first step: what its engine is, whether that is true, and who the other ranks are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from agent.engine.port import EngineDescription, EnginePort, RoutingTables, SlotTensor, TensorKind
from agent.hook import rendezvous
from agent.hook.config import HookConfig
from agent.hook.manifest import check_initial_row, check_layer, check_tables, manifest_facts, model_infos, settled, shared_facts
from agent.hook.routing import LayerTables, check_loaded, loaded_shares
from agent.hook.stage_check import LayerShape, RankShape
from agent.transfer.gloo import GlooGroup, Store, first_line, prefixed
from agent.transfer.staging import ExpertLayout
from eplb_service.control import LayerInfo, LiveLayer, ModelInfo
from eplb_service.dispatch import Dispatch
from eplb_service.errors import ConflictError, DeadlineError, EplbError, InvalidInputError
from eplb_service.generation import AS_LOADED
from eplb_service.ids import LayerRef
from eplb_service.placement import row_digest
from eplb_service.replica_shares import as_array, as_values, even_shares
from eplb_service.staging_memory import StagingMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """An engine as found at start. problem: why nothing can be moved in it; empty when all is well.

    nic: name of this rank's NIC; empty = its own.
    """

    description: EngineDescription
    models: tuple[ModelInfo, ...]
    tensors: Mapping[LayerRef, Mapping[str, SlotTensor]]
    tables: Mapping[LayerRef, RoutingTables]
    layouts: Mapping[LayerRef, ExpertLayout]
    shape: RankShape
    live: Mapping[LayerRef, LiveLayer]
    device: torch.device
    problem: str
    nic: str = ""

    @property
    def position(self) -> int:
        """Column of this rank in rows."""
        return self.description.group_rank_ids.index(self.description.address.rank_id)


def inspect(port: EnginePort, config: HookConfig) -> EngineFacts:
    """Ask the engine everything once. Raises InvalidInputError when not even recording is possible."""
    description = port.describe()
    infos = {LayerRef(model.name, info.layer_id): info for model in description.models for info in model.layers}
    _check_description(description, infos.keys())
    num_ranks = len(description.group_rank_ids)
    tensors = {layer: settled(port.slot_tensors(layer)) for layer in infos}
    tables = {layer: port.routing_tables(layer) for layer in infos}
    rows = {
        LayerRef(model.name, layer_id): np.asarray(row, dtype=np.int32)
        for model in description.models
        for layer_id, row in model.initial.items()
    }
    layouts: dict[LayerRef, ExpertLayout] = {}
    live: dict[LayerRef, LiveLayer] = {}
    problem = ""
    weighted = description.dispatch == Dispatch.WEIGHTED
    for layer, info in infos.items():
        row, num_physical = rows.get(layer, np.empty(0, np.int32)), info.slots * num_ranks
        check_initial_row(layer, info, row, num_physical, joins=description.joins)
        entries = tuple(int(expert) for expert in row)
        shares = as_values(even_shares(row[None], info.num_logical)[0]) if weighted else None
        width = description.replica_table_width
        try:
            layouts[layer] = check_layer(layer, info, tensors[layer], tables[layer], num_physical, width, weighted=weighted)
            if not description.joins:  # whose tables are written once it knows the map
                check_loaded(layer, tables[layer], entries)
            LayerTables.derive(entries, info.num_logical, width, torch.device("cpu"), shares=shares)
            if weighted and not description.joins:
                shares = loaded_shares(layer, tables[layer], entries, info.num_logical)
        except InvalidInputError as error:
            problem = problem or str(error)
        digest = row_digest(layer, row, as_array(shares))
        live[layer] = LiveLayer(layer=layer, generation=AS_LOADED, digest=digest, row=entries, shares=shares)
    shape = RankShape(
        rank_id=description.address.rank_id,
        group_rank_ids=description.group_rank_ids,
        layers={
            layer: LayerShape(num_logical=info.num_logical, slots=info.slots, expert_bytes=info.expert_bytes)
            for layer, info in infos.items()
        },
        replica_table_width=description.replica_table_width,
        staging_bytes=config.staging_bytes,
        weighted=weighted,
    )
    return EngineFacts(
        description=description,
        models=model_infos(description, tensors),
        tensors=tensors,
        tables=tables,
        layouts=layouts,
        shape=shape,
        live=live,
        device=_device(tensors),
        problem=problem or _staging_problem(shape),
        nic=_nic(description, config.nics),
    )


def in_next_group(facts: EngineFacts, port: EnginePort, config: HookConfig) -> EngineFacts:
    """The same engine in the group that its port describes now, with that group's tables; `live` is still the old one.

    Raises ConflictError when the port describes the group that was, or another engine; InvalidInputError when its tables cannot
    hold rows of the new group.
    """
    before, after = facts.description, port.describe()
    infos = {LayerRef(model.name, info.layer_id): info for model in after.models for info in model.layers}
    _check_description(after, infos.keys())
    _check_same_engine(before, after)
    tables = {layer: port.routing_tables(layer) for layer in infos}
    for layer, info in infos.items():
        num_physical, width = info.slots * len(after.group_rank_ids), after.replica_table_width
        check_tables(layer, info, tables[layer], num_physical, width, weighted=facts.shape.weighted)
    return replace(
        facts,
        description=after,
        tables=tables,
        shape=replace(facts.shape, group_rank_ids=after.group_rank_ids),
        nic=_nic(after, config.nics),
    )


def _check_same_engine(before: EngineDescription, after: EngineDescription) -> None:
    if after.address.group_id == before.address.group_id:
        raise ConflictError(
            f"the engine describes group {after.address.group_id:#x}, in which this rank is already: describe the next group,"
            " with an id of its own, before the hook forms again"
        )
    same = {
        "rank": (before.address.rank_id, after.address.rank_id),
        "incarnation": (before.address.incarnation, after.address.incarnation),
        "deployment": (before.deployment, after.deployment),
        "layers": (_layers_of(before), _layers_of(after)),
        "dispatch": (before.dispatch, after.dispatch),
        "replica table width": (before.replica_table_width, after.replica_table_width),
    }
    for name, (was, is_now) in same.items():
        if was != is_now:
            raise ConflictError(f"the {name} of an engine stays when its group forms again; it was {was}, now it is {is_now}")


def _layers_of(description: EngineDescription) -> list[tuple[str, str, tuple[LayerInfo, ...]]]:
    return [(model.name, model.digest, model.layers) for model in description.models]


def _check_description(description: EngineDescription, layers: object) -> None:
    ranks = description.group_rank_ids
    if description.address.rank_id not in ranks or len(set(ranks)) != len(ranks):
        raise InvalidInputError(f"rank {description.address.rank_id} must be once among its group's ranks {list(ranks)}")
    if len(description.nodes) != len(ranks):
        raise InvalidInputError(f"{len(description.nodes)} nodes for {len(ranks)} ranks; name one for each")
    if not layers:
        names = [model.name for model in description.models]
        raise InvalidInputError(f"the engine registers no MoE layers (models: {names}); nothing can be balanced")


def _nic(description: EngineDescription, nics: tuple[str, ...]) -> str:
    """This rank's NIC, by its place among the ranks of its node where several are named."""
    if len(nics) < 2:
        return "".join(nics)
    own = description.group_rank_ids.index(description.address.rank_id)
    on_node = [position for position, node in enumerate(description.nodes) if node == description.nodes[own]]
    if len(nics) == len(on_node):
        return nics[on_node.index(own)]
    # A node that lost ranks must still serve: NICs only price moves.
    logger.warning(
        "hook.no_nic: EPLB_NIC names %d NICs, but node %s has %d ranks of the group; name one for each. Each rank is taken to"
        " have its own",
        len(nics),
        description.nodes[own],
        len(on_node),
    )
    return ""


def _staging_problem(shape: RankShape) -> str:
    """Staging must hold at least one layer of this rank."""
    need = StagingMemory.of((layer.slots, layer.expert_bytes) for layer in shape.layers.values()).least
    if shape.staging_bytes < need:
        return (
            f"staging of {shape.staging_bytes} bytes holds less than one layer of this rank ({need} bytes):"
            " set EPLB_STAGING_BYTES to that at least, or to 0 if nothing is to be moved"
        )
    return ""


def _device(tensors: Mapping[LayerRef, Mapping[str, SlotTensor]]) -> torch.device:
    """Where the experts are; empty tensors may be anywhere (vllm#29162)."""
    for layer in tensors.values():
        for tensor in layer.values():
            if tensor.kind is TensorKind.EXPERT and tensor.data.numel():
                return tensor.data.device
    return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Meeting:
    """What came of the rendezvous. problem: why this group cannot move anything; votes: None when ranks cannot even vote."""

    store: Store | None
    votes: GlooGroup | None
    problem: str


def meet(facts: EngineFacts, config: HookConfig) -> Meeting:
    """Find the other ranks, compare what all must share, form the vote group. Never raises for what a peer does."""
    store: Store | None = None
    try:
        store = rendezvous.open_store(facts.description, config.rendezvous_timeout_s)
        rendezvous.come(store, facts.description, rendezvous.LOADED)
        votes = gather(store, facts, config)
    except (EplbError, RuntimeError) as error:
        return Meeting(store, None, str(error) if isinstance(error, EplbError) else first_line(error))
    return Meeting(store, votes, facts.problem)


def gather(store: Store, facts: EngineFacts, config: HookConfig) -> GlooGroup:
    """The vote group of ranks that are equal in what all must share.

    Raises ConflictError naming what differs, DeadlineError when a rank does not come.
    """
    description = facts.description
    mine = {"it can move experts": "yes" if not facts.problem else facts.problem, **_shared_settings(facts, config)}
    mine |= shared_facts(facts.tensors)
    digests, manifests = manifest_facts(facts.tensors)
    mine |= digests
    rendezvous.compare(store, description, mine, config.rendezvous_timeout_s, parts=manifests)
    try:
        return GlooGroup(prefixed("vote", store), facts.position, len(description.group_rank_ids), config.rendezvous_timeout_s)
    except RuntimeError as error:
        raise DeadlineError(f"the vote group could not be formed: {first_line(error)}") from error


def _shared_settings(facts: EngineFacts, config: HookConfig) -> dict[str, str]:
    shared = {f"digest of model {model.name}": model.digest for model in facts.models}
    shared |= {f"row of layer {layer}": f"{live.digest:#x}" for layer, live in sorted(facts.live.items())}
    shared["vote period"] = str(config.vote_period)
    shared["copies within nodes and across"] = f"{config.same_node_copies} and {config.cross_node_copies}"
    shared["window steps"] = str(config.window_steps)
    shared["replica table width"] = str(facts.shape.replica_table_width)
    shared["ranks"] = str(list(facts.shape.group_rank_ids))
    return shared
