"""The benchmark's command: rows that can be chosen, tables in a page, pages whose commands are run again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.measuring import NotBuiltError, proposal_of, score
from benchmarks.planner import ROWS, main
from benchmarks.planning_page import with_outputs
from benchmarks.report import END, START, written_between_marks
from benchmarks.rows_sizes import CASES
from benchmarks.standard import drifted_load, problem_of, resampled, standard_load
from eplb_service.errors import InvalidInputError


def test_rows_are_told_apart_by_name_and_by_what_they_measure() -> None:
    assert len({row.name for row in ROWS}) == len({row.what for row in ROWS}) == len(ROWS)


def test_one_row_is_measured_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--row", "golden"])
    said = capsys.readouterr().out
    assert "196.67" in said
    assert "every layer" not in said
    with pytest.raises(SystemExit):
        main(["--row", "golden", "--write", "x.md"])


def test_tables_are_written_between_their_marks_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = START.format(name="sizes"), END.format(name="sizes")
    page.write_text(f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n")
    written_between_marks(page, "sizes", "new")
    assert page.read_text() == f"before\n{marks[0]}\nnew\n{marks[1]}\nafter\n"
    with pytest.raises(InvalidInputError, match="once each, in this order"):
        written_between_marks(page, "seeds", "new")


def test_loads_of_the_works_are_the_same_everywhere_and_of_the_kinds_they_say() -> None:
    load = standard_load()
    assert load.shape == (58, 256)
    assert load[0, 0] == pytest.approx(np.exp(np.random.default_rng(0).normal()) * 1000)
    assert not np.array_equal(drifted_load(), load)
    assert resampled(load, 1000, 3).sum(axis=1).tolist() == [1000.0] * 58
    for case in CASES:
        problem = case.problem()
        assert problem.current.num_physical == case.ranks * case.slots >= case.experts
        assert problem.total_loads.shape == (case.layers, case.experts)


def test_planner_that_is_not_installed_is_no_failure_of_the_benchmark() -> None:
    problem = problem_of(standard_load()[:1])
    with pytest.raises(NotBuiltError, match="no policy nope"):
        proposal_of("nope", problem)
    start = score(problem, problem.current.physical_to_logical)
    assert (start.moves.experts, start.doubled) == (0, 0)
    assert start.imbalance.worst > 1.5
    rows = problem.current.physical_to_logical.copy()
    rows[0, [0, 1]] = -1  # two empty slots are no doubled expert, two copies are
    rows[0, [9, 10]] = 7
    assert score(problem, rows).doubled == 1


def test_commands_of_a_page_are_run_again_and_their_output_put_in(tmp_path: Path) -> None:
    page = (
        "```python\nimport numpy as np\nnp.save('load.npy', np.ones((1, 4)))\n```\n\n"
        "```toml\n# fleet.toml\nranks = 2\nslots_per_rank = 2\n```\n\n"
        "text\n\n```\n$ eplb plan --load load.npy --fleet fleet.toml \\\n    --policy greedy\nstale\n\n"
        "$ eplb plan --load none.npy --fleet fleet.toml\nstale too\n```\n\nmore\n"
    )
    new = with_outputs(page, tmp_path)
    assert "stale" not in new
    assert "--policy greedy\n1 layers x 4 experts in 4 slots on 2 ranks" in new
    assert "fleet.toml\neplb: there is no file none.npy\n```\n\nmore\n" in new
