"""Ranks of `benchmarks.gpu` and the one that orders their chunks about: the end of their sockets, and a planner's part."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from agent.frames import HEAD, Decoder, Welcome, encode, frame_lengths
from benchmarks.device_rank import Sizes, rank_main
from eplb_service import __version__
from eplb_service.control import (
    NO_THROTTLE,
    Address,
    Arm,
    Armed,
    Committed,
    Copy,
    Disarm,
    Disarmed,
    Flipped,
    LayerChange,
    Live,
    Pulse,
    Refused,
    Registration,
    Stage,
    Staged,
    Throttle,
    ToRank,
)
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, LayerRef, RankId, chunk_id
from eplb_service.placement import row_digest
from eplb_service.window.report import LoadReport

WAIT_S = 120.0
STEPS_AT_ONCE = 4


class DeviceFleet:
    """Rank processes on one device, stepped together. rows: what each layer routes by, by layer id."""

    def __init__(self, sizes: Sizes, device: str, same_node: str) -> None:
        self.sizes = sizes
        self.rows: dict[int, tuple[int, ...]] = {layer.layer_id: sizes.row for layer in sizes.layer_refs}
        self._sequence = 0
        self._addresses: dict[RankId, Address] = {}
        self._connections: dict[RankId, socket.socket] = {}
        self._said: dict[tuple[type, int], dict[RankId, Any]] = {}
        self._news = threading.Condition()
        self._folder = tempfile.TemporaryDirectory(prefix="eplb")
        path = str(Path(self._folder.name) / "a.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()
        context = _context(device)
        port = _free_port()
        self._pipes, self._processes = [], []
        for position in range(sizes.ranks):
            ours, theirs = context.Pipe()
            arguments = (sizes, position, device, port, path, same_node, theirs)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for position, off_reason in enumerate(self._answers()):
            if off_reason:
                raise RuntimeError(f"rank {position} observes only: {off_reason}")
        self._until(lambda: len(self._addresses) == sizes.ranks, "registration of all ranks")

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, name: str, *arguments: Any, **options: Any) -> list[Any]:
        """Ask all ranks at once."""
        for pipe in self._pipes:
            pipe.send((name, arguments, options))
        return self._answers()

    def ask_one(self, position: int, name: str, *arguments: Any, **options: Any) -> Any:
        """Ask one rank."""
        self._pipes[position].send((name, arguments, options))
        return self._answer(position)

    def steps(self, count: int = STEPS_AT_ONCE, *, worker: int | None = None) -> float:
        """Steps of all ranks; passes run on all, or on one. Returns seconds of a step there, or on the slowest."""
        for position, pipe in enumerate(self._pipes):
            pipe.send(("steps", (count,), {"works": worker in (None, position)}))
        taken: list[float] = self._answers()
        return max(taken) if worker is None else taken[worker]

    def _answers(self) -> list[Any]:
        return [self._answer(position) for position in range(len(self._pipes))]

    def _answer(self, position: int) -> Any:
        if not wait([self._pipes[position]], WAIT_S):
            raise RuntimeError(f"rank {position} did not answer within {WAIT_S:g} s")
        answer = self._pipes[position].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    # ── chunks ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def stage(self, layer: LayerRef, row: Sequence[int], *, throttle: Throttle = NO_THROTTLE) -> ChunkId:
        """Have all ranks copy what they need for another row of a layer."""
        self._sequence += 1
        chunk, old, slots = chunk_id(1, self._sequence), self.rows[layer.layer_id], self.sizes.slots
        copies = []
        for slot, expert in enumerate(row):
            if expert == old[slot]:
                continue
            held = [index for index, other in enumerate(old) if other == expert]
            here = [index for index in held if index // slots == slot // slots]
            source = (here or held)[0]
            copies.append(
                Copy(
                    layer=layer,
                    expert=expert,
                    source_rank=RankId(source // slots),
                    source_slot=source % slots,
                    target_rank=RankId(slot // slots),
                    target_slot=slot % slots,
                )
            )
        change = LayerChange(
            layer=layer,
            old_digest=row_digest(layer, np.array(old)),
            new_digest=row_digest(layer, np.array(row)),
            new_row=tuple(row),
        )
        for address in self._addresses.values():
            self._send(
                Stage(
                    to=address,
                    chunk_id=chunk,
                    generation=GenerationNumber(self._sequence),
                    weights_version=0,
                    mesh_id=chunk_id(1, 1),
                    layers=(change,),
                    copies=tuple(copies),
                    stage_timeout_s=WAIT_S,
                    arm_ttl_s=WAIT_S,
                    throttle=throttle,
                )
            )
        return chunk

    def is_staged(self, chunk: ChunkId) -> bool:
        """Whether all ranks have. Raises RuntimeError when one refused."""
        with self._news:
            refused = self._said.get((Refused, chunk), {})
            if refused:
                raise RuntimeError(f"chunk {chunk:#x} was refused: {next(iter(refused.values()))}")
            return len(self._said.get((Staged, chunk), {})) == self.sizes.ranks

    def roll_out(
        self, layer: LayerRef, row: Sequence[int], *, worker: int | None = None
    ) -> tuple[dict[RankId, Staged], dict[RankId, Flipped]]:
        """Carry a row to all ranks, which step meanwhile; passes run on all, or on one."""
        chunk = self.stage(layer, row)
        self._step_until(lambda: self.is_staged(chunk), "Staged", worker)
        for address in self._addresses.values():
            self._send(Arm(to=address, chunk_id=chunk))
        self._until(lambda: len(self._said.get((Armed, chunk), {})) == self.sizes.ranks, "Armed")
        self._step_until(lambda: len(self._said.get((Flipped, chunk), {})) == self.sizes.ranks, "Flipped", worker)
        self.rows[layer.layer_id] = tuple(row)
        return self._said[Staged, chunk], self._said[Flipped, chunk]

    def withdraw(self, chunk: ChunkId) -> None:
        """Give a staged chunk up."""
        for address in self._addresses.values():
            self._send(Disarm(to=address, chunk_id=chunk, epoch=Epoch(1)))
        self._until(lambda: len(self._said.get((Disarmed, chunk), {})) == self.sizes.ranks, "Disarmed")

    def _step_until(self, condition: Callable[[], bool], what: str, worker: int | None) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until:
                raise RuntimeError(f"no {what} of all ranks within {WAIT_S:g} s")
            self.steps(1, worker=worker)

    # ── the socket ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        decoder = Decoder((Registration, LoadReport, Live, Staged, Refused, Armed, Committed, Flipped, Disarmed, Pulse))
        with contextlib.suppress(OSError, EOFError):
            connection.sendall(encode(Welcome(version=__version__)))
            while True:
                head, payload = frame_lengths(_read(connection, HEAD.size))
                body = _read(connection, head + payload)
                self._take(connection, decoder.decode(body[:head], body[head:]))

    def _take(self, connection: socket.socket, message: Any) -> None:
        with self._news:
            if isinstance(message, Registration):
                self._addresses[message.address.rank_id] = message.address
                self._connections[message.address.rank_id] = connection
            elif not isinstance(message, LoadReport | Pulse | Live):
                self._said.setdefault((type(message), message.chunk_id), {})[message.sender.rank_id] = message
            self._news.notify_all()

    def _send(self, message: ToRank) -> None:
        self._connections[message.to.rank_id].sendall(encode(message))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        with self._news:
            if not self._news.wait_for(condition, WAIT_S):
                raise RuntimeError(f"no {what} within {WAIT_S:g} s")

    def close(self) -> None:
        """End the ranks; those that do not end are killed."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(20.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._listener.close()
        self._folder.cleanup()


def _context(device: str) -> Any:
    """How rank processes begin. CUDA bears no fork; without it a server that has torch in memory saves each its imports."""
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "benchmarks.device_rank"])
    return context


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def rows_of(sizes: Sizes, random: np.random.Generator) -> tuple[int, ...]:
    """A row at random in which every expert has a slot."""
    spare = random.integers(0, sizes.experts, sizes.ranks * sizes.slots - sizes.experts)
    row = np.concatenate([np.arange(sizes.experts), spare])
    return tuple(random.permutation(row).tolist())


def rotated(row: Sequence[int], count: int) -> tuple[int, ...]:
    """Another row: the experts of the first `count` slots of the first rank move on by one, so that it stages as many."""
    return (*row[1:count], row[0], *row[count:])
