"""The journal of a generation as bytes for the store: JSON, what is absent left out."""

from __future__ import annotations

import json
import math
from typing import Any

from eplb_service.errors import BrokenInvariantError
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, RankId
from eplb_service.rollout.journal import Journal, JournalEvent


def encode_journal(journal: Journal) -> bytes:
    """See `decode_journal`."""
    tree = {
        "generation": journal.generation,
        "events": [_event_to_tree(event) for event in journal.events],
        "dropped": journal.num_dropped,
        "gaps": list(journal.gaps),
    }
    return json.dumps(tree, separators=(",", ":")).encode()


def decode_journal(data: bytes, generation: GenerationNumber) -> Journal:
    """The journal of this generation. Raises BrokenInvariantError when the bytes are none, or that of another one."""
    try:
        tree = json.loads(data)
        journal = Journal(
            generation=GenerationNumber(_whole(tree["generation"])),
            events=tuple(_event_from_tree(part) for part in tree["events"]),
            num_dropped=_whole(tree["dropped"]),
            gaps=tuple(str(gap) for gap in tree["gaps"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenInvariantError(f"the journal of generation {generation} cannot be read ({error}): {data[:80]!r}") from None
    if journal.generation != generation:
        raise BrokenInvariantError(f"the journal of generation {generation} is that of generation {journal.generation}")
    return journal


def _event_to_tree(event: JournalEvent) -> dict[str, Any]:
    tree: dict[str, Any] = {"at": event.at_s, "epoch": event.epoch, "event": event.event, "text": event.text}
    if event.chunk_id is not None:
        tree["chunk"] = event.chunk_id
    if event.rank_id is not None:
        tree["rank"] = event.rank_id
    return tree


def _event_from_tree(tree: Any) -> JournalEvent:
    chunk, rank = tree.get("chunk"), tree.get("rank")
    return JournalEvent(
        at_s=_seconds(tree["at"]),
        epoch=Epoch(_whole(tree["epoch"])),
        event=str(tree["event"]),
        text=str(tree["text"]),
        chunk_id=None if chunk is None else ChunkId(_whole(chunk)),
        rank_id=None if rank is None else RankId(_whole(rank)),
    )


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} is no time")
    return seconds


def _whole(value: Any) -> int:
    """An integer that every reader of the wire takes."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is no number of 0 to 2^63-1")
    return value
