"""Does a function of an engine take and return what we know? An adviser for another one must not install itself. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from eplb_service.errors import UnsupportedError


def check_parameters(function: Callable[..., Any], name: str, known: tuple[str, ...]) -> None:
    """Raises UnsupportedError, naming both lists, when a function's parameters are not those that we know.

    >>> check_parameters(len, "len", ("obj",))
    """
    found = tuple(inspect.signature(function).parameters)
    if found != known:
        raise UnsupportedError(
            f"{name} takes ({', '.join(found)}); this release of eplb-service knows ({', '.join(known)}):"
            " use a release of both that fit one another (docs/adviser.md lists them)"
        )


def returned(function: Callable[..., Any]) -> str:
    """What a function says that it returns, as text; empty when it does not say."""
    annotation = inspect.signature(function).return_annotation
    if annotation is inspect.Signature.empty:
        return ""
    if isinstance(annotation, str):
        return annotation
    return annotation.__qualname__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)


def attribute(module: Any, name: str) -> Any:
    """What an engine's module must have. Raises UnsupportedError naming it when it has not."""
    if not hasattr(module, name):
        raise UnsupportedError(
            f"{module.__name__} has no {name}: this release of eplb-service does not know this engine's release"
            " (docs/adviser.md lists those it knows)"
        )
    return getattr(module, name)
