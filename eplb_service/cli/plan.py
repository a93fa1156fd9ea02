"""`eplb plan`: a plan from a file with nothing else running, or a dry run on a planner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from eplb_service.cli import values
from eplb_service.cli.client import planner_client, the_deployment, tls_options
from eplb_service.cli.front_picture import check_picture, draw_front
from eplb_service.cli.grouped import GroupedCommand, take_defaults_from
from eplb_service.cli.output import console, output_option, print_json
from eplb_service.cli.plan_request import check_out, checked_together, flag, loads_of, moves_are_free, problem_of, together_of
from eplb_service.dispatch import Dispatch
from eplb_service.formats.loads import LOAD_FORMATS
from eplb_service.policy.base import Effort

if TYPE_CHECKING:
    from eplb_service.formats.recording import LoadRecording
    from eplb_service.offline.facts import PlanFacts
    from eplb_service.offline.plan import OfflinePlan

TIME_LIMIT_S = 120.0
FILE = click.Path(path_type=Path, dir_okay=True)
TABLE = Path("-")
COUNT = click.IntRange(min=0)

FLEET = (
    *("ranks", "slots_per_rank", "nodes", "nics", "capacity", "base_load", "dead_ranks", "unusable_slots", "fill_slots"),
    *("dispatch", "max_replicas", "expert_bytes"),
)
CONSTRAINTS = ("groups", "soft_groups", "resilient", "pins", "bars")
GOAL = ("max_imbalance", "max_moves", "max_moves_per_rank", "max_moves_per_layer", "max_layers", "max_move_bytes")
SEARCH = ("policy", "effort", "work_budget", "time_limit", "seed", "certify")
IN_FILE = (*FLEET, *CONSTRAINTS, *GOAL, *SEARCH)
GROUPS = {
    "From": ("load", "load_format", "source_load", "together", "current", "from_nothing", "resize", "to", "fleet"),
    "Fleet": FLEET,
    "Constraints": CONSTRAINTS,
    "Goal and limits": GOAL,
    "Search": SEARCH,
    "Show and write": ("pareto", "layers", "diff", "sweep_slots", "out", "output"),
    "Dry run on a planner (without --load)": ("deployment", "planner", "timeout", "tls_ca", "tls_cert", "tls_key"),
}
DRY_RUN = {"policy", "output", *GROUPS["Dry run on a planner (without --load)"]}


@click.command(short_help="Plan from a file, or a dry run on a planner.", cls=GroupedCommand, groups=GROUPS)
@click.option(
    "--load",
    type=FILE,
    metavar="FILE",
    help="Expert loads: an engine's recording (file, folder or pattern), or .npy, .npz, .json of [layers, experts].",
)
@click.option(
    "--format",
    "load_format",
    type=click.Choice(LOAD_FORMATS),
    help="What --load is.  [default: found out]",
)
@click.option(
    "--source-load",
    type=FILE,
    metavar="FILE",
    help="Tokens that each rank sends, [layers, ranks, experts]; for --dispatch nearest.",
)
@click.option(
    "--together",
    type=FILE,
    metavar="FILE",
    help="Experts chosen together: tokens' choices (.npy, .npz of [tokens, layers, k], or SGLang's per_token dumps) or tokens"
    " of each pair [layers, experts, experts].",
)
@click.option(
    "--current",
    type=values.placement_file,
    metavar="[FORMAT:]FILE",
    help="Placement to start from: a plan, an engine's file or .npy [layers, slots]; its format is found out.",
)
@click.option("--from-nothing", is_flag=True, help="No weights are in place yet: moves cost nothing.")
@click.option(
    "--resize",
    is_flag=True,
    help="--current is of a fleet of another size: ranks in both keep what they hold, new ones are empty.",
)
@click.option(
    "--to", type=values.placement_file, metavar="[FORMAT:]FILE", help="Go to this placement (policy static), within the limits."
)
@click.option(
    "--fleet",
    type=FILE,
    is_eager=True,
    callback=take_defaults_from(IN_FILE),
    metavar="FILE",
    help="TOML file that gives any option of the next four groups by name; flags win over it.",
)
@click.option("--ranks", type=int, metavar="R", help="Ranks of the expert-parallel group.")
@click.option("--slots-per-rank", type=int, metavar="S", help="Slots on each rank; ranks x slots must hold all experts.")
@click.option(
    "--nodes",
    type=values.nodes,
    default="1",
    show_default=True,
    metavar="N",
    help="Nodes, in blocks of ranks; or the node of each rank: a,a,b,b.",
)
@click.option(
    "--nics",
    type=values.nics,
    metavar="N",
    help="NICs of each node, for blocks of its ranks; or the NIC of each rank: x,x,y,y.  [default: each rank has its own]",
)
@click.option(
    "--capacity",
    type=values.rank_numbers,
    metavar="LIST",
    help="Relative speed of ranks: 1,1,0.5,… or 3=0.5,7=0.5 or a file; 1 where not given.",
)
@click.option(
    "--base-load",
    type=values.rank_numbers,
    metavar="LIST",
    help="Work that ranks have anyway, in mean rank loads: 0=0.2 or a list or file.",
)
@click.option(
    "--dead-rank", "dead_ranks", type=int, multiple=True, metavar="RANK", help="Rank that serves nothing now (repeat for more)."
)
@click.option(
    "--unusable-slot",
    "unusable_slots",
    type=values.rank_slot,
    multiple=True,
    metavar="RANK:SLOT",
    help="Slot to leave empty (repeat for more).",
)
@click.option(
    "--fill-slots",
    is_flag=True,
    help="Leave no other slot empty: the engine's tables know no empty slot. Always so with --out to an engine's file.",
)
@click.option(
    "--dispatch",
    type=click.Choice([item.value for item in Dispatch]),
    default="even",
    show_default=True,
    help="How the engine picks a replica; predictions are under it.",
)
@click.option(
    "--max-replicas",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most copies of an expert: width of the engine's replica table.",
)
@click.option(
    "--expert-bytes",
    type=values.size,
    default="0",
    metavar="SIZE",
    help="Weights of one expert of one layer, such as 42MiB: to show and limit bytes.",
)
@click.option("--groups", type=int, metavar="G", help="Expert groups, each kept on one node; must divide experts and nodes.")
@click.option(
    "--soft-groups",
    type=click.FloatRange(min=0),
    metavar="PRICE",
    help="A replica off its group's node is allowed at this price, in moves.",
)
@click.option(
    "--resilient",
    type=values.resilience,
    metavar="SHARE[:node|rank]",
    help="Hottest experts (all, 20%, 0.2) that must outlive the loss of any one node or rank.",
)
@click.option(
    "--pin",
    "pins",
    type=values.expert_on_rank,
    multiple=True,
    metavar="EXPERT@RANK[/LAYER]",
    help="Residency that must be there (repeat for more).",
)
@click.option(
    "--bar",
    "bars",
    type=values.expert_on_rank,
    multiple=True,
    metavar="EXPERT@RANK[/LAYER]",
    help="Residency that must not be there (repeat for more).",
)
@click.option(
    "--max-imbalance",
    type=click.FloatRange(min=1),
    metavar="X",
    help="Target: every layer at or under X, with the fewest moves; 1.02 is usual.",
)
@click.option("--max-moves", type=COUNT, metavar="N", help="Most experts to move, over all layers.")
@click.option("--max-moves-per-rank", type=COUNT, metavar="N", help="Most experts that one rank takes in, over all layers.")
@click.option("--max-moves-per-layer", type=COUNT, metavar="N", help="Most experts to move in one layer.")
@click.option("--max-layers", type=COUNT, metavar="N", help="Most layers to change.")
@click.option(
    "--max-move-bytes", type=values.size, metavar="SIZE", help="Most bytes to move, such as 20GiB; needs --expert-bytes."
)
@click.option(
    "--policy",
    metavar="NAME",
    help="Policy (default: minmove; greedy with --from-nothing, static with --to; on a planner the deployment's).",
)
@click.option(
    "--effort",
    type=click.Choice([item.value for item in Effort]),
    help="How long to search: about 1, 5 or 30 s for 58 layers x 256 experts.  [default: normal]",
)
@click.option(
    "--work-budget", type=COUNT, metavar="N", help="Instead of --effort: the policy's own units of work, over all layers."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(0.01, 3600),
    default=TIME_LIMIT_S,
    show_default=True,
    metavar="SECONDS",
    help="Hard stop; a plan that it cuts says so.",
)
@click.option("--seed", type=COUNT, default=0, show_default=True, metavar="N", help="For policies that draw numbers.")
@click.option("--certify", is_flag=True, help="Spend time on lower bounds too: how far from the best the plan may be.")
@click.option(
    "--pareto",
    is_flag=False,
    flag_value=TABLE,
    type=FILE,
    metavar="[FILE]",
    help="The front of balance against moves as a table, or as a picture in FILE (.svg, .png).",
)
@click.option("--layers", is_flag=True, help="A line for each layer.")
@click.option("--diff", is_flag=True, help="What comes to and goes from each rank.")
@click.option(
    "--sweep-slots",
    type=values.slot_range,
    metavar="FROM..TO",
    help="Instead of --slots-per-rank: what each choice buys and costs.",
)
@click.option(
    "--out",
    type=values.placement_file,
    metavar="[FORMAT:]FILE",
    help="Write the placement as eplb (default), sglang, trtllm or vllm-ascend reads it. They load it at start: without"
    " --current, moves are free.",
)
@click.option("--planner", envvar="EPLB_PLANNER", metavar="HOST:PORT", help="Planner to ask (environment: EPLB_PLANNER).")
@tls_options
@click.option(
    "--timeout", type=click.FloatRange(0.1, 3600), default=90.0, show_default=True, metavar="SECONDS", help="How long to wait."
)
@click.option(
    "--deployment",
    "-d",
    envvar="EPLB_DEPLOYMENT",
    metavar="NAME",
    help="Deployment to plan for (environment: EPLB_DEPLOYMENT).",
)
@output_option
def plan(load: Path | None, output: str, **options: Any) -> None:
    """Plan a placement from a load FILE, offline; without --load, from a deployment's present window on a planner.

    Nothing is published or moved. Equal inputs give equal plans on any machine.

    \b
    Example:  eplb plan --load load.npy --ranks 32 --nodes 4 --slots-per-rank 9 --max-imbalance 1.02
              eplb plan --load new.npy --fleet fleet.toml --current plan.json --max-moves 500 --out next.json
              eplb plan --load new.npy --fleet fleet.toml --current plan.json --pareto front.svg
              eplb plan --load sglang.pt --ranks 32 --nodes 4 --slots-per-rank 9 --out trtllm:balancer.yaml
              eplb plan -d chat-decode --planner planner:7470
    """
    context = click.get_current_context()
    names = ("source_load", "together", "current", "fleet", *options)
    sources = {name: context.get_parameter_source(name) for name in names}
    from_file = [name for name in names if sources[name] is ParameterSource.DEFAULT_MAP]
    if load is None:
        typed = [name for name in dict.fromkeys(names) if sources[name] is ParameterSource.COMMANDLINE and name not in DRY_RUN]
        if typed:
            flags = ", ".join(flag(name) for name in typed)
            raise click.UsageError(f"{flags}: for a plan from a file; give --load FILE too")
        _dry_run(output, **options)
        return
    live = [name for name in options if sources[name] is ParameterSource.COMMANDLINE and name in DRY_RUN - {"policy", "output"}]
    if live:
        flags = ", ".join(flag(name) for name in live)
        raise click.UsageError(f"{flags}: for a dry run on a planner; give it without --load")
    _offline(load, output, checked_together(options, from_file=from_file))


def _offline(load: Path, output: str, options: dict[str, Any]) -> None:
    from eplb_service.cli import plan_page  # noqa: PLC0415  (keeps `eplb plan --help` quick)
    from eplb_service.formats.placements import format_to_write  # noqa: PLC0415
    from eplb_service.offline.engine_file import check_can_hold  # noqa: PLC0415
    from eplb_service.offline.facts import facts_of  # noqa: PLC0415
    from eplb_service.offline.plan import plan_offline  # noqa: PLC0415
    from eplb_service.offline.plan_document import plan_document  # noqa: PLC0415

    if options["pareto"] not in (None, TABLE):
        check_picture(options["pareto"])
    engine = None if options["out"] is None else format_to_write(options["out"])
    if options["out"] is not None:
        check_out(options["out"].path)
    if engine not in (None, "eplb"):
        options = {**options, "fill_slots": True, "from_nothing": options["from_nothing"] or moves_are_free(options)}
    recording, source_loads = loads_of(load, options)
    together = together_of(recording, options)
    made = []
    for slots in options["sweep_slots"] or (options["slots_per_rank"],):
        problem = problem_of(recording, source_loads, options, slots_per_rank=slots, together=together)
        if engine not in (None, "eplb"):
            check_can_hold(engine, problem)
        against = "linear" if options["current"] is None else "current"
        plan = plan_offline(problem, policy=options["policy"], moves_against=against)
        made.append((plan, facts_of(problem, plan.proposal, None if together is None else together.choices)))
    documents = [plan_document(plan, facts, recording) for plan, facts in made] if output == "json" else []
    if options["sweep_slots"] is not None:
        if output == "json":
            print_json(documents)
        else:
            plan_page.show_sweep(made)
        return
    plan, facts = made[0]
    _write(plan, recording, options)
    if output == "json":
        print_json(documents[0])
    else:
        _show(plan, facts, recording, options)


def _write(plan: OfflinePlan, recording: LoadRecording, options: dict[str, Any]) -> None:
    """The files that were asked for."""
    if options["out"] is not None:
        from eplb_service.formats.placements import write_placement  # noqa: PLC0415

        write_placement(options["out"], plan.proposal.placement, num_layers=recording.num_layers)
    if options["pareto"] not in (None, TABLE):
        draw_front(options["pareto"], plan.proposal, max_imbalance=plan.problem.max_imbalance)


def _show(plan: OfflinePlan, facts: PlanFacts, recording: LoadRecording, options: dict[str, Any]) -> None:
    """The page, and the details that were asked for."""
    from eplb_service.cli import plan_page  # noqa: PLC0415

    plan_page.show_plan(plan, facts, recording, out=options["out"])
    if options["pareto"] == TABLE:
        plan_page.show_front(plan)
    elif options["pareto"] is not None:
        console().print(f"picture of the Pareto front written to {options['pareto']}")
    if options["layers"]:
        plan_page.show_layers(plan, facts)
    if options["diff"]:
        plan_page.show_diff(plan)


def _dry_run(output: str, **options: Any) -> None:
    from eplb_service.cli import plan_page  # noqa: PLC0415
    from eplb_service.cli.output import to_plain  # noqa: PLC0415
    from eplb_service.pb.v1 import admin_pb2  # noqa: PLC0415

    with planner_client(options["planner"], timeout_s=options["timeout"], tls=options["tls"]) as client:
        name = the_deployment(client, options["deployment"])
        reply = client.call(client.admin.Plan, admin_pb2.PlanRequest(deployment=name, policy=options["policy"] or ""))
    if output == "json":
        print_json(to_plain(reply))
        return
    plan_page.show_dry_run(name, reply)
