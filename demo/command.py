"""`eplb demo`: the command."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import click

from demo.report import write_report
from demo.screen import Screen
from demo.story import DemoOptions, run_story
from examples.tiny_moe.text import KINDS

SECONDS_MIN = 12.0


def end_on_signals() -> None:
    """SIGTERM and a terminal that closes end the demo as Ctrl-C does, and Ctrl-C does so also in a script's background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored by `nohup`
            signal.signal(number, signal.default_int_handler)


@click.command(short_help="Serve a real MoE here, rebalance it live and prove it.")
@click.option("--ranks", type=click.IntRange(2, 16), default=4, show_default=True, help="Ranks of the expert-parallel group.")
@click.option(
    "--seconds",
    type=click.FloatRange(SECONDS_MIN, 3600),
    default=54.0,
    show_default=True,
    help="Seconds of serving, shared by the kinds of prompts; start and proof come on top. A slow or busy machine is served on"
    " until two generations can be compared.",
)
@click.option("--policy", default="minmove", show_default=True, help="Policy that the planner uses.")
@click.option("--keep-running", is_flag=True, help="Serve on after the last prompts, until Ctrl-C; then prove.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the planner, for `eplb status` and others [default: a free one].",
)
@click.option("--seed", type=click.IntRange(0, 1000), default=1, show_default=True, help="Seed of the requests.")
@click.option(
    "--kinds", default="code,logs,prose", show_default=True, help=f"Kinds of prompts, one after another: {', '.join(KINDS)}."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("demo-report.html"),
    show_default=True,
    help="Page with pictures to write; a .png of the picture goes beside it.",
)
@click.option(
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="table: live view; json: one document at the end.",
)
def demo(
    ranks: int, seconds: float, policy: str, port: int, seed: int, kinds: str, report: Path, output: str, *, keep_running: bool
) -> int:
    """Serve a real MoE with expert parallelism on this machine, rebalance it live, and prove that nothing broke.

    It starts an embedded store, a planner, an agent process and RANKS engine processes, streams prompts whose kind changes,
    and lets the planner move experts while requests are served. Every generated token is compared with the same model in one
    plain process. Ends with 0 only if every check holds, with 1 if one does not.

    \b
    Example:  eplb demo
              eplb demo --output json | jq .token_mismatches
              eplb demo --keep-running --port 7470     (then, elsewhere: eplb status)
    """
    chosen = tuple(kind.strip() for kind in kinds.split(",") if kind.strip())
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown or len(chosen) < 2:
        raise click.UsageError(
            f"--kinds {kinds!r}: name at least two of {', '.join(KINDS)}"
            + (f"; unknown: {', '.join(unknown)}" if unknown else "")
        )
    if not report.parent.is_dir():
        raise click.UsageError(f"--report {report}: there is no folder {report.parent}")
    options = DemoOptions(
        ranks=ranks, seconds=seconds, policy=policy, keep_running=keep_running, port=port, seed=seed, kinds=chosen
    )
    end_on_signals()
    with Screen(quiet=output == "json") as screen:
        result = run_story(options, screen)
    write_report(result, report)
    if output == "json":
        click.echo(json.dumps({**result.to_json(), "report": str(report)}, indent=2))
    else:
        screen.close_with(result)
        click.echo(f"report: {report} and {report.with_suffix('.png')}")
    return 0 if result.passed else 1
