"""What is compared, apart from what runs: answers, counts, weights and loads. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.vllm_e2e.plain_model import Expected, Int64Array, Output

LOGPROB_DIFFERENCE = 1e-3
"""Above what the order of 32-bit sums makes of it (some 1e-5), far below what one wrong expert does."""


class CheckError(Exception):
    """Something is not as it must be."""


class OutputsDifferError(CheckError):
    """VLLM answered something else than plain transformers."""


class CountsDifferError(CheckError):
    """The planner was told other counts than a hook on the plain model sees."""


class WeightsDifferError(CheckError):
    """A slot does not hold what the map names, or ranks have different maps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankView:
    """What `worker_view` shows of a rank.

    rows: shape (L, P). replicas: of each layer and expert, the slots that tokens are sent to. digests: of each layer's local
    slots. slot_loads: tokens that this rank counted in vLLM's window, shape (L, P). outcomes: of the adviser's calls.
    """

    rows: Int64Array
    replicas: list[list[list[int]]]
    digests: list[list[str]]
    slot_loads: Int64Array
    outcomes: dict[str, int]


def read_views(folder: Path, num_ranks: int) -> list[RankView]:
    """Views of all ranks, by rank."""
    views = []
    for rank in range(num_ranks):
        tree = json.loads((folder / f"rank{rank}.json").read_text())
        views.append(
            RankView(
                rows=np.array(tree["rows"]), replicas=tree["replicas"], digests=tree["digests"],
                slot_loads=np.array(tree["slot_loads"]), outcomes=tree["outcomes"],
            )
        )  # fmt: skip
    return views


def outputs_equal(title: str, expected: Sequence[Expected], outputs: Sequence[Output]) -> float:
    """The largest difference of a logprob. Raises OutputsDifferError at another token, or another logprob."""
    largest = 0.0
    for number, (wanted, made) in enumerate(zip(expected, outputs, strict=True)):
        if made.tokens != wanted.output.tokens:
            raise OutputsDifferError(
                f"{title}, prompt {number}: vLLM answers {made.tokens}, plain transformers {wanted.output.tokens}"
            )
        largest = max(largest, float(np.abs(np.subtract(made.logprobs, wanted.output.logprobs)).max()))
    if largest > LOGPROB_DIFFERENCE:
        raise OutputsDifferError(f"{title}: the same tokens, but a logprob differs by {largest:.2g}")
    return largest


def counts_equal(title: str, wanted: Int64Array, told: npt.NDArray[np.float64]) -> None:
    """Raises CountsDifferError at the first expert whose tokens are counted otherwise."""
    if wanted.shape != told.shape:
        raise CountsDifferError(f"{title}: the load has shape {told.shape}, not {wanted.shape}")
    for layer, expert in np.argwhere(wanted != told):
        raise CountsDifferError(
            f"{title}: the planner was told {told[layer, expert]:g} tokens of expert {expert} of layer {layer},"
            f" the plain model routed {wanted[layer, expert]} there"
        )


def same_map(title: str, views: Sequence[RankView]) -> Int64Array:
    """The map of all ranks, shape (L, P). Raises WeightsDifferError when they have different ones, or tables beside it."""
    rows = views[0].rows
    for rank, view in enumerate(views):
        if not np.array_equal(view.rows, rows):
            raise WeightsDifferError(f"{title}: rank {rank} routes by {view.rows.tolist()}, rank 0 by {rows.tolist()}")
        for layer, row in enumerate(rows.tolist()):
            for expert, slots in enumerate(view.replicas[layer]):
                held = [slot for slot, there in enumerate(row) if there == expert]
                if sorted(slots) != held:
                    raise WeightsDifferError(
                        f"{title}: rank {rank} sends expert {expert} of layer {layer} to slots {slots}, it is in {held}"
                    )
    return rows


def digests_by_expert(views: Sequence[RankView]) -> list[dict[int, str]]:
    """Of each layer, the digest of each expert's weights as loaded. Raises WeightsDifferError where two are alike."""
    found: list[dict[int, str]] = []
    for layer, row in enumerate(views[0].rows.tolist()):
        held = [digest for view in views for digest in view.digests[layer]]
        found.append(dict(zip(row, held, strict=True)))
        if len(set(found[-1].values())) != len(found[-1]) or any(
            found[-1][expert] != digest for expert, digest in zip(row, held, strict=True)
        ):
            raise WeightsDifferError(f"layer {layer} as loaded: experts alike, or copies of one that are not: {held}")
    return found


def weights_follow(title: str, views: Sequence[RankView], known: Sequence[dict[int, str]]) -> Int64Array:
    """The map of all ranks, whose every slot holds its expert, bit by bit. Raises WeightsDifferError."""
    rows = same_map(title, views)
    for layer, row in enumerate(rows.tolist()):
        held = [digest for view in views for digest in view.digests[layer]]
        for slot, (expert, digest) in enumerate(zip(row, held, strict=True)):
            if known[layer][expert] != digest:
                others = [other for other, one in known[layer].items() if one == digest]
                raise WeightsDifferError(
                    f"{title}: slot {slot} of layer {layer} does not hold expert {expert} but {others or 'something else'}"
                )
    return rows


def imbalance(slot_loads: npt.NDArray[np.integer], num_ranks: int) -> float:
    """Load of the busiest rank over that of all, mean over layers. Slot loads: shape (L, P)."""
    by_rank = slot_loads.reshape(len(slot_loads), num_ranks, -1).sum(axis=2)
    return float((by_rank.max(axis=1) / by_rank.mean(axis=1)).mean())


def by_expert(rows: Int64Array, slot_loads: Int64Array, num_experts: int) -> Int64Array:
    """Loads of slots as loads of experts. Shape (L, E)."""
    return np.array(
        [
            np.bincount(row, weights=load, minlength=num_experts).astype(np.int64)
            for row, load in zip(rows, slot_loads, strict=True)
        ]
    )
