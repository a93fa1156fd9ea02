"""A fleet of hooks whose engine forms its group again in place: ranks are killed, others join, and what must hold is known.

The driver has the map that must come of it by rank id, which no code of the hook computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.engine.port import EngineDescription
from agent.engine.reference.launch import free_port
from eplb_service.control import Armed, Staged
from eplb_service.ids import ChunkId, LayerRef, RankId
from tests.integration.hook_fleet import LAYERS, NUM_LOGICAL, SLOTS, WAIT_S, Fleet, RankSetup, describe_rank, rank_main


@dataclass
class FormingFleet(Fleet):
    """Ranks by position in the present group; `ask`, `step`, `check` and the like are of that group."""

    setup: Mapping[str, Any] = field(default_factory=lambda: {"forms_again": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.group_id = 77
        self.lives = dict.fromkeys(self.ranks, 0)
        self.lost: list[Any] = []

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

    def form(self, *ranks: int, joining: Sequence[int] = (), absent: Sequence[int] = ()) -> dict[int, str]:
        """A group of these ranks. joining: those that are started for it; absent: those that never come.

        Returns what each rank that came says of it: empty = it serves. If all do, the fleet is that group from then on.
        """
        group = tuple(map(RankId, ranks))
        self.group_id += 1
        port = free_port()
        pipes = dict(zip(self.ranks, self.pipes, strict=True))
        processes = dict(zip(self.ranks, self.processes, strict=True))
        for rank in group:
            if rank in joining:
                self.lives[rank] = self.lives.get(rank, 0) + 1
                setup = RankSetup(self.describe(rank, group, port, joins=True), self.settings, **self.setup)
                ours, theirs = self.context.Pipe()
                if rank in processes:
                    self.lost.append(processes[rank])
                processes[rank] = self.context.Process(target=rank_main, args=(setup, theirs), daemon=True)
                processes[rank].start()
                theirs.close()
                pipes[rank] = ours
            elif rank not in absent:
                pipes[rank].send(("reform", self.describe(rank, group, port, joins=False)))
        answers = {rank: self.heard(pipes[rank]) for rank in group if rank not in absent}
        told = {int(rank): answer if isinstance(answer, str) else "" for rank, answer in answers.items()}
        if any(told.values()) or absent:
            for newcomer in joining:
                processes[RankId(newcomer)].kill()
            return told
        self.take_over(group, pipes, processes, joining)
        return told

    def take_over(self, group: tuple[RankId, ...], pipes: Any, processes: Any, joining: Sequence[int]) -> None:
        before = self.ranks
        for layer in LAYERS:
            held = {
                (rank, slot): self.rows[layer][before.index(rank) * SLOTS + slot] for rank in before for slot in range(SLOTS)
            }
            self.rows[layer] = tuple(-1 if rank in joining else held[rank, slot] for rank in group for slot in range(SLOTS))
        self.lost += [processes[rank] for rank in before if rank not in group]
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

    def flipped(self, rows: Mapping[LayerRef, Sequence[int]]) -> None:
        """What must be live by the next forming."""
        self.rows.update({layer: tuple(row) for layer, row in rows.items()})

    def unreachable(self) -> int:
        """Experts that no rank holds, by the driver's own map."""
        return sum(NUM_LOGICAL - len(set(row) - {-1}) for row in self.rows.values())

    def turned(self, layer: LayerRef = LAYERS[0]) -> dict[LayerRef, tuple[int, ...]]:
        """A row in which every slot of the first rank holds what its neighbour held."""
        row = self.rows[layer]
        return {layer: (row[1], row[0], *row[2:])}
