"""From the options of `eplb plan --load` to a planning problem."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from eplb_service.cli.values import RankNumbers
from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.formats.loads import read_recording
from eplb_service.formats.placement_rows import Expectation
from eplb_service.formats.placements import PlacementPath, ranks_in, read_placement
from eplb_service.formats.recording import LoadRecording
from eplb_service.offline.load_file import Float64Array, read_source_loads
from eplb_service.offline.plan import fleet_topology, starting_table
from eplb_service.offline.together_file import Together, read_together
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, Effort, PlanningProblem
from eplb_service.policy.survivors import onto_ranks
from eplb_service.topology import Topology

MOVE_LIMITS = ("max_moves", "max_moves_per_rank", "max_moves_per_layer", "max_layers", "max_move_bytes")


def flag(name: str) -> str:
    """A parameter's name as it is typed."""
    special = {"pins": "--pin", "bars": "--bar", "dead_ranks": "--dead-rank", "unusable_slots": "--unusable-slot"}
    return special.get(name, "--" + name.replace("_", "-"))


CONTRARY = (
    ("from_nothing", "current"),
    ("from_nothing", "resize"),
    ("effort", "work_budget"),
    ("sweep_slots", "slots_per_rank"),
    ("sweep_slots", "out"),
    ("sweep_slots", "to"),
    ("sweep_slots", "layers"),
    ("sweep_slots", "diff"),
    ("sweep_slots", "pareto"),
    *(("from_nothing", name) for name in MOVE_LIMITS),
)
"""Pairs of options of which one makes the other senseless."""

NEEDED = (("soft_groups", "groups"), ("resize", "current"), ("max_move_bytes", "expert_bytes"))
"""Options that say nothing without another one."""


def checked_together(options: Mapping[str, Any], *, from_file: Collection[str]) -> dict[str, Any]:
    """The options, without what a flag of the command line overrules in the fleet's file.

    Raises click.UsageError naming options that contradict one another or lack another one.
    """
    kept = dict(options)
    for pair in CONTRARY:
        if all(_is_given(kept[name]) for name in pair):
            overruled = [name for name in pair if name in from_file]
            if len(overruled) != 1:
                raise click.UsageError(f"{flag(pair[0])} and {flag(pair[1])} contradict one another; give one of them")
            kept[overruled[0]] = None
    sizes = ("ranks",) if _is_given(kept["sweep_slots"]) else ("ranks", "slots_per_rank")
    missing = [flag(name) for name in sizes if kept[name] is None]
    if missing:
        raise click.UsageError(f"--load needs {' and '.join(missing)}: how large is the fleet that the plan is for?")
    for name, other in NEEDED:
        if _is_given(kept[name]) and not kept[other]:
            raise click.UsageError(f"{flag(name)} needs {flag(other)}")
    if kept["to"] is not None and kept["policy"] not in (None, "static"):
        raise click.UsageError(f"--to is for policy static; {kept['policy']} goes where its search leads")
    if kept["policy"] == "static" and kept["to"] is None:
        raise click.UsageError("--policy static needs --to FILE: the placement to go to")
    if kept["source_load"] is not None and kept["dispatch"] != Dispatch.NEAREST.value:
        raise click.UsageError("--source-load is what nearest dispatch looks at; give --dispatch nearest too")
    return kept


def check_out(path: Path) -> None:
    """Raises InvalidInputError, before a plan is made, when the placement cannot be written there."""
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder; name the file to write the placement to")
    if not path.absolute().parent.is_dir():
        raise InvalidInputError(f"there is no folder {path.parent} for the placement {path.name}")


def moves_are_free(options: Mapping[str, Any]) -> bool:
    """Whether an engine that starts from the plan has nothing in place: no option speaks of moves."""
    return not any(_is_given(options[name]) for name in ("current", "to", "pareto", *MOVE_LIMITS))


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def loads_of(path: Path, options: Mapping[str, Any]) -> tuple[LoadRecording, Float64Array | None]:
    """A recording of loads, and source loads (L, R, E) of its layers, None = uniform."""
    recording = read_recording(path, options["load_format"])
    if options["source_load"] is None:
        return recording, None
    return recording, read_source_loads(
        options["source_load"],
        num_layers=len(recording.layer_ids),
        num_logical=recording.loads.shape[2],
        num_ranks=options["ranks"],
        num_rows=len(recording.row_ids),
        positions=recording.row_positions,
    )


def together_of(recording: LoadRecording, options: Mapping[str, Any]) -> Together | None:
    """Which experts tokens choose together; None = no file was given."""
    given: Path | None = options["together"]
    if given is None:
        return None
    if options["nodes"] == 1:
        raise click.UsageError("--together is about experts on one node; say how many there are: --nodes N, 2 or more")
    loads = recording.loads.sum(axis=0)
    return read_together(
        given,
        loads,
        num_rows=len(recording.row_ids),
        positions=recording.row_positions,
        layer_ids=recording.layer_ids if recording.has_layer_ids else None,
    )


def topology_of(options: Mapping[str, Any]) -> Topology:
    """The fleet that the options describe. Raises InvalidInputError when numbers do not fit."""
    num_ranks: int = options["ranks"]
    numbers: dict[str, tuple[float, ...] | None] = {}
    for name, default, what in (("capacity", 1.0, "capacities"), ("base_load", 0.0, "base loads")):
        given: RankNumbers | None = options[name]
        numbers[name] = None if given is None or num_ranks < 1 else given.for_ranks(num_ranks, default, what)
    return fleet_topology(
        num_ranks=num_ranks,
        nodes=options["nodes"],
        capacity=numbers["capacity"],
        base_load=numbers["base_load"],
        nics=options["nics"],
        dead=options["dead_ranks"],
    )


def constraints_of(options: Mapping[str, Any]) -> Constraints:
    """The constraints that the options describe."""
    return Constraints(
        num_groups=options["groups"],
        group_price=options["soft_groups"],
        unusable_slots=frozenset(options["unusable_slots"]),
        fill_slots=options["fill_slots"],
        pinned=frozenset(options["pins"]),
        barred=frozenset(options["bars"]),
        resilience=options["resilient"],
        max_replicas=options["max_replicas"],
        **{name: options[name] for name in MOVE_LIMITS},
    )


def problem_of(
    recording: LoadRecording,
    source_loads: Float64Array | None,
    options: Mapping[str, Any],
    *,
    slots_per_rank: int,
    together: Together | None = None,
) -> PlanningProblem:
    """The problem that the options describe. Raises InvalidInputError with the numbers that do not go together."""
    topology, constraints = topology_of(options), constraints_of(options)
    _, num_layers, num_logical = recording.loads.shape
    expected = Expectation(
        model="model",
        num_layers=num_layers,
        num_logical=num_logical,
        rank_ids=topology.rank_ids,
        layer_ids=recording.layer_ids if recording.has_layer_ids else None,
        num_rows=len(recording.row_ids),
        positions=recording.row_positions,
    )
    given: PlacementPath | None = options["current"]
    shape = {"num_layers": num_layers, "num_logical": num_logical, "topology": topology, "slots_per_rank": slots_per_rank}
    before = None if given is None else _current(given, expected, topology, slots_per_rank, resize=options["resize"])
    current = starting_table(**shape, current=before, layer_ids=recording.layer_ids)
    wanted = None if options["to"] is None else _wanted(options["to"], expected, current)
    return PlanningProblem(
        loads=recording.loads,
        source_loads=source_loads,
        together=None if together is None else together.pairs,
        topology=topology,
        current=current,
        wanted=wanted,
        dispatch=Dispatch(options["dispatch"]),
        constraints=constraints,
        expert_bytes=(options["expert_bytes"],) * num_layers,
        from_nothing=options["from_nothing"],
        max_imbalance=options["max_imbalance"],
        front=options["pareto"] is not None,
        certify=options["certify"],
        seed=options["seed"],
        time_limit_s=options["time_limit"],
        work_budget=options["work_budget"],
        effort=Effort(options["effort"] or Effort.NORMAL.value),
    )


def _current(source: PlacementPath, expected: Expectation, topology: Topology, slots_per_rank: int, *, resize: bool) -> Table:
    """The placement in a file; with `resize`, one of other ranks or slots, as it lies on these."""
    if not resize:
        return read_placement(source, expected).table
    ranks = ranks_in(source, slots_per_rank) or expected.rank_ids
    return onto_ranks(read_placement(source, replace(expected, rank_ids=ranks)).table, topology, slots_per_rank=slots_per_rank)


def _wanted(source: PlacementPath, expected: Expectation, current: Table) -> Table:
    """The placement to go to, under the model and layer ids of the one to start from."""
    table = read_placement(source, expected).table
    if table.num_physical != current.num_physical:
        raise InvalidInputError(f"{source} has {table.num_physical} slots a layer; the plan is for {current.num_physical}")
    return Table(current.model, current.layer_ids, current.num_logical, current.rank_ids, table.physical_to_logical)
