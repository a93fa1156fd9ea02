"""Load windows as a rank records them: what counts, what does not, and that the device is never waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.hook.outbox import Outbox
from agent.hook.recorder import Recorder
from agent.transfer.streams import DeviceEvent, HostStreams
from eplb_service.control import Address, Armed, Pulse
from eplb_service.ids import ChunkId, GroupId, Incarnation, LayerRef, Phase, RankId
from eplb_service.window.report import Expected, LoadReport, TableShape
from eplb_service.window.report_check import check_identity, check_range, extract_counts

ADDRESS = Address(RankId(4), Incarnation(9), GroupId(2))
A, B, DRAFT = LayerRef("m", 3), LayerRef("m", 7), LayerRef("draft", 0)
LAYERS = [(A, 4), (DRAFT, 2), (B, 4)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowEvent:
    """An event of a device that is behind; waiting for it on the host is what must never happen in a step."""

    def __init__(self) -> None:
        self.reached = False

    def is_reached(self) -> bool:
        return self.reached

    def wait_host(self) -> None:
        raise AssertionError("the step path waits for the device")

    def hold_current_stream(self) -> None:
        raise AssertionError("nothing to hold here")

    def seconds_since(self, earlier: DeviceEvent) -> float:
        raise AssertionError("nothing is timed here")


class SlowStreams(HostStreams):
    def __init__(self) -> None:
        self.events: list[SlowEvent] = []

    def record(self, *, timed: bool = False) -> DeviceEvent:
        self.events.append(SlowEvent())
        return self.events[-1]


class Bench:
    """A recorder with windows of 4 steps in 2 parts, stepped by hand."""

    def __init__(self, streams: HostStreams | None = None, *, ring: int = 8, window: int = 4, parts: int = 2) -> None:
        self.clock, self.outbox = Clock(), Outbox(ring)
        self.recorder = Recorder(
            LAYERS,
            address=ADDRESS,
            phase=Phase.DECODE,
            window_steps=window,
            sub_windows=parts,
            idle_after_s=1.0,
            device=torch.device("cpu"),
            streams=streams or HostStreams(),
            outbox=self.outbox,
            clock=self.clock,
        )
        self.boundary = -1

    def step(self, tokens: int = 2, *, warmup: bool = False, capturing: bool = False, digest: int = 1, s: float = 0.1) -> None:
        self.boundary += 1
        self.recorder.boundary(self.boundary, num_real_tokens=tokens, warmup=warmup, capturing=capturing, live_digest=digest)
        self.clock.now += s

    def count(self, layer: LayerRef, *ids: int) -> None:
        self.recorder.record(layer, torch.tensor(ids, dtype=torch.int32)[:, None])

    def windows(self) -> list[LoadReport]:
        taken = []
        while isinstance(report := self.outbox.take(), LoadReport):
            taken.append(report)
        return taken


def counts(report: LoadReport, model: str = "m") -> list[Any]:
    (table,) = (table for table in report.tables if table.model == model)
    found: list[Any] = table.counts.tolist()
    return found


def test_counts_fall_into_the_sub_window_of_their_step_and_the_row_of_their_layer() -> None:
    bench = Bench()
    for _ in range(5):
        bench.step()
        bench.count(B, bench.boundary % 4)
        bench.count(DRAFT, 1, 1)
    (report,) = bench.windows()
    assert (report.window_index, report.boundary_begin, report.boundary_end) == (0, 0, 4)
    assert counts(report) == [[[0, 0, 0, 0], [1, 1, 0, 0]], [[0, 0, 0, 0], [0, 0, 1, 1]]]
    assert counts(report, "draft") == [[[0, 4]], [[0, 4]]]
    assert report.tables[0].layer_ids == (3, 7)


def test_reports_are_what_the_planner_accepts() -> None:
    bench = Bench()
    for _ in range(9):
        bench.step()
        bench.count(A, 0, 3)
    shapes = (TableShape(model="m", layer_ids=(3, 7), num_logical=4), TableShape(model="draft", layer_ids=(0,), num_logical=2))
    expected = Expected(group_id=GroupId(2), incarnations={RankId(4): Incarnation(9)}, window_steps=4, tables=shapes)
    reports = bench.windows()
    assert [report.window_index for report in reports] == [0, 1]
    for report in reports:
        assert check_identity(report, expected) is None
        assert check_range(report, expected) is None
        assert isinstance(extract_counts(report, expected), dict)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=40), st.integers(1, 6), st.data())
def test_no_assignment_is_lost_or_counted_twice(steps: list[list[int]], window: int, data: st.DataObject) -> None:
    bench = Bench(ring=100, window=window, parts=data.draw(st.integers(1, window)))
    for ids in steps:
        bench.step(len(ids))
        bench.count(A, *ids) if ids else None
    for _ in range(window):
        bench.step(0)
    total = [0] * 4
    for report in bench.windows():
        for part in counts(report):
            total = [a + b for a, b in zip(total, part[0], strict=True)]
    assert total == [sum(ids.count(expert) for ids in steps) for expert in range(4)]


def test_step_times_and_tokens_are_those_of_steps_with_real_tokens() -> None:
    bench = Bench(window=8)
    for tokens, seconds in ((2, 0.1), (3, 0.3), (0, 0.9), (4, 0.2), (5, 30.0), (6, 0.2), (7, 0.2), (1, 0.1), (1, 0.1)):
        bench.step(tokens, s=seconds)  # the dummy step and the pause of 30 s are no step times
    (report,) = bench.windows()
    assert report.tokens == 2 + 3 + 4 + 5 + 6 + 7 + 1
    assert report.forward_passes == 8
    found = (report.step_time_min_s, report.step_time_mean_s, report.step_time_max_s)
    assert found == pytest.approx((0.1, (0.1 + 0.2 + 0.2 + 0.2 + 0.1) / 5, 0.2))


def test_warm_up_steps_count_nothing_and_flag_their_window_only_vllm_56716() -> None:
    bench = Bench()
    for warmup in (False, True, False, False, False, False, False, False, False):
        bench.step(warmup=warmup)
        bench.count(A, 0)
    first, second = bench.windows()
    assert (first.warmup, second.warmup) == (True, False)
    assert sum(part[0][0] for part in counts(first)) == 3
    assert first.tokens == 3 * 2


def test_the_warm_up_flag_is_restored_when_the_block_raises_vllm_56716() -> None:
    bench = Bench()
    bench.step()

    def warm_up() -> None:
        with bench.recorder.warming_up():
            bench.count(A, 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        warm_up()
    bench.count(A, 1)
    for _ in range(4):
        bench.step()
    assert counts(bench.windows()[0])[0][0] == [0, 1, 0, 0]


def test_nothing_is_flushed_while_a_graph_is_captured_and_counters_go_on_sglang_32105_sglang_32106() -> None:
    streams = SlowStreams()
    bench = Bench(streams)
    for boundary in range(7):
        bench.step(capturing=3 <= boundary <= 5)  # over the edge of the first window
        bench.count(A, 1)
        assert len(streams.events) == (1 if boundary > 5 else 0)
    streams.events[0].reached = True
    bench.recorder.poll()
    (report,) = bench.windows()
    assert report.warmup  # it holds steps of two windows
    assert sum(part[0][1] for part in counts(report)) == 6


def test_a_window_is_read_only_after_its_event_and_no_step_waits_for_it_vllm_ascend_4214() -> None:
    streams = SlowStreams()
    bench = Bench(streams)
    for _ in range(6):
        bench.step()
        bench.count(A, 2)
    assert bench.windows() == []
    streams.events[0].reached = True
    bench.step()
    assert sum(part[0][2] for part in counts(bench.windows()[0])) == 4


def test_a_device_that_is_two_windows_behind_costs_a_window_and_never_a_wait() -> None:
    streams = SlowStreams()
    bench = Bench(streams)
    for _ in range(13):
        bench.step()
        bench.count(A, 0)
    assert bench.outbox.windows_dropped == 1
    for event in streams.events:
        event.reached = True
    bench.step()
    assert [report.window_index for report in bench.windows()] == [0, 1]


def test_a_planner_that_is_away_costs_the_oldest_windows_and_they_are_counted_sglang_18587() -> None:
    bench = Bench(ring=3)
    for _ in range(4 * 10 + 1):
        bench.step()
    assert bench.outbox.windows_dropped == 7
    assert [report.window_index for report in bench.windows()] == [7, 8, 9]


def test_a_window_names_the_map_of_its_first_and_of_its_last_step() -> None:
    bench = Bench()
    for digest in (5, 5, 6, 6, 7, 7, 7, 7, 8):
        bench.step(digest=digest)
    first, second = bench.windows()
    assert (first.live_digest_begin, first.live_digest_end) == (5, 6)
    assert (second.live_digest_begin, second.live_digest_end) == (7, 7)


def test_ids_outside_the_experts_are_counted_apart_and_touch_nothing() -> None:
    bench = Bench()
    bench.step()
    bench.count(A, -1, 4, 1000, 2)
    for _ in range(4):
        bench.step()
    assert counts(bench.windows()[0])[0][0] == [0, 0, 1, 0]
    assert bench.recorder.stray_ids == 3


def test_a_pause_forgets_the_running_window() -> None:
    bench = Bench()
    bench.step()
    bench.count(A, 0)
    bench.recorder.pause()
    for _ in range(4):
        bench.step()
        bench.count(A, 1)
    (report,) = bench.windows()
    assert (report.boundary_begin, report.boundary_end) == (1, 4)
    assert sum(part[0][0] for part in counts(report)) == 0


def test_counters_keep_their_addresses_over_windows() -> None:
    bench = Bench()
    before = [table.current.data_ptr() for table in bench.recorder._tables]
    for _ in range(20):
        bench.step()
    assert [table.current.data_ptr() for table in bench.recorder._tables] == before


# ── the outbox ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_messages_go_before_windows_and_are_kept_only_while_somebody_is_there() -> None:
    bench = Bench()
    for _ in range(5):
        bench.step()
    armed: Callable[[int], Armed] = lambda n: Armed(sender=ADDRESS, chunk_id=ChunkId(n))  # noqa: E731
    bench.outbox.put(armed(1))
    bench.outbox.attach()
    bench.outbox.put(armed(2))
    assert bench.outbox.take() == armed(2)
    bench.outbox.put(armed(3))
    bench.outbox.detach(windows_unsent=0)
    assert isinstance(bench.outbox.take(), LoadReport)
    assert bench.outbox.take() is None


def test_messages_have_a_bound() -> None:
    outbox = Outbox(1)
    outbox.attach()
    for boundary in range(5000):
        outbox.put(
            Pulse(
                sender=ADDRESS, boundary=boundary, idle=False, voting=True, off_reason="", windows_dropped=0, weights_version=0
            )
        )
    assert len(outbox) == 1024
