"""The `eplb` command. Talks gRPC to a planner; plans offline by itself. See `root` for the exit codes."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point; says what to install when only the base package is there."""
    try:
        from eplb_service.cli.root import run  # noqa: PLC0415  (click is an extra)
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.split(".")[0] in {"eplb_service", "agent"}:
            raise
        sys.stderr.write(
            f"eplb: the command needs {missing.name}, which the base install leaves out;"
            " install eplb-service[planner], or eplb-service[agent] on an engine's node\n"
        )
        sys.exit(3)
    sys.exit(run())
