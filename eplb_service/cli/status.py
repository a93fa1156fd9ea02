"""`eplb status`: deployments, ranks, what is going on and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from eplb_service.cli.client import PlannerClient, planner_options
from eplb_service.cli.output import (
    bytes_text,
    console,
    output_option,
    print_fact,
    print_json,
    print_table,
    seconds_text,
    to_plain,
)
from eplb_service.coverage import RESTART, why_uncovered
from eplb_service.ids import LayerRef
from eplb_service.pb.v1 import admin_pb2
from eplb_service.verdict import VerdictCode

LABEL_WIDTH = 12
GATE_MOVES = (VerdictCode.MOVE, VerdictCode.COVERAGE_BROKEN)


@click.command(short_help="Deployments, ranks, what is going on and why.")
@click.argument("deployment", required=False)
@click.option("--settings", is_flag=True, help="The planner's own settings too, as far as they are not at their default.")
@output_option
@planner_options
def status(deployment: str | None, output: str, client: PlannerClient, *, settings: bool) -> None:
    """Show what the planner knows: of one DEPLOYMENT, or of all.

    \b
    Example:  eplb status
              eplb status chat-decode --output json | jq '.deployments[0].rollout'
    """
    reply = client.call(client.admin.Status, admin_pb2.StatusRequest(deployment=deployment or ""))
    if output == "json":
        print_json(to_plain(reply))
        return
    out = console()
    store = "ok" if reply.store_ok else "NOT ANSWERING: no new plans until it does"
    out.print(f"planner {reply.planner} {reply.version}, up {seconds_text(reply.uptime_s)}; store {reply.store}: {store}")
    if settings:
        for key, text in sorted(reply.configuration.items()):
            out.print(f"  {key} = {text}")
        out.print("  everything else is at its default: `eplb serve --help` lists all")
    if not reply.deployments:
        out.print("no deployment yet: no agent has registered a rank (see `eplb agent --help`)")
    for view in reply.deployments:
        _show(view)


def _show(view: Any) -> None:
    console().print(f"\n{view.deployment}  {view.state}{': ' + view.reason if view.reason else ''}", style="bold")
    for label, text, style in _facts(view):
        print_fact(label, text, width=LABEL_WIDTH, style=style)
    rows = [
        (
            rank.address.rank_id,
            f"{rank.node} {rank.nic}".rstrip(),
            rank.state,
            "yes" if rank.voting else f"no: {rank.off_reason}",
            f"{rank.boundary}{' idle' if rank.idle else ''}",
            rank.chunk_state or "-",
            bytes_text(rank.staging_bytes),
            rank.windows_dropped,
            seconds_text(rank.last_seen_s_ago),
        )
        for rank in view.ranks
    ]
    where = "node, NIC" if any(rank.nic for rank in view.ranks) else "node"
    columns = ("rank", where, "state", "voting", "step", "chunk", "staging", "windows lost", "seen ago")
    if rows:
        print_table("", columns, rows, right=("rank", "step", "staging", "windows lost", "seen ago"), indent=2)


def _facts(view: Any) -> Iterator[tuple[str, str, str]]:
    """Label, text and style of each line about a deployment."""
    settings = view.settings
    yield "settings", f"mode {settings.mode}, policy {settings.policy}, epoch {view.epoch}", ""
    if view.HasField("advised"):
        yield "advised", *_advised_text(view.advised)
    if settings.paused:
        yield "PAUSED", f"{settings.pause_reason or 'no reason given'} (`eplb resume -d {view.deployment}` ends it)", "yellow"
    if view.unreachable:
        lost = {LayerRef(found.layer.model, found.layer.layer_id): tuple(found.experts) for found in view.unreachable}
        yield "UNREACHABLE", why_uncovered(lost, view.restoring or RESTART), "red"
    for found in view.drains:
        yield "drained", found.reason, "" if found.state in ("safe_to_stop", "absent") else "yellow"
    yield "live", f"generation {view.live_generation}{'' if view.live_generation else ', as the engine loaded it'}", ""
    yield "imbalance", _load_text(view), ""
    refused = ", ".join(f"{count} {code}" for code, count in sorted(view.windows_refused.items()))
    if not view.HasField("advised"):
        yield "load reports", f"{view.windows_accepted:,} accepted{'; refused: ' + refused if refused else ''}", ""
    if view.HasField("last_verdict"):
        verdict = view.last_verdict
        yield "last verdict", f"{verdict.reason} [{verdict.code}]", ""
        of_gate = verdict.move and verdict.code in GATE_MOVES  # what an operator ordered is carried out in any mode
        if of_gate and settings.mode == "observe" and not settings.paused and not view.rollout.state:
            name = view.deployment
            hint = f"`eplb rebalance -d {name}` moves once, `eplb mode auto -d {name}` whenever it pays"
            yield "", f"nothing follows in mode observe: {hint}", ""
    yield from _learned(view.learned)
    if view.rollout.state:
        yield "rollout", *_rollout_text(view.rollout)
    if view.rollout.last_error:
        yield "last error", view.rollout.last_error, "yellow"


def _advised_text(advised: Any) -> tuple[str, str]:
    """Who asks, and how often; a person looks twice at one who never did."""
    if not advised.HasField("last_question_s_ago"):
        return f"by questions of {advised.engine or 'an engine'}: none yet at this planner", "yellow"
    every = f", every {seconds_text(advised.interval_s)}" if advised.HasField("interval_s") else ""
    answers = ", ".join(f"{count} {kind}" for kind, count in sorted(advised.answers.items()))
    text = f"by questions of {advised.engine}, last {seconds_text(advised.last_question_s_ago)} ago{every}; answers: {answers}"
    return text, ""


def _learned(learned: Any) -> Iterator[tuple[str, str, str]]:
    """What the gate goes by, as far as the deployment taught it."""
    for label, text in (
        ("step cost", learned.step_time),
        ("move cost", learned.moves),
        ("horizon", learned.horizon),
        ("promises", learned.promises),
        ("forecast", learned.forecast),
    ):
        if text:
            yield label, text, ""
    if learned.hold:
        yield "HELD", f"{learned.hold}; nothing is moved under the load that it was planned for", "yellow"


def _load_text(view: Any) -> str:
    if not view.HasField("imbalance"):
        return "no full load window yet"
    imbalance = view.imbalance
    worst = ""
    if len(view.layers) == len(imbalance.per_layer) > 1:
        layer = max(zip(imbalance.per_layer, view.layers, strict=True), key=lambda pair: pair[0])[1]
        worst = f" (layer {layer.layer_id} of {layer.model})"
    return (
        f"mean over layers {imbalance.mean_over_layers:.3f}, worst layer {imbalance.worst_layer:.3f}{worst};"
        f" window {view.window_index}, {view.window_tokens:,} tokens, coverage {view.window_coverage:.0%}"
    )


def _rollout_text(rollout: Any) -> tuple[str, str]:
    done = f"{rollout.chunks_done} of {rollout.chunks_total} chunks done"
    ranks = ", ".join(str(rank) for rank in rollout.waiting_for)
    stalled = f", STALLED: waits for rank {ranks}" if rollout.stalled else ""
    text = f"generation {rollout.generation}: {rollout.state}, {done}, for {seconds_text(rollout.age_s)}{stalled}"
    return text, "red" if rollout.stalled else "yellow"
