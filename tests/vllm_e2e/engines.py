"""VLLM as processes in its own environment: the offline engine at TP2 x EP2, and the OpenAI server at DP2 x EP2.

Both get this project's adviser as any vLLM does: the package is installed, EPLB_ADVISER is set, and vLLM loads its entry point.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from agent.engine.reference.launch import free_port
from tests.vllm_e2e.checks import CheckError, RankView, read_views
from tests.vllm_e2e.cpu_backend import AS_VLLM, ROUTING
from tests.vllm_e2e.plain_model import Output
from tests.vllm_e2e.service import ANSWER_S, Service, wait_until

NUM_RANKS = 2
NUM_REDUNDANT = 4
STARTED_S = 600.0
"""Of an engine, on a machine that has other work: minutes of imports."""
ANSWERED_S = 180.0
"""Of what an engine is told to do; it may be in the middle of a question to the planner."""
ENDED_S = 60.0
LINES = 40
"""Of a log, that are shown from the first error on."""
DEPLOYMENT = "tiny-moe"
MODEL = "tiny"
"""Name that the server is asked by."""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def arguments(model: Path, step_interval: int) -> dict[str, Any]:
    """What both engines are started with."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",  # 16 bits differ between sizes of groups
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": {
            "window_size": step_interval,  # every step counts, and once
            "step_interval": step_interval,
            "num_redundant_experts": NUM_REDUNDANT,
            "use_async": False,
            "communicator": "torch_gloo",
        },
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": 128,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 32 << 20,
        "worker_extension_cls": "tests.vllm_e2e.worker_view.WorkerView",
        "seed": 0,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an engine runs. python: of its environment; folder: for what it needs and leaves; routing: see `cpu_backend`."""

    python: Path
    folder: Path
    model: Path
    step_interval: int
    routing: str = AS_VLLM


def _environment(place: Place, service: Service) -> dict[str, str]:
    """Of vLLM's processes. The tests' own modules are found beside the environment's, this checkout's packages are not."""
    modules = place.folder / "modules"
    (modules / "tests").mkdir(parents=True)
    for mine in (Path(__file__).parent, Path(__file__).parents[1] / "cpu_device.py"):
        (modules / "tests" / mine.name).symlink_to(mine)
    plugin = modules / "cpu_backend_for_tests-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-backend-for-tests\nVersion: 0\n")
    entry = "cpu_backend_for_tests = tests.vllm_e2e.cpu_backend:install"
    (plugin / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EPLB_", "VLLM_", "PYTHON"))}
    return kept | dict.fromkeys(ONE_THREAD, "1") | {
        "PYTHONPATH": str(modules),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "EPLB_ADVISER": str(service.socket),
        "EPLB_DEPLOYMENT": DEPLOYMENT,
        "EPLB_ADVISER_TIMEOUT_S": f"{ANSWER_S:g}",
        ROUTING: place.routing,
        "VLLM_CACHE_ROOT": str(place.folder / "cache"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENGINE_READY_TIMEOUT_S": f"{STARTED_S:.0f}",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


@contextmanager
def _process(place: Place, service: Service, words: Sequence[str], environment: dict[str, str]) -> Iterator[_Running]:
    """One process and all that it starts, ended with the block."""
    log = place.folder / "vllm.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(place.python), "-m", *words],
            env=_environment(place, service) | environment,
            cwd=place.folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield _Running(process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers wait without a time-out where a peer is gone
        process.wait(ENDED_S)


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def last_words(self) -> str:
        """Its log from the first error on, or its end."""
        lines = self.log.read_text(errors="replace").splitlines()
        first = next(
            (number for number, line in enumerate(lines) if "ERROR" in line or "Traceback" in line), len(lines) - LINES
        )
        return "\n".join("    " + line[:300] for line in lines[max(0, first) :][:LINES])

    def said(self, text: str) -> list[str]:
        """Lines of its log that hold a text."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]


class OfflineEngine:
    """TP2 x EP2: every rank sees all tokens. A prompt's tokens are decoded in as many steps as tokens are asked for."""

    def __init__(self, running: _Running, place: Place, orders: Connection) -> None:
        self._running, self._place, self._orders = running, place, orders

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Output]:
        """All prompts in the same steps."""
        answered = self._told("generate", prompts=[list(prompt) for prompt in prompts], num_tokens=num_tokens)
        return [Output(tokens=tuple(tokens), logprobs=tuple(logprobs)) for tokens, logprobs in answered]

    def views(self) -> list[RankView]:
        """What each rank shows."""
        return read_views(Path(self._told("call", method="write_view", words=[str(self._place.folder)])), NUM_RANKS)

    def route(self, routing: str) -> None:
        """From the next step on; see `cpu_backend`."""
        self._told("call", method="route", words=[routing])

    def said(self, text: str) -> list[str]:
        """Lines of vLLM's log that hold a text."""
        return self._running.said(text)

    def _told(self, kind: str, **given: Any) -> Any:
        self._orders.send((kind, given))
        return _received(self._orders, self._running, ANSWERED_S)


def _received(orders: Connection, running: _Running, most_s: float) -> Any:
    deadline = time.monotonic() + most_s
    while not orders.poll(1.0):
        if running.ended or time.monotonic() > deadline:
            raise CheckError(f"vLLM did not answer within {most_s:.0f} s, or ended:\n{running.last_words()}")
    try:
        fine, answer = orders.recv()
    except EOFError:
        raise CheckError(f"vLLM ended:\n{running.last_words()}") from None
    if not fine:
        raise CheckError(f"vLLM failed: {answer}\n{running.last_words()}")
    return answer


@contextmanager
def offline_engine(place: Place, service: Service) -> Iterator[OfflineEngine]:
    """Up within the block."""
    orders = place.folder / "orders.sock"
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # so that all prompts of a batch are there before its first step
    with (
        Listener(str(orders), family="AF_UNIX") as listener,
        _process(place, service, ["tests.vllm_e2e.offline_engine", str(orders)], in_process) as running,
    ):
        connection = listener.accept()
        connection.send(arguments(place.model, place.step_interval) | {"tensor_parallel_size": NUM_RANKS})
        _received(connection, running, STARTED_S)
        try:
            yield OfflineEngine(running, place, connection)
        finally:
            connection.close()
            with suppress(CheckError):  # it is killed then
                wait_until(lambda: running.ended, "vLLM to end", time.monotonic() + ENDED_S)


class Server:
    """The OpenAI server at DP2 x EP2: two engines that step together, each with requests of its own."""

    def __init__(self, running: _Running, place: Place, port: int) -> None:
        self._running, self._place, self._port = running, place, port

    def complete(self, engine: int, prompt: Sequence[int], num_tokens: int) -> Output:
        """One completion, by one of the engines."""
        body = {
            "model": MODEL, "prompt": list(prompt), "max_tokens": num_tokens, "min_tokens": num_tokens, "temperature": 0.0,
            "ignore_eos": True, "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        (choice,) = self._post("/v1/completions", body, {"X-data-parallel-rank": str(engine)})["choices"]
        return Output(tokens=tuple(choice["token_ids"]), logprobs=tuple(choice["logprobs"]["token_logprobs"]))

    def views(self) -> list[RankView]:
        """What each rank shows, each between two steps of its own."""
        self._post("/collective_rpc", {"method": "write_view", "args": [str(self._place.folder)]}, {})
        return read_views(self._place.folder, NUM_RANKS)

    def is_up(self) -> bool:
        """Whether it serves. Raises CheckError when it ended."""
        if self._running.ended:
            raise CheckError(f"vLLM ended:\n{self._running.last_words()}")
        try:
            return self._asked("GET", "/health", None, {})[0] == 200
        except OSError:
            return False

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        try:
            status, answer = self._asked("POST", path, json.dumps(body), headers)
        except OSError as error:
            raise CheckError(f"vLLM did not answer POST {path}: {error!r}\n{self._running.last_words()}") from None
        if status != 200:
            raise CheckError(f"vLLM answers POST {path} with {status}: {answer[:300]!r}\n{self._running.last_words()}")
        return json.loads(answer)

    def _asked(self, verb: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWERED_S)
        try:
            connection.request(verb, path, body, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def server(place: Place, service: Service) -> Iterator[Server]:
    """Up within the block."""
    port = free_port()
    given = arguments(place.model, place.step_interval) | {
        "data_parallel_size": NUM_RANKS, "data_parallel_size_local": NUM_RANKS, "data_parallel_address": "127.0.0.1",
        "api_server_count": 1, "served_model_name": MODEL, "host": "127.0.0.1", "port": port,
    }  # fmt: skip
    with _process(place, service, ["vllm.entrypoints.openai.api_server", *_words(given)], {}) as running:
        found = Server(running, place, port)
        wait_until(found.is_up, "vLLM's server to be up", time.monotonic() + STARTED_S)
        yield found


def _words(given: dict[str, Any]) -> list[str]:
    """Of a command line."""
    words: list[str] = []
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
