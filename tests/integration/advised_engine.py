"""An engine that moves its own weights, without weights: it asks as an agent process does, and goes where it is told."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from eplb_service.advice import Advice, AdviceRequest, map_digest
from eplb_service.ids import DeploymentId, GenerationNumber
from eplb_service.pb.v1 import admin_pb2_grpc, adviser_pb2_grpc, placement_pb2_grpc
from eplb_service.rpc.channel import open_channel
from eplb_service.rpc.convert_advice import advice_from_pb, advice_request_to_pb


@dataclass
class Engine:
    """One engine. follows: it goes to the map that it is told."""

    target: str
    deployment: str = "vllm-chat"
    num_ranks: int = 4
    num_layers: int = 3
    num_logical: int = 8
    slots: int = 3
    origin: int = 77
    follows: bool = True
    timeout_s: float = 5.0
    nodes: tuple[str, ...] = ("a", "a", "b", "b")
    num_groups: int = 1
    dispatch: str = "hashed"
    expert_bytes: tuple[int, ...] = (1000, 1000, 1000)
    steps: int = 3000
    copied: tuple[int, float, bool] = (0, 0.0, False)
    sequence: int = 0
    answers: list[Advice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = self.linear()

    def linear(self) -> npt.NDArray[np.int32]:
        row = np.arange(self.num_ranks * self.slots, dtype=np.int32) % self.num_logical
        return np.tile(row, (self.num_layers, 1))

    async def __aenter__(self) -> Self:
        self.channel = open_channel(self.target)
        self.adviser = adviser_pb2_grpc.AdviserServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.placement = placement_pb2_grpc.PlacementServiceStub(self.channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.channel.close(0)

    def skewed(self, hot: int = 0) -> npt.NDArray[np.float64]:
        """One expert takes most of the tokens of every layer. Shape (L, E)."""
        load = np.full((self.num_layers, self.num_logical), 2000.0)
        load[:, hot] = 20_000.0
        return load

    def even(self) -> npt.NDArray[np.float64]:
        """What the map as loaded balances already. Shape (L, E)."""
        copies = np.bincount(self.linear()[0], minlength=self.num_logical)
        return np.tile(copies * 4000.0, (self.num_layers, 1))

    def question(self, load: npt.NDArray[np.float64]) -> AdviceRequest:
        return AdviceRequest(
            deployment=DeploymentId(self.deployment),
            engine="vllm 0.33.0",
            origin=self.origin,
            sequence=self.sequence,
            model="tiny",
            layer_ids=tuple(range(self.num_layers)),
            rank_ids=tuple(range(self.num_ranks)),
            nodes=self.nodes,
            num_logical=self.num_logical,
            dispatch=self.dispatch,
            num_groups=self.num_groups,
            load=load,
            current=self.rows,
            digest=map_digest(self.rows),
            expert_bytes=self.expert_bytes,
            steps=self.steps,
            step_time_s=0.03,
            timeout_s=self.timeout_s,
            copied_generation=GenerationNumber(self.copied[0]),
            copied_s=self.copied[1],
            copy_held_steps=self.copied[2],
        )

    async def ask(self, load: npt.NDArray[np.float64], *, again: bool = False) -> Advice:
        """One more question (again: the last one), and what follows from its answer."""
        self.sequence += not again
        request = self.question(load)
        reply = await self.adviser.Advise(advice_request_to_pb(request), timeout=self.timeout_s)
        answer = advice_from_pb(reply, request)
        self.answers.append(answer)
        if answer.move and self.follows and answer.rows is not None:
            self.rows = answer.rows.copy()
        return answer

    async def ask_often(self, load: npt.NDArray[np.float64], times: int) -> Advice:
        """The last of so many answers."""
        for _ in range(times):
            await self.ask(load)
        return self.answers[-1]

    async def ask_until_move(self, load: npt.NDArray[np.float64], most: int = 8) -> Advice:
        """Ask until it is told to move."""
        for _ in range(most):
            answer = await self.ask(load)
            if answer.move:
                return answer
        raise AssertionError(f"{most} questions, never told to move: {[one.reason for one in self.answers]}")

    def restarted(self, origin: int) -> None:
        """Another life of the process: it starts with the map that it loads by itself."""
        self.origin, self.sequence, self.rows = origin, 0, self.linear()

    def with_layers(self, num_layers: int) -> Engine:
        return dataclasses.replace(self, num_layers=num_layers, expert_bytes=(1000,) * num_layers, answers=[], sequence=0)
