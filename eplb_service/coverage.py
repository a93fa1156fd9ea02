"""Experts that live on no rank: a token that chooses one cannot be served as the model has it (invariant 3 is broken).

That is what is left where a group formed again without the ranks that alone held them: there is nothing to copy from. They come
back from backups, where ranks have some (`planner.restoring`), else with ranks that load them from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from eplb_service.ids import LayerRef
from eplb_service.placement import Placement

LAYERS_SHOWN = 3
EXPERTS_SHOWN = 8

RESTART = "restart the ranks, so that they load them from the checkpoint"
"""What is left to do where nobody has a backup."""


def unreachable(placement: Placement) -> Mapping[LayerRef, tuple[int, ...]]:
    """Experts without a slot, ascending, of each layer that has some."""
    found: dict[LayerRef, list[int]] = {}
    for table in placement.tables:
        for layer, expert in table.uncovered():
            found.setdefault(layer, []).append(expert)
    return {layer: tuple(experts) for layer, experts in found.items()}


def why_uncovered(lost: Mapping[LayerRef, tuple[int, ...]], then: str = RESTART) -> str:
    """A sentence for people that names the first ones; empty when there are none. then: what is done about it, or to be done.

    >>> why_uncovered({LayerRef("m", 3): (4, 5)})
    '2 experts live on no rank (layer m/3: 4, 5): restart the ranks, so that they load them from the checkpoint'
    """
    if not lost:
        return ""
    total = sum(len(experts) for experts in lost.values())
    shown = [f"layer {layer}: {_first(experts)}" for layer, experts in list(lost.items())[:LAYERS_SHOWN]]
    more = f"; and {len(lost) - LAYERS_SHOWN} more layers" if len(lost) > LAYERS_SHOWN else ""
    return f"{total} experts live on no rank ({'; '.join(shown)}{more}): {then}"


def _first(experts: tuple[int, ...]) -> str:
    more = f" and {len(experts) - EXPERTS_SHOWN} more" if len(experts) > EXPERTS_SHOWN else ""
    return ", ".join(map(str, experts[:EXPERTS_SHOWN])) + more
