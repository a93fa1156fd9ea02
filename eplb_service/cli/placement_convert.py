"""`eplb placement convert`: a placement file of one engine as another reads it, with nothing else running."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from eplb_service.cli import values
from eplb_service.ids import ids_text

if TYPE_CHECKING:
    from eplb_service.formats.placement_rows import PlacementFile
    from eplb_service.formats.placements import PlacementPath

COUNT = click.IntRange(min=1)


@click.command(short_help="A placement file in another format.")
@click.argument("source", type=values.placement_file, metavar="[FORMAT:]IN")
@click.argument("target", type=values.placement_file, metavar="[FORMAT:]OUT")
@click.option("--ranks", type=COUNT, metavar="R", help="Ranks that the slots of IN are on, where it does not say.")
@click.option(
    "--experts", type=COUNT, metavar="E", help="Experts of a layer.  [default: by the largest id, where IN does not say]"
)
@click.option(
    "--layer-ids",
    type=values.layer_ids,
    metavar="LIST",
    help="Absolute ids of the MoE layers, such as 3..60: of IN's rows, or which of them to keep.",
)
@click.option(
    "--num-layers", type=COUNT, metavar="N", help="Rows of an sglang file, dense layers too.  [default: IN's, else all ids]"
)
@click.option(
    "--layer-updates-per-iter",
    type=click.IntRange(min=0),
    metavar="N",
    help="Of a trtllm file; 0 keeps the placement.  [default: IN's, else 0]",
)
def convert(
    source: PlacementPath,
    target: PlacementPath,
    ranks: int | None,
    experts: int | None,
    layer_ids: tuple[int, ...] | None,
    num_layers: int | None,
    layer_updates_per_iter: int | None,
) -> None:
    """Write the placement in IN as OUT. Formats are eplb, sglang, trtllm and vllm-ascend.

    IN's format is found out by its content, OUT's is eplb unless it is named. A layer of --layer-ids that IN does not have is
    filled as the engine of OUT starts it, and said. What is read is checked whole, what is written
    is read back before OUT is replaced.

    \b
    Example:  eplb placement convert plan.json sglang:location.json
              eplb placement convert --ranks 32 --layer-ids 3..60 location.json trtllm:balancer.yaml
    """
    from eplb_service.formats.placement_rows import Expectation  # noqa: PLC0415  (keeps `--help` quick)
    from eplb_service.formats.placements import format_to_write, read_placement, write_placement  # noqa: PLC0415
    from eplb_service.ids import RankId  # noqa: PLC0415

    chosen = format_to_write(target)
    rank_ids = None if ranks is None else tuple(RankId(rank) for rank in range(ranks))
    read = read_placement(source, Expectation(num_logical=experts, rank_ids=rank_ids, layer_ids=layer_ids), fill=chosen)
    rows = read.num_layers if num_layers is None else num_layers
    updates = read.layer_updates_per_iter if layer_updates_per_iter is None else layer_updates_per_iter
    write_placement(target, read.table, num_layers=rows, layer_updates_per_iter=updates)
    for note in read.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"{target} written as {chosen}: {_table_text(read)}")


def _table_text(read: PlacementFile) -> str:
    table = read.table
    layers = (
        f"{table.num_layers} layers ({ids_text(table.layer_ids)})" if table.num_layers > 1 else f"layer {table.layer_ids[0]}"
    )
    return f"{layers} x {table.num_logical} experts in {table.num_physical} slots on {table.num_ranks} ranks"
