"""`eplb drain` and `eplb undrain`: ranks that are to be stopped hold nothing, until they are given back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import click

from eplb_service.cli.client import (
    ORDER_TIMEOUT_S,
    PlannerClient,
    deployment_option,
    planner_options,
    planner_options_with,
    the_deployment,
)
from eplb_service.cli.output import output_option, print_fact, print_json, seconds_text, to_plain
from eplb_service.cli.steer import KEY_HELP, ordered, print_settings
from eplb_service.drain import DrainState
from eplb_service.errors import DeadlineError
from eplb_service.pb.v1 import admin_pb2

LOOK_S = 0.5
DONE = frozenset({DrainState.SAFE_TO_STOP, DrainState.ABSENT})

_ranks = click.argument("ranks", metavar="[RANK]...", type=click.IntRange(min=0), nargs=-1)


@click.command(short_help="Move every expert off ranks that are to be stopped.")
@_ranks
@click.option("--node", default="", help="Drain all ranks of this node.")
@click.option("--wait", "wait_s", type=click.FloatRange(min=0), help="Wait so many seconds until it is safe to stop them.")
@deployment_option
@click.option("--key", help=KEY_HELP)
@output_option
@planner_options_with(timeout_s=ORDER_TIMEOUT_S)
def drain(
    ranks: Sequence[int],
    node: str,
    wait_s: float | None,
    deployment: str | None,
    key: str | None,
    output: str,
    client: PlannerClient,
) -> None:
    """Move every expert off RANKS, or off all ranks of a node, ahead of maintenance; nothing is moved to them until `undrain`.

    The fewest experts move, and the gate is not asked. The order stands over restarts of the planner. It is refused, with the
    least number of slots, where the other ranks cannot hold all experts. With --wait the exit code is 0 once they may be
    stopped, and 3 when the time ran out.

    \b
    Example:  eplb drain 3 -d chat-decode
              eplb drain --node gpu-host-7 --wait 300 && systemctl stop engine
    """
    _check_named(ranks, node)
    name = the_deployment(client, deployment)
    key = uuid.uuid4().hex if key is None else key
    request = admin_pb2.DrainRequest(deployment=name, rank_ids=ranks, node=node, idempotency_key=key)
    reply = ordered(client, client.admin.Drain, request)
    drains = list(reply.drains) if wait_s is None else _until_safe(client, name, set(reply.rank_ids), wait_s)
    if output == "json":
        reply.ClearField("drains")
        reply.drains.extend(drains)
        print_json({**to_plain(reply), "idempotency_key": key})
        return
    _print_answer(name, reply)
    for found in drains:
        print_fact(found.state, found.reason, width=12)


def _print_answer(name: str, reply: Any) -> None:
    if reply.generation:
        click.echo(f"{name}: generation {reply.generation} is published; `eplb status {name}` tells when it is safe to stop")
    else:
        click.echo(f"{name}: nothing was published")
    print_fact("why", f"{reply.verdict.reason} [{reply.verdict.code}]", width=12)


def _until_safe(client: PlannerClient, name: str, ranks: set[int], wait_s: float) -> list[Any]:
    """The drained ranks once those of an order may be stopped. Raises DeadlineError saying what is left."""
    ends_at_s = time.monotonic() + wait_s
    while True:
        reply = client.call(client.admin.Status, admin_pb2.StatusRequest(deployment=name))
        view = reply.deployments[0]
        drains = list(view.drains)
        waited_for = [found for found in drains if found.rank_id in ranks and found.state not in DONE]
        if not waited_for:
            return drains
        if time.monotonic() >= ends_at_s:
            state = view.state + (f": {view.reason}" if view.reason else "")
            raise DeadlineError(
                f"after {seconds_text(wait_s)}: {'; '.join(found.reason for found in waited_for)} ({name} is {state});"
                f" the drain goes on, `eplb status {name}` tells how far it is"
            )
        time.sleep(min(LOOK_S, max(0.0, ends_at_s - time.monotonic())))


@click.command(short_help="Give drained ranks back to planning.")
@_ranks
@click.option("--node", default="", help="Give back all ranks of this node.")
@deployment_option
@output_option
@planner_options
def undrain(ranks: Sequence[int], node: str, deployment: str | None, output: str, client: PlannerClient) -> None:
    """Let plans use RANKS again, after `eplb drain`. Nothing moves at once: the next plan that pays does.

    \b
    Example:  eplb undrain 3 -d chat-decode
    """
    _check_named(ranks, node)
    name = the_deployment(client, deployment)
    request = admin_pb2.UndrainRequest(deployment=name, rank_ids=ranks, node=node)
    print_settings(client.call(client.admin.Undrain, request), output)


def _check_named(ranks: Sequence[int], node: str) -> None:
    if not ranks and not node:
        raise click.UsageError("name at least one rank, or a node with --node", click.get_current_context())
