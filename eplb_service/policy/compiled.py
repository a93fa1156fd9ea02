"""Compiles the inner loops of policies with numba; cached on disk where that is possible.

One place, typed, for what numba leaves untyped. No fast-math: the same input gives the same plan on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])
Group = TypeVar("Group", bound=tuple[Any, ...])


def compiled(function: Function) -> Function:
    """Compile at the first call. A directory that cannot hold numba's cache only costs the compile time again."""
    njit: Any = numba.njit
    try:
        return njit(cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        return njit(function)  # type: ignore[no-any-return]


def compiled_nogil(function: Function) -> Function:
    """As `compiled`, and other threads run while it does."""
    njit: Any = numba.njit
    try:
        return njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        return njit(nogil=True)(function)  # type: ignore[no-any-return]


def inlined(function: Function) -> Function:
    """A piece of a compiled loop: becomes part of every function that calls it, so that passing many arrays costs nothing.

    Only compiled functions may call it: it has no way in from Python (which would take half of the time to compile).
    """
    njit: Any = numba.njit
    options = {"forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return njit(nogil=True, **options)(function)  # type: ignore[no-any-return]


def _unowned(_context: Any, group: Any) -> Any:
    """How numba builds `unowned`: each array of the tuple loses its owner."""

    def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        result = arguments[0]
        for index, kind in enumerate(group.types):
            if not isinstance(kind, numba.types.Array):
                continue
            view = context.make_array(kind)(context, builder, value=builder.extract_value(result, index))
            view.meminfo = view.meminfo.type(None)
            view.parent = view.parent.type(None)
            result = builder.insert_value(result, view._getvalue(), index)
        return result

    return group(group), build


unowned = cast("Callable[[Group], Group]", intrinsic(_unowned))
"""Inside compiled functions: the same named tuple of arrays, without reference counts. Counting is atomic and costs more than
the loops that do it. The caller keeps the arrays alive."""
