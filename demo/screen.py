"""The live view: ranks, imbalance by layer, generations and their reasons, staging, tokens a second; then the closing table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.result import DemoResult

PIPED_WIDTH = 200
WIDTH_ELSEWHERE = 150
BLOCKS = " ▁▂▃▄▅▆▇█"
NOTE = "Ranks share this machine's cores, so step time hardly follows load: the gate runs with a configured cost model."


@dataclass(slots=True)
class RankRow:
    """One rank, as the planner sees it. loads: its load over the mean, for each layer."""

    rank_id: int
    state: str
    step: int
    chunk: str
    loads: Sequence[float] = ()
    running: int = 0


@dataclass(slots=True)
class View:
    """What the screen shows now."""

    seconds: float = 0.0
    phase: str = ""
    phases: Sequence[str] = ()
    planner: str = "starting"
    generation: int = 0
    rollout: str = ""
    layers: Sequence[str] = ()
    per_layer: Sequence[float] = ()
    worst_history: list[float] = field(default_factory=list)
    ranks: Sequence[RankRow] = ()
    events: list[str] = field(default_factory=list)
    tokens_served: int = 0
    tokens_per_s: float = 0.0
    tokens_checked: int = 0
    mismatches: int = 0
    verdict: str = ""


def heat(value: float) -> Text:
    """A load over the mean, coloured: blue under, red over."""
    over = value - 1
    style = "white" if abs(over) < 0.05 else "bold red" if over > 0.25 else "red" if over > 0 else "cyan"
    return Text(f"{value:.2f}", style=style)


def sparkline(values: Sequence[float], *, low: float = 1.0, width: int = 60) -> str:
    """The last values as a line of blocks; the lowest block is `low`."""
    shown = list(values)[-width:]
    top = max([*shown, low + 0.2])
    return "".join(BLOCKS[min(8, max(0, round((value - low) / (top - low) * 8)))] for value in shown)


def render(view: View) -> RenderableType:
    """The whole screen."""
    head = Text()
    for kind in view.phases:
        head.append(f" {kind} ", style="reverse bold" if kind == view.phase else "dim")
    head.append(f"   {view.seconds:5.1f} s   {view.tokens_served:,} tokens, {view.tokens_per_s:.0f}/s   ")
    wrong = view.mismatches > 0
    head.append(f"{view.tokens_checked:,} checked, {view.mismatches} differ", style="bold red" if wrong else "green")
    ranks = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("rank", "state", "step", "requests", "chunk", *[f"layer {name}" for name in view.layers]):
        ranks.add_column(column, justify="left" if column in {"state", "chunk"} else "right")
    for row in view.ranks:
        cells = [
            Text(str(row.rank_id)),
            Text(row.state),
            Text(str(row.step)),
            Text(str(row.running)),
            Text(row.chunk, "yellow"),
        ]
        ranks.add_row(*cells, *[heat(load) for load in row.loads])
    if view.per_layer:
        cells = [Text(""), Text(""), Text(""), Text(""), Text("imbalance", "dim")]
        ranks.add_row(*cells, *[Text(f"{value:.3f}", "bold") for value in view.per_layer])
    worst = view.worst_history[-1] if view.worst_history else 0.0
    line = Text(f"worst layer {worst:.3f}  " if worst else "worst layer: no window yet  ")
    line.append(sparkline(view.worst_history), style="cyan")
    state = Text(f"planner {view.planner}; live generation {view.generation}")
    if view.rollout:
        state.append(f"; {view.rollout}", style="yellow")
    verdict = Text(f"gate: {view.verdict}" if view.verdict else "gate: no verdict yet", style="dim")
    events = Text("\n".join(view.events[-9:]))
    parts: list[RenderableType] = [
        head,
        Text(""),
        ranks,
        Text(""),
        line,
        state,
        verdict,
        Text(""),
        events,
        Text(NOTE, "dim italic"),
    ]
    return Panel(Group(*parts), title="eplb demo: a real MoE, rebalanced while it serves", title_align="left")


class Screen:
    """Shows the view: live on a terminal, one line for each event elsewhere; silent when the result is wanted as JSON."""

    def __init__(self, *, quiet: bool) -> None:
        self.view = View()
        self._quiet = quiet
        plain = Console(highlight=False, stderr=False)
        wide = not plain.is_terminal and "COLUMNS" not in os.environ
        self._console = Console(highlight=False, width=PIPED_WIDTH) if wide else plain
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if not self._quiet and self._console.is_terminal:
            self._live = Live(render(self.view), console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def event(self, text: str) -> None:
        """Something happened: shown in the list, or as a line."""
        stamped = f"{self.view.seconds:6.1f} s  {text}"
        self.view.events.append(stamped)
        if self._live is None and not self._quiet:
            self._console.print(Text(stamped), soft_wrap=True)

    def refresh(self) -> None:
        """Draw again."""
        if self._live is not None:
            self._live.update(render(self.view))

    def close_with(self, result: DemoResult) -> None:
        """The closing tables."""
        if not self._quiet:
            print_result(self._console, result)


def print_result(console: Console, result: DemoResult) -> None:
    """What was found, for people."""
    table = Table(
        title="Generations that went live while requests were served", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    right = {"gen", "moves", "bytes", "decision to flip", "predicted", "observed"}
    for column in (
        "gen",
        "prompts",
        "same later window: worst layer",
        "predicted",
        "observed",
        "moves",
        "bytes",
        "decision to flip",
    ):
        table.add_column(column, justify="right" if column in right else "left")
    gains = {comparison.generation: comparison for comparison in result.comparisons}
    for row in result.generations:
        gain = gains.get(row.generation)
        table.add_row(
            str(row.generation),
            row.phase,
            f"{gain.before.worst:.3f} -> {gain.after.worst:.3f}" if gain else "",
            f"{row.predicted_worst:.3f}",
            f"{row.observed_worst:.3f}" if row.observed_worst is not None else "",
            str(row.moves),
            f"{row.bytes_moved:,}",
            f"{row.rollout_s:.2f} s",
        )
    console.print(table)
    checks = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for check in result.checks:
        mark = Text("ok", "green") if check.passed else Text("FAILED", "bold red")
        checks.add_row(mark, Text(check.name), Text(check.detail, "dim"))
    console.print(checks)
    verdict = "every check passed" if result.passed else "A CHECK FAILED"
    console.print(
        Text(
            f"{verdict}: {result.tokens_checked:,} tokens compared with one plain process, {result.token_mismatches} differ;"
            f" {result.flips} generations live; {result.tokens_per_s:.0f} tokens/s",
            style="bold green" if result.passed else "bold red",
        )
    )
    console.print(Text(NOTE, "dim"))
