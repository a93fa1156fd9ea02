"""What `eplb status` and `eplb generations show` say of advised deployments."""

from __future__ import annotations

from eplb_service.cli.generations import _took
from eplb_service.cli.status import _facts
from eplb_service.pb.v1 import admin_pb2, placement_pb2


def lines(advised: admin_pb2.AdvisedView | None) -> dict[str, tuple[str, str]]:
    view = admin_pb2.DeploymentStatus(deployment="d", advised=advised, windows_accepted=3)
    return {label: (text, style) for label, text, style in _facts(view)}


def test_line_tells_who_asks_how_often_and_what_was_answered() -> None:
    advised = admin_pb2.AdvisedView(
        engine="vllm 0.33.0", last_question_s_ago=12.0, interval_s=90.0, answers={"move": 2, "keep": 7}
    )
    told = lines(advised)
    assert told["advised"] == (
        "by questions of vllm 0.33.0, last 12.0 s ago, every 1 min 30 s; answers: 7 keep, 2 move",
        "",
    )
    assert "load reports" not in told  # none are expected


def test_engine_that_asked_once_or_never_is_no_interval() -> None:
    once = lines(admin_pb2.AdvisedView(engine="sglang 0.5.23", last_question_s_ago=1.0, answers={"keep": 1}))
    assert once["advised"][0] == "by questions of sglang 0.5.23, last 1.0 s ago; answers: 1 keep"
    never = lines(admin_pb2.AdvisedView())
    assert never["advised"] == ("by questions of an engine: none yet at this planner", "yellow")


def test_other_deployments_have_no_such_line() -> None:
    assert "advised" not in lines(None)
    assert lines(None)["load reports"][0] == "3 accepted"


def test_time_of_a_generation_is_named_by_what_it_is() -> None:
    assert _took(placement_pb2.GenerationView(flip_boundaries=[7])) == "decision to last flip"
    assert _took(placement_pb2.GenerationView()) == "told to shown"
