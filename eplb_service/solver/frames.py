"""What the solver and its worker process say to each other over their socket: a length, a kind, a body.

The parent pickles problems for the worker. The worker never pickles: what a policy returned comes back as JSON and array bytes,
so that nothing of a policy's making is executed in the planner.
"""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.errors import BrokenInvariantError
from eplb_service.policy.base import RawPlan

LENGTH = struct.Struct("!Q")
FRAME_BYTES_MAX = 1 << 30


def encode_reply(head: dict[str, Any], plan: RawPlan | None = None) -> bytes:
    """A reply of the worker: JSON head, then, when there is a plan, its arrays in `.npy` format one after another.

    These are the map, the shares (where `has_shares`), every map of the front, and the shares of those that have some.
    """
    body = io.BytesIO()
    if plan is not None:
        claims = {
            "lower_bound": [float(bound) for bound in plan.lower_bound],
            "moves_lower_bound": [int(bound) for bound in plan.moves_lower_bound],
            "status": plan.status,
            "cut_off": plan.cut_off,
            "has_shares": plan.shares is not None,
            "num_front": len(plan.front),
            "num_front_shares": len(plan.front_shares),
        }
        head = {**head, "plan": claims}
        _save(body, plan.physical_to_logical, np.int32)
        if plan.shares is not None:
            _save(body, plan.shares, np.float32)
        for point in plan.front:
            _save(body, point, np.int32)
        for shares in plan.front_shares:
            _save(body, shares, np.float32)
    encoded = json.dumps(head).encode()
    payload = LENGTH.pack(len(encoded)) + encoded + body.getvalue()
    return LENGTH.pack(len(payload)) + payload


def _save(body: io.BytesIO, array: npt.ArrayLike, kind: npt.DTypeLike) -> None:
    np.save(body, np.ascontiguousarray(array, kind), allow_pickle=False)


def decode_reply(payload: bytes) -> tuple[dict[str, Any], RawPlan | None]:
    """The parts of a reply without its length. Raises BrokenInvariantError when they cannot be read."""
    try:
        (size,) = LENGTH.unpack_from(payload)
        head = json.loads(payload[LENGTH.size : LENGTH.size + size])
        if "plan" not in head:
            return head, None
        body = io.BytesIO(payload[LENGTH.size + size :])
        claims = head["plan"]
        plan = RawPlan(
            physical_to_logical=np.load(body, allow_pickle=False),
            shares=np.load(body, allow_pickle=False) if claims["has_shares"] else None,
            front=tuple(np.load(body, allow_pickle=False) for _ in range(claims["num_front"])),
            front_shares=tuple(np.load(body, allow_pickle=False) for _ in range(claims["num_front_shares"])),
            lower_bound=tuple(claims["lower_bound"]),
            moves_lower_bound=tuple(claims["moves_lower_bound"]),
            status=claims["status"],
            cut_off=claims["cut_off"],
        )
    except (struct.error, ValueError, KeyError, TypeError, EOFError) as error:
        raise BrokenInvariantError(
            f"the solver's worker sent a reply of {len(payload)} bytes that cannot be read: {error}"
        ) from error
    return head, plan
