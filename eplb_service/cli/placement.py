"""`eplb placement`: show, watch, compare and convert placements."""

from __future__ import annotations

from typing import Any

import click
import grpc

from eplb_service.cli.client import PlannerClient, deployment_option, planner_options, the_deployment, typed_errors
from eplb_service.cli.generations import state_text
from eplb_service.cli.output import (
    bytes_text,
    console,
    output_option,
    print_json,
    print_json_line,
    print_table,
    to_plain,
)
from eplb_service.cli.placement_convert import convert
from eplb_service.errors import NotFoundError
from eplb_service.pb.v1 import placement_pb2
from eplb_service.rpc.convert_placement import table_from_pb


@click.group(short_help="Show, watch, compare or convert placements.")
def placement() -> None:
    """What each slot holds: now, as it changes, between two generations, or in a file.

    \b
    Example:  eplb placement show -d chat-decode --layer 3
    """


placement.add_command(convert)


@placement.command(short_help="Slots and experts of one generation.")
@deployment_option
@click.option("--generation", "-g", type=click.IntRange(min=0), default=0, show_default=True, help="0 = what is live now.")
@click.option("--layer", type=click.IntRange(min=0), help="Only this layer id.")
@output_option
@planner_options
def show(deployment: str | None, generation: int, layer: int | None, output: str, client: PlannerClient) -> None:
    """Show the experts in every rank's slots. An expert with several replicas is marked with *.

    Under weighted dispatch the mark is followed by the share of the expert's tokens that this replica takes.

    \b
    Example:  eplb placement show -d chat-decode --layer 3
    """
    name = the_deployment(client, deployment)
    request = placement_pb2.GetPlacementRequest(deployment=name, generation=generation)
    view = client.call(client.placement.GetPlacement, request)
    known = sorted({layer_id for table in view.placement.tables for layer_id in table.layer_ids})
    if layer is not None and layer not in known:
        raise NotFoundError(f"{name} has no MoE layer {layer}; its layers are {', '.join(map(str, known))}")
    if output == "json":
        print_json(_only_layer(to_plain(view), layer))
        return
    title = f"generation {view.generation} ({state_text(view.state)})" if generation else f"live, generation {view.generation}"
    console().print(f"{name}: {title}, digest {view.placement.digest}", style="bold")
    for table in view.placement.tables:
        _show_table(table, layer)
    click.echo("* the expert has more than one copy in its layer; - an empty slot")


def _only_layer(view: dict[str, Any], layer: int | None) -> dict[str, Any]:
    """The same view with the rows of one layer (None: of all)."""
    if layer is not None:
        for table in view["placement"]["tables"]:
            for key in ("physical_to_logical", "shares"):
                if table.get(key) is not None:
                    rows = zip(table["layer_ids"], table[key], strict=True)
                    table[key] = [row for layer_id, row in rows if layer_id == layer]
            table["layer_ids"] = [layer_id for layer_id in table["layer_ids"] if layer_id == layer]
    return view


def _show_table(table: Any, only_layer: int | None) -> None:
    rows: list[tuple[object, ...]] = []
    known = table_from_pb(table)
    slots = known.slots_per_rank
    width = len(str(table.num_logical - 1)) + 1 + (4 if known.shares is not None else 0)
    for layer_id, row in zip(known.layer_ids, known.physical_to_logical.tolist(), strict=True):
        if only_layer is not None and layer_id != only_layer:
            continue
        shares = known.shares_row(layer_id)
        texts = [
            _expert(expert, row.count(expert), None if shares is None else float(shares[slot]))
            for slot, expert in enumerate(row)
        ]
        for position, rank in enumerate(table.rank_ids):
            experts = " ".join(text.rjust(width) for text in texts[position * slots : (position + 1) * slots])
            rows.append((layer_id if position == 0 else "", rank, experts))
    if rows:
        title = f"model {table.model}: {table.num_logical} experts in {slots} slots on each of {len(table.rank_ids)} ranks"
        print_table(title, ("layer", "rank", "experts by slot"), rows, right=("layer", "rank"))


def _expert(expert: int, copies: int, share: float | None) -> str:
    """One slot. The share is told where the expert has other replicas, which take the rest."""
    if expert < 0:
        return "-"
    if share is None:
        return f"{expert}{'*' if copies > 1 else ' '}"
    return f"{expert}*{share:>4.0%}" if copies > 1 else f"{expert}     "


@placement.command(short_help="Print a line at every change of what is live.")
@deployment_option
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many changes.")
@output_option
@planner_options
def watch(deployment: str | None, count: int | None, output: str, client: PlannerClient) -> None:
    """Follow the live placement until interrupted; the first line is what is live now. As JSON: one document a line.

    \b
    Example:  eplb placement watch -d chat-decode
    """
    name = the_deployment(client, deployment)
    stream = client.placement.WatchPlacement(placement_pb2.WatchPlacementRequest(deployment=name))
    seen = 0
    with typed_errors(client.address):
        try:
            for view in stream:
                _watch_line(view, output)
                seen += 1
                if count is not None and seen >= count:
                    return
        except KeyboardInterrupt:
            return
        finally:
            if isinstance(stream, grpc.Call):
                stream.cancel()


def _watch_line(view: Any, output: str) -> None:
    if output == "json":
        print_json_line(to_plain(view))
        return
    layers = sorted(set(view.layer_generations))
    mixed = "" if len(layers) <= 1 else f" (layers on generations {', '.join(map(str, layers))})"
    state = state_text(view.state)
    click.echo(f"{view.deployment}: generation {view.generation} live{mixed}, {state}, digest {view.placement_digest}")


@placement.command(short_help="What changes from one generation to another.")
@click.argument("from_generation", type=click.IntRange(min=0))
@click.argument("to_generation", type=click.IntRange(min=0))
@deployment_option
@output_option
@planner_options
def diff(from_generation: int, to_generation: int, deployment: str | None, output: str, client: PlannerClient) -> None:
    """List the slots that differ from FROM_GENERATION to TO_GENERATION (0 = what is live now).

    Under weighted dispatch a slot also differs when it keeps its expert and takes another share of its tokens.

    \b
    Example:  eplb placement diff 6 7 -d chat-decode
    """
    name = the_deployment(client, deployment)
    request = placement_pb2.DiffPlacementsRequest(deployment=name, from_generation=from_generation, to_generation=to_generation)
    reply = client.call(client.placement.DiffPlacements, request)
    if output == "json":
        print_json(to_plain(reply))
        return
    rows = [
        (
            change.layer.model,
            change.layer.layer_id,
            change.rank_id,
            change.slot,
            *("-" if expert < 0 else expert for expert in (change.from_expert, change.to_expert)),
            *(f"{share:.1%}" for share in (change.from_share, change.to_share) if change.HasField("to_share")),
        )
        for change in reply.changes
    ]
    if not rows:
        pair = " and ".join(f"generation {number}" if number else "what is live" for number in (from_generation, to_generation))
        click.echo(f"{name}: {pair} hold the same experts in every slot")
        return
    columns = ("model", "layer", "rank", "slot", "from expert", "to expert", "from share", "to share")[: len(rows[0])]
    print_table("", columns, rows, right=columns[1:])
    moved = reply.moves
    volume = bytes_text(moved.bytes.same_node + moved.bytes.cross_node)
    click.echo(f"{len(rows)} slots differ; {moved.experts} experts move, {volume}")
