"""The loads of a window as plans and scores need them: by table, under the group's dispatch, by source rank."""

from __future__ import annotations

import numpy as np

from eplb_service.dispatch import Dispatch, imbalance_of, rank_loads
from eplb_service.errors import InvalidInputError, UnsupportedError
from eplb_service.imbalance import Float64Array, Imbalance
from eplb_service.membership.machine import Group
from eplb_service.placement import Placement, Table
from eplb_service.window.report import CombinedTable, CombinedWindow, TableShape


def dispatch_of(group: Group) -> Dispatch:
    """How the group's engine picks a replica. Raises UnsupportedError for a word that this release does not know."""
    word = group.registrations[0].dispatch
    try:
        return Dispatch(word)
    except ValueError:
        known = ", ".join(dispatch.value for dispatch in Dispatch)
        raise UnsupportedError(f"the engine dispatches by {word[:40]!r}; this planner knows {known}") from None


def shapes_of(group: Group) -> tuple[TableShape, ...]:
    """What reports of the group must count."""
    return tuple(TableShape(model=t.model, layer_ids=t.layer_ids, num_logical=t.num_logical) for t in group.tables)


def loads_of(window: CombinedWindow, table: Table) -> CombinedTable:
    """The counts of a table. Raises InvalidInputError when the window holds none."""
    for counted in window.tables:
        if (counted.shape.model, counted.shape.layer_ids) == (table.model, table.layer_ids):
            return counted
    raise InvalidInputError(f"the load window has no counts of model {table.model!r}, layers {list(table.layer_ids)}")


def source_loads_of(counted: CombinedTable, window: CombinedWindow, group: Group, dispatch: Dispatch) -> Float64Array | None:
    """Tokens that each rank sent, shape (L, R, E), in column order of the group; a rank that did not report sent none.

    None where that is of no use (rank loads depend on it under nearest dispatch only) or not known: see `sources_for_plans`.
    """
    return sources_for_plans(counted, window, group) if dispatch is Dispatch.NEAREST else None


def sources_for_plans(counted: CombinedTable, window: CombinedWindow, group: Group) -> Float64Array | None:
    """The same for policies, which also price hops by it. Shape (L, R, E).

    None where it is not known: every rank counts all tokens, or some windows are of ranks that are not of the group any more.
    """
    if not window.sources:
        return None
    position = {rank: column for column, rank in enumerate(group.rank_ids)}
    if any(rank not in position for rank in window.sources):
        return None
    num_layers, num_logical = counted.loads.shape[1:]
    sources = np.zeros((num_layers, len(group.rank_ids), num_logical))
    for row, rank in enumerate(window.sources):
        sources[:, position[rank], :] = counted.source_loads[row]
    return sources


def imbalance_under(window: CombinedWindow, placement: Placement, group: Group) -> Imbalance:
    """Imbalance of a placement under the loads of a window, over all layers in table order."""
    dispatch = dispatch_of(group)
    layers: list[float] = []
    for table in placement.tables:
        counted = loads_of(window, table)
        sources = source_loads_of(counted, window, group, dispatch)
        layers.extend(imbalance_of(counted.loads.sum(axis=0), table, group.topology, dispatch, sources).per_layer)
    return Imbalance(tuple(layers))


def rank_loads_under(window: CombinedWindow, placement: Placement, group: Group) -> list[Float64Array]:
    """Tokens that each rank receives: an array of shape (L, R) for each table."""
    dispatch = dispatch_of(group)
    found = []
    for table in placement.tables:
        counted = loads_of(window, table)
        sources = source_loads_of(counted, window, group, dispatch)
        found.append(rank_loads(counted.loads.sum(axis=0), table, group.topology, dispatch, sources))
    return found
