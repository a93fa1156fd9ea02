"""Tables of Markdown, the page that they are written to, and what they were measured on."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from eplb_service.errors import InvalidInputError

START, END = "<!-- bench-planner: {name} -->", "<!-- end of {name} -->"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [list(columns), ["---"] * len(columns), *[[cell.replace("|", "\\|") for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def written_between_marks(page: Path, name: str, content: str) -> None:
    """Replace what stands between the two marks of a name in a page. Raises InvalidInputError when they are not there."""
    text = page.read_text(encoding="utf-8")
    start, end = START.format(name=name), END.format(name=name)
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise InvalidInputError(f"{page} must have the lines {start!r} and {end!r} once each, in this order")
    head, rest = text.split(start)
    _, tail = rest.split(end)
    page.write_text(f"{head}{start}\n{content}\n{end}{tail}", encoding="utf-8")


def machine() -> str:
    """Processor, cores, Python, day and commit of a measurement."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    cores = 0
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        cores = len(names)
        processor = names[0] if names else processor
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{processor}, {cores or '?'} cores, Python {platform.python_version()}; {day}, commit {_commit()}"


def _commit() -> str:
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()
