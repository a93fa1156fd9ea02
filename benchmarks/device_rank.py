"""A rank on a device for `benchmarks.gpu`: an engine whose steps read all its weights, a hook, and what is asked of both.

Needs torch, numpy and the standard library. Every rank is a process of its own; all may share one device.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from agent.engine.port import EngineDescription, EngineModel, RoutingTables, SlotTensor, TensorKind
from agent.hook.hook import Hook, HookConfig
from agent.transfer.checksum import checksum
from agent.transfer.memory_handles import allocate_shared
from agent.transfer.staging import ExpertLayout
from agent.transfer.streams import EventPair
from eplb_service.control import Address, LayerInfo
from eplb_service.ids import DeploymentId, GroupId, Incarnation, LayerRef, Phase, RankId
from eplb_service.placement import logical_to_physical

MODEL = "device"
WIDTH = 8
POISON = 0xFF
"""Every float of these bytes is no number: nothing of it can reach an output unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured. hidden, inner: widths of an expert. repeats: passes of a step. staged: experts of a measured flip."""

    ranks: int
    layers: int
    experts: int
    slots: int
    hidden: int
    inner: int
    batch: int
    repeats: int
    staged: int

    @property
    def expert_bytes(self) -> int:
        """Of one expert: two matrices of bf16, and a scale of four bytes."""
        return 3 * self.hidden * self.inner * 2 + 4

    @property
    def layer_refs(self) -> tuple[LayerRef, ...]:
        """All layers."""
        return tuple(LayerRef(MODEL, layer_id) for layer_id in range(self.layers))

    @property
    def row(self) -> tuple[int, ...]:
        """What every layer is loaded by."""
        return tuple(slot % self.experts for slot in range(self.ranks * self.slots))

    @property
    def staging_bytes(self) -> int:
        """Room for one whole layer of a rank."""
        return self.slots * self.expert_bytes


class DeviceEngine:
    """An `EnginePort`. Outputs need every byte of the weights, scales, a derived product and the routing tables."""

    def __init__(self, sizes: Sizes, position: int, device: torch.device, rendezvous_port: int, *, readable: bool) -> None:
        self.sizes, self.position, self.device, self.port = sizes, position, device, rendezvous_port
        self.stopped = ""
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.tensors: dict[LayerRef, dict[str, SlotTensor]] = {}
        self.tables: dict[LayerRef, RoutingTables] = {}
        with torch.cuda.stream(self.stream):
            for layer in sizes.layer_refs:
                self._load(layer, readable=readable)
            self.inputs = torch.randn(sizes.batch, sizes.hidden, generator=torch.Generator().manual_seed(7)).to(
                device, torch.bfloat16
            )
            shape = (sizes.layers, sizes.experts, sizes.batch, sizes.hidden)
            self.outputs = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.finish()
        self._graph = self._captured() if self.stream is not None else None

    def _load(self, layer: LayerRef, *, readable: bool) -> None:
        sizes = self.sizes
        shapes = {"down": (sizes.hidden, sizes.inner), "gate_up": (2 * sizes.inner, sizes.hidden)}
        named = {name: self._empty((sizes.slots, *shape), torch.bfloat16, readable=readable) for name, shape in shapes.items()}
        named["scale"] = self._empty((sizes.slots,), torch.float32, readable=readable)
        for slot, expert in enumerate(self.local(sizes.row)):
            for name, value in self.expert(layer, expert).items():
                named[name][slot] = value
        self.tensors[layer] = {name: SlotTensor(tensor) for name, tensor in named.items()}
        self.tensors[layer]["product"] = SlotTensor(named["scale"] * 2, TensorKind.DERIVED)
        row = np.array([sizes.row], np.int32)
        logical = torch.from_numpy(logical_to_physical(row, sizes.experts, WIDTH)[0].astype(np.int64))
        counts = torch.from_numpy(np.bincount(row[0], minlength=sizes.experts).astype(np.int64))
        self.tables[layer] = RoutingTables(
            torch.from_numpy(row[0].astype(np.int64)).to(self.device), logical.to(self.device), counts.to(self.device)
        )

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, readable: bool) -> torch.Tensor:
        if self.device.type == "cpu" and readable:
            size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
            return allocate_shared(size).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def expert(self, layer: LayerRef, expert: int) -> dict[str, torch.Tensor]:
        """As in the checkpoint."""
        sizes = self.sizes
        random = torch.Generator(self.device).manual_seed(1000 * layer.layer_id + expert)
        made = {}
        for name, shape in (("down", (sizes.hidden, sizes.inner)), ("gate_up", (2 * sizes.inner, sizes.hidden))):
            value = torch.empty(shape, dtype=torch.float32, device=self.device)
            made[name] = (value.normal_(generator=random) / shape[1] ** 0.5).to(torch.bfloat16)
        made["scale"] = torch.tensor(1.0 + expert / 8 + layer.layer_id, device=self.device)
        return made

    def local(self, row: Sequence[int]) -> Sequence[int]:
        """This rank's part of a row."""
        return row[self.position * self.sizes.slots : (self.position + 1) * self.sizes.slots]

    def finish(self) -> None:
        """Wait for the device."""
        if self.stream is not None:
            self.stream.synchronize()

    # ── the port ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def describe(self) -> EngineDescription:
        """Who it is."""
        sizes = self.sizes
        ranks = tuple(RankId(rank) for rank in range(sizes.ranks))
        layers = tuple(
            LayerInfo(layer_id=layer.layer_id, num_logical=sizes.experts, slots=sizes.slots, expert_bytes=sizes.expert_bytes)
            for layer in sizes.layer_refs
        )
        initial = {layer.layer_id: sizes.row for layer in sizes.layer_refs}
        return EngineDescription(
            deployment=DeploymentId("device"),
            address=Address(ranks[self.position], Incarnation(self.position + 1), GroupId(1)),
            node="node",
            group_rank_ids=ranks,
            nodes=("node",) * sizes.ranks,
            phase=Phase.DECODE,
            stage=0,
            models=(EngineModel(name=MODEL, digest="d", layers=layers, initial=initial),),
            capacity=1.0,
            dispatch="even",
            replica_table_width=WIDTH,
            rendezvous_host="127.0.0.1",
            rendezvous_port=self.port,
        )

    def slot_tensors(self, layer: LayerRef) -> Mapping[str, SlotTensor]:
        """Live storage."""
        return self.tensors[layer]

    def routing_tables(self, layer: LayerRef) -> RoutingTables:
        """Live storage."""
        return self.tables[layer]

    def rederive(self, layer: LayerRef, slots: Sequence[int]) -> None:
        """What follows from a scale."""
        named = self.tensors[layer]
        for slot in slots:
            named["product"].data[slot] = named["scale"].data[slot] * 2

    def weights_version(self) -> int:
        """Nobody else changes weights."""
        return 0

    def compute_stream(self) -> torch.cuda.Stream | None:
        """Where passes run, ahead of copies."""
        return self.stream

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        if self.stream is None:
            return False
        with torch.cuda.stream(self.stream):
            return torch.cuda.is_current_stream_capturing()

    def fail_stop(self, reason: str) -> None:
        """Remember why."""
        self.stopped = reason

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _of(self, gate_up: torch.Tensor, down: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        gate, up = (self.inputs @ gate_up.t()).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up) @ down.t() * factor.to(torch.bfloat16)

    def _pass(self) -> None:
        """Every slot serves the expert that the table names: all by address, nothing by value."""
        for index, layer in enumerate(self.sizes.layer_refs):
            named, first = self.tensors[layer], self.position * self.sizes.slots
            for slot in range(self.sizes.slots):
                found = self._of(named["gate_up"].data[slot], named["down"].data[slot], named["product"].data[slot])
                expert = self.tables[layer].physical_to_logical[first + slot : first + slot + 1]
                self.outputs[index].index_copy_(0, expert, found[None])

    def _captured(self) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self.stream):
            self._pass()
        self.finish()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._pass()
        return graph

    def step(self) -> None:
        """One decode step, replayed from the graph that was captured before any flip."""
        with torch.cuda.stream(self.stream):
            for _ in range(self.sizes.repeats):
                if self._graph is not None:
                    self._graph.replay()
                else:
                    self._pass()

    def wrong(self, rows: Mapping[int, Sequence[int]]) -> list[str]:
        """What of slots, and of the outputs of the next step, is not as it must be under these rows, by layer id."""
        with torch.cuda.stream(self.stream):
            self.outputs.fill_(float("nan"))
        self.step()
        self.finish()
        found = []
        for index, layer in enumerate(self.sizes.layer_refs):
            named = self.tensors[layer]
            if self.tables[layer].physical_to_logical.tolist() != list(rows[layer.layer_id]):
                found.append(f"{layer}: the tables have another row")
            for slot, expert in enumerate(self.local(rows[layer.layer_id])):
                fresh = self.expert(layer, expert)
                for name, value in fresh.items():
                    if not torch.equal(named[name].data[slot], value):
                        found.append(f"{layer} slot {slot}: {name} is not expert {expert}'s")
                expected = self._of(fresh["gate_up"], fresh["down"], fresh["scale"] * 2)
                if not torch.allclose(self.outputs[index, expert].float(), expected.float(), rtol=0.02, atol=0.02):
                    found.append(f"{layer} slot {slot}: a replayed step does not give what expert {expert} gives")
        return found


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class DeviceRank:
    """Answers what `benchmarks.gpu` asks."""

    def __init__(self, engine: DeviceEngine, hook: Hook) -> None:
        self.engine, self.hook = engine, hook

    def steps(self, count: int, *, works: bool) -> float:
        """Seconds of a step, mean of `count`. works: passes run, as they do on the rank that is looked at."""
        self.engine.finish()
        began = time.perf_counter()
        for _ in range(count):
            self.hook.begin_step(num_real_tokens=self.engine.sizes.batch)
            if works:
                self.engine.step()
                self.engine.finish()
        return (time.perf_counter() - began) / count

    def check(self, rows: Mapping[int, Sequence[int]]) -> list[str]:
        """See `DeviceEngine.wrong`; and why the hook takes no part, if it does not."""
        off = self.hook.status.off_reason or self.engine.stopped
        return [*self.engine.wrong(rows), *([off] if off else [])]

    def poison(self) -> int:
        """Fill all memory that experts pass through. Only while no chunk is open. Returns how many bytes."""
        stager = self.hook._stager
        if stager is None or self.hook.status.open_id:
            raise RuntimeError(f"staging is in use by chunk {self.hook.status.open_id:#x}")
        parts = [stager._staging.buffer, stager._staging._host, *stager._ring.device, *stager._ring.host]
        for part in parts:
            part.fill_(POISON)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        return sum(part.numel() for part in parts)

    def rates(self, count: int, rounds: int) -> dict[str, float]:
        """Bytes a second on this device: of one plain copy, of packing and of unpacking so many experts, of their checksums."""
        engine, streams = self.engine, self.hook._streams
        layer = engine.sizes.layer_refs[0]
        tensors = engine.tensors[layer]
        layout = ExpertLayout.of(layer, tensors)
        source = torch.zeros(count * layout.num_bytes, dtype=torch.uint8, device=engine.device)
        target = torch.zeros_like(source)
        regions = list(target.view(count, layout.num_bytes))
        scratch = {name: SlotTensor(tensor.data.clone(), tensor.kind) for name, tensor in tensors.items()}

        def pack() -> None:
            for slot, region in enumerate(regions):
                layout.pack(tensors, slot % engine.sizes.slots, region)

        def unpack() -> None:
            for slot, region in enumerate(regions):
                layout.unpack(region, scratch, slot % engine.sizes.slots)

        def summed() -> None:
            for region in regions:
                checksum(region)

        works = {"plain copy": lambda: target.copy_(source), "pack": pack, "unpack": unpack, "checksum": summed}
        found = {}
        for name, work in works.items():
            best = float("inf")
            for _ in range(rounds + 1):  # the first warms up
                begun, ended = EventPair(), EventPair()
                with streams.on_compute_stream():
                    begun.record(streams, timed=True)
                    work()
                    ended.record(streams, timed=True)
                ended.wait_host(60.0)
                best = min(best, ended.seconds_since(begun))
            found[name] = source.numel() / best
        return found

    def status(self) -> tuple[int, int, tuple[int, ...]]:
        """Chunk under way, flips so far, ranks that are read from."""
        status = self.hook.status
        return status.open_id, status.flips, status.reads_from


def rank_main(
    sizes: Sizes, position: int, device_type: str, rendezvous_port: int, socket_path: str, same_node: str, pipe: Connection
) -> None:
    """Serve what is asked until it is told to close."""
    try:
        if device_type == "cpu":
            torch.set_num_threads(1)
            device = torch.device("cpu")
        else:
            device = torch.device("cuda", 0)
            torch.cuda.set_device(device)
        engine = DeviceEngine(sizes, position, device, rendezvous_port, readable=same_node == "read")
        config = HookConfig(
            socket_path=socket_path,
            staging_bytes=sizes.staging_bytes,
            vote_period=1,
            window_steps=32,
            sub_windows=4,
            same_node_copies=same_node,
            vote_timeout_s=60.0,
        )
        hook = Hook(engine, config)
        hook.start()
        rank = DeviceRank(engine, hook)
        pipe.send(hook.status.off_reason)
        while (asked := pipe.recv()) is not None:
            name, arguments, options = asked
            answer: Any = getattr(rank, name)(*arguments, **options)
            pipe.send(answer)
        hook.close()
    except Exception:
        pipe.send(RuntimeError(f"rank {position}: {traceback.format_exc()}"))
        raise
