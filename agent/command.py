"""`eplb agent`: one process a node, between the hooks of its ranks and the planner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from eplb_service import log
from eplb_service.rpc.channel import TlsFiles

EPILOG = """\b
Example:
  eplb agent --planner planner.eplb:7470 --socket /run/eplb/agent.sock

\b
It stays up while the planner is away, and while no hook is linked. Exit codes:
  0  stopped by SIGTERM or SIGINT
  1  a broken invariant: please report it
  2  bad input: a malformed address, a socket path that cannot be, unreadable TLS files
  3  the surroundings: the socket is in use by another agent process
"""


@click.command(epilog=EPILOG)
@click.option(
    "--planner",
    required=True,
    envvar="EPLB_PLANNER",
    metavar="HOST:PORT",
    show_envvar=True,
    help="Where the planner answers: HOST:PORT, [IPV6]:PORT or unix:PATH.",
)
@click.option(
    "--socket",
    "socket_path",
    required=True,
    envvar="EPLB_SOCKET",
    metavar="PATH",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Unix socket for the hooks of this node's engines; mode 0600, at most 107 bytes.",
)
@click.option(
    "--node", envvar="EPLB_AGENT_NODE", metavar="NAME", show_envvar=True, help="Name of this node.  [default: as the hooks say]"
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Written (with the process id) once hooks can link, removed at the end: for supervisors.",
)
@click.option(
    "--tls-ca", type=click.Path(path_type=Path), metavar="PEM", help="Who signed the planner's certificate; turns TLS on."
)
@click.option(
    "--tls-cert", type=click.Path(path_type=Path), metavar="PEM", help="Our certificate, for mutual TLS; with --tls-key."
)
@click.option("--tls-key", type=click.Path(path_type=Path), metavar="PEM", help="Key of --tls-cert.")
@click.option("--tls-server-name", metavar="NAME", help="Name in the planner's certificate, where it is not its host name.")
@click.option(
    "--log-format", type=click.Choice(log.FORMATS), default="console", show_default=True, help="For people or machines."
)
@click.option("--log-level", type=click.Choice(log.LEVELS), default="info", show_default=True, help="Least level to show.")
def agent(
    *,
    planner: str,
    socket_path: Path,
    node: str | None,
    ready_file: Path | None,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_server_name: str | None,
    log_format: str,
    log_level: str,
) -> None:
    """Run the agent process of a node: it links the hooks of the local ranks with the planner."""
    from agent.runtime import AgentConfig, run_agent  # noqa: PLC0415  (after eplb_service.rpc has quieted gRPC's core)

    log.configure(log_format=log_format, level=log_level)
    tls = None
    if tls_ca or tls_cert or tls_key or tls_server_name:
        tls = TlsFiles(ca=tls_ca, certificate=tls_cert, key=tls_key, server_name=tls_server_name)
    config = AgentConfig(planner=planner, socket=socket_path, node=node, tls=tls, ready_file=ready_file)
    asyncio.run(run_agent(config))
