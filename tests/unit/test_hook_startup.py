"""What a hook finds out about its engine before the first step; what does not fit leaves it observe-only, with the reason."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agent.engine.port import RoutingTables, SlotTensor, TensorKind
from agent.engine.reference.launch import free_port
from agent.hook.config import HookConfig
from agent.hook.hook import Hook
from agent.hook.manifest import manifest_digest
from agent.hook.startup import inspect
from eplb_service.errors import InvalidInputError
from eplb_service.ids import ChunkId, LayerRef
from eplb_service.placement import row_digest
from tests.integration.hook_fleet import LAYERS, NUM_LOGICAL, TinyEngine, describe

ROOM = 1 << 12


def engine(position: int = 0) -> TinyEngine:
    return TinyEngine(describe(position, 3, 1))


def config(**changes: Any) -> HookConfig:
    return HookConfig(**{"socket_path": "/nowhere/agent.sock", "staging_bytes": ROOM, "reconnect_max_s": 0.05, **changes})


def test_a_sound_engine_has_no_problem() -> None:
    facts = inspect(engine(1), config())
    assert facts.problem == ""
    assert facts.position == 1


@pytest.mark.parametrize(
    ("nic", "nics"),
    [
        (None, ["", "", ""]),
        ("rail0", ["rail0", "rail0", "rail0"]),
        ("rail0, rail1", ["rail0", "", "rail1"]),  # node b has one rank and is named two NICs
    ],
)
def test_a_rank_finds_its_nic_by_its_place_on_its_node(
    nic: str | None, nics: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for position in range(3):
        made = engine(position)
        made.description = replace(made.description, nodes=("a", "b", "a"), node="aba"[position])
        found.append(inspect(made, config(nic=nic)).nic)
    assert found == nics
    wrong = "EPLB_NIC names 2 NICs, but node b has 1 ranks of the group"
    assert (wrong in caplog.text) == (nics[1] == "" and nic is not None)


def test_manifests_are_equal_on_all_ranks_and_change_with_name_type_shape_kind_and_layout_sglang_17158() -> None:
    ranks = [engine(position) for position in range(3)]
    digests = {manifest_digest(rank.description.models[0], rank.tensors) for rank in ranks}
    assert len(digests) == 1
    tensors = ranks[0].tensors[LAYERS[0]]
    weight = tensors["weight"]
    changes: list[dict[str, SlotTensor]] = [
        {name: tensor for name, tensor in tensors.items() if name != "scale"},
        {**tensors, "weight": replace(weight, data=weight.data.double())},
        {**tensors, "weight": replace(weight, data=weight.data[:, :4])},
        {**tensors, "weight": replace(weight, kind=TensorKind.DERIVED)},
        {**tensors, "weight": replace(weight, layout="swizzled")},
    ]
    for changed in changes:
        digests.add(manifest_digest(ranks[0].description.models[0], {**ranks[0].tensors, LAYERS[0]: changed}))
    assert len(digests) == 1 + len(changes)


def _drop_scale(made: TinyEngine) -> None:
    del made.tensors[LAYERS[0]]["scale"]


def _other_table(made: TinyEngine) -> None:
    made.tables[LAYERS[1]].physical_to_logical[2] = 5


def _narrow_table(made: TinyEngine) -> None:
    tables = made.tables[LAYERS[1]]
    made.tables[LAYERS[1]] = RoutingTables(tables.physical_to_logical, tables.logical_to_physical[:, :2], tables.replica_counts)


def _int32_table(made: TinyEngine) -> None:
    tables = made.tables[LAYERS[1]]
    made.tables[LAYERS[1]] = RoutingTables(tables.physical_to_logical.int(), tables.logical_to_physical, tables.replica_counts)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_drop_scale, "hold 140 bytes an expert, the engine says 144"),
        (_other_table, "has expert 5 in slot 2, it says that it loaded 2"),
        (_narrow_table, "must be int64 of shape (6, 4)"),
        (_int32_table, "it is torch.int32"),
    ],
)
def test_an_engine_that_is_not_what_it_says_can_move_nothing(spoil: Callable[[TinyEngine], None], words: str) -> None:
    made = engine()
    spoil(made)
    assert words in inspect(made, config()).problem


def weighted(position: int = 0) -> TinyEngine:
    """An engine that dispatches by shares: even ones, 0 beside the replicas."""
    made = engine(position)
    made.description = replace(made.description, dispatch="weighted")
    for layer, tables in made.tables.items():
        held = tables.logical_to_physical >= 0
        made.tables[layer] = replace(tables, replica_shares=held / tables.replica_counts[:, None].float())
    return made


def shares_of(made: TinyEngine, layer: LayerRef) -> torch.Tensor:
    shares = made.tables[layer].replica_shares
    assert shares is not None
    return shares


def test_a_weighted_engine_is_live_with_the_shares_that_its_table_holds() -> None:
    made = weighted()
    facts = inspect(made, config())
    assert facts.problem == ""
    assert facts.shape.weighted
    row = facts.live[LAYERS[0]].row
    counts = [row.count(expert) for expert in row]
    assert facts.live[LAYERS[0]].shares == tuple(1.0 / count for count in counts)
    assert facts.live[LAYERS[0]].digest == row_digest(
        LAYERS[0], np.array(row), np.array(facts.live[LAYERS[0]].shares, np.float32)
    )
    plain = inspect(engine(), config())
    assert plain.live[LAYERS[0]].shares is None
    assert plain.live[LAYERS[0]].digest != facts.live[LAYERS[0]].digest


def test_a_weighted_rank_asks_for_the_protocol_that_brought_shares() -> None:
    made = [weighted(), engine()]
    assert [Hook(port, config()).registration().protocol_min for port in made] == [2, 1]


def _no_shares(made: TinyEngine) -> None:
    made.tables[LAYERS[1]] = replace(made.tables[LAYERS[1]], replica_shares=None)


def _narrow_shares(made: TinyEngine) -> None:
    made.tables[LAYERS[1]] = replace(made.tables[LAYERS[1]], replica_shares=shares_of(made, LAYERS[1])[:, :2])


def _double_shares(made: TinyEngine) -> None:
    made.tables[LAYERS[1]] = replace(made.tables[LAYERS[1]], replica_shares=shares_of(made, LAYERS[1]).double())


def _half_of_an_expert(made: TinyEngine) -> None:
    shares_of(made, LAYERS[1])[4] /= 2


def _share_of_no_replica(made: TinyEngine) -> None:
    shares_of(made, LAYERS[1])[5, 3] = 0.25


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_no_shares, "table replica_shares must be float32 of shape (6, 4); it is missing"),
        (_narrow_shares, "it is torch.float32 of (6, 2)"),
        (_double_shares, "it is torch.float64 of (6, 4)"),
        (_half_of_an_expert, "layer tiny/4: the shares of expert 4 on its 1 slots add up to 0.5; they must add up to 1"),
        (_share_of_no_replica, "gives replica 3 of expert 5 the share 0.25, but it has 1 replicas"),
    ],
)
def test_a_weighted_engine_without_a_sound_table_of_shares_can_move_nothing(
    spoil: Callable[[TinyEngine], None], words: str
) -> None:
    made = weighted()
    spoil(made)
    facts = inspect(made, config())
    assert words in facts.problem
    assert facts.live[LAYERS[1]].shares is not None, "the planner still learns by what it routes, as far as is known"


def test_staging_for_less_than_one_layer_is_observe_only_and_says_what_to_set_vllm_24523() -> None:
    problem = inspect(engine(), config(staging_bytes=287)).problem
    assert "holds less than one layer of this rank (288 bytes): set EPLB_STAGING_BYTES to that at least" in problem
    assert inspect(engine(), config(staging_bytes=288)).problem == ""


def test_an_engine_without_moe_layers_is_refused_by_name_vllm_40740() -> None:
    made = engine()
    made.description = replace(made.description, models=(replace(made.description.models[0], layers=()),))
    with pytest.raises(InvalidInputError, match=r"registers no MoE layers \(models: \['tiny'\]\)"):
        inspect(made, config())


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        yield folder


def test_ranks_that_do_not_come_leave_an_observer_that_steps_and_records_within_the_deadline() -> None:
    made = TinyEngine(describe(0, 3, free_port()))
    hook = Hook(made, config(rendezvous_timeout_s=0.3, window_steps=2, sub_windows=1))
    began = time.monotonic()
    hook.start()
    assert time.monotonic() - began < 5.0
    assert "rank 20 did not come" in hook.status.off_reason
    for _ in range(6):
        hook.begin_step(num_real_tokens=3)
        hook.record(LAYERS[0], torch.zeros(3, 2, dtype=torch.int64))
    assert len(hook._outbox) == 2
    hook.close()


def test_nobody_to_meet_is_said_within_the_deadline_by_a_rank_that_is_not_the_host() -> None:
    made = TinyEngine(describe(1, 3, free_port()))
    hook = Hook(made, config(rendezvous_timeout_s=0.3))
    began = time.monotonic()
    hook.start()
    assert time.monotonic() - began < 5.0
    assert "cannot reach the hooks' rendezvous at 127.0.0.1:" in hook.status.off_reason
    hook.close()


def single(**changes: Any) -> Hook:
    """A group of one rank: it votes alone."""
    description = describe(0, 3, free_port())
    ranks = description.group_rank_ids[:1]
    model = description.models[0]
    layers = tuple(replace(layer, slots=NUM_LOGICAL, num_logical=NUM_LOGICAL) for layer in model.layers)
    initial = {layer.layer_id: tuple(range(2)) for layer in layers}
    layers = tuple(replace(layer, slots=2, num_logical=2) for layer in layers)
    description = replace(
        description, group_rank_ids=ranks, nodes=("n",), models=(replace(model, layers=layers, initial=initial),)
    )
    made = TinyEngine(description)
    for layer in LAYERS:
        made.tables[layer] = RoutingTables(
            torch.arange(2), torch.tensor([[0, -1, -1, -1], [1, -1, -1, -1]]), torch.ones(2, dtype=torch.int64)
        )
    return Hook(made, config(**changes))


def test_a_failure_inside_the_hook_never_reaches_the_step_and_still_casts_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = single(vote_period=1)
    hook.start()
    assert hook.status.off_reason == ""
    voter = hook._voter
    assert voter is not None
    cast: list[tuple[int, int]] = []
    real = voter.cast

    def note(boundary: int, chunk: ChunkId) -> None:
        cast.append((boundary, chunk))
        real(boundary, chunk)

    monkeypatch.setattr(voter, "cast", note)
    hook.begin_step(num_real_tokens=1)
    monkeypatch.setattr(hook._port, "weights_version", lambda: 1 // 0)
    hook.begin_step(num_real_tokens=1)
    monkeypatch.undo()
    assert cast == [(0, 0), (1, 0)]
    assert "ZeroDivisionError" in hook.status.off_reason
    hook.begin_step(num_real_tokens=1)
    hook.close()


def test_a_recorder_that_fails_ends_recording_and_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = single()
    hook.start()
    recorder = hook._observer.recorder
    assert recorder is not None
    monkeypatch.setattr(recorder, "boundary", lambda *_a, **_k: 1 // 0)
    hook.begin_step(num_real_tokens=1)
    hook.begin_step(num_real_tokens=1)
    hook.record(LAYERS[0], torch.zeros(1, 1, dtype=torch.int64))
    assert hook.status.boundary == 2
    hook.close()


def test_counts_of_a_layer_that_was_not_registered_are_refused_sglang_25948() -> None:
    hook = single()
    with pytest.raises(InvalidInputError, match="did not register"):
        hook.record(LayerRef("tiny", 0), torch.zeros(1, 1, dtype=torch.int64))


def test_switched_off_by_the_environment_it_observes_nothing_and_says_so() -> None:
    hook = single(off=True, window_steps=1, sub_windows=1)
    hook.start()
    for _ in range(4):
        hook.begin_step(num_real_tokens=1)
        hook.record(LAYERS[0], torch.zeros(1, 1, dtype=torch.int64))
    assert len(hook._outbox) == 0
    assert "EPLB_OFF" in hook.status.off_reason
    hook.close()


def test_closing_twice_or_without_start_ends_at_once() -> None:
    hook = single()
    hook.close()
    started = single()
    started.start()
    started.close()
    started.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("eplb-") and t.name != "eplb-link"]
