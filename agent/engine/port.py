"""What the hook needs from an engine, and the only way in which it sees one.

An engine adapter implements `EnginePort` and calls, from the thread that runs the model:

    hook.begin_step(num_real_tokens=…)          before the first kernel of every forward pass, real or dummy, on every rank
    hook.record(layer, experts, source=…)       with the logical ids that the router chose (real tokens only)

An engine that has `under_pressure` too (`ReportsPressure`) can hold copies back while it is busy. One that can form its group
again without a restart of the ranks that are left (`FormsAgain`) then calls, on all of them, between two steps:

    hook.reform()                               `describe` and `routing_tables` are of the new group by then

Everything that the hook writes (slot weights, routing tables) is written in place, at a step boundary, on the engine's
compute stream: captured graphs keep their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch

from eplb_service.control import Address, LayerInfo
from eplb_service.errors import EnvironmentFault
from eplb_service.ids import DeploymentId, LayerRef, Phase, RankId


class TensorKind(StrEnum):
    """How a tensor depends on the expert in its slot."""

    EXPERT = "expert"  # belongs to the expert: moves with it
    DERIVED = "derived"  # computed from the expert's tensors: re-derived after a flip (`rederive`)
    SHARED = "shared"  # one for the rank: must be bit-equal on all ranks, never moved


@dataclass(frozen=True, slots=True)
class SlotTensor:
    """One tensor of all slots of a layer. data: shape (S, …): live storage, written in place at a flip.

    layout: a tag such as `linear` or `swizzled`; must be equal on all ranks.
    """

    data: torch.Tensor
    kind: TensorKind = TensorKind.EXPERT
    layout: str = "linear"


@dataclass(frozen=True, slots=True)
class RoutingTables:
    """The tables that the engine's dispatch reads; the hook writes them in place.

    physical_to_logical: (P,) int64, -1 = empty slot.
    logical_to_physical: (E, width) int64, slots of each expert ascending, padded with -1 (never selected).
    replica_counts: (E,) int64.
    replica_shares: (E, width) float32, for an engine whose dispatch is `weighted`: the share of an expert's tokens that each
        of its replicas takes, in the order of logical_to_physical, 0 where that has -1; 1 in sum. The engine fills it when it
        loads (even shares, if it knows no better). None for every other dispatch.
    """

    physical_to_logical: torch.Tensor
    logical_to_physical: torch.Tensor
    replica_counts: torch.Tensor
    replica_shares: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """One model that the engine serves. initial: layer id → row of shape (P,), what the slots hold after loading."""

    name: str
    digest: str
    layers: tuple[LayerInfo, ...]
    initial: Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What the engine is; constant for one forming of its group.

    joins: this rank is new to a group that serves: its slots are empty (rows of -1), and it takes the map that the others
        agree on; its tables are written by the hook's start.
    dispatch: how it picks a replica, a word of `eplb_service.dispatch.Dispatch`; only `weighted` is sent shares.
    rendezvous_host, rendezvous_port: where rank `group_rank_ids[0]` may listen for the hook's own groups (TCP).
    """

    deployment: DeploymentId
    address: Address
    node: str
    group_rank_ids: tuple[RankId, ...]
    nodes: tuple[str, ...]
    phase: Phase
    stage: int
    models: tuple[EngineModel, ...]
    capacity: float
    dispatch: str
    replica_table_width: int
    rendezvous_host: str
    rendezvous_port: int
    joins: bool = False


class EnginePort(Protocol):
    """The engine, as the hook sees it. Methods are called on the engine's model thread, `fail_stop` on any."""

    def describe(self) -> EngineDescription:
        """What the engine is."""
        ...

    def slot_tensors(self, layer: LayerRef) -> Mapping[str, SlotTensor]:
        """Every tensor of the layer's experts, by name; asked once, the storage must stay."""
        ...

    def routing_tables(self, layer: LayerRef) -> RoutingTables:
        """The layer's routing tables; asked once for each forming of the group, the storage must stay until the next."""
        ...

    def rederive(self, layer: LayerRef, slots: Sequence[int]) -> None:
        """Recompute DERIVED tensors of these slots, on the compute stream; called inside the flip."""
        ...

    def weights_version(self) -> int:
        """Bumped by whatever changes weights under us: reload, sync, adapters, sleep and wake."""
        ...

    def compute_stream(self) -> torch.cuda.Stream | None:
        """The stream that runs the model; None on a device without streams."""
        ...

    def is_capturing(self) -> bool:
        """Whether a graph is being captured now: the hook then neither copies, flushes nor synchronises."""
        ...

    def fail_stop(self, reason: str) -> None:
        """This rank must not serve on: exit. Of an engine that forms again: only where that does not help either."""
        ...


class OutcomeUnknownError(EnvironmentFault):
    """The outcome of a commit is unknown here: no step may run until the group has formed again (`Hook.reform`)."""


@runtime_checkable
class FormsAgain(Protocol):
    """What an engine may have beside its port: it forms its group again in place when ranks are lost or join.

    can_reform: while True, a rank that does not know the outcome of a commit is not ended (`fail_stop`): its `begin_step`
    raises OutcomeUnknownError, until `Hook.reform` was called on all ranks of the next group.
    """

    can_reform: bool


@runtime_checkable
class ReportsPressure(Protocol):
    """What an engine may have beside its port: while it says so, no expert leaves this rank for others, nor within it."""

    def under_pressure(self) -> bool:
        """Whether copies would hurt now (requests queue, memory or links are short). Quick; asked from the hook's own thread.

        A chunk whose ranks are under pressure until its deadline is refused and tried again later.
        """
        ...
