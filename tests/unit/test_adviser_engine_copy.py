"""How long an engine takes for an answer: seen by the call that has not returned, or by what the engine says of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from agent.adviser.callers import calling_frame, method_of_class
from agent.adviser.engine_copy import Carrying, CopyWatch, EngineCopy, on_stack

WAIT_S = 60.0


def until(found: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while (value := found()) is None:
        assert time.monotonic() < end, f"no {what} within {WAIT_S} s"
        time.sleep(0.001)
    return value


def looks_of(watch_on: list[bool]) -> Callable[[], bool]:
    """True for each look that the list has a word for."""
    answers: Iterator[bool] = iter(watch_on)
    return lambda: next(answers, False)


def test_a_call_that_holds_up_its_thread_held_steps_for_as_long_as_it_ran() -> None:
    watch, looked, go_on = CopyWatch(look_s=0.001), threading.Event(), threading.Event()

    def rearrange() -> None:
        frame = calling_frame()
        assert frame is not None
        runs = on_stack(frame)

        def calling() -> bool:
            looked.set()
            return runs()

        watch.begin("chat", 7, Carrying(calling=calling))
        assert go_on.wait(WAIT_S)

    began = time.monotonic()
    thread = threading.Thread(target=rearrange)
    thread.start()
    assert looked.wait(WAIT_S)
    assert watch.last("chat") is None
    go_on.set()
    thread.join()
    copy = until(lambda: watch.last("chat"), "copy")
    assert (copy.generation, copy.held_steps) == (7, True)
    assert 0 < copy.seconds <= time.monotonic() - began


def test_a_copy_beside_steps_held_none_up_and_one_in_turns_did_not_hold_all_of_them() -> None:
    watch = CopyWatch(look_s=0.001)
    watch.begin("beside", 1, Carrying(beside=looks_of([True] * 3)))
    watch.begin("in-turns", 2, Carrying(calling=looks_of([True, True, False, False, True, True]), beside=looks_of([True])))
    assert not until(lambda: watch.last("beside"), "copy").held_steps
    assert not until(lambda: watch.last("in-turns"), "copy").held_steps
    assert watch.last("other") is None


def test_a_new_answer_forgets_the_copy_before_it() -> None:
    watch, stop = CopyWatch(look_s=0.001), threading.Event()
    watch.begin("chat", 1, Carrying())
    assert until(lambda: watch.last("chat"), "copy").generation == 1
    watch.begin("chat", 2, Carrying(beside=lambda: not stop.is_set()))
    assert watch.last("chat") is None
    stop.set()
    assert until(lambda: watch.last("chat"), "copy").generation == 2


def test_a_copy_that_was_overtaken_is_not_taken_for_the_one_after_it() -> None:
    watch, first, second = CopyWatch(look_s=0.001), threading.Event(), threading.Event()
    watch.begin("chat", 1, Carrying(beside=lambda: not first.is_set()))
    watch.begin("chat", 2, Carrying(beside=lambda: not second.is_set()))
    first.set()
    for thread in threading.enumerate():
        if thread.name == "eplb-copy-watch 1":
            thread.join(WAIT_S)
    assert watch.last("chat") is None
    second.set()
    assert until(lambda: watch.last("chat"), "copy").generation == 2


def test_what_cannot_be_looked_at_or_never_ends_is_not_known() -> None:
    def broken() -> bool:
        raise AttributeError("of another release")

    watch = CopyWatch(look_s=0.001, longest_s=0.01)
    for number, looks in enumerate((broken, lambda: True), start=1):
        watch.begin("chat", number, Carrying(beside=looks))
        until(lambda: None if any(t.name.startswith("eplb-copy-watch") for t in threading.enumerate()) else True, "end")
        assert watch.last("chat") is None


def test_the_calling_method_is_found_with_its_object() -> None:
    class Manager:
        def rebalance(self) -> tuple[Any, Any] | None:
            return method_of_class("Manager")

    manager = Manager()
    found = manager.rebalance()
    assert found is not None
    assert found[0] is manager
    assert not on_stack(found[1])()  # it has returned
    assert method_of_class("Manager") is None


def test_copies_are_values() -> None:
    assert EngineCopy(generation=1, seconds=0.5, held_steps=True) == EngineCopy(generation=1, seconds=0.5, held_steps=True)
