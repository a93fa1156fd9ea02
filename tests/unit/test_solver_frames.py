"""What the solver's worker answers reaches the planner whole: shares, front and claims too."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.errors import BrokenInvariantError
from eplb_service.policy.base import RawPlan
from eplb_service.solver.frames import LENGTH, decode_reply, encode_reply


def round_trip(plan: RawPlan) -> RawPlan:
    frame = encode_reply({"number": 3}, plan)
    assert LENGTH.unpack_from(frame)[0] == len(frame) - LENGTH.size
    head, found = decode_reply(frame[LENGTH.size :])
    assert head["number"] == 3
    assert found is not None
    return found


def test_plan_with_shares_front_and_claims_arrives_as_it_was_sent() -> None:
    maps = [np.arange(6, dtype=np.int32).reshape(2, 3) + k for k in range(3)]
    shares = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    sent = RawPlan(
        physical_to_logical=maps[0],
        shares=shares,
        front=(maps[1], maps[2]),
        front_shares=((shares / 2).astype(np.float32), (shares / 4).astype(np.float32)),
        lower_bound=(1.0, 1.25),
        moves_lower_bound=(3, 0),
        status="optimal",
        cut_off=True,
    )
    found = round_trip(sent)
    assert found.physical_to_logical.dtype == np.int32
    assert np.array_equal(found.physical_to_logical, maps[0])
    assert found.shares is not None
    assert np.array_equal(found.shares, shares)
    assert [point.tolist() for point in found.front] == [maps[1].tolist(), maps[2].tolist()]
    assert [point.tolist() for point in found.front_shares] == [(shares / 2).tolist(), (shares / 4).tolist()]
    claims = (found.lower_bound, found.moves_lower_bound, found.status, found.cut_off)
    assert claims == ((1.0, 1.25), (3, 0), "optimal", True)


def test_plain_plan_has_neither_shares_nor_front() -> None:
    found = round_trip(RawPlan(physical_to_logical=np.zeros((1, 2), np.int64)))
    assert (found.shares, found.front, found.lower_bound, found.moves_lower_bound) == (None, (), (), ())


def test_reply_without_a_plan_has_only_its_head() -> None:
    frame = encode_reply({"number": 1, "error": "policy_failed"})
    assert decode_reply(frame[LENGTH.size :]) == ({"number": 1, "error": "policy_failed"}, None)


def test_reply_that_was_cut_is_told() -> None:
    plan = RawPlan(physical_to_logical=np.zeros((1, 2), np.int32), front=(np.zeros((1, 2), np.int32),))
    frame = encode_reply({}, plan)[LENGTH.size :]
    for cut in (3, 20, len(frame) // 2, len(frame) - 4):
        with pytest.raises(BrokenInvariantError, match="cannot be read"):
            decode_reply(frame[:cut])
