"""`eplb plan --load`: what goes in, what comes out, read back; every option with what it changes or why it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import click
import numpy as np
import pytest

from eplb_service.cli import values
from eplb_service.cli.front_picture import draw_front
from eplb_service.cli.grouped import OTHER, GroupedCommand
from eplb_service.cli.plan import GROUPS
from eplb_service.cli.plan import plan as plan_command
from eplb_service.cli.plan_page import show_front
from eplb_service.cli.root import run
from eplb_service.errors import EnvironmentFault, InvalidInputError
from eplb_service.offline.plan import OfflinePlan
from eplb_service.placement import Table
from eplb_service.policy.base import (
    Constraints,
    ExpertOnRank,
    FailureDomain,
    FrontPoint,
    PlanningProblem,
    Proposal,
    Resilience,
)
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.topology import Topology


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    file = tmp_path / "load.npy"
    np.save(file, np.random.default_rng(7).integers(1, 1000, (3, 16)))
    return file


def plan(capsys: pytest.CaptureFixture[str], file: Path, *words: str, ranks: int = 4, slots: int = 5) -> Any:
    size = () if "--fleet" in words else ("--ranks", str(ranks))
    size = size if "--sweep-slots" in words or "--fleet" in words else (*size, "--slots-per-rank", str(slots))
    policy = () if "--policy" in words or "--to" in words else ("--policy", "greedy")
    assert run(["plan", "--load", str(file), *size, *policy, *words]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out) if "json" in words else said.out


def refusal(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    assert run(["plan", *words]) == code
    said = capsys.readouterr().err
    assert said.startswith("eplb: ")
    assert said.count("\n") == 1
    return said


def test_plan_prints_what_is_promised_and_every_expert_has_a_slot(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(capsys, loads, "--nodes", "2", "--output", "json")
    assert np.shape(made["physical_to_logical"]) == (3, 20)
    assert all(set(row) >= set(range(16)) for row in made["physical_to_logical"])
    assert set(made["imbalance"]) == {"mean", "worst", "per_layer"}
    assert 1.0 <= made["lower_bound"]["worst"] <= made["imbalance"]["worst"] < made["imbalance_before"]["worst"]
    assert made["policy"] == "greedy"
    assert made["solve_s"] >= 0
    assert made["moves"]["experts"] > 0


def test_plan_that_was_written_is_read_back_and_nothing_moves(
    loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    page = plan(capsys, loads, "--out", str(out), "--expert-bytes", "1MiB")
    assert f"placement written to {out}" in page
    assert " MiB" in page
    again = plan(capsys, loads, "--current", str(out), "--output", "json")
    assert again["moves"]["experts"] == 0
    assert again["moves_against"] == "current"
    assert again["physical_to_logical"] == json.loads(out.read_text())["physical_to_logical"]


def test_layers_without_load_are_left_out_and_the_others_keep_their_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "load.npy"
    loads = np.random.default_rng(7).integers(1, 1000, (3, 16))
    loads[1] = 0
    np.save(file, loads)
    made = plan(capsys, file, "--output", "json")
    assert made["layer_ids"] == [0, 2]
    assert made["load"]["dense_layer_ids"] == [1]
    assert "layer 1 left out, dense: no token" in plan(capsys, file)
    np.save(file, np.zeros((3, 16)))
    idle = plan(capsys, file, "--output", "json")
    assert idle["layer_ids"] == [0, 1, 2]
    assert idle["imbalance"]["per_layer"] == [1.0, 1.0, 1.0]
    assert idle["moves"]["experts"] == 0


def test_experts_that_ranks_do_not_divide_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"loads": np.random.default_rng(7).random((2, 13)).tolist()}))
    made = plan(capsys, file, "--output", "json", ranks=4, slots=4)
    assert np.shape(made["physical_to_logical"]) == (2, 16)
    assert made["imbalance"]["worst"] >= 1.0


def test_same_input_gives_the_same_plan(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (plan(capsys, loads, "--output", "json") for _ in range(2))
    for made in (first, second):
        del made["solve_s"]
    assert first == second


def test_flags_for_files_are_refused_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "--ranks", "4", "--pin", "1@2", "--out", "x.json") == (
        "eplb: --ranks, --pin, --out: for a plan from a file; give --load FILE too; see `eplb plan --help`\n"
    )


def test_what_redundancy_takes_of_each_rank_is_told_before_anything_starts_vllm_57894_vllm_24537(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """384 + 64 experts on 16 ranks: 4 slots of each rank and layer, and what it takes to change them."""
    np.save(tmp_path / "load.npy", np.random.default_rng(1).integers(1, 1000, (2, 384)))
    words = ("--expert-bytes", "42MiB", "--policy", "greedy")
    page = plan(capsys, tmp_path / "load.npy", *words, ranks=16, slots=28)
    assert "redundancy   64 redundant experts a layer; 336.0 MiB a rank over all layers" in page  # 2 x 4 x 42 MiB
    made = plan(capsys, tmp_path / "load.npy", *words, "--output", "json", ranks=16, slots=28)
    assert made["redundancy"] == {"experts_per_layer": 64, "bytes_per_rank": 336 * 2**20}
    assert made["staging"]["least_bytes_per_rank"] == 28 * 42 * 2**20  # every slot of a layer may change at once
    bare = plan(capsys, tmp_path / "load.npy", *words, "--output", "json", ranks=16, slots=24)
    assert bare["redundancy"] == {"experts_per_layer": 0, "bytes_per_rank": 0}


def test_page_says_target_stop_limits_redundancy_and_tokens(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "2", "--expert-bytes", "1 MiB", "--max-imbalance", "1.001", "--max-moves", "3")
    page = plan(capsys, loads, *words, "--max-move-bytes", "3MiB")
    assert "target       every layer at or under 1.001: NOT met in " in page
    assert "stopped      " in page
    assert "--max-moves " in page
    assert " of 3; --max-move-bytes " in page
    assert "redundancy   4 redundant experts a layer; 3.0 MiB a rank over all layers" in page
    assert "staging      5.0 MiB a rank at least, and 2.0 MiB to send from; pinned on the host as much again" in page
    assert "cross nodes, before " in plan(capsys, loads, "--nodes", "2", "--dispatch", "nearest")
    assert "worst layer: imbalance " in page
    met = plan(capsys, loads, "--max-imbalance", "5")
    assert "target       every layer at or under 5: met" in met
    assert "stopped      target met in every layer" in met


@pytest.mark.parametrize("dispatch", ["even", "nearest"])
def test_nics_that_ranks_share_show_what_comes_in_over_the_busiest(
    loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dispatch: str
) -> None:
    words = ("--nodes", "2", "--expert-bytes", "1MiB", "--dispatch", dispatch)
    bare = plan(capsys, loads, *words, "--output", "json")
    made = plan(capsys, loads, *words, "--nics", "1", "--output", "json")
    assert bare["asked"]["nics"] is None
    assert made["asked"]["nics"] == ["nic0", "nic0", "nic0", "nic0"]
    assert made["physical_to_logical"] == bare["physical_to_logical"]
    assert {**made["moves"], "bytes_into_busiest_nic": 0} == bare["moves"]
    across = made["moves"]["bytes_by_link"]["cross_node"]
    assert across / 2 <= made["moves"]["bytes_into_busiest_nic"] <= across
    for when in ("before", "planned"):
        tokens, unnamed = made["tokens_by_link"][when], bare["tokens_by_link"][when]
        assert set(tokens) - set(unnamed) == {"into_busiest_nic", "busiest_nic_share", "nic_imbalance"}
        assert 0.5 <= tokens["busiest_nic_share"] == tokens["nic_imbalance"] / 2 <= 1
        assert tokens["into_busiest_nic"] == pytest.approx(tokens["busiest_nic_share"] * tokens["cross_node"])
    page = " ".join(plan(capsys, loads, *words, "--nics", "1").split())
    assert "over one NIC; " in page
    assert "NICs the busiest of 2 takes " in page
    assert "over one NIC" not in plan(capsys, loads, *words)
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('ranks = 4\nslots_per_rank = 5\nnodes = 2\nnics = ["x", "x", "x", "y"]\nexpert_bytes = "1MiB"\n')
    from_file = plan(capsys, loads, "--fleet", str(fleet), "--dispatch", dispatch, "--output", "json")
    assert from_file["asked"]["nics"] == ["x", "x", "x", "y"]


def test_layers_and_differences_are_listed_on_request(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = plan(capsys, loads, "--layers", "--diff", "--max-imbalance", "1.0001")
    made = plan(capsys, loads, "--output", "json")
    lines = page.splitlines()
    header = next(at for at, line in enumerate(lines) if line.startswith("layer  before"))
    moves = [int(line.split()[4]) for line in lines[header + 1 : header + 4]]
    assert moves == made["moves"]["per_layer"]
    header = next(at for at, line in enumerate(lines) if line.startswith("layer  rank  comes"))
    assert len(lines) > header + 3


def test_memory_balance_and_moves_are_told_for_each_number_of_slots(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = plan(capsys, loads, "--sweep-slots", "4..7", "--expert-bytes", "10", "--max-imbalance", "1.2")
    rows = [line.split() for line in page.splitlines()[2:6]]
    assert [row[0] for row in rows] == ["4", "5", "6", "7"]
    assert [row[1] for row in rows] == ["0", "4", "8", "12"]
    made = plan(capsys, loads, "--sweep-slots", "4..7", "--output", "json")
    assert [np.shape(each["physical_to_logical"])[1] for each in made] == [16, 20, 24, 28]
    assert made[-1]["imbalance"]["worst"] < made[0]["imbalance"]["worst"]


def test_fleet_file_gives_any_option_and_flags_win_over_it(
    loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        'ranks = 4\nslots-per-rank = 6\nnodes = ["a", "a", "b", "b"]\ncapacity = { 3 = 0.5 }\nbase_load = [0.1, 0, 0, 0]\n'
        'dead_rank = 2\nunusable_slots = ["0:5"]\nmax_imbalance = 1.3\nexpert_bytes = "2KiB"\nseed = 3\n'
    )
    made = plan(capsys, loads, "--fleet", str(fleet), "--seed", "9", "--output", "json")
    assert made["nodes"] == ["a", "a", "b", "b"]
    asked = made["asked"]
    assert (asked["capacity"], asked["base_load"], asked["dead_ranks"]) == ([1.0, 1.0, 1.0, 0.5], [0.1, 0.0, 0.0, 0.0], [2])
    assert (asked["unusable_slots"], asked["max_imbalance"], asked["seed"]) == (["0:5"], 1.3, 9)
    assert all(row[5] == -1 and row[12:18] == [-1] * 6 for row in made["physical_to_logical"])
    swept = plan(capsys, loads, "--fleet", str(fleet), "--sweep-slots", "7..8", "--dead-rank", "1", "--output", "json")
    assert [each["slots_per_rank"] for each in swept] == [7, 8]
    assert swept[0]["asked"]["dead_ranks"] == [1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("rank = 4", ["has 'rank', which is no option of a fleet; did you mean ranks?"]),
        ("load = 'x'", ["has 'load', which is no option of a fleet"]),
        ("ranks = [", ["is no valid TOML"]),
        ("ranks = 'four'", ["--ranks", "'four' is not a valid integer"]),
        ("pins = ['a']", ["--pin", "'a' is not EXPERT@RANK"]),
        ("capacity = { x = 1 }", ["--capacity", "no list of numbers"]),
    ],
)
def test_faults_of_a_fleet_file_are_named(
    content: str, words: list[str], loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fleet.toml").write_text(content)
    said = refusal(capsys, "--load", str(loads), "--fleet", str(tmp_path / "fleet.toml"))
    for word in words:
        assert word in said


def test_missing_fleet_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read none.toml: No such file" in refusal(capsys, "--load", "x.npy", "--fleet", "none.toml")


FLEET = ("--ranks", "4", "--slots-per-rank", "5")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--soft-groups", "1"), "--soft-groups needs --groups"),
        (("--resize",), "--resize needs --current"),
        (("--max-move-bytes", "1GiB"), "--max-move-bytes needs --expert-bytes"),
        (("--from-nothing", "--current", "a.json"), "--from-nothing and --current contradict one another"),
        (("--from-nothing", "--max-moves", "3"), "--from-nothing and --max-moves contradict one another"),
        (("--effort", "quick", "--work-budget", "3"), "--effort and --work-budget contradict one another"),
        (("--sweep-slots", "5..6"), "--sweep-slots and --slots-per-rank contradict one another"),
        (("--to", "a.json", "--policy", "greedy"), "--to is for policy static; greedy goes where its search leads"),
        (("--policy", "static"), "--policy static needs --to FILE"),
        (("--source-load", "a.npy"), "give --dispatch nearest too"),
        (("--pin", "16@1"), "expert 16 is pinned but model 'model' has experts 0 to 15"),
        (("--bar", "1@4"), "rank 4 is not among the ranks 0-3"),
        (("--pin", "1@2", "--bar", "1@2"), "expert 1 is pinned to rank 2 and barred from it"),
        (("--unusable-slot", "1:5"), "unusable slot 5 of rank 1 does not exist; slots run to 4"),
        (("--nics", "0"), "NICs of a node must be at least 1; got 0"),
        (("--nodes", "2", "--nics", "3"), "3 NICs for the 2 ranks of node node0: a NIC without a rank; use 2 or fewer"),
        (("--nics", "x,y"), "4 ranks but 2 NICs; give one for each rank"),
        (("--resilient", "all"), "resilience by node needs at least two nodes that serve; there is 1"),
        (("--resilient", "all:rank"), "resilience of 16 of 16 experts needs 32 usable slots, there are 20"),
        (("--capacity", "1,1"), "2 capacities for 4 ranks: give one a rank, or RANK=VALUE"),
        (("--base-load", "7=1"), "base loads name rank 7, but ranks run from 0 to 3"),
        (("--ranks", "99999999999"), "ranks must be at most 65,536; got ranks=99,999,999,999"),
        (("--slots-per-rank", "9" * 20), "99,999,999,999,999,999,999 slots are"),
        (("-d", "chat"), "--deployment: for a dry run on a planner; give it without --load"),
        (
            ("more.pt", "most.pt"),
            "Got unexpected extra arguments (more.pt most.pt): a pattern of files is quoted ('dumps/*.pt')",
        ),
        (("--capacity", "0=0"), "capacities must be finite and > 0"),
        (("--max-imbalance", "0.9"), "0.9 is not in the range x>=1"),
        (("--pareto", "front.gif"), "front.gif ends in .gif; pictures are written as .svg, .png, .pdf"),
        (("--pareto", "none/front.svg"), "there is no folder none for the picture front.svg"),
        (("--out", "none/plan.json"), "there is no folder none for the placement plan.json"),
        (("--out", "/"), "/ is a folder; name the file to write the placement to"),
        (("--out", "sglang:start"), "start: SGLang opens a JSON file only where its name ends in .json"),
    ],
)
def test_options_that_do_not_go_together_are_refused_early(
    words: tuple[str, ...], said: str, loads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, "--load", str(loads), *FLEET, *words)


@pytest.mark.parametrize("engine", ["sglang", "trtllm", "vllm-ascend"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dispatch", "weighted"), "plans for weighted dispatch have shares, which files of {} cannot say"),
        (("--unusable-slot", "1:3"), "slot 3 of rank 1 is unusable, so slots would stay empty; files of {} name an expert for"),
        (("--dead-rank", "2"), "rank 2 is dead: plan for the ranks that serve alone, so slots would stay empty; files of {}"),
        (("--slots-per-rank", "17"), "layer 0: rank 0 has 17 slots and may hold 16 experts, so"),
        (("--bar", "3@1/2", "--slots-per-rank", "16"), "layer 2: rank 1 has 16 slots and may hold 15 experts, so"),
        (("--groups", "4", "--nodes", "4"), "layer 0: rank 0 has 5 slots and may hold 4 experts on its node, so"),
        (("--max-replicas", "1"), "16 experts of 1 copies at most do not fill 20 slots, so"),
    ],
)
def test_what_an_engines_file_cannot_say_is_refused_before_a_plan_is_made(
    engine: str,
    words: tuple[str, ...],
    said: str,
    loads: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planned(*_: object, **__: object) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr("eplb_service.offline.plan.plan_offline", planned)
    out = str(loads.parent / "placement.json")
    assert said.format(engine) in refusal(capsys, "--load", str(loads), *FLEET, *words, "--out", f"{engine}:{out}")
    with pytest.raises(AssertionError, match="a plan was made"):  # eplb's own files say all of it
        refusal(capsys, "--load", str(loads), *FLEET, *words, "--out", f"eplb:{out}")


def test_pictures_without_the_chart_library_say_what_to_install(
    loads: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said = refusal(capsys, "--load", str(loads), *FLEET, "--pareto", "front.svg", code=3)
    assert "install eplb-service[charts], or give --pareto without a file for the table" in said


def proposal_with_front() -> Proposal:
    """Greedy plans of one problem under ever more moves."""
    loads = np.random.default_rng(4).gamma(0.5, 100, (1, 3, 16))
    topology = Topology.regular(num_ranks=4)
    current = Table.linear(model="m", layer_ids=(0, 1, 2), num_logical=16, rank_ids=topology.rank_ids, slots_per_rank=5)
    made = []
    for most in (0, 12, 100):
        problem = PlanningProblem(loads=loads, topology=topology, current=current, constraints=Constraints(max_moves=most))
        made.append(verify(problem, load_policy("greedy").plan(problem), policy="greedy", solve_s=0.0))
    front = [FrontPoint(placement=each.placement, predicted=each.predicted, moves=each.moves) for each in made]
    return replace(made[-1], front=tuple(front))


def test_picture_of_the_front_is_the_same_file_each_time(tmp_path: Path) -> None:
    proposal = proposal_with_front()
    for name in ("a.svg", "b.svg", "a.png"):
        draw_front(tmp_path / name, proposal, max_imbalance=1.2)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidInputError, match="policy greedy gives no Pareto front"):
        draw_front(tmp_path / "c.svg", replace(proposal, front=()), max_imbalance=None)
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(EnvironmentFault, match=r"cannot write .*folder\.svg"):
        draw_front(tmp_path / "folder.svg", proposal, max_imbalance=None)


def test_front_is_a_table_that_marks_the_plan_and_what_is_there_now(capsys: pytest.CaptureFixture[str]) -> None:
    proposal = proposal_with_front()
    problem = PlanningProblem(
        loads=np.ones((1, 3, 16)), topology=Topology.regular(num_ranks=4), current=proposal.front[0].placement
    )
    show_front(OfflinePlan(proposal=proposal, problem=problem, moves_against="linear"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["moves", "mean", "over", "layers", "worst", "layer"]
    assert lines[2].endswith("as it is")
    assert lines[4].endswith("the plan")
    assert [int(line.split()[0]) for line in lines[2:]] == [point.moves.experts for point in proposal.front]


def test_point_of_the_front_that_only_empties_slots_is_not_what_is_there_now(capsys: pytest.CaptureFixture[str]) -> None:
    proposal = proposal_with_front()
    current = proposal.front[0]
    row = current.placement.row(0).copy()
    spare = next(slot for slot, expert in enumerate(row) if (row == expert).sum() > 1)
    row[spare] = -1
    emptied = replace(current, placement=current.placement.with_rows({0: row}))
    shown = replace(proposal, front=(emptied, *proposal.front))
    problem = PlanningProblem(loads=np.ones((1, 3, 16)), topology=Topology.regular(num_ranks=4), current=current.placement)
    show_front(OfflinePlan(proposal=shown, problem=problem, moves_against="linear"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("slots emptied")
    assert lines[3].endswith("as it is")


def test_plan_from_nothing_counts_what_is_loaded_instead_of_moves(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = plan(capsys, loads, "--from-nothing", "--expert-bytes", "1MiB")
    assert "to load      60 slots, 15.0 MiB a rank; nothing is in place" in page
    assert "moves  " not in page


def test_current_placement_of_another_fleet_is_carried_over_only_when_asked(
    loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    plan(capsys, loads, "--out", str(small))
    held = json.loads(small.read_text())["physical_to_logical"]
    said = refusal(capsys, "--load", str(loads), "--ranks", "6", "--slots-per-rank", "5", "--current", str(small))
    assert "has rank_ids [0, 1, 2, 3], expected [0, 1, 2, 3, 4, 5]" in said
    words = ("--resize", "--max-moves", "0", "--output", "json")
    grown = plan(capsys, loads, "--current", str(small), *words, "--out", str(large), ranks=6)
    assert [row[:20] for row in grown["physical_to_logical"]] == held
    assert all(slot == -1 for row in grown["physical_to_logical"] for slot in row[20:])
    np.save(tmp_path / "small.npy", np.array(held))
    assert plan(capsys, loads, "--current", str(tmp_path / "small.npy"), *words, ranks=6)["asked"] == grown["asked"]
    back = plan(capsys, loads, "--current", str(large), *words, ranks=4)
    assert back["physical_to_logical"] == held
    orphans = plan(capsys, loads, "--current", str(small), "--resize", "--output", "json", ranks=3, slots=6)
    assert all(set(row) == set(range(16)) for row in orphans["physical_to_logical"])


def test_every_option_of_the_help_is_in_a_group() -> None:
    assert isinstance(plan_command, GroupedCommand)
    context = click.Context(plan_command, info_name="plan")
    grouped = plan_command.grouped(context)
    assert ["--help" in parameter.opts for parameter in grouped[OTHER]] == [True]
    names = [name for group in GROUPS.values() for name in group]
    assert len(set(names)) == len(names)
    assert set(names) == {parameter.name for parameter in plan_command.params}
    text = plan_command.get_help(context)
    assert [text.index(f"\n{heading}:") for heading in GROUPS] == sorted(text.index(f"\n{heading}:") for heading in GROUPS)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (values.size, "2GiB", 2 << 30),
        (values.size, "1.5 MB", 1_500_000),
        (values.size, 44040192, 44040192),
        (values.size, "7b", 7),
        (values.expert_on_rank, "12@3", ExpertOnRank(12, 3)),
        (values.expert_on_rank, " 12 @ 3 / 5", ExpertOnRank(12, 3, 5)),
        (values.rank_slot, "3:8", (3, 8)),
        (values.rank_numbers, "1,0.5", values.RankNumbers(listed=(1.0, 0.5))),
        (values.rank_numbers, "7=0.5, 3=2", values.RankNumbers(by_rank=((3, 2.0), (7, 0.5)))),
        (values.rank_numbers, {"3": 2}, values.RankNumbers(by_rank=((3, 2.0),))),
        (values.rank_numbers, [1, 2], values.RankNumbers(listed=(1.0, 2.0))),
        (values.resilience, "all", Resilience()),
        (values.resilience, "20%:rank", Resilience(hot_share=0.2, domain=FailureDomain.RANK)),
        (values.resilience, 0.5, Resilience(hot_share=0.5)),
        (values.slot_range, "8..12", range(8, 13)),
        (values.nodes, "4", 4),
        (values.nodes, ["a", "b"], ("a", "b")),
        (values.nodes, "a,a,b", ("a", "a", "b")),
        (values.nics, 2, 2),
        (values.nics, " x, x,y", ("x", "x", "y")),
        (values.nics, [0, 0, 1], ("0", "0", "1")),
    ],
)
def test_values_are_read_from_flags_and_from_toml(read: Callable[[object], object], text: object, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (values.size, "2 gallons", "'2 gallons' is no size"),
        (values.size, "-1", "is no size"),
        (values.size, "3i", "is no size"),
        (values.expert_on_rank, "12", "is not EXPERT@RANK"),
        (values.rank_slot, "3", "is not RANK:SLOT"),
        (values.rank_numbers, "1,x", "is no list of numbers"),
        (values.rank_numbers, "1=2,1=3", "names rank 1 twice"),
        (values.rank_numbers, "none.json", "there is no file none.json"),
        (values.resilience, "2", "must be above 0 and at most 1; got 2"),
        (values.resilience, "half", "is no share"),
        (values.resilience, "all:rack", "'rack' is nothing that may be lost; it is one of rank, node"),
        (values.slot_range, "12..8", "is no range"),
        (values.slot_range, "1..1000", "at most 64 are tried"),
        (values.nodes, "a,,b", "leaves a rank without a node"),
        (values.nics, "x,,y", "leaves a rank without a NIC; give the NICs of a node as a number, or the NIC of each rank"),
    ],
)
def test_values_that_cannot_be_read_say_what_is_wanted(read: Callable[[object], object], text: str, said: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        read(text)
    assert said in str(caught.value)


def test_numbers_for_ranks_are_read_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2]))
    (tmp_path / "a.json").write_text("[0.5, 1]")
    assert values.rank_numbers(str(tmp_path / "a.npy")) == values.RankNumbers(listed=(1.0, 2.0))
    assert values.rank_numbers(str(tmp_path / "a.json")).for_ranks(2, 1.0, "capacities") == (0.5, 1.0)
    (tmp_path / "b.json").write_text("[[0.5, 1]]")
    with pytest.raises(click.BadParameter, match=r"one number for each rank; it has shape \(1, 2\)"):
        values.rank_numbers(str(tmp_path / "b.json"))
