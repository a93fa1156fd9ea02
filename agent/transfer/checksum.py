"""A checksum of one expert's bytes that any device computes the same: where the bytes sit counts, rounding does not.

The packed bytes are read as 64-bit words; word i is multiplied by an odd weight that depends on i, and all are added modulo
2^64. An odd weight is invertible, so a change of a single word, or the exchange of two different words, always shows. Integer
sums do not depend on the order of addition: a CUDA reduction gives what a CPU gives.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from agent.engine.port import SlotTensor
from agent.transfer.staging import ExpertLayout

WORD_BYTES = 8
_STEP = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit number (Knuth's multiplicative hashing)
_CHUNK_WORDS = 1 << 20


def weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd weights of the words [start, start + count). Shape (count,), int64."""
    index = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    mixed = index * _STEP
    mixed = mixed ^ (mixed >> 29)
    return (mixed * _STEP) | 1


def checksum(packed: torch.Tensor) -> torch.Tensor:
    """Checksum of packed bytes, computed on their device, without synchronising it.

    packed: shape (n,), uint8, n a multiple of 8. Returns shape (), int64.

    >>> int(checksum(torch.zeros(16, dtype=torch.uint8)))
    0
    """
    words = packed.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=packed.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        total += (part * weights(start, part.numel(), packed.device)).sum()
    return total


def slot_checksums(layout: ExpertLayout, tensors: Mapping[str, SlotTensor], num_slots: int, scratch: torch.Tensor) -> list[int]:
    """Checksum of every slot's expert as it is now. scratch: at least layout.num_bytes on the weights' device."""
    region = scratch[: layout.num_bytes]
    sums = []
    for slot in range(num_slots):
        layout.pack(tensors, slot, region)
        sums.append(checksum(region))
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []
