"""Questions and answers on the wire: there and back unchanged; whatever no engine can ask is refused, naming the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.advice import Advice, AdviceRequest, map_digest
from eplb_service.config import load_config
from eplb_service.errors import InvalidInputError
from eplb_service.ids import DeploymentId, GenerationNumber
from eplb_service.pb.v1 import adviser_pb2, common_pb2
from eplb_service.policy.magnitudes import EXPERT_BYTES_MAX
from eplb_service.rpc.arrays import array_to_pb
from eplb_service.rpc.convert_advice import (
    LOAD_MAX,
    advice_from_pb,
    advice_request_from_pb,
    advice_request_to_pb,
    advice_to_pb,
)

CURRENT = np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, -1]], np.int32)
QUESTION = AdviceRequest(
    deployment=DeploymentId("vllm-chat"),
    engine="vllm 0.33.0",
    origin=9,
    sequence=3,
    model="tiny",
    layer_ids=(3, 7),
    rank_ids=(4, 5),
    nodes=("a", "b"),
    num_logical=4,
    dispatch="hashed",
    num_groups=2,
    load=np.arange(8, dtype=np.float64).reshape(2, 4),
    current=CURRENT,
    digest=map_digest(CURRENT),
    expert_bytes=(10, 20),
    steps=100,
    step_time_s=0.01,
    timeout_s=5.0,
    copied_generation=GenerationNumber(7),
    copied_s=1.25,
    copy_held_steps=True,
)


def equal(first: Any, second: Any) -> bool:
    """Field by field, arrays by content and dtype."""
    for part in dataclasses.fields(first):
        mine, theirs = getattr(first, part.name), getattr(second, part.name)
        if isinstance(mine, np.ndarray):
            if mine.dtype != theirs.dtype or not np.array_equal(mine, theirs):
                return False
        elif mine != theirs:
            return False
    return True


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, (1 << 63) - 1), st.randoms(use_true_random=False)
)
def test_questions_and_answers_come_back_as_they_went(layers: int, ranks: int, slots: int, origin: int, random: Any) -> None:
    experts = random.randint(1, ranks * slots)
    current = np.array([[random.randrange(-1, experts) for _ in range(ranks * slots)] for _ in range(layers)], np.int32)
    load = np.array([[float(random.randint(0, LOAD_MAX)) for _ in range(experts)] for _ in range(layers)])
    question = dataclasses.replace(
        QUESTION,
        origin=origin,
        layer_ids=tuple(range(layers)),
        rank_ids=tuple(range(ranks)),
        nodes=("n",) * ranks,
        num_logical=experts,
        num_groups=random.randint(1, experts),
        load=load,
        current=current,
        digest=map_digest(current),
        expert_bytes=() if random.random() < 0.5 else tuple(range(layers)),
    )
    wire = adviser_pb2.AdviseRequest.FromString(advice_request_to_pb(question).SerializeToString())
    assert equal(advice_request_from_pb(wire), question)
    for rows in (None, np.ascontiguousarray(current[:, ::-1])):
        answer = Advice(
            origin=origin,
            sequence=3,
            move=rows is not None,
            generation=GenerationNumber(origin),
            digest=map_digest(current if rows is None else rows),
            reason="move: é\n",
            rows=rows,
        )
        back = advice_from_pb(adviser_pb2.AdviseReply.FromString(advice_to_pb(answer).SerializeToString()), question)
        assert equal(back, answer)


def set_to(name: str, value: Any) -> Callable[[adviser_pb2.AdviseRequest], None]:
    def change(message: adviser_pb2.AdviseRequest) -> None:
        part = getattr(message, name)
        if hasattr(part, "CopyFrom"):
            part.CopyFrom(value)
        elif hasattr(part, "extend"):
            del part[:]
            part.extend(value)
        else:
            setattr(message, name, value)

    return change


def load_of(value: float) -> common_pb2.Array:
    load = np.ones((2, 4))
    load[1, 2] = value
    return array_to_pb(load, "load")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_to("deployment", "a b"), "deployment: 'a b'"),
        (set_to("engine", ""), "engine: ''"),
        (set_to("engine", "x\n"), "engine: "),
        (set_to("origin", 0), "origin: 0 is out of range"),
        (set_to("origin", 1 << 63), "origin: "),
        (set_to("sequence", 0), "sequence: 0 is out of range"),
        (set_to("layer_ids", []), "layer_ids: model 'tiny' comes with 0 MoE layers: nothing to balance"),  # vllm#40740
        (set_to("layer_ids", range(5000)), "layer_ids: 5000 is out of range"),
        (set_to("layer_ids", [7, 3]), "layer_ids: 3 comes after 7"),
        (set_to("rank_ids", []), "rank_ids: 0 is out of range"),
        (set_to("rank_ids", [4, 4]), "must be unique"),
        (set_to("rank_ids", [4, 70_000]), "rank_ids: 70000"),
        (set_to("nodes", ["a"]), "nodes: 1 names for 2 ranks"),
        (set_to("nodes", ["a", ""]), "nodes: ''"),
        (set_to("num_logical", 0), "num_logical: 0 is out of range"),
        (set_to("num_logical", 7), "6 slots for 7 experts on 2 ranks"),
        (set_to("num_logical", 7), "use at least 4 slots per rank (8 slots, 1 redundant experts)"),  # vllm#52435
        (set_to("num_logical", 3), "current: experts -1 to 3; expected -1 (empty) to 2"),
        (set_to("dispatch", "weighted"), "dispatch: 'weighted'; advised engines pick by even, hashed, nearest"),
        (set_to("dispatch", "x" * 100_000), "dispatch: 'xxx"),
        (set_to("num_groups", 0), "num_groups: 0"),
        (set_to("num_groups", 5), "num_groups: 5 is out of range; expected 1 to 4"),
        (set_to("expert_bytes", [1]), "expert_bytes: 1 sizes for 2 layers"),
        (set_to("expert_bytes", [1, EXPERT_BYTES_MAX + 1]), f"expected 0 to {EXPERT_BYTES_MAX}"),
        (set_to("steps", 1 << 40), "steps: "),
        (set_to("step_time_s", float("nan")), "step_time_s: nan"),
        (set_to("step_time_s", -1.0), "step_time_s: -1.0"),
        (set_to("timeout_s", 0.0), "timeout_s: 0.0"),
        (set_to("timeout_s", 601.0), "timeout_s: 601.0 s; expected at most 600 s"),
        (set_to("timeout_s", float("inf")), "timeout_s: inf"),
        (set_to("digest", 1), "digest: 0x1, but the map that came with it has"),
        (set_to("load", common_pb2.Array()), "load: dtype ''"),
        (set_to("load", array_to_pb(np.ones((2, 4), np.float32), "load")), "load: float32; expected float64"),
        (set_to("load", array_to_pb(np.ones((2, 5)), "load")), "load: shape (2, 5); expected (2, 4)"),
        (set_to("load", load_of(-1.0)), "load: -1.0 token assignments of layer 7 to expert 2"),
        (set_to("load", load_of(float("nan"))), "load: nan"),
        (set_to("load", load_of(float("inf"))), "load: inf"),
        (set_to("load", load_of(0.5)), "load: 0.5"),
        (set_to("load", load_of(2.0 * LOAD_MAX)), "expected a whole number from 0 to"),
        (set_to("current", common_pb2.Array()), "current: dtype ''"),
        (set_to("current", common_pb2.Array(shape=[2, 0], dtype="i4")), "current: int32 of 0 slots"),
        (set_to("current", common_pb2.Array(shape=[2, 1 << 31], dtype="i4")), "too large"),
        (set_to("current", array_to_pb(CURRENT.astype(np.int64), "current")), "current: int64"),
        (set_to("current", array_to_pb(CURRENT[:, :5], "current")), "current: int32 of 5 slots"),
        (set_to("current", array_to_pb(CURRENT[:1], "current")), "current: shape (1, 6)"),
        (set_to("current", array_to_pb(CURRENT - 1, "current")), "current: experts -2 to 2"),
    ],
)
def test_what_no_engine_can_ask_is_refused(change: Callable[[adviser_pb2.AdviseRequest], None], words: str) -> None:
    message = advice_request_to_pb(QUESTION)
    change(message)
    with pytest.raises(InvalidInputError) as caught:
        advice_request_from_pb(message)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


def answer_pb(**more: Any) -> adviser_pb2.AdviseReply:
    rows = np.ascontiguousarray(CURRENT[:, ::-1])
    reply = adviser_pb2.AdviseReply(
        origin=9, sequence=3, move=True, generation=1, digest=map_digest(rows), rows=array_to_pb(rows, "rows")
    )
    for name, value in more.items():
        if value is None:
            reply.ClearField(name)
        elif name == "rows":
            reply.rows.CopyFrom(value)
        else:
            setattr(reply, name, value)
    return reply


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (answer_pb(sequence=4), "the answer is to question (9, 4), asked was (9, 3)"),
        (answer_pb(origin=8), "the answer is to question (8, 3)"),
        (answer_pb(move=False), "the answer says keep"),
        (answer_pb(rows=None), "the answer says move"),
        (answer_pb(digest=5), "digest: 0x5"),
        (answer_pb(rows=array_to_pb(CURRENT[:, :4], "rows")), "rows: shape (2, 4); expected (2, 6)"),
        (answer_pb(rows=array_to_pb(CURRENT.astype(np.int64), "rows")), "rows: int64"),
        (answer_pb(generation=1 << 63), "generation: "),
    ],
)
def test_what_is_no_answer_to_the_question_is_refused(reply: adviser_pb2.AdviseReply, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        advice_from_pb(reply, QUESTION)
    assert words in str(caught.value)


def test_experts_of_a_size_that_cannot_be_planned_for_are_refused_where_they_are_told() -> None:
    """Refused by each plan instead, they would cost the engine every one."""
    told = dataclasses.replace(QUESTION, expert_bytes=(1, EXPERT_BYTES_MAX))
    assert advice_request_from_pb(advice_request_to_pb(told)).expert_bytes == told.expert_bytes
    with pytest.raises(InvalidInputError, match=f"expert_bytes: .* expected 0 to {EXPERT_BYTES_MAX}"):
        advice_request_to_pb(dataclasses.replace(QUESTION, expert_bytes=(1, EXPERT_BYTES_MAX + 1)))
    with pytest.raises(InvalidInputError, match=f"planning.expert_bytes.* at most {EXPERT_BYTES_MAX}"):
        load_config(flags={"planning.expert_bytes": str(EXPERT_BYTES_MAX + 1)})


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused_and_never_break(data: bytes) -> None:
    try:
        message = adviser_pb2.AdviseRequest.FromString(advice_request_to_pb(QUESTION).SerializeToString() + data)
    except Exception:  # noqa: BLE001  (protobuf's own refusal)
        return
    try:
        found = advice_request_from_pb(message)
    except InvalidInputError:
        return
    assert map_digest(found.current) == found.digest
