"""Experts that live on no rank are named, not too many at once, and shown to whoever asks for the status."""

from __future__ import annotations

import numpy as np

from eplb_service.cli.status import _facts
from eplb_service.coverage import unreachable, why_uncovered
from eplb_service.ids import LayerRef, RankId
from eplb_service.pb.v1 import admin_pb2, common_pb2
from eplb_service.placement import Placement, Table


def test_every_expert_without_a_slot_is_found_and_no_other() -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        rows = random.integers(-1, 9, (4, 10))
        table = Table("m", (1, 4, 5, 9), 9, (RankId(3), RankId(0)), rows.astype(np.int32))
        found = unreachable(Placement((table,)))
        by_hand = {
            LayerRef("m", layer): missing
            for layer, row in zip((1, 4, 5, 9), rows.tolist(), strict=True)
            if (missing := tuple(expert for expert in range(9) if expert not in row))
        }
        assert found == by_hand


def test_the_sentence_names_the_first_ones_and_counts_the_rest() -> None:
    assert why_uncovered({}) == ""
    lost = {LayerRef("m", layer): tuple(range(20)) for layer in range(5)}
    said = why_uncovered(lost)
    assert said.startswith("100 experts live on no rank (layer m/0: 0, 1, 2, 3, 4, 5, 6, 7 and 12 more; layer m/1: ")
    assert said.endswith("; and 2 more layers): restart the ranks, so that they load them from the checkpoint")


def test_the_status_shows_them_in_red() -> None:
    view = admin_pb2.DeploymentStatus(deployment="chat")
    layer = common_pb2.Layer(model="m", layer_id=7)
    view.unreachable.append(admin_pb2.UnreachableView(layer=layer, experts=[4, 5]))
    facts = {label: (text, style) for label, text, style in _facts(view)}
    assert facts["UNREACHABLE"] == (why_uncovered({LayerRef("m", 7): (4, 5)}), "red")
    view.restoring = "generation 3 brings them back from backups"
    facts = {label: (text, style) for label, text, style in _facts(view)}
    assert facts["UNREACHABLE"][0] == "2 experts live on no rank (layer m/7: 4, 5): generation 3 brings them back from backups"
