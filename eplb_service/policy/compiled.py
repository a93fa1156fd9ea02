"""Compiles the inner loops of policies with numba; cached on disk where that is possible.

One place, typed, for what numba leaves untyped. No fast-math: the same input gives the same plan on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile at the first call. A directory that cannot hold numba's cache only costs the compile time again."""
    njit: Any = numba.njit
    try:
        return njit(cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        return njit(function)  # type: ignore[no-any-return]
