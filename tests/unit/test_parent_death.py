"""A process ends with its parent, also when that died before the child could ask for it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from eplb_service.parent_death import die_with_parent

die_with_parent({parent})
print("goes on")
"""


def said(parent: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(parent=parent)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_child_of_a_living_parent_goes_on() -> None:
    assert said("os.getppid()") == "goes on"


def test_a_child_whose_parent_died_while_it_was_starting_ends_at_once() -> None:
    assert said("os.getppid() + 1") == ""
