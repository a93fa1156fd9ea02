"""The flip path on CUDA tensors: other streams, asynchronous copies, captured graphs.

The order of calls is tested on any machine (tests/unit/test_hook_transfer.py). One rank votes alone: what is shown here is the
device's side; several ranks are in tests/integration.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agent.engine.port import EngineDescription, EngineModel, RoutingTables, SlotTensor, TensorKind
from agent.engine.reference.launch import free_port
from agent.hook.hook import Hook, HookConfig
from agent.transfer.checksum import checksum
from agent.transfer.streams import CudaStreams, EventPair
from eplb_service.control import Address, Arm, Armed, Copy, Flipped, LayerChange, LayerInfo, Stage, Staged
from eplb_service.ids import DeploymentId, GenerationNumber, GroupId, Incarnation, LayerRef, Phase, RankId, chunk_id
from eplb_service.placement import row_digest
from tests.integration.hook_fleet import FakeAgent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

LAYER = LayerRef("m", 2)
SLOTS, NUM_LOGICAL, WIDTH, HIDDEN = 4, 3, 3, 256
ROW, NEXT = (0, 1, 2, 0), (2, 0, 1, 1)
WAIT_S = 20.0


class CudaEngine:
    """One layer whose output depends on weights, scales, a derived product and the routing tables."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.version = 0
        self.stopped = ""
        with torch.cuda.stream(self.stream):
            weight = torch.stack([expert_weight(expert) for expert in ROW]).to(self.device)
            self.weight = weight.transpose(1, 2).contiguous().transpose(1, 2)  # column-major, as kernels like it
            self.scale = torch.tensor([1.0 + expert for expert in ROW], device=self.device)
            self.product = self.scale * 2
        self.tensors = {
            "weight": SlotTensor(self.weight),
            "scale": SlotTensor(self.scale),
            "product": SlotTensor(self.product, TensorKind.DERIVED),
        }
        first = [[0, 3, -1], [1, -1, -1], [2, -1, -1]]
        self.tables = RoutingTables(
            torch.tensor(ROW, device=self.device),
            torch.tensor(first, device=self.device),
            torch.tensor([2, 1, 1], device=self.device),
        )
        self.stream.synchronize()

    def describe(self) -> EngineDescription:
        size = HIDDEN * HIDDEN * 4 + 4
        info = LayerInfo(layer_id=2, num_logical=NUM_LOGICAL, slots=SLOTS, expert_bytes=size)
        return EngineDescription(
            deployment=DeploymentId("gpu"), address=Address(RankId(3), Incarnation(1), GroupId(1)), node="n",
            group_rank_ids=(RankId(3),), nodes=("n",), phase=Phase.DECODE, stage=0,
            models=(EngineModel(name="m", digest="d", layers=(info,), initial={2: ROW}),),
            capacity=1.0, dispatch="even", replica_table_width=WIDTH, rendezvous_host="127.0.0.1", rendezvous_port=PORT[0],
        )  # fmt: skip

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
        with torch.cuda.stream(self.stream):
            return torch.cuda.is_current_stream_capturing()

    def fail_stop(self, reason: str) -> None:
        self.stopped = reason

    def forward(self, inputs: torch.Tensor, expert: int) -> torch.Tensor:
        """One expert's output through the first slot that the table names: everything by address, nothing by value."""
        slot = self.tables.logical_to_physical[expert, :1]
        weight, scale = self.weight.index_select(0, slot)[0], self.scale.index_select(0, slot)
        return inputs @ weight * scale + self.product.index_select(0, slot)


PORT = [0]


def expert_weight(expert: int) -> torch.Tensor:
    return torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(expert))


def expected(inputs: torch.Tensor, expert: int) -> torch.Tensor:
    scale = 1.0 + expert
    return inputs @ expert_weight(expert).to(inputs.device) * scale + scale * 2


@pytest.fixture
def served() -> Iterator[tuple[CudaEngine, Hook, FakeAgent]]:
    PORT[0] = free_port()
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        agent = FakeAgent(f"{folder}/a.sock")
        engine = CudaEngine()
        config = HookConfig(socket_path=agent.path, staging_bytes=8 << 20, vote_period=1, window_steps=4, sub_windows=2)
        hook = Hook(engine, config)
        hook.start()
        assert hook.status.off_reason == ""
        agent.until(lambda: bool(agent.registrations), "registration")
        yield engine, hook, agent
        hook.close()
        agent.close()


def roll_out(
    hook: Hook, agent: FakeAgent, old: Sequence[int], new: Sequence[int], sequence: int, step: Callable[[], None]
) -> Flipped:
    chunk = chunk_id(1, sequence)
    (registration,) = agent.registrations.values()
    moves = tuple(
        Copy(
            layer=LAYER, expert=expert, source_rank=RankId(3), source_slot=list(old).index(expert), target_rank=RankId(3),
            target_slot=slot,
        )
        for slot, expert in enumerate(new)
        if expert != old[slot]
    )  # fmt: skip
    change = LayerChange(
        layer=LAYER,
        old_digest=row_digest(LAYER, np.array(old)),
        new_digest=row_digest(LAYER, np.array(new)),
        new_row=tuple(new),
    )
    values: dict[str, Any] = {"generation": GenerationNumber(sequence), "weights_version": 0, "mesh_id": chunk_id(1, 1)}
    agent.send(
        Stage(
            to=registration.address, chunk_id=chunk, layers=(change,), copies=moves, stage_timeout_s=10, arm_ttl_s=10, **values
        )
    )
    agent.until(lambda: bool(agent.answers(Staged, chunk)), "Staged")
    agent.send(Arm(to=registration.address, chunk_id=chunk))
    agent.until(lambda: bool(agent.answers(Armed, chunk)), "Armed")
    until = time.monotonic() + WAIT_S
    while not agent.answers(Flipped, chunk):
        assert time.monotonic() < until, agent.said
        step()
    flipped: Flipped = agent.answers(Flipped, chunk)[3]
    return flipped


def test_a_flip_moves_weights_scales_tables_and_derived_tensors_in_place(served: tuple[CudaEngine, Hook, FakeAgent]) -> None:
    engine, hook, agent = served
    addresses = [t.data_ptr() for t in (engine.weight, engine.scale, engine.product, engine.tables.logical_to_physical)]
    roll_out(hook, agent, ROW, NEXT, 1, lambda: hook.begin_step(num_real_tokens=1))
    engine.stream.synchronize()
    assert engine.tables.physical_to_logical.tolist() == list(NEXT)
    assert engine.tables.logical_to_physical.tolist() == [[1, -1, -1], [2, 3, -1], [0, -1, -1]]
    for slot, expert in enumerate(NEXT):
        assert torch.equal(engine.weight[slot].cpu(), expert_weight(expert))
        assert engine.scale[slot].item() == 1.0 + expert
        assert engine.product[slot].item() == 2 * (1.0 + expert)
    after = [t.data_ptr() for t in (engine.weight, engine.scale, engine.product, engine.tables.logical_to_physical)]
    assert after == addresses


def test_a_graph_captured_before_a_flip_replays_right_after_it_fastdeploy_4599(
    served: tuple[CudaEngine, Hook, FakeAgent],
) -> None:
    engine, hook, agent = served
    inputs = torch.randn(8, HIDDEN, device=engine.device)
    graph = torch.cuda.CUDAGraph()
    outputs = []
    with torch.cuda.stream(engine.stream):
        for expert in range(NUM_LOGICAL):
            engine.forward(inputs, expert)
    engine.stream.synchronize()
    with torch.cuda.graph(graph, stream=engine.stream):
        hook.begin_step(num_real_tokens=0)  # a boundary while capturing: nothing of it may land in the graph
        outputs = [engine.forward(inputs, expert) for expert in range(NUM_LOGICAL)]
        hook.record(LAYER, torch.zeros(4, 1, dtype=torch.int64, device=engine.device))

    def step() -> None:
        hook.begin_step(num_real_tokens=4)
        with torch.cuda.stream(engine.stream):
            graph.replay()
        engine.stream.synchronize()
        for expert, found in enumerate(outputs):
            torch.testing.assert_close(found, expected(inputs, expert), rtol=1e-4, atol=1e-3)

    for sequence, (old, new) in enumerate(((ROW, NEXT), (NEXT, ROW), (ROW, NEXT)), start=1):
        roll_out(hook, agent, old, new, sequence, step)
        for _ in range(3):
            step()
    agent.until(lambda: any(not window.warmup for window in agent.windows), "window")
    window = next(window for window in agent.windows if not window.warmup)
    assert int(window.tables[0].counts[:, 0, 0].sum()) == 4 * 4  # the captured recorder counted in every replay


def test_recording_and_windows_never_synchronise_the_device(served: tuple[CudaEngine, Hook, FakeAgent]) -> None:
    engine, hook, agent = served
    ids = torch.zeros(16, 2, dtype=torch.int32, device=engine.device)
    hook.begin_step(num_real_tokens=16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(engine.stream):
            for _ in range(20):
                hook.begin_step(num_real_tokens=16)
                hook.record(LAYER, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hook.status.off_reason == ""
    engine.stream.synchronize()
    hook.begin_step(num_real_tokens=0)
    agent.until(lambda: bool(agent.windows), "window")


def test_checksums_are_equal_on_both_devices() -> None:
    data = torch.randint(0, 256, (8 * ((1 << 20) + 3),), dtype=torch.uint8)
    assert int(checksum(data.cuda())) == int(checksum(data))


def test_the_compute_stream_waits_for_a_slow_copy_on_the_staging_stream_vllm_37601() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    streams = CudaStreams(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    source, target = torch.ones(1 << 22, device=device), torch.zeros(1 << 22, device=device)
    torch.cuda.synchronize()
    pair = EventPair()
    with streams.on_side_stream():
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        target.copy_(source)
        pair.record(streams)
    with streams.on_compute_stream():
        pair.hold_current_stream(1.0)
        total = target.sum()
        done = streams.record()
    done.wait_host()
    assert int(total) == 1 << 22
