"""The picture of a run: heat maps of rank load before and after, imbalance over time with the generations marked."""

from __future__ import annotations

import base64
import html
import io
import os
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib.figure import Figure

from demo.result import Comparison, DemoResult, relative_loads

INK, GRID, MOVED, KEPT = "#1d2433", "#d5dae3", "#c2410c", "#2563eb"
SHADES = ("#eef3fb", "#fdf3e7", "#edf7ee", "#f7eef7")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2433; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0; } td, th { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #94a3b8; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.ok { color: #15803d; font-weight: 600; } .bad { color: #b91c1c; font-weight: 600; } img { max-width: 100%; }
.note { color: #57606f; }
"""


def draw(result: DemoResult) -> Figure:
    """The figure: one column of heat maps for each compared generation, imbalance over time below."""
    columns = max(1, len(result.comparisons))
    figure = Figure(figsize=(max(9.0, 3.6 * columns + 1.6), 8.2), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(3, columns, height_ratios=(1, 1, 1.35))
    top = max((float(relative_loads(c.rank_loads_before).max()) for c in result.comparisons), default=1.5)
    shown: Any = None
    for column, comparison in enumerate(result.comparisons):
        for row, (loads, title) in enumerate(_maps(comparison)):
            axes = figure.add_subplot(grid[row, column])
            shown = axes.imshow(
                relative_loads(loads), cmap="RdBu_r", vmin=2 - max(top, 1.05), vmax=max(top, 1.05), aspect="auto"
            )
            axes.set_title(title, fontsize=9.5, color=INK, loc="left")
            axes.set_xticks(range(loads.shape[1]), [f"rank {rank}" for rank in range(loads.shape[1])], fontsize=8)
            axes.set_yticks(range(len(comparison.layers)), comparison.layers, fontsize=8)
            for (layer, rank), value in np.ndenumerate(relative_loads(loads)):
                axes.text(rank, layer, f"{value:.2f}", ha="center", va="center", fontsize=8, color=_ink_on(value, top))
    if shown is not None:
        figure.colorbar(shown, ax=figure.axes, label="rank load / mean of the layer", shrink=0.8)
    _timeline(figure.add_subplot(grid[2, :]), result)
    return figure


def _ink_on(value: float, top: float) -> str:
    return "white" if abs(value - 1) > 0.75 * (top - 1) else INK


def _maps(comparison: Comparison) -> list[tuple[Any, str]]:
    window = f"the same {comparison.tokens:,} assignments"
    name = "as loaded" if comparison.previous == 0 else f"generation {comparison.previous}"
    return [
        (comparison.rank_loads_before, f"{name}: worst layer {comparison.before.worst:.3f}\n({window})"),
        (
            comparison.rank_loads_after,
            f"generation {comparison.generation}: worst layer {comparison.after.worst:.3f}\n({window})",
        ),
    ]


def _timeline(axes: Any, result: DemoResult) -> None:
    for index, phase in enumerate(result.phases):
        axes.axvspan(phase.begin_s, phase.end_s, color=SHADES[index % len(SHADES)], zorder=0)
        axes.text(
            phase.begin_s, 1.0, f" {phase.kind}", transform=axes.get_xaxis_transform(), va="bottom", fontsize=9, color=INK
        )
    seconds = [sample.seconds for sample in result.samples]
    axes.plot(seconds, [s.worst for s in result.samples], color=KEPT, marker=".", label="worst layer")
    axes.plot(seconds, [s.mean for s in result.samples], color=KEPT, alpha=0.45, marker=".", label="mean over layers")
    for row in result.generations:
        axes.axvline(row.seconds, color=MOVED, linewidth=1.4)
        axes.text(
            row.seconds, 0.98, f" gen {row.generation}", transform=axes.get_xaxis_transform(), va="top", fontsize=9, color=MOVED
        )
    axes.axhline(1.0, color=GRID)
    axes.set_xlabel("seconds of serving")
    axes.set_ylabel("imbalance of each load window\n(max rank load / mean)")
    if result.samples:
        axes.legend(loc="upper right", fontsize=8, framealpha=0.9)
    axes.spines[["top", "right"]].set_visible(False)


def write_report(result: DemoResult, path: Path) -> None:
    """Write the page (self-contained) to `path` and the picture beside it (same name, .png). Atomic: no half file."""
    picture = io.BytesIO()
    draw(result).savefig(picture, format="png", dpi=130)
    _replace(path.with_suffix(".png"), picture.getvalue())
    _replace(path, _page(result, base64.b64encode(picture.getvalue()).decode()).encode())


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.write_bytes(content)
    partial.replace(path)


def _page(result: DemoResult, picture: str) -> str:
    verdict = '<span class="ok">every check passed</span>' if result.passed else '<span class="bad">A CHECK FAILED</span>'
    checks = "".join(
        f'<tr><td class="{"ok" if c.passed else "bad"}">{"ok" if c.passed else "FAILED"}</td>'
        f"<td>{html.escape(c.name)}</td><td>{html.escape(c.detail)}</td></tr>"
        for c in result.checks
    )
    generations = "".join(_generation_row(result, index) for index in range(len(result.generations)))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>eplb demo</title><style>{STYLE}</style>
<h1>A live rebalance of a real MoE</h1>
<p>{verdict}. {result.ranks} ranks served {result.requests:,} requests, {result.tokens_served:,} tokens in {result.seconds:.0f} s
({result.tokens_per_s:.0f} tokens/s); {result.tokens_checked:,} tokens compared with the same model in one process,
{result.token_mismatches} differ; {result.flips} generations went live while requests were served (policy {html.escape(result.policy)}).</p>
<img alt="Heat maps of rank load before and after each generation, and imbalance over time" src="data:image/png;base64,{picture}">
<p class="note">Each pair of heat maps scores the <em>same later window</em> under the old and the new placement. All ranks share this
machine's cores, so step time hardly follows load: the gate ran with a configured cost model.</p>
<h2>Generations</h2>
<table><tr><th class="n">generation</th><th>prompts</th><th class="n">same window: worst before → after</th><th class="n">predicted worst</th>
<th class="n">observed worst</th><th class="n">experts moved</th><th class="n">bytes</th><th class="n">decision to flip</th><th>why</th></tr>
{generations}</table>
<h2>Checks</h2>
<table>{checks}</table>
</html>
"""


def _generation_row(result: DemoResult, index: int) -> str:
    row = result.generations[index]
    gains = [c for c in result.comparisons if c.generation == row.generation]
    gain = f"{gains[0].before.worst:.3f} → {gains[0].after.worst:.3f}" if gains else ""
    observed = f"{row.observed_worst:.3f}" if row.observed_worst is not None else ""
    cells = (
        f'<td class="n">{row.generation}</td><td>{html.escape(row.phase)}</td><td class="n">{gain}</td>'
        f'<td class="n">{row.predicted_worst:.3f}</td><td class="n">{observed}</td><td class="n">{row.moves}</td>'
        f'<td class="n">{row.bytes_moved:,}</td><td class="n">{row.rollout_s:.2f} s</td><td>{html.escape(row.reason)}</td>'
    )
    return f"<tr>{cells}</tr>"
