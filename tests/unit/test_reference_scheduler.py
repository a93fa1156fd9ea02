from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from agent.engine.reference.messages import EndReason, Submit
from agent.engine.reference.scheduler import Scheduler


def scheduler(*, batch_max: int = 2, queue_max: int = 10, prefill_tokens_max: int = 100, context: int = 20) -> Scheduler:
    caches = count()
    return Scheduler(
        batch_max=batch_max,
        queue_max=queue_max,
        prefill_tokens_max=prefill_tokens_max,
        context=context,
        vocabulary=256,
        new_cache=lambda: next(caches),
    )


def request(request_id: int, *, length: int = 3, new: int = 2) -> Submit:
    return Submit(request_id=request_id, kind="k", prompt=tuple(range(1, 1 + length)), max_new_tokens=new)


def test_a_prompt_is_fed_whole_then_one_token_a_step() -> None:
    one = scheduler()
    assert one.submit(request(7), owner=0) is None
    (batch,) = one.next_batch()
    assert list(batch.pending()) == [1, 2, 3]
    (progress,) = one.advance([batch], [65])
    assert (progress.token.request_id, progress.token.index, progress.token.token) == (7, 0, 65)
    assert progress.ended is None
    (again,) = one.next_batch()
    assert again is batch
    assert list(again.pending()) == [65]
    (progress,) = one.advance([again], [66])
    assert progress.ended is not None
    assert (progress.ended.reason, progress.ended.num_tokens, progress.ended.kind) == (EndReason.LENGTH, 2, "k")
    assert one.empty
    assert not one.has_work()


def test_waiting_requests_join_in_order_as_others_leave() -> None:
    one = scheduler(batch_max=2)
    for request_id, new in ((1, 1), (2, 2), (3, 1)):
        one.submit(request(request_id, new=new), owner=0)
    first = one.next_batch()
    assert [g.request.request_id for g in first] == [1, 2]
    one.advance(first, [0, 0])
    assert [g.request.request_id for g in one.next_batch()] == [2, 3]


def test_prompts_beyond_the_prefill_bound_wait_but_a_long_one_goes_alone() -> None:
    one = scheduler(batch_max=8, prefill_tokens_max=5)
    for request_id, length in ((1, 3), (2, 3), (3, 9)):
        one.submit(request(request_id, length=length, new=5), owner=0)
    seen = []
    for _ in range(3):
        batch = one.next_batch()
        seen.append([g.request.request_id for g in batch])
        one.advance(batch, [0] * len(batch))
    assert seen == [[1], [1, 2], [1, 2, 3]]


def test_the_queue_is_bounded_and_says_so() -> None:
    one = scheduler(queue_max=2)
    assert one.submit(request(1), owner=0) is None
    assert one.submit(request(2), owner=0) is None
    rejected = one.submit(request(3), owner=0)
    assert rejected is not None
    assert rejected.reason == "2 requests wait already, of at most 2; try again later"


def test_unusable_requests_are_rejected_with_numbers() -> None:
    one = scheduler(context=20)
    for bad, words in (
        (request(1, length=0), "the prompt is empty"),
        (request(1, length=15, new=7), "15 prompt tokens and 7 new ones do not fit the context of 20; ask for 1 to 6"),
        (request(1, new=0), "and 0 new ones"),
        (Submit(request_id=1, kind="", prompt=(256,), max_new_tokens=1), "tokens outside 0..255"),
        (request(-1), "request id -1 is outside"),
    ):
        rejected = one.submit(bad, owner=0)
        assert rejected is not None
        assert words in rejected.reason
    assert one.submit(request(1, length=15, new=6), owner=0) is None


def test_requests_of_a_paused_owner_rest_and_keep_their_place() -> None:
    one = scheduler(batch_max=2)
    one.submit(request(1, new=9), owner=5)
    one.next_batch()
    one.submit(request(2), owner=5)
    one.submit(request(3), owner=6)
    assert [g.request.request_id for g in one.next_batch(paused={5})] == [3]
    assert one.has_work(paused={5})
    assert not one.has_work(paused={5, 6})
    assert [g.request.request_id for g in one.next_batch()] == [1, 3]
    assert one.num_waiting == 1


def test_cancelling_an_owner_leaves_the_others() -> None:
    one = scheduler(batch_max=1)
    one.submit(request(1), owner=5)
    one.next_batch()
    one.submit(request(2), owner=5)
    one.submit(request(3), owner=6)
    dropped = one.cancel(owner=5)
    assert [(owner, ended.request_id, ended.reason) for owner, ended in dropped] == [
        (5, 1, EndReason.CANCELLED),
        (5, 2, EndReason.CANCELLED),
    ]
    assert [g.request.request_id for g in one.next_batch()] == [3]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(0, 2)), max_size=25),
    batch_max=st.integers(1, 4),
    prefill=st.integers(1, 15),
    pauses=st.lists(st.sets(st.integers(0, 2)), max_size=10),
)
def test_every_request_gets_all_its_tokens_and_no_bound_is_passed(
    sizes: list[tuple[int, int, int]], batch_max: int, prefill: int, pauses: list[set[int]]
) -> None:
    one = scheduler(batch_max=batch_max, queue_max=100, prefill_tokens_max=prefill)
    for request_id, (length, new, owner) in enumerate(sizes):
        assert one.submit(request(request_id, length=length, new=new), owner=owner) is None
    got = dict.fromkeys(range(len(sizes)), 0)
    ended = []
    for step in range(1000):
        paused = pauses[step] if step < len(pauses) else set()
        if not one.has_work(paused=paused):
            if not paused:
                break
            assert one.next_batch(paused=paused) == []
            continue
        batch = one.next_batch(paused=paused)
        assert batch
        assert one.num_running <= batch_max
        assert all(generation.owner not in paused for generation in batch)
        prompts = [len(generation.request.prompt) for generation in batch if not generation.tokens]
        for progress in one.advance(batch, [step] * len(batch)):
            got[progress.token.request_id] += 1
            if progress.ended:
                ended.append(progress.token.request_id)
        assert len(prompts) <= batch_max
    assert one.empty
    assert got == {request_id: new for request_id, (_, new, _) in enumerate(sizes)}
    assert sorted(ended) == list(range(len(sizes)))
