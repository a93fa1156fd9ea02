"""What tests of whole fleets share: a fleet in a temporary directory, requests to it, and what a correct one answers."""

from __future__ import annotations

import selectors
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agent.engine.reference.client import RankClient
from agent.engine.reference.config import FleetConfig
from agent.engine.reference.launch import Fleet, free_port, launch_ranks
from agent.engine.reference.messages import Ended, NewTokens, Rejected
from agent.engine.reference.model import resolve
from eplb_service.ids import DeploymentId, RankId
from examples.tiny_moe.generate import Oracle

WAIT_S = 90.0
TEXT = (
    b"def row_digest(layer, row):\n    return blake2b(encode(layer) + row.tobytes())\n"
    b"Permission is hereby granted, free of charge, to any person obtaining a copy. Jan  3 10:22:01 host sshd[411]: accepted"
)


def fleet_config(directory: str, *, model: str, num_ranks: int, first_rank_id: int = 0, **options: Any) -> FleetConfig:
    return FleetConfig(
        deployment=DeploymentId("tests"),
        model_factory=f"tests.integration.reference_models:{model}",
        rank_ids=tuple(RankId(first_rank_id + position) for position in range(num_ranks)),
        nodes=tuple(f"node-{position // 2}" for position in range(num_ranks)),
        run_directory=directory,
        engine_port=free_port(),
        hook_port=free_port(),
        **{"start_timeout_s": WAIT_S, "step_timeout_s": WAIT_S, **options},
    )


@contextmanager
def running_fleet(**options: Any) -> Iterator[Fleet]:
    """A fleet that is stopped in an orderly way when the block ends well, and killed when it does not."""
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory, launch_ranks(fleet_config(directory, **options)) as fleet:
        yield fleet
        fleet.stop(timeout_s=WAIT_S)


@dataclass
class Answer:
    """What one request brought."""

    tokens: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    generations: list[tuple[int, ...]] = field(default_factory=list)
    ended: Ended | None = None
    rejected: Rejected | None = None


def prompts_for(request_ids: Sequence[int]) -> dict[int, bytes]:
    """A prompt for each request, of differing lengths from 1 to 20."""
    return {i: TEXT[(7 * i) % 90 :][: 1 + (11 * i) % 20] for i in request_ids}


def serve(
    clients: Mapping[int, RankClient], requests: Mapping[int, tuple[int, bytes]], max_new_tokens: int
) -> dict[int, Answer]:
    """Send requests, {request id: (position of its rank, prompt)}, and collect all that comes until each has ended."""
    answers = {request_id: Answer() for request_id in requests}
    for request_id, (position, prompt) in requests.items():
        clients[position].submit(request_id=request_id, prompt=prompt, max_new_tokens=max_new_tokens, kind="test")
    deadline = time.monotonic() + WAIT_S
    with selectors.DefaultSelector() as selector:
        for client in clients.values():
            selector.register(client, selectors.EVENT_READ, client)
        while any(answer.ended is None and answer.rejected is None for answer in answers.values()):
            ready = selector.select(deadline - time.monotonic())
            assert ready, "the fleet did not answer in time"
            for key, _ in ready:
                for message in key.data.receive(timeout_s=0.0):
                    collect(message, answers)
    return answers


def collect(message: object, answers: Mapping[int, Answer]) -> None:
    match message:
        case NewTokens():
            for new in message.tokens:
                answer = answers[new.request_id]
                assert new.index == len(answer.tokens)
                answer.tokens.append(new.token)
                answer.boundaries.append(message.boundary)
                answer.generations.append(message.generations)
        case Ended():
            answers[message.request_id].ended = message
        case Rejected():
            answers[message.request_id].rejected = message


def expected(model: str, requests: Mapping[int, tuple[int, bytes]], max_new_tokens: int) -> dict[int, list[int]]:
    """What the model generates alone in this process, without experts in other places."""
    oracle = Oracle(resolve(f"tests.integration.reference_models:{model}")())
    return {request_id: oracle.generate(request_id, prompt, max_new_tokens) for request_id, (_, prompt) in requests.items()}
