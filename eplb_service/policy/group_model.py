"""Homes of strict groups decided exactly, in OR-Tools CP-SAT: where pins, bars or protected experts rule out the usual choice.

One worker, a fixed seed and a budget in deterministic time: the same answer on any machine.
"""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from eplb_service.errors import InvalidInputError
from eplb_service.policy.group_homes import Int64Array, NodeTask
from eplb_service.policy.layer_task import LayerTask

WORK = 20.0
"""Deterministic seconds of CP-SAT for one layer."""


def exact_homes(task: LayerTask, nodes: Int64Array, node_task: NodeTask) -> Int64Array:
    """Node of each group (position within `nodes`), shape (G,), such that the layer can be met; fewest experts move.

    task: the layer without groups (any expert anywhere that bars allow). nodes: node index of each home node, shape (N,).
    Raises InvalidInputError when there is none, or none was found within the budget.
    """
    num_groups = node_task.may.shape[0]
    size = task.num_logical // num_groups
    model = cp_model.CpModel()
    home = [[model.new_bool_var("") for _ in nodes] for _ in range(num_groups)]
    for group in range(num_groups):
        model.add_exactly_one(home[group])
        for node in np.flatnonzero(~node_task.may[group]).tolist():
            model.add(home[group][node] == 0)
    for node in range(nodes.size):
        count = sum(home[group][node] for group in range(num_groups))
        model.add(count <= node_task.most)
        model.add(count >= node_task.fewest)
    on_rank: list[list[cp_model.IntVar]] = [[] for _ in range(task.num_ranks)]
    for expert in range(task.num_logical):
        placed = []
        for position, node in enumerate(nodes.tolist()):
            here = []
            for rank in np.flatnonzero((task.node_of == node) & task.allowed[:, expert]).tolist():
                there = model.new_bool_var("")
                if task.pinned[rank, expert]:
                    model.add(there == 1)
                model.add_implication(there, home[expert // size][position])
                on_rank[rank].append(there)
                here.append(there)
            placed += here
        model.add(sum(placed) >= int(task.copies_min[expert]))
    for rank, held in enumerate(on_rank):
        model.add(sum(held) <= int(task.room[rank]))
    model.minimize(
        sum(int(node_task.away[group, node]) * home[group][node] for group in range(num_groups) for node in range(nodes.size))
    )
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = WORK
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        budget = "" if status == cp_model.INFEASIBLE else " within the search's budget"
        raise InvalidInputError(
            f"{task.where}: {num_groups} strict groups on {nodes.size} nodes and the pins, bars and protected experts cannot be"
            f" met together{budget}; ask for fewer of them, give groups a price (soft), or give nodes more slots"
        )
    chosen: Int64Array = np.array([[solver.value(there) for there in homes] for homes in home]).argmax(axis=1).astype(np.int64)
    return chosen
