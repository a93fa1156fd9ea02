"""The example of a policy plug-in: installed by its own pyproject's entry point, found, run, held to every rule."""

from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.cli.root import run
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, PlanningProblem
from eplb_service.policy.registry import load_policy, policy_names
from eplb_service.policy.verify import verify
from eplb_service.solver.solver import Solver
from eplb_service.topology import Topology

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy_plugin"


def installed(example: Path, site: Path) -> None:
    """What `pip install` leaves of the example: its module and the metadata of its pyproject."""
    project = tomllib.loads((example / "pyproject.toml").read_text())
    for name in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]:
        (site / name).write_text((example / name).read_text())
    name, version = project["project"]["name"], project["project"]["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["project"]["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{key} = {target}\n" for key, target in entries.items()) for group, entries in groups)
    )


@pytest.fixture(autouse=True)
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    site.mkdir()
    installed(EXAMPLE, site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    return site


def problem_of(loads: npt.NDArray[np.float64], *, num_ranks: int = 4, slots: int = 4, **asked: Any) -> PlanningProblem:
    topology = Topology.regular(num_ranks=num_ranks)
    current = Table.linear(
        model="m", layer_ids=range(len(loads)), num_logical=loads.shape[1], rank_ids=topology.rank_ids, slots_per_rank=slots
    )
    return PlanningProblem(loads=loads[None], topology=topology, current=current, **asked)


LOADS = np.random.default_rng(1).gamma(0.6, 100, (5, 12))


def test_plug_in_is_found_by_its_entry_point_and_plans_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "trade" in policy_names()
    np.save(tmp_path / "load.npy", LOADS)
    words = ("--ranks", "4", "--slots-per-rank", "4", "--policy", "trade", "--output", "json")
    assert run(["plan", "--load", str(tmp_path / "load.npy"), *words]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["policy"] == "trade"
    assert made["imbalance"]["worst"] < made["imbalance_before"]["worst"]
    assert 0 < max(made["moves"]["per_layer"]) <= 8


@pytest.mark.process
def test_plug_in_plans_in_the_planners_solver_process() -> None:
    async def solve() -> None:
        solver = Solver(policies=("trade",))
        await solver.start()
        try:
            proposal = await solver.solve(problem_of(LOADS), "trade", 30.0)
            assert proposal.predicted.mean < proposal.before.mean
            assert proposal.policy == "trade"
        finally:
            await solver.close()

    asyncio.run(asyncio.wait_for(solve(), 60))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    max_moves=st.none() | st.integers(0, 9),
    out_of_use=st.frozensets(st.tuples(st.integers(0, 3), st.just(3)), max_size=3),
)
def test_plug_ins_plans_are_legal_within_their_moves_and_never_worse(
    seed: int, max_moves: int | None, out_of_use: frozenset[tuple[int, int]]
) -> None:
    loads = np.random.default_rng(seed).gamma(0.5, 100, (3, 12))
    linear = problem_of(loads)
    slots = linear.current.by_rank().copy()
    for rank, slot in out_of_use:
        slots[:, rank, slot] = -1
    current = Table("m", (0, 1, 2), 12, linear.current.rank_ids, slots.reshape(3, -1))
    if current.uncovered():
        return
    constraints = Constraints(max_moves=max_moves, unusable_slots=out_of_use)
    problem = PlanningProblem(loads=loads[None], topology=linear.topology, current=current, constraints=constraints)
    proposal = verify(problem, load_policy("trade").plan(problem), policy="trade", solve_s=0.0)
    assert all(
        after <= before + 1e-9 for after, before in zip(proposal.predicted.per_layer, proposal.before.per_layer, strict=True)
    )


def test_example_is_as_short_as_promised() -> None:
    lines = (EXAMPLE / "trade_policy.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert len(code) <= 40
