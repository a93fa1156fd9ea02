"""What the adviser is told, what it tells apart, and what it is called."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.adviser.call import Call, each_token_once
from agent.adviser.config import SWITCH, TIMEOUT_S_MAX, VARIABLES, AdviserConfig, deployment_name
from agent.adviser.models import Models
from agent.adviser.signatures import attribute, check_parameters, returned
from eplb_service.errors import InvalidInputError, UnsupportedError
from tests.adviser_doubles import linear_map


@given(
    tokens=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=12),
    num_ranks=st.integers(1, 64),
    data=st.data(),
)
def test_tokens_that_a_divisor_of_the_ranks_counted_alike_are_counted_once(
    tokens: list[int], num_ranks: int, data: st.DataObject
) -> None:
    """sglang and vLLM add up the counts of ranks that saw the same tokens; how many did so, a release does not say."""
    tokens = [*tokens, 1]  # with hundreds of counts, some are no multiple of anything
    times = data.draw(st.sampled_from([d for d in range(1, num_ranks + 1) if num_ranks % d == 0]))
    load = np.array([tokens], dtype=np.float64) * times
    assert np.array_equal(each_token_once(load, num_ranks), np.array([tokens], dtype=np.float64))


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=6), st.integers(1, 16))
def test_loads_only_ever_shrink_by_a_divisor_of_the_ranks(values: list[float], num_ranks: int) -> None:
    load = np.array([values])
    once = each_token_once(load, num_ranks)
    if load.any():
        times = load.sum() / once.sum()
        assert math.isclose(times, round(times), rel_tol=1e-9)
        assert num_ranks % round(times) == 0


def call(current: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Call:
    return Call(
        load=np.ones((len(current), 4)), current=current, num_ranks=2, num_groups=1, layer_ids=tuple(range(len(current))),
        deployment="d", model="m", engine="e", dispatch="even", replicas_max=8,
    )  # fmt: skip


def test_a_map_with_slots_that_hold_no_expert_is_one_of_an_engine_that_changes_its_size() -> None:
    """vllm-ascend#5311: ids of a map are those of experts that exist."""
    assert call(linear_map(2, 4, 6)).resizing == ""
    for expert in (-1, 4):
        rows = linear_map(2, 4, 6)
        rows[1, 5] = expert
        assert "it changes its size" in call(rows).resizing


def test_any_size_that_divides_by_the_ranks_can_be_asked_about() -> None:
    """vllm#18343, TRT-LLM#15410: nothing asks for experts that divide by slots or ranks."""
    assert call(linear_map(1, 4, 10)).num_logical == 4


def test_one_variable_switches_it_on_and_the_rest_has_defaults() -> None:
    config = AdviserConfig.from_environment({SWITCH: "/run/eplb/agent.sock"})
    assert (config.socket_path, config.deployment, config.timeout_s) == ("/run/eplb/agent.sock", None, 5.0)
    full = AdviserConfig.from_environment({SWITCH: "s", "EPLB_DEPLOYMENT": "chat", "EPLB_ADVISER_TIMEOUT_S": "2.5"})
    assert (full.deployment, full.timeout_s) == ("chat", 2.5)
    assert VARIABLES == (SWITCH, "EPLB_DEPLOYMENT", "EPLB_ADVISER_TIMEOUT_S")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "EPLB_ADVISER is empty; set it to the Unix socket"),
        ({SWITCH: "s", "EPLB_ADVISER_TIMEOUT_S": "0"}, "=0 must be above 0 and at most 60 seconds"),
        ({SWITCH: "s", "EPLB_ADVISER_TIMEOUT_S": "inf"}, "=inf must be above 0"),
        ({SWITCH: "s", "EPLB_ADVISER_TIMEOUT_S": "x"}, "EPLB_ADVISER_TIMEOUT_S='x' is not a number"),
        ({SWITCH: "s", "EPLB_DEPLOYMENT": "a/b"}, "EPLB_DEPLOYMENT='a/b' is no name of a deployment"),
        ({SWITCH: "s", "EPLB_DEPLOYMENT": "x" * 97}, "use 1 to 96 letters"),
    ],
)
def test_settings_that_cannot_be_are_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        AdviserConfig.from_environment(variables)
    assert said in str(caught.value)


@given(st.text(max_size=300), st.lists(st.sampled_from(["stage1", "58-layers", "model2"]), max_size=3))
def test_every_model_has_a_name_that_a_deployment_can_have(model: str, parts: list[str]) -> None:
    name = deployment_name(AdviserConfig(socket_path="s"), model, *parts)
    assert 1 <= len(name) <= 128
    assert all(c.isascii() and (c.isalnum() or c in "._-") for c in name)


def test_models_of_one_shape_keep_their_places_whoever_moves() -> None:
    models = Models(most=2)
    shape = (3, 12)
    assert models.of(shape, 1) == 0
    models.left_at(shape, 0, 5)
    assert models.of(shape, 1) == 1  # the first should be at 5 by now
    for _ in range(3):
        assert models.of(shape, 5) == 0
        assert models.of(shape, 1) == 1
    assert models.of(shape, 9) == 0  # changed without us: the one that has not called for longest


def test_with_one_model_a_map_that_changed_without_us_is_still_its() -> None:
    models = Models(most=1)
    assert [models.of((3, 12), digest) for digest in (1, 2, 3)] == [0, 0, 0]


def test_signatures_are_compared_by_name_and_by_what_is_returned() -> None:
    class Known:
        @classmethod
        def plan(cls, weight: int, old: int | None = None) -> tuple[int, int]:
            raise NotImplementedError

    check_parameters(Known.plan, "Known.plan", ("weight", "old"))
    with pytest.raises(UnsupportedError, match=r"Known.plan takes \(weight, old\); .* knows \(weight, old, health\)"):
        check_parameters(Known.plan, "Known.plan", ("weight", "old", "health"))
    assert returned(Known.plan) == "tuple[int, int]"
    assert returned(lambda: None) == ""
    with pytest.raises(UnsupportedError, match="has no mode"):
        attribute(math, "mode")


def test_the_page_has_each_variable_and_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "adviser.md").read_text()
    rows = dict(re.findall(r"^\| `(EPLB_\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    assert list(rows) == list(VARIABLES)
    assert float(rows["EPLB_ADVISER_TIMEOUT_S"]) == AdviserConfig(socket_path="s").timeout_s
    assert f"at most {TIMEOUT_S_MAX:g}" in page
