"""What the hook asks of a device, in which order and from which thread; each rule has one test that fails when it is broken.

One rank runs here as on a device, over streams that write down every call and whose events are reached when the test says so.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from agent.hook import hook as hook_module
from agent.hook.hook import Hook
from agent.transfer import streams as streams_module
from agent.transfer.streams import LOWEST_PRIORITY, CudaStreams, DeviceEvent, EventPair, HostStreams, streams_for
from eplb_service.control import Flipped, RefusalCode, Refused
from eplb_service.errors import BrokenInvariantError, InvalidInputError
from tests.integration.hook_fleet import FakeAgent
from tests.one_rank import LAYER, NEXT, RANK, ROW, OneRank, arm, hooked, roll_out, stage_of, step_until

MODEL_THREAD = threading.current_thread().name


class WatchedStreams(HostStreams):
    """Every call with its thread. held: events recorded `timed` (those of flips) are not reached while it is set.

    num_at_start: calls before the first step, which is no step.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.held, self.num_at_start = False, 0

    def note(self, call: str) -> None:
        self.calls.append((threading.current_thread().name, call))

    def of(self, thread: str) -> list[str]:
        calls = list(self.calls)[self.num_at_start if thread == MODEL_THREAD else 0 :]
        return [call for where, call in calls if where == thread]

    def bind_thread(self) -> None:
        self.note("bind")

    @contextmanager
    def _on(self, name: str) -> Iterator[None]:
        self.note(f"enter {name}")
        yield
        self.note(f"leave {name}")

    def on_side_stream(self) -> Any:
        return self._on("side")

    def on_compute_stream(self) -> Any:
        return self._on("compute")

    def record(self, *, timed: bool = False) -> DeviceEvent:
        self.note("record timed" if timed else "record")
        return WatchedEvent(self, timed=timed)


class WatchedEvent:
    def __init__(self, streams: WatchedStreams, *, timed: bool) -> None:
        self.streams, self.timed = streams, timed

    def is_reached(self) -> bool:
        self.streams.note("query")
        return not (self.timed and self.streams.held)

    def wait_host(self) -> None:
        self.streams.note("host waits")

    def hold_current_stream(self) -> None:
        self.streams.note("stream waits")

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, WatchedEvent)
        assert earlier.timed
        assert self.timed
        self.streams.note("elapsed")
        return 0.125


Served = tuple[OneRank, Hook, FakeAgent, WatchedStreams]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    streams = WatchedStreams()
    monkeypatch.setattr(hook_module, "streams_for", lambda *_: streams)
    engine = OneRank(torch.device("cpu"), hidden=8)
    with hooked(engine) as (hook, agent):
        streams.num_at_start = len(streams.calls)
        yield engine, hook, agent, streams


def step(hook: Hook) -> None:
    hook.begin_step(num_real_tokens=2)
    hook.record(LAYER, torch.tensor([[0], [1]]))


def test_the_step_path_never_waits_for_the_device(served: Served) -> None:
    engine, hook, agent, streams = served
    roll_out(agent, ROW, NEXT, 1, lambda: step(hook))
    for _ in range(12):  # windows close meanwhile
        step(hook)
    assert "record timed" in streams.of(MODEL_THREAD)
    assert "host waits" not in streams.of(MODEL_THREAD)
    assert engine.wrong() == []


def test_every_thread_that_touches_the_device_binds_it_first_vllm_22179(served: Served) -> None:
    _, hook, agent, streams = served
    roll_out(agent, ROW, NEXT, 1, lambda: step(hook))
    agent.until(lambda: "bind" in streams.of("eplb-link"), "a tick of the link")
    threads = {thread for thread, _ in streams.calls} - {MODEL_THREAD}
    assert threads >= {"eplb-link", "eplb-stage"}
    assert {streams.of(thread)[0] for thread in threads} == {"bind"}


def test_copies_run_on_the_side_stream_alone_and_flips_on_the_compute_stream_alone(served: Served) -> None:
    _, hook, agent, streams = served
    roll_out(agent, ROW, NEXT, 1, lambda: step(hook))
    assert "enter compute" not in streams.of("eplb-stage")
    assert "enter side" not in streams.of(MODEL_THREAD)
    calls = streams.of(MODEL_THREAD)
    first, last = (index for index, call in enumerate(calls) if call == "record timed")
    assert calls[first - 1] == "enter compute"
    assert calls[first + 1] == "stream waits"  # for what staging recorded
    assert calls[last + 1] == "leave compute"


def test_flipped_is_said_when_the_device_is_through_with_the_stall_of_the_device(served: Served) -> None:
    _, hook, agent, streams = served
    streams.held = True
    chunk = arm(agent, stage_of(agent, ROW, NEXT, 1))
    step_until(lambda: hook.status.flips == 1, lambda: step(hook), "the flip")
    for _ in range(5):
        step(hook)
    assert not agent.answers(Flipped, chunk)
    assert ("query" in streams.of(MODEL_THREAD), "elapsed" in [call for _, call in streams.calls]) == (True, False)
    streams.held = False
    step_until(lambda: bool(agent.answers(Flipped, chunk)), lambda: step(hook), "Flipped")
    assert agent.answers(Flipped, chunk)[RANK].stall_s == 0.125


def test_staging_is_not_used_again_before_the_device_has_copied_out_of_it_vllm_32881(served: Served) -> None:
    engine, hook, agent, streams = served
    streams.held = True
    chunk = arm(agent, stage_of(agent, ROW, NEXT, 1))
    step_until(lambda: hook.status.flips == 1, lambda: step(hook), "the flip")
    copied = len(streams.of("eplb-stage"))
    early = stage_of(agent, NEXT, ROW, 2)
    agent.send(early)
    agent.until(lambda: bool(agent.answers(Refused, early.chunk_id)), "Refused")
    assert agent.answers(Refused, early.chunk_id)[RANK].code is RefusalCode.BUSY
    assert len(streams.of("eplb-stage")) == copied
    streams.held = False
    step_until(lambda: bool(agent.answers(Flipped, chunk)), lambda: step(hook), "Flipped")
    roll_out(agent, NEXT, ROW, 3, lambda: step(hook))
    assert engine.wrong() == []


def test_nothing_is_asked_of_the_device_at_a_boundary_while_a_graph_is_captured(served: Served) -> None:
    engine, hook, agent, streams = served
    streams.held = True  # a flip is under way whose event would be looked at
    arm(agent, stage_of(agent, ROW, NEXT, 1))
    step_until(lambda: hook.status.flips == 1, lambda: step(hook), "the flip")
    engine.capturing, engine.version = True, 1
    seen = len(streams.of(MODEL_THREAD))
    for _ in range(9):  # the edges of two windows among them
        step(hook)
    assert streams.of(MODEL_THREAD)[seen:] == []
    streams.held = engine.capturing = False
    step(hook)
    assert streams.of(MODEL_THREAD)[seen:] != []
    assert (hook.status.off_reason, engine.stopped) == ("", "")


def test_a_flip_that_is_due_while_a_graph_is_captured_comes_before_the_first_pass_that_runs(served: Served) -> None:
    engine, hook, agent, _ = served
    chunk = arm(agent, stage_of(agent, ROW, NEXT, 1))
    engine.capturing = True
    for _ in range(6):
        step(hook)
    agent.until(lambda: hook.status.boundary >= 6, "steps")
    assert (hook.status.flips, engine.tables.physical_to_logical.tolist()) == (0, list(ROW))
    engine.capturing = False
    step(hook)
    assert (hook.status.flips, engine.tables.physical_to_logical.tolist()) == (1, list(NEXT))
    step_until(lambda: bool(agent.answers(Flipped, chunk)), lambda: step(hook), "Flipped")
    assert engine.wrong() == []
    assert engine.stopped == ""


def test_what_a_captured_graph_reads_stays_where_it_is_fastdeploy_4599(served: Served) -> None:
    engine, hook, agent, _ = served
    before = engine.addresses()
    roll_out(agent, ROW, NEXT, 1, lambda: step(hook))
    assert engine.addresses() == before
    assert engine.wrong() == []


def test_a_host_s_events_tell_the_time_between_them_and_no_time_to_another_device_s() -> None:
    streams = HostStreams()
    first, second = EventPair(), EventPair()
    with pytest.raises(BrokenInvariantError, match="never recorded"):
        second.seconds_since(first)
    first.record(streams, timed=True)
    torch.zeros(1 << 20).sum()
    second.record(streams, timed=True)
    assert 0 < second.seconds_since(first) < 60
    assert second.seconds_since(first) == -first.seconds_since(second)
    with pytest.raises(BrokenInvariantError, match="another device"):
        streams.record().seconds_since(WatchedEvent(WatchedStreams(), timed=True))


# ── what is asked of CUDA ────────────────────────────────────────────────────────────────────────────────────────────────


class Cuda:
    """Stands for `torch.cuda`: streams come out of a pool in turn, and every call is written down with the current device."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = threading.local()
        self.handed_out = 0

    def note(self, call: str) -> None:
        self.calls.append(f"{call} on {getattr(self.current, 'device', 0)}")

    def make_stream(self, device: torch.device, priority: int = -99) -> Any:
        self.handed_out += 1
        made = type("Stream", (), {})()
        made.cuda_stream, made.priority, made.device = (self.handed_out - 1) % 32, priority, device
        made.wait_event = lambda _event: self.note(f"stream {made.cuda_stream} waits")
        return made

    def make_event(self, **options: bool) -> Any:
        made: Any = type("Event", (), {})()
        made.options = options
        made.record = lambda stream: self.note(f"record {sorted(options.items())} at {stream.cuda_stream}")
        made.query = lambda: self.answer("query", value=True)
        made.synchronize = lambda: self.note("synchronize")
        made.elapsed_time = lambda _end: self.answer("elapsed", value=250.0)
        return made

    def answer(self, call: str, *, value: float) -> float:
        self.note(call)
        return value

    def set_device(self, device: torch.device) -> None:
        self.current.device = device.index
        self.note("set_device")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current.device = getattr(self.current, "device", 0), device.index
        yield
        self.current.device = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current.stream = getattr(self.current, "stream", None), stream
        yield
        self.current.stream = before

    def current_stream(self, device: torch.device) -> Any:
        assert device.index == 3
        return self.current.stream


DEVICE = torch.device("cuda", 3)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    for name in ("set_device", "device", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "Stream", made.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", made.make_event)
    monkeypatch.setattr(streams_module, "spare_captures", lambda: made.note("spare captures"))
    return made


def test_staging_has_a_stream_of_its_own_at_the_lowest_priority_whatever_the_pool_hands_out(cuda: Cuda) -> None:
    compute = cuda.make_stream(DEVICE)
    for _ in range(31):
        cuda.make_stream(DEVICE)  # the engine's others: the next of the pool is its first again
    streams = CudaStreams(DEVICE, compute)
    with streams.on_side_stream():
        side = torch.cuda.current_stream(DEVICE)
    assert side.cuda_stream != compute.cuda_stream
    assert (side.priority, LOWEST_PRIORITY) == (0, 0)


def test_events_are_asked_with_their_device_current_in_any_thread(cuda: Cuda) -> None:
    streams = CudaStreams(DEVICE, cuda.make_stream(DEVICE))
    with streams.on_compute_stream():
        event, later = streams.record(timed=True), streams.record(timed=True)
    cuda.calls.clear()

    def ask() -> None:
        assert event.is_reached()
        event.wait_host()
        assert later.seconds_since(event) == 0.25

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(10)
    assert cuda.calls == ["query on 3", "synchronize on 3", "elapsed on 3"]


def test_only_timed_events_keep_the_time_and_who_waits_sleeps(cuda: Cuda) -> None:
    streams = CudaStreams(DEVICE, cuda.make_stream(DEVICE))
    with streams.on_side_stream():
        streams.record()
        streams.record(timed=True).hold_current_stream()
    blocking = ("blocking", True)
    assert cuda.calls == [
        f"record {[blocking, ('enable_timing', False)]} at 1 on 3",
        f"record {[blocking, ('enable_timing', True)]} at 1 on 3",
        "stream 1 waits on 3",
    ]


def test_a_thread_of_the_hook_s_binds_the_device_and_spares_captures(cuda: Cuda) -> None:
    CudaStreams(DEVICE, cuda.make_stream(DEVICE)).bind_thread()
    assert cuda.calls == ["set_device on 3", "spare captures on 3"]


def test_a_device_whose_engine_names_no_stream_is_refused(cuda: Cuda) -> None:
    with pytest.raises(InvalidInputError, match=r"the weights are on cuda:3 and compute_stream\(\) is None"):
        streams_for(DEVICE, None)
    assert isinstance(streams_for(DEVICE, cuda.make_stream(DEVICE)), CudaStreams)
    assert isinstance(streams_for(torch.device("cpu"), None), HostStreams)


class Runtime:
    """Stands for libcudart."""

    def __init__(self, answer: int) -> None:
        self.answer, self.modes = answer, list[int]()

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802  # CUDA's name
        self.modes.append(mode._obj.value)
        return self.answer


def test_a_thread_s_calls_are_kept_out_of_captures_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, asked = Runtime(0), list[str]()

    def load(name: str) -> Runtime:
        asked.append(name)
        return runtime

    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(ctypes, "CDLL", load)
    streams_module.spare_captures()
    assert (asked, runtime.modes, caplog.messages) == (["libcudart.so.12"], [1], [])
    runtime.answer = 400
    streams_module.spare_captures()
    assert "must not capture graphs while experts are copied: CUDA error 400" in caplog.messages[0]


def test_where_that_cannot_be_asked_for_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.1")
    streams_module.spare_captures()
    assert "must not capture graphs while experts are copied" in caplog.messages[0]
