"""The journals of a deployment's rollouts: one is open while a generation is under way, others are read from the store.

Nothing here writes: every event gives what is to be written behind.
"""

from __future__ import annotations

from eplb_service.errors import BrokenInvariantError, NotFoundError
from eplb_service.ids import DeploymentId, Epoch, GenerationNumber
from eplb_service.planner import documents
from eplb_service.rollout.journal import Journal, JournalEvent
from eplb_service.rollout.journal_codec import decode_journal, encode_journal
from eplb_service.store.base import Store

Puts = dict[str, bytes]


class Journals:
    """The journal that is being written, and access to those that were."""

    def __init__(self, deployment: DeploymentId, store: Store) -> None:
        self._deployment, self._store = deployment, store
        self._journal: Journal | None = None
        self._is_open = False

    def begin(self, generation: GenerationNumber) -> None:
        """A generation was published: from now on what happens belongs to its journal."""
        self._journal, self._is_open = Journal(generation=generation), True

    async def take_up(self, generation: GenerationNumber | None, epoch: Epoch) -> None:
        """A leadership begins. generation: what the one before did not finish, to be gone on with.

        Raises what the store raises. A journal that cannot be read is begun anew, and says so.
        """
        self.forget()
        if generation is None:
            return
        try:
            found = await self._read(generation)
        except BrokenInvariantError as error:
            journal = Journal(generation=generation).with_gap(str(error))
        else:
            journal = (found or Journal(generation=generation)).taken_up(epoch)
        self._journal, self._is_open = journal, True

    def note(self, event: JournalEvent) -> Puts:
        """Something happened: what to write; empty while no generation is under way."""
        if self._journal is None or not self._is_open:
            return {}
        self._journal = self._journal.with_event(event)
        return {documents.events_name(self._journal.generation): encode_journal(self._journal)}

    def end(self) -> None:
        """The generation is no more under way."""
        self._is_open = False

    def forget(self) -> None:
        """The lead ended: who leads next writes on, and the store knows."""
        self._journal, self._is_open = None, False

    async def of(self, generation: GenerationNumber) -> Journal:
        """The journal of a generation. Raises NotFoundError, what the store raises, and BrokenInvariantError."""
        if self._journal is not None and self._journal.generation == generation:
            return self._journal
        journal = await self._read(generation)
        if journal is None:
            raise NotFoundError(
                f"generation {generation} of {self._deployment} has no journal: it was rolled out before journals were kept,"
                " or the store lost it"
            )
        return journal

    async def _read(self, generation: GenerationNumber) -> Journal | None:
        name = documents.events_name(generation)
        found = await self._store.read(self._deployment, (name,))
        return decode_journal(found[name].value, generation) if name in found else None
