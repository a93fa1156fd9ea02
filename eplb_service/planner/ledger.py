"""What is known of a deployment beyond what its ranks say: settings, generations, the last live map, answers given.

The store is the truth; this is the part of it that is kept in memory, so that questions are answered while the store is
away. Numbers survive in memory too: a store that lost its data gets no number twice from a planner that lives on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from eplb_service.errors import BrokenInvariantError, ConflictError, EplbError, InvalidInputError, NotFoundError
from eplb_service.generation import Generation, GenerationState, LiveMap
from eplb_service.generation_codec import (
    decode_generation,
    decode_live_map,
    decode_placement,
    encode_generation,
    encode_live_map,
    encode_placement,
)
from eplb_service.ids import DeploymentId, GenerationNumber
from eplb_service.placement import Placement
from eplb_service.planner import documents
from eplb_service.planner.documents import RequestRecord, RolloutDocument, Settings
from eplb_service.store.base import Store

GENERATIONS_KEPT = 64
"""Generations kept in memory."""
GENERATIONS_STORED = 1000
"""Generations kept in the store, each with its journal; publishing one more lets the oldest go."""
LIST_MAX = 1000
JUMP_MAX = 256
COMMITS_MEAN = 8
"""Generations whose rollouts tell how long the next one takes."""

T = TypeVar("T")

UNFINISHED = frozenset({GenerationState.PUBLISHED, GenerationState.ROLLING_OUT})


@dataclass(frozen=True, slots=True)
class Puts:
    """One write: documents to put, versions that they must have, names to delete."""

    puts: dict[str, bytes]
    expects: dict[str, int] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Previous:
    """What was live when a generation was published, and the load that it was planned for (empty: not known)."""

    generation: GenerationNumber
    placement: Placement
    loads: documents.Loads


class Ledger:
    """The memory of one deployment. Nothing here writes: it says what to write (`Puts`)."""

    def __init__(self, deployment: DeploymentId, store: Store, defaults: Settings) -> None:
        self.settings = defaults
        self.highest = GenerationNumber(0)
        """Highest generation number that was ever given away."""
        self.live: LiveMap | None = None
        """The live map as last known, also while no rank is there to ask."""
        self.loaded: Placement | None = None
        """What the engine loaded by itself, once it was seen."""
        self.learned: bytes | None = None
        """What the deployment taught (`learning.Learning.to_document`), as stored when the lead was taken."""
        self.advised: bytes | None = None
        """Who asks an advised deployment's questions, as stored; None for any other deployment."""
        self.previous: Previous | None = None
        """What was live before the newest generation."""
        self.generations: dict[GenerationNumber, Generation] = {}
        """The newest ones."""
        self._deployment, self._store = deployment, store
        self._request_names: list[str] = []
        self._answers: dict[str, RequestRecord] = {}
        self._is_loaded = False

    @property
    def commit_s(self) -> float:
        """Time that the last few rollouts took, mean; 0 while there was none."""
        took = [self.generations[number].rollout_s for number in sorted(self.generations)[-COMMITS_MEAN:]]
        known = [seconds for seconds in took if seconds > 0]
        return sum(known) / len(known) if known else 0.0

    async def load(self) -> None:
        """Read the store. Raises what it raises, and BrokenInvariantError for documents that cannot be read.

        A store that lost its data does not make us forget: what we knew stays.
        """
        names = (
            documents.SETTINGS,
            documents.LIVE,
            documents.LOADED,
            documents.REQUESTS,
            documents.LEARNED,
            documents.PREVIOUS,
            documents.ADVISED,
        )
        found = await self._store.read(self._deployment, names)
        listed = await self._store.list(self._deployment, documents.GENERATIONS, limit=GENERATIONS_KEPT)
        if documents.SETTINGS in found:
            self.settings = documents.decode(Settings, found[documents.SETTINGS].value, documents.SETTINGS)
        if documents.LIVE in found:
            self.live = _whole(documents.LIVE, found[documents.LIVE].value, decode_live_map)
        if documents.LOADED in found:
            self.loaded = _whole(documents.LOADED, found[documents.LOADED].value, decode_placement)
        if documents.REQUESTS in found:
            self._request_names = documents.decode_requests(found[documents.REQUESTS].value)
        if documents.PREVIOUS in found:
            self.previous = _previous(found[documents.PREVIOUS].value)
        if documents.ADVISED in found:
            self.advised = found[documents.ADVISED].value
        self.learned = found[documents.LEARNED].value if documents.LEARNED in found else None
        for name, document in listed:
            self.keep(_whole(name, document.value, decode_generation))
        self._is_loaded = True

    async def _ensure_loaded(self) -> None:
        """Read the store before the first answer: a planner that has just started knows nothing, which is not "none"."""
        if not self._is_loaded:
            await self.load()

    def keep(self, generation: Generation) -> None:
        """Remember a generation, or what became of it."""
        self.generations[generation.number] = generation
        self.highest = max(self.highest, generation.number)
        while len(self.generations) > GENERATIONS_KEPT:
            del self.generations[min(self.generations)]

    def take_number(self, floor: GenerationNumber) -> GenerationNumber:
        """The next number: above all that were given away and all that ranks ever saw. Never given twice."""
        self.highest = GenerationNumber(1 + max(self.highest, floor))
        return self.highest

    def unfinished(self) -> Generation | None:
        """The newest generation, when its rollout did not end."""
        newest = self.generations.get(max(self.generations, default=GenerationNumber(0)))
        return newest if newest is not None and newest.state in UNFINISHED else None

    async def generation(self, number: int) -> Generation:
        """One generation. Raises NotFoundError naming the highest, and what the store raises for those not in memory."""
        await self._ensure_loaded()
        known = self.generations.get(GenerationNumber(number))
        if known is not None:
            return known
        if 1 <= number <= self.highest:
            name = documents.generation_name(number)
            found = await self._store.read(self._deployment, (name,))
            if name in found:
                return decode_generation(found[name].value)
        newest = f" the newest is {self.highest}" if self.highest else " none was published yet"
        kept = f", and the last {GENERATIONS_STORED} are kept" if 1 <= number <= self.highest - GENERATIONS_STORED else ""
        raise NotFoundError(f"deployment {self._deployment} has no generation {number};{newest}{kept}")

    async def newest(self, limit: int) -> list[Generation]:
        """Generations, newest first. Raises InvalidInputError for a limit above LIST_MAX."""
        if not 1 <= limit <= LIST_MAX:
            raise InvalidInputError(f"limit {limit} is out of range: use 1 to {LIST_MAX}")
        await self._ensure_loaded()
        kept = [self.generations[number] for number in sorted(self.generations, reverse=True)]
        oldest = kept[-1].number if kept else 1
        if limit > len(kept) and oldest > 1:
            listed = await self._store.list(self._deployment, documents.GENERATIONS, limit=limit)
            older = [decode_generation(document.value) for name, document in listed if _number(name) < oldest]
            kept += older
        return kept[:limit]

    async def answer_to(self, key: str, asked: str) -> RequestRecord | None:
        """What was answered to this key. Raises ConflictError when something else was asked with it."""
        name = documents.request_name(key)
        record = self._answers.get(key)
        if record is None:
            found = await self._store.read(self._deployment, (name,))
            if name not in found:
                return None
            record = documents.decode(RequestRecord, found[name].value, name)
        if record.key == key and record.asked != asked:
            raise ConflictError(f"idempotency key {key!r} was used before to {record.asked}, now to {asked}: use another key")
        return record

    def settings_puts(self, settings: Settings) -> Puts:
        """To change the settings."""
        return Puts({documents.SETTINGS: documents.encode(settings)})

    def request_puts(self, record: RequestRecord) -> Puts:
        """To remember an answer; the oldest beyond REQUESTS_KEPT go."""
        name = documents.request_name(record.key)
        names = [known for known in self._request_names if known != name] + [name]
        dropped = tuple(names[: -documents.REQUESTS_KEPT])
        kept = names[-documents.REQUESTS_KEPT :]
        return Puts({name: documents.encode(record), documents.REQUESTS: documents.encode_requests(kept)}, {}, dropped)

    def remember(self, record: RequestRecord) -> None:
        """An answer was stored."""
        name = documents.request_name(record.key)
        self._request_names = ([known for known in self._request_names if known != name] + [name])[-documents.REQUESTS_KEPT :]
        self._answers[record.key] = record
        while len(self._answers) > documents.REQUESTS_KEPT:
            del self._answers[next(iter(self._answers))]

    def publish_puts(self, generation: Generation, record: RequestRecord | None, previous: Previous | None = None) -> Puts:
        """To publish a generation once, together with the answer to whoever asked for it and what is live now."""
        name = documents.generation_name(generation.number)
        request = self.request_puts(record) if record is not None else Puts({})
        puts = {name: encode_generation(generation), **request.puts}
        if previous is not None:
            puts[documents.PREVIOUS] = documents.encode_previous(
                previous.generation, encode_placement(previous.placement), previous.loads
            )
        return Puts(puts, {name: 0}, (*request.deletes, *self._outlived(generation.number)))

    def _outlived(self, number: GenerationNumber) -> tuple[str, ...]:
        """Names that go when this generation is published: those so much older, with their journals.

        Numbers may jump (ranks saw higher ones than a store that lost its data): then only one goes, as if they had not.
        """
        before = max(self.generations, default=number - 1)
        last = number if number - before <= JUMP_MAX else before + 1
        gone = range(max(1, before + 1 - GENERATIONS_STORED), last + 1 - GENERATIONS_STORED)
        return tuple(name(old) for old in gone for name in (documents.generation_name, documents.events_name))

    def generation_puts(self, generation: Generation) -> dict[str, bytes]:
        """To store what became of a generation."""
        return {documents.generation_name(generation.number): encode_generation(generation)}

    def live_puts(self, live: LiveMap) -> dict[str, bytes]:
        """To store the live map, and the loaded placement when this shows it."""
        self.live = live
        puts = {documents.LIVE: encode_live_map(live)}
        if live.newest_generation == 0 and self.loaded != live.placement:
            self.loaded = live.placement
            puts[documents.LOADED] = encode_placement(live.placement)
        return puts

    def rollout_puts(self, document: RolloutDocument) -> dict[str, bytes]:
        """To store which rollout was begun, or how it ended."""
        return {documents.ROLLOUT: documents.encode(document)}


def _whole(name: str, data: bytes, decode: Callable[[bytes], T]) -> T:
    """A document that is not done without. Raises BrokenInvariantError naming it and what to do."""
    try:
        return decode(data)
    except EplbError as error:
        raise BrokenInvariantError(
            f"document {name!r} in the store is damaged ({error}): restore it, or remove it from the store and lose what it"
            " says; until then nothing is planned and ranks serve what they route by"
        ) from None


def _previous(data: bytes) -> Previous | None:
    """What the document says; None when it is damaged: that costs a comparison, and must not cost the lead."""
    try:
        number, placement, loads = documents.decode_previous(data)
        return Previous(GenerationNumber(number), decode_placement(placement), loads)
    except EplbError:
        return None


def _number(name: str) -> int:
    return int(name.rpartition("/")[2])
