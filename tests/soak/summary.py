"""What a soak showed, as a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tests.integration.fault_fleet import Fault, Part
from tests.soak.soak import Outcome


def told(outcome: Outcome) -> str:
    """All of it."""
    return "\n".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    books, orders = outcome.books, outcome.orders
    yield ""
    yield f"{'faults':12}" + "".join(f"{fault:>8}" for fault in Fault) + f"{'all':>8}"
    for part in Part:
        counts = [outcome.struck[part, fault] for fault in Fault]
        yield f"{part:12}" + "".join(f"{count or '-':>8}" for count in counts) + f"{sum(counts):>8}"
    points = ", ".join(f"{point} {count}" for point, count in sorted(outcome.at_points.items()))
    yield f"at named places: {sum(outcome.at_points.values())} ({points}); {outcome.missed_points} not come to in time"
    yield ""
    yield _row("time", f"{outcome.seconds:.0f} s")
    yield _row("requests", f"{books.submitted}: {books.answered} answered, {books.failed} failed with their fleet")
    yield _row("hanging", f"{len(books.hanging)}; slowest answer {books.slowest_s:.1f} s")
    yield _row("tokens", f"{books.tokens} served, {outcome.tokens_checked} compared, {outcome.mismatches} differ")
    stalls = "; ".join(f"{during} hit: {seconds:.1f} s" for during, seconds in sorted(books.stalls_s.items()))
    pauses = f"; faults paused {outcome.pauses} times until serving went on" if outcome.pauses else ""
    yield _row("longest stall", (stalls or "-") + pauses)
    ends = ", ".join(f"{count} {end}" for end, count in sorted(orders.ends.items()))
    yield _row("generations", f"{sum(orders.ends.values())}: {ends}")
    for reason, count in orders.stop_reasons.most_common(8):
        yield _row("", f"{count} x {reason[:150]}")
    yield _row("orders", f"{orders.placed} taken, {orders.refused} refused; planner away at {orders.away} looks")
    restarts = ", ".join(f"{count} x {why}" for why, count in sorted(outcome.why_restarted.items())) or "none"
    took = f"; median {statistics.median(outcome.restart_s):.1f} s" if outcome.restart_s else ""
    yield _row("ranks restarted", f"{outcome.fleet_starts - 1} times ({restarts}){took}")
    yield _row("ranks joined", f"{outcome.joined} in place of lost ones")
    yield _row("parts restarted", ", ".join(f"{name} {count}" for name, count in outcome.part_restarts.items()))
    for growth in outcome.growths:
        yield _row(
            growth.name,
            f"{growth.memory_begin_mib:.0f} MiB {growth.memory_mib:+.1f} in {growth.minutes:.1f} min,"
            f" files {growth.files:+.0f}, threads {growth.threads:+.0f}",
        )
    yield _row("store", outcome.store_keys)
    yield _row("left behind", ", ".join(outcome.left) or "nothing")
    yield from (f"WRONG: {sentence}" for sentence in outcome.wrong)


def _row(name: str, value: str) -> str:
    return f"{name:16}{value}"
