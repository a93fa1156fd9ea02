"""Tensors as engines keep them: what moves, what may not, and which difference between ranks is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from agent.engine.port import SlotTensor, TensorKind
from agent.hook.manifest import layer_manifest, manifest_facts, settled, shared_facts
from agent.hook.rendezvous import compare
from agent.transfer.gloo import local_store
from agent.transfer.staging import ExpertLayout, stored
from eplb_service.errors import ConflictError, InvalidInputError
from eplb_service.ids import LayerRef
from tests.integration.hook_fleet import describe
from tests.mixed_experts import BF16, EXPERT_BYTES, FP8, INT4, LAYERS, slot_tensors, wrong

Tensors = dict[LayerRef, dict[str, SlotTensor]]


def model() -> Tensors:
    return {layer: settled(slot_tensors(layer, (3, 0, 5))) for layer in LAYERS}


@pytest.mark.parametrize("layer", LAYERS)
def test_an_expert_of_any_type_moves_between_slots_bit_for_bit_and_no_other_slot_changes_vllm_ascend_11120(
    layer: LayerRef,
) -> None:
    source, target = model()[layer], settled(slot_tensors(layer, (7, 8, 9)))
    layout = ExpertLayout.of(layer, source)
    assert layout.expert_bytes == EXPERT_BYTES[layer]
    region = torch.full((layout.num_bytes,), 0xAA, dtype=torch.uint8)
    layout.pack(source, 2, region)
    layout.unpack(region, target, 1)
    assert [wrong(layer, target, slot, expert) for slot, expert in enumerate((7, 5, 9))] == [[], [], []]


def test_a_broadcast_axis_is_stored_once_and_values_that_are_no_numbers_stay_what_they_are() -> None:
    scales = model()[FP8]["weight_scale_inv"].data
    assert scales.shape == (3, 4, 3)
    assert stored(scales).shape == (3, 4, 1)
    nan = torch.tensor([[0x7F, 0xFF]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    layout = ExpertLayout.of(FP8, {"w": SlotTensor(nan)})
    region = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.pack({"w": SlotTensor(nan)}, 0, region)
    assert region[:2].tolist() == [0x7F, 0xFF]


def test_one_tensor_for_all_slots_belongs_to_no_expert_and_must_be_equal_on_all_ranks() -> None:
    made = model()
    assert made[FP8]["input_scale"].kind is TensorKind.SHARED
    assert "input_scale" not in {packed.name for packed in ExpertLayout.of(FP8, made[FP8]).tensors}
    assert list(shared_facts(made)) == [f"shared tensor input_scale of layer {FP8}"]


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(1, 4).expand(3, 4),  # not settled: as an engine might declare it
        torch.zeros(12).as_strided((3, 4), (2, 1)),  # each slot overlaps the next
        torch.zeros(12).as_strided((3, 2, 2), (4, 1, 1)),  # within a slot
    ],
)
def test_a_tensor_whose_slots_share_memory_is_not_moved(data: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match="share memory"):
        ExpertLayout.of(BF16, {"w": SlotTensor(data)})


# ── ranks that differ ────────────────────────────────────────────────────────────────────────────────────────────────────


def compared(here: Tensors, there: Tensors) -> list[str]:
    """What two ranks say of one another, each in a thread of its own."""
    store, said = local_store(), dict[int, str]()

    def run(position: int, tensors: Tensors) -> None:
        digests, manifests = manifest_facts(tensors)
        try:
            compare(store, describe(position, 2, 1), {**digests, **shared_facts(tensors)}, 10, parts=manifests)
        except ConflictError as error:
            said[position] = str(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((here, there))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [said[position] for position in sorted(said)]


def test_ranks_of_a_mixed_model_with_the_same_tensors_in_other_slots_and_strides_agree() -> None:
    other = {layer: settled(slot_tensors(layer, (1, 2, 4))) for layer in LAYERS}
    weight = other[BF16]["weight"]
    other[BF16]["weight"] = replace(weight, data=weight.data.contiguous())
    assert compared(model(), other) == []


def _without_scales(made: Tensors) -> None:
    del made[INT4]["scales"]


def _swizzled(made: Tensors) -> None:
    made[BF16]["weight"] = replace(made[BF16]["weight"], layout="swizzled")


def _not_quantised(made: Tensors) -> None:
    made[FP8]["weight"] = replace(made[FP8]["weight"], data=made[FP8]["weight"].data.to(torch.bfloat16))


def _no_broadcast(made: Tensors) -> None:
    made[FP8]["weight_scale_inv"] = SlotTensor(made[FP8]["weight_scale_inv"].data.contiguous())


def _one_for_each_slot(made: Tensors) -> None:
    made[FP8]["input_scale"] = SlotTensor(torch.full((3,), 0.25))


def _another_scale(made: Tensors) -> None:
    made[FP8]["input_scale"] = replace(made[FP8]["input_scale"], data=torch.tensor(0.5))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without_scales, f"tensors of layer {INT4}: scales is float16 [6] expert linear here, missing there"),
        (_swizzled, f"tensors of layer {BF16}: weight is bfloat16 [8, 6] expert linear here, bfloat16 [8, 6] expert swizzled"),
        (
            _not_quantised,
            f"tensors of layer {FP8}: weight is float8_e4m3fn [16, 8] expert linear here, bfloat16 [16, 8] ",
        ),
        (_no_broadcast, f"tensors of layer {FP8}: weight_scale_inv is float32 [4, 1x3] expert linear here, float32 [4, 3] "),
        (_one_for_each_slot, f"tensors of layer {FP8}: input_scale is float32 [] shared linear here, float32 [] expert linear"),
        (_another_scale, f"shared tensor input_scale of layer {FP8}: 0x"),
    ],
)
def test_ranks_that_differ_in_a_tensor_are_told_in_which_of_which_layer_and_how_sglang_17158_trtllm_14862(
    spoil: Callable[[Tensors], None], words: str
) -> None:
    there = model()
    spoil(there)
    first, second = compared(model(), there)
    assert words in first
    assert first.startswith("rank 10 and rank 20 disagree about ")
    assert second.startswith("rank 20 and rank 10 disagree about ")


def test_a_manifest_says_type_shape_kind_and_layout_of_every_tensor() -> None:
    assert layer_manifest(model()[INT4]) == {
        "bias": "bfloat16 [] expert linear",
        "qweight": "uint8 [6, 5] expert packed_int4",
        "qzeros": "uint8 [6] expert linear",
        "scales": "float16 [6] expert linear",
    }
