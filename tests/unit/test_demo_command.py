"""`eplb demo` as a process: how it is asked to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from demo.command import end_on_signals
from demo.processes import ignore_interrupts

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_every_signal_that_asks_it_to_end_does_so_as_ctrl_c_does(number: signal.Signals) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what a script puts into the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end_on_signals()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_on_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_ctrl_c_that_comes_while_the_parts_are_stopped_changes_nothing() -> None:
    end_on_signals()
    ignore_interrupts()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
