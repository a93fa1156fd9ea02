"""`eplb generations`: the history of placements, with reasons."""

from __future__ import annotations

from typing import Any

import click

from eplb_service.cli.client import PlannerClient, deployment_option, planner_options, the_deployment
from eplb_service.cli.output import (
    bytes_text,
    clock_text,
    console,
    imbalance_text,
    output_option,
    print_fact,
    print_json,
    print_table,
    to_plain,
)
from eplb_service.errors import InvalidInputError
from eplb_service.flip_stall import FlipStall
from eplb_service.pb.v1 import placement_pb2


def state_text(state: int) -> str:
    """`GENERATION_STATE_ROLLING_OUT` as `rolling out`."""
    return placement_pb2.GenerationState.Name(state).removeprefix("GENERATION_STATE_").replace("_", " ").lower()


def _imbalance(view: Any, name: str) -> str:
    if not view.HasField(name):
        return ""
    value = getattr(view, name)
    return imbalance_text(value.mean_over_layers, value.worst_layer)


def _worst(view: Any, name: str) -> str:
    return f"{getattr(view, name).worst_layer:.3f}" if view.HasField(name) else "-"


def _after_commit(view: Any) -> list[tuple[str, str]]:
    """What was promised, and what each window under it showed against the placement before."""
    facts = [("promised gain", f"{view.promised_gain:.4f}" if view.HasField("promised_gain") else "")]
    if view.observed_windows:
        facts.append(("  window by window", "gain over the previous placement on the same window (mean over layers by load)"))
    for window in view.observed_windows:
        steps = (
            f"; steps {window.step_s * 1e3:.3g} ms, {window.previous_step_s * 1e3:.3g} ms expected without it"
            if window.previous_step_s
            else ""
        )
        text = f"{window.previous_mean - window.mean:.4f} ({window.previous_mean:.4f} -> {window.mean:.4f}){steps}"
        facts.append((f"  window {window.window_index}", text))
    return [*facts, ("judged", view.judgement)]


def _took(view: Any) -> str:
    """What `rollout_s` is the time of. An engine that is advised flips when it likes; its next question shows that it did."""
    return "decision to last flip" if view.flip_boundaries else "told to shown"


def _bytes(moves: Any) -> str:
    """By where they come from."""
    text = f"{bytes_text(moves.bytes.same_node)} within nodes, {bytes_text(moves.bytes.cross_node)} across"
    return text + (f", {bytes_text(moves.bytes_from_backups)} from backups" if moves.bytes_from_backups else "")


def _engine_copy(view: Any) -> str:
    """How long an engine that moves its own weights took, as its plug-in saw it."""
    if not view.copied_s:
        return ""
    return f"{view.copied_s:.2f} s, {'in which no step ran' if view.copy_held_steps else 'beside its steps'}"


def _flip_stall(view: Any) -> str:
    """How long it held up steps, beside what was expected."""
    if not view.HasField("flip_stall"):
        return ""
    told = view.flip_stall
    optional = {name: getattr(told, name) if told.HasField(name) else None for name in ("limit_s", "measured_s")}
    return str(FlipStall(expected_s=told.expected_s, **optional))


@click.group(short_help="The history of placements, with reasons.")
def generations() -> None:
    """List generations, or show one whole.

    \b
    Example:  eplb generations list -d chat-decode
    """


@generations.command("list", short_help="Generations, newest first.")
@deployment_option
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Most to show.")
@output_option
@planner_options
def list_generations(deployment: str | None, limit: int, output: str, client: PlannerClient) -> None:
    """List the newest generations of a deployment, with the imbalance of their worst layer.

    \b
    Example:  eplb generations list -d chat-decode --limit 5
    """
    name = the_deployment(client, deployment)
    request = placement_pb2.ListGenerationsRequest(deployment=name, limit=limit)
    reply = client.call(client.placement.ListGenerations, request)
    if output == "json":
        print_json(to_plain(reply))
        return
    rows = [
        (
            view.generation,
            state_text(view.state),
            clock_text(view.created_at_s),
            *(_worst(view, name) for name in ("before", "predicted", "observed")),
            view.moves.experts,
            bytes_text(view.moves.bytes.same_node + view.moves.bytes.cross_node + view.moves.bytes_from_backups),
            view.stop_reason or view.reason,
        )
        for view in reply.generations
    ]
    if not rows:
        click.echo(f"{name} has no generation yet: it routes as the engine loaded it (generation 0)")
        return
    columns = ("generation", "state", "made", "before", "predicted", "observed", "moves", "bytes", "why")
    print_table("", columns, rows, right=columns[:1] + columns[3:8], cut=("why",))
    click.echo("before, predicted, observed: imbalance of the worst layer; `eplb generations show NUMBER` tells all of one")


@generations.command("show", short_help="One generation, whole.")
@click.argument("generation", type=click.IntRange(min=0))
@deployment_option
@click.option("--events", is_flag=True, help="Tell its rollout too: what happened, when, to which chunk and rank, and why.")
@output_option
@planner_options
def show_generation(
    generation: int,
    deployment: str | None,
    events: bool,  # noqa: FBT001  (click passes options by name)
    output: str,
    client: PlannerClient,
) -> None:
    """Show why GENERATION was made, what it promised, what was observed, and its fate.

    \b
    Example:  eplb generations show 7 -d chat-decode --events
    """
    if not generation:
        raise InvalidInputError(
            "generation 0 is what the engine loaded by itself: it was not published and has no record;"
            " `eplb placement show` shows what is live, `eplb rollback 0` goes back to it"
        )
    name = the_deployment(client, deployment)
    request = placement_pb2.GetPlacementRequest(deployment=name, generation=generation)
    view = client.call(client.placement.GetPlacement, request)
    asked = placement_pb2.GetRolloutEventsRequest(deployment=name, generation=generation)
    told = client.call(client.placement.GetRolloutEvents, asked) if events else None
    if output == "json":
        print_json(to_plain(view) | ({"rollout": to_plain(told)} if told is not None else {}))
        return
    _print_generation(name, view)
    if told is not None:
        _print_events(told)


def _print_generation(name: str, view: Any) -> None:
    """Everything of one generation but its rollout's events."""
    out = console()
    out.print(f"{name} generation {view.generation}: {state_text(view.state)}, digest {view.placement_digest}", style="bold")
    facts: list[tuple[str, str]] = [
        ("made", f"{clock_text(view.created_at_s)} by {view.policy or '-'} in epoch {view.epoch}"),
        ("why", view.reason),
        ("stopped because", view.stop_reason),
        ("active since", clock_text(view.active_at_s)),
        ("imbalance", "mean over layers / worst layer"),
        ("  before", _imbalance(view, "before")),
        ("  predicted", _imbalance(view, "predicted")),
        ("  lower bound", _imbalance(view, "lower_bound")),
        ("  observed", _imbalance(view, "observed")),
        *_after_commit(view),
        ("moves", f"{view.moves.experts} experts, {view.moves.slots_rewritten} slots rewritten"),
        ("bytes", _bytes(view.moves)),
        ("flipped at steps", ", ".join(str(step) for step in view.flip_boundaries)),
        (_took(view), f"{view.rollout_s:.2f} s" if view.rollout_s else ""),
        ("longest flip", _flip_stall(view)),
        ("engine's own copy", _engine_copy(view)),
    ]
    for label, text in facts:
        if text:
            print_fact(label, text, width=21)


def _print_events(told: Any) -> None:
    """The story of a rollout, oldest event first; seconds since the first one, chunk ids as in the logs."""
    begin_s = told.events[0].at_s if told.events else 0.0
    title = f"rollout of generation {told.generation}: {len(told.events)} events from {clock_text(begin_s)}"
    rows = [
        (
            f"+{event.at_s - begin_s:.3f}",
            event.epoch,
            event.event,
            f"{event.chunk_id:#x}" if event.HasField("chunk_id") else "",
            event.rank_id if event.HasField("rank_id") else "",
            event.text,
        )
        for event in told.events
    ]
    columns = ("seconds", "epoch", "event", "chunk", "rank", "what")
    print_table(title, columns, rows, right=("seconds", "epoch", "rank"), indent=2)
    if told.incomplete:
        print_fact("incomplete", told.incomplete, style="yellow")
