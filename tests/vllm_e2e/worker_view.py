"""TEST ONLY. What a vLLM worker shows of its EPLB state, called by name over `collective_rpc` (`--worker-extension-cls`).

It reads only: a collective of the ranks in here could meet one of a forward, and neither would end.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

from tests.vllm_e2e import cpu_backend


class WorkerView:
    """Mixed into vLLM's worker."""

    model_runner: Any
    rank: int

    def write_view(self, folder: str) -> None:
        """This rank's view, as a file: a server returns the answers of its first engine only."""
        groups: Any = importlib.import_module("vllm.distributed.parallel_state")
        (state,) = self.model_runner.eplb_state.model_states.values()
        view = {
            "ep_rank": groups.get_ep_group().rank_in_group,
            "rows": state.physical_to_logical_map.tolist(),
            "replicas": [
                [[slot for slot in expert if slot >= 0] for expert in layer] for layer in state.logical_to_physical_map.tolist()
            ],
            "digests": [_slot_digests(tensors) for tensors in state.model.expert_weights],
            "slot_loads": state.expert_load_window.sum(dim=0).tolist(),
            "outcomes": _outcomes(),
        }
        path = Path(folder) / f"rank{view['ep_rank']}.json"
        path.with_suffix(f".{os.getpid()}").write_text(json.dumps(view))
        path.with_suffix(f".{os.getpid()}").rename(path)

    def route(self, routing: str) -> None:
        """See `cpu_backend`."""
        cpu_backend.route(routing)


def _slot_digests(tensors: Any) -> list[str]:
    """One digest of all weights of each local slot of a layer."""
    digests = []
    for slot in range(len(tensors[0])):
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor[slot].contiguous().numpy().tobytes())
        digests.append(digest.hexdigest())
    return digests


def _outcomes() -> dict[str, int]:
    """What the adviser's calls led to so far; empty where vLLM's own policy is in place."""
    policies: Any = importlib.import_module("vllm.distributed.eplb.policy").EPLB_POLICIES
    adviser = getattr(policies["default"], "adviser", None)
    return {} if adviser is None else {str(outcome): number for outcome, number in adviser.counts.items()}
