"""What the demo found, as JSON, page, picture and screen; and the oracle's comparison."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from demo.oracle import compare
from demo.report import draw, write_report
from demo.result import Check, Comparison, DemoResult, GenerationRow, Phase, Sample, phase_of, relative_loads
from demo.screen import RankRow, Screen, View, heat, print_result, render, sparkline


def row(generation: int, *, state: str = "active", reason: str = "it pays <b>now</b>") -> GenerationRow:
    return GenerationRow(
        generation=generation, phase="code", reason=reason, seconds=4.0 * generation, predicted_mean=1.01, predicted_worst=1.02,
        observed_mean=None, observed_worst=1.05 if generation == 1 else None, moves=7, bytes_moved=123_456, rollout_s=0.5,
        flip_boundaries=(40, 48), state=state,
    )  # fmt: skip


def comparison(generation: int) -> Comparison:
    return Comparison(
        generation=generation,
        previous=generation - 1,
        tokens=8000,
        layers=("layer 0", "layer 1"),
        rank_loads_before=np.array([[300.0, 100.0], [200.0, 200.0]]),
        rank_loads_after=np.array([[220.0, 180.0], [200.0, 200.0]]),
    )


@pytest.fixture
def result() -> DemoResult:
    return DemoResult(
        ranks=2, policy="greedy", seconds=20.0, setup_s=3.0, requests=50, tokens_served=1200, tokens_checked=1200,
        phases=[Phase(kind="code", begin_s=0, end_s=10), Phase(kind="logs", begin_s=10, end_s=20)],
        samples=[Sample(1.0, 3, 0, 1.2, 1.5), Sample(9.0, 9, 1, 1.05, 1.1)],
        generations=[row(1, state="superseded"), row(2)],
        comparisons=[comparison(1), comparison(2)],
        checks=[Check("tokens are equal", passed=True, detail="1,200 & none <differ>")],
    )  # fmt: skip


def test_json_holds_what_machines_ask_for_first(result: DemoResult) -> None:
    plain = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert (plain["passed"], plain["tokens_checked"], plain["token_mismatches"], plain["flips"]) == (True, 1200, 0, 2)
    assert plain["tokens_per_s"] == 60.0
    assert plain["comparisons"][0]["worst_before"] == 1.5
    assert plain["comparisons"][0]["worst_after"] == 1.1
    assert plain["comparisons"][0]["per_layer_before"] == [1.5, 1.0]


def test_only_generations_that_were_live_on_every_layer_are_flips(result: DemoResult) -> None:
    result.generations.append(row(3, state="stopped"))
    result.generations.append(row(4, state="rolling out"))
    assert result.flips == 2


def test_a_run_passes_only_when_there_are_checks_and_all_hold(result: DemoResult) -> None:
    assert result.passed
    result.checks.append(Check("another", passed=False, detail=""))
    assert not result.passed
    result.checks = []
    assert not result.passed


def test_relative_load_of_an_idle_layer_is_one() -> None:
    assert relative_loads(np.array([[0.0, 0.0], [3.0, 1.0]])).tolist() == [[1.0, 1.0], [1.5, 0.5]]


def test_phase_of_a_moment_is_the_last_that_began() -> None:
    phases = [Phase(kind="code", begin_s=0, end_s=10), Phase(kind="logs", begin_s=10, end_s=10)]
    assert [phase_of(phases, seconds) for seconds in (0, 9.9, 10, 99)] == ["code", "code", "logs", "logs"]
    assert phase_of([], 5) == ""


def test_page_is_self_contained_escaped_and_its_picture_opens(result: DemoResult, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_report(result, page)
    text = page.read_text()
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", text)
    assert "http://" not in text
    assert "https://" not in text
    assert "it pays &lt;b&gt;now&lt;/b&gt;" in text
    assert "none &lt;differ&gt;" in text
    assert "every check passed" in text
    assert "1.500 → 1.100" in text
    picture = page.with_suffix(".png").read_bytes()
    assert base64.b64encode(picture).decode() in text
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 800
    assert height > 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.png"]


def test_page_of_a_failed_run_without_any_generation_says_so(tmp_path: Path) -> None:
    failed = DemoResult(ranks=2, policy="greedy", seconds=1.0, setup_s=1.0, checks=[Check("x", passed=False, detail="why")])
    write_report(failed, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "A CHECK FAILED" in text
    assert "why" in text


def test_picture_has_two_maps_for_each_comparison_and_a_timeline(result: DemoResult) -> None:
    axes = draw(result).axes
    titles = [one.get_title(loc="left") for one in axes]
    assert sum(title.startswith("as loaded: worst layer 1.500") for title in titles) == 1
    assert sum(title.startswith("generation 1: worst layer 1.100") for title in titles) == 1
    assert sum(title.startswith("generation 1: worst layer 1.500") for title in titles) == 1  # as what generation 2 replaced
    assert sum(one.get_xlabel() == "seconds of serving" for one in axes) == 1


def text_of(view: View, *, width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(view))
    return console.export_text()


def test_screen_shows_ranks_layers_rollout_verdict_and_events() -> None:
    view = View(
        seconds=12.5, phase="logs", phases=("code", "logs"), planner="answers", generation=3,
        rollout="generation 4: staging, 1 of 3 chunks", layers=("0", "1"), per_layer=(1.25, 1.5), worst_history=[1.1, 1.5],
        ranks=[RankRow(0, "live", 77, "staged", (0.5, 1.5), 8), RankRow(1, "away", 76, "", (1.5, 0.5), 0)],
        events=["   1.0 s  something happened"], tokens_served=12345, tokens_per_s=99.6, tokens_checked=12000,
        verdict="keep: [not worth it]",
    )  # fmt: skip
    shown = text_of(view)
    for words in (
        "12,345 tokens, 100/s", "12,000 checked, 0 differ", "layer 1", "away", "staged", "1.250", "worst layer 1.500",
        "live generation 3", "generation 4: staging, 1 of 3 chunks", "gate: keep: [not worth it]", "something happened",
        "configured cost model",
    ):  # fmt: skip
        assert words in shown


def test_screen_can_be_drawn_before_anything_is_known() -> None:
    shown = text_of(View())
    assert "worst layer: no window yet" in shown
    assert "gate: no verdict yet" in shown


def test_heat_tells_over_from_under() -> None:
    assert [str(heat(value).style) for value in (0.8, 1.0, 1.1, 1.4)] == ["cyan", "white", "red", "bold red"]


def test_sparkline_runs_from_low_to_the_highest_and_keeps_the_last() -> None:
    assert sparkline([1.0, 1.5, 2.0]) == " ▄█"
    assert len(sparkline([1.5] * 100, width=60)) == 60
    assert sparkline([]) == ""


def test_without_a_terminal_events_are_lines_and_quiet_is_silent(
    capsys: pytest.CaptureFixture[str], result: DemoResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with Screen(quiet=False) as screen:
        screen.event("ranks [start]")
        screen.close_with(result)
    said = capsys.readouterr().out
    assert "   0.0 s  ranks [start]\n" in said
    assert "every check passed: 1,200 tokens compared with one plain process, 0 differ; 2 generations live" in said
    with Screen(quiet=True) as screen:
        screen.event("ranks start")
        screen.close_with(result)
    assert capsys.readouterr().out == ""


def test_closing_table_shows_a_failed_check(result: DemoResult) -> None:
    result.checks.append(Check("weights follow the map", passed=False, detail="rank 1 layer 2 slot 3"))
    console = Console(width=200, file=io.StringIO(), record=True)
    print_result(console, replace(result))
    shown = console.export_text()
    assert "A CHECK FAILED" in shown
    assert re.search(r"FAILED\s+weights follow the map\s+rank 1 layer 2 slot 3", shown)
    assert "1.500 -> 1.100" in shown


@pytest.mark.parametrize(
    ("served", "right", "mismatches", "first", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], 0, -1, -1),
        ([1, 9, 3], [1, 2, 3], 1, 1, 2),
        ([9, 9, 9], [1, 2, 3], 3, 0, 1),
        ([1, 2], [1, 2, 3], 1, 2, 3),
        ([1, 2, 3, 4], [1, 2, 3], 1, 3, -1),
        ([], [], 0, -1, -1),
    ],
)
def test_oracle_counts_wrong_missing_and_extra_tokens(
    served: list[int], right: list[int], mismatches: int, first: int, expected: int
) -> None:
    judged = compare(5, served, right)
    assert (judged.request_id, judged.num_tokens) == (5, len(served))
    assert (judged.mismatches, judged.first_difference, judged.expected) == (mismatches, first, expected)
