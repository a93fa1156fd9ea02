"""The planning engine's figures: what it reaches, beside engines' own planners on the same input.

    python -m benchmarks.planner [--row NAME] [--table figures|seeds|sizes|planners|together] [--peer-vllm DIR]
                                 [--peer-sglang DIR] [--jobs 2] [--write docs/benchmarks.md]

A peer is the folder of an unzipped wheel (`pip download --no-deps sglang==0.5.23`, then unzip), kept outside this repository;
EPLB_PEER_VLLM and EPLB_PEER_SGLANG name them too. Time is processor time of this process, in seconds of one core, after a
warm-up; peers get float32 torch tensors.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks import rows_balance, rows_gate, rows_moves, rows_together, traces
from benchmarks.measuring import Measured, NotBuiltError, Peers, Row, proposal_of, score, scored_peer
from benchmarks.peers import Planner, peer_sglang, peer_vllm
from benchmarks.report import machine, markdown_table, written_between_marks
from benchmarks.rows_sizes import CASES, COLUMNS, size_row
from benchmarks.standard import problem_of, standard_load
from eplb_service.cli.output import print_table
from eplb_service.errors import EplbError
from eplb_service.policy.registry import policy_names

ROWS: tuple[Row, ...] = (*rows_moves.ROWS, *rows_gate.ROWS, *rows_balance.ROWS, *traces.ROWS)
SEEDS = (1, 2, 3, 4)
FIGURES = ("figure", "peers", "at least", "aim", "measured", "at least met", "aim met")
PLANNERS = ("planner", "mean over layers", "worst layer", "experts moved", "slots rewritten", "doubled", "time")
Table = tuple[Sequence[str], list[tuple[str, ...]]]


def verdict(*, met: bool | None) -> str:
    """Met or not, in a word."""
    return "-" if met is None else "yes" if met else "**no**"


def measured(row: Row, peers: Peers, seed: int) -> Measured:
    """What a row came to; one that this build cannot measure says so."""
    try:
        return row.measure(peers, seed)
    except NotBuiltError as error:
        return Measured(ours=f"not measured: {error}", least=None, aim=None)
    except EplbError as error:
        return Measured(ours=f"refused: {error}", least=False, aim=False)


def figures(peers: Peers, names: Sequence[str]) -> Table:
    """The figures to reach, on the standard work."""
    rows: list[tuple[str, ...]] = []
    for row in ROWS:
        if names and row.name not in names:
            continue
        told(row.name)
        came = measured(row, peers, 0)
        published = "" if row.published.split(" ")[0] in came.peers else row.published  # measured here, in this very run
        others = "; ".join(part for part in (came.peers, published) if part)
        rows.append((row.what, others or "-", row.at_least, row.aim, came.ours, verdict(met=came.least), verdict(met=came.aim)))
    return FIGURES, rows


def seeds(names: Sequence[str]) -> Table:
    """The same for other seeds of the load."""
    rows: list[tuple[str, ...]] = []
    for row in ROWS:
        if not row.seeded or (names and row.name not in names):
            continue
        cells = []
        for seed in SEEDS:
            told(f"{row.name}, seed {seed}")
            came = measured(row, {}, seed)
            cells.append(came.ours + ("" if came.least is not False else " **(not met)**"))
        rows.append((row.what, row.at_least, *cells))
    return ("figure", "at least", *(f"seed {seed}" for seed in SEEDS)), rows


def sizes() -> Table:
    """Other sizes and skews."""
    rows: list[tuple[str, ...]] = []
    for case in CASES:
        told(f"{case.title}, {case.layers} x {case.experts} on {case.ranks} x {case.slots}")
        try:
            rows.append(size_row(case))
        except NotBuiltError as error:
            rows.append((case.title, f"{case.layers} x {case.experts}", f"{case.ranks} x {case.slots}", *[str(error)] * 6))
    return COLUMNS, rows


def planners(peers: Peers) -> Table:
    """Full plans of every planner on the standard work."""
    problem = problem_of(standard_load())
    rows: list[tuple[str, ...]] = []
    start = score(problem, problem.current.physical_to_logical)
    rows.append(("as it is", f"{start.imbalance.mean:.4f}", f"{start.imbalance.worst:.4f}", "0", "0", "0", "-"))
    ours = [name for name in ("greedy", "minmove") if name in policy_names()]
    for name in [*ours, *peers]:
        told(f"planner {name}")
        if name in peers:
            scored = scored_peer(peers[name], problem)
        else:
            proposal, cpu_s = proposal_of(name, problem)
            scored = score(problem, proposal.placement.physical_to_logical, cpu_s)
        rows.append(
            (
                name,
                f"{scored.imbalance.mean:.4f}",
                f"{scored.imbalance.worst:.4f}",
                f"{scored.moves.experts:,}",
                f"{scored.moves.slots_rewritten:,}",
                str(scored.doubled),
                f"{scored.cpu_s * 1000:.0f} ms",
            )
        )
    return PLANNERS, rows


def together() -> Table:
    """Nodes that a token visits, on recorded routing."""
    told("experts chosen together, on recorded routing")
    columns = rows_together.COLUMNS
    try:
        return columns, rows_together.together_rows()
    except NotBuiltError as error:
        return columns, [(f"not measured: {error}", *[""] * (len(columns) - 1))]


def told(what: str) -> None:
    """Progress, for whoever waits."""
    print(f"… {what}", file=sys.stderr, flush=True)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ("figures", "seeds", "sizes", "planners", "together")
    parser.add_argument("--table", action="append", choices=tables, help="only this table (repeat for more; default all)")
    parser.add_argument("--row", action="append", default=[], choices=[row.name for row in ROWS], help="only this row")
    for engine in ("sglang", "vllm"):
        variable = f"EPLB_PEER_{engine.upper()}"
        text = f"folder of an unzipped {engine} wheel (or {variable})"
        parser.add_argument(f"--peer-{engine}", type=Path, metavar="DIR", default=os.environ.get(variable), help=text)
    parser.add_argument("--jobs", type=int, default=2, help="tables made side by side, a process each (default 2)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables between their marks in this page too")
    options = parser.parse_args(arguments)
    options.table = options.table or (["figures"] if options.row else list(tables))
    if options.write and options.row:
        parser.error("--write wants whole tables; leave --row out")
    return options


def peers_of(options: argparse.Namespace) -> dict[str, Planner]:
    """The engines' planners whose folders were given."""
    peers: dict[str, Planner] = {}
    if options.peer_vllm:
        peers |= peer_vllm(Path(options.peer_vllm))
    if options.peer_sglang:
        peers |= peer_sglang(Path(options.peer_sglang))
    return peers


def table_of(name: str, options: argparse.Namespace) -> tuple[Table, float]:
    """A table and the processor time that it took, in s. Runs in a process of its own when there are several."""
    started = time.process_time()
    peers = peers_of(options)
    makers: dict[str, Callable[[], Table]] = {
        "figures": lambda: figures(peers, options.row),
        "seeds": lambda: seeds(options.row),
        "sizes": sizes,
        "planners": lambda: planners(peers),
        "together": together,
    }
    return makers[name](), time.process_time() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables; with --write put them into a page."""
    options = options_of(arguments)
    if options.jobs == 1 or len(options.table) == 1:
        made = [table_of(name, options) for name in options.table]
    else:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            made = list(pool.map(table_of, options.table, [options] * len(options.table)))
    for name, ((columns, rows), cpu_s) in zip(options.table, made, strict=True):
        where = f"Measured on {machine()}; {cpu_s:.0f} s of one core."
        print_table(f"\n{name}", columns, rows)
        print(where)
        if options.write:
            written_between_marks(options.write, name, f"{where}\n\n{markdown_table(columns, rows)}")


if __name__ == "__main__":
    main()
