"""What `eplb plan` prints for people: the answer first, then what it costs, what limited it, and details on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eplb_service.cli.output import bytes_text, console, print_fact, print_table
from eplb_service.cli.plan_request import flag
from eplb_service.dispatch import Dispatch
from eplb_service.formats.placements import PlacementPath
from eplb_service.formats.recording import LoadRecording, left_out_text
from eplb_service.hops import TokenHops
from eplb_service.moves import residencies
from eplb_service.node_visits import NodeVisits
from eplb_service.offline.facts import LimitUse, PlanFacts, why_it_stopped
from eplb_service.offline.plan import OfflinePlan
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.base import ConstraintCosts, PlanningProblem, Proposal
from eplb_service.topology import LinkKind

LEGEND = "imbalance is max rank load / mean rank load; mean over layers / worst layer; 1 is perfect"
FACT_WIDTH = 11
LAYERS_NAMED = 8


def both(mean: float, worst: float) -> str:
    """Mean over layers and worst layer, to a hundredth of a percent: targets are that fine."""
    return f"{mean:.4f} / {worst:.4f}"


def show_plan(plan: OfflinePlan, facts: PlanFacts, recording: LoadRecording, *, out: PlacementPath | None) -> None:
    """The plan as a page. recording: what the loads were read from."""
    proposal, problem, table = plan.proposal, plan.problem, plan.proposal.placement
    nodes = f" of {problem.topology.num_nodes} nodes" if problem.topology.num_nodes > 1 else ""
    status = proposal.status.replace("_", " ")
    title = (
        f"{table.num_layers} layers x {table.num_logical} experts in {table.num_physical} slots on {table.num_ranks} ranks"
        f"{nodes}, policy {proposal.policy} ({status}{', cut off by the time limit' if proposal.cut_off else ''})"
    )
    rows = [
        ("before", both(proposal.before.mean, proposal.before.worst)),
        ("planned", both(proposal.predicted.mean, proposal.predicted.worst)),
        ("lower bound", both(proposal.lower_bound.mean, proposal.lower_bound.worst)),
    ]
    print_table(title, ("", "imbalance"), rows)
    screen = console()
    screen.print(summary(problem, proposal))
    for label, text in [*load_shown(recording), *facts_shown(plan, facts)]:
        print_fact(label, text, width=FACT_WIDTH)
    dispatch = f" under {problem.dispatch.value} dispatch" if problem.dispatch != "even" else ""
    screen.print(f"solved in {proposal.solve_s:.3f} s; {LEGEND}{dispatch}", style="dim")
    if out is not None:
        written = "" if out.format in (None, "eplb") else f" as {out.format} reads it"
        screen.print(f"placement written to {out}{written}")


def load_shown(recording: LoadRecording) -> list[tuple[str, str]]:
    """What was left out of an engine's recording, or taken once."""
    said = [text for text in (left_out_text(recording), *recording.notes) if text]
    if not said:
        return []
    return [("load", f"{recording.source}, {recording.loads.shape[0]:,} windows: {'; '.join(said)}")]


def summary(problem: PlanningProblem, proposal: Proposal) -> str:
    """The plan in one line: `imbalance 1.0080, bound 1.0000, moves 31, bound >= 24`. Imbalances are of the worst layer."""
    worst = proposal.predicted.per_layer.index(proposal.predicted.worst)
    bound = proposal.lower_bound.per_layer[worst]
    least = "" if proposal.moves_lower_bound is None else f", bound >= {proposal.moves_lower_bound:,}"
    moves = "" if problem.from_nothing else f"; moves {proposal.moves.experts:,}{least}"
    return f"worst layer: imbalance {proposal.predicted.worst:.4f}, bound {bound:.4f}{moves}"


def facts_shown(plan: OfflinePlan, facts: PlanFacts) -> list[tuple[str, str]]:
    """Label and sentence of every fact that this plan has."""
    problem, proposal = plan.problem, plan.proposal
    stop = why_it_stopped(problem, proposal, facts)
    shown = [("to load", _to_load(plan)) if problem.from_nothing else ("moves", _moves(plan))]
    if facts.layers_over is not None:
        shown.append(("target", _target(problem, proposal, facts)))
    shown.append(("stopped", stop.reason))
    if facts.limits:
        shown.append(("limits", "; ".join(_limit(limit) for limit in facts.limits)))
    shown += _memory(facts)
    if facts.off_node:
        shown.append(
            (
                "off node",
                _off_node(facts, problem.constraints.group_price or 0.0),
            )
        )
    if facts.hops is not None and problem.dispatch in (Dispatch.NEAREST, Dispatch.WEIGHTED):  # else nothing changes it
        before, after = facts.hops
        shown.append(("tokens", f"{after.cross_node_share:.1%} cross nodes, before {before.cross_node_share:.1%}"))
    if facts.hops is not None and problem.topology.nics is not None:
        shown.append(("NICs", _nics(*facts.hops)))
    if facts.visits is not None:
        shown.append(("nodes", _visits(*facts.visits)))
    if plan.unprotected is not None and problem.constraints.resilience is not None:
        shown.append(("resilience", _resilience(plan)))
    if proposal.costs is not None and proposal.costs.num_kept_faults:
        shown.append(("left undone", _left(proposal.costs)))
    return shown


def _off_node(facts: PlanFacts, price: float) -> str:
    return (
        f"{sum(facts.off_node):,} replicas off their group's node, {np.mean(facts.off_node):.2f} a layer"
        f" (most {max(facts.off_node)}), at a price of {price:g} moves each"
    )


def _nics(before: TokenHops, after: TokenHops) -> str:
    return (
        f"the busiest of {after.num_nics} takes {after.busiest_nic_share:.1%} of the tokens that cross nodes,"
        f" {after.nic_imbalance:.4f} of the mean, before {before.nic_imbalance:.4f}"
    )


def _visits(before: NodeVisits, after: NodeVisits) -> str:
    """Nodes that a token visits: exact where tokens' choices are known, else between bounds."""
    pairs = f"{after.pair_share:.1%} of the pairs of its experts on one node, before {before.pair_share:.1%}"
    if before.exact is not None and after.exact is not None:
        return f"{after.exact:.3f} a token and layer, before {before.exact:.3f}; {pairs}"
    return f"{after.least:.2f} to {after.most:.2f} a token and layer, before {before.least:.2f} to {before.most:.2f}; {pairs}"


def _memory(facts: PlanFacts) -> list[tuple[str, str]]:
    """What of a rank's memory the copies take, and what carrying experts takes beside them."""
    shown = []
    if facts.redundant_experts > 0:
        size = (
            f"; {bytes_text(facts.redundant_bytes_per_rank)} a rank over all layers" if facts.redundant_bytes_per_rank else ""
        )
        shown.append(("redundancy", f"{facts.redundant_experts} redundant experts a layer{size}"))
    if facts.staging is not None:
        least, sending = bytes_text(facts.staging.least), bytes_text(facts.staging.sending)
        shown.append(("staging", f"{least} a rank at least, and {sending} to send from; pinned on the host as much again"))
    return shown


def _to_load(plan: OfflinePlan) -> str:
    """What a start from nothing loads."""
    table = plan.proposal.placement
    filled = (table.physical_to_logical != EMPTY_SLOT).sum(axis=1)
    sizes = plan.problem.expert_bytes or (0,) * table.num_layers
    size = sum(int(count) * each for count, each in zip(filled, sizes, strict=True)) // table.num_ranks
    memory = f", {bytes_text(size)} a rank" if size else ""
    return f"{int(filled.sum()):,} slots{memory}; nothing is in place, so moves cost nothing"


def _moves(plan: OfflinePlan) -> str:
    problem, moves, table = plan.problem, plan.proposal.moves, plan.proposal.placement
    against = "the given placement" if plan.moves_against == "current" else "the linear placement that engines start with"
    share = moves.slots_rewritten / (table.num_layers * table.num_physical)
    text = f"{moves.experts:,} experts in {moves.layers} layers"
    if moves.move_bytes:
        links = [
            f"{bytes_text(size)} {where}"
            for size, where in (
                (moves.bytes_by_link[LinkKind.SAME_NODE], "within nodes"),
                (moves.bytes_by_link[LinkKind.CROSS_NODE], "across"),
                (moves.bytes_without_source, "from host or checkpoint"),
            )
            if size
        ]
        text += f", {bytes_text(moves.move_bytes)}"
        text += f" ({', '.join(links)})" if problem.topology.num_nodes > 1 or moves.bytes_without_source else ""
        text += f", at most {bytes_text(moves.bytes_into_busiest_rank)} into one rank"
        nic = moves.bytes_into_busiest_nic
        text += f" and {bytes_text(nic)} over one NIC" if nic else ""
    return f"{text}; {moves.slots_rewritten:,} slots rewritten ({share:.1%}), against {against}"


def _target(problem: PlanningProblem, proposal: Proposal, facts: PlanFacts) -> str:
    over = facts.layers_over or ()
    target = f"every layer at or under {problem.max_imbalance:g}"
    if not over:
        return f"{target}: met"
    named = ", ".join(str(layer) for layer in over[:LAYERS_NAMED]) + (", …" if len(over) > LAYERS_NAMED else "")
    unreachable = sum(bound > (problem.max_imbalance or 0) * (1 + 1e-9) for bound in proposal.lower_bound.per_layer)
    beyond = f"; for {unreachable} of them no placement in these slots is under it" if unreachable else ""
    return f"{target}: NOT met in {len(over)} of {len(proposal.predicted.per_layer)} layers ({named}){beyond}"


def _limit(limit: LimitUse) -> str:
    of_bytes = limit.name.endswith("bytes")
    used, most = (bytes_text(value) if of_bytes else f"{value:,}" for value in (limit.used, limit.most))
    where = f" ({limit.where})" if limit.where else ""
    return f"{flag(limit.name)} {used} of {most}{where}{', REACHED' if limit.is_reached else ''}"


def _resilience(plan: OfflinePlan) -> str:
    with_it, without, asked = plan.proposal, plan.unprotected, plan.problem.constraints.resilience
    if without is None or asked is None:
        return ""
    share = "every expert" if asked.hot_share == 1.0 else f"the hottest {asked.hot_share:.0%} of experts"
    costs = with_it.costs
    left = f"; {costs.unprotected:,} of {costs.protected:,} are NOT yet" if costs is not None and costs.unprotected else ""
    return (
        f"{share} on two {asked.domain.value}s{left}; it costs {with_it.moves.experts - without.moves.experts:+,} moves and"
        f" {with_it.predicted.worst - without.predicted.worst:+.4f} imbalance of the worst layer"
        f" (without: {without.moves.experts:,} and {without.predicted.worst:.4f})"
    )


def _left(costs: ConstraintCosts) -> str:
    """Constraints that the live placement breaks and that limits on moves left so."""
    more = costs.num_kept_faults - len(costs.kept_faults)
    return "; ".join(costs.kept_faults) + (f"; and {more} more" if more > 0 else "")


def show_layers(plan: OfflinePlan, facts: PlanFacts) -> None:
    """One line for each layer."""
    proposal = plan.proposal
    copies = proposal.placement.replica_counts.max(axis=1)
    over = set(facts.layers_over or ())
    rows = []
    for index, layer in enumerate(proposal.placement.layer_ids):
        row: list[object] = [layer, f"{proposal.before.per_layer[index]:.4f}", f"{proposal.predicted.per_layer[index]:.4f}"]
        row += [f"{proposal.lower_bound.per_layer[index]:.4f}", facts.moves_per_layer[index], int(copies[index])]
        row += [facts.off_node[index]] if facts.off_node else []
        rows.append([*row, "over the target" if layer in over else ""])
    columns = ["layer", "before", "planned", "bound", "moves", "most copies", *(["off node"] if facts.off_node else []), ""]
    print_table("", columns, rows, right=columns[:-1])


def show_diff(plan: OfflinePlan) -> None:
    """What comes to and goes from each rank of each layer that changes."""
    before, after = plan.problem.current, plan.proposal.placement
    shape = {"num_ranks": before.num_ranks, "num_logical": before.num_logical}
    rows: list[Sequence[object]] = []
    for index, layer in enumerate(after.layer_ids):
        old = residencies(before.physical_to_logical[index], **shape)
        new = residencies(after.physical_to_logical[index], **shape)
        first = True
        for position in np.flatnonzero((old != new).any(axis=1)).tolist():
            comes, goes = np.flatnonzero(new[position] & ~old[position]), np.flatnonzero(old[position] & ~new[position])
            lists = [" ".join(str(expert) for expert in experts.tolist()) for experts in (comes, goes)]
            rows.append((layer if first else "", after.rank_ids[position], *lists))
            first = False
    print_table("", ("layer", "rank", "comes", "goes"), rows, right=("layer", "rank"))


def show_front(plan: OfflinePlan) -> None:
    """The Pareto front as a table."""
    proposal = plan.proposal
    screen = console()
    if not proposal.front:
        screen.print(f"policy {proposal.policy} gives no Pareto front")
        return
    has_bytes = any(point.moves.move_bytes for point in proposal.front)
    rows = []
    for point in proposal.front:
        mark = "" if point.moves.slots_rewritten else "slots emptied"
        if point.placement == proposal.placement:
            mark = "the plan"
        elif point.placement == plan.problem.current:
            mark = "as it is"
        row: list[object] = [f"{point.moves.experts:,}", f"{point.predicted.mean:.4f}", f"{point.predicted.worst:.4f}"]
        rows.append([*row, *([bytes_text(point.moves.move_bytes)] if has_bytes else []), mark])
    columns = ["moves", "mean over layers", "worst layer", *(["bytes"] if has_bytes else []), ""]
    print_table("Pareto front: less imbalance only for more moves", columns, rows, right=columns[:-1])


def show_sweep(choices: Sequence[tuple[OfflinePlan, PlanFacts]]) -> None:
    """What each choice of slots per rank would bring and cost."""
    rows = []
    for plan, facts in choices:
        proposal = plan.proposal
        memory = bytes_text(facts.redundant_bytes_per_rank) if facts.redundant_bytes_per_rank else "-"
        over = "" if facts.layers_over is None else "met" if not facts.layers_over else f"{len(facts.layers_over)} layers over"
        rows.append(
            (
                plan.problem.current.slots_per_rank,
                plan.problem.current.num_physical - plan.problem.current.num_logical,
                memory,
                f"{proposal.lower_bound.worst:.4f}",
                both(proposal.predicted.mean, proposal.predicted.worst),
                f"{proposal.moves.experts:,}",
                over,
            )
        )
    columns = ("slots per rank", "redundant experts", "memory a rank", "bound", "planned", "moves", "target")
    print_table("What redundancy buys", columns, rows, right=columns[:-1])
    console().print(LEGEND, style="dim")


def show_dry_run(deployment: str, reply: Any) -> None:
    """What a planner would do now, and what its gate says. Reply: a PlanResponse."""
    view = reply.proposal
    rows = [
        (label, both(value.mean_over_layers, value.worst_layer))
        for label, value in (("now", view.before), ("planned", view.predicted), ("lower bound", view.lower_bound))
    ]
    cut = ", cut off by the time limit" if reply.cut_off else ""
    print_table(f"{deployment}: dry run of policy {view.policy}{cut}, nothing is published", ("", "imbalance"), rows)
    screen = console()
    volume = bytes_text(view.moves.bytes.same_node + view.moves.bytes.cross_node)
    least = f", bound >= {reply.moves_lower_bound:,}" if reply.HasField("moves_lower_bound") else ""
    screen.print(f"would move {view.moves.experts:,} experts{least}, {volume}")
    print_fact("gate", f"{reply.verdict.reason} [{reply.verdict.code}]", width=4)
    if reply.cannot_roll_out:
        print_fact("", f"it cannot be carried out: {reply.cannot_roll_out}", width=4)
    elif reply.verdict.move:
        print_fact("", f"`eplb rebalance -d {deployment}` would carry it out", width=4)
    if len(reply.front) > 1:
        _show_live_front(reply.front)
    screen.print(f"solved in {reply.solve_s:.3f} s; {LEGEND}", style="dim")


def _show_live_front(front: Sequence[Any]) -> None:
    """The points that the gate could choose from."""
    several = len({point.model for point in front}) > 1
    rows = []
    for point in front:
        marks = [mark for mark, holds in (("the gate's choice", point.is_choice), ("the policy's plan", point.is_own)) if holds]
        volume = bytes_text(point.moves.bytes.same_node + point.moves.bytes.cross_node)
        row = (
            f"{point.moves.experts:,}",
            volume,
            f"{point.predicted.mean_over_layers:.4f}",
            f"{point.predicted.worst_layer:.4f}",
        )
        rows.append([*([point.model] if several else []), *row, ", ".join(marks)])
    columns = [*(["model"] if several else []), "moves", "bytes", "mean over layers", "worst layer", ""]
    print_table("Pareto front: less imbalance only for more moves", columns, rows, right=columns[several:-1])
