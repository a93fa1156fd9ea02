"""All ranks do the same, whatever fails on which of them; and they are in the same collectives on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from agent.adviser import agree as agree_module
from agent.adviser import rank_table
from agent.adviser.agree import GroupFacts, agree
from agent.adviser.call import Call, Decision, Outcome
from agent.adviser.client import NoAnswerError
from eplb_service.advice import Advice, map_digest
from eplb_service.errors import InvalidInputError
from eplb_service.ids import GenerationNumber
from tests.adviser_doubles import linear_map, shuffled_map
from tests.adviser_groups import ThreadGroup, groups_of, on_each, use_threads

NOW = linear_map(2, 4, 6)
THEN = shuffled_map(5, 2, 4, 6, 3)
CALL = Call(
    load=np.arange(8, dtype=np.float64).reshape(2, 4), current=NOW, num_ranks=3, num_groups=1, layer_ids=(0, 1), deployment="d",
    model="m", engine="e", dispatch="hashed", replicas_max=6,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)


def advice_of(rows: np.ndarray[tuple[int, ...], np.dtype[np.int32]] | None, reason: str = "it pays") -> Advice:
    return Advice(
        origin=1, sequence=1, move=rows is not None, generation=GenerationNumber(9), reason=reason, rows=rows,
        digest=map_digest(NOW if rows is None else rows),
    )  # fmt: skip


def decided(
    calls: dict[int, Call | None] | None = None,
    answer: Callable[[GroupFacts], Advice] = lambda _facts: advice_of(THEN),
    numbers: dict[int, int] | None = None,
    size: int = 3,
) -> tuple[list[Decision], list[ThreadGroup]]:
    groups = groups_of(size)

    def work(group: ThreadGroup) -> Decision:
        rank = group.rank()
        call = (calls or {}).get(rank, CALL)
        return agree(group, call, problem="rank's own problem", number=(numbers or {}).get(rank, 1), ask=answer)

    return on_each(groups, work), groups


def test_all_ranks_go_where_one_was_told() -> None:
    asked = []

    def answer(facts: GroupFacts) -> Advice:
        asked.append((threading.current_thread().name, facts))
        return advice_of(THEN)

    decisions, groups = decided(answer=answer)
    assert len(asked) == 1
    assert asked[0][1].rank_ids == (0, 1, 2)
    for decision in decisions:
        assert decision.outcome is Outcome.MOVED
        assert decision.generation == 9
        assert decision.reason == "it pays"
        assert decision.rows is not None
        assert np.array_equal(decision.rows, THEN)
    assert [how for how, _, _ in groups[0].shared.calls[0]] == ["sum", "sum", "sum", "min"]


def test_keeping_needs_no_map_and_its_reason_reaches_all_whole_or_cut() -> None:
    long = "weil es sich nicht lohnt – " * 40
    decisions, groups = decided(answer=lambda _facts: advice_of(None, long.replace("lohnt ", "lohnt\n\t")))
    for decision in decisions:
        assert decision.outcome is Outcome.KEPT
        assert decision.rows is None
        assert long.startswith(decision.reason.rstrip("�"))
        assert len(decision.reason) > 400
    assert [how for how, _, _ in groups[0].shared.calls[0]] == ["sum", "sum"]


def test_nobody_asks_without_load_and_an_engines_profile_at_start_is_such_a_call() -> None:
    def answer(_facts: GroupFacts) -> Advice:
        raise AssertionError("asked")

    idle = replace(CALL, load=np.zeros((2, 4)))
    decisions, _ = decided({0: idle, 1: idle, 2: idle}, answer)
    assert {decision.outcome for decision in decisions} == {Outcome.IDLE}


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(CALL, current=THEN), "do not route by the same map"),
        (replace(CALL, current=linear_map(2, 4, 9)), "have maps of different shapes"),
        (
            replace(CALL, current=linear_map(3, 4, 6), load=np.ones((3, 4)), layer_ids=(0, 1, 2)),
            "have maps of different shapes",
        ),
        (replace(CALL, load=np.ones((2, 5))), "have different numbers of experts"),
        (replace(CALL, num_groups=2), "have different numbers of expert groups"),
        (replace(CALL, num_ranks=2), "were called for different numbers of ranks"),
    ],
)
def test_ranks_that_differ_all_keep_and_say_in_what(rank: int, other: Call, said: str) -> None:
    """vllm-ascend#10486, sglang#18213, sglang#6081: nobody moves by a map or a number of experts that a peer has not."""
    decisions, groups = decided({rank: other})
    assert {decision.outcome for decision in decisions} == {Outcome.DISAGREED}
    assert len({decision.reason for decision in decisions}) == 1
    assert said in decisions[0].reason
    assert len(groups[0].shared.calls[0]) == 1


def test_ranks_in_different_calls_all_keep() -> None:
    decisions, _ = decided(numbers={1: 2})
    assert {decision.outcome for decision in decisions} == {Outcome.DISAGREED}
    assert decisions[0].reason == "ranks 0, 1 are not in the same call (number 1 and 2)"


def test_ranks_of_two_releases_all_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: Iterator[str] = iter(["1", "2", "1"])
    monkeypatch.setattr(agree_module, "rank_table", rank_table)
    real = rank_table.row_of
    monkeypatch.setattr(rank_table, "row_of", lambda call, **facts: real(call, **(facts | {"release": next(versions)})))
    decisions, _ = decided()
    assert {decision.outcome for decision in decisions} == {Outcome.DISAGREED}
    assert "have different releases of eplb-service" in decisions[0].reason


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_with_empty_slots_leaves_the_call_to_the_engine_on_all(rank: int) -> None:
    grown = NOW.copy()
    grown[:, -2:] = -1
    decisions, _ = decided({rank: replace(CALL, current=grown)})
    assert {decision.outcome for decision in decisions} == {Outcome.ENGINE}
    assert "it changes its size" in decisions[rank].reason


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_cannot_make_sense_of_its_call_makes_all_keep(rank: int) -> None:
    decisions, _ = decided({rank: None})
    assert {decision.outcome for decision in decisions} == {Outcome.FAILED}
    assert decisions[rank].reason == "rank's own problem"
    assert decisions[(rank + 1) % 3].reason == f"rank {rank} failed; its log says why"


def raising(error: Exception) -> Callable[..., Advice]:
    def fail(*_args: object, **_kwargs: object) -> Advice:
        raise error

    return fail


@pytest.mark.parametrize(
    ("answer", "outcome", "said"),
    [
        (raising(NoAnswerError("no agent process listens")), Outcome.AWAY, "no agent process listens"),
        (raising(RuntimeError("a bug\nof two lines")), Outcome.FAILED, "asking the planner failed: a bug"),
        (raising(MemoryError()), Outcome.FAILED, "asking the planner failed: MemoryError"),
        (lambda _facts: replace(advice_of(THEN), digest=5), Outcome.REFUSED, "not 0x5 as it says"),
        (lambda _facts: advice_of(np.zeros((2, 6), np.int32)), Outcome.REFUSED, "holds no copy of expert 1"),
        (lambda _facts: replace(advice_of(THEN), generation=GenerationNumber(1 << 63)), Outcome.REFUSED, "its generation"),
    ],
)
def test_what_goes_wrong_with_the_question_makes_all_keep(
    answer: Callable[[GroupFacts], Advice], outcome: Outcome, said: str
) -> None:
    decisions, groups = decided(answer=answer)
    assert {decision.outcome for decision in decisions} == {outcome}
    assert all(said in decision.reason and decision.rows is None for decision in decisions)
    assert len(groups[0].shared.calls[0]) == 2


POINTS = ["rank_table.row_of", "socket.gethostname", "check_rows", "map_digest"]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_fails_at_any_point_takes_part_in_all_collectives(
    monkeypatch: pytest.MonkeyPatch, point: str, rank: int
) -> None:
    """`on_each` compares the collectives of all ranks: one that is skipped on a rank fails here."""
    victim: dict[str, threading.Thread] = {}
    owner, name = (
        (agree_module, point)
        if "." not in point
        else (getattr(agree_module, point.split(".", maxsplit=1)[0]), point.split(".")[1])
    )
    real = getattr(owner, name)

    def fails(*args: object, **kwargs: object) -> object:
        if threading.current_thread() is victim["thread"]:
            raise ValueError(f"{point} fails here")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)

    def work(group: ThreadGroup) -> Decision:
        if group.rank() == rank:
            victim["thread"] = threading.current_thread()
        group.shared.barrier.wait(10)
        return agree(group, CALL, problem="", number=1, ask=lambda _facts: advice_of(THEN))

    decisions = on_each(groups_of(3), work)
    assert len({decision.outcome for decision in decisions}) == 1
    assert decisions[0].outcome in {Outcome.FAILED, Outcome.DISAGREED}
    assert all(decision.rows is None for decision in decisions)
    assert f"{point} fails here" in decisions[rank].reason


@pytest.mark.parametrize("rank", [1, 2])
def test_a_map_that_came_otherwise_than_it_was_sent_makes_all_keep(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """sglang#32962: ranks that route by maps of their own give wrong answers without an error."""
    real = agree_module._reduced

    def bad_memory(group: ThreadGroup, tensor: object, *, least: bool = False) -> object:
        reduced = real(group, tensor, least=least)  # type: ignore[arg-type]
        if group.rank() == rank and reduced.shape == NOW.shape:
            reduced[0, 0] = (reduced[0, 0] + 1) % 4
        return reduced

    monkeypatch.setattr(agree_module, "_reduced", bad_memory)
    decisions, _ = decided()
    assert {decision.outcome for decision in decisions} == {Outcome.DISAGREED}
    assert "the map came with digest" in decisions[rank].reason


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_group_that_breaks_in_any_collective_makes_each_rank_keep(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = agree_module._reduced
    counts: dict[int, int] = {}

    def breaks(group: ThreadGroup, tensor: object, *, least: bool = False) -> object:
        counts[group.rank()] = counts.get(group.rank(), -1) + 1
        if counts[group.rank()] == number:
            raise RuntimeError("[enforce fail] Connection closed by peer")
        return real(group, tensor, least=least)  # type: ignore[arg-type]

    monkeypatch.setattr(agree_module, "_reduced", breaks)
    decisions, _ = decided()
    assert {decision.outcome for decision in decisions} == {Outcome.GROUP}
    assert "the ranks could not talk to one another: " in decisions[0].reason


def test_a_table_of_ranks_names_nodes_by_what_only_they_have_and_ranks_by_their_ids() -> None:
    """vllm-ascend#10486: the ranks of a pipeline's second stage are 4 to 7, not 0 to 3."""
    rows = [
        rank_table.row_of(CALL, number=1, rank_id=4 + rank, node=f"boot-{rank // 2}", name="pod", release="1")
        for rank in range(4)
    ]
    table = np.stack(rows)
    assert rank_table.nodes(table) == ("pod", "pod", "pod-2", "pod-2")
    assert rank_table.rank_ids(table) == (4, 5, 6, 7)
    same = np.stack([rank_table.row_of(CALL, number=1, rank_id=-1, node="n", name="ü" * 60, release="1")] * 2)
    assert rank_table.rank_ids(same) == (0, 1)
    assert rank_table.nodes(same)[0].startswith("ü" * 24)


@pytest.mark.parametrize(("num_groups", "nodes", "kept"), [(2, "aabb", 2), (1, "aabb", 1), (3, "aabb", 1), (2, "aaaa", 1)])
def test_groups_are_kept_on_nodes_only_where_the_engine_does_so(num_groups: int, nodes: str, kept: int) -> None:
    call = replace(CALL, num_groups=num_groups, load=np.ones((2, 6)))
    table = np.stack([rank_table.row_of(call, number=1, rank_id=0, node=node, name=node, release="1") for node in nodes])
    assert rank_table.rules_of(table, call).num_groups == kept


def test_loads_that_no_engine_can_have_counted_are_refused() -> None:
    """32-bit counters of a long window run over to negative numbers."""
    with pytest.raises(InvalidInputError, match=r"negative or endless counts \(least -3\.0\)"):
        replace(CALL, load=np.array([[1.0, -3.0, 0, 0], [0, 0, 0, 0]]))
    with pytest.raises(InvalidInputError, match="negative or endless"):
        replace(CALL, load=np.full((2, 4), np.inf))
    with pytest.raises(InvalidInputError, match=r"the load has shape \(1, 4\) and the map \(2, 6\)"):
        replace(CALL, load=np.ones((1, 4)))
