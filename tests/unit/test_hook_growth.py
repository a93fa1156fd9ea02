"""A thousand generations through stager and flip: nothing grows, whatever became of them (tokenspeed#251, vllm#20901)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agent.engine.port import TensorKind
from agent.hook.chunk_events import StagingDone, StagingFailed
from agent.transfer.gloo import local_store
from agent.transfer.staging import stored
from eplb_service.control import Copy, RefusalCode, Stage
from eplb_service.ids import LayerRef
from tests.mixed_experts import LAYERS, wrong
from tests.unit.hook_stager_parts import HERE, RANKS, SLOTS, Rank, stage_of, started

THERE = (2, 1, 0, 3)
GENERATIONS, WARM_UP, FAILS_EVERY = 1000, 200, 40  # both counts end with a chunk that fails
GROWTH_BYTES = 1 << 20


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made = started(local_store())
    yield made
    for rank in made:
        rank.stager.close(5)


def chunk(number: int, mesh: int, layer: LayerRef, old: tuple[int, ...]) -> Stage:
    """Two experts of the ranks change places in a layer."""
    new = THERE if old == HERE else HERE
    copies = tuple(
        Copy(
            layer=layer,
            expert=expert,
            source_rank=RANKS[old.index(expert) // SLOTS],
            source_slot=old.index(expert) % SLOTS,
            target_rank=RANKS[slot // SLOTS],
            target_slot=slot % SLOTS,
        )
        for slot, expert in enumerate(new)
        if old[slot] != expert
    )
    return stage_of(number, mesh, {layer: new}, copies)


def held() -> dict[str, int]:
    """What this process holds of what could grow."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * 4096,
        "threads": threading.active_count(),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "maps of shared memory": Path("/proc/self/maps").read_text().count("memfd:eplb"),
    }


def test_a_thousand_generations_leave_nothing_behind_tokenspeed_251_vllm_20901(ranks: list[Rank]) -> None:
    """Most flip; some are refused for a checksum and some withdrawn, and those after them find new connections."""
    rows: dict[LayerRef, tuple[int, ...]] = dict.fromkeys(LAYERS, HERE)
    mesh, before = 1, dict[str, int]()
    for number in range(1, GENERATIONS + 1):
        layer = LAYERS[number % len(LAYERS)]
        stage = chunk(number, mesh, layer, rows[layer])
        if number % FAILS_EVERY == 0:
            _fail(ranks, stage, rows, withdrawn=number % (2 * FAILS_EVERY) == 0)
            mesh = number + 1
        else:
            _flip(ranks, stage, rows)
            rows[layer] = stage.layers[0].new_row
        if number == WARM_UP:
            before = held()
    after = held()
    for position, rank in enumerate(ranks):
        for layer, row in rows.items():
            for slot in range(SLOTS):
                assert wrong(layer, rank.tensors[layer], slot, row[position * SLOTS + slot]) == []
    assert after["bytes"] - before["bytes"] <= GROWTH_BYTES, (before, after)
    assert {**after, "bytes": 0} == {**before, "bytes": 0}


def _flip(ranks: list[Rank], stage: Stage, rows: Mapping[LayerRef, tuple[int, ...]]) -> None:
    for rank in ranks:
        rank.begin(stage, rows)
    ends = [rank.ends.get(timeout=20) for rank in ranks]  # nobody flips before all have staged: slots are being read
    for rank, (end, prepared) in zip(ranks, ends, strict=True):
        assert isinstance(end, StagingDone), end
        assert prepared is not None
        rank.flip(stage, prepared)


def _fail(ranks: list[Rank], stage: Stage, rows: Mapping[LayerRef, tuple[int, ...]], *, withdrawn: bool) -> None:
    """A chunk that its planner withdraws while a peer does not come, or whose bytes are not those that were loaded."""
    if withdrawn:
        ranks[0].begin(stage, rows)
        ranks[0].stager.cancel(stage.chunk_id)
        end, _ = ranks[0].ends.get(timeout=20)
        assert isinstance(end, StagingFailed)
        assert end.code is RefusalCode.WITHDRAWN
        return
    raw = ranks[0].tensors[stage.layers[0].layer]
    data = next(stored(tensor.data) for name, tensor in raw.items() if "weight" in name and tensor.kind is TensorKind.EXPERT)
    before = data[0].clone()
    data[0] += 1
    for rank in ranks:
        rank.begin(stage, rows)
    ends = [rank.ends.get(timeout=20)[0] for rank in ranks]
    data[0] = before
    assert isinstance(ends[1], StagingFailed)
    assert ends[1].code is RefusalCode.CHECKSUM
