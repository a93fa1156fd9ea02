"""How a fleet of the reference engine is laid out: plain values that travel to the rank processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.ids import DeploymentId, Phase, RankId
from eplb_service.placement import fewest_slots

DISPATCHES = (Dispatch.EVEN, Dispatch.NEAREST, Dispatch.WEIGHTED)
"""What this engine can do; it numbers an expert's tokens and hashes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank by itself. hook_socket: its agent process's Unix socket; empty = no hook."""

    rank_id: RankId
    node: str
    hook_socket: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What stays of a layer on every rank when the group changes: E, S, and the width of its replica tables."""

    num_experts: int
    slots: int
    table_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """One expert-parallel group, the same on all its ranks.

    Attributes:
        deployment: Name of the group for the planner.
        model_factory: `module:callable` without arguments that returns a `ServedModel`, numerics set up and self-checked.
        model_name: Name of the model within the deployment.
        rank_ids: Stable ids in column order of placements; [0, 1, 2, 3] or [4, 5, 6, 7], …
        nodes: Name of each rank's node.
        slots_per_rank: S in every MoE layer; 0 = the fewest that hold all experts, and one more.
        replica_table_width: Most replicas of an expert; 0 = as many as any map can have. Stays when the group changes.
        run_directory: Short path; holds each rank's request socket and, after a failure, its reason.
        rendezvous_host, engine_port, hook_port: Where the first rank listens for the engine's process group, and may
            listen for the hook's own groups.
        dispatch: How a token's replica is picked: `even` (in turn), `nearest` or `weighted` (see `reference.dispatch`).
        hook_sockets: Agent process's Unix socket for each rank; empty = no hook.
        hook_factory: `module:callable`, called as (port, rank config), that makes the hook in place of the real one.
            For tests: doubles, and negative controls that wrap the port.
        vote_period, window_steps, staging_bytes: K, W and the staging budget, handed to the hook.
        hook_options: Further fields of `HookConfig`, by name.
        environment, rank_environments: Variables set in all rank processes, or in those at some positions, before anything
            else happens. Ranks fork from a server process: what the launcher sets after its first launch does not reach them.
        log_to_files: Whether ranks write their output to `log_file` in place of the launcher's terminal.
        batch_max: Most requests of one rank in one step.
        queue_max: Most requests that wait at one rank; more are refused.
        prefill_tokens_max: Prompt tokens that one step of one rank takes up; a longer prompt goes alone.
        output_bytes_max: What may wait for a client that does not read before its requests pause.
        dummy_tokens: Tokens, 0 or 1, that a rank without requests computes in a step; never counted or recorded.
        survives: Whether ranks that are left go on without one that is lost, and take new ones in (`Fleet.join`).
        restores: Whether ranks that survive give their hooks the checkpoint, so that experts which no rank holds come back.
        start_timeout_s, step_timeout_s: Deadline of start-up, and of a collective within a step.
        form_timeout_s: Deadline of each wait for other ranks while the group forms again, the hook's too.
    """

    deployment: DeploymentId
    model_factory: str
    rank_ids: tuple[RankId, ...]
    nodes: tuple[str, ...]
    run_directory: str
    engine_port: int
    hook_port: int
    model_name: str = "target"
    slots_per_rank: int = 0
    replica_table_width: int = 0
    dispatch: Dispatch = Dispatch.EVEN
    rendezvous_host: str = "127.0.0.1"
    hook_sockets: tuple[str, ...] = ()
    hook_factory: str = ""
    phase: Phase = Phase.MIXED
    stage: int = 0
    capacity: float = 1.0
    vote_period: int = 4
    window_steps: int = 32
    staging_bytes: int = 16 << 20
    hook_options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    rank_environments: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    log_to_files: bool = False
    batch_max: int = 8
    queue_max: int = 256
    prefill_tokens_max: int = 256
    output_bytes_max: int = 4 << 20
    dummy_tokens: int = 0
    survives: bool = False
    restores: bool = True
    start_timeout_s: float = 60.0
    step_timeout_s: float = 120.0
    form_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what cannot be laid out. Raises InvalidInputError."""
        if not self.rank_ids or len(set(self.rank_ids)) != len(self.rank_ids) or min(self.rank_ids) < 0:
            raise InvalidInputError(f"rank ids must be unique, not negative and at least one; got {list(self.rank_ids)}")
        if len(self.nodes) != len(self.rank_ids):
            raise InvalidInputError(f"{len(self.nodes)} node names for {len(self.rank_ids)} ranks; give one for each rank")
        if self.hook_sockets and len(self.hook_sockets) != len(self.rank_ids):
            raise InvalidInputError(
                f"{len(self.hook_sockets)} hook sockets for {len(self.rank_ids)} ranks; give one each, or none"
            )
        if self.dispatch not in DISPATCHES:
            known = ", ".join(DISPATCHES)
            raise InvalidInputError(f"dispatch is {self.dispatch!r}; this engine has {known}")
        if self.dummy_tokens not in (0, 1):
            raise InvalidInputError(f"dummy_tokens is {self.dummy_tokens}; a dummy batch has 0 or 1 token")
        for name in ("vote_period", "window_steps", "batch_max", "queue_max", "prefill_tokens_max"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("slots_per_rank", "replica_table_width"):
            if getattr(self, name) < 0:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; give at least 1, or 0 for the default")

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.rank_ids)

    def regrouped(self, members: Sequence[Member], *, shape: LayerShape, engine_port: int, hook_port: int) -> FleetConfig:
        """The same fleet with other ranks, of the same shape each. Variables of processes are not kept: they were set."""
        return replace(
            self,
            rank_ids=tuple(member.rank_id for member in members),
            nodes=tuple(member.node for member in members),
            hook_sockets=tuple(member.hook_socket for member in members) if self.hook_sockets else (),
            slots_per_rank=shape.slots,
            replica_table_width=shape.table_width,
            engine_port=engine_port,
            hook_port=hook_port,
            rank_environments={},
        )

    def member(self, position: int) -> Member:
        """What a rank of the group is beside its place in it."""
        socket = self.hook_sockets[position] if self.hook_sockets else ""
        return Member(rank_id=self.rank_ids[position], node=self.nodes[position], hook_socket=socket)

    def slots(self, num_experts: int) -> int:
        """S for a layer of E experts. Raises InvalidInputError when all ranks' slots cannot hold the experts."""
        fewest = -(-num_experts // self.num_ranks)
        slots = self.slots_per_rank or fewest + 1
        if slots < fewest:
            raise InvalidInputError(
                f"{num_experts} experts do not fit {self.num_ranks} ranks x {slots} slots = {self.num_ranks * slots};"
                f" {fewest_slots(num_experts, self.num_ranks)}"
            )
        return slots

    def table_width(self, num_experts: int) -> int:
        """Most replicas that a layer's tables have room for. Raises InvalidInputError as `slots`."""
        num_physical = self.slots(num_experts) * self.num_ranks
        widest = num_physical if self.survives else num_physical - num_experts + 1  # a map may lack experts, or cover all
        return self.replica_table_width or widest


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """One rank of a fleet. position: its place in the group, the index into `rank_ids`.

    joins: it is new to a group that serves: it loads no expert, and waits until it is told which group to form.
    """

    fleet: FleetConfig
    position: int
    joins: bool = False

    @property
    def rank_id(self) -> RankId:
        """Stable id."""
        return self.fleet.rank_ids[self.position]

    @property
    def node(self) -> str:
        """Its node."""
        return self.fleet.nodes[self.position]

    @property
    def hook_socket(self) -> str | None:
        """Its agent process's socket; None = no hook."""
        return self.fleet.hook_sockets[self.position] if self.fleet.hook_sockets else None

    @property
    def request_socket(self) -> Path:
        """Where it takes requests."""
        return Path(self.fleet.run_directory) / f"rank-{self.rank_id}.sock"

    @property
    def reason_file(self) -> Path:
        """Where it writes why it stopped, when that was not asked for."""
        return Path(self.fleet.run_directory) / f"rank-{self.rank_id}.reason"

    @property
    def log_file(self) -> Path:
        """Where its output goes with `log_to_files`."""
        return Path(self.fleet.run_directory) / f"rank-{self.rank_id}.log"

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables to set in its process."""
        return {**self.fleet.environment, **self.fleet.rank_environments.get(self.position, {})}
