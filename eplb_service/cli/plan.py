"""`eplb plan`: a plan from a file with nothing else running, or a dry run on a planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from eplb_service.cli.client import planner_client, the_deployment, tls_options
from eplb_service.cli.output import bytes_text, console, imbalance_text, output_option, print_fact, print_json, print_table
from eplb_service.dispatch import Dispatch
from eplb_service.offline.plan import TIME_LIMIT_S, OfflinePlan

# A rank that waits on a busier one loses time: what the numbers mean, once, under every table.
LEGEND = "imbalance is max rank load / mean rank load; mean over layers / worst layer; 1 is perfect"
OFFLINE_ONLY = ("ranks", "slots_per_rank", "nodes", "groups", "current", "out", "max_moves", "expert_bytes")
FILE = click.Path(path_type=Path, dir_okay=True)


@click.command(short_help="Plan from a file, or a dry run on a planner.")
@click.option("--load", type=FILE, metavar="FILE", help="Expert loads: .npy, .npz or .json, [layers, experts] or [windows, …].")
@click.option("--ranks", type=int, metavar="R", help="Ranks of the expert-parallel group.")
@click.option("--slots-per-rank", type=int, metavar="S", help="Slots on each rank; ranks x slots must hold all experts.")
@click.option("--nodes", type=int, default=1, show_default=True, metavar="N", help="Nodes that the ranks are spread over.")
@click.option("--groups", type=int, metavar="G", help="Expert groups, each kept on one node; must divide experts and nodes.")
@click.option("--current", type=FILE, metavar="FILE", help="Placement to start from: a plan, a placement file or .npy [L, P].")
@click.option("--policy", help="Policy (default: greedy; on a planner the deployment's).")
@click.option("--dispatch", type=click.Choice([item.value for item in Dispatch]), default="even", show_default=True)
@click.option("--max-moves", type=click.IntRange(min=0), metavar="N", help="Most experts to move.")
@click.option("--expert-bytes", type=click.IntRange(min=0), default=0, metavar="N", help="Bytes of one expert, to show bytes.")
@click.option("--time-limit", type=click.FloatRange(0.01, 3600), default=TIME_LIMIT_S, show_default=True, help="Seconds, hard.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For policies that draw numbers.")
@click.option("--out", type=FILE, metavar="FILE", help="Write the placement (JSON; `--current` reads it back).")
@click.option("--planner", envvar="EPLB_PLANNER", metavar="HOST:PORT", help="Without --load: dry run on this planner.")
@tls_options
@click.option(
    "--timeout", type=click.FloatRange(0.1, 3600), default=90.0, show_default=True, help="Without --load: seconds to wait."
)
@click.option("--deployment", "-d", envvar="EPLB_DEPLOYMENT", metavar="NAME", help="Without --load: deployment to plan for.")
@output_option
def plan(load: Path | None, output: str, **options: Any) -> None:
    """Plan a placement from a load FILE, offline; without --load, from a deployment's present window on a planner.

    Nothing is published or moved. Equal inputs give equal plans on any machine.

    \b
    Example:  eplb plan --load load.npy --ranks 32 --nodes 4 --slots-per-rank 9
              eplb plan --load new.npy --ranks 32 --slots-per-rank 9 --current plan.json --out next.json
              eplb plan -d chat-decode --planner planner:7470
    """
    if load is None:
        context = click.get_current_context()
        given = [name for name in OFFLINE_ONLY if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise click.UsageError(f"{flags}: for a plan from a file; give --load FILE too")
        _dry_run(output, **options)
        return
    missing = [name for name in ("ranks", "slots_per_rank") if options[name] is None]
    if missing:
        flags = " and ".join("--" + name.replace("_", "-") for name in missing)
        raise click.UsageError(f"--load needs {flags}: how large is the fleet that the plan is for?")
    _offline(load, output, **options)


def _offline(load: Path, output: str, **options: Any) -> None:
    from eplb_service.offline.load_file import read_loads  # noqa: PLC0415  (keeps `eplb plan --help` quick)
    from eplb_service.offline.placement_file import Expectation, read_placement, write_placement  # noqa: PLC0415
    from eplb_service.offline.plan import plan_offline  # noqa: PLC0415
    from eplb_service.topology import Topology  # noqa: PLC0415

    loads = read_loads(load)
    current: Path | None = options["current"]
    ranks = Topology.regular(num_ranks=options["ranks"], num_nodes=options["nodes"]).rank_ids
    _, num_layers, num_logical = loads.shape
    expected = Expectation(model="model", num_layers=num_layers, num_logical=num_logical, rank_ids=ranks)
    made = plan_offline(
        loads,
        num_ranks=options["ranks"],
        slots_per_rank=options["slots_per_rank"],
        num_nodes=options["nodes"],
        num_groups=options["groups"],
        policy=options["policy"] or "greedy",
        current=None if current is None else read_placement(current, expected),
        dispatch=Dispatch(options["dispatch"]),
        expert_bytes=options["expert_bytes"],
        max_moves=options["max_moves"],
        time_limit_s=options["time_limit"],
        seed=options["seed"],
    )
    if options["out"] is not None:
        write_placement(options["out"], made.proposal.placement)
    if output == "json":
        print_json(made.to_json())
        return
    _show_offline(made, options["out"])


def _show_offline(made: OfflinePlan, out: Path | None) -> None:
    proposal, table = made.proposal, made.proposal.placement
    moves = proposal.moves
    against = "the given placement" if made.moves_against == "current" else "the linear placement that engines start with"
    rows = [
        ("before", imbalance_text(proposal.before.mean, proposal.before.worst)),
        ("planned", imbalance_text(proposal.predicted.mean, proposal.predicted.worst)),
        ("lower bound", imbalance_text(proposal.lower_bound.mean, proposal.lower_bound.worst)),
    ]
    title = (
        f"{table.num_layers} layers x {table.num_logical} experts in {table.num_physical} slots on {table.num_ranks} ranks,"
        f" policy {proposal.policy} ({proposal.status}{', cut off by the time limit' if proposal.cut_off else ''})"
    )
    print_table(title, ("", "imbalance"), rows)
    screen = console()
    volume = f", {bytes_text(moves.move_bytes)}" if moves.move_bytes else ""
    share = moves.slots_rewritten / (table.num_layers * table.num_physical)
    screen.print(
        f"moves {moves.experts} experts{volume}; {moves.slots_rewritten} slots rewritten ({share:.1%}), against {against}"
    )
    screen.print(f"solved in {proposal.solve_s:.3f} s; {LEGEND}", style="dim")
    if out is not None:
        screen.print(f"placement written to {out}")


def _dry_run(output: str, **options: Any) -> None:
    from eplb_service.cli.output import to_plain  # noqa: PLC0415
    from eplb_service.pb.v1 import admin_pb2  # noqa: PLC0415

    with planner_client(options["planner"], timeout_s=options["timeout"], tls=options["tls"]) as client:
        name = the_deployment(client, options["deployment"])
        reply = client.call(client.admin.Plan, admin_pb2.PlanRequest(deployment=name, policy=options["policy"] or ""))
    if output == "json":
        print_json(to_plain(reply))
        return
    view = reply.proposal
    rows = [
        (label, imbalance_text(value.mean_over_layers, value.worst_layer))
        for label, value in (("now", view.before), ("planned", view.predicted), ("lower bound", view.lower_bound))
    ]
    print_table(f"{name}: dry run of policy {view.policy}, nothing is published", ("", "imbalance"), rows)
    screen = console()
    volume = bytes_text(view.moves.bytes.same_node + view.moves.bytes.cross_node)
    screen.print(f"would move {view.moves.experts} experts, {volume}")
    print_fact("gate", f"{reply.verdict.reason} [{reply.verdict.code}]", width=4)
    if reply.verdict.move:
        print_fact("", f"`eplb rebalance -d {name}` would carry it out", width=4)
    screen.print(f"solved in {reply.solve_s:.3f} s; {LEGEND}", style="dim")
