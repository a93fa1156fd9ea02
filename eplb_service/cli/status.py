"""`eplb status`: deployments, ranks, what is going on and why."""

from __future__ import annotations

from typing import Any

import click

from eplb_service.cli.client import PlannerClient, planner_options
from eplb_service.cli.output import (
    bytes_text,
    console,
    imbalance_text,
    output_option,
    print_json,
    print_table,
    seconds_text,
    to_plain,
)
from eplb_service.pb.v1 import admin_pb2


@click.command(short_help="Deployments, ranks, what is going on and why.")
@click.argument("deployment", required=False)
@output_option
@planner_options
def status(deployment: str | None, output: str, client: PlannerClient) -> None:
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
    if not reply.deployments:
        out.print("no deployment yet: no agent has registered a rank (see `eplb agent --help`)")
    for view in reply.deployments:
        _show(view)


def _show(view: Any) -> None:
    out = console()
    settings = view.settings
    paused = f", PAUSED ({settings.pause_reason or 'no reason given'})" if settings.paused else ""
    out.print(f"\n{view.deployment}  {view.state}{': ' + view.reason if view.reason else ''}", style="bold")
    out.print(
        f"  mode {settings.mode}{paused}, policy {settings.policy}, epoch {view.epoch}, live generation {view.live_generation}"
    )
    if view.HasField("imbalance"):
        text = imbalance_text(view.imbalance.mean_over_layers, view.imbalance.worst_layer)
        out.print(
            f"  window {view.window_index}: imbalance (mean over layers / worst layer) {text},"
            f" {view.window_tokens} tokens, coverage {view.window_coverage:.0%}"
        )
    else:
        out.print("  no full load window yet")
    refused = ", ".join(f"{count} {code}" for code, count in sorted(view.windows_refused.items()))
    out.print(f"  windows accepted {view.windows_accepted}{', refused: ' + refused if refused else ''}")
    if view.HasField("last_verdict"):
        verdict = view.last_verdict
        out.print(f"  last verdict: {'move' if verdict.move else 'keep'} ({verdict.code}): {verdict.reason}")
    if view.rollout.state:
        rollout = view.rollout
        stalled = "  STALLED" if rollout.stalled else ""
        out.print(
            f"  rollout of generation {rollout.generation}: {rollout.state}, chunk {rollout.chunks_done + 1} of"
            f" {rollout.chunks_total}, {seconds_text(rollout.age_s)}{stalled}"
        )
    if view.rollout.last_error:
        out.print(f"  last rollout error: {view.rollout.last_error}")
    rows = [
        (
            rank.address.rank_id,
            rank.node,
            rank.state,
            "yes" if rank.voting else f"no: {rank.off_reason}",
            rank.boundary,
            "idle" if rank.idle else "",
            rank.chunk_state,
            bytes_text(rank.staging_bytes),
            rank.windows_dropped,
            seconds_text(rank.last_seen_s_ago),
        )
        for rank in view.ranks
    ]
    columns = ("rank", "node", "state", "voting", "step", "", "chunk", "staging", "windows lost", "seen ago")
    print_table("", columns, rows, right=("rank", "step", "staging", "windows lost", "seen ago"))
