"""Opens the store that the operator asked for."""

from __future__ import annotations

from pathlib import Path

from eplb_service.errors import InvalidInputError
from eplb_service.store.address import FORMS
from eplb_service.store.base import Store
from eplb_service.store.embedded import EmbeddedStore
from eplb_service.store.redis import RedisStore

EMBEDDED = "embedded"


def open_store(spec: str | None, data_dir: Path, *, password: str | None = None) -> Store:
    """A store that is ready to `start`: "embedded" (the default, in `data_dir`) or a server's URL.

    `password` (from a file or the environment) wins over one in the URL. Raises InvalidInputError for another `spec`.
    """
    if spec is None or spec == EMBEDDED:
        return EmbeddedStore(data_dir)
    if "://" not in spec:
        raise InvalidInputError(f"store is neither {EMBEDDED!r} nor a URL: use {EMBEDDED!r} or {FORMS}")
    return RedisStore(spec, password=password)
