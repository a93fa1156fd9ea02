"""Which live maps a load window may have been served by while a generation is carried in chunks."""

from __future__ import annotations

import dataclasses

import numpy as np

from eplb_service.generation import LiveMap
from eplb_service.ids import GenerationNumber, Phase
from eplb_service.membership.machine import Group
from eplb_service.placement import Placement, Table
from eplb_service.planner.load_watch import LoadWatch
from eplb_service.window.report import Accepted, LoadReport, Refusal, Refused, Semantics, TableCounts
from eplb_service.window.windows import Windows
from tests.unit.test_membership import rank, ready


def as_loaded(group: Group) -> LiveMap:
    tables = tuple(
        Table.linear(
            model=table.model,
            layer_ids=table.layer_ids,
            num_logical=table.num_logical,
            rank_ids=group.rank_ids,
            slots_per_rank=table.slots,
        )
        for table in group.tables
    )
    placement = Placement(tables)
    return LiveMap(placement, (GenerationNumber(0),) * sum(table.num_layers for table in tables))


def with_layer_rolled(live: LiveMap, layer: int) -> LiveMap:
    """One more layer holds its experts one slot further on."""
    (table,) = live.placement.tables
    rows = table.physical_to_logical.copy()
    rows[layer] = np.roll(rows[layer], 1)
    generations = list(live.generations)
    generations[layer] = GenerationNumber(1)
    return LiveMap(Placement((dataclasses.replace(table, physical_to_logical=rows),)), tuple(generations))


def window(group: Group, index: int, begin: LiveMap, end: LiveMap) -> LoadReport:
    registration = group.registrations[0]
    steps = registration.window_steps
    (table,) = begin.placement.tables
    return LoadReport(
        rank_id=registration.address.rank_id,
        incarnation=registration.address.incarnation,
        group_id=registration.address.group_id,
        window_index=index,
        boundary_begin=index * steps,
        boundary_end=(index + 1) * steps,
        forward_passes=steps,
        tokens=5,
        semantics=Semantics.LOCAL_TOKENS,
        phase=Phase.DECODE,
        live_digest_begin=begin.digest,
        live_digest_end=end.digest,
        tables=(
            TableCounts(
                model=table.model,
                layer_ids=table.layer_ids,
                counts=np.ones((1, table.num_layers, table.num_logical), np.int64),
            ),
        ),
        step_time_min_s=0.01,
        step_time_mean_s=0.01,
        step_time_max_s=0.01,
    )


def test_window_that_began_between_two_chunks_counts_also_after_the_rollout() -> None:
    """Else every rollout of many chunks would cost the window across its last flip."""
    _, group = ready(rank(0), rank(1))
    watch = LoadWatch("chat", Windows(), lambda outcome: None)
    watch.group_changed(group)
    loaded = as_loaded(group)
    between = with_layer_rolled(loaded, 0)
    done = with_layer_rolled(between, 1)
    never = with_layer_rolled(loaded, 1)
    watch.live_known(loaded)
    watch.live_in_motion()
    watch.live_passed(between)
    watch.live_passed(done)
    watch.live_known(done)
    assert isinstance(watch.offer(window(group, 3, between, done)), Accepted)
    answer = watch.offer(window(group, 4, never, done))
    assert isinstance(answer, Refused)
    assert answer.reason is Refusal.WRONG_GENERATION
