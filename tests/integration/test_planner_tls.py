"""The planner's port over TLS, and what a client hears that does not fit."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from eplb_service.app import Service
from eplb_service.config import ListenConfig, MetricsConfig, ServeConfig
from eplb_service.errors import EnvironmentFault, EplbError, InvalidInputError
from eplb_service.pb.v1 import admin_pb2, admin_pb2_grpc
from eplb_service.rpc.channel import TlsFiles, open_channel
from eplb_service.rpc.status import error_of
from eplb_service.store.memory import MemoryStore
from tests.certificates import self_signed

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with the openssl command")


def serving(listen: ListenConfig) -> Service:
    config = replace(ServeConfig(), listen=listen, metrics=MetricsConfig(enabled=False))
    return Service(config, store=MemoryStore(lambda: 0.0))


async def status_error(port: int, tls: TlsFiles | None) -> EplbError | None:
    """What a client with these files hears; None = it was answered."""
    target = f"localhost:{port}"
    async with open_channel(target, tls) as channel:
        try:
            await admin_pb2_grpc.AdminServiceStub(channel).Status(admin_pb2.StatusRequest(), timeout=10)
        except grpc.RpcError as failure:
            return error_of(failure, target)
    return None


def test_clients_need_the_ca_and_where_asked_a_certificate_of_their_own(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "planner")
    client, client_key = self_signed(tmp_path, "client")
    stranger, stranger_key = self_signed(tmp_path, "stranger")

    async def work() -> None:
        listen = ListenConfig(port=0, host="localhost", tls_cert=str(certificate), tls_key=str(key), tls_client_ca=str(client))
        service = serving(listen)
        port = int((await service.start()).address.rpartition(":")[2])
        try:
            good = TlsFiles(ca=certificate, certificate=client, key=client_key)
            assert await status_error(port, good) is None
            for refused in (
                None,
                TlsFiles(ca=certificate),
                TlsFiles(ca=stranger, certificate=client, key=client_key),
                TlsFiles(ca=certificate, certificate=stranger, key=stranger_key),
            ):
                assert isinstance(await status_error(port, refused), EnvironmentFault), refused
        finally:
            await service.stop()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"tls_cert": "planner.pem"}, "go together"),
        ({"tls_client_ca": "planner.pem"}, "needs TLS"),
        ({"tls_cert": "absent.pem", "tls_key": "planner.key"}, "cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_named_before_anything_starts(
    tmp_path: Path, files: dict[str, str], complaint: str
) -> None:
    self_signed(tmp_path, "planner")
    listen = ListenConfig(port=0, **{name: str(tmp_path / file) for name, file in files.items()})
    with pytest.raises(InvalidInputError, match=complaint):
        asyncio.run(serving(listen).start())
