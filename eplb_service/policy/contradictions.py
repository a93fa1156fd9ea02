"""Constraints that cannot both be met, found before any search and told in pairs: which two, where, and what to change.

These checks are arithmetic. Whether what is left can be met together is decided exactly by `feasibility.check_feasible`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.base import FailureDomain, PlanningProblem

if TYPE_CHECKING:
    from eplb_service.policy.limits import Limits

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


def check_constraints(problem: PlanningProblem, limits: Limits) -> None:
    """Raises InvalidInputError naming two constraints that contradict one another, with the numbers and what to change."""
    _check_groups_divide(problem)
    if limits.protected is not None:
        _check_resilience(problem, limits, limits.protected)
    if limits.pins.size:
        _check_pins(problem, limits)
    if limits.bars.size:
        _check_bars(problem, limits)
    if has_strict_groups(problem):
        _check_strict_groups(problem, limits)
        _check_pins_of_groups(problem, limits)
    if limits.pins.size and limits.protected is not None:
        _check_pins_beside_protection(problem, limits, limits.protected)
    if not problem.from_nothing:
        _check_move_limits(problem, limits)


def has_strict_groups(problem: PlanningProblem) -> bool:
    """Whether every expert group must be on one node."""
    constraints = problem.constraints
    return constraints.num_groups is not None and constraints.num_groups > 1 and constraints.group_price is None


def _layers(problem: PlanningProblem, positions: Int64Array) -> str:
    """`layer 4`, `layers 3, 9` or `all 58 layers`."""
    ids = [problem.current.layer_ids[position] for position in np.unique(positions).tolist()]
    if len(ids) == 1:
        return f"layer {ids[0]}"
    if len(ids) == problem.current.num_layers:
        return f"all {len(ids)} layers"
    return f"layers {', '.join(str(layer) for layer in ids[:5])}{f' and {len(ids) - 5} more' if len(ids) > 5 else ''}"


def _check_resilience(problem: PlanningProblem, limits: Limits, protected: BoolArray) -> None:
    """Domains, replicas and slots enough for two copies of what must outlive one domain."""
    resilience = problem.constraints.resilience
    word = "rank" if resilience is None else resilience.domain.value
    num_logical, num_protected = problem.current.num_logical, int(protected[0].sum())
    serving = np.unique(limits.domain_of[limits.room > 0])
    if serving.size < 2:
        raise InvalidInputError(
            f"resilience by {word} needs at least two {word}s that serve; there is {serving.size}"
            f" ({problem.topology.num_ranks} ranks on {problem.topology.num_nodes} nodes, {len(problem.topology.dead)} dead);"
            f" {'protect against the loss of a rank, ' if word == 'node' else ''}add {word}s or plan without resilience"
        )
    if limits.copies_max < 2:
        raise InvalidInputError(
            f"resilience needs two replicas of {num_protected} experts a layer but max_replicas is"
            f" {problem.constraints.max_replicas}; raise max_replicas to 2 or plan without resilience"
        )
    if word == FailureDomain.NODE and has_strict_groups(problem):
        raise InvalidInputError(
            f"resilience by node wants experts on two nodes but {problem.constraints.num_groups} strict groups keep each expert"
            f" on one; give groups a price (soft), plan without groups, or protect against the loss of a rank"
        )
    needed = num_logical + num_protected
    if needed > limits.num_slots:
        most = max(0, limits.num_slots - num_logical) / num_logical
        ranks = int((limits.room > 0).sum())
        raise InvalidInputError(
            f"resilience of {num_protected} of {num_logical} experts needs {needed} usable slots, there are {limits.num_slots};"
            f" protect a share of at most {np.floor(most * 1e6) / 1e6:g}, or use at least {-(-needed // ranks)} slots a rank"
        )
    room = np.bincount(limits.domain_of, weights=limits.room).astype(np.int64)
    largest = int(room.argmax())
    elsewhere = int(np.minimum(np.delete(room, largest), num_protected).sum())
    if elsewhere < num_protected:
        name = problem.topology.node_names[largest] if word == "node" else problem.topology.rank_ids[largest]
        raise InvalidInputError(
            f"resilience wants a copy of {num_protected} experts outside {word} {name!r}, where there are {elsewhere} usable"
            f" slots for them; protect a share of at most {elsewhere / num_logical:g}, or add slots there"
        )


def _check_pins(problem: PlanningProblem, limits: Limits) -> None:
    """Pins to ranks that can hold them, not barred, not more than there is room for."""
    rank_ids, dead = problem.topology.rank_ids, problem.topology.dead
    layer, rank, expert = limits.pins.T
    for index in np.flatnonzero(limits.room[rank] == 0)[:1].tolist():
        name = rank_ids[rank[index]]
        same = layer[(rank == rank[index]) & (expert == expert[index])]
        why = "is dead; bring the rank back" if name in dead else "has no usable slot; free one"
        raise InvalidInputError(
            f"expert {expert[index]} is pinned to rank {name}, which {why} or unpin the expert: {_layers(problem, same)}"
        )
    barred = {tuple(triple) for triple in limits.bars.tolist()}
    both = np.array([tuple(triple) in barred for triple in limits.pins.tolist()], np.bool_)
    if both.any():
        first = limits.pins[both][0]
        same = layer[both & (rank == first[1]) & (expert == first[2])]
        raise InvalidInputError(
            f"expert {first[2]} is pinned to rank {rank_ids[first[1]]} and barred from it; drop one: {_layers(problem, same)}"
        )
    pins_on = np.zeros((problem.current.num_layers, limits.room.size), np.int64)
    np.add.at(pins_on, (layer, rank), 1)
    over = np.argwhere(pins_on > limits.room)
    if over.size:
        where, position = over[0].tolist()
        raise InvalidInputError(
            f"{pins_on[where, position]} experts are pinned to rank {rank_ids[position]} in layer"
            f" {problem.current.layer_ids[where]}, which has {limits.room[position]} usable slots; pin fewer or free slots"
        )
    pins_of = np.zeros((problem.current.num_layers, problem.current.num_logical), np.int64)
    np.add.at(pins_of, (layer, expert), 1)
    over = np.argwhere(pins_of > limits.copies_max)
    if over.size:
        where, name = over[0].tolist()
        raise InvalidInputError(
            f"expert {name} is pinned to {pins_of[where, name]} ranks in layer {problem.current.layer_ids[where]} but may have"
            f" {limits.copies_max} replicas; pin it to fewer or raise max_replicas"
        )
    needed = np.maximum(pins_of, 1).sum(axis=1)
    if (needed > limits.num_slots).any():
        where = int(np.argmax(needed > limits.num_slots))
        raise InvalidInputError(
            f"pins and one copy of each other expert need {needed[where]} slots in layer {problem.current.layer_ids[where]},"
            f" there are {limits.num_slots}; pin fewer or add slots"
        )


def _check_bars(problem: PlanningProblem, limits: Limits) -> None:
    """Every expert may be on some rank that serves; a protected one in two domains."""
    table, serving = problem.current, limits.room > 0
    resilience = problem.constraints.resilience
    for layer in np.unique(limits.bars[:, 0]).tolist():
        may = ~limits.marked(limits.bars, layer, table.num_logical) & serving[:, None]
        nowhere = np.flatnonzero(~may.any(axis=0))
        if nowhere.size:
            raise InvalidInputError(
                f"expert {nowhere[0]} is barred from every rank that serves ({int(serving.sum())} of {table.num_ranks}):"
                f" layer {table.layer_ids[layer]}; allow it somewhere"
            )
        if limits.protected is not None and resilience is not None:
            domains = np.zeros((int(limits.domain_of.max()) + 1, table.num_logical), np.bool_)
            np.logical_or.at(domains, limits.domain_of, may)
            confined = np.flatnonzero(limits.protected[layer] & (domains.sum(axis=0) < 2))
            if confined.size:
                raise InvalidInputError(
                    f"expert {confined[0]} must be on two {resilience.domain.value}s (resilience) but bars leave it one:"
                    f" layer {table.layer_ids[layer]}; allow it on more or protect fewer experts"
                )


def _check_pins_beside_protection(problem: PlanningProblem, limits: Limits, protected: BoolArray) -> None:
    """Slots and replicas for pins and for second copies in other domains."""
    table = problem.current
    for layer in np.unique(limits.pins[:, 0]).tolist():
        pinned = limits.marked(limits.pins, layer, table.num_logical)
        needed = copies_needed(pinned, protected[layer], limits.domain_of)
        if (needed > limits.copies_max).any():
            expert = int(np.argmax(needed > limits.copies_max))
            raise InvalidInputError(
                f"expert {expert} needs {needed[expert]} replicas in layer {table.layer_ids[layer]} (pinned to"
                f" {int(pinned[:, expert].sum())} ranks, and one elsewhere for resilience) but may have {limits.copies_max};"
                f" pin it elsewhere or raise max_replicas"
            )
        if int(needed.sum()) > limits.num_slots:
            raise InvalidInputError(
                f"pins and resilience need {int(needed.sum())} slots in layer {table.layer_ids[layer]}, there are"
                f" {limits.num_slots}; pin or protect fewer experts, or add slots"
            )


def copies_needed(pinned: BoolArray, protected: BoolArray, domain_of: Int64Array) -> Int64Array:
    """Fewest copies of each expert, shape (E,): its pins, two where it is protected, one more where all pins share a domain.

    Pinned: shape (R, E); protected: shape (E,); domain_of: shape (R,).
    """
    pins = pinned.sum(axis=0)
    domains = np.zeros((int(domain_of.max()) + 1, pinned.shape[1]), np.bool_)
    np.logical_or.at(domains, domain_of, pinned)
    alone = protected & (domains.sum(axis=0) == 1)
    needed: Int64Array = np.maximum(np.where(protected, 2, 1), pins + alone).astype(np.int64)
    return needed


def _check_groups_divide(problem: PlanningProblem) -> None:
    """Groups of equal size."""
    num_groups, num_logical = problem.constraints.num_groups, problem.current.num_logical
    if num_groups is not None and (num_groups < 1 or num_logical % num_groups):
        raise InvalidInputError(
            f"{num_logical} experts do not divide into {num_groups} groups; give a divisor of {num_logical}"
        )


def _check_strict_groups(problem: PlanningProblem, limits: Limits) -> None:
    """As many groups to each node that serves, and room for their experts there."""
    num_groups, topology = problem.constraints.num_groups or 1, problem.topology
    node_of = np.array(topology.node_indices)
    nodes = np.unique(node_of[limits.room > 0])
    if num_groups % nodes.size:
        raise InvalidInputError(
            f"{num_groups} expert groups do not divide over {nodes.size} nodes that serve ({topology.num_ranks} ranks);"
            f" plan without groups, give them a price (soft), or use a number of nodes that divides {num_groups}"
        )
    needed = problem.current.num_logical // nodes.size
    for node in nodes.tolist():
        room = int(limits.room[node_of == node].sum())
        if room < needed:
            raise InvalidInputError(
                f"node {topology.node_names[node]!r} has {room} usable slots on {int((node_of == node).sum())} ranks"
                f" but {num_groups // nodes.size} of {num_groups} groups are {needed} experts;"
                f" give it more slots, plan without groups or give them a price (soft)"
            )


def _check_pins_of_groups(problem: PlanningProblem, limits: Limits) -> None:
    """Pins of a strict group on one node; not more pinned groups on a node than it gets."""
    table, num_groups = problem.current, problem.constraints.num_groups or 1
    if not limits.pins.size:
        return
    size = table.num_logical // num_groups
    nodes, node_of = problem.topology.node_names, np.array(problem.topology.node_indices)
    serving = np.unique(node_of[limits.room > 0]).size
    for layer in np.unique(limits.pins[:, 0]).tolist():
        home: dict[int, tuple[int, int, int]] = {}
        for _, rank, expert in limits.pins[limits.pins[:, 0] == layer].tolist():
            node = int(node_of[rank])
            first = home.setdefault(expert // size, (node, rank, expert))
            if first[0] != node:
                raise InvalidInputError(
                    f"expert {first[2]} is pinned to rank {table.rank_ids[first[1]]} on node {nodes[first[0]]!r} and expert"
                    f" {expert} to rank {table.rank_ids[rank]} on node {nodes[node]!r}, but both are of group {expert // size}"
                    f" and groups are strict: layer {table.layer_ids[layer]}; pin them to one node or give groups a price"
                )
        groups_on = np.bincount([node for node, _, _ in home.values()], minlength=len(nodes))
        if int(groups_on.max()) > num_groups // serving:
            node = int(groups_on.argmax())
            raise InvalidInputError(
                f"experts of {groups_on[node]} groups are pinned to node {nodes[node]!r}, which gets"
                f" {num_groups // serving} of {num_groups} strict groups: layer {table.layer_ids[layer]}; pin fewer there or"
                f" give groups a price"
            )


def _check_move_limits(problem: PlanningProblem, limits: Limits) -> None:
    """Lost experts and pins that are not there yet need moves: not more than a plan may make."""
    constraints = problem.constraints
    if all(most is None for most in constraints.move_limits.values()):
        return
    lost, unpinned = _needed_moves(problem, limits)
    needed = lost + unpinned.sum(axis=1)
    what = f"{int(lost.sum())} experts that no usable slot holds and {int(unpinned.sum())} pins that are not met yet"
    total, layer_ids = int(needed.sum()), problem.current.layer_ids
    if constraints.max_moves is not None and total > constraints.max_moves:
        raise InvalidInputError(
            f"{total} moves are needed for {what} but at most {constraints.max_moves} are allowed; raise max_moves"
        )
    empty = int(((problem.current.by_rank() == EMPTY_SLOT) & limits.usable).sum()) if constraints.fill_slots else 0
    if constraints.max_moves is not None and empty > constraints.max_moves and not limits.bars.size:
        raise InvalidInputError(
            f"{empty} empty slots are to be filled, a move each, but at most {constraints.max_moves} moves are allowed; raise"
            f" max_moves"
        )
    sizes = np.array(problem.expert_bytes or (0,) * needed.size, np.float64)
    if constraints.max_move_bytes is not None and float(needed @ sizes) > constraints.max_move_bytes:
        raise InvalidInputError(
            f"{int(needed @ sizes)} bytes must move for {what} but at most {constraints.max_move_bytes} may; raise"
            f" max_move_bytes"
        )
    per_layer = constraints.max_moves_per_layer
    if per_layer is not None and int(needed.max()) > per_layer:
        worst = int(needed.argmax())
        raise InvalidInputError(
            f"{needed[worst]} moves are needed in layer {layer_ids[worst]} for lost experts and pins but at most {per_layer}"
            f" are allowed; raise max_moves_per_layer"
        )
    if constraints.max_layers is not None and int((needed > 0).sum()) > constraints.max_layers:
        raise InvalidInputError(
            f"{int((needed > 0).sum())} layers must change for {what} but at most {constraints.max_layers} may; raise"
            f" max_layers"
        )
    per_rank = constraints.max_moves_per_rank
    if per_rank is not None:
        into = unpinned.sum(axis=0)
        if int(into.max()) > per_rank:
            worst = int(into.argmax())
            raise InvalidInputError(
                f"{into[worst]} experts pinned to rank {problem.topology.rank_ids[worst]} must move there but at most"
                f" {per_rank} may move to one rank; raise max_moves_per_rank"
            )
        serving = int((limits.room > 0).sum())
        if total > per_rank * serving:
            raise InvalidInputError(
                f"{total} moves are needed for {what} but {serving} ranks that serve may take {per_rank} each; raise"
                f" max_moves_per_rank"
            )


def _needed_moves(problem: PlanningProblem, limits: Limits) -> tuple[Int64Array, Int64Array]:
    """Moves that no plan can do without: lost experts of each layer, shape (L,), beside pins not met by layer and rank, (L, R).

    A pin that an unusable slot of its rank holds costs no move.
    """
    table = problem.current
    shape = (table.num_layers, table.num_ranks)
    alive = np.array(problem.topology.alive)
    held = residencies(table.physical_to_logical, num_ranks=table.num_ranks, num_logical=table.num_logical)
    # An expert in a slot that goes out of use can stay on its rank without a move.
    covered = (held & alive[None, :, None]).any(axis=1)
    unpinned = np.zeros(shape, np.int64)
    placed = covered.copy()
    for where, position, expert in limits.pins.tolist():
        if not held[where, position, expert]:
            unpinned[where, position] += 1
            placed[where, expert] = True
    return (~placed).sum(axis=1), unpinned
