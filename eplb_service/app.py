"""The planner process: starts its parts in order, says when it is ready, stops in order.

    store → metrics → gRPC (NOT_SERVING) → policies' process → deployments → SERVING, ready file

A part that cannot start ends the process with one sentence (see `cli/root.py` for the exit codes). SIGTERM and SIGINT stop
it: ready file away, NOT_SERVING, streams ended, waiting writes done, leads given up, store closed. A second signal
ends it at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import structlog

from eplb_service import __version__, failpoints, log
from eplb_service.clock import SystemClock
from eplb_service.config import EMBEDDED, LoadedConfig, ServeConfig
from eplb_service.errors import EnvironmentFault, EplbError, InvalidInputError
from eplb_service.planner.context import PlannerContext, StoreHealth
from eplb_service.planner.planner import Planner
from eplb_service.planner.proposing import Proposer
from eplb_service.policy.registry import policy_names
from eplb_service.rpc.channel import server_credentials
from eplb_service.rpc.server import RpcServer
from eplb_service.solver.solver import Solver
from eplb_service.store.base import Store
from eplb_service.store.open import open_store
from eplb_service.telemetry import Metrics, MetricsServer

GRACE_S = 2.0
STORE_PROBE_S = 1.0
OWNER_CHARACTERS_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Where a running planner is. metrics_port: 0 = not served."""

    host: str
    port: int
    metrics_port: int
    store: str

    @property
    def address(self) -> str:
        """For clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104  # a name, nothing is bound
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


class Service:
    """The parts of a planner, started and stopped together. Tests may give it a store or a solver of their own."""

    def __init__(self, config: ServeConfig, *, store: Store | None = None, solver: Solver | None = None) -> None:
        self.config = config
        self.metrics = Metrics(__version__)
        self.health = StoreHealth(self.metrics)
        self.store = store or open_store(config.store.address, Path(config.store.data_dir), password=config.store.password)
        self.solver = solver or Solver(policies=(config.planning.policy,), memory_bytes=config.solver.memory_bytes)
        self.planner: Planner | None = None
        self._server: RpcServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._probe: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("eplb.planner")

    async def start(self) -> Ready:
        """Start everything; on a failure nothing is left running. Raises EplbError, one sentence."""
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> Ready:
        config = self.config
        _check_policy(config.planning.policy)
        listen = config.listen
        tls = (Path(name) if name else None for name in (listen.tls_cert, listen.tls_key, listen.tls_client_ca))
        credentials = server_credentials(*tls)
        await self.store.start()
        store_name = await self.store.ping()
        metrics_port = 0
        if config.metrics.enabled:
            self._metrics_server = MetricsServer(self.metrics, host=config.metrics.host, port=config.metrics.port)
            metrics_port = self._metrics_server.start()
        context = PlannerContext(
            config=config,
            gate=config.gate_config(),
            validation=config.validation_config(),
            store=self.store,
            health=self.health,
            proposer=Proposer(
                solver=self.solver,
                gate=config.gate_config(),
                given=config.given_costs(),
                planning=config.planning,
                deadline_s=config.solver.deadline_s,
                layers_per_chunk_max=config.rollout.layers_per_chunk_max,
            ),
            metrics=self.metrics,
            clock=SystemClock(),
            owner=owner_name(config),
            new_id=lambda: uuid.uuid4().hex,
        )
        self.planner = Planner(context, store_name=store_name)
        self._server = RpcServer(
            self.planner,
            host=config.listen.host,
            port=config.listen.port,
            message_bytes=config.limits.message_bytes,
            credentials=credentials,
        )
        port = await self._server.start()
        await self.solver.start()
        await self.planner.start()
        await self._server.set_serving(serving=True)
        self._probe = asyncio.create_task(self._probe_store(), name="store probe")
        ready = Ready(host=config.listen.host, port=port, metrics_port=metrics_port, store=store_name)
        self._log.info("planner.ready", address=ready.address, metrics_port=metrics_port, store=store_name, name=context.owner)
        return ready

    async def stop(self) -> None:
        """Stop everything that runs, in order; idempotent."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])
            self._probe = None
        server, self._server = self._server, None
        if server is not None:
            await server.stop(GRACE_S)
        planner, self.planner = self.planner, None
        if planner is not None:
            await planner.stop()
        await self.solver.close()
        if self._metrics_server is not None:
            self._metrics_server.stop()
            self._metrics_server = None
        try:
            await self.store.close()
        except EplbError as error:
            self._log.warning("store.not_closed", reason=str(error))

    async def _probe_store(self) -> None:
        """Ask the store now and then, so that status and metrics are right also while nothing is written.

        Health stays SERVING: a planner without its store plans nothing, and goes on answering who routes what.
        """
        while True:
            try:
                await self.store.ping()
            except EplbError as error:
                self.health.note(str(error))
            else:
                self.health.note("")
            await asyncio.sleep(STORE_PROBE_S)


def owner_name(config: ServeConfig) -> str:
    """Who leads, in the store's words.

    The embedded store's directory has one planner at a time, so a planner that comes back there takes its lead again at
    once; elsewhere only one that was given a name does, the others wait until the lease of the dead one lapses.
    """
    if config.store.owner:
        if len(config.store.owner) > OWNER_CHARACTERS_MAX:
            raise InvalidInputError(f"store.owner has {len(config.store.owner)} characters, at most {OWNER_CHARACTERS_MAX}")
        return config.store.owner
    host = socket.gethostname()[:64] or "planner"
    return f"{host}-embedded" if config.store.address == EMBEDDED else f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _check_policy(policy: str) -> None:
    names = policy_names()
    if policy not in names:
        raise InvalidInputError(f"setting planning.policy is {policy!r}, which is not installed: use {' or '.join(names)}")


def run_service(loaded: LoadedConfig, *, ready_file: Path | None = None) -> int:
    """Run a planner until a signal; returns the exit code. Raises EplbError when it cannot start."""
    log.configure(log_format=loaded.config.log.format, level=loaded.config.log.level)
    failpoints.check()
    structlog.get_logger("eplb.planner").info("planner.starting", version=__version__, pid=os.getpid(), **_shown(loaded))
    if ready_file is not None:
        _check_ready_file(ready_file)
    return asyncio.run(_run(loaded.config, ready_file))


def _shown(loaded: LoadedConfig) -> dict[str, str]:
    return {key.replace(".", "_"): value for key, value in loaded.given().items()}


async def _run(config: ServeConfig, ready_file: Path | None) -> int:
    stopping = asyncio.Event()

    def stop(name: str) -> None:
        if stopping.is_set():
            sys.stderr.write(f"eplb: second {name}, ending at once\n")
            os._exit(130)
        structlog.get_logger("eplb.planner").info("planner.stopping", signal=name)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    service = Service(config)
    starting = asyncio.create_task(service.start())
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return 0
        ready = starting.result()
        if ready_file is not None:
            _write_ready_file(ready_file, ready)
        await waiting
    finally:
        waiting.cancel()
        if ready_file is not None:
            _remove(ready_file)
        await service.stop()
        structlog.get_logger("eplb.planner").info("planner.stopped")
    return 0


def _remove(ready_file: Path) -> None:
    ready_file.unlink(missing_ok=True)


def _check_ready_file(ready_file: Path) -> None:
    temporary = _temporary(ready_file)
    try:
        ready_file.unlink(missing_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise InvalidInputError(f"ready file {ready_file} cannot be written: {error.strerror}") from None


def _temporary(ready_file: Path) -> Path:
    """Where it is written first: nobody who waits for the file may see it empty."""
    return ready_file.with_name(f".{ready_file.name}.{os.getpid()}")


def _write_ready_file(ready_file: Path, ready: Ready) -> None:
    """Whole or not at all: whoever waits for it never reads half of it."""
    content = {
        "pid": os.getpid(),
        "address": ready.address,
        "host": ready.host,
        "port": ready.port,
        "metrics_port": ready.metrics_port,
        "store": ready.store,
        "version": __version__,
    }
    temporary = _temporary(ready_file)
    try:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        temporary.replace(ready_file)
    except OSError as error:
        raise EnvironmentFault(f"ready file {ready_file} cannot be written: {error.strerror}") from None
