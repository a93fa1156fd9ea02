"""`eplb serve`: run the planner."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from eplb_service.cli.root import EXIT_CODES
from eplb_service.config import ServeConfig, load_config
from eplb_service.settings import Setting, settings_of

SHORT_FLAGS = {
    "listen.host": "--host",
    "listen.port": "--port",
    "store.address": "--store",
    "store.data_dir": "--data-dir",
    "planning.mode": "--mode",
    "planning.policy": "--policy",
    "planning.seed": "--seed",
}

EPILOG = (
    """\b
Every setting is also a variable (--gate-min-coverage: EPLB_GATE_MIN_COVERAGE) and an entry of the file
(min_coverage under [gate]). Flags win over the environment, that over the file, that over defaults. The store's
password has no flag, because flags are seen by every user of the machine: use EPLB_STORE_PASSWORD or the file.

\b
Examples:
  eplb serve --data-dir /var/lib/eplb --mode auto
  EPLB_STORE_PASSWORD=… eplb serve --store rediss://cache:6380/0 --host 0.0.0.0
  eplb serve --config planner.toml --port 0 --ready-file /run/eplb/ready.json

"""
    + EXIT_CODES
)


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for each setting that may be shown."""
    for found in reversed(settings_of(ServeConfig)):
        if not found.secret:
            command = _option(found)(command)
    return command


def _option(found: Setting) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    unit = f", {found.unit}" if found.unit else ""
    default = "" if found.default is None else f" [default: {found.default}{unit}]"
    names = [SHORT_FLAGS[found.key]] if found.key in SHORT_FLAGS else []
    return click.option(
        *names,
        found.flag,
        _parameter(found),
        metavar="|".join(found.choices) or {"str": "TEXT", "int": "N", "float": "X", "bool": "true|false"}[found.kind.__name__],
        help=found.help + (default or f" [default: not given{unit}]"),
    )


def _parameter(found: Setting) -> str:
    return "setting_" + found.key.replace(".", "_")


@click.command(epilog=EPILOG)
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path),
    help="Written (JSON: pid, address, port, metrics_port, store) once the planner serves; removed when it stops.",
)
@_options
def serve(config_file: Path | None, ready_file: Path | None, **given: str | None) -> int:
    """Run the planner: sees the load of every deployment, decides whether moving experts pays, has agents carry it out.

    Runs until SIGTERM or SIGINT, then gives up its leadership and stops. A new deployment starts in mode `observe`
    (plans are made and shown, nothing is published) unless --mode auto says otherwise; `eplb mode` changes one.
    """
    from eplb_service.app import run_service  # noqa: PLC0415  (gRPC and the store load only when they are used)

    flags = {found.key: text for found in settings_of(ServeConfig) if (text := given.get(_parameter(found))) is not None}
    loaded = load_config(flags=flags, environment=os.environ, file=config_file)
    return run_service(loaded, ready_file=ready_file)
