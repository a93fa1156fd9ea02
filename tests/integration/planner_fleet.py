"""Ranks without engines: they speak the protocol over gRPC as an agent process does, keep hook state, and never die.

The vote is played here: a chunk flips at one boundary on all ranks once every rank is armed for it. `hold_flips` keeps the
vote from passing, so that a test can look at (or kill) the planner in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import numpy as np

from eplb_service.attach import Attach, FromAgent
from eplb_service.control import (
    CAPABILITY_RESTORE,
    Address,
    Arm,
    Armed,
    Disarm,
    Disarmed,
    Flipped,
    Hello,
    LayerInfo,
    LinkBytes,
    Live,
    LiveLayer,
    ModelInfo,
    Pulse,
    RefusalCode,
    Refused,
    Registration,
    Stage,
    Staged,
    ToRank,
)
from eplb_service.generation import live_digest
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
    chunk_epoch,
)
from eplb_service.pb.v1 import admin_pb2_grpc, agent_pb2, agent_pb2_grpc, placement_pb2_grpc
from eplb_service.placement import Table, row_digest
from eplb_service.rpc import convert
from eplb_service.rpc.channel import open_channel
from eplb_service.window.report import LoadReport, Semantics, TableCounts

MODEL = "tiny"
SUB_WINDOWS = 4
WAIT_S = 60.0


async def until_true(condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait for something that only a question to the planner tells."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not (found := await condition()):
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}")
        await asyncio.sleep(0.01)
    return found


async def until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait for something that another task of this process brings about."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not (found := condition()):
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}")
        await asyncio.sleep(0.005)
    return found


@dataclass
class Rank:
    """State of one hook."""

    address: Address
    generations: dict[LayerRef, int]
    rows: dict[LayerRef, tuple[int, ...]]
    epoch_seen: int = 0
    generation_seen: int = 0
    closed_id: int = 0
    flipped_id: int = 0
    staged: Stage | None = None
    armed_id: int = 0

    def close(self) -> None:
        if self.staged is not None:
            self.closed_id = max(self.closed_id, self.staged.chunk_id)
        self.staged, self.armed_id = None, 0


@dataclass
class Fleet:
    """Ranks of one deployment behind one agent process. Tokens of expert e in layer l: `loads[l, e]` for each report.

    flip_s: how long a rank says that a flip held up steps.
    rank_ids: in column order; empty = 0 to num_ranks - 1. restorers: ranks that say that they have a backup. no_backup: why
    they refuse what is to come from it all the same; empty = they do not.
    """

    target: str
    deployment: str = "chat"
    num_ranks: int = 4
    num_layers: int = 3
    num_logical: int = 8
    slots: int = 3
    window_steps: int = 8
    staging_bytes: int = 1 << 20
    expert_bytes: int = 1000
    layers_per_chunk: int = 1
    flip_s: float = 0.001
    group_id: int = 77
    rank_ids: tuple[int, ...] = ()
    dispatch: str = "even"
    restorers: tuple[int, ...] = ()
    no_backup: str = ""
    hold_hello: bool = False
    hold_flips: bool = False
    hold_staging: bool = False
    off_reason: str = ""
    ranks: list[Rank] = field(default_factory=list)
    sent: list[FromAgent] = field(default_factory=list)
    got: list[ToRank] = field(default_factory=list)
    hellos: list[int] = field(default_factory=list)
    replies: list[Any] = field(default_factory=list)
    boundary: int = 0
    window_index: int = 0
    connections: int = 0
    endings: list[grpc.aio.AioRpcError] = field(default_factory=list)
    registrations: int = 0

    def __post_init__(self) -> None:
        # Each rank stages at most what one layer may need: a chunk holds `layers_per_chunk` layers.
        self.staging_bytes = self.slots * self.expert_bytes * self.layers_per_chunk
        self.rank_ids = self.rank_ids or tuple(range(self.num_ranks))
        self.num_ranks = len(self.rank_ids)
        table = Table.linear(
            model=MODEL,
            layer_ids=range(self.num_layers),
            num_logical=self.num_logical,
            rank_ids=self.rank_ids,
            slots_per_rank=self.slots,
        )
        rows = {layer: tuple(row.tolist()) for layer, row in zip(table.layers, table.physical_to_logical, strict=True)}
        for rank in self.rank_ids:
            address = Address(RankId(rank), Incarnation(1000 + rank), GroupId(self.group_id))
            self.ranks.append(Rank(address, dict.fromkeys(rows, 0), dict(rows)))
        self._out: asyncio.Queue[FromAgent] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._reports: asyncio.Queue[agent_pb2.LoadReport] = asyncio.Queue()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Self:
        self.channel = open_channel(self.target)
        self.agent = agent_pb2_grpc.AgentServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.placement = placement_pb2_grpc.PlacementServiceStub(self.channel)
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._report_run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        await self.channel.close(0)

    async def _run(self) -> None:
        """Connect, and connect again whenever the planner goes away."""
        while True:
            while self.hold_hello:  # noqa: ASYNC110  (a test lets it go on)
                await asyncio.sleep(0.01)
            try:
                for rank in self.ranks:
                    self.registrations += 1
                    await self.agent.Register(convert.registration_to_pb(self.registration(rank)), timeout=2)
                self.connections += 1
                await self._control()
            except grpc.aio.AioRpcError as error:
                self.endings.append(error)
            await asyncio.sleep(0.05)

    async def _control(self) -> None:
        self._out = asyncio.Queue()
        attach = Attach(deployment=DeploymentId(self.deployment), ranks=tuple(rank.address for rank in self.ranks))
        self._out.put_nowait(attach)
        stream = self.agent.Control(self._outgoing(self._out))
        pulses = asyncio.create_task(self._pulse())
        try:
            async for envelope in stream:
                message = convert.to_rank_from_pb(envelope)
                self.got.append(message)
                self._handle(self.ranks[self.rank_ids.index(message.to.rank_id)], message)
        finally:
            pulses.cancel()

    async def _outgoing(self, queue: asyncio.Queue[FromAgent]) -> AsyncIterator[agent_pb2.ControlFromAgent]:
        while True:
            yield convert.from_agent_to_pb(await queue.get())

    async def _pulse(self) -> None:
        while True:
            for rank in self.ranks:
                self._out.put_nowait(
                    Pulse(
                        sender=rank.address,
                        boundary=self.boundary,
                        idle=False,
                        voting=not self.off_reason,
                        off_reason=self.off_reason,
                        windows_dropped=0,
                        weights_version=1,
                    )
                )
            await asyncio.sleep(0.2)

    async def _report_run(self) -> None:
        """Send each report until it is answered."""
        while True:
            report = await self._reports.get()
            while not await self._send_report(report):  # noqa: ASYNC110  (tries again)
                await asyncio.sleep(0.05)

    async def _send_report(self, report: agent_pb2.LoadReport) -> bool:
        try:
            replies = [reply async for reply in self.agent.Report(iter([report]), timeout=5)]
        except grpc.aio.AioRpcError:
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return False  # gRPC cancels a call whose connection went away under it
        self.replies.extend(replies)
        return bool(replies)

    def registration(self, rank: Rank) -> Registration:
        layers = tuple(
            LayerInfo(layer_id=layer, num_logical=self.num_logical, slots=self.slots, expert_bytes=self.expert_bytes)
            for layer in range(self.num_layers)
        )
        return Registration(
            deployment=DeploymentId(self.deployment),
            address=rank.address,
            node=f"node{rank.address.rank_id // 2}",
            group_rank_ids=tuple(RankId(rank) for rank in self.rank_ids),
            phase=Phase.DECODE,
            stage=0,
            models=(ModelInfo(name=MODEL, digest="weights", manifest_digest="manifest", layers=layers),),
            capacity=1.0,
            dispatch=self.dispatch,
            vote_period=1,
            window_steps=self.window_steps,
            sub_windows=SUB_WINDOWS,
            staging_bytes=self.staging_bytes,
            replica_table_width=16,
            weights_version=1,
            capabilities=(CAPABILITY_RESTORE,) if rank.address.rank_id in self.restorers else (),
        )

    # ── what a hook does ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _say(self, message: FromAgent) -> None:
        self.sent.append(message)
        self._out.put_nowait(message)

    def _handle(self, rank: Rank, message: ToRank) -> None:
        match message:
            case Hello():
                if message.epoch < rank.epoch_seen:
                    return
                self.hellos.append(message.epoch)
                rank.epoch_seen = message.epoch
                if rank.staged is not None and chunk_epoch(rank.staged.chunk_id) < message.epoch:
                    rank.close()
                self._say(self._live(rank, message.epoch))
            case Stage():
                self._stage(rank, message)
            case Arm():
                if rank.staged is not None and rank.staged.chunk_id == message.chunk_id:
                    rank.armed_id = message.chunk_id
                    self._say(Armed(sender=rank.address, chunk_id=message.chunk_id))
                    self.vote()
                elif rank.flipped_id == message.chunk_id:
                    self._say_flipped(rank, message.chunk_id)
            case Disarm():
                if rank.flipped_id == message.chunk_id:
                    self._say_flipped(rank, message.chunk_id)
                    return
                if rank.staged is not None and rank.staged.chunk_id == message.chunk_id:
                    rank.close()
                rank.closed_id = max(rank.closed_id, message.chunk_id)
                self._say(Disarmed(sender=rank.address, chunk_id=message.chunk_id))

    def _stage(self, rank: Rank, stage: Stage) -> None:
        def refuse(code: RefusalCode, reason: str) -> None:
            self._say(Refused(sender=rank.address, chunk_id=stage.chunk_id, code=code, reason=reason))

        if stage.chunk_id <= rank.closed_id or chunk_epoch(stage.chunk_id) < rank.epoch_seen:
            return refuse(RefusalCode.CLOSED, "closed before")
        if rank.staged is not None and rank.staged.chunk_id != stage.chunk_id:
            return refuse(RefusalCode.BUSY, f"{rank.staged.chunk_id:#x} is open")
        for change in stage.layers:
            if row_digest(change.layer, np.array(rank.rows[change.layer])) != change.old_digest:
                return refuse(RefusalCode.OLD_DIGEST, f"layer {change.layer} routes by another row")
        mine = [copy for copy in stage.copies if copy.is_from_backup and copy.target_rank == rank.address.rank_id]
        if mine and (self.no_backup or rank.address.rank_id not in self.restorers):
            rank.closed_id = max(rank.closed_id, stage.chunk_id)
            return refuse(RefusalCode.TRANSFER, f"expert {mine[0].expert} was not restored: {self.no_backup or 'no backup'}")
        rank.staged = stage
        rank.generation_seen = max(rank.generation_seen, stage.generation)
        if not self.hold_staging:
            self._say(Staged(sender=rank.address, chunk_id=stage.chunk_id, seconds=0.01, received=LinkBytes(same_node=1000)))
        return None

    def vote(self) -> None:
        """Flip on all ranks when all are armed for one chunk."""
        ids = {rank.armed_id for rank in self.ranks}
        if self.hold_flips or len(ids) != 1 or 0 in ids:
            return
        self.boundary += 1
        for rank in self.ranks:
            stage = rank.staged
            assert stage is not None
            for change in stage.layers:
                rank.rows[change.layer] = change.new_row
                rank.generations[change.layer] = stage.generation
            rank.flipped_id = rank.closed_id = stage.chunk_id
            rank.staged, rank.armed_id = None, 0
            self._say_flipped(rank, stage.chunk_id, tuple(change.layer for change in stage.layers))

    def _say_flipped(self, rank: Rank, chunk: int, layers: tuple[LayerRef, ...] = ()) -> None:
        digests = tuple((layer, row_digest(layer, np.array(rank.rows[layer]))) for layer in layers or rank.rows)
        self._say(
            Flipped(sender=rank.address, chunk_id=ChunkId(chunk), boundary=self.boundary, digests=digests, stall_s=self.flip_s)
        )

    def _live(self, rank: Rank, epoch: Epoch) -> Live:
        layers = tuple(
            LiveLayer(
                layer=layer,
                generation=GenerationNumber(rank.generations[layer]),
                digest=row_digest(layer, np.array(row)),
                row=row,
            )
            for layer, row in rank.rows.items()
        )
        return Live(
            sender=rank.address,
            epoch=epoch,
            epoch_seen=Epoch(rank.epoch_seen),
            generation_seen=GenerationNumber(rank.generation_seen),
            closed_id=ChunkId(rank.closed_id),
            flipped_id=ChunkId(rank.flipped_id),
            boundary=self.boundary,
            weights_version=1,
            voting=not self.off_reason,
            off_reason=self.off_reason,
            layers=layers,
        )

    # ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def report(
        self,
        loads: np.ndarray[Any, np.dtype[np.int64]],
        *,
        step_s: float = 0.01,
        phase: Phase = Phase.DECODE,
        only_rank: int | None = None,
    ) -> None:
        """One window of every rank. Loads: shape (L, E), tokens of all ranks together, split evenly.

        only_rank: this rank sent them all.
        """
        digest = live_digest({layer: row_digest(layer, np.array(row)) for layer, row in self.ranks[0].rows.items()})
        begin = self.window_index * self.window_steps
        for number, rank in enumerate(self.ranks):
            part = loads // self.num_ranks + (number < loads % self.num_ranks)
            if only_rank is not None:
                part = loads if number == only_rank else np.zeros_like(loads)
            series = np.stack([part // SUB_WINDOWS + (index < part % SUB_WINDOWS) for index in range(SUB_WINDOWS)])
            report = LoadReport(
                rank_id=rank.address.rank_id,
                incarnation=rank.address.incarnation,
                group_id=rank.address.group_id,
                window_index=self.window_index,
                boundary_begin=begin,
                boundary_end=begin + self.window_steps,
                forward_passes=self.window_steps,
                tokens=int(part[0].sum()),
                semantics=Semantics.LOCAL_TOKENS,
                phase=phase,
                live_digest_begin=digest,
                live_digest_end=digest,
                tables=(TableCounts(model=MODEL, layer_ids=tuple(range(self.num_layers)), counts=series.astype(np.int64)),),
                step_time_min_s=step_s,
                step_time_mean_s=step_s,
                step_time_max_s=step_s,
            )
            self._reports.put_nowait(convert.report_to_pb(DeploymentId(self.deployment), report))
        self.window_index += 1
        self.boundary = max(self.boundary, begin + self.window_steps)

    def skewed(self, hot: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        """One expert takes most of the tokens of every layer. Shape (L, E)."""
        loads = np.full((self.num_layers, self.num_logical), 2000, np.int64)
        loads[:, hot] = 20_000
        return loads

    def busiest(self, loads: np.ndarray[Any, np.dtype[np.int64]]) -> float:
        """Load of each layer's busiest rank under the rows that are live, summed over layers, for each step; even split."""
        total = 0.0
        for layer, row in self.ranks[0].rows.items():
            held = np.array(row)
            copies = np.bincount(held, minlength=self.num_logical)
            each = loads[layer.layer_id][held] / copies[held]
            total += float(each.reshape(self.num_ranks, -1).sum(axis=1).max())
        return total / self.window_steps

    def even(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """What the placement as loaded already balances: experts with two copies get twice the tokens. Shape (L, E)."""
        copies = np.bincount(np.array(self.ranks[0].rows[LayerRef(MODEL, 0)]), minlength=self.num_logical)
        return np.tile(copies * 4000, (self.num_layers, 1)).astype(np.int64)

    @property
    def live_generations(self) -> set[int]:
        return {generation for rank in self.ranks for generation in rank.generations.values()}

    def all_route_alike(self) -> bool:
        """Invariant 1, as far as a vote that is played here can break it."""
        return all(rank.rows == self.ranks[0].rows for rank in self.ranks)
