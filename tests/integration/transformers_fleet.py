"""Two ranks that serve a tiny random Qwen3-MoE of transformers, driven step by step, and the same model in one process.

The rank processes start once; a test starts a group of engines and hooks in them, and another one after that. The driver
sends every rank the same number of steps, as the collectives within them ask for.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from agent.engine.huggingface.batch import GreedyBatch, serve
from agent.engine.huggingface.engine import HuggingFaceEngine
from agent.engine.huggingface.settings import ParallelSettings
from agent.engine.port import EnginePort
from agent.engine.reference.config import RankConfig
from agent.engine.reference.engine import StepHook
from agent.engine.reference.launch import free_port
from agent.engine.reference.messages import LayerInspection
from agent.engine.reference.server import inspect_layer
from agent.hook.hook import Hook, HookConfig
from eplb_service.errors import EplbError
from eplb_service.ids import DeploymentId, RankId
from eplb_service.parent_death import die_with_parent
from tests.integration.hook_fleet import FakeAgent
from tests.integration.reference_doubles import second_rank_late, without_weights

NUM_RANKS = 2
NUM_EXPERTS, TOP_K, REDUNDANT = 16, 4, 4
MOE_LAYERS = (0, 2, 3)  # layer 1 is dense
VOCABULARY = 256
WAIT_S = 90.0
START_S = 200.0
"""For a first answer: rank processes may have to import torch and transformers before it."""
WINDOW_STEPS = 8
EXACT = "batched_mm"
Int64Array = npt.NDArray[np.int64]
Prompts = Sequence[Sequence[int]]


def tiny_qwen(*, seed: int = 11, experts_implementation: str = EXACT) -> Any:
    """A Qwen3-MoE with random weights, the same in every process. Nothing is downloaded."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    kind: Any = Qwen3MoeForCausalLM  # what follows has no types there
    return kind._from_config(Qwen3MoeConfig(**sizes), experts_implementation=experts_implementation).eval()


# ── the same in one process ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Alone:
    """What transformers' own `generate` makes of one rank's prompts. logits: shape (B, V) for each step; counts: (L, E)."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]
    counts: Int64Array


def generate_alone(model: Any, prompts: Prompts, num_tokens: int) -> Alone:
    """Greedy generation by transformers alone; counts are taken by forward hooks on the model's gates, padding left out."""
    longest = max(map(len, prompts))
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in MOE_LAYERS}

    def watch(layer: int, _module: object, _inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        seen[layer].append(outputs[2])

    hooks = [model.model.layers[layer].mlp.gate.register_forward_hook(partial(watch, layer)) for layer in MOE_LAYERS]
    try:
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    finally:
        for handle in hooks:
            handle.remove()
    counts = np.zeros((len(MOE_LAYERS), NUM_EXPERTS), np.int64)
    for row, layer in enumerate(MOE_LAYERS):
        first, *later = seen[layer]
        for chosen in (first[mask.flatten().bool()], *later):
            counts[row] += np.bincount(chosen.flatten().numpy(), minlength=NUM_EXPERTS)
    return Alone(made.sequences[:, longest:].tolist(), list(made.logits), counts)


# ── a rank's process ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """One group of engines. fault: see `HOOKS`. seeds: of each rank's weights."""

    hook_port: int
    socket: str = ""
    fault: str = ""
    seeds: tuple[int, int] = (11, 11)


@dataclass
class Result:
    """What a rank made of its batch so far."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]
    generations: list[tuple[int, ...]]


HookMaker = Callable[[EnginePort, RankConfig], StepHook]
HOOKS: dict[str, Callable[[EnginePort, RankConfig, HookMaker], StepHook]] = {
    "": lambda port, config, make: make(port, config),
    "weightless": without_weights,
    "one_rank_late": second_rank_late,
}


class Rank:
    """The engine of one rank, and what its driver asks of it."""

    def __init__(self, position: int, group: dist.ProcessGroup, plan: GroupPlan) -> None:
        self.position = position
        self.model = tiny_qwen(seed=plan.seeds[position])
        settings = ParallelSettings(
            deployment=DeploymentId("test"),
            rank_ids=(RankId(10), RankId(20)),
            nodes=("node0", "node0"),
            rendezvous_host="127.0.0.1",
            rendezvous_port=plan.hook_port,
            num_redundant_experts=REDUNDANT,
        )
        self.engine = HuggingFaceEngine(self.model, settings, group=group)
        if plan.socket:
            self.hook = HOOKS[plan.fault](self.engine.port, cast("RankConfig", self), partial(_hook, plan.socket))
            self.hook.start()
            self.engine.watch(self.hook)
        self.begin([])

    def begin(self, prompts: Prompts, max_new_tokens: int = 1, eos_token_id: int | None = None) -> None:
        self.batch = GreedyBatch(
            self.model, prompts, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, keep_logits=True
        )

    def step(self, count: int) -> None:
        for _ in range(count):
            self.batch.step(self.engine)

    def serve(self) -> None:
        serve(self.engine, self.batch)

    def result(self) -> Result:
        return Result(self.batch.tokens, self.batch.logits, self.batch.generations)

    def boundary(self) -> int:
        return self.engine.boundary

    def inspect(self) -> list[LayerInspection]:
        pairs = zip(self.engine.layers, self.engine.generations, strict=True)
        return [inspect_layer(layer, "target", generation) for layer, generation in pairs]

    def close(self) -> None:
        self.hook.close()


def _hook(socket: str, port: EnginePort, _: RankConfig) -> StepHook:
    config = HookConfig(
        socket_path=socket,
        staging_bytes=8 << 20,
        vote_period=2,
        window_steps=WINDOW_STEPS,
        sub_windows=2,
        rendezvous_timeout_s=WAIT_S,
        idle_after_s=0.5,
        pulse_period_s=0.5,
        reconnect_max_s=0.2,
    )
    return Hook(port, config)


def rank_main(position: int, port: int, pipe: Connection) -> None:
    """Carry out commands until the driver goes away: (name, arguments) → the answer, or what was raised."""
    die_with_parent(os.getppid())
    os.environ |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    timeout = timedelta(seconds=WAIT_S)
    dist.init_process_group("gloo", init_method=address, rank=position, world_size=NUM_RANKS, timeout=timeout)
    group = dist.new_group()
    rank: Rank | None = None
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            if command == "start":
                rank = None
                rank = Rank(position, group, *arguments)
                answer = None
            else:
                assert rank is not None
                answer = getattr(rank, command)(*arguments)
        except EplbError as error:
            answer = error
        pipe.send(answer)


# ── the driver ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def preload() -> None:
    """Have the server that ranks fork from import what they need, while others go on here."""
    multiprocessing.set_forkserver_preload([__name__, "transformers.models.qwen3_moe.modeling_qwen3_moe"])
    forkserver.ensure_running()


@dataclass
class Ranks:
    """The rank processes."""

    pipes: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    @classmethod
    def start(cls) -> Ranks:
        preload()
        context = multiprocessing.get_context("forkserver")
        ranks, port = cls(), free_port()
        for position in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(position, port, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.pipes.append(ours)
            ranks.processes.append(process)
        return ranks

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """The same to all ranks at once."""
        return self.ask_each(command, [arguments] * NUM_RANKS)

    def ask_each(self, command: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """To each rank its own. Raises the first error that a rank answers with."""
        for pipe, own in zip(self.pipes, arguments, strict=True):
            pipe.send((command, *own))
        answers = []
        for position, pipe in enumerate(self.pipes):
            timeout_s = START_S if command == "start" else WAIT_S
            assert wait([pipe], timeout_s), f"rank at {position} does not answer {command!r} within {timeout_s:g} s"
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, EplbError):
                raise answer
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(WAIT_S)
        hanging = [position for position, process in enumerate(self.processes) if process.is_alive()]
        for position in hanging:
            self.processes[position].kill()
        assert not hanging, f"ranks at {hanging} do not end"


class Group:
    """A group of engines with their hooks, in the rank processes, and the agent process's end of their sockets."""

    def __init__(self, ranks: Ranks, *, fault: str = "") -> None:
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory(prefix="eplb-")
        self.agent = FakeAgent(f"{self._folder.name}/agent.sock")
        ranks.ask("start", GroupPlan(hook_port=free_port(), socket=self.agent.path, fault=fault))
        self.agent.until(lambda: len(self.agent.registrations) == NUM_RANKS, "registration of all ranks")

    def begin(self, prompts: Sequence[Prompts], max_new_tokens: int, eos_token_id: int | None = None) -> None:
        """Give each rank its prompts."""
        self.ranks.ask_each("begin", [(own, max_new_tokens, eos_token_id) for own in prompts])

    def step(self, count: int = 1) -> None:
        self.ranks.ask("step", count)

    def serve(self, prompts: Sequence[Prompts], max_new_tokens: int, eos_token_id: int | None = None) -> list[Result]:
        """Until all requests have ended."""
        self.begin(prompts, max_new_tokens, eos_token_id)
        self.ranks.ask("serve")
        return self.results()

    def results(self) -> list[Result]:
        results: list[Result] = self.ranks.ask("result")
        return results

    def inspect(self) -> list[list[LayerInspection]]:
        """Each rank's layers."""
        inspections: list[list[LayerInspection]] = self.ranks.ask("inspect")
        return inspections

    def counts(self) -> Mapping[int, Int64Array]:
        """All that hooks have reported since their start, by position, shape (L, E); steps on to the end of the window."""
        boundary: int
        (boundary, _) = self.ranks.ask("boundary")
        windows = boundary // WINDOW_STEPS + 1
        self.begin([[], []], 1)
        self.step(windows * WINDOW_STEPS - boundary + 1)
        self.agent.until(lambda: len(self.agent.windows) >= NUM_RANKS * windows, f"{windows} windows of every rank")
        reported = {position: np.zeros((len(MOE_LAYERS), NUM_EXPERTS), np.int64) for position in range(NUM_RANKS)}
        for window in self.agent.windows:
            if window.window_index < windows:
                (table,) = window.tables
                assert table.layer_ids == MOE_LAYERS
                reported[window.rank_id // 10 - 1] += table.counts.sum(axis=0)
        return reported

    def close(self) -> None:
        """Ends the hooks; fails when one said what the wire does not carry."""
        try:
            self.ranks.ask("close")
        finally:
            self.agent.close()
            self._folder.cleanup()
