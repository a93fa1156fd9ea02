"""The plug-in in a vLLM made for tests: the signatures of 0.18 and of 0.33, and ones that nobody knows."""

from __future__ import annotations

import importlib
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agent.adviser import adviser as adviser_module
from agent.adviser.client import NoAnswerError
from agent.adviser.vllm_plugin import install
from eplb_service.advice import Advice, AdviceRequest, map_digest
from tests.adviser_doubles import advice, linear_map, shuffled_map
from tests.adviser_groups import ThreadGroup, groups_of, on_each, use_threads

L, E, P, R = 3, 8, 12, 4
RETURNS = {"0.18.0": "tuple[torch.Tensor, torch.Tensor, torch.Tensor]", "0.33.0": "torch.Tensor"}
PARAMETERS = "weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices=None"
LOGGER = logging.getLogger("tests.vllm")


def make_vllm(
    folder: Path, release: str, *, parameters: str = PARAMETERS, returns: str = "", group: str = "get_eplb_group"
) -> None:
    """A package tree with what the plug-in looks at. Its own policy answers with the map [[0, 1, 2, …]] shifted by one."""
    policy = f'''
        import torch

        class DefaultEplbPolicy:
            calls = []

            @classmethod
            def rebalance_experts(cls, {parameters}) -> {returns or RETURNS[release]}:
                DefaultEplbPolicy.calls.append((num_replicas, num_ranks))
                rows = (torch.arange(num_replicas) + 1).repeat(weight.shape[0], 1) % weight.shape[1]
                return rows if "{returns or RETURNS[release]}" == "torch.Tensor" else (rows, rows, rows)

        EPLB_POLICIES = {{"default": DefaultEplbPolicy}}
    '''
    files = {
        "vllm/__init__.py": f"__version__ = {release!r}",
        "vllm/config/__init__.py": "current = None\ndef get_current_vllm_config_or_none():\n    return current",
        "vllm/distributed/__init__.py": "",
        "vllm/distributed/parallel_state.py": f"""
            import threading, types
            local = threading.local()
            stage = (0, 1)

            def {group}():
                assert getattr(local, "group", None) is not None
                return types.SimpleNamespace(cpu_group=local.group)

            def get_pp_group():
                return types.SimpleNamespace(rank_in_group=stage[0], world_size=stage[1])
        """,
        "vllm/distributed/eplb/__init__.py": "",
        "vllm/distributed/eplb/policy.py": policy,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


class Engine:
    """The fake vLLM, with the plug-in in it, on as many ranks as threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.questions: list[AdviceRequest] = []
        self.answer: Callable[[AdviceRequest], Advice] = lambda question: advice(question, None)
        monkeypatch.setattr(adviser_module, "shared_store", lambda: None)
        self.policies = importlib.import_module("vllm.distributed.eplb.policy").EPLB_POLICIES
        self.stock = self.policies["default"]
        self.state: Any = importlib.import_module("vllm.distributed.parallel_state")
        self.config: Any = importlib.import_module("vllm.config")
        self.groups = groups_of(R)
        self.ranks: list[Any] = []
        for _ in range(R):  # each rank is a process of its own
            self.policies["default"] = self.stock
            install({"EPLB_ADVISER": "/nowhere"}, LOGGER)
            self.ranks.append(self.policies["default"])
            monkeypatch.setattr(self.ranks[-1].adviser, "_ask_agent", self._ask)

    def _ask(self, path: str, question: AdviceRequest, *, timeout_s: float, release: str) -> Advice:
        self.questions.append(question)
        return self.answer(question)

    def call(
        self,
        load: np.ndarray[Any, Any],
        old: np.ndarray[Any, Any] | None,
        *,
        num_replicas: int = P,
        num_ranks: int = R,
        num_groups: int = 1,
        raw: bool = False,
    ) -> Any:
        """What the policy of each rank returns; of rank 0, when all are the same."""

        def work(group: ThreadGroup) -> Any:
            self.state.local.group = group
            policy = self.ranks[group.rank()]
            given = None if old is None else torch.from_numpy(old).to(torch.int64)
            return policy.rebalance_experts(torch.from_numpy(load), num_replicas, num_groups, 1, num_ranks, given)

        results = on_each(self.groups, work)
        if raw:
            return results[0]
        for result in results:
            assert isinstance(result, torch.Tensor)
            assert result.dtype == torch.int64
            assert torch.equal(result, results[0])
        return results[0].numpy()

    def counts(self, rank: int = 0) -> dict[str, int]:
        return {str(outcome): count for outcome, count in self.ranks[rank].adviser.counts.items()}


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    use_threads(monkeypatch)

    def make(release: str = "0.33.0", **facts: str) -> Engine:
        make_vllm(tmp_path, release, **facts)
        return Engine(monkeypatch)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


NOW = linear_map(L, E, P)
THEN = shuffled_map(1, L, E, P, R)
LOAD = np.random.default_rng(0).integers(1, 100, (L, E)) * 2 + 1


def test_the_planners_map_is_returned_on_every_rank_and_the_question_is_whole(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.answer = lambda question: advice(question, THEN, generation=3)
    assert np.array_equal(engine.call(LOAD, NOW, num_groups=2), THEN)
    (question,) = engine.questions
    assert np.array_equal(question.load, LOAD)
    assert np.array_equal(question.current, NOW)
    assert question.digest == map_digest(NOW)
    assert question.layer_ids == (0, 1, 2)
    assert question.engine == "vllm 0.33.0"
    assert question.dispatch == "hashed"
    assert question.num_groups == 1  # one node: nothing to keep on one
    assert question.deployment == "vllm"
    assert question.sequence == 1
    assert not engine.stock.calls


def test_keeping_returns_the_map_unchanged_and_not_the_engines_own_tensor(build: Callable[..., Engine]) -> None:
    engine = build()
    assert np.array_equal(engine.call(LOAD, THEN), THEN)
    old = torch.from_numpy(THEN).to(torch.int64)
    engine.state.local.group = groups_of(1)[0]
    rows = engine.ranks[0].rebalance_experts(torch.from_numpy(LOAD), P, 1, 1, 1, old)
    assert torch.equal(rows, old)
    rows[0, 0] = 5
    assert int(old[0, 0]) == THEN[0, 0]


def test_three_tensors_up_to_0_18_and_they_fit_one_another(build: Callable[..., Engine]) -> None:
    engine = build("0.18.0")
    engine.answer = lambda question: advice(question, THEN)
    rows, slots, counts = engine.call(LOAD, NOW, raw=True)
    assert np.array_equal(rows.numpy(), THEN)
    assert slots.shape == (L, E, P - E + 1)
    for layer in range(L):
        for expert in range(E):
            held = [slot for slot in range(P) if THEN[layer, slot] == expert]
            assert slots[layer, expert].tolist() == held + [-1] * (P - E + 1 - len(held))
            assert int(counts[layer, expert]) == len(held)


def test_the_group_of_releases_before_0_17_is_the_expert_parallel_one(build: Callable[..., Engine]) -> None:
    engine = build("0.18.0", group="get_ep_group")
    engine.answer = lambda question: advice(question, THEN)
    assert np.array_equal(engine.call(LOAD, NOW, raw=True)[0].numpy(), THEN)


def test_the_profile_at_start_asks_nobody_and_returns_the_map(build: Callable[..., Engine]) -> None:
    engine = build()
    assert np.array_equal(engine.call(np.zeros((L, E), np.int64), NOW), NOW)
    assert engine.questions == []
    assert engine.counts() == {"idle": 1}


@pytest.mark.parametrize("problem", ["away", "invalid", "bug", "negative load"])
def test_any_trouble_returns_the_map_unchanged_counted_and_never_raises(build: Callable[..., Engine], problem: str) -> None:
    engine = build()
    load = LOAD

    def answer(question: AdviceRequest) -> Advice:
        if problem == "away":
            raise NoAnswerError("no agent process")
        if problem == "bug":
            raise KeyError("rows")
        return advice(question, np.zeros_like(NOW))

    engine.answer = answer
    if problem == "negative load":
        load = LOAD.copy()
        load[1, 1] = -5
    assert np.array_equal(engine.call(load, THEN), THEN)
    outcome = {"away": "away", "invalid": "refused", "bug": "failed", "negative load": "failed"}[problem]
    assert all(engine.counts(rank) == {outcome: 1} for rank in range(R))
    assert not engine.stock.calls


def test_a_reason_is_logged_when_it_changes(build: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    engine = build()

    def away(_question: AdviceRequest) -> Advice:
        raise NoAnswerError("no agent process listens at /x")

    with caplog.at_level(logging.INFO, LOGGER.name):
        engine.answer = away
        engine.call(LOAD, NOW)
        first = [record.getMessage() for record in caplog.records if "no agent process listens" in record.getMessage()]
        engine.call(LOAD, NOW)
        again = [record.getMessage() for record in caplog.records if "no agent process listens" in record.getMessage()]
        engine.answer = lambda question: advice(question, THEN, generation=8)
        engine.call(LOAD, NOW)
    assert first == again == ["adviser: away (vllm): no agent process listens at /x (so far: away 1)"]  # rank 0, for all
    moved = [record.getMessage() for record in caplog.records if "moved" in record.getMessage()]
    assert moved == ["adviser: moved to generation 8 (vllm): it pays (so far: moved 1, away 2)"]
    assert all(engine.counts(rank) == {"away": 2, "moved": 1} for rank in range(R))


def test_while_vllm_changes_its_size_its_own_policy_answers(build: Callable[..., Engine]) -> None:
    """No map of ours is one to stay on: new ranks hold nothing yet, leaving ones must give their experts away."""
    engine = build()
    stock = (np.arange(P) + 1) % E
    grown = NOW.astype(np.int64)
    grown[:, -3:] = -1
    cases: list[tuple[np.ndarray[Any, Any] | None, dict[str, Any]]] = [
        (grown, {}),  # scaling up: slots of new ranks are empty
        (linear_map(L, E, 2 * P), {}),  # scaling down: fewer slots are asked for than there are
        (NOW, {"num_ranks": 3}),
        (None, {}),  # a new worker of 0.14 to 0.16
    ]
    for old, facts in cases:
        rows = engine.call(LOAD, old, **facts)
        assert rows.tolist() == [stock.tolist()] * L
    assert engine.questions == []
    assert engine.counts() == {"engine": 4}


def test_without_a_group_vllms_own_policy_answers(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.state.local.group = None
    rows = engine.ranks[0].rebalance_experts(torch.from_numpy(LOAD), P, 1, 1, R, torch.from_numpy(NOW))
    assert rows[0, 0] == 1


def test_a_rank_whose_map_differs_makes_all_keep_their_own(build: Callable[..., Engine]) -> None:
    """sglang#18213: after a move that only some ranks made, nothing is built on it."""
    engine = build()

    def work(group: ThreadGroup) -> Any:
        engine.state.local.group = group
        old = THEN if group.rank() == 2 else NOW
        given = torch.from_numpy(old).to(torch.int64)
        rows = engine.ranks[group.rank()].rebalance_experts(torch.from_numpy(LOAD), P, 1, 1, R, given)
        return np.array_equal(rows.numpy(), old)

    assert on_each(engine.groups, work) == [True] * R
    assert engine.counts() == {"disagreed": 1}
    assert engine.questions == []


def test_tokens_that_every_rank_of_a_stage_counted_are_told_once(build: Callable[..., Engine]) -> None:
    """Under tensor parallelism the load is the tokens times the ranks that saw them."""
    engine = build()
    engine.call(LOAD * 4, NOW)
    engine.call(LOAD * 2, NOW)
    engine.call(LOAD * 3, NOW)
    for question, times in zip(engine.questions, (1, 1, 3), strict=True):
        assert np.array_equal(question.load, LOAD * times)


def in_a_forward(policy: Any, eplb_model_state: Any) -> Any:
    """As `EplbState.rearrange` calls it."""
    return policy.rebalance_experts(torch.from_numpy(LOAD), P, 1, 1, R, eplb_model_state.physical_to_logical_map)


def on_the_worker(policy: Any, model_state: Any) -> Any:
    """As the asynchronous worker's `run_rebalance_experts` does."""
    return policy.rebalance_experts(torch.from_numpy(LOAD), P, 1, 1, R, model_state.physical_to_logical_map)


@pytest.mark.parametrize("called", [in_a_forward, on_the_worker])
def test_bytes_of_an_expert_are_those_that_vllm_would_move(
    build: Callable[..., Engine], called: Callable[[Any, Any], Any]
) -> None:
    engine = build()
    slots = P // R
    weights = [  # 16-bit weights with scales; the last layer is quantised to 8 bits; empty parameters are no weights
        [torch.zeros(slots, 40 * (layer + 1), dtype=torch.bfloat16), torch.zeros(slots, 2), torch.zeros(0)]
        for layer in range(L)
    ]
    weights[-1][0] = weights[-1][0].to(torch.int8)
    state = SimpleNamespace(physical_to_logical_map=torch.from_numpy(NOW).to(torch.int64), model=SimpleNamespace())

    def work(group: ThreadGroup) -> Any:
        engine.state.local.group = group
        return called(engine.ranks[group.rank()], state)

    odd = [*weights[:-1], [*weights[-1], torch.zeros(slots + 1, 5)]]
    for held in (weights, odd, weights[:-1], "another release", None):
        state.model.expert_weights = held
        on_each(engine.groups, work)
    told, *unknown = [question.expert_bytes for question in engine.questions]
    assert told == (40 * 2 + 8, 80 * 2 + 8, 120 + 8)
    assert unknown == [()] * 4


def test_models_of_one_engine_are_told_apart_by_their_layers(build: Callable[..., Engine]) -> None:
    engine = build()
    drafter = linear_map(1, E, P)
    for _ in range(2):
        engine.call(LOAD, NOW)
        engine.call(LOAD[:1], drafter)
    assert [question.deployment for question in engine.questions] == ["vllm", "vllm.1-layers"] * 2


def test_an_engine_that_did_not_go_where_it_was_told_says_so_in_its_next_question(build: Callable[..., Engine]) -> None:
    """vllm-ascend#4417: a rebalance that is acknowledged and changes nothing. The map in the question is the one routed by."""
    engine = build()
    engine.answer = lambda question: advice(question, THEN, generation=2)
    engine.call(LOAD, NOW)
    engine.call(LOAD, NOW)
    engine.call(LOAD, THEN)
    assert [question.digest for question in engine.questions] == [map_digest(NOW), map_digest(NOW), map_digest(THEN)]
    assert [question.sequence for question in engine.questions] == [1, 2, 3]
    assert len({question.origin for question in engine.questions}) == 1


def vllm_config(model: str, *, drafter: bool) -> Any:
    def space(**values: Any) -> Any:
        return type("Space", (), values)()

    return space(
        model_config=space(model=model),
        speculative_config=object() if drafter else None,
        parallel_config=space(eplb_config=space(window_size=1000, step_interval=3000)),
    )


def test_models_of_one_shape_are_told_apart_by_their_maps(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.config.current = vllm_config("org/Model", drafter=True)
    other = shuffled_map(9, L, E, P, R)
    engine.answer = lambda question: advice(question, THEN if np.array_equal(question.current, NOW) else None)
    engine.call(LOAD, NOW)  # moves
    engine.call(LOAD, other)
    engine.call(LOAD, THEN)
    engine.call(LOAD, other)
    names = [question.deployment for question in engine.questions]
    assert names == ["Model.3-layers", "Model.3-layers.model2"] * 2


def test_a_map_that_changed_without_us_makes_no_second_model_where_there_is_no_drafter(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.config.current = vllm_config("org/Model", drafter=False)
    engine.call(LOAD, NOW)
    engine.config.current = None  # known from the profile at start, and not at all later
    engine.call(LOAD, THEN)
    assert [question.deployment for question in engine.questions] == ["Model", "Model"]
    assert [question.steps for question in engine.questions] == [1000, 1000]
    assert engine.questions[0].model == "org/Model"


def test_a_pipelines_stages_are_deployments_of_their_own(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.state.stage = (1, 2)
    engine.call(LOAD, NOW)
    assert engine.questions[0].deployment == "vllm.stage1"


def test_a_configuration_that_is_not_as_we_know_it_costs_its_facts_alone(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.config.current = object()
    engine.answer = lambda question: advice(question, THEN)
    assert np.array_equal(engine.call(LOAD, NOW), THEN)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"parameters": "weight, num_replicas, num_groups, num_nodes, num_ranks, health=None"},
            r"takes \(weight, .*, health\); this release of eplb-service knows",
        ),
        ({"returns": "list[torch.Tensor]"}, r"returns list\[torch.Tensor\]; known are Tensor, tuple"),
        ({"group": "get_other_group"}, "has no get_ep_group"),
    ],
)
def test_unknown_signatures_are_said_aloud_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, facts: dict[str, str], said: str
) -> None:
    make_vllm(tmp_path, "0.33.0", **facts)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        policies = importlib.import_module("vllm.distributed.eplb.policy").EPLB_POLICIES
        before = dict(policies)
        install({"EPLB_ADVISER": "/nowhere"}, LOGGER)
        assert policies == before
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert record.getMessage().startswith("adviser: NOT installed, vLLM keeps its own policy: ")
        import re

        assert re.search(said, record.getMessage())
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]


def test_installing_twice_is_installing_once(build: Callable[..., Engine]) -> None:
    engine = build()
    advised = engine.policies["default"]
    install({"EPLB_ADVISER": "/nowhere"}, LOGGER)
    assert engine.policies["default"] is advised
    assert issubclass(advised, engine.stock)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"EPLB_ADVISER_TIMEOUT_S": "soon"}, "EPLB_ADVISER_TIMEOUT_S='soon' is not a number"),
        ({"EPLB_ADVISER_TIMEOUT_S": "600"}, "must be above 0 and at most 60 seconds"),
        ({"EPLB_ADVISER_TIMEOUT_S": "nan"}, "must be above 0 and at most 60 seconds"),
        ({"EPLB_DEPLOYMENT": "a b"}, "EPLB_DEPLOYMENT='a b' is no name of a deployment"),
    ],
)
def test_a_setting_that_cannot_be_is_said_aloud_and_changes_nothing(
    build: Callable[..., Engine], caplog: pytest.LogCaptureFixture, variables: dict[str, str], said: str
) -> None:
    engine = build()
    engine.policies["default"] = engine.stock
    install({"EPLB_ADVISER": "/nowhere", **variables}, LOGGER)
    assert engine.policies["default"] is engine.stock
    assert any(said in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
