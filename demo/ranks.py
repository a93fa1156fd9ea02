"""The demo's ranks by themselves, beside an agent process that runs already: `python -m demo.ranks --socket PATH --ranks 4`.

For trying a planner and an agent process of one's own (compose, Kubernetes, two terminals): the same engine, model and prompts
as `eplb demo`, without its planner, its proof and its end.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click

from agent.engine.reference.launch import Fleet
from demo.oracle import Served
from demo.parts import start_ranks
from demo.serving import Serving
from demo.traffic import Traffic
from eplb_service.cli.root import exit_code
from eplb_service.errors import EplbError, InvalidInputError

DRIFT = ("code", "logs", "prose")
REPORT_PERIOD_S = 5.0
TICK_S = 0.05
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOptions:
    """What can be told. seconds_per_kind: how long prompts are of one kind before the next one's turn; kinds go round."""

    socket: Path
    ranks: int
    traffic: bool
    seconds_per_kind: float
    in_flight: int
    seed: int


def kind_at(seconds: float, seconds_per_kind: float) -> str:
    """Kind of prompts at a time since the start.

    >>> [kind_at(second, 10.0) for second in (0, 9.9, 10, 30)]
    ['code', 'code', 'logs', 'code']
    """
    return DRIFT[int(seconds // seconds_per_kind) % len(DRIFT)]


def run_ranks(options: RanksOptions, say: Callable[[str], None], stopping: Callable[[], bool]) -> None:
    """Start the ranks, keep them busy if wanted, and stop them in order once `stopping` says so.

    Raises InvalidInputError for a socket whose folder is not there, EnvironmentFault and DeadlineError as `start_ranks`, or
    when a rank ends by itself.
    """
    if not options.socket.parent.is_dir():
        raise InvalidInputError(
            f"there is no folder {options.socket.parent} for the agent process's socket {options.socket.name}"
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eplb-ranks-")))
        fleet = stack.enter_context(start_ranks(folder, ranks=options.ranks, socket=options.socket))
        say(f"{options.ranks} ranks serve; agent process at {options.socket}; requests at {folder}/rank-N.sock")
        if options.traffic:
            _keep_busy(fleet, options, say, stopping)
        else:
            _watch(fleet, stopping)
        say("stopping")
        fleet.stop(timeout_s=STOP_TIMEOUT_S, cancel=True)


def _watch(fleet: Fleet, stopping: Callable[[], bool]) -> None:
    """Wait; a rank that ended shows by its client."""
    clients = [fleet.client(position) for position in range(fleet.config.num_ranks)]
    while not stopping():
        for client in clients:
            client.receive(timeout_s=TICK_S)
    for client in clients:
        client.close()


def _keep_busy(fleet: Fleet, options: RanksOptions, say: Callable[[str], None], stopping: Callable[[], bool]) -> None:
    traffic = Traffic(seed=options.seed)
    clients = [fleet.client(position) for position in range(options.ranks)]
    serving = Serving(clients, traffic, in_flight=options.in_flight, finished=_forget)
    begin, told, kind = time.monotonic(), 0.0, ""
    while not stopping():
        now = time.monotonic() - begin
        traffic.kind = kind_at(now, options.seconds_per_kind)
        serving.pump(now, wait_s=TICK_S)
        if traffic.kind != kind or now - told >= REPORT_PERIOD_S:
            kind, told = traffic.kind, now
            say(f"{now:7.1f} s  prompts {kind}, {serving.tokens:,} tokens served, {serving.tokens_per_s(now):.0f}/s")
    serving.close()


def _forget(served: Served) -> None:
    """Nobody judges the tokens here: that is what `eplb demo` does."""
    del served


@click.command()
@click.option(
    "--socket", type=click.Path(path_type=Path), required=True, envvar="EPLB_SOCKET", help="Socket of the agent process."
)
@click.option("--ranks", type=click.IntRange(2, 16), default=4, show_default=True, help="Ranks of the expert-parallel group.")
@click.option("--traffic", is_flag=True, help="Keep every rank busy with prompts whose kind drifts.")
@click.option(
    "--seconds-per-kind", type=click.FloatRange(0.5, 86_400), default=30.0, show_default=True, help="Until the kind drifts."
)
@click.option("--in-flight", type=click.IntRange(1, 64), default=8, show_default=True, help="Requests under way on each rank.")
@click.option("--seed", type=click.IntRange(0, 1000), default=1, show_default=True, help="Seed of the requests.")
def ranks(socket: Path, ranks: int, seconds_per_kind: float, in_flight: int, seed: int, *, traffic: bool) -> None:
    """Run the demo's ranks against an agent process that runs already, until SIGTERM or Ctrl-C.

    \b
    Example:  eplb serve --mode auto
              eplb agent --planner 127.0.0.1:7470 --socket /tmp/eplb.sock
              python -m demo.ranks --socket /tmp/eplb.sock --ranks 4 --traffic
    """
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    options = RanksOptions(
        socket=socket, ranks=ranks, traffic=traffic, seconds_per_kind=seconds_per_kind, in_flight=in_flight, seed=seed
    )
    run_ranks(options, click.echo, lambda: bool(asked))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit codes as those of `eplb`."""
    try:
        ranks.main(args=arguments, prog_name="python -m demo.ranks", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"demo.ranks: {error.format_message()}", err=True)
        return 2
    except EplbError as error:
        click.echo(f"demo.ranks: {error}", err=True)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
