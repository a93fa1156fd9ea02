"""Runs the commands of docs/planning.md and puts in what they print, so that the page shows real output of this build.

    python -m benchmarks.planning_page [PAGE]

The `python` blocks make input files, `toml` blocks that start with `# NAME.toml` are files of that name, and in any
block the lines after `$ eplb …` are replaced by that command's output. Pictures go to docs/images.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "planning.md"
IMAGES = ROOT / "docs" / "images"
WIDTH = "110"
TIMEOUT_S = 300
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PICTURES = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page: its language and content, and where the content stands in the text."""

    language: str
    content: str
    start: int
    end: int


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for found in BLOCK.finditer(text):
        yield Block(found[1], found[2], found.start(2), found.end(2))


def commands_of(block: Block) -> list[str]:
    """Command lines of a block (without `$ `), continued lines joined."""
    joined = block.content.replace("\\\n", " ")
    return [" ".join(line[2:].split()) for line in joined.splitlines() if line.startswith("$ eplb ")]


def make_files(block: Block, folder: Path) -> bool:
    """Make what a `python` or `toml` block describes, in a folder. Returns whether the block was one of these."""
    if block.language == "python":
        subprocess.run([sys.executable, "-c", block.content], cwd=folder, check=True, timeout=TIMEOUT_S)
        return True
    named = re.match(r"# (\w+\.toml)\n", block.content) if block.language == "toml" else None
    if named is not None:
        (folder / named[1]).write_text(block.content, encoding="utf-8")
    return named is not None


def output_of(command: str, folder: Path) -> str:
    """What a command prints, on both streams, without the name of the folder."""
    words = [sys.executable, "-m", "eplb_service", *shlex.split(command)[1:]]
    environment = {**os.environ, "COLUMNS": WIDTH, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    said = ran.stdout + ran.stderr
    return "\n".join(line.rstrip() for line in said.strip().splitlines())


def with_outputs(text: str, folder: Path) -> str:
    """The page with every command's output put in."""
    parts, at = [], 0
    for block in blocks_of(text):
        if make_files(block, folder) or not commands_of(block):
            continue
        shown = re.split(r"^(?=\$ )", block.content, flags=re.MULTILINE)
        new = []
        for piece in shown:
            if not piece.startswith("$ eplb "):
                new.append(piece)
                continue
            lines = piece.splitlines()
            last = next(index for index, line in enumerate(lines) if not line.endswith("\\"))
            typed = "\n".join(lines[: last + 1])
            command = " ".join(typed.replace("\\\n", " ")[2:].split())
            print(f"… {command}", file=sys.stderr, flush=True)
            new.append(f"{typed}\n{output_of(command, folder)}\n\n")
        parts += [text[at : block.start], "".join(new).rstrip() + "\n"]
        at = block.end
    return "".join([*parts, text[at:]])


def main() -> None:
    """Refresh the page and its pictures."""
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    with tempfile.TemporaryDirectory(prefix="eplb-page-") as made:
        folder = Path(made)
        page.write_text(with_outputs(page.read_text(encoding="utf-8"), folder), encoding="utf-8")
        for picture in sorted(file for file in folder.iterdir() if file.suffix in PICTURES):
            shutil.copy(picture, IMAGES / picture.name)


if __name__ == "__main__":
    main()
