"""Draws the tables of states in `docs/protocol.md` from those of the code: `python -m tests.state_tables` puts them in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import get_args

from agent.hook import chunk_events
from agent.session import TRANSITIONS as OF_SESSION
from agent.session import RankState, Step
from eplb_service.rollout import open_chunk
from eplb_service.rollout.events import RolloutState
from eplb_service.rollout.transitions import TRANSITIONS as OF_ROLLOUT

PAGE = Path(__file__).parents[1] / "docs" / "protocol.md"
IN_A_CHUNK = (RolloutState.STAGING, RolloutState.ARMED, RolloutState.DISARMING)


def word(state: Enum) -> str:
    """A state as the tables spell it."""
    text = state.value if isinstance(state.value, str) else state.name.lower()
    return f"`{text}`"


def lines_of(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, ("---",) * len(columns), *rows))


def states_table(transitions: Mapping[Enum, Mapping[Enum, str]]) -> str:
    """A row for each way into a state: from which others, and when."""
    ways: dict[tuple[Enum, str], list[Enum]] = {}
    for state, following in transitions.items():
        for other, why in following.items():
            ways.setdefault((other, why), []).append(state)
    final = [state for state, following in transitions.items() if not following]
    rows = []
    for (other, why), states in ways.items():
        is_any = len(states) > 2 and len(states) == len(transitions) - len(final)
        before = f"any but {', '.join(map(word, final))}" if is_any else ", ".join(map(word, states))
        rows.append((before, word(other), why))
    return lines_of(("state", "may become", "when"), rows)


def steps_table() -> str:
    """A row for each step of a rank in the agent process, a column for each state that it is taken in."""
    rows = [
        (
            f"`{step.name.lower()}`",
            *(word(OF_SESSION[state, step]) if (state, step) in OF_SESSION else "–" for state in RankState),
        )
        for step in Step
    ]
    return lines_of(("step", *(f"from {word(state)}" for state in RankState)), rows)


def answers_table() -> str:
    """Which answer of a rank counts in which state of an open chunk."""
    counts = open_chunk._ON_ANSWER
    rows = [
        (f"`{answer.__name__}`", *("counts" if (answer, state) in counts else "–" for state in IN_A_CHUNK))
        for answer in get_args(open_chunk.ChunkAnswer)
    ]
    return lines_of(("answer", *(word(state) for state in IN_A_CHUNK)), rows)


def tables() -> Iterator[tuple[str, str]]:
    """Name and content of every table of the page."""
    yield "rollout", states_table(OF_ROLLOUT)  # type: ignore[arg-type]  # a mapping of one enum's states
    yield "answers", answers_table()
    yield "session", steps_table()
    yield "chunk", states_table(chunk_events.TRANSITIONS)  # type: ignore[arg-type]  # as above


def with_tables(text: str) -> str:
    """The page with its tables as the code has them. Raises ValueError when a mark is missing."""
    for name, table in tables():
        begin, end = f"<!-- states: {name} -->\n", f"\n<!-- end of states: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{PAGE.name} needs the marks {begin.strip()} and {end.strip()} once each")
        before, _, rest = text.partition(begin)
        text = before + begin + table + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
