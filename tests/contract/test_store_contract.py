"""One contract for every store: in memory, on the embedded server, and on Debian's redis-server where it is installed."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from eplb_service.errors import ConflictError, EplbError, FencedError, InvalidInputError
from eplb_service.ids import DeploymentId, Epoch
from eplb_service.store.base import (
    JOURNAL_KEPT,
    REPLIES_KEPT,
    VALUE_BYTES_MAX,
    Document,
    Leadership,
    Store,
    Write,
)
from eplb_service.store.embedded import EmbeddedStore
from eplb_service.store.memory import MemoryStore
from eplb_service.store.redis import RedisStore

T = TypeVar("T")
_numbers = itertools.count(1)


@dataclass
class Case:
    """A store under test, and time that passes for it."""

    store: Store
    run: Callable[[Awaitable[T]], T] | Any
    let_pass: Callable[[float], Awaitable[None]]
    deployment: DeploymentId
    ids: Iterator[str] = field(default_factory=lambda: map("w{}".format, itertools.count()))

    async def lead(self, owner: str = "one", *, lease_s: float = 60.0, floor: int = 0) -> Leadership:
        return await self.store.lead(self.deployment, owner=owner, lease_s=lease_s, floor=floor, write_id=next(self.ids))

    async def write(self, leadership: Leadership, **changes: Any) -> dict[str, int]:
        return await self.store.write(self.deployment, self.make_write(leadership, **changes))

    def make_write(self, leadership: Leadership, **changes: Any) -> Write:
        return Write(write_id=next(self.ids), epoch=leadership.epoch, **changes)

    async def read(self, *names: str) -> dict[str, Document]:
        return await self.store.read(self.deployment, names)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["memory", "embedded", "debian-redis"])
def backend(
    request: pytest.FixtureRequest,
    runner: asyncio.Runner,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    now_s = 1000.0

    async def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    async def wait_on_server(seconds: float) -> None:
        assert isinstance(store, RedisStore)
        client = store._client
        assert client is not None

        async def server_s() -> float:
            whole, micro = await client.time()
            return float(whole) + float(micro) * 1e-6

        until_s = await server_s() + seconds
        async with asyncio.timeout(seconds + 5):
            while await server_s() <= until_s:  # noqa: ASYNC110  the server's clock is the event
                await asyncio.sleep(0.002)

    store: Store
    if request.param == "memory":
        store = MemoryStore(lambda: now_s)
    elif request.param == "embedded":
        store = EmbeddedStore(tmp_path_factory.mktemp("embedded"))
    else:
        binary: Path = request.getfixturevalue("debian_redis")
        path = request.getfixturevalue("start_server")(binary)
        store = RedisStore(f"unix://{path}")
    runner.run(store.start())
    yield Case(store, runner.run, advance if request.param == "memory" else wait_on_server, DeploymentId("none"))
    runner.run(store.close())


@pytest.fixture
def case(backend: Case) -> Case:
    """The store, with a deployment that no other test uses."""
    return Case(backend.store, backend.run, backend.let_pass, DeploymentId(f"deployment-{next(_numbers)}"))


# --- leading ---------------------------------------------------------------------------------------------------------


def test_epoch_is_one_above_both_the_stored_and_the_floor(case: Case) -> None:
    async def body() -> list[int]:
        first = await case.lead()
        second = await case.lead(floor=7)
        third = await case.lead(floor=3)
        return [first.epoch, second.epoch, third.epoch]

    assert case.run(body()) == [1, 8, 9]


def test_lead_is_refused_while_another_owner_holds_the_lease_and_names_it(case: Case) -> None:
    async def body() -> None:
        await case.lead("planner a", lease_s=60)
        with pytest.raises(ConflictError, match=r"'planner a' leads in epoch 1 .* (59\.\d+|60\.000) s left"):
            await case.lead("planner b")

    case.run(body())


def test_lead_passes_on_when_the_lease_has_lapsed_and_fences_the_old_leader(case: Case) -> None:
    async def body() -> None:
        old = await case.lead("a", lease_s=0.03)
        await case.let_pass(0.04)
        new = await case.lead("b")
        assert new.epoch == old.epoch + 1
        with pytest.raises(FencedError, match="write in epoch 1 refused: planner 'b' leads in epoch 2"):
            await case.write(old, puts={"latest": b"1"})
        with pytest.raises(FencedError, match="'a' in epoch 1 is lost: planner 'b' leads in epoch 2"):
            await case.store.renew(old)
        assert await case.read("latest") == {}

    case.run(body())


def test_same_owner_leads_again_at_once_with_a_higher_epoch_and_fences_its_former_self(case: Case) -> None:
    async def body() -> None:
        old = await case.lead("a")
        new = await case.lead("a")
        assert new.epoch == 2
        with pytest.raises(FencedError, match="epoch 1"):
            await case.write(old, puts={"latest": b"1"})
        with pytest.raises(FencedError):
            await case.store.renew(old)
        await case.write(new, puts={"latest": b"2"})

    case.run(body())


def test_renewed_lease_keeps_others_out_beyond_its_first_end(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead("a", lease_s=0.05)
        await case.store.renew(Leadership(deployment=lead.deployment, epoch=lead.epoch, owner="a", lease_s=60))
        await case.let_pass(0.06)
        with pytest.raises(ConflictError):
            await case.lead("b")

    case.run(body())


def test_lapsed_lease_that_nobody_took_can_be_renewed(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead("a", lease_s=0.02)
        await case.let_pass(0.03)
        await case.store.renew(Leadership(deployment=lead.deployment, epoch=lead.epoch, owner="a", lease_s=60))
        with pytest.raises(ConflictError):
            await case.lead("b")

    case.run(body())


def test_resigning_lets_the_next_leader_in_at_once_and_ends_the_epoch(case: Case) -> None:
    async def body() -> None:
        old = await case.lead("a")
        await case.store.resign(old)
        await case.store.resign(old)
        with pytest.raises(FencedError, match="the leader of epoch 1 has resigned"):
            await case.write(old, puts={"latest": b"1"})
        with pytest.raises(FencedError, match="resigned"):
            await case.store.renew(old)
        new = await case.lead("b")
        assert new.epoch == 2
        await case.store.resign(old)  # late: it must not take the newer one down
        await case.write(new, puts={"latest": b"2"})

    case.run(body())


def test_replayed_lead_answers_with_the_epoch_of_the_first_time(case: Case) -> None:
    async def body() -> None:
        first = await case.store.lead(case.deployment, owner="a", lease_s=60, floor=0, write_id="lead-1")
        again = await case.store.lead(case.deployment, owner="a", lease_s=60, floor=0, write_id="lead-1")
        assert again == first
        assert (await case.lead("a")).epoch == 2

    case.run(body())


def test_refused_lead_may_be_asked_again_with_the_same_id(case: Case) -> None:
    async def body() -> None:
        await case.lead("a", lease_s=0.03)
        with pytest.raises(ConflictError):
            await case.store.lead(case.deployment, owner="b", lease_s=60, floor=0, write_id="lead-b")
        await case.let_pass(0.04)
        lead = await case.store.lead(case.deployment, owner="b", lease_s=60, floor=0, write_id="lead-b")
        assert lead.epoch == 2

    case.run(body())


def test_write_to_a_deployment_that_nobody_leads_is_refused(case: Case) -> None:
    stranger = Leadership(deployment=case.deployment, epoch=Epoch(5), owner="a", lease_s=1)
    with pytest.raises(FencedError, match=r"epoch 5 refused: the store knows no leader .* \(epoch 0\)"):
        case.run(case.write(stranger, puts={"latest": b"1"}))
    with pytest.raises(FencedError):
        case.run(case.store.renew(stranger))


# --- documents -------------------------------------------------------------------------------------------------------


def test_documents_are_versioned_by_name_and_absent_ones_left_out(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead()
        assert await case.write(lead, puts={"latest": b"1", "generation/1": b"\x00\xff\r\n"}) == {
            "latest": 1,
            "generation/1": 1,
        }
        assert await case.write(lead, puts={"latest": b""}) == {"latest": 2}
        assert await case.read("generation/1", "none", "latest") == {
            "generation/1": Document(b"\x00\xff\r\n", 1),
            "latest": Document(b"", 2),
        }
        assert await case.read() == {}

    case.run(body())


def test_large_value_comes_back_whole(case: Case) -> None:
    value = random.Random(5).randbytes(3 << 20)

    async def body() -> None:
        await case.write(await case.lead(), puts={"generation/1": value})
        assert (await case.read("generation/1"))["generation/1"].value == value

    case.run(body())


def test_mismatched_expectation_names_the_versions_and_writes_nothing(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead()
        await case.write(lead, puts={"a": b"1", "b": b"1"}, journal=(b"first",))
        await case.write(lead, puts={"a": b"2"}, expects={"a": 1, "c": 0})
        with pytest.raises(ConflictError, match="a has version 2, expected 1, c has version 0, expected 4"):
            await case.write(
                lead,
                puts={"a": b"3", "new/1": b""},
                deletes=("b",),
                expects={"a": 1, "b": 1, "c": 4},
                journal=(b"no",),
            )
        assert await case.read("a", "b") == {"a": Document(b"2", 2), "b": Document(b"1", 1)}
        assert await case.store.list(case.deployment, "new/", limit=5) == []
        assert await case.store.journal(case.deployment, limit=5) == [b"first"]

    case.run(body())


def test_replayed_write_answers_as_the_first_time_and_is_not_applied_again(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead("a")
        write = case.make_write(lead, puts={"latest": b"1"}, expects={"latest": 0}, journal=(b"once",))
        first = await case.store.write(case.deployment, write)
        await case.write(lead, puts={"latest": b"2"})
        assert await case.store.write(case.deployment, write) == first == {"latest": 1}
        await case.lead("a")  # its epoch is over by now: the answer stays the same
        assert await case.store.write(case.deployment, write) == first
        assert await case.read("latest") == {"latest": Document(b"2", 2)}
        assert await case.store.journal(case.deployment, limit=5) == [b"once"]

    case.run(body())


def test_replayed_conflict_stays_a_conflict(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead()
        write = case.make_write(lead, puts={"a": b"1"}, expects={"b": 1})
        with pytest.raises(ConflictError) as first:
            await case.store.write(case.deployment, write)
        await case.write(lead, puts={"b": b""})
        with pytest.raises(ConflictError) as again:
            await case.store.write(case.deployment, write)
        assert str(again.value) == str(first.value)
        assert await case.read("a") == {}

    case.run(body())


def test_write_id_with_another_content_is_refused(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead()
        await case.store.write(case.deployment, Write(write_id="x", epoch=lead.epoch, puts={"a": b"1"}))
        with pytest.raises(ConflictError, match="'x' was used for another request"):
            await case.store.write(case.deployment, Write(write_id="x", epoch=lead.epoch, puts={"a": b"2"}))

    case.run(body())


def test_answers_are_remembered_for_the_last_requests_only(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead()
        old = case.make_write(lead, puts={"a": b""})
        assert await case.store.write(case.deployment, old) == {"a": 1}
        for start in range(1, REPLIES_KEPT, 31):
            await asyncio.gather(*(case.write(lead) for _ in range(min(31, REPLIES_KEPT - start))))
        assert await case.store.write(case.deployment, old) == {"a": 1}
        await case.write(lead)
        assert await case.store.write(case.deployment, old) == {"a": 2}

    case.run(body())


def test_recreated_document_never_repeats_a_version(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead()
        await case.write(lead, puts={"rollout": b"1"})
        await case.write(lead, puts={"rollout": b"2"})
        await case.write(lead, deletes=("rollout", "never-there"))
        assert await case.read("rollout") == {}
        assert await case.write(lead, puts={"rollout": b"3"}, expects={"rollout": 0}) == {"rollout": 3}
        with pytest.raises(ConflictError):
            await case.write(lead, puts={"rollout": b"4"}, expects={"rollout": 1})

    case.run(body())


def test_directory_is_listed_by_number_and_holds_no_other_names(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead()
        numbers = [9, 10, 1, 123456789012, 2]
        await case.write(lead, puts={f"generation/{number}": str(number).encode() for number in numbers})
        await case.write(lead, puts={"generation": b"", "generation/2/note": b"", "generations/3": b""})
        await case.write(lead, puts={"generation/10": b"again"}, deletes=("generation/2",))
        newest = await case.store.list(case.deployment, "generation/", limit=3)
        assert [(name, document.version) for name, document in newest] == [
            ("generation/123456789012", 1),
            ("generation/10", 2),
            ("generation/9", 1),
        ]
        oldest = await case.store.list(case.deployment, "generation/", limit=99, newest_first=False)
        assert [document.value for _, document in oldest] == [b"1", b"9", b"again", b"123456789012"]
        assert await case.store.list(case.deployment, "none/", limit=1) == []

    case.run(body())


def test_journal_keeps_the_newest_entries_in_order(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead()
        entries = [str(number).encode() for number in range(JOURNAL_KEPT + 10)]
        for start in range(0, len(entries), 1000):
            await case.write(lead, journal=tuple(entries[start : start + 1000]))
        assert await case.store.journal(case.deployment, limit=3) == entries[-3:]
        assert await case.store.journal(case.deployment, limit=JOURNAL_KEPT) == entries[-JOURNAL_KEPT:]

    case.run(body())


def test_deployments_are_apart_and_listed_once_led(case: Case) -> None:
    other = DeploymentId(f"{case.deployment}.other")

    async def body() -> None:
        lead = await case.lead("a")
        assert await case.store.read(other, ("latest",)) == {}
        assert other not in await case.store.deployments()
        await case.store.lead(other, owner="b", lease_s=60, floor=41, write_id="w0")
        await case.write(lead, puts={"latest": b"1"})
        assert await case.store.read(other, ("latest",)) == {}
        listed = await case.store.deployments()
        assert listed == sorted(listed)
        assert {case.deployment, other} <= set(listed)

    case.run(body())


def test_of_eight_concurrent_writers_exactly_one_wins_each_round_and_nothing_is_lost(case: Case) -> None:
    """HYGON-AI/vllm-plugin-das#69: eight writers to one map lost entries and failed on each other's temporary file."""
    num_writers, num_rounds = 8, 12

    async def body() -> None:
        lead = await case.lead()

        async def attempt(version: int, writer: int) -> int | None:
            entry = f"{version}:{writer}".encode()
            try:
                new = await case.write(lead, puts={"map": entry}, expects={"map": version}, journal=(entry,))
            except ConflictError:
                return None
            return new["map"]

        winners = []
        for version in range(num_rounds):
            answers = await asyncio.gather(*(attempt(version, writer) for writer in range(num_writers)))
            assert sorted(answer for answer in answers if answer is not None) == [version + 1]
            writer = next(writer for writer, answer in enumerate(answers) if answer is not None)
            winners.append(f"{version}:{writer}".encode())
            assert await case.read("map") == {"map": Document(winners[-1], version + 1)}
        assert await case.store.journal(case.deployment, limit=100) == winners

    case.run(body())


def test_eight_writers_that_retry_on_conflict_all_get_their_entry_in(case: Case) -> None:
    async def body() -> None:
        lead = await case.lead()

        async def append(writer: int) -> None:
            while True:
                document = (await case.read("map")).get("map", Document(b"", 0))
                try:
                    await case.write(lead, puts={"map": document.value + b"%d" % writer}, expects={"map": document.version})
                except ConflictError:
                    continue
                return

        await asyncio.gather(*map(append, range(8)))
        assert sorted((await case.read("map"))["map"].value) == sorted(b"01234567")

    case.run(body())


@pytest.mark.parametrize(
    "write",
    [
        Write(write_id="", epoch=1),
        Write(write_id="w" * 129, epoch=1),
        Write(write_id="w", epoch=0),
        Write(write_id="w", epoch=1 << 31),
        Write(write_id="w", epoch=1, puts={"": b""}),
        Write(write_id="w", epoch=1, puts={"a b": b""}),
        Write(write_id="w", epoch=1, puts={"a\n": b""}),
        Write(write_id="w", epoch=1, puts={"/a": b""}),
        Write(write_id="w", epoch=1, puts={"a" * 201: b""}),
        Write(write_id="w", epoch=1, puts={"a": b""}, deletes=("a",)),
        Write(write_id="w", epoch=1, deletes=("a", "a")),
        Write(write_id="w", epoch=1, expects={"a": -1}),
        Write(write_id="w", epoch=1, puts={"a": bytes(VALUE_BYTES_MAX)}, journal=(b"x",)),
        Write(write_id="w", epoch=1, journal=(b"",) * (JOURNAL_KEPT + 1)),
    ],
    ids=lambda write: f"{write.write_id[:2]}-{write.epoch}-{[*write.puts][:1]}"[:40],
)
def test_unusable_write_is_refused_before_anything_happens(case: Case, write: Write) -> None:
    with pytest.raises(InvalidInputError):
        case.run(case.store.write(case.deployment, write))


def test_unusable_arguments_are_refused_with_a_sentence(case: Case) -> None:
    store, name = case.store, case.deployment
    bad: Sequence[Awaitable[Any]] = [
        store.read(DeploymentId("a/b"), ("x",)),
        store.read(DeploymentId(""), ("x",)),
        store.read(name, ("x",) * 1025),
        store.list(name, "generation", limit=1),
        store.list(name, "generation/", limit=0),
        store.journal(name, limit=JOURNAL_KEPT + 1),
        store.lead(name, owner="", lease_s=1, floor=0, write_id="w"),
        store.lead(name, owner="a\nb", lease_s=1, floor=0, write_id="w"),
        store.lead(name, owner="a", lease_s=float("nan"), floor=0, write_id="w"),
        store.lead(name, owner="a", lease_s=1, floor=-1, write_id="w"),
        store.lead(name, owner="a", lease_s=1, floor=(1 << 31) - 1, write_id="w"),
    ]
    for call in bad:
        with pytest.raises(InvalidInputError):
            case.run(call)


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_answer_as_the_model_in_memory_does(case: Case, seed: int) -> None:
    """Any store against the plain-Python core, request by request, replays and stale epochs included."""
    rng = random.Random(seed)
    model = MemoryStore(lambda: 0.0)
    names = ["latest", "live", "generation/1", "generation/2", "generation/10"]
    past: list[Write] = []

    def next_request() -> Callable[[Store], Awaitable[Any]]:
        kind = rng.choices(["write", "replay", "lead", "renew", "resign", "list"], [60, 10, 6, 4, 2, 8])[0]
        epoch, owner = Epoch(rng.randint(1, 4)), rng.choice("ab")
        held = Leadership(deployment=case.deployment, epoch=epoch, owner=owner, lease_s=1000)
        if kind == "lead":
            floor, write_id = rng.choice([0, 0, 2]), f"l{rng.randrange(10)}"
            return lambda store: store.lead(case.deployment, owner=owner, lease_s=1000, floor=floor, write_id=write_id)
        if kind == "renew":
            return lambda store: store.renew(held)
        if kind == "resign":
            return lambda store: store.resign(held)
        if kind == "list":
            limit, newest = rng.randint(1, 4), rng.random() < 0.5
            return lambda store: store.list(case.deployment, "generation/", limit=limit, newest_first=newest)
        if kind == "replay" and past:
            write = rng.choice(past)
        else:
            deletes = tuple(rng.sample(names, rng.choice([0, 0, 1])))
            puts = {name: rng.randbytes(3) for name in rng.sample(names, rng.randint(0, 3)) if name not in deletes}
            expects = {name: rng.randint(0, 6) for name in rng.sample(names, rng.choice([0, 0, 1, 2]))}
            write = Write(write_id=f"w{len(past)}", epoch=epoch, puts=puts, deletes=deletes, expects=expects, journal=(b"j",))
            past.append(write)
        return lambda store: store.write(case.deployment, write)

    async def outcome(call: Awaitable[Any]) -> object:
        try:
            return await call
        except EplbError as error:
            return type(error), re.sub(r"\d+\.\d+ s left", "some time left", str(error))

    async def body() -> None:
        kinds = set()
        for _ in range(200):
            request = next_request()
            expected = await outcome(request(model))
            assert await outcome(request(case.store)) == expected
            kinds.add(expected[0] if isinstance(expected, tuple) else type(expected))
        assert await case.read(*names) == await model.read(case.deployment, tuple(names))
        assert await case.store.journal(case.deployment, limit=500) == await model.journal(case.deployment, limit=500)
        assert {dict, list, FencedError} <= kinds  # the sequence reached what it is meant to compare

    case.run(body())
