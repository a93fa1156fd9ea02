"""How commands reach a planner: one set of options, one deadline, typed errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import grpc

from eplb_service.control import PLANNER_PORT
from eplb_service.errors import InvalidInputError, NotFoundError
from eplb_service.pb.v1 import admin_pb2, admin_pb2_grpc, placement_pb2_grpc
from eplb_service.rpc.channel import CLIENT_OPTIONS, TlsFiles, client_credentials, parse_target
from eplb_service.rpc.status import error_of

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_PLANNER = f"127.0.0.1:{PLANNER_PORT}"
ASK_TIMEOUT_S = 10.0
ORDER_TIMEOUT_S = 90.0
"""For what makes the planner solve or withdraw first: longer than its own deadlines for that (30 s and 60 s by default)."""


@dataclass(frozen=True, slots=True)
class PlannerClient:
    """Stubs of one planner; every call ends within `timeout_s`."""

    address: str
    timeout_s: float
    admin: Any
    placement: Any

    def call(self, method: Any, request: Any) -> Any:
        """One unary call. Raises the typed error that the planner meant."""
        with typed_errors(self.address):
            return method(request, timeout=self.timeout_s)


@contextmanager
def typed_errors(address: str) -> Iterator[None]:
    """Turns gRPC errors into ours: what the planner refused, or that it is not there."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, address) from None


def sync_channel(address: str, tls: TlsFiles | None) -> grpc.Channel:
    """A blocking channel to a planner; it connects at the first call. Raises InvalidInputError for a malformed address."""
    target = parse_target(address)
    if tls is None:
        return grpc.insecure_channel(target, options=CLIENT_OPTIONS)
    return grpc.secure_channel(target, client_credentials(tls), options=CLIENT_OPTIONS)


@contextmanager
def planner_client(address: str | None, *, timeout_s: float, tls: TlsFiles | None = None) -> Iterator[PlannerClient]:
    """A client for as long as the context lasts; without an address the default one."""
    address = address or DEFAULT_PLANNER
    with sync_channel(address, tls) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        yield PlannerClient(address, timeout_s, admin, placement_pb2_grpc.PlacementServiceStub(channel))


def tls_options(command: Command) -> Command:
    """Adds `--tls-ca`, `--tls-cert`, `--tls-key`; the command gets `tls`, None = talk in the clear."""

    @click.option("--tls-ca", envvar="EPLB_TLS_CA", type=click.Path(), help="CA file: talk TLS (environment: EPLB_TLS_CA).")
    @click.option(
        "--tls-cert", envvar="EPLB_TLS_CERT", type=click.Path(), help="Our certificate, where the planner asks for one."
    )
    @click.option("--tls-key", envvar="EPLB_TLS_KEY", type=click.Path(), help="Key of --tls-cert.")
    @wraps(command)
    def with_tls(*args: Any, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, **kwargs: Any) -> Any:
        ca, certificate, key = (Path(name) if name else None for name in (tls_ca, tls_cert, tls_key))
        given = ca or certificate or key
        return command(*args, tls=TlsFiles(ca=ca, certificate=certificate, key=key) if given else None, **kwargs)

    return with_tls  # type: ignore[return-value]


def planner_options(command: Command) -> Command:
    """Adds `--planner`, `--timeout`, `--tls-…`; the command gets an open `client`."""
    return planner_options_with(timeout_s=ASK_TIMEOUT_S)(command)


def planner_options_with(*, timeout_s: float) -> Callable[[Command], Command]:
    """`planner_options` for commands that take longer: a plan is solved, a rollout withdrawn."""
    return lambda command: _with_planner(command, timeout_s)


def _with_planner(command: Command, timeout_s: float) -> Command:
    @click.option(
        "--planner",
        envvar="EPLB_PLANNER",
        default=DEFAULT_PLANNER,
        show_default=True,
        metavar="HOST:PORT",
        help="Planner to talk to (environment: EPLB_PLANNER).",
    )
    @click.option("--timeout", type=click.FloatRange(0.1, 3600), default=timeout_s, show_default=True, help="Seconds to wait.")
    @tls_options
    @wraps(command)
    def with_client(*args: Any, planner: str, timeout: float, tls: TlsFiles | None, **kwargs: Any) -> Any:
        with planner_client(planner, timeout_s=timeout, tls=tls) as client:
            return command(*args, client=client, **kwargs)

    return with_client  # type: ignore[return-value]


def deployment_option(command: Command) -> Command:
    """Adds `--deployment`; left out, the planner's only deployment is meant."""
    option = click.option(
        "--deployment",
        "-d",
        envvar="EPLB_DEPLOYMENT",
        metavar="NAME",
        help="Deployment; may be left out when the planner has only one (environment: EPLB_DEPLOYMENT).",
    )
    return option(command)


def the_deployment(client: PlannerClient, name: str | None) -> str:
    """The named deployment, or the only one. Raises InvalidInputError that lists them when that is not clear."""
    if name:
        return name
    status = client.call(client.admin.Status, admin_pb2.StatusRequest())
    names: list[str] = [deployment.deployment for deployment in status.deployments]
    if len(names) == 1:
        return names[0]
    if not names:
        raise NotFoundError(f"planner {client.address} knows no deployment yet: no agent has registered a rank")
    raise InvalidInputError(
        f"planner {client.address} has {len(names)} deployments ({', '.join(names)}): name one with --deployment"
    )
