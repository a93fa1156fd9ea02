"""A fleet of hooks whose engine forms its group again in place: ranks are killed, others join, and what must hold is known.

The driver has the map that must come of it by rank id, which no code of the hook computes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from agent.engine.port import EngineDescription
from agent.engine.reference.launch import free_port
from eplb_service.control import Armed, Committed, Flipped, Stage, Staged
from eplb_service.ids import ChunkId, GenerationNumber, LayerRef, RankId, chunk_id
from tests.integration.hook_fleet import (
    LAYERS,
    NUM_LOGICAL,
    SLOTS,
    WAIT_S,
    Fleet,
    RankSetup,
    change,
    describe,
    describe_rank,
    initial_rows,
    rank_main,
)


@dataclass
class FormingFleet(Fleet):
    """Ranks by position in the present group; `ask`, `step`, `check` and the like are of that group."""

    setup: Mapping[str, Any] = field(default_factory=lambda: {"forms_again": True})

    def __post_init__(self) -> None:
        self.config = {"rendezvous_timeout_s": 30.0, **self.config}  # processes that start on busy cores take seconds
        super().__post_init__()
        self.group_id = 77
        self.lives = dict.fromkeys(self.ranks, 0)
        self.lost: list[tuple[RankId, Any, Connection]] = []

    def position(self, rank: int) -> int:
        return self.ranks.index(RankId(rank))

    def lose(self, *ranks: int) -> None:
        """Kill ranks; the others do not know yet."""
        for rank in ranks:
            self.kill(self.position(rank))

    def describe(self, rank: RankId, ranks: tuple[RankId, ...], port: int, *, joins: bool) -> EngineDescription:
        empty = {layer.layer_id: (-1,) * (SLOTS * len(ranks)) for layer in LAYERS}
        nodes = tuple(f"node{member // 30}" for member in ranks)
        return describe_rank(
            rank, ranks, nodes, port, group=self.group_id, initial=empty, life=self.lives.get(rank, 0), joins=joins
        )

    def form(
        self, *ranks: int, joining: Sequence[int] = (), absent: Sequence[int] = (), silent: Sequence[int] = ()
    ) -> dict[int, str]:
        """A group of these ranks. joining: started for it; absent: never come; silent: die in it.

        Returns what each rank that came says of it: empty = it serves. If all do, the fleet is that group from then on.
        """
        group = tuple(map(RankId, ranks))
        self.group_id += 1
        port = free_port()
        pipes = dict(zip(self.ranks, self.pipes, strict=True))
        processes = dict(zip(self.ranks, self.processes, strict=True))
        for rank in group:
            if rank in joining:
                if rank in processes:
                    self.end(processes[rank])
                self.lives[rank] = self.lives.get(rank, 0) + 1
                pipes[rank], processes[rank] = self.started_process(self.describe(rank, group, port, joins=True))
            elif rank not in absent:
                pipes[rank].send(("reform", self.describe(rank, group, port, joins=False)))
        answers = {rank: self.heard(pipes[rank]) for rank in group if rank not in (*absent, *silent)}
        told = {int(rank): answer if isinstance(answer, str) else "" for rank, answer in answers.items()}
        if any(told.values()) or absent or silent:
            for newcomer in joining:
                self.end(processes[RankId(newcomer)])
            return told
        self.take_over(group, pipes, processes, joining)
        return told

    def serves(self, *ranks: int, joining: Sequence[int] = ()) -> None:
        """As `form`, and all ranks serve."""
        assert set(self.form(*ranks, joining=joining).values()) == {""}

    def started_process(self, description: EngineDescription) -> tuple[Connection, Any]:
        """Another rank's process, which starts its hook by itself and then answers."""
        ours, theirs = self.context.Pipe()
        setup = RankSetup(description, self.settings, **self.setup)
        process = self.context.Process(target=rank_main, args=(setup, theirs), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def end(self, process: Any) -> None:
        process.kill()
        process.join(WAIT_S)

    def form_with_left_out(self, *ranks: int) -> dict[int, str]:
        """A group in which one rank was left out of the last forming, and comes again as if nothing had been."""
        ours = dict(zip(self.ranks, self.pipes, strict=True))
        left_out = next(rank for rank in map(RankId, ranks) if rank not in ours)
        process, pipe = next((process, pipe) for rank, process, pipe in self.lost if rank == left_out)
        self.group_id += 1
        group, port = tuple(map(RankId, ranks)), free_port()
        for rank in group:
            (pipe if rank == left_out else ours[rank]).send(("reform", self.describe(rank, group, port, joins=False)))
        told = {int(rank): self.heard(pipe if rank == left_out else ours[rank]) for rank in group}
        self.end(process)
        return told

    def form_with_loader(self, *ranks: int) -> dict[int, str]:
        """A group whose second rank was started anew as if the group were: with experts that it loaded."""
        group, port = tuple(map(RankId, ranks)), free_port()
        self.group_id += 1
        loader = group[1]
        self.kill(self.position(loader))
        initial = initial_rows(len(group))
        loaded = replace(self.describe(loader, group, port, joins=False), models=describe(0, len(group), port).models)
        assert loaded.models[0].initial == initial
        _, process = self.started_process(loaded)
        others = [position for position, rank in enumerate(self.ranks) if rank != loader]
        for position in others:
            self.pipes[position].send(("reform", self.describe(self.ranks[position], group, port, joins=False)))
        told = {int(self.ranks[position]): self.heard(self.pipes[position]) for position in others}
        self.end(process)
        return told

    def take_over(self, group: tuple[RankId, ...], pipes: Any, processes: Any, joining: Sequence[int]) -> None:
        before = self.ranks
        for layer in LAYERS:
            held = {
                (rank, slot): self.rows[layer][before.index(rank) * SLOTS + slot] for rank in before for slot in range(SLOTS)
            }
            self.rows[layer] = tuple(-1 if rank in joining else held[rank, slot] for rank in group for slot in range(SLOTS))
        self.lost += [(rank, processes[rank], pipes[rank]) for rank in before if rank not in group]
        self.ranks, self.num_ranks = group, len(group)
        self.pipes, self.processes = [pipes[rank] for rank in group], [processes[rank] for rank in group]
        self.mesh = ChunkId(0)
        self.boundary = self.ask(0, "status").boundary - 1
        self.agent.until(
            lambda: all(
                rank in self.agent.registrations and self.agent.registrations[rank].address.group_id == self.group_id
                for rank in group
            ),
            "registration of all ranks of the new group",
        )

    def close(self) -> list[float]:
        """As a fleet does; ranks that were left out end too."""
        for _, process, _ in self.lost:
            self.end(process)
        return super().close()

    def step_until_error(self, *positions: int) -> dict[int, str]:
        """Steps of some ranks until one of them cannot go on; others may notice later. Returns what each says of the last."""
        for _ in range(8):
            said = dict(zip(positions, self.ask_all("step", 1, False, only=positions), strict=True))  # a command
            if any(said.values()):
                return said
        raise AssertionError("they still step")

    def stage_again(self, chunk: ChunkId) -> None:
        """A Stage of an id that there was, to the group of now."""
        values = {
            "generation": GenerationNumber(1),
            "weights_version": 0,
            "mesh_id": chunk,
            "stage_timeout_s": 8.0,
            "arm_ttl_s": 8.0,
        }
        layers = tuple(change(layer, self.rows[layer], row) for layer, row in self.turned().items())
        for address in self.addresses():
            self.agent.send(Stage(to=address, chunk_id=chunk, layers=layers, copies=(), **values))  # type: ignore[arg-type]

    def covered(self) -> dict[LayerRef, tuple[int, ...]]:
        """Rows in which each expert that no rank holds takes an empty slot, or the slot of an expert that has another."""
        rows = {}
        for layer in LAYERS:
            row = list(self.rows[layer])
            for expert in sorted(set(range(NUM_LOGICAL)) - set(row)):
                row[next(slot for slot, held in enumerate(row) if held < 0 or row.count(held) > 1)] = expert
            rows[layer] = tuple(row)
        return rows

    def settled_memory(self) -> tuple[int, int, int]:
        """Bytes of staging, threads and open files of the last rank, once what ends by itself has ended."""
        low: tuple[int, int, int] = self.ask(self.num_ranks - 1, "memory")
        quiet = 0
        while quiet < 20:
            found = self.ask(self.num_ranks - 1, "memory")
            quiet = 0 if found[1] < low[1] or found[2] < low[2] else quiet + 1
            low = (found[0], min(low[1], found[1]), min(low[2], found[2]))
            time.sleep(0.02)
        return low

    def heard(self, pipe: Any) -> Any:
        if not pipe.poll(WAIT_S):
            raise AssertionError(f"a rank does not answer within {WAIT_S} s")
        return pipe.recv()

    def armed(self, rows: Mapping[LayerRef, Sequence[int]]) -> ChunkId:
        """A chunk that all ranks have armed."""
        chunk = self.stage(rows)
        self.expect(Staged, chunk)
        self.arm(chunk)
        self.expect(Armed, chunk)
        return chunk

    def flipped_by_one(self, position: int, rows: Mapping[LayerRef, Sequence[int]]) -> None:
        """A chunk whose vote passed, that one rank flips; the others never begin that step."""
        chunk = self.armed(rows)
        self.step(2)
        self.agent.until(self.has_committed, "a passed vote on every rank")
        self.step(1)
        assert self.ask(position, "step", 1, False) == ""
        self.expect(Flipped, chunk, 1)

    def flipped(self, rows: Mapping[LayerRef, Sequence[int]]) -> None:
        """What must be live by the next forming."""
        self.rows.update({layer: tuple(row) for layer, row in rows.items()})

    def has_committed(self) -> bool:
        """Whether every rank knows that the vote for the last chunk passed."""
        return len(self.agent.answers(Committed, chunk_id(self.epoch, self.sequence))) == self.num_ranks

    def settle(self, voted: Mapping[LayerRef, Sequence[int]], before: Sequence[RankId]) -> bool:
        """After a forming in which a chunk's vote may have been seen to pass, or not: whether it was flipped.

        voted: its rows, by columns of the ranks of `before`.
        """
        _, rows, _ = self.ask(0, "check")
        flipped = {
            layer: tuple(
                row[before.index(rank) * SLOTS + slot] if rank in before else -1 for rank in self.ranks for slot in range(SLOTS)
            )
            for layer, row in voted.items()
        }
        if all(tuple(rows[layer]) == row for layer, row in flipped.items()):
            self.rows.update(flipped)
            return True
        return False

    def unreachable(self) -> int:
        """Experts that no rank holds, by the driver's own map."""
        return sum(NUM_LOGICAL - len(set(row) - {-1}) for row in self.rows.values())

    def turned(self, layer: LayerRef = LAYERS[0]) -> dict[LayerRef, tuple[int, ...]]:
        """A row in which every slot of the first rank holds what its neighbour held."""
        row = self.rows[layer]
        return {layer: (row[1], row[0], *row[2:])}
