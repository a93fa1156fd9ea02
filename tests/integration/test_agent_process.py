"""The agent process for real, between a fake planner (gRPC) and fake hooks (Unix socket)."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from agent.frames import RegistrationAnswer, Welcome
from agent.runtime import AgentConfig, run_agent
from eplb_service import __version__, log
from eplb_service.attach import Gone
from eplb_service.control import Arm, Flipped, Hello, Pulse, Stage, Staged
from eplb_service.errors import BrokenInvariantError, ConflictError
from eplb_service.failpoints import EXIT_CODE
from eplb_service.ids import LayerRef, chunk_id
from tests.integration.agent_doubles import (
    DEADLINE_S,
    Changes,
    FakeHook,
    FakePlanner,
    address,
    pulse,
    report,
    stage,
    staged,
)

pytestmark = pytest.mark.process


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a Unix socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="eplb-") as name:
        yield Path(name)


class Agent:
    """A real `eplb agent`."""

    def __init__(self, folder: Path, target: str, **environment: str) -> None:
        self.socket = folder / "agent.sock"
        self.ready_file = folder / "ready"
        self._arguments = ["--planner", target, "--socket", str(self.socket), "--ready-file", str(self.ready_file)]
        self._environment = {**os.environ, **environment}
        self.stderr = ""
        self._lines = Changes()
        self.process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, *more: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.integration.eplb_command", "agent", *self._arguments, *more,
            env=self._environment, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read())

    async def ready(self) -> None:
        await self.stderr_has("agent.started")
        assert self.ready_file.exists()

    async def stderr_has(self, text: str) -> None:
        reading = self._reading
        assert reading is not None
        try:
            await self._lines.until(lambda: text in self.stderr or reading.done(), f"stderr has {text!r}, or ends")
        finally:
            assert text in self.stderr, f"stderr lacks {text!r}; it is:\n{self.stderr}"

    async def ended(self) -> int:
        assert self.process is not None
        assert self._reading is not None
        async with asyncio.timeout(DEADLINE_S):
            code = await self.process.wait()
            await self._reading
        return code

    async def signal(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return await self.ended()

    async def _read(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.stderr += line.decode()
            self._lines.changed()
        asyncio.get_running_loop().call_soon(self._lines.changed)


@asynccontextmanager
async def scene(folder: Path, **environment: str) -> AsyncIterator[tuple[FakePlanner, Agent]]:
    """A planner, and an agent process that is ready; both are gone at the end."""
    planner = FakePlanner()
    await planner.start()
    agent = Agent(folder, planner.target, **environment)
    try:
        await agent.start()
        await agent.ready()
        yield planner, agent
    finally:
        if agent.process is not None and agent.process.returncode is None:
            agent.process.kill()
            await agent.ended()
        await planner.kill()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await work()

    asyncio.run(bounded())


def test_a_rank_registers_attaches_stages_and_reports_and_a_stopped_agent_says_no_rank_is_gone(folder: Path) -> None:
    async def work() -> None:
        async with scene(folder) as (planner, agent):
            assert stat.S_IMODE(agent.socket.stat().st_mode) == 0o600
            one, two = FakeHook(address(0)), FakeHook(address(1))
            for hook in (one, two):
                await hook.link(agent.socket)
                assert (await hook.hear(Welcome)).version == __version__
                assert (await hook.hear(RegistrationAnswer)).accepted
                assert (await hook.hear(Hello)).to == hook.address
            assert len(planner.streams) == 1
            assert planner.attached() == [address(0), address(1)]

            planner.say(stage(address(1)))
            assert await two.hear(Stage) == stage(address(1))
            await two.say(staged(address(1)))
            await planner.until(lambda: staged(address(1)) in planner.heard, "Staged of rank 1")
            assert not any(isinstance(message, Stage) for message in one.heard)

            await one.say(report(address(0), 3))
            await planner.until(lambda: planner.reports, "a report")
            deployment, window = planner.reports[0]
            assert (deployment, window.rank_id, window.window_index) == ("moe", 0, 3)
            assert window.tables[0].counts.tolist() == [[[3, 3, 3, 3]]]

            # A hook that goes is Gone; the ranks that stay when the agent process stops are not: their engines live.
            await one.drop()
            await planner.until(lambda: any(isinstance(m, Gone) and m.sender == address(0) for m in planner.heard), "Gone")
            assert await agent.signal(signal.SIGTERM) == 0
            await two.unlinked()
            assert not any(isinstance(message, Gone) and message.sender == address(1) for message in planner.heard)
            assert not agent.socket.exists()
            assert not agent.ready_file.exists()

    run(work)


def test_a_planner_that_restarts_finds_every_rank_registered_and_attached_again(folder: Path) -> None:
    async def work() -> None:
        async with scene(folder) as (planner, agent):
            hooks = [FakeHook(address(rank)) for rank in range(2)]
            for hook in hooks:
                await hook.link(agent.socket)
                await hook.hear(Hello)
            await planner.kill()
            await agent.stderr_has("planner.lost")
            await hooks[0].say(staged(address(0)))  # answers to nobody: must not reach the next planner
            for window in range(30):
                await hooks[0].say(report(address(0), window))
            await hooks[0].say(pulse(address(0)))

            successor = FakePlanner(epoch=2, port=planner.port)
            await successor.start()
            try:
                for hook in hooks:
                    assert (await hook.hear(Hello, count=2)).epoch == 2
                assert sorted(rank.rank_id for rank in successor.attached()) == [0, 1]
                await successor.until(lambda: len(successor.reports) == 16, "the windows that were kept")
                assert [window.window_index for _, window in successor.reports] == list(range(14, 30))
                await hooks[0].say(pulse(address(0), boundary=99, dropped=5))
                seen = await successor.until(lambda: [m for m in successor.heard if isinstance(m, Pulse)], "a pulse")
                assert [(one.boundary, one.windows_dropped) for one in seen] == [(99, 5 + 14)]
                assert not any(isinstance(message, Staged) for message in successor.heard)
                await agent.stderr_has("planner.found")
                assert agent.stderr.count("planner.lost") <= 2  # connection lost, then refused: once each
            finally:
                assert await agent.signal(signal.SIGTERM) == 0
                await successor.kill()

    run(work)


def test_a_killed_agent_process_is_replaced_at_the_same_path_and_hooks_link_again(folder: Path) -> None:
    async def work() -> None:
        async with scene(folder) as (planner, agent):
            hook = FakeHook(address(0))
            await hook.link(agent.socket)
            await hook.hear(Hello)
            assert await agent.signal(signal.SIGKILL) == -signal.SIGKILL
            await hook.unlinked()
            assert agent.socket.exists()  # stale
            agent.stderr = ""
            await agent.start()
            await agent.ready()
            await hook.link(agent.socket)
            await hook.hear(Hello, count=2)
            planner.say(stage(address(0)))
            await hook.hear(Stage)

    run(work)


def test_a_second_agent_process_on_the_same_socket_is_refused_and_the_first_goes_on(folder: Path) -> None:
    async def work() -> None:
        async with scene(folder) as (planner, agent):
            second = Agent(folder, planner.target)
            await second.start()
            assert await second.ended() == 3
            assert agent.process is not None
            pid = agent.process.pid
            assert f"socket {agent.socket} is in use by a running agent process (pid {pid})" in second.stderr
            assert "Traceback" not in second.stderr
            hook = FakeHook(address(0))
            await hook.link(agent.socket)
            await hook.hear(Hello)

    run(work)


def test_a_rank_that_disagrees_with_its_peers_is_told_and_shown_once_then_taken_when_mended(folder: Path) -> None:
    reason = "rank 1 has model digest 'x' but rank 0 has 'd'; start both from one checkpoint"

    async def work() -> None:
        async with scene(folder) as (planner, agent):
            planner.refuse[1] = ConflictError(reason)
            good, bad = FakeHook(address(0)), FakeHook(address(1), digest="x")
            await good.link(agent.socket)
            await bad.link(agent.socket)
            answer = await bad.hear(RegistrationAnswer)
            assert (answer.accepted, answer.reason) == (False, reason)
            await agent.stderr_has(f"eplb agent: rank 1 of deployment moe is refused: {reason}\n")
            tries = len(planner.registered)
            await planner.until(lambda: len(planner.registered) > tries, "another try")
            assert (await good.hear(Hello)).to == address(0)
            del planner.refuse[1]
            assert (await bad.hear(RegistrationAnswer, count=2)).accepted
            await bad.hear(Hello)
            assert agent.stderr.count("eplb agent:") == 1

    run(work)


def test_an_agent_process_that_dies_at_any_point_of_a_chunk_is_replaced_and_the_planner_asks_again(folder: Path) -> None:
    """One hook goes through one chunk while its agent process dies four times; each successor finds it as it was left."""
    me = address(0)
    flipped = Flipped(sender=me, chunk_id=chunk_id(1, 1), boundary=8, digests=((LayerRef("m", 1), 5),), stall_s=0.0)
    points = ["agent.stage.forwarded", "agent.staged.forwarded", "agent.arm.forwarded", "agent.flipped.received"]
    failpoints = ",".join(f"{point}=exit:{folder / point}" for point in points)

    async def work() -> None:
        async with scene(folder, EPLB_FAILPOINTS=failpoints) as (planner, agent):
            hook = FakeHook(me)
            for lives, point in enumerate(points):
                await hook.link(agent.socket)
                await hook.hear(Hello, count=lives + 1)
                match point:
                    case "agent.stage.forwarded":
                        planner.say(stage(me))
                        await hook.hear(Stage)
                    case "agent.staged.forwarded":
                        await hook.say(staged(me))
                        await planner.until(lambda: staged(me) in planner.heard, "Staged")
                    case "agent.arm.forwarded":
                        planner.say(Arm(to=me, chunk_id=chunk_id(1, 1)))
                        await hook.hear(Arm)
                    case "agent.flipped.received":
                        await hook.say(flipped)
                assert await agent.ended() == EXIT_CODE
                assert (folder / point).exists()
                await hook.unlinked()
                agent.stderr = ""
                await agent.start()
                await agent.ready()
            assert flipped not in planner.heard
            await hook.link(agent.socket)
            await hook.hear(Hello, count=len(points) + 1)
            await hook.say(flipped)
            await planner.until(lambda: flipped in planner.heard, "Flipped after the restart")

    run(work)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--planner", "host:99999"], 2, "planner address 'host:99999': port 99999 is out of range; expected 1 to 65535"),
        (["--planner", "a b"], 2, "planner address 'a b' is not HOST:PORT, [IPV6]:PORT or unix:PATH"),
        (["--socket", "/nowhere/agent.sock"], 2, "folder /nowhere of the socket agent.sock does not exist"),
        (["--socket", "{folder}/" + "x" * 120], 2, "bytes but a Unix socket's has at most 107"),
        (["--socket", "{folder}/plain"], 2, "plain exists and is not a socket; remove it"),
        (["--tls-ca", "{folder}/none.pem"], 2, "TLS CA file {folder}/none.pem cannot be read: No such file"),
        (["--tls-ca", "{folder}/plain"], 2, "TLS CA file {folder}/plain of 4 bytes holds no PEM block"),
        (["--tls-cert", "{folder}/plain"], 2, "a TLS client certificate and its key go together"),
        (["--ready-file", "/nowhere/ready"], 2, "ready file /nowhere/ready cannot be written"),
    ],
)
def test_bad_configuration_ends_in_one_sentence(
    folder: Path, arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from eplb_service.cli.root import run as run_command

    (folder / "plain").write_text("text")
    given = ["--planner", "localhost:1", "--socket", str(folder / "s")]
    assert run_command(["agent", *given, *(word.format(folder=folder) for word in arguments)]) == code
    errors = capsys.readouterr().err
    assert sentence.format(folder=folder) in errors
    assert "Traceback" not in errors


def test_a_bug_in_the_session_stops_the_process_with_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Better no agent process than one in an unknown state: the hooks hold what matters and link to the next one."""
    from agent.session import Session

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async def work() -> None:
        monkeypatch.setattr(Session, "handle", fail)
        process = asyncio.create_task(
            run_agent(AgentConfig(planner="127.0.0.1:1", socket=folder / "s", ready_file=folder / "r"))
        )
        hook = FakeHook(address(0))
        async with asyncio.timeout(DEADLINE_S):
            while not (folder / "r").exists():  # noqa: ASYNC110  (a file appears)
                await asyncio.sleep(0.002)
        await hook.link(folder / "s")
        with pytest.raises(BrokenInvariantError, match="met a bug and stopped: ZeroDivisionError"):
            await process
        await hook.unlinked()

    lines = io.StringIO()
    log.configure(log_format="json", stream=lines)
    request.addfinalizer(structlog.reset_defaults)
    run(work)
    assert 'ZeroDivisionError: a bug"' in lines.getvalue().splitlines()[-1]


def test_a_socket_of_a_living_program_without_our_lock_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    from eplb_service.cli.root import run as run_command

    path = folder / "agent.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert run_command(["agent", "--planner", "localhost:1", "--socket", str(path)]) == 3
        assert f"socket {path} is in use by another running process" in capsys.readouterr().err
        assert path.exists()
