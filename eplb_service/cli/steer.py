"""Commands that change something: rebalance, rollback, pause, resume, mode."""

from __future__ import annotations

import uuid
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
from eplb_service.cli.output import output_option, print_fact, print_json, to_plain
from eplb_service.config import MODES
from eplb_service.errors import EnvironmentFault
from eplb_service.pb.v1 import admin_pb2

KEY_HELP = "Repeating the command with the same key gives the same answer and does nothing twice (default: a new one)."


def ordered(client: PlannerClient, method: Any, request: Any) -> Any:
    """The answer to an order. An order whose answer was lost may have been carried out: the key tells."""
    try:
        return client.call(method, request)
    except EnvironmentFault as error:
        key = request.idempotency_key
        raise type(error)(f"{error}; if it took the order, the same command with --key {key} tells its answer") from None


def _order(client: PlannerClient, method: Any, request: Any, output: str) -> None:
    """Give an order and print its answer."""
    key = request.idempotency_key
    reply = ordered(client, method, request)
    if output == "json":
        print_json({**to_plain(reply), "idempotency_key": key})
        return
    name = request.deployment
    if reply.generation:
        click.echo(f"{name}: generation {reply.generation} is published; `eplb generations show {reply.generation}` follows it")
    else:
        click.echo(f"{name}: kept, nothing was published")
    print_fact("why", f"{reply.verdict.reason} [{reply.verdict.code}]", width=3)
    if not reply.generation and reply.verdict.code != "no_change":
        print_fact("", "`eplb rebalance --force` skips the gate (never the verification)", width=3)


@click.command(short_help="Plan and roll out now.")
@deployment_option
@click.option("--force", is_flag=True, help="Skip the gate (never the verification).")
@click.option("--policy", default="", help="Policy for this plan (default: the deployment's).")
@click.option("--key", help=KEY_HELP)
@output_option
@planner_options_with(timeout_s=ORDER_TIMEOUT_S)
def rebalance(deployment: str | None, *, force: bool, policy: str, key: str | None, output: str, client: PlannerClient) -> None:
    """Plan from the present load window and roll the plan out, if it pays.

    \b
    Example:  eplb rebalance -d chat-decode
              eplb rebalance -d chat-decode --force --policy ilp
    """
    name = the_deployment(client, deployment)
    key = uuid.uuid4().hex if key is None else key
    request = admin_pb2.RebalanceRequest(deployment=name, idempotency_key=key, force=force, policy=policy)
    _order(client, client.admin.Rebalance, request, output)


@click.command(short_help="Restore the placement of an earlier generation.")
@click.argument("generation", type=click.IntRange(min=0))
@deployment_option
@click.option("--key", help=KEY_HELP)
@output_option
@planner_options_with(timeout_s=ORDER_TIMEOUT_S)
def rollback(generation: int, deployment: str | None, key: str | None, output: str, client: PlannerClient) -> None:
    """Publish a new generation with the content of GENERATION (0 = as the engine loaded it) and roll it out.

    Numbers never go back: rolling back to 7 from 9 makes 10.

    \b
    Example:  eplb rollback 7 -d chat-decode
    """
    name = the_deployment(client, deployment)
    key = uuid.uuid4().hex if key is None else key
    request = admin_pb2.RollbackRequest(deployment=name, generation=generation, idempotency_key=key)
    _order(client, client.admin.Rollback, request, output)


def print_settings(reply: Any, output: str) -> None:
    """Settings after a change."""
    if output == "json":
        print_json(to_plain(reply))
        return
    paused = f"paused ({reply.pause_reason or 'no reason given'})" if reply.paused else "not paused"
    drained = f", drained ranks {', '.join(map(str, reply.drained_rank_ids))}" if reply.drained_rank_ids else ""
    click.echo(f"{reply.deployment}: mode {reply.mode}, {paused}, policy {reply.policy}{drained}")


@click.command(short_help="No new generations until resumed.")
@deployment_option
@click.option("--reason", default="", help="Shown to everyone who asks for the status.")
@output_option
@planner_options
def pause(deployment: str | None, reason: str, output: str, client: PlannerClient) -> None:
    """Publish no new generations; a rollout under way stops after its open chunk. Serving goes on.

    \b
    Example:  eplb pause -d chat-decode --reason "load test until noon"
    """
    name = the_deployment(client, deployment)
    print_settings(client.call(client.admin.Pause, admin_pb2.PauseRequest(deployment=name, reason=reason)), output)


@click.command(short_help="Undo pause.")
@deployment_option
@output_option
@planner_options
def resume(deployment: str | None, output: str, client: PlannerClient) -> None:
    """Plan again, after `eplb pause`.

    \b
    Example:  eplb resume -d chat-decode
    """
    name = the_deployment(client, deployment)
    print_settings(client.call(client.admin.Resume, admin_pb2.ResumeRequest(deployment=name)), output)


@click.command(short_help="Switch a deployment between observe, auto and pinned.")
@click.argument("mode", type=click.Choice(MODES))
@deployment_option
@output_option
@planner_options
def mode(mode: str, deployment: str | None, output: str, client: PlannerClient) -> None:
    """Set the mode: observe plans and shows but publishes nothing by itself; auto acts when it pays; pinned keeps what is live.

    While pinned, `eplb rebalance` is refused too; `eplb rollback` still restores a generation that you choose.

    \b
    Example:  eplb mode auto -d chat-decode
              eplb rollback 7 -d chat-decode && eplb mode pinned -d chat-decode
    """
    name = the_deployment(client, deployment)
    print_settings(client.call(client.admin.SetMode, admin_pb2.SetModeRequest(deployment=name, mode=mode)), output)
