"""Errors over gRPC: a client gets the error that the server raised; what gRPC itself says is told in one sentence."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from eplb_service import errors
from eplb_service.errors import (
    BrokenInvariantError,
    ConflictError,
    DeadlineError,
    EnvironmentFault,
    EplbError,
    FencedError,
    InvalidInputError,
    UnsupportedError,
)
from eplb_service.rpc.channel import SERVER_OPTIONS, TlsFiles, client_credentials, open_channel, parse_target
from eplb_service.rpc.status import STATUS_OF, StatusInterceptor, error_of, status_of, transport_error
from tests.certificates import self_signed

ALL_ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, EplbError)]


class Raiser(grpc.GenericRpcHandler):
    """Serves /t/<kind>, each method raising what it was given; `abort` ends the call itself."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        async def coroutine(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            if details.method.endswith("abort"):
                await context.abort(grpc.StatusCode.OUT_OF_RANGE, "own words")
            raise self._error

        async def generator(_request: Any, _context: Any) -> AsyncIterator[bytes]:
            yield b"one"
            raise self._error

        if details.method.endswith(("unary", "abort")):
            return grpc.unary_unary_rpc_method_handler(coroutine)
        if details.method.endswith("stream"):
            return grpc.stream_stream_rpc_method_handler(generator)
        return None


def plain(channel: grpc.aio.Channel, method: str) -> Any:
    """A method on bytes."""
    return channel.unary_unary(method)


async def call(error: Exception, method: str, faults: list[str]) -> EplbError:
    """The client's view of an error raised by a server."""
    server = grpc.aio.server(
        options=SERVER_OPTIONS, interceptors=[StatusInterceptor(lambda name, fault: faults.append(f"{name} {fault!r}"))]
    )
    server.add_generic_rpc_handlers((Raiser(error),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = f"127.0.0.1:{port}"
    try:
        async with open_channel(target) as channel:
            if method == "/t/stream":
                stream: Any = channel.stream_stream(method)()
                assert await stream.read() == b"one"
                with pytest.raises(grpc.RpcError) as failure:
                    await stream.read()
            else:
                with pytest.raises(grpc.RpcError) as failure:
                    await plain(channel, method)(b"", timeout=10)
            return error_of(failure.value, target)
    finally:
        await server.stop(grace=None)


def test_every_error_of_the_tree_has_a_status() -> None:
    assert set(ALL_ERRORS) == set(STATUS_OF)


@pytest.mark.parametrize("method", ["/t/unary", "/t/stream"])
def test_a_client_gets_the_error_with_its_message(method: str) -> None:
    async def work() -> None:
        faults: list[str] = []
        for cls in (FencedError, ConflictError, BrokenInvariantError):
            arrived = await call(cls("epoch 3 was fenced by 4: größer"), method, faults)
            assert type(arrived) is cls
            assert str(arrived) == "epoch 3 was fenced by 4: größer"
        assert faults == []

    asyncio.run(work())


def test_a_bug_in_a_handler_tells_the_client_no_more_than_that_and_the_log_all() -> None:
    faults: list[str] = []
    arrived = asyncio.run(call(KeyError("secret"), "/t/unary", faults))
    assert "/t/unary failed inside the planner: KeyError" in str(arrived)
    assert "secret" not in str(arrived)
    assert faults == ["/t/unary KeyError('secret')"]


def test_a_handler_that_ends_the_call_itself_is_left_alone() -> None:
    faults: list[str] = []
    assert "OUT_OF_RANGE: own words" in str(asyncio.run(call(KeyError(), "/t/abort", faults)))
    assert faults == []


def test_a_planner_that_is_slow_to_answer_a_connection_is_waited_for() -> None:
    """gRPC's `min_reconnect_backoff_ms` bounds one try to connect: at 100 ms a busy planner could not be reached at all."""

    async def work() -> None:
        server = grpc.aio.server(interceptors=[StatusInterceptor(lambda _name, _fault: None)])
        server.add_generic_rpc_handlers((Raiser(ConflictError("reached")),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipes: set[asyncio.Task[None]] = set()

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                writer.write(data)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.4)  # the delay is what is tested
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            pipes.update((asyncio.create_task(pipe(reader, inner_writer)), asyncio.create_task(pipe(inner_reader, writer))))

        slow = await asyncio.start_server(accept, "127.0.0.1", 0)
        target = f"127.0.0.1:{slow.sockets[0].getsockname()[1]}"
        try:
            async with open_channel(target) as channel:
                with pytest.raises(grpc.RpcError) as failure:
                    await plain(channel, "/t/unary")(b"", timeout=10)
                assert isinstance(error_of(failure.value, target), ConflictError)
        finally:
            slow.close()
            for task in pipes:
                task.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
            await server.stop(grace=None)

    asyncio.run(work())


def test_a_method_that_nobody_serves_is_unsupported() -> None:
    """sglang#6607: a documented call that does nothing. Here it is an error that says so."""
    arrived = asyncio.run(call(KeyError(), "/t/none", []))
    assert isinstance(arrived, UnsupportedError)
    assert "is it a planner of this release?" in str(arrived)


def test_an_absent_planner_is_one_sentence_that_is_the_same_each_time() -> None:
    async def once() -> str:
        async with open_channel("127.0.0.1:1") as channel:
            with pytest.raises(grpc.RpcError) as failure:
                await plain(channel, "/t/x")(b"", timeout=10)
            error = error_of(failure.value, "127.0.0.1:1")
            assert isinstance(error, EnvironmentFault)
            return str(error)

    expected = "planner at 127.0.0.1:1 is not reachable (connection refused); is it running, and the address right?"
    assert [asyncio.run(once()) for _ in range(2)] == [expected, expected]


def test_a_passed_deadline_is_a_deadline_error() -> None:
    assert isinstance(transport_error(grpc.StatusCode.DEADLINE_EXCEEDED, "", "p"), DeadlineError)


def test_a_message_too_long_for_a_header_is_cut_and_still_arrives() -> None:
    arrived = asyncio.run(call(InvalidInputError("ü" * 20_000), "/t/unary", []))
    assert isinstance(arrived, InvalidInputError)
    assert str(arrived).startswith("üüü")
    assert str(arrived).endswith("…")


def test_an_error_of_a_later_release_travels_as_its_nearest_known_base() -> None:
    class NewError(FencedError):
        """Unknown to the table."""

    code, message, metadata = status_of(NewError("x"))
    assert (code, message, metadata) == (grpc.StatusCode.ABORTED, "x", (("eplb-error", "FencedError"),))


@pytest.mark.parametrize(
    "address", ["", ":7470", "a b:1", "host:", "host:0", "host:65536", "http://host:1", "unix:", "::1:7470", "h:1:2"]
)
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(InvalidInputError, match="planner address"):
        parse_target(address)


def test_tls_files_are_checked_before_anything_connects(tmp_path: Path) -> None:
    plain = tmp_path / "plain.pem"
    plain.write_text("no pem")
    for files, complaint in (
        (TlsFiles(ca=tmp_path / "none.pem"), "TLS CA file .*none.pem cannot be read: No such file"),
        (TlsFiles(ca=plain), "plain.pem of 6 bytes holds no PEM block"),
        (TlsFiles(key=plain), "go together; give both or neither"),
    ):
        with pytest.raises(InvalidInputError, match=complaint):
            client_credentials(files)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with the openssl command")
def test_tls_reaches_the_planner_that_its_ca_signed_and_says_when_it_did_not(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "planner")
    stranger, _ = self_signed(tmp_path, "stranger")

    async def work() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[StatusInterceptor(lambda _name, _fault: None)])
        server.add_generic_rpc_handlers((Raiser(ConflictError("reached")),))
        credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
        target = f"localhost:{server.add_secure_port('localhost:0', credentials)}"
        await server.start()
        try:
            for ca, expected in ((certificate, ConflictError), (stranger, EnvironmentFault)):
                async with open_channel(target, TlsFiles(ca=ca)) as channel:
                    with pytest.raises(grpc.RpcError) as failure:
                        await plain(channel, "/t/unary")(b"", timeout=10)
                    error = error_of(failure.value, target)
                    assert type(error) is expected
                    assert ("is not reachable (its certificate is not trusted)" in str(error)) == (ca is stranger)
        finally:
            await server.stop(grace=None)

    asyncio.run(work())
