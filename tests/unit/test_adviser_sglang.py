"""The plug-in in an SGLang made for tests: what its hook is given, and when SGLang's own algorithm has to answer."""

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
from agent.adviser.adviser import Adviser
from agent.adviser.client import NoAnswerError
from agent.adviser.config import AdviserConfig
from agent.adviser.sglang_plugin import MODULE, SglangEngine, install
from eplb_service.advice import Advice, AdviceRequest
from tests.adviser_doubles import advice, linear_map, shuffled_map
from tests.adviser_groups import ThreadGroup, groups_of, on_each, use_threads

L, E, P, R = 4, 8, 12, 4
MOE = [1, 2, 3]
LOGGER = logging.getLogger("tests.sglang")
PARAMETERS = "tokens_per_expert, num_physical_experts, num_local_physical_experts, num_groups, num_nodes, algorithm"


def make_sglang(folder: Path, *, parameters: str = PARAMETERS) -> None:
    files = {
        "sglang/__init__.py": "__version__ = '0.5.23'",
        "sglang/srt/__init__.py": "",
        "sglang/srt/eplb/__init__.py": "",
        "sglang/srt/eplb/eplb_algorithms.py": f"def rebalance_experts({parameters}):\n    return 'its own'",
        "sglang/srt/eplb/expert_location.py": """
            metadata = None
            def get_global_expert_location_metadata():
                return metadata
        """,
        "sglang/srt/elastic_ep/__init__.py": "",
        "sglang/srt/elastic_ep/elastic_ep.py": """
            class ElasticEPStateManager:
                state = None
                @classmethod
                def instance(cls):
                    return cls.state
        """,
        "sglang/srt/distributed/__init__.py": "",
        "sglang/srt/distributed/parallel_state.py": """
            import threading, types
            local = threading.local()
            num_stages = 1
            def get_tp_group():
                return types.SimpleNamespace(cpu_group=local.group)
            def get_pp_group():
                return types.SimpleNamespace(rank_in_group=1, world_size=num_stages)
        """,
        "sglang/srt/runtime_context.py": """
            import types
            how = "static"
            def get_model():
                return types.SimpleNamespace(model_path="org/Model")
            def get_exec():
                return types.SimpleNamespace(moe=types.SimpleNamespace(ep_dispatch_algorithm=how))
        """,
        "sglang/srt/plugins/__init__.py": "",
        "sglang/srt/plugins/hook_registry.py": """
            class HookType:
                AROUND = "around"
            class HookRegistry:
                hooks = []
                @classmethod
                def register(cls, target, hook, hook_type="after", *, source=None):
                    cls.hooks.append((target, hook, hook_type))
        """,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


class Engine:
    """The fake SGLang with our hook on as many ranks as threads."""

    def __init__(self, *, runtime_context: bool = True) -> None:
        self.questions: list[AdviceRequest] = []
        self.answer: Callable[[AdviceRequest], Advice] = lambda question: advice(question, None)
        self.groups = groups_of(R)
        self.location: Any = importlib.import_module("sglang.srt.eplb.expert_location")
        self.state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
        self.context: Any = importlib.import_module("sglang.srt.runtime_context") if runtime_context else None
        self.elastic: Any = importlib.import_module("sglang.srt.elastic_ep.elastic_ep").ElasticEPStateManager
        self.original = importlib.import_module(MODULE).rebalance_experts
        config = AdviserConfig(socket_path="/nowhere")
        self.ranks = [SglangEngine(adviser=Adviser(config, LOGGER, ask=self._ask), logger=LOGGER) for _ in range(R)]
        self.route_by(linear_map(L, E, P))

    def _ask(self, path: str, question: AdviceRequest, *, timeout_s: float, release: str) -> Advice:
        self.questions.append(question)
        return self.answer(question)

    def route_by(self, rows: np.ndarray[Any, Any]) -> None:
        self.location.metadata = SimpleNamespace(physical_to_logical_map_cpu=torch.from_numpy(rows).to(torch.int64))

    def call(self, tokens: np.ndarray[Any, Any], *, slots_of_rank: int = P // R, num_groups: int | None = None) -> list[Any]:
        def work(group: ThreadGroup) -> Any:
            self.state.local.group = group
            return self.ranks[group.rank()].around(
                self.original,
                tokens_per_expert=torch.from_numpy(tokens),
                num_physical_experts=P,
                num_local_physical_experts=slots_of_rank,
                num_groups=num_groups,
                num_nodes=1,
                algorithm="deepseek",
            )

        return on_each(self.groups, work)


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    use_threads(monkeypatch)
    monkeypatch.setattr(adviser_module, "shared_store", lambda: None)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_sglang(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


def loads() -> np.ndarray[Any, Any]:
    tokens = np.random.default_rng(0).integers(1, 100, (5, L, E)) * 2 + 1
    tokens[:, 0] = 0
    tokens[3:] = 0
    return tokens


THEN = shuffled_map(1, len(MOE), E, P, R)


def test_the_planners_map_comes_with_its_tables_and_dense_layers_stay(sglang: Path) -> None:
    """sglang#25961, TRT-LLM#13974: rows are layers, and not all of them have experts."""
    engine = Engine()
    engine.answer = lambda question: advice(question, THEN)
    for rows, slots, counts in engine.call(loads()):
        assert np.array_equal(rows[0].numpy(), linear_map(1, E, P)[0])
        assert np.array_equal(rows[1:].numpy(), THEN)
        for layer in range(L):
            for expert in range(E):
                held = [slot for slot in range(P) if rows[layer, slot] == expert]
                assert [slot for slot in slots[layer, expert].tolist() if slot >= 0] == held
                assert int(counts[layer, expert]) == len(held)
    (question,) = engine.questions
    assert question.layer_ids == (1, 2, 3)
    assert np.array_equal(question.load, loads().sum(axis=0)[1:])
    assert question.steps == 3
    assert question.dispatch == "nearest"
    assert question.deployment == "Model"


class EPLBManager:
    """SGLang's, as far as callers of the algorithm are concerned; before 0.5.17 it had the model's runner instead."""

    def __init__(self, model: Any, *, has_runner: bool) -> None:
        if has_runner:
            self._model_runner = SimpleNamespace(model=model)
        else:
            self._get_model = lambda: model

    def rebalance(self, call: Callable[[], Any]) -> Any:
        return call()


@pytest.mark.parametrize("has_runner", [False, True])
def test_bytes_of_an_expert_are_those_that_sglang_would_move(sglang: Path, has_runner: bool) -> None:
    engine = Engine()
    slots = P // R
    weights = {layer: [torch.zeros(slots, 10 * layer), torch.zeros(slots, 1, dtype=torch.uint8)] for layer in MOE}
    model = SimpleNamespace(routed_experts_weights_of_layer=weights)
    manager = EPLBManager(model, has_runner=has_runner)
    arguments = {
        "tokens_per_expert": torch.from_numpy(loads()),
        "num_physical_experts": P,
        "num_local_physical_experts": slots,
        "num_groups": None,
        "num_nodes": 1,
        "algorithm": "deepseek",
    }

    def work(group: ThreadGroup) -> Any:
        engine.state.local.group = group
        return manager.rebalance(lambda: engine.ranks[group.rank()].around(engine.original, **arguments))

    on_each(engine.groups, work)
    weights[3] = [torch.zeros(slots, 4), torch.zeros(slots + 1, 4)]
    on_each(engine.groups, work)
    del weights[3]
    on_each(engine.groups, work)
    del model.routed_experts_weights_of_layer
    on_each(engine.groups, work)
    engine.call(loads())  # as a file of counts does at start: no manager yet
    told, *unknown = [question.expert_bytes for question in engine.questions]
    assert told == (41, 81, 121)
    assert unknown == [()] * 4


def test_each_question_proves_that_the_hook_is_active_and_the_log_says_it_once(
    sglang: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """sglang#6607: what is documented but does nothing. SGLang itself only logs that a plug-in failed."""
    engine = Engine()
    with caplog.at_level(logging.INFO, LOGGER.name):
        for _ in range(2):
            engine.call(loads())
    assert [question.engine for question in engine.questions] == ["sglang 0.5.23, hook active"] * 2
    said = [record.getMessage() for record in caplog.records if "active: SGLang 0.5.23 called it" in record.getMessage()]
    assert len(said) == R


def test_two_copies_on_a_rank_are_refused_and_the_map_stays(sglang: Path) -> None:
    """EPLB#22: SGLang's loader would fill the first of the two, while other ranks send tokens to the second."""
    engine = Engine()
    twice = THEN.copy()
    twice[0, 1] = twice[0, 0]
    if len(set(twice[0].tolist())) < E:
        twice[0, 2] = THEN[0, 1]
    engine.answer = lambda question: advice(question, twice)
    rows, _, _ = engine.call(loads())[0]
    assert np.array_equal(rows.numpy(), linear_map(L, E, P))
    assert engine.ranks[0].adviser.counts["refused"] == 1  # type: ignore[index]


def test_without_an_answer_the_map_stays(sglang: Path) -> None:
    engine = Engine()
    now = shuffled_map(4, L, E, P, R)
    engine.route_by(now)

    def away(_question: AdviceRequest) -> Advice:
        raise NoAnswerError("no agent process")

    engine.answer = away
    for rows, _, _ in engine.call(loads()):
        assert np.array_equal(rows.numpy(), now)


def test_a_window_without_load_asks_nobody(sglang: Path) -> None:
    engine = Engine()
    rows, _, counts = engine.call(np.zeros((L, E), np.int64))[0]
    assert np.array_equal(rows.numpy(), linear_map(L, E, P))
    assert counts.sum() == L * P
    assert engine.questions == []


def test_sglangs_own_algorithm_answers_where_not_all_ranks_are_in_the_call(sglang: Path) -> None:
    engine = Engine()
    engine.elastic.state = object()
    assert engine.call(loads()) == ["its own"] * R
    engine.elastic.state = None
    engine.location.metadata = None
    assert engine.call(loads()) == ["its own"] * R
    engine.route_by(linear_map(L, E, P))
    assert engine.call(loads(), slots_of_rank=P) == ["its own"] * R
    engine.route_by(linear_map(L, E, P + 4))
    assert engine.call(loads()) == ["its own"] * R
    assert engine.questions == []
    assert engine.ranks[0].adviser.counts["engine"] == 4  # type: ignore[index]


def test_stages_and_dispatch_are_told(sglang: Path) -> None:
    engine = Engine()
    engine.state.num_stages = 2
    engine.context.how = "dynamic"
    engine.call(loads())
    assert engine.questions[0].deployment == "Model.stage1"
    assert engine.questions[0].dispatch == "even"
    del engine.context.get_model, engine.context.get_exec, engine.state.get_pp_group
    engine.call(loads())
    assert engine.questions[1].deployment == "sglang"


def test_releases_before_the_runtime_context_are_asked_for_their_servers_arguments(sglang: Path) -> None:
    (sglang / "sglang/srt/runtime_context.py").unlink()
    (sglang / "sglang/srt/server_args.py").write_text(
        "import types\ndef get_global_server_args():\n"
        "    return types.SimpleNamespace(model_path='org/Older', ep_dispatch_algorithm='static')\n"
    )
    engine = Engine(runtime_context=False)
    engine.call(loads())
    assert engine.questions[0].deployment == "Older"
    assert engine.questions[0].dispatch == "nearest"


def test_the_hook_is_registered_once_around_the_algorithm(sglang: Path) -> None:
    for _ in range(2):
        install({"EPLB_ADVISER": "/nowhere"}, LOGGER)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.hooks
    assert [(target, how) for target, _, how in hooks] == [(f"{MODULE}.rebalance_experts", "around")]


def test_an_unknown_signature_is_said_aloud_and_changes_nothing(sglang: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_sglang(sglang, parameters="tokens_per_expert, num_physical_experts, topology")
    install({"EPLB_ADVISER": "/nowhere"}, LOGGER)
    assert importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.hooks == []
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "NOT installed, SGLang keeps its own algorithm" in record.getMessage()
    assert "(tokens_per_expert, num_physical_experts, topology)" in record.getMessage()
