"""Is an answer one that the engine can go to? Believes nothing that the planner says. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.advice import Advice, map_digest

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """What an engine asks of a map.

    num_logical: experts of each layer. nodes: of each rank in column order, length R.
    num_groups: expert groups that stay on one node each; 1 = none.
    replicas_max: width of the engine's table of an expert's replicas.
    distinct_on_rank: a rank may hold an expert once only (SGLang's loader fills the first of two slots alone).
    """

    num_logical: int
    nodes: tuple[str, ...]
    num_groups: int = 1
    replicas_max: int
    distinct_on_rank: bool = False


def check_answer(answer: Advice, current: IntArray, rules: EngineRules) -> str:
    """Why an answer to a question about `current`, shape (L, P), cannot be used, in one sentence; empty = it can.

    >>> rules = EngineRules(num_logical=2, nodes=("a", "a"), replicas_max=4)
    >>> now = np.array([[0, 1, 0, 1]], np.int32)
    >>> lost = np.array([[0, 0, 0, 0]], np.int32)
    >>> digest = map_digest(lost)
    >>> check_answer(Advice(origin=1, sequence=1, move=True, generation=3, digest=digest, reason="", rows=lost), now, rules)
    'layer row 0 holds no copy of expert 1'
    """
    if not 0 <= answer.generation < 1 << 63:
        return f"its generation is {answer.generation}"
    if not answer.move:
        if answer.digest != map_digest(current):
            return f"it keeps a map with digest {answer.digest:#x}; this engine routes by {map_digest(current):#x}"
        return ""
    if answer.rows is None:
        return "it moves to a map that it does not have"
    if answer.rows.dtype != np.int32:
        return f"its map is of {answer.rows.dtype}, not of int32"
    problem = check_rows(answer.rows, current, rules)
    if not problem and answer.digest != map_digest(answer.rows):
        return f"the digest of its map is {map_digest(answer.rows):#x}, not {answer.digest:#x} as it says"
    return problem


def check_rows(rows: IntArray, current: IntArray, rules: EngineRules) -> str:
    """Why the engine cannot go from one map to another, both of shape (L, P); empty = it can.

    What only concerns speed or the engine's loader (groups, two copies on a rank) is asked of changed rows alone: the engine
    already serves by the others.
    """
    if rows.shape != current.shape:
        return f"its map has shape {rows.shape}; this engine's has {current.shape}"
    num_ranks = len(rules.nodes)
    num_physical = rows.shape[1]
    if num_ranks == 0 or num_physical % num_ranks:
        return f"{num_physical} slots do not divide by {num_ranks} ranks"
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < rules.num_logical:
        layer, slot = np.argwhere((rows < 0) | (rows >= rules.num_logical))[0]
        return f"layer row {layer} slot {slot} holds {rows[layer, slot]}; experts are 0 to {rules.num_logical - 1}"
    counts = replica_counts(rows, rules.num_logical)
    if rows.size and int(counts.min()) == 0:
        layer, expert = np.argwhere(counts == 0)[0]
        return f"layer row {layer} holds no copy of expert {expert}"
    if rows.size and int(counts.max()) > rules.replicas_max:
        layer, expert = np.argwhere(counts > rules.replicas_max)[0]
        return (
            f"layer row {layer} holds {counts[layer, expert]} copies of expert {expert};"
            f" the engine's table has room for {rules.replicas_max}"
        )
    changed = np.flatnonzero((rows != current).any(axis=1))
    by_rank = rows[changed].reshape(len(changed), num_ranks, num_physical // num_ranks)
    if rules.distinct_on_rank:
        problem = _check_distinct(by_rank, changed)
        if problem:
            return problem
    return _check_groups(by_rank, changed, rules) if rules.num_groups > 1 else ""


def replica_counts(rows: IntArray, num_logical: int) -> npt.NDArray[np.int64]:
    """Copies of each expert. Rows: shape (L, P), ids 0..E-1. Shape (L, E)."""
    num_layers = rows.shape[0]
    flat = (np.arange(num_layers)[:, None] * num_logical + rows.astype(np.int64)).reshape(-1)
    return np.bincount(flat, minlength=num_layers * num_logical).reshape(num_layers, num_logical).astype(np.int64)


def _check_distinct(by_rank: IntArray, layers: npt.NDArray[np.int64]) -> str:
    held = np.sort(by_rank, axis=2)
    twice = held[:, :, 1:] == held[:, :, :-1]
    if not twice.any():
        return ""
    row, rank, slot = np.argwhere(twice)[0]
    return f"layer row {layers[row]} holds expert {held[row, rank, slot]} twice on rank {rank}; this engine would load one"


def _check_groups(by_rank: IntArray, layers: npt.NDArray[np.int64], rules: EngineRules) -> str:
    names = sorted(set(rules.nodes))
    node_of_rank = np.array([names.index(node) for node in rules.nodes])
    group_size = -(-rules.num_logical // rules.num_groups)
    on_node = np.zeros((len(layers), rules.num_groups, len(names)), dtype=bool)
    groups = by_rank // group_size
    rows = np.broadcast_to(np.arange(len(layers))[:, None, None], groups.shape)
    on_node[rows, groups, np.broadcast_to(node_of_rank[None, :, None], groups.shape)] = True
    spread = on_node.sum(axis=2)
    if not (spread > 1).any():
        return ""
    row, group = np.argwhere(spread > 1)[0]
    return f"layer row {layers[row]} spreads expert group {group} over {spread[row, group]} nodes; this engine keeps it on one"
