"""The solver's process with policies that work and policies that do not. A plug-in package supplies the bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import numpy as np
import pytest

from eplb_service.errors import EplbError, InvalidInputError, NotFoundError, PolicyFailedError
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, PlanningProblem
from eplb_service.solver.solver import Solver
from eplb_service.topology import Topology

pytestmark = pytest.mark.process

PLUG_IN = """
import os, time
import numpy as np
from eplb_service.policy.base import LoadShape, RawPlan


class Base:
    options = {}


class Raises(Base):
    name = "raises"
    def plan(self, problem):
        raise ValueError("no luck with 7 experts")


class Hangs(Base):
    name = "hangs"
    def plan(self, problem):
        while True:
            pass


class Sleeps(Base):
    name = "sleeps"
    def plan(self, problem):
        if problem.current.model != "warm-up":
            time.sleep(600)


class EatsMemory(Base):
    name = "eats-memory"
    def plan(self, problem):
        return [np.ones(1 << 24) for _ in range(1 << 12)]


class Exits(Base):
    name = "exits"
    def plan(self, problem):
        os._exit(7)


class Nonsense(Base):
    name = "nonsense"
    def plan(self, problem):
        print("a policy that prints")
        return 42


class NotCovering(Base):
    name = "not-covering"
    def plan(self, problem):
        return RawPlan(physical_to_logical=np.zeros_like(problem.current.physical_to_logical))


class Forks(Base):
    name = "forks"
    def plan(self, problem):
        if os.fork() == 0:
            with open(os.environ["EPLB_TEST_CHILD_FILE"], "w") as file:
                file.write(str(os.getpid()))
            os.rename(os.environ["EPLB_TEST_CHILD_FILE"], os.environ["EPLB_TEST_CHILD_FILE"] + ".done")
            time.sleep(600)
        while True:
            time.sleep(1)


class WantsTotal(Base):
    name = "wants-total"
    load_shape = LoadShape.TOTAL
    def plan(self, problem):
        if problem.loads.shape[0] != 1:
            raise ValueError(f"{problem.loads.shape[0]} sub-windows")
        return RawPlan(physical_to_logical=problem.current.physical_to_logical.copy())


class DoesNotLoad(Base):
    def __init__(self):
        raise RuntimeError("broken on purpose")
"""

POLICIES = {
    "raises": "Raises",
    "hangs": "Hangs",
    "sleeps": "Sleeps",
    "eats-memory": "EatsMemory",
    "exits": "Exits",
    "nonsense": "Nonsense",
    "not-covering": "NotCovering",
    "forks": "Forks",
    "wants-total": "WantsTotal",
    "does-not-load": "DoesNotLoad",
}

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def plug_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plug-in")
    (folder / "bad_policies.py").write_text(PLUG_IN)
    info = folder / "bad_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-policies\nVersion: 1.0\n")
    entries = "".join(f"{name} = bad_policies:{kind}\n" for name, kind in POLICIES.items())
    (info / "entry_points.txt").write_text(f"[eplb.policies]\n{entries}")
    return folder


@pytest.fixture
def problem() -> PlanningProblem:
    current = Table.linear(model="m", layer_ids=(3, 4), num_logical=6, rank_ids=range(4), slots_per_rank=2)
    loads = np.array(
        [[[60, 50, 40, 30, 20, 10], [0, 0, 0, 0, 0, 0]], [[60, 50, 40, 30, 20, 10], [0, 0, 0, 0, 0, 0]]], np.float64
    )
    return PlanningProblem(loads=loads, topology=Topology.regular(num_ranks=4, num_nodes=2), current=current)


def run(scenario: Callable[[Solver], Coroutine[object, object, None]], solver: Solver) -> None:
    """Start a solver, run the scenario, close it, and see that its process is gone."""

    async def all_of_it() -> None:
        await solver.start()
        try:
            await scenario(solver)
        finally:
            pid = solver.pid
            await solver.close()
        if pid is not None:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(asyncio.wait_for(all_of_it(), 100))


@pytest.fixture
def solver(plug_in: Path, monkeypatch: pytest.MonkeyPatch) -> Solver:
    monkeypatch.setenv("PYTHONPATH", str(plug_in))
    return Solver(policies=("greedy",), memory_bytes=512 << 20)


async def failure(solver: Solver, problem: PlanningProblem, policy: str, deadline_s: float = DEADLINE_S) -> EplbError:
    with pytest.raises(EplbError) as caught:
        await solver.solve(problem, policy, deadline_s)
    return caught.value


def test_policies_that_misbehave_are_refused_with_a_reason_and_the_next_plan_works(
    solver: Solver, problem: PlanningProblem
) -> None:
    async def scenario(solver: Solver) -> None:
        first_pid = solver.pid
        raised = await failure(solver, problem, "raises")
        assert isinstance(raised, PolicyFailedError)
        assert "ValueError" in str(raised)
        assert "no luck with 7 experts" in str(raised)
        nonsense = await failure(solver, problem, "nonsense")
        assert isinstance(nonsense, PolicyFailedError)
        assert "a int instead of a RawPlan" in str(nonsense)
        missing = await failure(solver, problem, "not-covering")
        assert isinstance(missing, PolicyFailedError)
        assert "layer 3" in str(missing)
        assert "expert 1 has no slot" in str(missing)
        unknown = await failure(solver, problem, "no-such-policy")
        assert isinstance(unknown, NotFoundError)
        assert "greedy" in str(unknown)
        assert "ilp" in str(unknown)
        impossible = PlanningProblem(
            loads=problem.loads,
            topology=problem.topology,
            current=problem.current,
            constraints=Constraints(unusable_slots=frozenset({(0, 0), (1, 0), (2, 0)})),
        )
        assert isinstance(await failure(solver, impossible, "greedy"), InvalidInputError)
        assert solver.pid == first_pid
        assert solver.restarts == 0
        proposal = await solver.solve(problem, "greedy", DEADLINE_S)
        assert proposal.predicted.worst < proposal.before.worst

    run(scenario, solver)


def test_policy_that_ends_its_process_costs_one_failed_plan(solver: Solver, problem: PlanningProblem) -> None:
    async def scenario(solver: Solver) -> None:
        ended = await failure(solver, problem, "exits")
        assert isinstance(ended, PolicyFailedError)
        assert "exit code 7" in str(ended)
        assert (await solver.solve(problem, "greedy", DEADLINE_S)).status == "heuristic"
        assert solver.restarts == 1

    run(scenario, solver)


def test_policy_out_of_memory_is_refused_and_the_planner_keeps_its_own(solver: Solver, problem: PlanningProblem) -> None:
    async def scenario(solver: Solver) -> None:
        starved = await failure(solver, problem, "eats-memory")
        assert isinstance(starved, PolicyFailedError)
        assert "memory" in str(starved).lower()
        assert (await solver.solve(problem, "greedy", DEADLINE_S)).status == "heuristic"

    run(scenario, solver)


def test_hanging_policy_is_killed_at_the_deadline_while_the_loop_stays_free(solver: Solver, problem: PlanningProblem) -> None:
    async def scenario(solver: Solver) -> None:
        gaps: list[float] = []

        async def heartbeat() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        beating = asyncio.ensure_future(heartbeat())
        pid = solver.pid
        assert pid is not None
        started = time.monotonic()
        hung = await failure(solver, problem, "hangs", deadline_s=1.0)
        took_s = time.monotonic() - started
        beating.cancel()
        assert isinstance(hung, PolicyFailedError)
        assert "within 1 s" in str(hung)
        assert 1.0 <= took_s < 20.0
        assert len(gaps) >= 4, "the event loop was blocked"
        assert (await solver.solve(problem, "greedy", DEADLINE_S)).status == "heuristic"
        assert solver.pid != pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(scenario, solver)


def test_what_a_policy_started_is_killed_with_it(
    solver: Solver, problem: PlanningProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child_file = tmp_path / "child"
    monkeypatch.setenv("EPLB_TEST_CHILD_FILE", str(child_file))

    async def scenario(solver: Solver) -> None:
        await failure(solver, problem, "forks", deadline_s=2.0)
        child = int(await asyncio.to_thread(Path(f"{child_file}.done").read_text))
        deadline = time.monotonic() + 10
        while is_running(child):
            assert time.monotonic() < deadline, f"process {child} outlived its policy"
            await asyncio.sleep(0.01)

    run(scenario, solver)


async def asked(solver: Solver) -> None:
    """Wait until a problem was given to the worker."""
    while solver._number == 0:  # noqa: ASYNC110  # the solver has no event for it; the test's own deadline bounds this
        await asyncio.sleep(0)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_cancelled_solve_leaves_a_solver_that_works(solver: Solver, problem: PlanningProblem) -> None:
    async def scenario(solver: Solver) -> None:
        solving = asyncio.ensure_future(solver.solve(problem, "sleeps", DEADLINE_S))
        await asked(solver)
        solving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await solving
        assert (await solver.solve(problem, "greedy", DEADLINE_S)).status == "heuristic"

    run(scenario, solver)


def test_close_while_solving_fails_the_solve_and_starts_nothing_new(solver: Solver, problem: PlanningProblem) -> None:
    async def scenario(solver: Solver) -> None:
        solving = asyncio.ensure_future(solver.solve(problem, "sleeps", DEADLINE_S))
        await asked(solver)
        await solver.close()
        with pytest.raises(PolicyFailedError):
            await solving
        assert not solver.is_ready
        with pytest.raises(InvalidInputError, match="closed"):
            await solver.solve(problem, "greedy", DEADLINE_S)

    run(scenario, solver)


def test_worker_killed_from_outside_between_solves_is_replaced(solver: Solver, problem: PlanningProblem) -> None:
    async def scenario(solver: Solver) -> None:
        assert solver.pid is not None
        os.kill(solver.pid, signal.SIGKILL)
        with contextlib.suppress(PolicyFailedError):  # when the kill is not noticed before the question is sent
            await solver.solve(problem, "greedy", DEADLINE_S)
        assert (await solver.solve(problem, "greedy", DEADLINE_S)).status == "heuristic"
        assert solver.restarts == 1

    run(scenario, solver)


def test_named_policy_that_does_not_load_fails_the_start(plug_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(plug_in))

    async def scenario() -> None:
        solver = Solver(policies=("greedy", "does-not-load"))
        with pytest.raises(PolicyFailedError, match="broken on purpose"):
            await solver.start()
        await solver.close()

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_loads_are_reduced_to_the_shape_that_a_policy_declares_vllm_ascend_12650(
    solver: Solver, problem: PlanningProblem
) -> None:
    async def scenario(solver: Solver) -> None:
        proposal = await solver.solve(problem, "wants-total", DEADLINE_S)
        assert proposal.placement == problem.current

    run(scenario, solver)


def test_worker_dies_when_its_parent_is_killed(plug_in: Path) -> None:
    program = textwrap.dedent("""
        import asyncio, sys
        from eplb_service.solver.solver import Solver
        async def main():
            solver = Solver(policies=())
            await solver.start()
            print(solver.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.kill()
        parent.wait(10)
    deadline = time.monotonic() + 10
    while is_running(worker):
        assert time.monotonic() < deadline, f"worker {worker} outlived its parent"
        time.sleep(0.01)
