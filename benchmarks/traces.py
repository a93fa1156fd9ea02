"""Re-planning on recorded routing of a public model: every window a plan from what was seen, scored on the window that follows.

    python -m benchmarks.traces [--traces DIR] [--trace NAME] [--peer-vllm DIR] [--peer-sglang DIR]

No gate: every plan is carried out. 24 layers of 32 experts on 8 ranks of 5 slots. The first plan is from nothing; it counts for
balance, not for moves. Moved: residencies over slots, a window. Peers plan from the last window and rewrite what they like.
Time is processor time in seconds of one core, for all windows.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Measured, NotBuiltError, Peers, Row, percent
from benchmarks.peers import Planner, peer_sglang, peer_vllm
from eplb_service.cli.output import print_table
from eplb_service.dispatch import imbalance_of
from eplb_service.moves import residency_moves
from eplb_service.placement import Table
from eplb_service.policy.base import Effort, PlanningProblem
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy, warm_up_policy
from eplb_service.topology import Topology

TRACES = Path(__file__).resolve().parents[1].parent / "shared" / "traces"
NAMES = ("drift", "mixed")
NUM_RANKS, SLOTS_PER_RANK = 8, 5
HISTORY = 12
"""Windows that policies which look at a series are given."""

PEER_MEANS = {"drift": 1.0879, "mixed": 1.0755}
"""Mean imbalance of vLLM 0.33's default policy (SGLang 0.5.23's deepseek: 1.0877, 1.0757), for a run without peers' folders."""

LEAST_OVER_PEER, LEAST_MOVED, AIM_MOVED = 0.02, 0.05, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What a planner came to over a trace.

    mean: imbalance in the next window, mean over layers and windows; worst: mean over windows of the worst layer. moved: mean
    share of slots moved a window. cpu_s: of all plans.
    """

    mean: float
    worst: float
    moved: float
    cpu_s: float


def windows_of(name: str, folder: Path = TRACES) -> npt.NDArray[np.float64]:
    """Counts of a recorded trace, shape (windows, 24, 32). Raises NotBuiltError when it is not there."""
    path = folder / f"gpt-oss-20b_windows_{name}.npz"
    if not path.is_file():
        raise NotBuiltError(f"no recorded trace {path.name} in {folder}")
    with np.load(path) as archive:
        counts: npt.NDArray[np.float64] = archive[archive.files[0]].astype(np.float64)
    return counts


def follow(planner: Planner, counts: npt.NDArray[np.float64], history: int, *, effort: Effort = Effort.QUICK) -> Followed:
    """Plan after every window but the last from up to `history` windows, score on the next one."""
    _, num_layers, num_logical = counts.shape
    topology = Topology.regular(num_ranks=NUM_RANKS)
    current = Table.linear(
        model="trace",
        layer_ids=range(num_layers),
        num_logical=num_logical,
        rank_ids=topology.rank_ids,
        slots_per_rank=SLOTS_PER_RANK,
    )
    seen, worst, moved, cpu_s = [], [], [], 0.0
    for now in range(len(counts) - 1):
        problem = PlanningProblem(
            loads=counts[max(0, now + 1 - history) : now + 1],
            topology=topology,
            current=current,
            from_nothing=now == 0,
            effort=effort,
            time_limit_s=3600.0,
        )
        started = time.process_time()
        rows = planner(problem)
        cpu_s += time.process_time() - started
        after = replace(current, physical_to_logical=rows)
        if now > 0:
            moved.append(residency_moves(current, after, topology).experts / rows.size)
        current = after
        found = imbalance_of(counts[now + 1], current, topology)
        seen.append(found.mean)
        worst.append(found.worst)
    return Followed(mean=float(np.mean(seen)), worst=float(np.mean(worst)), moved=float(np.mean(moved)), cpu_s=cpu_s)


def policy_planner(name: str, max_imbalance: float | None = None) -> Planner:
    """One of our policies, its answer verified."""
    policy = load_policy(name)
    warm_up_policy(policy, name)

    def plan(problem: PlanningProblem) -> npt.NDArray[np.int32]:
        asked = replace(problem, max_imbalance=max_imbalance)
        return verify(asked, run_policy(policy, asked), policy=name, solve_s=0.0).placement.physical_to_logical

    return plan


def planners(peers: Peers) -> dict[str, tuple[Callable[[], Planner], int]]:
    """Who is compared, and how many windows each plans from."""
    ours: dict[str, tuple[Callable[[], Planner], int]] = {
        f"robust, {HISTORY} windows": (lambda: policy_planner("robust"), HISTORY),
        "robust, 4 windows": (lambda: policy_planner("robust"), 4),
        "minmove to 1.10, sum of 2 windows": (lambda: policy_planner("minmove", 1.10), 2),
        "greedy, last window": (lambda: policy_planner("greedy"), 1),
        "greedy, sum of 4 windows": (lambda: policy_planner("greedy"), 4),
    }
    return ours | {f"{name}, last window": (lambda planner=planner: planner, 1) for name, planner in peers.items()}


def trace_row(name: str) -> Row:
    """The row of the table of figures for one trace."""

    def measure(peers: Peers, seed: int) -> Measured:
        del seed
        counts = windows_of(name)
        came = follow(policy_planner("robust"), counts, HISTORY, effort=Effort.NORMAL)
        others = {peer: follow(planner, counts, 1) for peer, planner in peers.items()}
        best = min((other.mean for other in others.values()), default=PEER_MEANS[name])
        return Measured(
            ours=f"{came.mean:.4f} at {percent(came.moved)}, {came.cpu_s:.0f} s",
            least=came.mean <= best + LEAST_OVER_PEER and came.moved <= LEAST_MOVED,
            aim=came.mean < best and came.moved <= AIM_MOVED,
            peers="; ".join(f"{peer}: {other.mean:.4f} at {percent(other.moved)}" for peer, other in others.items()),
        )

    return Row(
        name=f"traces-{name}",
        what=f"recorded routing, {name}: re-planned every window, imbalance of the next at the share of slots moved",
        at_least=f"best peer + {LEAST_OVER_PEER} at {LEAST_MOVED:.0%}",
        aim=f"better at {AIM_MOVED:.0%}",
        measure=measure,
        published=f"vLLM 0.33: {PEER_MEANS[name]:.4f} at 77%",
    )


ROWS: tuple[Row, ...] = tuple(trace_row(name) for name in NAMES)

COLUMNS = ("planner", "mean, next window", "worst layer", "moved a window", "time")


def main() -> None:
    """Print a table for each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="folder of the recorded traces")
    parser.add_argument("--trace", choices=NAMES, action="append", help="only this trace (may be given again)")
    for engine in ("vllm", "sglang"):
        folder = os.environ.get(f"EPLB_PEER_{engine.upper()}")
        parser.add_argument(f"--peer-{engine}", type=Path, default=folder and Path(folder), metavar="DIR")
    options = parser.parse_args()
    peers: dict[str, Planner] = {}
    if options.peer_vllm:
        peers |= peer_vllm(options.peer_vllm)
    if options.peer_sglang:
        peers |= peer_sglang(options.peer_sglang)
    for name in options.trace or NAMES:
        rows = []
        for title, (make, history) in planners(peers).items():
            came = follow(make(), windows_of(name, options.traces), history, effort=Effort.NORMAL)
            rows.append((title, f"{came.mean:.4f}", f"{came.worst:.4f}", percent(came.moved), f"{came.cpu_s:.1f} s"))
        print_table(name, COLUMNS, rows, right=COLUMNS[1:])


if __name__ == "__main__":
    main()
