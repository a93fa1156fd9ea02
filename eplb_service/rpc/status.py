"""One table between our errors and gRPC statuses: a client gets the error that the server raised, with its message.

Several errors share a code, so the server names the class in the trailing metadata `eplb-error`; a client of another kind
goes by the code alone. A status without that name comes from gRPC itself (or from someone else's server) and is told by
`transport_error`: planner not reachable, deadline passed.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from eplb_service import errors
from eplb_service.errors import DeadlineError, EnvironmentFault, EplbError, UnsupportedError

STATUS_OF: dict[type[EplbError], grpc.StatusCode] = {
    errors.InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    errors.CallerError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.FencedError: grpc.StatusCode.ABORTED,
    errors.StaleError: grpc.StatusCode.ABORTED,
    errors.StoreUnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.PolicyFailedError: grpc.StatusCode.INTERNAL,
    errors.EnvironmentFault: grpc.StatusCode.UNAVAILABLE,
    errors.BrokenInvariantError: grpc.StatusCode.DATA_LOSS,
    errors.EplbError: grpc.StatusCode.UNKNOWN,
}
"""Every class of the tree. The proto promises FAILED_PRECONDITION for a rank that disagrees with its peers."""

ERROR_KEY = "eplb-error"
# Details travel percent-encoded in a header; above 8 KiB of headers gRPC begins to reject calls, more often the more there is.
DETAIL_BYTES_MAX = 6000

_BY_NAME = {cls.__name__: cls for cls in STATUS_OF}
# What a code means to a client when the server did not name a class.
_BY_CODE: dict[grpc.StatusCode, type[EplbError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidInputError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.ConflictError,
    grpc.StatusCode.ABORTED: errors.StaleError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.InvalidInputError,
}


def status_of(error: EplbError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Code, message and trailing metadata of an error; a subclass that is not in the table travels as its nearest base."""
    listed = next(cls for cls in type(error).__mro__ if cls in STATUS_OF)
    return STATUS_OF[listed], _fitting(str(error)), ((ERROR_KEY, listed.__name__),)


def _fitting(message: str) -> str:
    """A message cut so that its percent-encoded form stays within DETAIL_BYTES_MAX."""
    room = DETAIL_BYTES_MAX
    for index, character in enumerate(message):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return message[:index] + "…"
    return message


def error_of(failure: grpc.RpcError, target: str) -> EplbError:
    """The error behind a failed call to the planner at `target` (as the user wrote it).

    Raises nothing; what it returns is to be raised, or kept as a reason.
    """
    code = failure.code() if isinstance(failure, (grpc.Call, grpc.aio.AioRpcError)) else None
    detail = (failure.details() if isinstance(failure, (grpc.Call, grpc.aio.AioRpcError)) else str(failure)) or ""
    metadata = failure.trailing_metadata() if isinstance(failure, (grpc.Call, grpc.aio.AioRpcError)) else None
    for key, value in metadata or ():
        if key == ERROR_KEY and str(value) in _BY_NAME:
            return _BY_NAME[str(value)](detail)
    return transport_error(code, detail, target)


def transport_error(code: grpc.StatusCode | None, detail: str, target: str) -> EplbError:
    """One sentence for a status that no server of ours named: the same cause gives the same sentence each time."""
    if code is grpc.StatusCode.UNAVAILABLE:
        return EnvironmentFault(
            f"planner at {target} is not reachable ({_cause(detail)}); is it running, and the address right?"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"planner at {target} did not answer within the deadline; it may be overloaded or stopped")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UnsupportedError(
            f"what answers at {target} does not know this call ({detail[:200]}); is it a planner of this release?"
        )
    if code is grpc.StatusCode.CANCELLED:
        return EnvironmentFault(f"the call to the planner at {target} was cancelled")
    if code in _BY_CODE:
        return _BY_CODE[code](_fitting(detail))
    said = f"{code.name}: {detail[:200]}" if code is not None else detail[:200]
    return EnvironmentFault(f"planner at {target} failed the call ({said}); see its log")


_CAUSES = {
    "connection refused": "connection refused",
    "no such file": "no such socket file",
    "name resolution": "its host name does not resolve",
    "dns": "its host name does not resolve",
    "domain name not found": "its host name does not resolve",
    "certificate": "its certificate is not trusted",
    "permission denied": "permission denied",
    "timeout": "connecting timed out",
    "timed out": "connecting timed out",
    "network is unreachable": "network unreachable",
    "socket closed": "connection lost",
    "connection reset": "connection lost",
    "goaway": "connection lost",
    "ssl": "TLS handshake failed",
    "handshake": "handshake failed",
}
"""A mark in gRPC's detail, in order of precedence, and what to tell."""


def _cause(detail: str) -> str:
    """A few words for gRPC's long detail, whose addresses and counters change from try to try."""
    lowered = detail.lower()
    return next((words for mark, words in _CAUSES.items() if mark in lowered), "connection failed")


# ── server side ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Context = grpc.aio.ServicerContext[Any, Any]


async def abort_with(context: Context, error: EplbError) -> NoReturn:
    """End a call with the status of an error."""
    code, message, metadata = status_of(error)
    await context.abort(code, message, metadata)
    raise error  # abort raises; this line is for the type checker and for doubles whose abort returns


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Turns the EplbError that a handler raises into its status; any other exception into INTERNAL and `on_fault`.

    on_fault: called with method name and exception, to log what should not have happened.
    """

    def __init__(self, on_fault: Callable[[str, Exception], None]) -> None:
        self._on_fault = on_fault

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of a call, whichever of the four kinds it is."""
        handler = await continuation(handler_call_details)
        if handler is None:  # a method that nobody serves
            return handler
        method = handler_call_details.method
        for kind in ("unary_unary", "stream_unary", "unary_stream", "stream_stream"):
            behaviour = getattr(handler, kind, None)
            if behaviour is not None:
                wrap = self._generator if inspect.isasyncgenfunction(behaviour) else self._coroutine
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                wrapped: grpc.RpcMethodHandler[Any, Any] = make(
                    wrap(behaviour, method),
                    request_deserializer=handler.request_deserializer,
                    response_serializer=handler.response_serializer,
                )
                return wrapped
        return handler

    def _coroutine(self, behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            try:
                return await behaviour(request, context)
            except Exception as error:  # noqa: BLE001  (the edge of the server: every failure becomes a status)
                await self._fail(context, error, method)

        return answer

    def _generator(self, behaviour: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., AsyncIterator[Any]]:
        async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async for reply in behaviour(request, context):
                    yield reply
            except Exception as error:  # noqa: BLE001  (as above)
                await self._fail(context, error, method)

        return answer

    async def _fail(self, context: Context, error: Exception, method: str) -> NoReturn:
        if isinstance(error, EplbError):
            await abort_with(context, error)
        if isinstance(error, grpc.aio.AbortError):  # the handler ended the call itself
            raise error
        self._on_fault(method, error)
        await context.abort(
            grpc.StatusCode.INTERNAL, f"{method} failed inside the planner: {type(error).__name__}; see its log"
        )
        raise error
