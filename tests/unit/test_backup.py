"""Experts that no rank gives: out of a checkpoint, made again into what the engine holds, or out of host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agent.hook.chunk_events import StagingDone, StagingFailed
from agent.hook.manifest import settled
from agent.hook.stage_check import LayerShape, RankShape, check_stage
from agent.transfer.backup import HostBackup
from agent.transfer.checkpoint import Checkpoint, files_of
from agent.transfer.gloo import local_store
from agent.transfer.staging import ExpertLayout
from eplb_service.control import NO_RANK, Copy, LinkBytes, LiveLayer, RefusalCode
from eplb_service.errors import InvalidInputError
from eplb_service.ids import GenerationNumber, LayerRef
from eplb_service.placement import row_digest
from eplb_service.rpc.convert_control import to_rank_from_pb, to_rank_to_pb
from tests.mixed_checkpoint import finish, parts_of, save
from tests.mixed_experts import BF16, FP8, INT4, LAYERS, slot_tensors, wrong
from tests.unit.hook_stager_parts import HERE, RANKS, Rank, stage_of, started

NUM_EXPERTS = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path, NUM_EXPERTS)
    return tmp_path


def layouts() -> dict[LayerRef, ExpertLayout]:
    return {layer: ExpertLayout.of(layer, settled(slot_tensors(layer, (0, 1)))) for layer in LAYERS}


@pytest.mark.parametrize("layer", LAYERS)
def test_an_expert_from_the_checkpoint_is_bit_for_bit_what_the_engine_loaded_and_nothing_else_is_read(
    folder: Path, layer: LayerRef
) -> None:
    checkpoint, layout = Checkpoint(files_of(folder), parts_of, finish), layouts()[layer]
    region = torch.full((layout.num_bytes,), 0x55, dtype=torch.uint8)
    for expert in (3, 0):
        assert checkpoint.read(layer, expert, layout, region)
        fresh = settled(slot_tensors(layer, (9, 9)))
        layout.unpack(region, fresh, 1)
        assert wrong(layer, fresh, 1, expert) == []
        packed = torch.zeros_like(region)
        layout.pack(settled(slot_tensors(layer, (expert, expert))), 0, packed)
        assert torch.equal(region, packed)  # padding too: it is part of the checksum
    assert checkpoint.bytes_read == 2 * layout.expert_bytes
    assert not checkpoint.read(layer, 99, layout, region)


def test_host_memory_takes_what_fits_and_gives_it_without_the_checkpoint(folder: Path) -> None:
    made = layouts()
    size = made[INT4].num_bytes
    checkpoint, backup = Checkpoint(files_of(folder), parts_of, finish), HostBackup(2 * size + 1)
    wanted = [(INT4, expert) for expert in (99, 3, 1, 0)]
    assert backup.fill(checkpoint, wanted, made) == 2
    assert backup.num_bytes == 2 * size
    read = checkpoint.bytes_read
    regions = {expert: torch.zeros(size, dtype=torch.uint8) for expert in (3, 1, 0)}
    assert {expert: backup.read(INT4, expert, made[INT4], region) for expert, region in regions.items()} == {
        3: True,
        1: True,
        0: False,
    }
    assert checkpoint.bytes_read == read
    assert backup.fill(checkpoint, wanted, made) == 2
    assert checkpoint.bytes_read == read  # what is held is not read again


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _no_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


def _no_json(path: Path) -> None:
    path.write_bytes((4).to_bytes(8, "little") + b"nope" + bytes(64))


@pytest.mark.parametrize(
    ("spoil", "words"), [(_cut, "the file is damaged"), (_no_header, "no safetensors file"), (_no_json, "header is no JSON")]
)
def test_a_damaged_file_is_named(folder: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(folder / "model-1.safetensors")
    layout = layouts()[BF16]
    with pytest.raises(InvalidInputError, match=words) as raised:
        Checkpoint(files_of(folder), parts_of, finish).read(BF16, 1, layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    assert "model-1.safetensors" in str(raised.value)


def test_an_expert_of_which_a_part_is_missing_and_one_of_another_shape_are_not_taken(folder: Path) -> None:
    made, region = layouts(), torch.zeros(4096, dtype=torch.uint8)

    def more(layer: LayerRef, expert: int) -> Sequence[str]:
        return [*parts_of(layer, expert), "model.down_proj.weight"]

    with pytest.raises(InvalidInputError, match=r"has a part of expert 2 of mixed/0, but no model\.down_proj\.weight"):
        Checkpoint(files_of(folder), more, finish).read(BF16, 2, made[BF16], region[: made[BF16].num_bytes])

    def unfinished(_layer: LayerRef, _expert: int, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return dict(zip(("qweight", "scales", "qzeros"), parts.values(), strict=True))

    with pytest.raises(InvalidInputError, match=r"tensor qweight is torch\.uint8 of \(5, 6\); a slot holds 30 bytes of shape"):
        Checkpoint(files_of(folder), parts_of, unfinished).read(INT4, 2, made[INT4], region[: made[INT4].num_bytes])


# ── through the stager ───────────────────────────────────────────────────────────────────────────────────────────────────


def restored(layer: LayerRef, expert: int, column: int, slot: int) -> Copy:
    return Copy(layer=layer, expert=expert, source_rank=NO_RANK, source_slot=0, target_rank=RANKS[column], target_slot=slot)


ROW = (3, 1, 2, 3)
"""Expert 3 goes to slot 0 of the first rank, and is asked of nobody."""


def staged(ranks: list[Rank], number: int, copies: Sequence[Copy], *, version: int = 0) -> list[StagingDone | StagingFailed]:
    """How a chunk ends on both ranks; it is flipped where it ended well."""
    rows = {copy.layer: ROW for copy in copies}
    stage = stage_of(number, number, rows, copies, version=version)
    for rank in ranks:
        rank.begin(stage, dict.fromkeys(LAYERS, HERE))
    ends = [rank.ends.get(timeout=20) for rank in ranks]
    for rank, (_, prepared) in zip(ranks, ends, strict=True):
        if prepared is not None and all(isinstance(end, StagingDone) for end, _ in ends):
            rank.flip(stage, prepared)
    return [end for end, _ in ends]


def test_an_expert_that_no_rank_gives_is_restored_staged_and_flipped_vllm_41204_sglang_12068(folder: Path) -> None:
    made = layouts()
    checkpoint, memory = Checkpoint(files_of(folder), parts_of, finish), HostBackup(1 << 20)
    memory.fill(checkpoint, [(FP8, 3)], made)
    before = checkpoint.bytes_read
    ranks = started(local_store(), sources=(memory, checkpoint))
    try:
        ends = staged(ranks, 1, [restored(layer, 3, 0, 0) for layer in LAYERS])
        assert [type(end) for end in ends] == [StagingDone, StagingDone], ends
        assert isinstance(ends[0], StagingDone)
        assert ends[0].received == LinkBytes()  # over no link
        for layer in LAYERS:
            assert wrong(layer, ranks[0].tensors[layer], 0, 3) == []
            assert wrong(layer, ranks[0].tensors[layer], 1, 1) == []
            assert ranks[0].tables[layer].physical_to_logical.tolist() == list(ROW)
        assert checkpoint.bytes_read - before == made[BF16].expert_bytes + made[INT4].expert_bytes
    finally:
        for rank in ranks:
            rank.stager.close(5)


def test_what_is_not_what_the_ranks_loaded_is_refused_and_so_is_what_nobody_has(folder: Path) -> None:
    def other(layer: LayerRef, expert: int, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        made = dict(finish(layer, expert, parts))
        if layer == FP8:
            made["alpha"] = made["alpha"] * 2  # post-processing of another release
        return made

    ranks = started(local_store(), sources=(Checkpoint(files_of(folder), parts_of, other),))
    try:
        refused = staged(ranks, 1, [restored(FP8, 3, 0, 0)])[0]
        assert isinstance(refused, StagingFailed)
        assert refused.code is RefusalCode.CHECKSUM
        for path in folder.iterdir():
            path.unlink()
        gone = staged(ranks, 2, [restored(INT4, 3, 0, 0)])[0]
        assert isinstance(gone, StagingFailed)
        assert gone.code is RefusalCode.TRANSFER
        assert "expert 3 of mixed/2 was not restored from checkpoint: [Errno 2]" in gone.reason
        newer = staged(ranks, 3, [restored(BF16, 3, 0, 0)], version=1)[0]
        assert isinstance(newer, StagingFailed)
        assert "nobody knows its checksum since these weights were loaded" in newer.reason  # a backup is of weights of the past
    finally:
        for rank in ranks:
            rank.stager.close(5)


def test_a_rank_without_backups_says_so() -> None:
    ranks = started(local_store())
    try:
        end = staged(ranks, 1, [restored(BF16, 3, 0, 0)])[0]
        assert isinstance(end, StagingFailed)
        assert end.reason.endswith("no rank sends it and no backup has it (backups here: none)")
    finally:
        for rank in ranks:
            rank.stager.close(5)


# ── the contract ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_from_a_backup_is_checked_and_travels_to_the_agent_and_back() -> None:
    copy = restored(BF16, 3, 0, 0)
    live = {BF16: LiveLayer(layer=BF16, generation=GenerationNumber(0), digest=row_digest(BF16, np.array(HERE)), row=HERE)}
    shape = RankShape(
        rank_id=RANKS[1],
        group_rank_ids=RANKS,
        layers={BF16: LayerShape(num_logical=4, slots=2, expert_bytes=96)},
        replica_table_width=2,
        staging_bytes=1000,
    )
    row = (3, 1, 2, 0)
    stage = stage_of(1, 1, {BF16: row}, [copy, restored(BF16, 0, 1, 1)])
    change = replace(stage.layers[0], old_digest=live[BF16].digest, new_digest=row_digest(BF16, np.array(row)))
    stage = replace(stage, layers=(change,))
    assert check_stage(stage, shape, live, 0) is None
    assert to_rank_from_pb(to_rank_to_pb(stage)) == stage
    wrong_slot = replace(stage, copies=(replace(copy, source_slot=1), stage.copies[1]))
    refusal = check_stage(wrong_slot, shape, live, 0)
    assert refusal is not None
    assert refusal[0] is RefusalCode.INVALID
    assert refusal[1].startswith(f"copy of {BF16} expert 3 from a backup to rank 10 slot 0: a copy from a backup has no ")
