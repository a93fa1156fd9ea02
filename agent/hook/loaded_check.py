"""Was every slot loaded with what its map says? Replicas of one expert must be equal to the last byte, on all ranks.

A loader that fills only the slots that it thinks of as its own leaves redundant ones as they were allocated: the engine then
serves garbage for a part of its tokens, without an error (vllm#37322). Moved on, it would become the only copy. So ranks
compare what they loaded before anything may be moved; what differs leaves them observe-only, with the slots in the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.hook.stage_check import RankShape
from agent.transfer.backup import KnownChecksums
from agent.transfer.gloo import Store, said_by
from eplb_service.errors import ConflictError
from eplb_service.ids import LayerRef

Rows = Mapping[LayerRef, Sequence[int]]
Checksums = Mapping[LayerRef, Sequence[int]]

SLOTS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class KnownExperts:
    """Checksums of all experts of the model as ranks loaded them: what a backup must equal. They outlive every copy.

    weights_version: that they are of. checksums: by layer and expert; empty = nobody knows.
    """

    weights_version: int = 0
    checksums: KnownChecksums = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hex; empty when nothing is known."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest() if self.checksums else ""

    def of(self, weights_version: int) -> KnownExperts:
        """The same for the weights that they are of; for others nothing is known."""
        return self if self.weights_version == weights_version else KnownExperts(weights_version)

    def to_json(self) -> str:
        """As ranks tell it to one that joins."""
        layers = [[layer.model, layer.layer_id, sorted(self.checksums[layer].items())] for layer in sorted(self.checksums)]
        return json.dumps([self.weights_version, layers], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KnownExperts:
        """The way back."""
        version, layers = json.loads(text)
        return cls(version, {LayerRef(model, layer_id): dict(pairs) for model, layer_id, pairs in layers})


def check_loaded_slots(
    store: Store | None, shape: RankShape, rows: Rows, checksums: Checksums, timeout_s: float
) -> KnownChecksums:
    """Compare all replicas of all experts as they were loaded; all ranks of the group come to the same result.

    Returns the checksum of every expert, by layer.

    rows: what each layer's slots hold, by layer. checksums: of this rank's slots. store: of the group; None = it has one rank.
    Raises ConflictError naming the slots, DeadlineError when a rank does not come.
    """
    by_rank: dict[int, Mapping[str, Sequence[int]]] = {}
    mine = {str(layer): list(sums) for layer, sums in checksums.items()}
    if store is None:
        by_rank[shape.rank_id] = mine
    else:
        store.set(f"loaded/{shape.rank_id}", json.dumps(mine))
        for rank in shape.group_rank_ids:
            silent = f"rank {rank} did not say within {timeout_s:g} s what it loaded"
            by_rank[rank] = json.loads(said_by(store, f"loaded/{rank}", timeout_s, silent))
    problem = unequal_replicas(shape.group_rank_ids, rows, by_rank)
    if problem:
        raise ConflictError(problem)
    return _known(shape.group_rank_ids, rows, by_rank)


def _known(ranks: Sequence[int], rows: Rows, by_rank: Mapping[int, Mapping[str, Sequence[int]]]) -> KnownChecksums:
    """Of each expert that a slot holds; all its replicas are equal."""
    known: dict[LayerRef, dict[int, int]] = {}
    for layer, row in rows.items():
        sums = [value for rank in ranks for value in by_rank[rank][str(layer)]]
        known[layer] = {expert: value for expert, value in zip(row, sums, strict=True) if expert >= 0}
    return known


def unequal_replicas(ranks: Sequence[int], rows: Rows, by_rank: Mapping[int, Mapping[str, Sequence[int]]]) -> str:
    """Which slots hold other weights than most replicas of their expert, one sentence; empty = none.

    by_rank: checksums of each rank's slots, by layer. An expert with one replica has nothing to be compared with.
    """
    odd: list[str] = []
    for layer in sorted(rows):
        held: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        entries = iter(rows[layer])
        for rank in ranks:
            for slot, value in enumerate(by_rank[rank][str(layer)]):
                expert = next(entries)
                if expert >= 0:
                    held[expert].append((f"rank {rank} slot {slot}", value))
        for expert, replicas in sorted(held.items()):
            usual = Counter(value for _, value in replicas).most_common(1)[0]
            if usual[1] < len(replicas):
                others = [where for where, value in replicas if value != usual[0]]
                first = next(where for where, value in replicas if value == usual[0])
                odd.append(f"layer {layer} expert {expert}: {', '.join(others[:SLOTS_SHOWN])} unlike {first}")
    if not odd:
        return ""
    more = f" and {len(odd) - SLOTS_SHOWN} more experts" if len(odd) > SLOTS_SHOWN else ""
    return (
        f"replicas do not hold the same weights ({'; '.join(odd[:SLOTS_SHOWN])}{more}): the engine has to load every slot that"
        " its map names, redundant ones too"
    )
