"""Packing, checksums, staging and the order of device work; what only a device can show is in tests/gpu, the order is here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.engine.port import RoutingTables, SlotTensor, TensorKind
from agent.hook.routing import LayerFlip, LayerTables, PreparedFlip, flip
from agent.transfer.checksum import checksum, mixed, slot_checksums
from agent.transfer.staging import ALIGN_BYTES, REGION_ALIGN_BYTES, ExpertLayout, Staging
from agent.transfer.streams import DeviceEvent, EventPair, HostStreams
from eplb_service.errors import DeadlineError, InvalidInputError
from eplb_service.ids import LayerRef

LAYER, OTHER = LayerRef("m", 0), LayerRef("m", 5)


def packed(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64).view(torch.uint8)


# ── checksums ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def slow_checksum(words: Sequence[int]) -> int:
    """In whole numbers of any size, a word at a time."""
    most, total = (1 << 64) - 1, 0
    for index, word in enumerate(words, start=1):
        value = ((index * 0x9E3779B97F4A7C15) ^ word) & most
        value = value * 0xC2B2AE3D27D4EB4F & most
        value ^= value >> 32
        value = value * 0x9E3779B97F4A7C15 & most
        total += value ^ (value >> 29)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


words_of_64_bits = st.integers(-(1 << 63), (1 << 63) - 1)


@settings(deadline=None)
@given(st.lists(words_of_64_bits, max_size=20))
def test_the_checksum_is_a_sum_of_mixed_words_modulo_two_to_the_64(words: list[int]) -> None:
    assert int(checksum(packed(words))) == slow_checksum(words)


@settings(deadline=None)
@given(st.lists(words_of_64_bits, min_size=1, max_size=20), st.data())
def test_any_change_of_one_byte_shows(words: list[int], data: st.DataObject) -> None:
    bytes_ = packed(words)
    index = data.draw(st.integers(0, bytes_.numel() - 1))
    changed = bytes_.clone()
    changed[index] ^= data.draw(st.integers(1, 255))
    assert int(checksum(changed)) != int(checksum(bytes_))


@settings(deadline=None)
@given(st.lists(words_of_64_bits, min_size=2, max_size=20, unique=True))
def test_the_same_words_in_another_order_have_another_checksum(words: list[int]) -> None:
    assert int(checksum(packed(words[::-1]))) != int(checksum(packed(words)))


def test_exchanged_words_that_differ_in_one_bit_show_whichever_bit_it_is() -> None:
    """A sum of words times odd weights would not see those of the highest bit: the sign of every fourth bf16."""
    for bit in range(64):
        for place in (1, 2, 3, 7, 20, 39):
            words = torch.zeros(40, dtype=torch.int64)
            words[0] = (1 << bit) - (1 << 64 if bit == 63 else 0)
            first = int(checksum(words.view(torch.uint8)))
            words[[0, place]] = words[[place, 0]]
            assert int(checksum(words.view(torch.uint8))) != first, (bit, place)


def test_long_inputs_are_summed_in_parts_by_the_positions_of_their_words() -> None:
    words = torch.arange((1 << 20) + 5, dtype=torch.int64)
    assert int(checksum(words.view(torch.uint8))) == int(mixed(words, 0).sum())
    assert mixed(words, 7)[3:].equal(mixed(words[3:], 10))


# ── packing ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def strided(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Slots in a larger, transposed storage with an offset."""
    storage = torch.arange(3 + 2 * count * 8 * 8, dtype=torch.float32).to(dtype)
    size = [count, *shape]
    strides = [1, *(2 * count * (index + 1) for index in range(len(shape)))]
    return storage.as_strided(size, strides, 3)


def tensors() -> dict[str, SlotTensor]:
    return {
        "weight": SlotTensor(strided(3, 2, 3)),
        "scale": SlotTensor(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)),
        "bias": SlotTensor(torch.zeros(0)),
        "product": SlotTensor(torch.zeros(3, 4), TensorKind.DERIVED),
        "input_scale": SlotTensor(torch.ones(1), TensorKind.SHARED),
    }


def test_an_expert_is_all_its_expert_tensors_and_empty_derived_and_shared_ones_are_left_out_vllm_29162() -> None:
    layout = ExpertLayout.of(LAYER, tensors())
    assert [t.name for t in layout.tensors] == ["scale", "weight"]
    assert layout.expert_bytes == 2 + 2 * 3 * 4
    assert all(t.offset % ALIGN_BYTES == 0 for t in layout.tensors)


def test_packing_and_unpacking_move_a_whole_expert_between_strided_slots() -> None:
    source, target = tensors(), tensors()
    for tensor in target.values():
        tensor.data.zero_()
    layout = ExpertLayout.of(LAYER, source)
    region = torch.full((layout.num_bytes,), 9, dtype=torch.uint8)
    layout.pack(source, 2, region)
    layout.unpack(region, target, 1)
    for name in ("weight", "scale"):
        assert torch.equal(target[name].data[1], source[name].data[2])
        assert not target[name].data[0].any()
        assert not target[name].data[2].any()


def test_padding_does_not_depend_on_what_was_in_the_buffer_before() -> None:
    layout = ExpertLayout.of(LAYER, tensors())
    sums = [
        slot_checksums(layout, tensors(), 3, torch.full((layout.num_bytes + 64,), filler, dtype=torch.uint8))
        for filler in (0, 255)
    ]
    assert sums[0] == sums[1]
    assert len(set(sums[0])) == 3


def test_tensors_that_disagree_about_the_slots_are_refused() -> None:
    bad = {"a": SlotTensor(torch.zeros(2, 2)), "b": SlotTensor(torch.zeros(3, 2))}
    with pytest.raises(InvalidInputError, match=r"\[2, 3\]"):
        ExpertLayout.of(LAYER, bad)


# ── staging ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def layouts() -> dict[LayerRef, ExpertLayout]:
    return {LAYER: ExpertLayout.of(LAYER, tensors()), OTHER: ExpertLayout.of(OTHER, {"w": SlotTensor(torch.zeros(3, 100))})}


def test_whatever_fits_the_budget_without_padding_fits_the_buffer() -> None:
    both = layouts()
    for mix in ([LAYER] * 40, [OTHER] * 4, [LAYER] * 10 + [OTHER] * 3):
        budget = sum(both[layer].expert_bytes for layer in mix)
        staging = Staging(budget, both, torch.device("cpu"), HostStreams())
        for _ in range(2):
            spans = [(r.device.data_ptr(), r.device.numel()) for r in map(staging.take, mix)]
            assert all((start - spans[0][0]) % REGION_ALIGN_BYTES == 0 for start, _ in spans)
            assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
            staging.clear()


def test_staging_is_one_buffer_for_its_whole_life_vllm_22179() -> None:
    staging = Staging(10_000, layouts(), torch.device("cpu"), HostStreams())
    first = staging.take(LAYER).device.data_ptr()
    for _ in range(100):
        staging.clear()
        assert staging.take(OTHER).device.data_ptr() == first


def test_a_full_buffer_refuses_instead_of_growing() -> None:
    staging = Staging(401, layouts(), torch.device("cpu"), HostStreams())
    for _ in range(staging.num_bytes // 512):
        staging.take(OTHER)
    with pytest.raises(InvalidInputError, match="is full"):
        staging.take(OTHER)


# ── order of device work ─────────────────────────────────────────────────────────────────────────────────────────────────


class RecordingStreams(HostStreams):
    """Streams that write down what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextmanager
    def _on(self, name: str) -> Any:
        self.calls.append(f"enter {name}")
        yield
        self.calls.append(f"leave {name}")

    def on_compute_stream(self) -> Any:
        return self._on("compute")

    def on_side_stream(self) -> Any:
        return self._on("side")

    def record(self, *, timed: bool = False) -> DeviceEvent:
        self.calls.append("record timed" if timed else "record")
        return RecordingEvent(self.calls, f"event {sum(call.startswith('record') for call in self.calls)}")


class RecordingEvent:
    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name = calls, name

    def is_reached(self) -> bool:
        return False

    def wait_host(self) -> None:
        self.calls.append(f"host waits for {self.name}")

    def hold_current_stream(self) -> None:
        self.calls.append(f"stream waits for {self.name}")

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, RecordingEvent)
        self.calls.append(f"from {earlier.name} to {self.name}")
        return 0.25


class RecordingPort:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def rederive(self, layer: LayerRef, slots: Sequence[int]) -> None:
        self.calls.append(f"rederive {list(slots)}")


def test_a_flip_waits_for_staging_writes_weights_tables_and_derived_tensors_then_records_its_end_vllm_32881() -> None:
    streams = RecordingStreams()
    made, layout = tensors(), ExpertLayout.of(LAYER, tensors())
    staging = Staging(1000, {LAYER: layout}, torch.device("cpu"), HostStreams())
    region = staging.take(LAYER)
    layout.pack(made, 0, region.device)
    tables = RoutingTables(
        torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    )
    addresses = [t.data_ptr() for t in (tables.physical_to_logical, tables.logical_to_physical, tables.replica_counts)]
    prepared = PreparedFlip((LayerFlip(LAYER, LayerTables.derive((0, 1, 0), 2, 2, torch.device("cpu")), ((2, region),), (2,)),))
    prepared.ready.record(streams)
    port: Any = RecordingPort(streams.calls)
    flip(prepared, port=port, streams=streams, tensors={LAYER: made}, layouts={LAYER: layout}, tables={LAYER: tables})
    assert streams.calls == [
        "record",
        "enter compute",
        "record timed",
        "stream waits for event 1",
        "rederive [2]",
        "record timed",
        "leave compute",
    ]
    assert not prepared.copied_out.is_reached()  # the event after the copies decides, not the call's return
    assert prepared.stall_s == 0.25  # what the compute stream stood still for, not what the host took to enqueue it
    assert streams.calls[-1] == "from event 2 to event 3"
    assert torch.equal(made["weight"].data[2], made["weight"].data[0])
    assert tables.logical_to_physical.tolist() == [[0, 2], [1, -1]]
    assert tables.replica_counts.tolist() == [2, 1]
    after = [t.data_ptr() for t in (tables.physical_to_logical, tables.logical_to_physical, tables.replica_counts)]
    assert after == addresses  # in place, fixed width: FastDeploy#4599


def test_a_flip_writes_shares_in_the_order_of_the_replicas_in_place() -> None:
    layout = ExpertLayout.of(LAYER, tensors())
    tables = RoutingTables(
        torch.tensor([0, 1, 0, -1]),
        torch.tensor([[0, 2, -1], [1, -1, -1]]),
        torch.tensor([2, 1]),
        torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]),
    )
    assert tables.replica_shares is not None
    view, address = tables.replica_shares[0], tables.replica_shares.data_ptr()
    shares = (0.25, 1.0, 0.125, 0.625)
    derived = LayerTables.derive((0, 1, 0, 0), 2, 3, torch.device("cpu"), shares=shares)
    prepared = PreparedFlip((LayerFlip(LAYER, derived, (), ()),))
    streams = RecordingStreams()
    prepared.ready.record(streams)
    port: Any = RecordingPort(streams.calls)
    flip(prepared, port=port, streams=streams, tensors={LAYER: tensors()}, layouts={LAYER: layout}, tables={LAYER: tables})
    assert tables.replica_shares.tolist() == [[0.25, 0.125, 0.625], [1.0, 0.0, 0.0]]
    assert view.tolist() == [0.25, 0.125, 0.625]  # what a captured graph reads
    assert tables.replica_shares.data_ptr() == address
    assert tables.logical_to_physical.tolist() == [[0, 2, 3], [1, -1, -1]]
    assert not [call for call in streams.calls if call.startswith("rederive")]


def test_tables_without_shares_are_flipped_as_ever() -> None:
    tables = RoutingTables(torch.tensor([0, 1]), torch.tensor([[0], [1]]), torch.tensor([1, 1]))
    LayerTables.derive((1, 0), 2, 1, torch.device("cpu")).write(tables)
    assert tables.logical_to_physical.tolist() == [[1], [0]]
    assert tables.replica_shares is None


def test_more_replicas_than_the_table_is_wide_are_never_written_fastdeploy_4599() -> None:
    with pytest.raises(InvalidInputError, match="2 wide"):
        LayerTables.derive((0, 0, 0, 1), 2, 2, torch.device("cpu"))


def test_waiting_for_an_event_that_nobody_records_ends_at_its_deadline_vllm_37601() -> None:
    pair = EventPair()
    with pytest.raises(DeadlineError, match=r"not recorded within 0\.02 s"):
        pair.hold_current_stream(0.02)
    assert not pair.is_reached()


def test_a_consumer_that_comes_first_blocks_until_the_producer_recorded_vllm_37601() -> None:
    streams, pair, order = RecordingStreams(), EventPair(), list[str]()
    waiting = threading.Event()

    def consume() -> None:
        waiting.set()
        pair.hold_current_stream(5.0)
        order.append("held")

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert waiting.wait(5)
    order.append("recorded")
    pair.record(streams)
    consumer.join(5)
    assert order == ["recorded", "held"]
    assert streams.calls == ["record", "stream waits for event 1"]
