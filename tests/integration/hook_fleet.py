"""Ranks with a small engine of real CPU tensors in processes of their own, and an agent process's end of their socket.

The engine has no model: a step is a call of `begin_step`. The driver steps all ranks in lock-step, as a real engine's
collectives do: no rank begins step b + 1 before all have begun step b.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from agent.engine.port import EngineDescription, EngineModel, RoutingTables, SlotTensor, TensorKind
from agent.engine.reference.launch import free_port
from agent.frames import HEAD, Decoder, Welcome, encode, frame_lengths
from agent.hook.hook import Hook, HookConfig
from agent.transfer.memory_handles import allocate_shared
from agent.transfer.staging import ExpertLayout
from eplb_service import __version__
from eplb_service.control import (
    NO_RANK,
    Address,
    Arm,
    Armed,
    Committed,
    Copy,
    Disarm,
    Disarmed,
    Flipped,
    FromRank,
    Hello,
    LayerChange,
    LayerInfo,
    Live,
    Pulse,
    Refused,
    Registration,
    Stage,
    Staged,
    ToRank,
)
from eplb_service.errors import InvalidInputError
from eplb_service.ids import (
    ChunkId,
    DeploymentId,
    Epoch,
    GenerationNumber,
    GroupId,
    Incarnation,
    LayerRef,
    Phase,
    RankId,
    chunk_id,
)
from eplb_service.placement import logical_to_physical, row_digest
from eplb_service.rpc.convert import from_agent_from_pb, from_agent_to_pb
from eplb_service.window.report import LoadReport

MODEL = "tiny"
NUM_LOGICAL = 6
SLOTS = 2
WIDTH = 4
LAYERS = (LayerRef(MODEL, 1), LayerRef(MODEL, 4))
EXPERT_BYTES = {LAYERS[0]: (5 * 7 + 1) * 4, LAYERS[1]: 9 * 2 + 3 * 4}
WAIT_S = 60.0


def expert_tensors(layer: LayerRef, expert: int) -> dict[str, torch.Tensor]:
    """What the checkpoint has for one expert; -1 = an empty slot's content, which nobody reads."""
    base = 1000.0 * layer.layer_id + expert
    if layer == LAYERS[0]:
        return {"weight": base + torch.arange(35, dtype=torch.float32).reshape(5, 7) / 64, "scale": torch.tensor(base / 3)}
    return {"up": (base + torch.arange(9) / 8).to(torch.bfloat16), "scales": base + torch.arange(3, dtype=torch.float32)}


class TinyEngine:
    """An `EnginePort` over plain tensors: strided storage, an empty tensor, a derived and a shared one among them."""

    def __init__(
        self, description: EngineDescription, *, shared: float = 1.5, readable: bool = False, forms_again: bool = False
    ) -> None:
        self.description = description
        self.can_reform = forms_again
        self.position = description.group_rank_ids.index(description.address.rank_id)
        self.version = 0
        self.capturing = False
        self.pressure = False
        self.stopped = ""
        self.rows = {layer: list(description.models[0].initial[layer.layer_id]) for layer in LAYERS}
        self.tensors: dict[LayerRef, dict[str, SlotTensor]] = {}
        self.tables: dict[LayerRef, RoutingTables] = {}
        for layer in LAYERS:
            held = self.rows[layer][self.position * SLOTS : (self.position + 1) * SLOTS]
            named = [expert_tensors(layer, expert) for expert in held]
            self.tensors[layer] = {
                name: SlotTensor(_strided([tensors[name] for tensors in named], readable=readable)) for name in named[0]
            }
            self.tensors[layer]["bias"] = SlotTensor(torch.zeros(0))
            first = next(iter(self.tensors[layer]))
            self.tensors[layer]["derived"] = SlotTensor(self._derived(layer, first), TensorKind.DERIVED)
            self.tensors[layer]["input_scale"] = SlotTensor(torch.tensor([shared]), TensorKind.SHARED)
            self.tables[layer] = tables_of(self.rows[layer])

    def form_again(self, description: EngineDescription) -> None:
        """Be in another group; what its tables hold until the hook wrote them is nobody's."""
        self.description = description
        self.position = description.group_rank_ids.index(description.address.rank_id)
        for layer in LAYERS:
            tables = tables_of([-1] * (len(description.group_rank_ids) * SLOTS))
            self.tables[layer] = RoutingTables(
                torch.full_like(tables.physical_to_logical, -9),
                torch.full_like(tables.logical_to_physical, -9),
                torch.full_like(tables.replica_counts, -9),
            )

    def _derived(self, layer: LayerRef, name: str) -> torch.Tensor:
        return self.tensors[layer][name].data.float().reshape(SLOTS, -1).sum(1)

    def describe(self) -> EngineDescription:
        return self.description

    def slot_tensors(self, layer: LayerRef) -> Mapping[str, SlotTensor]:
        return self.tensors[layer]

    def routing_tables(self, layer: LayerRef) -> RoutingTables:
        return self.tables[layer]

    def rederive(self, layer: LayerRef, slots: Sequence[int]) -> None:
        name = next(iter(self.tensors[layer]))
        for slot in slots:
            self.tensors[layer]["derived"].data[slot] = self._derived(layer, name)[slot]

    def weights_version(self) -> int:
        return self.version

    def compute_stream(self) -> torch.cuda.Stream | None:
        return None

    def is_capturing(self) -> bool:
        return self.capturing

    def under_pressure(self) -> bool:
        return self.pressure

    def fail_stop(self, reason: str) -> None:
        self.stopped = reason

    def wrong_slots(self) -> list[str]:
        """Every slot whose content is not that of the expert that the routing table says it holds, and every bad table."""
        wrong = []
        for layer in LAYERS:
            row = self.tables[layer].physical_to_logical.tolist()
            fresh = tables_of(row)
            if not torch.equal(fresh.logical_to_physical, self.tables[layer].logical_to_physical):
                wrong.append(f"{layer}: logical_to_physical is not derived from the row")
            if not torch.equal(fresh.replica_counts, self.tables[layer].replica_counts):
                wrong.append(f"{layer}: replica_counts is not derived from the row")
            for slot in range(SLOTS):
                expert = row[self.position * SLOTS + slot]
                if expert < 0:
                    continue
                for name, expected in expert_tensors(layer, expert).items():
                    if not torch.equal(self.tensors[layer][name].data[slot], expected):
                        wrong.append(f"{layer} slot {slot}: {name} is not expert {expert}'s")
                derived = self.tensors[layer]["derived"].data[slot]
                first = next(iter(self.tensors[layer]))
                if derived != self._derived(layer, first)[slot]:
                    wrong.append(f"{layer} slot {slot}: derived tensor is stale")
        return wrong


def _strided(tensors: list[torch.Tensor], *, readable: bool) -> torch.Tensor:
    """Slots as every second entry of a larger storage, with an offset: nothing may assume contiguous memory.

    readable: in memory that other processes can be let read.
    """
    storage = torch.full((2 * len(tensors) + 1, *tensors[0].shape), -7.0).to(tensors[0].dtype)
    if readable:
        storage = allocate_shared(storage.nbytes).view(storage.dtype).view(storage.shape).copy_(storage)
    view = storage[1::2]
    for slot, tensor in enumerate(tensors):
        view[slot] = tensor
    return view


def tables_of(row: Sequence[int]) -> RoutingTables:
    """Fresh tables for a row."""
    physical = np.array([row], np.int32)
    logical = torch.from_numpy(logical_to_physical(physical, NUM_LOGICAL, WIDTH)[0].astype(np.int64))
    counts = np.bincount(physical[0][physical[0] >= 0], minlength=NUM_LOGICAL).astype(np.int64)
    return RoutingTables(torch.from_numpy(physical[0].astype(np.int64)), logical, torch.from_numpy(counts))


def initial_rows(num_ranks: int) -> dict[int, tuple[int, ...]]:
    """Linear rows."""
    return {layer.layer_id: tuple(slot % NUM_LOGICAL for slot in range(num_ranks * SLOTS)) for layer in LAYERS}


def describe(position: int, num_ranks: int, port: int, *, group: int = 77) -> EngineDescription:
    """Stable rank ids 10, 20, …: nothing may take an id for a position."""
    ranks = tuple(RankId(10 * (index + 1)) for index in range(num_ranks))
    nodes = tuple(f"node{index // 2}" for index in range(num_ranks))
    return describe_rank(ranks[position], ranks, nodes, port, group=group, initial=initial_rows(num_ranks))


def describe_rank(
    rank: RankId,
    ranks: tuple[RankId, ...],
    nodes: tuple[str, ...],
    port: int,
    *,
    group: int,
    initial: Mapping[int, tuple[int, ...]],
    life: int = 0,
    joins: bool = False,
) -> EngineDescription:
    """One rank of any group. life: how often its process was started before."""
    layers = tuple(
        LayerInfo(layer_id=layer.layer_id, num_logical=NUM_LOGICAL, slots=SLOTS, expert_bytes=EXPERT_BYTES[layer])
        for layer in LAYERS
    )
    return EngineDescription(
        deployment=DeploymentId("test"),
        address=Address(rank, Incarnation(5000 + rank + 1000 * life), GroupId(group)),
        node=nodes[ranks.index(rank)],
        group_rank_ids=ranks,
        nodes=nodes,
        phase=Phase.DECODE,
        stage=0,
        models=(EngineModel(name=MODEL, digest="d", layers=layers, initial=initial),),
        capacity=1.0,
        dispatch="even",
        replica_table_width=WIDTH,
        rendezvous_host="127.0.0.1",
        rendezvous_port=port,
        joins=joins,
    )


# ── a rank's process ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Checkpoint:
    """An `ExpertSource` that has every expert as `expert_tensors` makes it."""

    name = "checkpoint"

    def read(self, layer: LayerRef, expert: int, layout: ExpertLayout, region: torch.Tensor) -> bool:
        layout.pack_values(expert_tensors(layer, expert), region)
        return True


@dataclass(frozen=True)
class RankSetup:
    """What one rank's process is started with. restores: it has a backup of every expert."""

    description: EngineDescription
    config: Mapping[str, Any]
    shared: float = 1.5
    failpoints: str = ""
    forms_again: bool = False
    restores: bool = False


def rank_main(setup: RankSetup, pipe: Connection) -> None:
    """Serve commands of the driver until it says close."""
    torch.set_num_threads(1)
    os.environ["EPLB_FAILPOINTS"] = setup.failpoints
    readable = setup.config.get("same_node_copies") == "read"
    engine = TinyEngine(setup.description, shared=setup.shared, readable=readable, forms_again=setup.forms_again)
    hook = Hook(engine, HookConfig(**setup.config), sources=(Checkpoint(),) if setup.restores else ())
    pipe.send(hook.status if (problem := _tried(hook.start)) == "" else problem)
    while True:
        command, *arguments = pipe.recv()
        match command:
            case "step":
                tokens, warmup = arguments
                pipe.send(_tried(partial(_step, hook, tokens, warmup=warmup)))
            case "reform":
                engine.form_again(arguments[0])
                pipe.send(_tried(hook.reform))
            case "start":
                engine.form_again(arguments[0])
                pipe.send(_tried(hook.start))
            case "memory":
                pipe.send((hook.status.staging_bytes, threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))
            case "check":
                rows = {layer: engine.tables[layer].physical_to_logical.tolist() for layer in LAYERS}
                pipe.send((engine.wrong_slots(), rows, engine.stopped))
            case "status":
                pipe.send(hook.status)
            case "pressure":
                engine.pressure = arguments[0]
                pipe.send("")
            case "version":
                engine.version = arguments[0]
                pipe.send("")
            case "corrupt":
                layer, slot, delta = arguments
                next(iter(engine.tensors[layer].values())).data[slot].view(-1)[-1] += delta
                pipe.send("")
            case "close":
                began = time.monotonic()
                hook.close()
                pipe.send(time.monotonic() - began)
                return


def _step(hook: Hook, tokens: int, *, warmup: bool) -> None:
    hook.begin_step(num_real_tokens=tokens, warmup=warmup)
    for layer in LAYERS:
        hook.record(layer, torch.arange(tokens)[:, None] % NUM_LOGICAL)


def _tried(call: Callable[[], None]) -> str:
    """What went wrong, in words that the driver judges; empty = nothing."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


# ── the agent process's end ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class FakeAgent:
    """Listens like an agent process and keeps what every rank says."""

    path: str
    version: str = __version__
    registrations: dict[RankId, Registration] = field(default_factory=dict)
    windows: list[LoadReport] = field(default_factory=list)
    pulses: list[Pulse] = field(default_factory=list)
    said: list[FromRank] = field(default_factory=list)
    unsayable: list[str] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _connections: dict[RankId, socket.socket] = field(default_factory=dict)
    _all: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._decoder = Decoder((Registration, LoadReport, Live, Staged, Refused, Armed, Committed, Flipped, Disarmed, Pulse))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._all.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            connection.sendall(encode(Welcome(version=self.version)))
            while True:
                head, payload = frame_lengths(_read(connection, HEAD.size))
                body = _read(connection, head + payload)
                self._take(connection, self._decoder.decode(body[:head], body[head:]))

    def _take(self, connection: socket.socket, message: object) -> None:
        with self._news:
            if not isinstance(message, Registration | LoadReport):
                self._check_wire(message)
            match message:
                case Registration():
                    self.registrations[message.address.rank_id] = message
                    self._connections[message.address.rank_id] = connection
                case LoadReport():
                    self.windows.append(message)
                case Pulse():
                    self.pulses.append(message)
                case _:
                    self.said.append(message)  # type: ignore[arg-type]
            self._news.notify_all()

    def _check_wire(self, message: object) -> None:
        """Whatever a hook says must also be sayable to the planner (a boundary of -1 was not)."""
        try:
            carried = from_agent_from_pb(from_agent_to_pb(cast("FromRank", message)))
        except InvalidInputError as error:
            self.unsayable.append(f"{message}: {error}")
            return
        if carried != message:
            self.unsayable.append(f"{message} arrives as {carried}")

    def send(self, message: ToRank) -> None:
        self._connections[message.to.rank_id].sendall(encode(message))

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Wait for something that the ranks say."""
        with self._news:
            if not self._news.wait_for(condition, timeout_s):
                raise AssertionError(f"no {what} within {timeout_s} s; said: {self.said[-12:]}")

    def answers(self, kind: type, chunk: int) -> dict[int, Any]:
        """The last answer of a kind to a chunk, by rank."""
        return {
            message.sender.rank_id: message
            for message in list(self.said)
            if type(message) is kind and getattr(message, "chunk_id", None) == chunk
        }

    def close(self) -> None:
        """Go away, as a killed agent process does. Fails when a hook said what the wire does not carry."""
        assert not self.unsayable, self.unsayable[:3]
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()
        for connection in self._all:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def wait_for(path: Path, *, gone: bool = False) -> None:
    """Until a file that a rank makes is there, or is gone."""
    until = time.monotonic() + WAIT_S
    while path.exists() == gone:
        assert time.monotonic() < until, f"{path} is {'still' if gone else 'not'} there after {WAIT_S} s"
        time.sleep(0.005)


# ── the driver ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Fleet:
    """Ranks in processes, their driver's pipes, and the fake agent process."""

    context: Any
    folder: str
    num_ranks: int = 4
    config: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[int, float] = field(default_factory=dict)
    failpoints: Mapping[int, str] = field(default_factory=dict)
    setup: Mapping[str, Any] = field(default_factory=dict)
    connects: bool = True

    def __post_init__(self) -> None:
        self.agent = FakeAgent(f"{self.folder}/agent.sock")
        self.sequence = 0
        self.epoch = 1
        self.mesh = ChunkId(0)
        self.boundary = -1
        self.rows = {layer: initial_rows(self.num_ranks)[layer.layer_id] for layer in LAYERS}
        port = free_port()
        self.ranks = tuple(RankId(10 * (index + 1)) for index in range(self.num_ranks))
        self.settings = config = {
            "socket_path": self.agent.path,
            "staging_bytes": 2 * sum(SLOTS * size for size in EXPERT_BYTES.values()),
            "vote_period": 2,
            "window_steps": 8,
            "sub_windows": 2,
            "vote_timeout_s": 5.0,
            "rendezvous_timeout_s": 10.0,
            "close_timeout_s": 3.0,
            "idle_after_s": 0.5,
            "pulse_period_s": 0.5,
            "reconnect_max_s": 0.2,
            **self.config,
        }
        self.pipes: list[Connection] = []
        self.processes = []
        for position in range(self.num_ranks):
            ours, theirs = self.context.Pipe()
            setup = RankSetup(
                description=describe(position, self.num_ranks, port),
                config=config,
                shared=self.shared.get(position, 1.5),
                failpoints=self.failpoints.get(position, ""),
                **self.setup,
            )
            process = self.context.Process(target=rank_main, args=(setup, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.started = [self._answer(position) for position in range(self.num_ranks)]
        if self.connects:
            self.agent.until(lambda: len(self.agent.registrations) == self.num_ranks, "registration of all ranks")

    def _answer(self, position: int) -> Any:
        if not wait([self.pipes[position]], WAIT_S):
            raise AssertionError(f"rank at {position} does not answer within {WAIT_S} s")
        return self.pipes[position].recv()

    def ask(self, position: int, *command: Any) -> Any:
        """One command, its answer."""
        self.pipes[position].send(command)
        return self._answer(position)

    def ask_all(self, *command: Any, only: Sequence[int] | None = None) -> list[Any]:
        """The same to all ranks at once."""
        positions = list(range(self.num_ranks)) if only is None else list(only)
        for position in positions:
            self.pipes[position].send(command)
        return [self._answer(position) for position in positions]

    def step(self, count: int = 1, *, tokens: int = 12, warmup: bool = False, only: Sequence[int] | None = None) -> None:
        """Steps in lock-step; all must pass."""
        for _ in range(count):
            assert set(self.ask_all("step", tokens, warmup, only=only)) == {""}
            self.boundary += 1

    def addresses(self) -> list[Address]:
        return [self.agent.registrations[rank].address for rank in self.ranks]

    def stage(self, rows: Mapping[LayerRef, Sequence[int]], *, only: Sequence[int] | None = None, **changes: Any) -> ChunkId:
        """Send a Stage to all ranks; returns its id."""
        self.sequence += 1
        chunk = chunk_id(self.epoch, self.sequence)
        self.mesh = self.mesh or chunk
        values: dict[str, Any] = {
            "chunk_id": chunk,
            "generation": GenerationNumber(self.sequence),
            "weights_version": 0,
            "mesh_id": self.mesh,
            "layers": tuple(change(layer, self.rows[layer], row) for layer, row in rows.items()),
            "copies": tuple(copy for layer, row in rows.items() for copy in copies(layer, self.rows[layer], row, self.ranks)),
            "stage_timeout_s": 8.0,
            "arm_ttl_s": 8.0,
            **changes,
        }
        for position, address in enumerate(self.addresses()):
            if only is None or position in only:
                self.agent.send(Stage(to=address, **values))
        return chunk

    def arm(self, chunk: ChunkId, *, only: Sequence[int] | None = None) -> None:
        for position, address in enumerate(self.addresses()):
            if only is None or position in only:
                self.agent.send(Arm(to=address, chunk_id=chunk))

    def disarm(self, chunk: ChunkId, *, only: Sequence[int] | None = None) -> None:
        for position, address in enumerate(self.addresses()):
            if only is None or position in only:
                self.agent.send(Disarm(to=address, chunk_id=chunk, epoch=Epoch(self.epoch)))
        self.mesh = ChunkId(0)

    def hello(self, epoch: int) -> None:
        self.epoch = epoch
        self.sequence = 0
        for address in self.addresses():
            self.agent.send(Hello(to=address, epoch=Epoch(epoch)))

    def expect(self, kind: type, chunk: ChunkId, count: int | None = None) -> dict[int, Any]:
        """Wait until that many ranks (all) gave an answer of this kind."""
        want = self.num_ranks if count is None else count
        self.agent.until(
            lambda: len(self.agent.answers(kind, chunk)) >= want, f"{kind.__name__} of {want} ranks for {chunk:#x}"
        )
        return self.agent.answers(kind, chunk)

    def roll_out(self, rows: Mapping[LayerRef, Sequence[int]], **changes: Any) -> dict[int, Flipped]:
        """A whole chunk: stage, arm, step until it flipped everywhere."""
        chunk = self.stage(rows, **changes)
        self.expect(Staged, chunk)
        self.arm(chunk)
        self.expect(Armed, chunk)
        for _ in range(10):
            self.step()
            if len(self.agent.answers(Flipped, chunk)) == self.num_ranks:
                break
        flipped: dict[int, Flipped] = self.expect(Flipped, chunk)
        self.rows.update({layer: tuple(row) for layer, row in rows.items()})
        return flipped

    def check(self, only: Sequence[int] | None = None) -> None:
        """Weights follow the map, and all ranks route by the map that the driver knows."""
        for wrong, rows, stopped in self.ask_all("check", only=only):
            assert wrong == []
            assert stopped == ""
            assert {layer: tuple(row) for layer, row in rows.items()} == self.rows

    def kill(self, position: int) -> None:
        """End one rank as the kernel does."""
        self.processes[position].kill()
        self.processes[position].join(WAIT_S)

    def close(self) -> list[float]:
        """Close all hooks, then end the processes. Returns the seconds that each close took."""
        alive = [position for position, process in enumerate(self.processes) if process.is_alive()]
        hanging = []
        try:
            seconds = self.ask_all("close", only=alive)
        finally:
            self.agent.close()
            for position, process in enumerate(self.processes):
                process.join(WAIT_S)
                if process.is_alive():
                    hanging.append(position)
                    process.kill()
                    process.join()
        assert not hanging, f"ranks at {hanging} closed their hooks but their processes do not end"
        codes = {position: self.processes[position].exitcode for position in alive}
        assert set(codes.values()) <= {0}, f"exit codes by rank: {codes}"
        return seconds


def change(layer: LayerRef, old: Sequence[int], new: Sequence[int]) -> LayerChange:
    """A layer's change with its digests."""
    return LayerChange(
        layer=layer,
        old_digest=row_digest(layer, np.array(old)),
        new_digest=row_digest(layer, np.array(new)),
        new_row=tuple(new),
    )


def copies(layer: LayerRef, old: Sequence[int], new: Sequence[int], ranks: Sequence[RankId]) -> list[Copy]:
    """Fill each changed slot from the last slot that holds the expert now; from a backup where there is none."""
    made = []
    for slot, expert in enumerate(new):
        if expert not in (old[slot], -1):
            source = max((index for index, held in enumerate(old) if held == expert), default=-1)
            made.append(
                Copy(
                    layer=layer,
                    expert=expert,
                    source_rank=ranks[source // SLOTS] if source >= 0 else NO_RANK,
                    source_slot=source % SLOTS if source >= 0 else 0,
                    target_rank=ranks[slot // SLOTS],
                    target_slot=slot % SLOTS,
                )
            )
    return made
