"""How long flips hold up steps bounds what flips together; what was expected and what came of it is told."""

from __future__ import annotations

import dataclasses

import pytest

from eplb_service.config import load_config
from eplb_service.control import FromRank
from eplb_service.costs import ASSUMED_STALL_S, GivenCosts, MeasuredCosts, cost_model
from eplb_service.flip_stall import ASSUMED, ChunkFlip, FlipStall, StallModel
from eplb_service.rollout.events import Finished, LiveChanged, Note, Outcome, Persist, Persisted, RolloutRecord, Start
from eplb_service.rollout.machine import Rollout
from tests.unit.test_rollout import EPOCH, SETTINGS, TWO_LAYERS, Script, generation, group, of

SLOW = StallModel(fixed_s=0.001, seconds_per_byte=0.0004)
"""A chunk of one expert, of ten bytes, takes 5 ms; of two 9 ms."""


def begun(limit_ms: float, stalls: StallModel = SLOW) -> tuple[Script, RolloutRecord]:
    settings = dataclasses.replace(SETTINGS, layers_per_chunk_max=None, commit_stall_ms_max=limit_ms)
    script = Script(Rollout(EPOCH, settings, first_sequence=1), group(staging_bytes=20))
    script.hear(*script.lives())
    (persist,) = of(script.do(Start(generation(1, TWO_LAYERS), stalls)), Persist)
    script.do(Persisted(persist.token))
    return script, persist.record


def flip(script: Script, *stalls_s: float) -> None:
    script.hear(*script.staged())
    told: list[FromRank] = [
        dataclasses.replace(message, stall_s=stall_s) for message, stall_s in zip(script.flipped(), stalls_s, strict=True)
    ]
    script.hear(*told)


def layers_of_stages(script: Script) -> list[list[int]]:
    by_chunk = {stage.chunk_id: [change.layer.layer_id for change in stage.layers] for stage in script.stages()}
    return list(by_chunk.values())


def test_layers_flip_together_while_their_flip_is_expected_to_end_in_time() -> None:
    script, record = begun(limit_ms=20.0)
    assert record.num_chunks == 1
    assert record.stall is not None
    assert record.stall.over_s == 0
    assert record.stall == FlipStall(expected_s=SLOW.seconds(20), limit_s=0.02)
    assert layers_of_stages(script) == [[0, 1]]


def test_a_chunk_that_would_take_too_long_is_cut_into_layers() -> None:
    _, record = begun(limit_ms=6.0)
    assert record.num_chunks == 2
    assert record.stall == FlipStall(expected_s=SLOW.seconds(10), limit_s=0.006)


def test_a_layer_that_takes_too_long_alone_goes_alone_and_the_record_says_by_how_much() -> None:
    script, record = begun(limit_ms=2.0)
    assert record.num_chunks == 2
    assert record.stall is not None
    assert record.stall.over_s == pytest.approx(0.003)
    (note,) = [note for note in of(script.all, Note) if note.event == "rollout.started"]
    assert "5 ms expected: 3 ms over the limit of 2 ms, as a layer is not cut" in note.text


def test_without_a_limit_chunks_are_as_staging_allows() -> None:
    _, record = begun(limit_ms=0.0)
    assert record.num_chunks == 1
    assert record.stall == FlipStall(expected_s=SLOW.seconds(20))


def test_what_the_slowest_rank_told_is_set_beside_what_was_expected() -> None:
    script, _ = begun(limit_ms=6.0)
    flip(script, 0.004, 0.007, 0.001)
    (changed,) = of(script.last, LiveChanged)
    chunk = script.stages()[0].chunk_id
    assert changed.flip == ChunkFlip(chunk_id=chunk, staged_bytes=10, expected_s=SLOW.seconds(10), measured_s=0.007)
    (note,) = [note for note in of(script.all, Note) if note.event == "chunk.flipped"]
    assert note.text.endswith("in 7 ms, 5 ms expected")
    flip(script, 0.002, 0.002, 0.002)
    (finished,) = of(script.last, Finished)
    assert finished.outcome is Outcome.ACTIVE
    assert finished.stall == FlipStall(expected_s=SLOW.seconds(10), limit_s=0.006, measured_s=0.007)


def test_the_limit_is_10_ms_unless_another_is_set_and_flips_that_nobody_measured_are_priced_within_it() -> None:
    assert load_config().config.rollout_settings().commit_stall_ms_max == 10.0
    assert load_config().config.given_costs() == GivenCosts(commit_stall_s_max=0.01)
    unlimited = load_config(flags={"rollout.commit_stall_ms_max": "0"}).config
    for given, stall_s in ((load_config().config.given_costs(), 0.01), (unlimited.given_costs(), ASSUMED_STALL_S)):
        stepped = dataclasses.replace(given, seconds_per_step=0.02)
        cost = cost_model(stepped, MeasuredCosts(stalls=ASSUMED), tokens_per_step=1.0, steps_planned_from=1.0)
        assert cost is not None
        assert cost.commit_stall_s == stall_s
