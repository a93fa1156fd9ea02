"""What the commands show of what the gate learned, and of a generation after its commit."""

from __future__ import annotations

import pytest

from eplb_service.cli.generations import _after_commit, _print_generation, _worst
from eplb_service.cli.status import _facts, _show
from eplb_service.pb.v1 import admin_pb2, common_pb2, placement_pb2


def test_status_tells_what_the_gate_goes_by_and_what_is_held() -> None:
    view = admin_pb2.DeploymentStatus(deployment="chat")
    labels = [label for label, _, _ in _facts(view)]
    assert not {"step cost", "move cost", "horizon", "promises", "forecast", "HELD"} & set(labels)
    view.learned.CopyFrom(
        admin_pb2.LearnedView(
            step_time="2 us of step time for a token more",
            moves="12 GB/s within a node",
            horizon="a gain is worth 900 steps",
            promises="80% of what a plan promises is believed",
            forecast="planned from the last windows: 3 of 16 backtests of forecasts are done",
            hold="generation 3 was rolled back: worse by step time",
        )
    )
    shown = {label: (text, style) for label, text, style in _facts(view)}
    assert shown["step cost"] == ("2 us of step time for a token more", "")
    assert shown["move cost"] == ("12 GB/s within a node", "")
    assert shown["horizon"][0] == "a gain is worth 900 steps"
    assert shown["promises"][0].startswith("80%")
    assert shown["forecast"][0].startswith("planned from the last windows: 3 of 16 backtests")
    assert shown["HELD"][0].startswith("generation 3 was rolled back: worse by step time; nothing is moved under the load")


@pytest.mark.parametrize(
    ("code", "mode", "is_said"),
    [("move", "observe", True), ("rollback", "observe", False), ("drain", "observe", False), ("move", "auto", False)],
)
def test_status_says_that_nothing_follows_a_move_of_the_gate_alone(code: str, mode: str, is_said: bool) -> None:
    view = admin_pb2.DeploymentStatus(deployment="chat", settings=admin_pb2.SettingsView(mode=mode))
    view.last_verdict.CopyFrom(admin_pb2.VerdictView(move=True, code=code, reason="move: it is told why"))
    assert any("nothing follows in mode observe" in text for _, text, _ in _facts(view)) is is_said


def test_a_generation_shows_what_was_predicted_beside_what_was_observed_sglang_13206(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = placement_pb2.GenerationView(generation=3, state=placement_pb2.GENERATION_STATE_ACTIVE, judgement="kept: by little")
    for name, mean, worst in (("before", 1.3, 1.9), ("predicted", 1.01, 1.02)):
        getattr(view, name).CopyFrom(common_pb2.Imbalance(mean_over_layers=mean, worst_layer=worst))
    assert [_worst(view, name) for name in ("before", "predicted", "observed")] == ["1.900", "1.020", "-"]
    view.observed.CopyFrom(common_pb2.Imbalance(mean_over_layers=1.25, worst_layer=1.85))
    assert _worst(view, "observed") == "1.850"
    _print_generation("chat", view)
    page = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in ("before 1.300 / 1.900", "predicted 1.010 / 1.020", "observed 1.250 / 1.850", "judged kept: by little"):
        assert line.split() in page


def test_status_names_nics_only_where_a_rank_does(capsys: pytest.CaptureFixture[str]) -> None:
    view = admin_pb2.DeploymentStatus(deployment="chat", ranks=[admin_pb2.RankStatus(node="node0", voting=True)])
    _show(view)
    assert "NIC" not in capsys.readouterr().out
    view.ranks.add(node="node0", nic="mlx5_0", voting=True)
    _show(view)
    page = capsys.readouterr().out
    assert "node, NIC" in page
    assert "node0 mlx5_0 " in page


def test_generation_shows_its_promise_every_window_and_the_judgement() -> None:
    view = placement_pb2.GenerationView(generation=3)
    assert _after_commit(view) == [("promised gain", ""), ("judged", "")]
    view.promised_gain = 0.25
    view.judgement = "kept: promised a gain of 0.2500, brought 0.2400"
    view.observed_windows.add(window_index=7, mean=1.05, previous_mean=1.29)
    view.observed_windows.add(
        window_index=8, mean=1.05, previous_mean=1.29, step_s=0.011, expected_step_s=0.011, previous_step_s=0.0125
    )
    facts = dict(_after_commit(view))
    assert facts["promised gain"] == "0.2500"
    assert facts["  window 7"] == "0.2400 (1.2900 -> 1.0500)"
    assert facts["  window 8"] == "0.2400 (1.2900 -> 1.0500); steps 11 ms, 12.5 ms expected without it"
    assert facts["judged"].startswith("kept")
