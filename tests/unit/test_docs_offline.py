"""docs/offline.md against the commands: each does what the page shows, on the recordings that the page makes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.planning_page import blocks_of, commands_of, make_files
from eplb_service.cli.root import run

PAGE = Path(__file__).parents[2] / "docs" / "offline.md"


@pytest.mark.process
def test_every_command_of_the_offline_page_does_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Searches are left out (policy greedy): what they find is not this page's subject, and takes seconds."""
    monkeypatch.chdir(tmp_path)
    wrong, ran = [], 0
    for block in blocks_of(PAGE.read_text()):
        if make_files(block, tmp_path) or not commands_of(block):
            continue
        shown = re.split(r"^\$ .*\n", block.content, flags=re.MULTILINE)[1:]
        for command, output in zip(commands_of(block), shown, strict=True):
            is_plan = command.startswith("eplb plan")
            words = shlex.split(command)[1:] + (["--policy", "greedy"] if is_plan else [])
            code = run(words)
            said = capsys.readouterr()
            ran += 1
            text = " ".join((said.out + said.err).split())
            if not is_plan and text != " ".join(output.split()):
                wrong.append(f"{command}:\n{said.out}{said.err}")
            if (code != 0) != output.startswith("eplb: "):
                wrong.append(f"{command}: exit code {code}, {said.err}")
    assert wrong == []
    assert ran >= 15
