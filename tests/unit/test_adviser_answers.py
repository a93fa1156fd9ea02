"""What an engine can be sent to: the check against a slow, obvious one, and each refusal's sentence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.adviser.answer_check import EngineRules, check_answer, check_rows, replica_counts
from agent.adviser.replica_tables import replica_tables
from eplb_service.advice import Advice, map_digest
from eplb_service.ids import GenerationNumber
from tests.adviser_doubles import linear_map

RULES = EngineRules(num_logical=4, nodes=("a", "a", "b"), replicas_max=3)
NOW = linear_map(2, 4, 6)


def answer(rows: npt.NDArray[np.int32] | None, *, digest: int | None = None, generation: int = 5) -> Advice:
    return Advice(
        origin=1, sequence=1, move=rows is not None, generation=GenerationNumber(generation), reason="",
        digest=map_digest(NOW if rows is None else rows) if digest is None else digest, rows=rows,
    )  # fmt: skip


def changed(*cells: tuple[int, int, int]) -> npt.NDArray[np.int32]:
    rows = NOW.copy()
    for layer, slot, expert in cells:
        rows[layer, slot] = expert
    return rows


def test_a_map_that_covers_every_expert_is_fine_and_so_is_keeping() -> None:
    assert check_answer(answer(changed((1, 5, 3))), NOW, RULES) == ""
    assert check_answer(answer(None), NOW, RULES) == ""


@pytest.mark.parametrize(
    ("advice", "said"),
    [
        (answer(None, digest=12), f"it keeps a map with digest 0xc; this engine routes by {map_digest(NOW):#x}"),
        (
            answer(changed((0, 5, 2)), digest=12),
            f"the digest of its map is {map_digest(changed((0, 5, 2))):#x}, not 0xc as it says",
        ),
        (answer(changed((1, 3, 2))), "layer row 1 holds no copy of expert 3"),
        (answer(changed((1, 3, 4))), "layer row 1 slot 3 holds 4; experts are 0 to 3"),
        (answer(changed((0, 0, -1))), "layer row 0 slot 0 holds -1; experts are 0 to 3"),
        (answer(NOW[:1].copy()), "its map has shape (1, 6); this engine's has (2, 6)"),
        (answer(NOW.astype(np.int64)), "its map is of int64, not of int32"),
        (answer(None, generation=-1), "its generation is -1"),
        (answer(None, generation=1 << 63), "its generation is 9223372036854775808"),
    ],
)
def test_each_fault_has_its_sentence(advice: Advice, said: str) -> None:
    assert check_answer(advice, NOW, RULES) == said


def test_a_move_without_a_map_is_refused() -> None:
    bare = Advice(origin=1, sequence=1, move=True, generation=GenerationNumber(1), digest=1, reason="")
    assert check_answer(bare, NOW, RULES) == "it moves to a map that it does not have"


def test_replicas_beyond_the_engines_table_are_refused() -> None:
    """FastDeploy#4599: routing tables have a fixed width."""
    rules = EngineRules(num_logical=2, nodes=("a",), replicas_max=3)
    now = linear_map(1, 2, 6)
    assert check_rows(now, now, rules) == ""
    rows = np.array([[0, 0, 0, 0, 0, 1]], dtype=np.int32)
    assert check_rows(rows, now, rules) == "layer row 0 holds 5 copies of expert 0; the engine's table has room for 3"


def test_two_copies_on_a_rank_are_refused_where_the_loader_fills_one_and_only_in_changed_rows() -> None:
    """EPLB#22: load alone decides in some balancers, and both copies of an expert end up on one rank."""
    rules = EngineRules(num_logical=4, nodes=("a", "a", "a"), replicas_max=6, distinct_on_rank=True)
    twice = np.array([[0, 0, 1, 2, 3, 1]], dtype=np.int32)
    now = linear_map(1, 4, 6)
    assert check_rows(twice, now, rules) == "layer row 0 holds expert 0 twice on rank 0; this engine would load one"
    assert check_rows(twice, twice, rules) == ""
    assert check_rows(twice, now, EngineRules(num_logical=4, nodes=("a", "a", "a"), replicas_max=6)) == ""


def test_a_group_on_two_nodes_is_refused_where_the_engine_keeps_it_on_one() -> None:
    rules = EngineRules(num_logical=4, nodes=("a", "b"), num_groups=2, replicas_max=6)
    now = np.array([[0, 1, 0, 2, 3, 2]], dtype=np.int32)
    assert check_rows(np.array([[1, 0, 1, 3, 2, 2]], dtype=np.int32), now, rules) == ""
    rows = np.array([[0, 1, 2, 2, 3, 2]], dtype=np.int32)
    assert check_rows(rows, now, rules) == "layer row 0 spreads expert group 1 over 2 nodes; this engine keeps it on one"


def slow(rows: list[list[int]], now: list[list[int]], rules: EngineRules) -> bool:
    """Whether the engine can go there, word by word."""
    slots = len(now[0]) // len(rules.nodes)
    for row, old in zip(rows, now, strict=True):
        for expert in range(rules.num_logical):
            if not 0 < row.count(expert) <= rules.replicas_max:
                return False
        if any(expert not in range(rules.num_logical) for expert in row):
            return False
        if row == old:
            continue
        size = rules.num_logical // rules.num_groups
        node_of_group: dict[int, set[str]] = {}
        for rank, node in enumerate(rules.nodes):
            held = row[rank * slots : (rank + 1) * slots]
            if rules.distinct_on_rank and len(set(held)) < len(held):
                return False
            for expert in held:
                node_of_group.setdefault(expert // size, set()).add(node)
        if rules.num_groups > 1 and any(len(found) > 1 for found in node_of_group.values()):
            return False
    return True


@given(st.data())
def test_the_check_agrees_with_the_slow_one(data: st.DataObject) -> None:
    num_ranks, slots, num_layers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    num_physical = num_ranks * slots
    num_logical = data.draw(st.integers(1, num_physical))
    groups = [g for g in (1, 2) if num_logical % g == 0]
    rules = EngineRules(
        num_logical=num_logical,
        nodes=tuple(data.draw(st.sampled_from("ab")) for _ in range(num_ranks)),
        num_groups=data.draw(st.sampled_from(groups)),
        replicas_max=data.draw(st.integers(1, 4)),
        distinct_on_rank=data.draw(st.booleans()),
    )
    rows_of = st.lists(
        st.lists(st.integers(-1, num_logical), min_size=num_physical, max_size=num_physical),
        min_size=num_layers,
        max_size=num_layers,
    )
    legal = st.lists(
        st.permutations([slot % num_logical for slot in range(num_physical)]), min_size=num_layers, max_size=num_layers
    )
    now = data.draw(legal)
    rows = data.draw(rows_of | legal | st.just(now))
    said = check_rows(np.array(rows, dtype=np.int32), np.array(now, dtype=np.int32), rules)
    assert (said == "") == slow([list(row) for row in rows], [list(row) for row in now], rules), said


@given(st.data())
def test_replica_tables_name_each_slot_once_under_its_expert(data: st.DataObject) -> None:
    num_logical = data.draw(st.integers(1, 5))
    extra = data.draw(st.lists(st.integers(0, num_logical - 1), max_size=6))
    rows = np.array([data.draw(st.permutations([*range(num_logical), *extra]))], dtype=np.int64)
    physical, counts = replica_tables(rows, num_logical)
    assert physical.shape == (1, num_logical, len(extra) + 1)
    assert counts.tolist() == replica_counts(rows, num_logical).tolist()
    for expert in range(num_logical):
        slots = [slot for slot, there in enumerate(rows[0]) if there == expert]
        assert physical[0, expert].tolist() == slots + [-1] * (len(extra) + 1 - len(slots))
        assert counts[0, expert] == len(slots)
