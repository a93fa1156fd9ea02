"""Makes a failing run smaller: as few incidents as still lead to the same failure, and as short a time of a faulty network."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.sim.faults import FAULTS_S
from tests.sim.run import Run
from tests.sim.world import ViolationError

RUNS_MAX = 60
TRACE_TAIL = 60


def failure_of(run: Run) -> ViolationError | None:
    """How a run fails; None when all holds."""
    try:
        run.go()
    except ViolationError as violation:
        return violation
    return None


def kind_of(violation: ViolationError) -> str:
    """A failure without its numbers: two runs that differ in these alone fail alike."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", str(violation))[:48]


def minimised(run: Run, violation: ViolationError) -> tuple[Run, ViolationError]:
    """The smallest run found that fails in the same way, within RUNS_MAX tries."""
    best, found, kind = run, violation, kind_of(violation)
    tries = 0
    progress = True
    while progress and tries < RUNS_MAX:
        progress = False
        for smaller in _smaller(best):
            tries += 1
            failure = failure_of(smaller)
            if failure is not None and kind_of(failure) == kind:
                best, found, progress = smaller, failure, True
                break
            if tries >= RUNS_MAX:
                break
    return best, found


def _smaller(run: Run) -> Iterator[Run]:
    """Runs that are one step smaller."""
    first_s, last_s = run.faulty_s
    if last_s > first_s:
        yield Run(run.seed, fixed=run.fixed, without=run.without, faulty_s=(0.0, 0.0))
    for incident in run.incidents:
        if incident.index not in run.without:
            yield Run(run.seed, fixed=run.fixed, without=run.without | {incident.index}, faulty_s=run.faulty_s)
    if last_s - first_s > 0.5:
        middle_s = round((first_s + last_s) / 2, 2)
        yield Run(run.seed, fixed=run.fixed, without=run.without, faulty_s=(first_s, middle_s))
        yield Run(run.seed, fixed=run.fixed, without=run.without, faulty_s=(middle_s, last_s))


def command_of(run: Run) -> str:
    """What replays a run."""
    words = ["python -m tests.sim", f"--seed {run.seed}"]
    if run.without:
        words.append(f"--without {','.join(map(str, sorted(run.without)))}")
    if run.faulty_s != (0.0, FAULTS_S):
        words.append(f"--faulty {run.faulty_s[0]:g}-{run.faulty_s[1]:g}")
    return " ".join(words)


def report_of(run: Run, violation: ViolationError) -> str:
    """What to print of a failure: the smallest run, its incidents, its last lines and how to replay both."""
    smallest, found = minimised(run, violation)
    incidents = [incident for incident in smallest.incidents if incident.index not in smallest.without]
    kept = [f"{incident.kind} at {incident.at_s:.2f} s" for incident in incidents]
    trace = smallest.world.trace
    before = [line for line in trace[:-TRACE_TAIL] if "──" in line]
    return "\n".join(
        [
            f"seed {run.seed}: {violation}",
            f"incidents: {', '.join(kept) or 'none'}; faulty network: {smallest.faulty_s[0]:g} to {smallest.faulty_s[1]:g} s",
            *before,
            *trace[-TRACE_TAIL:],
            f"at {smallest.world.now:.3f} s: {found}",
            f"replay: {command_of(smallest)}",
            f"as it was found: {command_of(run)}",
        ]
    )
