"""Hooks whose group forms again in place, as processes that are really killed."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator

import pytest

from tests.integration.forming_fleet import FormingFleet
from tests.integration.hook_fleet import LAYERS

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.integration.forming_fleet"])
    return context


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        yield folder


def test_a_rank_is_lost_and_another_joins(context: multiprocessing.context.ForkServerContext, folder: str) -> None:
    fleet = FormingFleet(context, folder, num_ranks=4)
    fleet.step(3)
    fleet.lose(10)
    assert set(fleet.form(20, 30, 40).values()) == {""}
    fleet.check()
    fleet.step(3)
    fleet.roll_out(fleet.turned())
    fleet.check()
    assert set(fleet.form(20, 30, 40, 50, joining=(50,)).values()) == {""}
    fleet.check()
    row = fleet.rows[LAYERS[0]]
    fleet.roll_out({LAYERS[0]: (*row[:-2], row[0], row[2])})
    fleet.check()
    fleet.close()
