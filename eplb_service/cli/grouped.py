"""Commands with many options: their help in named groups, and a file that may give any of them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

OTHER = "Other"


class GroupedCommand(click.Command):
    """A command whose help lists its options by group.

    groups: heading -> names of parameters, in the order shown; what is in no group comes last, under OTHER.
    """

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = groups

    def grouped(self, ctx: click.Context) -> dict[str, list[click.Parameter]]:
        """Parameters by heading."""
        heading_of = {name: heading for heading, names in self.groups.items() for name in names}
        order = [name for names in self.groups.values() for name in names]
        parameters = sorted(self.get_params(ctx), key=lambda p: order.index(p.name) if p.name in order else len(order))
        grouped: dict[str, list[click.Parameter]] = {heading: [] for heading in [*self.groups, OTHER]}
        for parameter in parameters:
            grouped[heading_of.get(parameter.name or "", OTHER)].append(parameter)
        return grouped

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The option groups, one section each."""
        for heading, parameters in self.grouped(ctx).items():
            records = [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def take_defaults_from(allowed: Sequence[str]) -> Any:
    """A callback for an option that names a TOML file of options: flags on the command line win over it.

    Keys are the options' names, with _ or - between words (`dead_ranks` or `dead_rank`); values are read as the flags' are.
    allowed: parameters that the file may give. Raises click.BadParameter naming the key that cannot be used.
    """

    def callback(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is not None:
            # click looks defaults up in this map: the values go through the same checks as on the command line
            ctx.default_map = {**(ctx.default_map or {}), **_options_of(value, allowed, ctx, param)}
        return value

    return callback


def _options_of(path: Path, allowed: Sequence[str], ctx: click.Context, param: click.Parameter) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.BadParameter(f"cannot read {path}: {error.strerror or error}", ctx, param) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path} is no valid TOML: {error}", ctx, param) from error
    parameters = [parameter for parameter in ctx.command.get_params(ctx) if parameter.name in allowed]
    several = {parameter.name for parameter in parameters if parameter.multiple}
    typed = {flag.lstrip("-").replace("-", "_"): p.name or "" for p in parameters for flag in p.opts}
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        name = typed.get(name, name)
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"did you mean {near[0]}?" if near else f"it may give {', '.join(allowed)}"
            raise click.BadParameter(f"{path} has {key!r}, which is no option of a fleet; {hint}", ctx, param)
        options[name] = value if name not in several or isinstance(value, list) else [value]
    return options
