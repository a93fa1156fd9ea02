"""Files of engines through the commands: plan from a recording, write what the engine reads, convert, show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from eplb_service.cli.root import run
from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import ids_text
from eplb_service.offline.fill import filled_plan, filled_rows
from eplb_service.offline.plan import OfflinePlan, fleet_topology, starting_table
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.base import Constraints, ExpertOnRank, PlanningProblem, RawPlan
from eplb_service.policy.limits import limits_of
from eplb_service.policy.verify import verify

DENSE, LAYERS, E = 3, 7, 16
SIZE = ("--ranks", "4", "--nodes", "2", "--slots-per-rank", "5")


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stat dump of SGLang: layers 0-2 are dense, the last rows of the buffer were not filled."""
    monkeypatch.chdir(tmp_path)
    counts = np.zeros((4, LAYERS, E), np.int32)
    counts[:3, DENSE:] = np.random.default_rng(5).gamma(0.5, 1000, (3, LAYERS - DENSE, E))
    torch.save({"rank": 0, "logical_count": torch.tensor(counts)}, "sglang.pt")
    return Path("sglang.pt")


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert run([str(word) for word in words]) == code, capsys.readouterr().err
    heard = capsys.readouterr()
    if code:
        assert heard.err.count("\n") == 1
        return heard.err
    return heard.out


def test_a_plan_of_an_sglang_dump_is_written_as_trtllm_reads_it(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "plan", "--load", str(dump), *SIZE, "--out", "trtllm:out.yaml")
    assert "4 layers x 16 experts in 20 slots on 4 ranks of 2 nodes" in page
    assert "load         SGLang, mode stat, 3 windows: layers 0-2 left out, dense: no token; 1 of 4 windows hold no" in page
    assert "nothing is in place, so moves cost nothing" in page
    assert "placement written to out.yaml as trtllm reads it" in page
    content = yaml.safe_load(Path("out.yaml").read_text())
    assert content["num_slots"] == 20
    assert content["layer_updates_per_iter"] == 0
    assert sorted(content["initial_global_assignments"]) == [3, 4, 5, 6]
    for row in content["initial_global_assignments"].values():
        assert len(row) == 20
        assert set(row) == set(range(E))


def test_a_plan_goes_round_through_every_format(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "plan", "--load", str(dump), *SIZE, "--from-nothing", "--out", "plan.json")
    plan = json.loads(Path("plan.json").read_text())
    known = ("--ranks", "4", "--layer-ids", "3..6")
    said(capsys, "placement", "convert", "plan.json", "sglang:s.json")
    assert len(json.loads(Path("s.json").read_text())["physical_to_logical_map"]) == LAYERS
    said(capsys, "placement", "convert", *known, "s.json", "vllm-ascend:a.json")
    said(capsys, "placement", "convert", *known, "a.json", "trtllm:t.yaml")
    text = said(capsys, "placement", "convert", *known, "--experts", "16", "t.yaml", "eplb:again.json")
    assert text == "again.json written as eplb: 4 layers (3-6) x 16 experts in 20 slots on 4 ranks\n"
    assert json.loads(Path("again.json").read_text()) == plan
    for name in ("plan.json", "s.json", "a.json", "t.yaml"):
        again = json.loads(
            said(capsys, "plan", "--load", str(dump), *SIZE, "--current", name, "--max-moves", "0", "--output", "json")
        )
        assert again["moves_against"] == "current"
        assert again["moves"]["experts"] == 0


def test_an_sglang_file_has_as_many_rows_as_the_recording_has_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    counts = torch.ones((1, 6, E), dtype=torch.int32)
    counts[:, [0, 4, 5]] = 0
    torch.save({"logical_count": counts}, "d.pt")
    said(capsys, "plan", "--load", "d.pt", *SIZE, "--out", "sglang:s.json")
    assert len(json.loads(Path("s.json").read_text())["physical_to_logical_map"]) == 6
    said(capsys, "placement", "convert", "--ranks", "4", "--layer-ids", "1..3", "--num-layers", "9", "s.json", "sglang:n.json")
    assert len(json.loads(Path("n.json").read_text())["physical_to_logical_map"]) == 9


def test_pins_and_sources_are_for_the_layers_of_the_model(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(said(capsys, "plan", "--load", str(dump), *SIZE, "--pin", "7@2/4", "--output", "json"))
    row = made["physical_to_logical"][made["layer_ids"].index(4)]
    assert 7 in row[10:15]
    text = said(capsys, "plan", "--load", str(dump), *SIZE, "--pin", "7@2/0", code=2)
    assert "layer 0" in text
    loads = torch.load(dump)["logical_count"].numpy().sum(axis=0)
    for name, rows in (("all.npy", loads), ("moe.npy", loads[DENSE:])):
        np.save(name, np.repeat(rows[:, None] / 4, 4, axis=1))
        made = json.loads(
            said(capsys, "plan", "--load", str(dump), *SIZE, "--dispatch", "nearest", "--source-load", name, "--output", "json")
        )
        assert made["layer_ids"] == [3, 4, 5, 6]


def test_a_missing_layer_is_filled_as_the_engine_starts_it_with_a_note(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "plan", "--load", str(dump), *SIZE, "--from-nothing", "--out", "plan.json")
    assert run(["placement", "convert", "plan.json", "trtllm:t.yaml", "--layer-ids", "3..7"]) == 0
    heard = capsys.readouterr()
    assert heard.err == "note: layer 7 is not in plan.json: taken to be as the engine starts it\n"
    assert "5 layers (3-7)" in heard.out
    text = said(capsys, "placement", "convert", "plan.json", "x.json", "--layer-ids", "3..7", code=2)
    assert "has layers 3-6, but none for layer 7" in text


def test_an_unwritten_plan_leaves_no_file_and_old_files_stay(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.json").write_text("old")
    text = said(capsys, "plan", "--load", str(dump), *SIZE, "--unusable-slot", "0:1", "--out", "sglang:out.json", code=2)
    assert "layer 3 slot 1 (rank 0) is empty" in text
    assert Path("out.json").read_text() == "old"
    for bad, match in (("vllm:x", "'vllm' is no format"), ("x.yaml", "say trtllm:x.yaml")):
        assert match in said(capsys, "plan", "--load", str(dump), *SIZE, "--out", bad, code=2)
    assert "there is no file none.pt" in said(capsys, "plan", "--load", "none.pt", *SIZE, code=2)
    text = said(capsys, "plan", "--load", str(dump), "--format", "trtllm", *SIZE, code=2)
    assert "holds no rank0.safetensors" in text


def test_a_recording_is_shown(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "load", "show", str(dump), "--layers")
    assert page.splitlines()[0] == "sglang.pt: SGLang, mode stat"
    assert "4 with experts: 3-6" in page
    assert "layers 0-2 left out, dense: no token; 1 of 4 windows hold no token and are left out" in page
    totals = torch.load(dump)["logical_count"].numpy().sum(axis=0)[DENSE:]
    rows = [line.split() for line in page.splitlines()[-4:]]
    assert [int(row[0]) for row in rows] == [3, 4, 5, 6]
    assert [int(row[1].replace(",", "")) for row in rows] == totals.sum(axis=1).tolist()
    assert [int(row[2]) for row in rows] == totals.argmax(axis=1).tolist()
    made = json.loads(said(capsys, "load", "show", str(dump), "--output", "json"))
    assert made["dense_layer_ids"] == [0, 1, 2]
    assert made["assignments_per_layer"] == totals.sum(axis=1).tolist()


def test_a_recording_is_kept_as_a_small_file_of_our_own(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "load", "convert", str(dump), "small.npz", "--windows", "1")
    plans = [
        json.loads(said(capsys, "plan", "--load", name, *SIZE, "--policy", "greedy", "--output", "json"))
        for name in (str(dump), "small.npz")
    ]
    assert plans[0]["physical_to_logical"] == plans[1]["physical_to_logical"]
    assert plans[1]["layer_ids"] == [3, 4, 5, 6]
    assert plans[1]["load"]["source"] == "recording of eplb, of SGLang, mode stat"
    said(capsys, "plan", "--load", "small.npz", *SIZE, "--out", "sglang:s.json")
    assert len(json.loads(Path("s.json").read_text())["physical_to_logical_map"]) == LAYERS
    assert "is to be written as .npz" in said(capsys, "load", "convert", str(dump), "small.pt", code=2)
    assert "9 windows of a recording that has 3" in said(
        capsys, "load", "convert", str(dump), "x.npz", "--windows", "9", code=2
    )


# slots that a policy leaves empty


def emptied(*, constraints: Constraints | None = None, from_nothing: bool = False, seed: int = 0) -> OfflinePlan:
    """A plan in which the last slot of every rank is empty where another rank has its expert."""
    loads = np.random.default_rng(seed).gamma(0.5, 100, (1, 2, 8))
    topology = fleet_topology(num_ranks=4, nodes=2)
    problem = PlanningProblem(
        loads=loads,
        topology=topology,
        current=starting_table(num_layers=2, num_logical=8, topology=topology, slots_per_rank=4),
        dispatch=Dispatch.EVEN,
        constraints=constraints or Constraints(),
        expert_bytes=(0, 0),
        from_nothing=from_nothing,
    )
    rows = problem.current.physical_to_logical.copy()
    rows[:, [11, 15]] = EMPTY_SLOT
    proposal = verify(problem, RawPlan(physical_to_logical=rows), policy="test", solve_s=0.0)
    return OfflinePlan(proposal=proposal, problem=problem, moves_against="linear")


@pytest.mark.parametrize("seed", range(8))
def test_empty_slots_get_the_copy_after_which_the_busiest_rank_has_least_to_do(seed: int) -> None:
    plan = emptied(seed=seed, from_nothing=True)
    made = filled_plan(plan, "SGLang")
    assert made.filled is not None
    assert made.filled.slots == 4
    assert made.filled.before == plan.proposal.predicted
    table = made.proposal.placement
    assert not (table.physical_to_logical == EMPTY_SLOT).any()
    for layer in range(2):
        row = plan.proposal.placement.physical_to_logical[layer].copy()
        for slot in (11, 15):
            options = []
            for expert in sorted(set(range(8)) - set(row[slot // 4 * 4 : slot // 4 * 4 + 4].tolist())):
                tried = row.copy()
                tried[slot] = expert
                counts = np.bincount(tried[tried >= 0], minlength=8)
                share = np.append(plan.problem.total_loads[layer] / counts, 0.0)
                options.append((share[tried].reshape(4, 4).sum(axis=1).max(), expert))
            best = min(height for height, _ in options)
            chosen = int(table.physical_to_logical[layer, slot])
            assert {expert: height for height, expert in options}[chosen] == pytest.approx(best)
            row[slot] = chosen


def test_filling_keeps_bars_groups_and_limits() -> None:
    bars = frozenset(ExpertOnRank(expert, 3) for expert in (0, 1, 2))
    made = filled_plan(emptied(constraints=Constraints(barred=bars)), "SGLang").proposal.placement
    assert not set(made.by_rank()[:, 3].ravel().tolist()) & {0, 1, 2}
    limited = emptied(constraints=Constraints(max_moves=0))
    filled = filled_plan(limited, "SGLang")
    assert filled.proposal.moves.experts == 0
    assert np.array_equal(filled.proposal.placement.physical_to_logical, limited.problem.current.physical_to_logical)
    limited = emptied(constraints=Constraints(max_replicas=2))
    rows = filled_rows(limited.proposal.placement.physical_to_logical, limited.problem, limits_of(limited.problem))
    assert max(np.bincount(row[row >= 0]).max() for row in rows) == 2
    grouped = emptied(constraints=Constraints(num_groups=1))
    assert filled_plan(filled_plan(grouped, "SGLang"), "SGLang").proposal == filled_plan(grouped, "SGLang").proposal


def test_a_fill_that_the_limits_forbid_is_refused_with_what_to_do() -> None:
    plan = emptied()
    current = plan.problem.current.with_rows({layer: plan.proposal.placement.row(layer) for layer in (0, 1)})
    problem = PlanningProblem(
        loads=plan.problem.loads,
        topology=plan.problem.topology,
        current=current,
        dispatch=Dispatch.EVEN,
        constraints=Constraints(max_moves=3),
        expert_bytes=(0, 0),
    )
    proposal = verify(problem, RawPlan(physical_to_logical=current.physical_to_logical), policy="test", solve_s=0.0)
    with pytest.raises(
        InvalidInputError, match=r"leaves 4 slots empty, files of SGLang .* raise the limits on moves, or write --out eplb"
    ):
        filled_plan(OfflinePlan(proposal=proposal, problem=problem, moves_against="current"), "SGLang")


def test_a_plan_with_a_current_placement_says_what_filling_cost(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table: Any = json.loads(said(capsys, "plan", "--load", str(dump), *SIZE, "--policy", "greedy", "--output", "json"))
    table["physical_to_logical"] = [
        [EMPTY_SLOT if row.count(expert) > 1 and row.index(expert) == slot else expert for slot, expert in enumerate(row)]
        for row in table["physical_to_logical"]
    ]
    Path("now.json").write_text(json.dumps(table))
    words = ("plan", "--load", str(dump), *SIZE, "--to", "now.json")
    assert "filled" not in said(capsys, *words, "--out", "kept.json")
    page = said(capsys, *words, "--out", "sglang:s.json")
    empty = sum(row.count(EMPTY_SLOT) for row in table["physical_to_logical"])
    assert empty > 0
    assert f"{empty} slots left empty, as the engine's file cannot say; imbalance was" in page
    assert EMPTY_SLOT not in np.array(json.loads(Path("s.json").read_text())["physical_to_logical_map"])


def test_ids_are_told_as_ranges() -> None:
    assert ids_text((0, 1, 2, 60)) == "0-2, 60"
    assert ids_text(tuple(range(0, 40, 2))) == "0, 2, 4, 6, 8, 10, 12, … (20 in all)"
