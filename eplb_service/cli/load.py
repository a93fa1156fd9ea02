"""`eplb load`: what is in a load recording of an engine, and the same as a small file of our own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from eplb_service.cli.output import console, output_option, print_fact, print_json, print_table
from eplb_service.formats.loads import LOAD_FORMATS

if TYPE_CHECKING:
    from eplb_service.formats.recording import Float64Array, LoadRecording

FILE = click.Path(path_type=Path)
FACT_WIDTH = 11
FORMAT = click.option(
    "--format",
    "load_format",
    type=click.Choice(LOAD_FORMATS),
    help="What FILE is.  [default: found out]",
)


@click.group(short_help="Show or convert load recordings.")
def load() -> None:
    """Recordings of expert loads: of SGLang, of TensorRT-LLM, plain arrays, our own.

    \b
    Example:  eplb load show dumps/
    """


@load.command(short_help="What is in a load recording.")
@click.argument("file", type=FILE)
@FORMAT
@click.option("--layers", is_flag=True, help="A line for each layer.")
@output_option
def show(file: Path, load_format: str | None, output: str, *, layers: bool) -> None:
    """Show what FILE holds: format, layers, experts, windows, tokens, and what is left out of a plan.

    FILE may be a folder or a quoted pattern, for recordings of one file a rank.

    \b
    Example:  eplb load show expert_distribution_recorder_1757000000.5.pt
              eplb load show 'dumps/*.pt' --layers
    """
    from eplb_service.formats.loads import read_recording  # noqa: PLC0415  (keeps `--help` quick)

    recording = read_recording(file, load_format)
    if output == "json":
        from eplb_service.offline.plan_document import recording_document  # noqa: PLC0415

        per_layer = recording.loads.sum(axis=(0, 2)).tolist()
        print_json(
            {**recording_document(recording), "assignments_per_layer": per_layer, "skew_per_layer": _skew(recording).tolist()}
        )
        return
    console().print(f"{file}: {recording.source}", style="bold")
    for label, text in _facts(recording):
        print_fact(label, text, width=FACT_WIDTH)
    if layers:
        _show_layers(recording)


@load.command(short_help="A load recording as a file of our own.")
@click.argument("file", type=FILE)
@click.argument("out", type=FILE)
@FORMAT
@click.option(
    "--windows", type=click.IntRange(min=1), metavar="N", help="Sum the passes, in order, into N windows.  [default: keep all]"
)
def convert(file: Path, out: Path, load_format: str | None, windows: int | None) -> None:
    """Write the loads in FILE as OUT (.npz), which needs neither torch nor the other ranks' files to be read again.

    \b
    Example:  eplb load convert dumps/ monday.npz --windows 20
    """
    from eplb_service.formats.files import write_atomically  # noqa: PLC0415  (keeps `--help` quick)
    from eplb_service.formats.loads import read_recording  # noqa: PLC0415
    from eplb_service.formats.plain_loads import own_bytes  # noqa: PLC0415
    from eplb_service.formats.recording import summed_windows  # noqa: PLC0415

    if out.suffix.lower() != ".npz":
        raise click.UsageError(f"{out} is to be written as .npz; give it that name")
    recording = read_recording(file, load_format)
    recording = recording if windows is None else summed_windows(recording, windows)
    content = own_bytes(recording)
    write_atomically(out, content)
    shape = recording.loads.shape
    click.echo(f"{out} written: {shape[0]:,} windows x {shape[1]} layers x {shape[2]} experts, {len(content):,} bytes")


def _facts(recording: LoadRecording) -> list[tuple[str, str]]:
    from eplb_service.formats.recording import left_out_text  # noqa: PLC0415
    from eplb_service.ids import ids_text  # noqa: PLC0415

    windows, num_layers, experts = recording.loads.shape
    per_layer = recording.loads.sum(axis=(0, 2))
    low, high = float(per_layer.min()), float(per_layer.max())
    tokens = f"{high:,.0f} assignments in each layer" if low == high else f"{low:,.0f} to {high:,.0f} assignments in a layer"
    skew = _skew(recording)
    worst = recording.layer_ids[int(skew.argmax())]
    facts = [
        ("layers", f"{num_layers} with experts: {ids_text(recording.layer_ids)}"),
        ("experts", f"{experts} in a layer"),
        ("windows", f"{windows:,}"),
        ("tokens", tokens),
        ("skew", f"the hottest expert has {skew.mean():.2f} times the mean, in layer {worst} {skew.max():.2f} times"),
        ("notes", "; ".join(text for text in (left_out_text(recording), *recording.notes) if text)),
    ]
    return [(label, text) for label, text in facts if text]


def _skew(recording: LoadRecording) -> Float64Array:
    """Load of each layer's hottest expert over the mean expert; 1 where there is none. Shape (L,)."""
    totals = recording.loads.sum(axis=0)
    mean = totals.mean(axis=1)
    ratios: Float64Array = np.divide(totals.max(axis=1), mean, out=np.ones_like(mean), where=mean > 0)
    return ratios


def _show_layers(recording: LoadRecording) -> None:
    totals = recording.loads.sum(axis=0)
    skew = _skew(recording)
    rows = [
        (layer, f"{row.sum():,.0f}", int(row.argmax()), f"{ratio:.2f}", int((row == 0).sum()))
        for layer, row, ratio in zip(recording.layer_ids, totals, skew, strict=True)
    ]
    columns = ("layer", "assignments", "hottest expert", "times the mean", "experts unused")
    print_table("", columns, rows, right=columns)
