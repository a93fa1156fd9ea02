"""What an agent process may send to a hook: anything. The link ends or the message is refused; the live map never changes."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.frames import HEAD, MAGIC, RegistrationAnswer, encode
from agent.hook import chunk_events as ev
from agent.hook import link as link_module
from agent.hook.link import Link
from agent.hook.outbox import Outbox
from eplb_service.control import Arm, Disarm, Hello, LinkBytes, RefusalCode, Stage, ToRank
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, GroupId, Incarnation, RankId, chunk_id
from tests.unit.hook_chunk_parts import LAYER, NUM_LOGICAL, RANKS, SLOTS, address, machine, stage
from tests.unit.test_hook_link import WAIT_S, Owner, accept, receive

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KINDS = ("Welcome", "RegistrationAnswer", "Hello", "Stage", "Arm", "Disarm", "Pulse", "Nothing")
VALID = [
    encode(Hello(to=address(), epoch=Epoch(1))),
    encode(stage(chunk_id(Epoch(1), 1))),
    encode(Arm(to=address(), chunk_id=chunk_id(Epoch(1), 1))),
    encode(Disarm(to=address(), chunk_id=chunk_id(Epoch(1), 1), epoch=Epoch(1))),
    encode(RegistrationAnswer(accepted=True, reason="")),
]


def framed(kind: str, body: object, arrays: object, payload: bytes) -> bytes:
    head = json.dumps({"kind": kind, "body": body, "arrays": arrays}).encode()
    return HEAD.pack(MAGIC, len(head), len(payload)) + head + payload


@st.composite
def mutated(draw: Any) -> bytes:
    """A valid frame with some bytes of it changed."""
    frame = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 3))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame)


FRAMES = st.one_of(
    st.binary(max_size=64),
    st.builds(lambda a, b, rest: HEAD.pack(MAGIC, a, b) + rest, *[st.integers(0, (1 << 32) - 1)] * 2, st.binary(max_size=64)),
    st.builds(framed, st.sampled_from(KINDS), JSON, st.just([]) | JSON, st.binary(max_size=16)),
    mutated(),
    st.sampled_from(VALID),
)


class MachineOwner(Owner):
    """A hook whose messages go to the real rules of a rank, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = machine()
        self.live = dict(self.machine.live)

    def on_message(self, message: ToRank) -> None:
        for effect in self.machine.handle(ev.Received(message), 0.0):
            if isinstance(effect, ev.BeginStaging):  # the worker is quick: what follows meets a staged chunk
                self.machine.handle(
                    ev.StagingFailed(effect.stage.chunk_id, RefusalCode.TRANSFER, "the test copies nothing"), 0.0
                )
        super().on_message(message)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, MachineOwner, Link]]:
    monkeypatch.setattr(link_module, "RECONNECT_MIN_S", 0.001)
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        path, owner = f"{folder}/agent.sock", MachineOwner()
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path)
            made.listen(4)
            made.settimeout(WAIT_S)
            link = Link(path, owner, Outbox(4), release="1.2.3", tick_s=0.02, reconnect_max_s=0.002)
            link.start()
            try:
                yield made, owner, link
            finally:
                link.close(WAIT_S)
        assert not Path(path).is_dir()


def test_no_bytes_of_an_agent_process_break_a_hook_or_change_its_map(
    listener: tuple[socket.socket, MachineOwner, Link], caplog: pytest.LogCaptureFixture
) -> None:
    door, owner, _ = listener

    @settings(max_examples=60, deadline=None)
    @given(st.lists(FRAMES, min_size=1, max_size=4), st.booleans())
    def fuzz(frames: list[bytes], welcomed: bool) -> None:
        if welcomed:
            connection = accept(door)
        else:
            connection, _ = door.accept()
        with connection:
            try:
                connection.sendall(b"".join(frames))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # until the hook closes its end
                    pass
            except OSError:
                pass  # it did so first

    with caplog.at_level(logging.WARNING):
        fuzz()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert owner.machine.live == owner.live
    # And it still knows a planner when one comes.
    connection = accept(door)
    assert receive(connection) is not None
    heard = len(owner.messages)
    connection.sendall(encode(Hello(to=address(), epoch=Epoch((1 << 31) - 1))))
    owner.until(lambda: len(owner.messages) > heard)
    connection.close()


IDS = st.sampled_from([0, 1, 2, (1 << 31) - 1, (1 << 63) - 1])
ADDRESSES = st.just(address()) | st.builds(
    lambda rank, life, group: replace(address(), rank_id=RankId(rank), incarnation=Incarnation(life), group_id=GroupId(group)),
    st.sampled_from([RANKS[0], RANKS[1], 0]),
    st.sampled_from([address().incarnation, 1]),
    st.sampled_from([address().group_id, 1]),
)
CHUNKS = st.builds(chunk_id, st.integers(1, 3).map(Epoch), st.integers(1, 3)) | IDS.map(ChunkId)
ROWS = st.lists(st.integers(-2, NUM_LOGICAL + 1), min_size=0, max_size=len(RANKS) * SLOTS + 1).map(tuple)


@st.composite
def stages(draw: Any) -> Stage:
    """A stage that is right but for what is drawn."""
    chunk = draw(CHUNKS)
    made = stage(chunk, to=draw(ADDRESSES))
    change = made.layers[0]
    what = draw(st.sampled_from(["nothing", "row", "old", "new", "layer", "twice", "copies", "version", "generation", "empty"]))
    if what == "row":
        change = replace(change, new_row=draw(ROWS))
    elif what in ("old", "new"):
        change = replace(change, **{f"{what}_digest": draw(IDS)})
    elif what == "layer":
        change = replace(change, layer=replace(LAYER, layer_id=draw(st.integers(0, 9))))
    layers = {"twice": (change, change), "empty": ()}.get(what, (change,))
    copies = made.copies
    if what == "copies":
        copies = draw(
            st.lists(st.sampled_from(copies).map(lambda copy: replace(copy, expert=copy.expert + 1)), max_size=3).map(tuple)
        )
    return replace(
        made,
        layers=layers,
        copies=copies,
        weights_version=draw(st.integers(0, 1)) if what == "version" else 0,
        generation=GenerationNumber(draw(IDS)) if what == "generation" else made.generation,
    )


ORDERS = st.one_of(
    st.builds(Hello, to=ADDRESSES, epoch=st.integers(0, 4).map(Epoch)),
    stages(),
    st.builds(Arm, to=ADDRESSES, chunk_id=CHUNKS),
    st.builds(Disarm, to=ADDRESSES, chunk_id=CHUNKS, epoch=st.integers(0, 4).map(Epoch)),
)


def armed_at_once(order: Stage) -> list[ToRank]:
    """So that votes come about too: alone, an order to arm seldom meets the chunk that it is for."""
    return [order, Arm(to=address(), chunk_id=order.chunk_id)]


@settings(max_examples=150, deadline=None)
@given(st.lists(ORDERS.map(lambda order: [order]) | stages().map(armed_at_once), max_size=8))
def test_no_planner_however_it_lies_changes_a_map_without_the_vote(orders: list[list[ToRank]]) -> None:
    """vllm#41141: a map that is applied without its weights. Every order is answered, refused or dropped; votes fail here."""
    rank = machine()
    live = dict(rank.live)
    for boundary, order in enumerate(itertools.chain(*orders), 1):
        pending: list[ev.Event] = [ev.Received(order)]
        while pending:
            for effect in rank.handle(pending.pop(), 0.0):
                if isinstance(effect, ev.BeginStaging):
                    pending.append(ev.StagingDone(effect.stage.chunk_id, 0.1, LinkBytes()))
                elif isinstance(effect, ev.CancelStaging):
                    pending.append(ev.StagingFailed(effect.chunk_id, RefusalCode.TRANSFER, "cancelled"))
        for effect in rank.handle(ev.VoteDue(boundary), 0.0):
            if isinstance(effect, ev.CastVote) and effect.chunk_id:  # its peers were told nothing of it: not unanimous
                rank.handle(ev.VoteResolved(effect.chunk_id, ev.Outcome.FAILED), 0.0)
        for effect in rank.handle(ev.FlipDue(boundary), 0.0):
            if isinstance(effect, ev.Flip):
                rank.handle(ev.FlipDone(effect.stage.chunk_id, 0.0), 0.0)
        assert dict(rank.live) == live
