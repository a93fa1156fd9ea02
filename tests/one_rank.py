"""One rank with one layer, on any device: an engine whose outputs need weights, scales, a derived product and the tables.

A hook runs in it as in any engine; it votes alone, so that what is looked at is this rank's device, or the order of its calls.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from agent.engine.port import EngineDescription, EngineModel, RoutingTables, SlotTensor, TensorKind
from agent.engine.reference.launch import free_port
from agent.hook.hook import Hook, HookConfig
from eplb_service.control import Address, Arm, Armed, Copy, Flipped, LayerChange, LayerInfo, Stage, Staged
from eplb_service.ids import ChunkId, DeploymentId, GenerationNumber, GroupId, Incarnation, LayerRef, Phase, RankId, chunk_id
from eplb_service.placement import logical_to_physical, row_digest
from tests.integration.hook_fleet import FakeAgent

LAYER = LayerRef("m", 2)
RANK = RankId(3)
NUM_LOGICAL, WIDTH = 3, 3
ROW, NEXT = (0, 1, 2, 0), (2, 0, 1, 1)
WAIT_S = 60.0


class OneRank:
    """An `EnginePort`. hidden: width of its experts. version, capturing, stopped: what it tells the hook, or was told."""

    def __init__(self, device: torch.device, *, hidden: int = 64) -> None:
        self.device, self.hidden = device, hidden
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.version, self.capturing, self.stopped = 0, False, ""
        self.rendezvous_port = free_port()
        with torch.cuda.stream(self.stream):
            weight = torch.stack([expert_weight(expert, hidden) for expert in ROW]).to(device)
            self.weight = weight.transpose(1, 2).contiguous().transpose(1, 2)  # column-major, as kernels like it
            self.scale = torch.tensor([1.0 + expert for expert in ROW], device=device)
            self.product = self.scale * 2
        self.tensors = {
            "weight": SlotTensor(self.weight),
            "scale": SlotTensor(self.scale),
            "product": SlotTensor(self.product, TensorKind.DERIVED),
        }
        logical = torch.from_numpy(logical_to_physical(np.array([ROW], np.int32), NUM_LOGICAL, WIDTH)[0].astype(np.int64))
        self.tables = RoutingTables(
            torch.tensor(ROW, device=device), logical.to(device), torch.tensor([2, 1, 1], device=device)
        )
        self.finish()

    def finish(self) -> None:
        """Wait for the device."""
        if self.stream is not None:
            self.stream.synchronize()

    def describe(self) -> EngineDescription:
        size = self.hidden * self.hidden * 4 + 4
        info = LayerInfo(layer_id=LAYER.layer_id, num_logical=NUM_LOGICAL, slots=len(ROW), expert_bytes=size)
        return EngineDescription(
            deployment=DeploymentId("one"),
            address=Address(RANK, Incarnation(1), GroupId(1)),
            node="n",
            group_rank_ids=(RANK,),
            nodes=("n",),
            phase=Phase.DECODE,
            stage=0,
            models=(EngineModel(name=LAYER.model, digest="d", layers=(info,), initial={LAYER.layer_id: ROW}),),
            capacity=1.0,
            dispatch="even",
            replica_table_width=WIDTH,
            rendezvous_host="127.0.0.1",
            rendezvous_port=self.rendezvous_port,
        )

    def slot_tensors(self, layer: LayerRef) -> Mapping[str, SlotTensor]:
        return self.tensors

    def routing_tables(self, layer: LayerRef) -> RoutingTables:
        return self.tables

    def rederive(self, layer: LayerRef, slots: Sequence[int]) -> None:
        for slot in slots:
            self.product[slot] = self.scale[slot] * 2

    def weights_version(self) -> int:
        return self.version

    def compute_stream(self) -> torch.cuda.Stream | None:
        return self.stream

    def is_capturing(self) -> bool:
        if self.stream is None:
            return self.capturing
        with torch.cuda.stream(self.stream):
            return torch.cuda.is_current_stream_capturing()

    def fail_stop(self, reason: str) -> None:
        self.stopped = reason

    def forward(self, inputs: torch.Tensor, expert: int) -> torch.Tensor:
        """One expert's output through the first slot that the table names: everything by address, nothing by value."""
        slot = self.tables.logical_to_physical[expert, :1]
        weight, scale = self.weight.index_select(0, slot)[0], self.scale.index_select(0, slot)
        return inputs @ weight * scale + self.product.index_select(0, slot)

    def wrong(self) -> list[str]:
        """What of the slots and tables is not as the row in the tables says."""
        self.finish()
        row = self.tables.physical_to_logical.tolist()
        found = []
        for slot, expert in enumerate(row):
            if not torch.equal(self.weight[slot].cpu(), expert_weight(expert, self.hidden)):
                found.append(f"slot {slot} has other weights than expert {expert}")
            if (self.scale[slot].item(), self.product[slot].item()) != (1.0 + expert, 2 * (1.0 + expert)):
                found.append(f"slot {slot} has another scale or product than expert {expert}")
        logical = logical_to_physical(np.array([row], np.int32), NUM_LOGICAL, WIDTH)[0].tolist()
        if self.tables.logical_to_physical.tolist() != logical:
            found.append("the table of replicas is not that of the row")
        return found

    def addresses(self) -> list[int]:
        """Where everything lies that a captured graph reads."""
        tables = (self.tables.physical_to_logical, self.tables.logical_to_physical, self.tables.replica_counts)
        return [tensor.data_ptr() for tensor in (self.weight, self.scale, self.product, *tables)]


def expert_weight(expert: int, hidden: int) -> torch.Tensor:
    """Of the checkpoint. Shape (hidden, hidden)."""
    return torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(expert))


def expected(inputs: torch.Tensor, expert: int) -> torch.Tensor:
    """What `OneRank.forward` is to give."""
    scale = 1.0 + expert
    return inputs @ expert_weight(expert, inputs.shape[1]).to(inputs.device) * scale + scale * 2


@contextmanager
def hooked(engine: OneRank) -> Iterator[tuple[Hook, FakeAgent]]:
    """A hook that is registered, and what stands for its agent process."""
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        agent = FakeAgent(f"{folder}/a.sock")
        config = HookConfig(socket_path=agent.path, staging_bytes=8 << 20, vote_period=1, window_steps=4, sub_windows=2)
        hook = Hook(engine, config)
        hook.start()
        try:
            assert hook.status.off_reason == ""
            agent.until(lambda: bool(agent.registrations), "registration")
            yield hook, agent
        finally:
            hook.close()
            agent.close()


def stage_of(agent: FakeAgent, old: Sequence[int], new: Sequence[int], sequence: int) -> Stage:
    """The order to go from one row to another."""
    moves = tuple(
        Copy(
            layer=LAYER,
            expert=expert,
            source_rank=RANK,
            source_slot=list(old).index(expert),
            target_rank=RANK,
            target_slot=slot,
        )
        for slot, expert in enumerate(new)
        if expert != old[slot]
    )
    change = LayerChange(
        layer=LAYER,
        old_digest=row_digest(LAYER, np.array(old)),
        new_digest=row_digest(LAYER, np.array(new)),
        new_row=tuple(new),
    )
    values: dict[str, Any] = {"generation": GenerationNumber(sequence), "weights_version": 0, "mesh_id": chunk_id(1, 1)}
    return Stage(
        to=agent.registrations[RANK].address,
        chunk_id=chunk_id(1, sequence),
        layers=(change,),
        copies=moves,
        stage_timeout_s=30,
        arm_ttl_s=30,
        **values,
    )


def arm(agent: FakeAgent, stage: Stage) -> ChunkId:
    """Stage a chunk and arm it."""
    agent.send(stage)
    agent.until(lambda: bool(agent.answers(Staged, stage.chunk_id)), "Staged")
    agent.send(Arm(to=stage.to, chunk_id=stage.chunk_id))
    agent.until(lambda: bool(agent.answers(Armed, stage.chunk_id)), "Armed")
    return stage.chunk_id


def step_until(condition: Callable[[], bool], step: Callable[[], None], what: str) -> None:
    """Run steps until something is so."""
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, f"{what} did not come within {WAIT_S} s"
        step()


def roll_out(agent: FakeAgent, old: Sequence[int], new: Sequence[int], sequence: int, step: Callable[[], None]) -> Flipped:
    """Carry a row to the rank, whole. step: runs one step of the engine."""
    chunk = arm(agent, stage_of(agent, old, new, sequence))
    step_until(lambda: bool(agent.answers(Flipped, chunk)), step, "Flipped")
    flipped: Flipped = agent.answers(Flipped, chunk)[RANK]
    return flipped
