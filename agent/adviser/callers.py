"""Who calls the policy, and what it has in hand: all that an engine does not tell its policy is looked at there.

How large an expert is, is read from the weights of the model whose map is asked about. Where they are not there, or are
something else than we know, the size is not known, and nobody guesses one from a model's configuration: quantised weights come
with scales, and padded ones are larger than they need to be.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

OWN = "agent."
FRAMES_MAX = 12
"""Callers that are looked at: engines wrap hooks, and a step of an engine is many frames deep."""


def calling_frame() -> FrameType | None:
    """The engine's own code nearest to us; None = nobody of an engine called."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(OWN):
        frame = frame.f_back
    return frame


def variable_of_caller(*names: str) -> Any:
    """The first of these variables that the engine's own code nearest to us has; None = it has none."""
    frame = calling_frame()
    found = None if frame is None else frame.f_locals
    return next((found[name] for name in names if found is not None and found.get(name) is not None), None)


def method_of_class(class_name: str) -> tuple[Any, FrameType] | None:
    """The nearest method of this class among our callers: its object, and where it runs; None = there is none."""
    frame = inspect.currentframe()
    for _ in range(FRAMES_MAX):
        if frame is None:
            return None
        caller = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if type(caller).__name__ == class_name:
            return caller, frame
        frame = frame.f_back
    return None


def bytes_of_experts(weights: Mapping[int, Sequence[Any]], layers: Sequence[int]) -> tuple[int, ...]:
    """Bytes of one expert of each layer; empty = not known.

    weights: row of a map → all tensors of its experts on this rank, whose first axis are its slots. layers: the rows that are
    asked about; one without weights, or with tensors of different numbers of slots, makes the rest worth nothing.

    >>> import numpy as np
    >>> bytes_of_experts({3: [np.zeros((2, 10), np.int8), np.zeros((2, 1), np.float32)]}, [3])
    (14,)
    """
    sizes = []
    for layer in layers:
        tensors = [tensor for tensor in weights.get(layer, ()) if tensor.nbytes]
        if len({int(tensor.shape[0]) for tensor in tensors}) != 1:
            return ()
        sizes.append(sum(int(tensor.nbytes) // int(tensor.shape[0]) for tensor in tensors))
    return tuple(sizes)
