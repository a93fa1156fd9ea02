"""Hooks of one group as threads of one process, with real gloo and small engines; no agent process, messages come by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agent.engine.port import EngineDescription, RoutingTables
from agent.engine.reference.launch import free_port
from agent.hook.config import HookConfig
from agent.hook.hook import Hook
from agent.transfer.backup import ExpertSource
from eplb_service.control import Arm, LayerChange, Stage
from eplb_service.ids import ChunkId, GenerationNumber, LayerRef, RankId, chunk_id
from eplb_service.placement import row_digest
from eplb_service.replica_shares import as_array, as_values, even_shares
from tests.integration.hook_fleet import (
    EXPERT_BYTES,
    LAYERS,
    NUM_LOGICAL,
    SLOTS,
    WAIT_S,
    WIDTH,
    TinyEngine,
    copies,
    describe_rank,
    tables_of,
)

Rows = Mapping[LayerRef, tuple[int, ...]]


@dataclass
class Member:
    """One rank: its engine and its hook."""

    engine: TinyEngine
    hook: Hook

    @property
    def rank(self) -> RankId:
        return self.engine.description.address.rank_id

    def rows(self) -> Rows:
        return {layer: tuple(self.engine.tables[layer].physical_to_logical.tolist()) for layer in LAYERS}


def at_once(calls: Sequence[Callable[[], Any]]) -> list[BaseException | None]:
    """Run each in a thread of its own, as ranks do; what each raised."""
    raised: list[BaseException | None] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            calls[index]()
        except BaseException as error:  # noqa: BLE001  # the test judges it
            raised[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return raised


def described(
    rank: int, ranks: Sequence[int], port: int, *, group: int, rows: Rows | None = None, life: int = 0, joins: bool = False
) -> EngineDescription:
    empty = {layer.layer_id: (-1,) * (SLOTS * len(ranks)) for layer in LAYERS}
    initial = empty if rows is None else {layer.layer_id: row for layer, row in rows.items()}
    group_ids = tuple(map(RankId, ranks))
    nodes = tuple("node" for _ in ranks)
    return describe_rank(RankId(rank), group_ids, nodes, port, group=group, initial=initial, life=life, joins=joins)


def settings(**changes: Any) -> HookConfig:
    values: dict[str, Any] = {
        "socket_path": "/nowhere/agent.sock",
        "staging_bytes": 2 * sum(SLOTS * size for size in EXPERT_BYTES.values()),
        "vote_period": 2,
        "vote_timeout_s": 5.0,
        "rendezvous_timeout_s": 20.0,
        "close_timeout_s": 1.0,  # those that a group left behind get no answer to their good-bye
        "reconnect_max_s": 0.05,
    }
    return HookConfig(**{**values, **changes})


class Crew:
    """The ranks of one fleet, by id. rows: what they load; weighted: their dispatch takes shares."""

    def __init__(
        self,
        ranks: Sequence[int],
        rows: Rows,
        *,
        weighted: bool = False,
        sources: Sequence[ExpertSource] = (),
        **changes: Any,
    ) -> None:
        self.weighted, self.sources, self.config = weighted, sources, settings(**changes)
        self.group, self.sequence = 100, 0
        self.everyone: list[Member] = []  # lost ones too
        port = free_port()
        self.members = {rank: self.member(described(rank, ranks, port, group=self.group, rows=rows)) for rank in ranks}
        assert at_once([member.hook.start for member in self.members.values()]) == [None] * len(ranks)

    def member(self, description: EngineDescription) -> Member:
        if self.weighted:
            description = replace(description, dispatch="weighted")
        engine = TinyEngine(description, forms_again=True)
        if self.weighted:
            for layer in LAYERS:
                engine.tables[layer] = weighted_tables(engine.rows[layer])
        made = Member(engine, Hook(engine, self.config, sources=self.sources))
        self.everyone.append(made)
        return made

    def calls(self, ranks: Sequence[int], *, joining: Sequence[int] = ()) -> list[Callable[[], None]]:
        """What each rank's engine calls once its group is this one."""
        self.group += 1
        port = free_port()
        made: list[Callable[[], None]] = []
        for rank in ranks:
            if rank in joining:
                self.members[rank] = self.member(described(rank, ranks, port, group=self.group, life=1, joins=True))
                made.append(self.members[rank].hook.start)
                continue
            description = described(rank, ranks, port, group=self.group)
            engine = self.members[rank].engine
            engine.form_again(replace(description, dispatch="weighted") if self.weighted else description)
            if self.weighted:
                for layer in LAYERS:
                    engine.tables[layer] = weighted_tables((-1,) * (SLOTS * len(ranks)))
            made.append(self.members[rank].hook.reform)
        return made

    def form(self, ranks: Sequence[int], *, joining: Sequence[int] = ()) -> None:
        """A group of these ranks serves from then on."""
        assert at_once(self.calls(ranks, joining=joining)) == [None] * len(ranks)
        self.members = {rank: self.members[rank] for rank in ranks}

    def step(self, *ranks: int) -> list[BaseException | None]:
        """One step of each rank (all)."""
        chosen = [self.members[rank] for rank in ranks or self.members]
        return at_once([lambda member=member: member.hook.begin_step(num_real_tokens=1) for member in chosen])  # type: ignore[misc]

    def arm(self, rows: Rows, *, shares: Mapping[LayerRef, tuple[float, ...]] | None = None) -> ChunkId:
        """A chunk that every rank has armed."""
        self.sequence += 1
        chunk = chunk_id(1, self.sequence)
        now = next(iter(self.members.values())).rows()
        for member in self.members.values():
            live = member.hook._machine.live  # the planner would have asked
            member.hook.on_message(
                Stage(
                    to=member.engine.description.address,
                    chunk_id=chunk,
                    generation=GenerationNumber(self.sequence),
                    weights_version=0,
                    mesh_id=chunk,
                    layers=tuple(
                        LayerChange(
                            layer=layer,
                            old_digest=live[layer].digest,
                            new_digest=row_digest(layer, _array(row), as_array((shares or {}).get(layer))),
                            new_row=row,
                            new_shares=(shares or {}).get(layer),
                        )
                        for layer, row in rows.items()
                    ),
                    copies=tuple(
                        copy
                        for layer, row in rows.items()
                        for copy in copies(layer, now[layer], row, [RankId(rank) for rank in self.members])
                    ),
                    stage_timeout_s=20.0,
                    arm_ttl_s=20.0,
                )
            )
        for member in self.members.values():
            until(lambda member=member: member.hook._machine.state.value in ("staged", "idle"), "staged")  # type: ignore[misc]
            assert member.hook.status.open_id == chunk, member.hook.status.refusals
            member.hook.on_message(Arm(to=member.engine.description.address, chunk_id=chunk))
        return chunk

    def roll_out(self, rows: Rows, *, shares: Mapping[LayerRef, tuple[float, ...]] | None = None) -> None:
        """A chunk, flipped on all ranks."""
        chunk = self.arm(rows, shares=shares)
        for _ in range(6):
            assert set(self.step()) == {None}
        assert {member.hook.status.flipped_id for member in self.members.values()} == {chunk}

    def check(self) -> Rows:
        """All ranks route alike and hold what their tables say; returns the rows."""
        rows = [member.rows() for member in self.members.values()]
        assert all(found == rows[0] for found in rows)
        assert [member.engine.wrong_slots() for member in self.members.values()] == [[]] * len(rows)
        return rows[0]

    def close(self) -> None:
        assert at_once([member.hook.close for member in self.everyone]) == [None] * len(self.everyone)


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll, with a deadline."""
    done = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        done.wait(0.005)
    raise AssertionError(f"not {what} within {WAIT_S} s")


def weighted_tables(row: Sequence[int]) -> RoutingTables:
    """Tables of an engine that dispatches by shares, even ones."""
    tables = tables_of(row)
    by_slot = even_shares(_array(row)[None], NUM_LOGICAL)[0]
    by_replica = torch.zeros((NUM_LOGICAL, WIDTH), dtype=torch.float32)
    held = tables.logical_to_physical >= 0
    by_replica[held] = torch.from_numpy(by_slot)[tables.logical_to_physical[held]]
    return replace(tables, replica_shares=by_replica)


def shares_of(row: Sequence[int], first: float) -> tuple[float, ...]:
    """Even shares, but that the first replica of every expert with two takes `first`."""
    even = as_values(even_shares(_array(row)[None], NUM_LOGICAL)[0]) or ()
    shares = list(even)
    for expert in set(row) - {-1}:
        mine = [slot for slot, held in enumerate(row) if held == expert]
        if len(mine) == 2:
            shares[mine[0]], shares[mine[1]] = first, 1.0 - first
    return tuple(shares)


def _array(row: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(row, np.int32)
