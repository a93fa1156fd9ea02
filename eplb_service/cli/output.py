"""How commands print: one table for people, the same facts as JSON for machines."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import click
import numpy as np
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eplb_service.pb.v1 import common_pb2
from eplb_service.rpc.arrays import array_from_pb

Command = TypeVar("Command", bound=Callable[..., Any])
PIPED_WIDTH = 100_000
CUT_WIDTH_MIN = 12


def output_option(command: Command) -> Command:
    """Adds `--output table|json`."""
    option = click.option(
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="table: for people; json: the same facts, one document, for machines.",
    )
    return option(command)


def to_plain(message: Message) -> dict[str, Any]:
    """A message as plain values: integers stay integers, packed arrays become nested lists, enums lower-case words."""
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            plain[field.name] = None
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_values = field.message_type.fields_by_name["value"]
            plain[field.name] = {key: _plain_value(of_values, value[key]) for key in sorted(value)}
        elif _is_repeated(field):
            plain[field.name] = [_plain_value(field, item) for item in value]
        else:
            plain[field.name] = _plain_value(field, value)
    return plain


def _is_repeated(field: Any) -> bool:
    """Of a field descriptor: newer protobuf has `is_repeated`, older only `label`."""
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def _plain_value(field: Any, value: Any) -> Any:
    if isinstance(value, common_pb2.Array):
        axes = [f"axis {axis}" for axis in range(len(value.shape))]
        array = array_from_pb(value, field.name, dtypes="iuf", shape=axes)
        if array.dtype.kind != "f":
            return array.tolist()
        plain = array.astype(object)
        plain[~np.isfinite(array)] = None
        return plain.tolist()
    if isinstance(value, Message):
        return to_plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON knows no NaN and no infinity
    if field.enum_type is not None:
        name = field.enum_type.values_by_number[value].name
        prefix = "".join("_" + c if c.isupper() else c.upper() for c in field.enum_type.name).lstrip("_") + "_"
        return name.removeprefix(prefix).lower()
    return value


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_json_line(value: object) -> None:
    """One JSON document on a line of its own: for streams."""
    click.echo(json.dumps(value, allow_nan=False))


def console() -> Console:
    """Console on stdout, text taken as it is (reasons hold brackets).

    As wide as the terminal, or as COLUMNS says; into a file or pipe nothing is wrapped or cut: `grep` finds lines whole.
    """
    plain = Console(highlight=False, markup=False)
    wide = not plain.is_terminal and "COLUMNS" not in os.environ
    return Console(highlight=False, markup=False, width=PIPED_WIDTH) if wide else plain


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    cut: Sequence[str] = (),
    indent: int = 0,
) -> None:
    """A table; columns named in `right` are numbers, those in `cut` lose their end where the terminal is narrow."""
    out = console()
    if title:
        out.print(title, style="bold")
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    cells = [[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows]
    widths = [max([len(name), *(row[at].cell_len for row in cells)]) + 2 for at, name in enumerate(columns)]
    left = out.width - indent - sum(width for name, width in zip(columns, widths, strict=True) if name not in cut)
    for column in columns:
        side: Literal["left", "right"] = "right" if column in right else "left"
        if column in cut:
            most = max(CUT_WIDTH_MIN, left // len(cut) - 2)
            table.add_column(column, justify=side, overflow="ellipsis", no_wrap=True, max_width=most)
        else:
            table.add_column(column, justify=side, overflow="fold")
    for row in cells:
        table.add_row(*row)
    _print_trimmed(out, Padding(table, (0, 0, 0, indent)))


def print_fact(label: str, text: str, *, width: int = 0, style: str = "") -> None:
    """`label  text`, indented; a long text goes on below itself, not below its label."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label, "dim"), Text(text, style))
    _print_trimmed(console(), Padding(grid, (0, 0, 0, 2)))


def _print_trimmed(out: Console, shown: RenderableType) -> None:
    """Print; outside a terminal without the spaces that fill lines up."""
    if out.is_terminal:
        out.print(shown)
        return
    with out.capture() as captured:
        out.print(shown)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def bytes_text(count: int) -> str:
    """Bytes for people: 1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise ValueError(count)


def seconds_text(seconds: float) -> str:
    """A duration for people: 95 -> '1 min 35 s'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def clock_text(seconds_since_1970: float) -> str:
    """Local wall-clock time; empty for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds_since_1970)) if seconds_since_1970 else ""


def imbalance_text(mean: float, worst: float) -> str:
    """Mean over layers and worst layer, as every command prints them."""
    return f"{mean:.3f} / {worst:.3f}"
