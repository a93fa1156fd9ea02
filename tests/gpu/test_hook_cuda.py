"""The flip path on CUDA tensors: other streams, asynchronous copies, captured graphs.

The order of calls is tested on any machine, through the same rank (tests/unit/test_transfer_streams.py, test_hook_transfer.py).
One rank votes alone: what is shown here is the device's side; several ranks are in tests/integration and `benchmarks.gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from agent.hook.hook import Hook
from agent.transfer.checksum import checksum
from agent.transfer.streams import LOWEST_PRIORITY, CudaStreams, EventPair
from tests.integration.hook_fleet import FakeAgent
from tests.one_rank import LAYER, NEXT, NUM_LOGICAL, ROW, OneRank, expected, hooked, roll_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

HIDDEN = 256

Served = tuple[OneRank, Hook, FakeAgent]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def served() -> Iterator[Served]:
    engine = OneRank(device(), hidden=HIDDEN)
    with hooked(engine) as (hook, agent):
        yield engine, hook, agent


def test_a_flip_moves_weights_scales_tables_and_derived_tensors_in_place(served: Served) -> None:
    engine, hook, agent = served
    addresses = engine.addresses()
    flipped = roll_out(agent, ROW, NEXT, 1, lambda: hook.begin_step(num_real_tokens=1))
    assert engine.wrong() == []
    assert engine.tables.physical_to_logical.tolist() == list(NEXT)
    assert engine.addresses() == addresses
    assert 0 < flipped.stall_s < 1  # of the device, by events on its compute stream


def test_a_graph_captured_before_a_flip_replays_right_after_it_fastdeploy_4599(served: Served) -> None:
    engine, hook, agent = served
    inputs = torch.randn(8, HIDDEN, device=engine.device)
    graph = torch.cuda.CUDAGraph()
    outputs = []
    with torch.cuda.stream(engine.stream):
        for expert in range(NUM_LOGICAL):
            engine.forward(inputs, expert)
    engine.finish()
    with torch.cuda.graph(graph, stream=engine.stream):
        hook.begin_step(num_real_tokens=0)  # a boundary while capturing: nothing of it may land in the graph
        outputs = [engine.forward(inputs, expert) for expert in range(NUM_LOGICAL)]
        hook.record(LAYER, torch.zeros(4, 1, dtype=torch.int64, device=engine.device))

    def step() -> None:
        hook.begin_step(num_real_tokens=4)
        with torch.cuda.stream(engine.stream):
            graph.replay()
        engine.finish()
        for expert, found in enumerate(outputs):
            torch.testing.assert_close(found, expected(inputs, expert), rtol=1e-4, atol=1e-3)

    for sequence, (old, new) in enumerate(((ROW, NEXT), (NEXT, ROW), (ROW, NEXT)), start=1):
        roll_out(agent, old, new, sequence, step)
        for _ in range(3):
            step()
    agent.until(lambda: any(not window.warmup for window in agent.windows), "window")
    window = next(window for window in agent.windows if not window.warmup)
    assert int(window.tables[0].counts[:, 0, 0].sum()) == 4 * 4  # the captured recorder counted in every replay


def test_a_graph_is_captured_while_the_hook_s_threads_use_the_device(served: Served) -> None:
    """torch captures in CUDA's global mode, which calls of other threads break unless these say otherwise."""
    engine, hook, agent = served
    inputs = torch.randn(8, HIDDEN, device=engine.device)
    captured = 0

    def step() -> None:
        nonlocal captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=engine.stream):
            for _ in range(50):
                engine.forward(inputs, 0)
        captured += 1
        hook.begin_step(num_real_tokens=1)

    for sequence, (old, new) in enumerate(((ROW, NEXT), (NEXT, ROW)) * 3, start=1):
        roll_out(agent, old, new, sequence, step)
    assert captured >= 6
    assert (engine.wrong(), engine.stopped, hook.status.off_reason) == ([], "", "")


def test_recording_flips_and_windows_never_synchronise_the_device(served: Served) -> None:
    engine, hook, agent = served
    ids = torch.zeros(16, 2, dtype=torch.int32, device=engine.device)
    hook.begin_step(num_real_tokens=16)

    def step() -> None:
        torch.cuda.set_sync_debug_mode("error")  # of the whole process; nothing is staged meanwhile
        try:
            with torch.cuda.stream(engine.stream):
                hook.begin_step(num_real_tokens=16)
                hook.record(LAYER, ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for _ in range(20):
        step()
    roll_out(agent, ROW, NEXT, 1, step)
    assert hook.status.off_reason == ""
    engine.finish()
    hook.begin_step(num_real_tokens=0)
    agent.until(lambda: bool(agent.windows), "window")


def test_checksums_are_equal_on_both_devices() -> None:
    data = torch.randint(0, 256, (8 * ((1 << 20) + 3),), dtype=torch.uint8)
    assert int(checksum(data.cuda())) == int(checksum(data))


def test_the_staging_stream_is_another_than_the_engine_s_and_never_ahead_of_it() -> None:
    compute = torch.cuda.Stream(device(), priority=-1)  # type: ignore[no-untyped-call]
    streams = CudaStreams(device(), compute)
    with streams.on_side_stream():
        side = torch.cuda.current_stream(device())
    assert side.cuda_stream != compute.cuda_stream
    assert side.priority == LOWEST_PRIORITY > compute.priority


def test_the_compute_stream_waits_for_a_slow_copy_on_the_staging_stream_vllm_37601() -> None:
    streams = CudaStreams(device(), torch.cuda.Stream(device()))  # type: ignore[no-untyped-call]
    source, target = torch.ones(1 << 22, device=device()), torch.zeros(1 << 22, device=device())
    torch.cuda.synchronize()
    pair = EventPair()
    with streams.on_side_stream():
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        target.copy_(source)
        pair.record(streams)
    with streams.on_compute_stream():
        pair.hold_current_stream(1.0)
        total = target.sum()
        done = streams.record()
    done.wait_host()
    assert int(total) == 1 << 22


def test_the_time_between_two_points_is_the_device_s_not_the_host_s() -> None:
    streams = CudaStreams(device(), torch.cuda.Stream(device()))  # type: ignore[no-untyped-call]
    begun, ended = EventPair(), EventPair()
    with streams.on_compute_stream():
        begun.record(streams, timed=True)
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # enqueued within microseconds
        ended.record(streams, timed=True)
    ended.wait_host(10.0)
    assert ended.seconds_since(begun) > 0.02
