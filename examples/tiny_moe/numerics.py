"""Arithmetic whose result for one row never depends on the other rows, and the check that this machine keeps to it.

A matrix product may sum in another order when its shape changes: libraries pick a kernel by the number of rows. Serving
changes that number all the time (batches grow and shrink, experts move between ranks), so plain products give tokens that
differ in the last bit and then altogether. Here every product runs on tiles of exactly `TILE_ROWS` rows: one shape per
weight, whatever the batch. What remains to be shown is that a row's result does not depend on its place in the tile or on
its neighbours; `self_check` shows it on the machine at hand before anything is served.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from examples.tiny_moe.config import TinyMoeError

TILE_ROWS = 8

_ADVICE = (
    "tokens generated here would depend on the batch, so exact comparison is impossible: "
    "use another build of torch (or set MKL_CBWR=COMPATIBLE) on this machine"
)


def configure_torch() -> None:
    """Make products repeatable in a serving process: one thread, float32 products done in float32.

    Work split over threads may be cut at other places when shapes change; call this once, before the first product.
    """
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")


def tiled_linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Rows times a weight, by products of one fixed shape: row results are bit-equal in any batch.

    Args:
        inputs: Shape (n, K), float32; n may be 0. Copied, so its alignment and strides do not matter.
        weight: Shape (N, K), float32, contiguous, as `torch.nn.functional.linear` takes it.

    Returns:
        Shape (n, N), float32.
    """
    num_rows = inputs.shape[0]
    num_tiles = -(-num_rows // TILE_ROWS)
    padded = inputs.new_zeros((num_tiles * TILE_ROWS, inputs.shape[1]))
    padded[:num_rows] = inputs
    outputs = inputs.new_empty((num_tiles * TILE_ROWS, weight.shape[0]))
    transposed = weight.t()
    # A loop, not one batched product: a batched kernel is free to choose by the number of tiles.
    for source, target in zip(torch.split(padded, TILE_ROWS), torch.split(outputs, TILE_ROWS), strict=True):
        torch.mm(source, transposed, out=target)
    return outputs[:num_rows]


def rms_norm(hidden: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """Root-mean-square norm of each row (Zhang and Sennrich 2019). Shape (n, D), float32, to the same shape."""
    mean_square = (hidden * hidden).mean(dim=-1, keepdim=True)
    return hidden * (mean_square + epsilon).rsqrt() * weight


def stable_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row, largest first, ties by the lowest index (`torch.topk` leaves ties open).

    Args:
        logits: Shape (n, E), float32.
        k: How many to keep.

    Returns:
        Values (n, k), float32, and indices (n, k), int64.
    """
    values, indices = torch.sort(logits, dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), indices[:, :k].contiguous()


def self_check(*, shapes: tuple[tuple[int, int], ...] = ((96, 288), (96, 96), (96, 32), (96, 64), (64, 96), (96, 256))) -> None:
    """Prove on this machine that rows do not influence each other; call after `configure_torch`, before serving.

    Args:
        shapes: (K, N) of the products to try; the default covers every product of the shipped model.

    Raises:
        TinyMoeError: some row changed with its place, its batch or its neighbours: names the operation and the shape.
    """
    if torch.get_num_threads() != 1:
        raise TinyMoeError(
            f"torch uses {torch.get_num_threads()} threads, results may depend on the split; call configure_torch() first"
        )
    generator = torch.Generator().manual_seed(20_240_229)
    for num_inputs, num_outputs in shapes:
        weight = torch.randn(num_outputs, num_inputs, generator=generator)
        rows = torch.randn(3 * TILE_ROWS, num_inputs, generator=generator)
        alone = torch.cat([tiled_linear(row[None], weight) for row in rows])
        what = f"the product of {TILE_ROWS} rows with a {num_outputs} x {num_inputs} weight"
        _check_rows(what, rows, alone, functools.partial(tiled_linear, weight=weight), generator)
    rows = torch.randn(3 * TILE_ROWS, 96, generator=generator)
    scale = torch.randn(96, generator=generator)
    alone = torch.cat([rms_norm(row[None], scale, epsilon=1e-6) for row in rows])
    _check_rows("rms_norm of width 96", rows, alone, lambda batch: rms_norm(batch, scale, epsilon=1e-6), generator)
    gate_rows = torch.randn(3 * TILE_ROWS, 4, generator=generator)
    alone = torch.cat([torch.softmax(row[None], dim=-1) for row in gate_rows])
    _check_rows("softmax over 4 gates", gate_rows, alone, lambda batch: torch.softmax(batch, dim=-1), generator)


def _check_rows(
    what: str, rows: Tensor, alone: Tensor, compute: Callable[[Tensor], Tensor], generator: torch.Generator
) -> None:
    """Compare rows computed alone (`alone`) with the same rows at other places, in other batches, beside garbage."""
    num_rows = rows.shape[0]
    for offset in range(TILE_ROWS):
        garbage = 1e6 * torch.randn(num_rows + TILE_ROWS, rows.shape[1], generator=generator)
        garbage[offset : offset + num_rows] = rows
        if not torch.equal(compute(garbage)[offset : offset + num_rows], alone):
            raise TinyMoeError(f"{what} changed when the row moved by {offset} places in its batch; {_ADVICE}")
        sparse = 1e6 * torch.randn(num_rows, rows.shape[1], generator=generator)
        sparse[offset::TILE_ROWS] = rows[offset::TILE_ROWS]
        if not torch.equal(compute(sparse)[offset::TILE_ROWS], alone[offset::TILE_ROWS]):
            raise TinyMoeError(f"{what} changed at place {offset} with the other rows of the tile; {_ADVICE}")
    for size in range(1, num_rows):
        if not torch.equal(torch.cat([compute(part) for part in torch.split(rows, size)]), alone):
            raise TinyMoeError(f"{what} changed when {num_rows} rows were split into batches of {size}; {_ADVICE}")
