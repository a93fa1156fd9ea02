"""Everything that only a device can show, in one run of a few minutes: `python -m benchmarks.gpu [--out DIR]`.

Several ranks with real hooks share one device. Shown are

- that slots and outputs are right under load: experts read out of one another's memory (CUDA IPC) and sent over gloo, graphs
  that were captured before any flip replayed after it, and staging poisoned before and after each use;
- copy rates against that of one plain copy on the device, and how long the flip of a chunk holds up the compute stream;
- how much longer a decode-like step takes while experts are copied, at several throttles.

`--device cpu` runs the same code at small sizes. It shows that the code runs and that what is moved is right, and nothing of
streams, rates, stalls or graphs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.device_fleet import STEPS_AT_ONCE, DeviceFleet, rotated, rows_of
from benchmarks.device_rank import Sizes
from benchmarks.report import machine, markdown_table
from eplb_service.control import NO_THROTTLE, Throttle
from eplb_service.ids import RankId

GPU = Sizes(ranks=3, layers=2, experts=24, slots=12, hidden=7168, inner=1024, batch=32, repeats=16, staged=9)
"""Experts of 44 MB, as DeepSeek-V3's in fp8; nine of them are a chunk of 396 MB."""
CPU = Sizes(ranks=3, layers=2, experts=8, slots=4, hidden=32, inner=16, batch=2, repeats=1, staged=3)

COPY_RATE_MIN, SLOWER_MAX, STALL_MAX_S = 0.8, 0.02, 0.001
THROTTLES = {
    "none (the default)": NO_THROTTLE,
    "half of the time": Throttle(bytes_per_s=0.0, time_share=0.5),
    "a tenth of the time": Throttle(bytes_per_s=0.0, time_share=0.1),
    "2 GB/s": Throttle(bytes_per_s=2e9, time_share=1.0),
}
CPU_SHOWS_NOT = (
    "This ran on a CPU: it shows that the same code runs and moves the right bytes. It shows nothing of streams, graphs,"
    " priorities, copy rates, stalls or interference; aims are not judged."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row. passed: None = there is no aim, or none that this device can show."""

    what: str
    value: str
    aim: str = ""
    passed: bool | None = None


@dataclass(slots=True)
class Findings:
    """All rows, printed as they come; numbers: the same for programs."""

    judged: bool
    rows: list[Finding] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, value: str, *, aim: str = "", passed: bool | None = None, always: bool = False) -> None:
        """always: the aim holds on any device."""
        row = Finding(what=what, value=value, aim=aim, passed=passed if self.judged or always else None)
        self.rows.append(row)
        print(f"{what}: {value}{f' (aim: {aim})' if aim else ''}{_mark(row.passed)}", flush=True)

    @property
    def failed(self) -> list[Finding]:
        """Rows that miss their aim."""
        return [row for row in self.rows if row.passed is False]


def _mark(passed: bool | None) -> str:  # noqa: FBT001  # a value that is shown
    return "" if passed is None else (" ok" if passed else " MISSED")


# ── what is looked at ────────────────────────────────────────────────────────────────────────────────────────────────────


def correctness(fleet: DeviceFleet, findings: Findings, *, generations: int, way: str) -> None:
    """Rows at random, carried while ranks step; staging is poisoned whenever it is free."""
    random = np.random.default_rng(1)
    wrong: list[str] = []
    moved = poisoned = 0
    for number in range(generations):
        poisoned += sum(fleet.ask("poison"))
        layer = fleet.sizes.layer_refs[number % fleet.sizes.layers]
        staged, _ = fleet.roll_out(layer, rows_of(fleet.sizes, random))
        moved += sum(one.received.same_rank + one.received.same_node + one.received.cross_node for one in staged.values())
        poisoned += sum(fleet.ask("poison"))
        for rank, found in enumerate(fleet.ask("check", fleet.rows)):
            wrong += [f"rank {rank}, generation {number + 1}: {text}" for text in found]
    for text in wrong[:10]:
        print(f"  {text}", flush=True)
    findings.add(
        f"{way}: slots, tables and replayed steps that are wrong",
        f"{len(wrong)} in {generations} generations of {moved / 1e6:.1f} MB, {poisoned / 1e6:.1f} MB poisoned",
        aim="0",
        passed=not wrong,
        always=True,
    )
    findings.numbers[f"wrong, {way}"] = len(wrong)


def rates(fleet: DeviceFleet, findings: Findings, *, rounds: int) -> float:
    """Returns bytes a second of one plain copy."""
    found = fleet.ask_one(0, "rates", fleet.sizes.staged, rounds)
    plain: float = found["plain copy"]
    findings.add("one plain copy on the device", f"{plain / 1e9:.1f} GB/s")
    for name, what in (("pack", "slots to staging"), ("unpack", "staging to slots, as a flip does")):
        share = found[name] / plain
        aim = f"at least {COPY_RATE_MIN:.0%} of a plain copy"
        findings.add(what, f"{found[name] / 1e9:.1f} GB/s, {share:.0%}", aim=aim, passed=share >= COPY_RATE_MIN)
    findings.add("checksums", f"{found['checksum'] / 1e9:.1f} GB/s")
    findings.numbers.update({f"{name}, bytes/s": rate for name, rate in found.items()})
    return plain


def stalls(fleet: DeviceFleet, findings: Findings, plain: float, *, flips: int) -> None:
    """Flips of one chunk's size on one rank, which has the device to itself: the others run no passes and are sent nothing."""
    sizes = fleet.sizes
    layer = sizes.layer_refs[0]
    fleet.roll_out(layer, sizes.row)
    per_flip, copied = [], []
    for _ in range(flips):
        row = rotated(fleet.rows[layer.layer_id], sizes.staged)
        staged, flipped = fleet.roll_out(layer, row, worker=0)
        per_flip.append(flipped[RankId(0)].stall_s)
        copied.append(staged[RankId(0)].received.same_rank / staged[RankId(0)].seconds)
    stall_s, size = statistics.median(per_flip), sizes.staged * sizes.expert_bytes
    possible_s = size / plain
    findings.add(
        f"flip of {size / 1e6:.0f} MB holds up the compute stream",
        f"{stall_s * 1e3:.3f} ms, longest {max(per_flip) * 1e3:.3f} ms; a plain copy of it takes {possible_s * 1e3:.3f} ms",
        aim=f"under {STALL_MAX_S * 1e3:g} ms",
        passed=stall_s < STALL_MAX_S,
    )
    findings.add("staging within the rank, checksums included", f"{max(copied) / 1e9:.2f} GB/s")
    findings.numbers.update({"flip stall, s": stall_s, "flip bytes": float(size), "staging, bytes/s": max(copied)})


def interference(fleet: DeviceFleet, findings: Findings, *, seconds: float, throttles: int, way: str) -> None:
    """Steps of one rank without copies, and while it takes a whole layer from its neighbour again and again."""
    sizes = fleet.sizes
    layer = sizes.layer_refs[0]
    fleet.roll_out(layer, sizes.row)
    neighbours = (*sizes.row[sizes.slots : 2 * sizes.slots], *sizes.row[sizes.slots :])
    fleet.steps(2 * STEPS_AT_ONCE, worker=0)
    for name, throttle in list(THROTTLES.items())[:throttles]:
        free = _steps_for(fleet, seconds / 2, lambda: None)
        chunk = fleet.stage(layer, neighbours, throttle=throttle)
        began, copied = time.monotonic(), 0

        def again(throttle: Throttle = throttle) -> None:
            nonlocal chunk, copied
            if fleet.is_staged(chunk):
                fleet.withdraw(chunk)
                copied += 1
                chunk = fleet.stage(layer, neighbours, throttle=throttle)

        busy = _steps_for(fleet, seconds, again)
        while not fleet.is_staged(chunk):
            fleet.steps(worker=0)
        rate = (copied + 1) * sizes.slots * sizes.expert_bytes / (time.monotonic() - began)
        fleet.withdraw(chunk)
        slower = busy / free - 1
        is_default = throttle == NO_THROTTLE
        findings.add(
            f"{way}: a step of {free * 1e3:.2f} ms while experts are copied, throttle {name}",
            f"{slower:+.1%} at {rate / 1e9:.2f} GB/s into a rank",
            aim=f"under {SLOWER_MAX:.0%} slower" if is_default else "",
            passed=slower < SLOWER_MAX if is_default else None,
        )
        findings.numbers[f"slower, {way}, {name}"] = slower


def _steps_for(fleet: DeviceFleet, seconds: float, between: Callable[[], None]) -> float:
    """Seconds of a step of the working rank: the median of what a few in a row took."""
    taken: list[float] = []
    until = time.monotonic() + seconds
    while not taken or time.monotonic() < until:
        taken.append(fleet.steps(worker=0))
        between()
    return statistics.median(taken)


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(device: str, findings: Findings, *, quick: bool) -> None:
    """All parts, one fleet for each way that experts take."""
    sizes = GPU if device == "cuda" else CPU
    for way, same_node in (("read from memory", "read"), ("sent over gloo", "send")):
        fleet = DeviceFleet(sizes, device, same_node)
        try:
            reads = [status[2] for status in fleet.ask("status")]
            is_read = all(len(ranks) == sizes.ranks - 1 for ranks in reads)
            findings.add(
                f"{way}: ranks that read the memory of all others",
                str(is_read),
                passed=is_read == (same_node == "read"),
                aim=str(same_node == "read"),
                always=True,
            )
            correctness(fleet, findings, generations=2 if quick else 8, way=way)
            if same_node == "read":
                plain = rates(fleet, findings, rounds=2 if quick else 20)
                stalls(fleet, findings, plain, flips=2 if quick else 15)
            interference(fleet, findings, seconds=0.05 if quick else 6.0, throttles=2 if quick else len(THROTTLES), way=way)
        finally:
            fleet.close()


def device_name(device: str) -> str:
    """The card, or the processor."""
    if device == "cpu":
        return machine()
    properties = torch.cuda.get_device_properties(0)
    driver = f"CUDA {torch.version.cuda}, torch {torch.__version__}"
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {driver}; {machine()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 when something missed its aim."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same code at small sizes")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md")
    parser.add_argument("--quick", action="store_true", help="few rounds: a try of the script, not a measurement")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu tries the script at small sizes", file=sys.stderr)
        return 2
    name, began = device_name(given.device), time.monotonic()
    print(f"# {name}", flush=True)
    findings = Findings(judged=given.device == "cuda" and not given.quick)
    run(given.device, findings, quick=given.quick)
    took_s = time.monotonic() - began
    table = markdown_table(
        ("what", "found", "aim", ""), [(row.what, row.value, row.aim, _mark(row.passed).strip()) for row in findings.rows]
    )
    note = CPU_SHOWS_NOT if given.device == "cpu" else ""
    print(f"\n{table}\n\n{note}\n{took_s:.0f} s; {len(findings.failed)} missed".strip(), flush=True)
    if shutil.which("compute-sanitizer") is None and given.device == "cuda":
        print("compute-sanitizer is not on this machine; poisoned staging stands for it")
    if given.out is not None:
        _write(given.out, name, findings, table, note, took_s)
    return 1 if findings.failed else 0


def _write(folder: Path, name: str, findings: Findings, table: str, note: str, took_s: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tree: dict[str, Any] = {
        "device": name,
        "note": note,
        "seconds": round(took_s, 1),
        "rows": [asdict(row) for row in findings.rows],
        "numbers": findings.numbers,
    }
    (folder / "gpu.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    (folder / "gpu.md").write_text(f"{name}\n\n{table}\n\n{note}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
