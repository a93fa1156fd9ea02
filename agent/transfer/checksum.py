"""A checksum of one expert's bytes that any device computes the same: where the bytes sit counts, rounding does not.

The packed bytes are read as 64-bit words; word i is combined with a key that depends on i and mixed, and all are added modulo
2^64. The mixing is invertible, so a change of a single word always shows; what else changes shows as a random number would
(a weighted sum would not see words exchanged that differ in their highest bit alone: the sign of a bf16). Integer sums do not
depend on the order of addition: a CUDA reduction gives what a CPU gives.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from agent.engine.port import SlotTensor
from agent.transfer.staging import ExpertLayout

WORD_BYTES = 8
_STEP = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit number (Knuth's multiplicative hashing)
_MIX = -4417276706812531889  # an odd multiplier without structure (xxHash's second prime), signed
_CHUNK_WORDS = 1 << 20


def _fold(words: torch.Tensor, bits: int) -> torch.Tensor:
    """XOR in place with itself shifted right, zeros coming in: invertible, as is multiplying by an odd number."""
    return words.bitwise_xor_((words >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def mixed(words: torch.Tensor, start: int) -> torch.Tensor:
    """The words [start, …) of something, each mixed with its position. Shape (n,), int64."""
    index = torch.arange(start + 1, start + words.numel() + 1, dtype=torch.int64, device=words.device)
    keyed = index.mul_(_STEP).bitwise_xor_(words)
    return _fold(_fold(keyed.mul_(_MIX), 32).mul_(_STEP), 29)


def checksum(packed: torch.Tensor) -> torch.Tensor:
    """Checksum of packed bytes, computed on their device, without synchronising it.

    packed: shape (n,), uint8, n a multiple of 8. Returns shape (), int64.

    >>> a, b = torch.tensor([1, 2]), torch.tensor([2, 1])
    >>> int(checksum(a.view(torch.uint8))) == int(checksum(b.view(torch.uint8)))
    False
    """
    words = packed.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=packed.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        total += mixed(part, start).sum()
    return total


def slot_checksums(layout: ExpertLayout, tensors: Mapping[str, SlotTensor], num_slots: int, scratch: torch.Tensor) -> list[int]:
    """Checksum of every slot's expert as it is now. scratch: at least layout.num_bytes on the weights' device."""
    region = scratch[: layout.num_bytes]
    sums = []
    for slot in range(num_slots):
        layout.pack(tensors, slot, region)
        sums.append(checksum(region))
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []
