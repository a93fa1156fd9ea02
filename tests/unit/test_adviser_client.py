"""The adviser's client against agent processes that behave, and that do not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.adviser.client import NoAnswerError, ask
from agent.frames import HEAD, MAGIC, RegistrationAnswer, Welcome, encode
from eplb_service import __version__
from eplb_service.advice import Advice, AdviceRequest, map_digest
from eplb_service.ids import DeploymentId
from tests.adviser_doubles import WELCOME, Answer, ScriptedAgent, advice, keeping, linear_map, moving, shuffled_map, silent

NOW = linear_map(2, 4, 6)
THEN = shuffled_map(3, 2, 4, 6, 3)


def question(sequence: int = 1) -> AdviceRequest:
    return AdviceRequest(
        deployment=DeploymentId("d"), engine="e", origin=77, sequence=sequence, model="m", layer_ids=(3, 4), rank_ids=(0, 1, 2),
        nodes=("a", "a", "b"), num_logical=4, dispatch="hashed", num_groups=1, load=np.ones((2, 4)), current=NOW,
        digest=map_digest(NOW),
    )  # fmt: skip


def asked(path: Path, *, timeout_s: float = 10.0, sequence: int = 1) -> Advice:
    return ask(str(path), question(sequence), timeout_s=timeout_s, release=__version__)


def refusal(path: Path, answer: Answer, *, timeout_s: float = 10.0, welcome: bytes = WELCOME) -> str:
    agent = ScriptedAgent(path, answer, welcome=welcome)
    try:
        with pytest.raises(NoAnswerError) as caught:
            asked(path, timeout_s=timeout_s)
    finally:
        agent.close()
    return str(caught.value)


def test_a_question_comes_as_it_was_sent_and_each_has_a_connection_of_its_own(tmp_path: Path) -> None:
    agent = ScriptedAgent(tmp_path / "s", moving(THEN, generation=4))
    for sequence in (1, 2):
        answer = asked(agent.path, sequence=sequence)
        assert answer.move
        assert answer.generation == 4
        assert answer.rows is not None
        assert np.array_equal(answer.rows, THEN)
        assert agent.closed_by_asker.acquire(timeout=10)
    agent.answer = keeping
    assert not asked(agent.path, sequence=3).move
    assert [q.sequence for q in agent.questions] == [1, 2, 3]
    assert agent.questions[0].nodes == ("a", "a", "b")
    assert np.array_equal(agent.questions[0].current, NOW)
    agent.close()


def test_pieces_of_frames_are_put_together(tmp_path: Path) -> None:
    """What the other side writes in one piece may come in many."""
    path = tmp_path / "s"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    whole = WELCOME + encode(advice(question(), THEN))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for byte in whole:
                connection.sendall(bytes([byte]))
            while connection.recv(1 << 16):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    answer = asked(path)
    assert answer.rows is not None
    assert np.array_equal(answer.rows, THEN)
    thread.join(10)
    listener.close()


def test_no_agent_process_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoAnswerError, match=r"no agent process listens at .*start `eplb agent`"):
        asked(tmp_path / "none")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "stale"))
    stale.close()
    with pytest.raises(NoAnswerError, match="is gone; start `eplb agent` again"):
        asked(tmp_path / "stale")
    with pytest.raises(NoAnswerError, match=r"cannot connect|failed"):
        asked(tmp_path / ("x" * 200))
    (tmp_path / "file").write_text("")
    with pytest.raises(NoAnswerError):
        asked(tmp_path / "file")


def test_a_silent_agent_process_costs_the_deadline_and_no_more(tmp_path: Path) -> None:
    start = time.monotonic()
    assert "0.2 s (EPLB_ADVISER_TIMEOUT_S) ended without a whole answer" in refusal(tmp_path / "s", silent, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - start < 5.0


def test_one_deadline_holds_for_an_answer_that_trickles(tmp_path: Path) -> None:
    """A byte now and then would keep a time-out between reads from ever ending."""
    agent = ScriptedAgent(tmp_path / "s", silent)
    stop = threading.Event()
    whole = encode(advice(question(), THEN))

    def trickle(_question: AdviceRequest) -> bytes | None:
        for byte in whole:
            if stop.wait(0.02):
                return None
            for connection in list(agent._connections):
                connection.send(bytes([byte]))
        return None

    agent.answer = trickle
    start = time.monotonic()
    with pytest.raises(NoAnswerError, match="ended without a whole answer"):
        asked(agent.path, timeout_s=0.3)
    assert time.monotonic() - start < 5.0
    stop.set()
    agent.close()


def test_a_queue_that_is_full_costs_the_deadline_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(0)
    waiting = []
    for _ in range(4):  # nobody accepts
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        waiting.append(one)
        try:
            one.connect(str(path))
        except BlockingIOError:
            break
    else:
        pytest.fail("the queue took all")
    start = time.monotonic()
    with pytest.raises(NoAnswerError, match="ended before it took the connection"):
        asked(path, timeout_s=0.2)
    assert time.monotonic() - start < 5.0
    for one in (*waiting, listener):
        one.close()


def test_another_release_is_named_with_both(tmp_path: Path) -> None:
    said = refusal(tmp_path / "s", keeping, welcome=encode(Welcome(version="9.9")))
    assert said.endswith(f"is of release 9.9, this plug-in of {__version__}; install the same release on both sides")


def other(origin: int, sequence: int) -> Callable[[AdviceRequest], bytes]:
    return lambda q: encode(
        Advice(origin=origin, sequence=sequence, move=False, generation=advice(q, None).generation, digest=q.digest, reason="")
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda _q: b"HTTP/1.1 400 Bad Request\r\n\r\n", "is this the agent's socket?"),
        (lambda _q: HEAD.pack(MAGIC, 1 << 20, 0), "an answer here has at most 65536 and 48"),
        (lambda _q: HEAD.pack(MAGIC, 2, 1 << 29), "a payload of 536870912 bytes"),
        (lambda _q: HEAD.pack(MAGIC, 4, 0) + b"\xff{}]", "sent what is no answer"),
        (lambda _q: encode(RegistrationAnswer(accepted=True, reason="")), "unknown frame kind 'RegistrationAnswer'"),
        (lambda _q: WELCOME, "answered a question with Welcome"),
        (lambda q: encode(advice(q, THEN))[:-5], "ended without a whole answer"),
        (other(77, 2), "answered question 2 of origin 77, not 1 of 77"),
        (other(78, 1), "answered question 1 of origin 78, not 1 of 77"),
    ],
)
def test_what_is_no_answer_to_the_question_is_refused(tmp_path: Path, answer: Answer, said: str) -> None:
    assert said in refusal(tmp_path / "s", answer, timeout_s=0.5)


def test_an_answer_before_the_welcome_is_refused(tmp_path: Path) -> None:
    assert "sent Advice before Welcome" in refusal(tmp_path / "s", silent, welcome=encode(advice(question(), None)))


def test_an_agent_process_that_dies_is_said_at_once(tmp_path: Path) -> None:
    agent = ScriptedAgent(tmp_path / "s", silent)

    def die(_question: AdviceRequest) -> None:
        for connection in list(agent._connections):
            connection.shutdown(socket.SHUT_RDWR)

    agent.answer = die
    start = time.monotonic()
    with pytest.raises(NoAnswerError, match="it closed the connection before it had answered"):
        asked(agent.path, timeout_s=30)
    assert time.monotonic() - start < 10.0
    agent.close()


def test_no_thread_and_no_connection_is_left(tmp_path: Path) -> None:
    agent = ScriptedAgent(tmp_path / "s", silent)
    before = {thread for thread in threading.enumerate() if "serve" not in thread.name}
    with pytest.raises(NoAnswerError):
        asked(agent.path, timeout_s=0.1)
    assert agent.closed_by_asker.acquire(timeout=10)
    assert {thread for thread in threading.enumerate() if "serve" not in thread.name} <= before
    agent.close()


def test_whatever_bytes_come_there_is_an_answer_to_the_question_or_a_sentence(tmp_path: Path) -> None:
    agent = ScriptedAgent(tmp_path / "s")
    whole = encode(advice(question(), THEN))

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        body = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        sent = data.draw(st.sampled_from([bytes(body), bytes(body[: data.draw(st.integers(0, len(body)))])]))

        def answer(_question: AdviceRequest) -> bytes:
            return sent

        agent.answer = answer
        try:
            found = asked(agent.path, timeout_s=0.05)
        except NoAnswerError:
            return
        assert (found.origin, found.sequence) == (77, 1)

    check()
    agent.close()
