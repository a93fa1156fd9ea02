"""From slots to outputs and back: the exchange that carries rows over the ranks of the group.

Rows are only moved, never added up on the way: each (token, choice) comes back as a row of its own, to the place where it
started, and the source rank alone sums over choices. So no sum depends on where experts live (`docs/exactness.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from agent.engine.reference.experts import LayerExperts
from agent.engine.reference.model import ExpertModel


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """Dispatch and combine of one rank over a process group.

    Attributes:
        model: Runs the experts.
        num_ranks: R.
        group: Whose ranks are in column order of placements; None = the default group.
    """

    model: ExpertModel
    num_ranks: int
    group: dist.ProcessGroup | None = None

    def run(self, layer: LayerExperts, inputs: Tensor, physical: Tensor, *, real: bool) -> Tensor:
        """Send rows to the experts' slots, compute what arrives here, and bring every output back.

        Every rank of the group calls this for every MoE layer of a step, with no rows if it has none.

        Args:
            layer: This rank's slots of the layer.
            inputs: Shape (n, D): a row for each token.
            physical: Shape (n * k,), int64: slot of every (token, choice), tokens in batch order.
            real: Whether these are tokens of requests; dummy ones are computed and not counted.

        Returns:
            Output of every (token, choice), shape (n * k, D), in the order of `physical`.
        """
        num_pairs, width = physical.numel(), inputs.shape[1]
        num_slots = layer.num_slots
        top_k = num_pairs // max(1, inputs.shape[0])
        order = torch.argsort(physical, stable=True)
        rows = inputs[order // top_k] if num_pairs else inputs[:0]
        counts = torch.bincount(physical, minlength=self.num_ranks * num_slots)
        if real:
            layer.sent += counts
        sizes = self._exchange_sizes(counts.view(self.num_ranks, num_slots), real=real)
        arriving = sizes[:, :num_slots]
        layer.tokens += (arriving * sizes[:, num_slots:]).sum(0)
        to_send: list[int] = counts.view(self.num_ranks, num_slots).sum(1).tolist()
        to_receive: list[int] = arriving.sum(1).tolist()

        received = inputs.new_empty(sum(to_receive), width)
        dist.all_to_all_single(received, rows, to_receive, to_send, group=self.group)
        outputs = self._run_slots(layer, received, arriving)
        returned = inputs.new_empty(num_pairs, width)
        dist.all_to_all_single(returned, outputs, to_send, to_receive, group=self.group)
        in_order = torch.empty_like(returned)
        in_order[order] = returned
        return in_order

    def _exchange_sizes(self, counts: Tensor, *, real: bool) -> Tensor:
        """Tell every rank how many rows come for each of its slots, and whether they are real (a last column, 0 or 1)."""
        sizes = torch.nn.functional.pad(counts, (0, 1), value=int(real))
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes, group=self.group)
        return arriving

    def _run_slots(self, layer: LayerExperts, received: Tensor, arriving: Tensor) -> Tensor:
        """Each local slot's expert on all rows that came for it, from whatever rank. Arriving: shape (R, S), int64."""
        slot_of_row = torch.repeat_interleave(
            torch.arange(layer.num_slots, device=received.device).repeat(self.num_ranks), arriving.flatten()
        )
        by_slot = torch.argsort(slot_of_row, stable=True)
        grouped = received[by_slot]
        outputs = torch.empty_like(received)
        start = 0
        computed: list[Tensor] = []
        for slot, count in enumerate(arriving.sum(0).tolist()):
            if count:
                computed.append(self.model.run_expert(layer.slot_views[slot], grouped[start : start + count]))
                start += count
        if computed:
            outputs[by_slot] = torch.cat(computed)
        return outputs
