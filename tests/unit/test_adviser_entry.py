"""Off means off: nothing of an engine is imported, and nothing of torch; and what is on needs nothing but torch and numpy."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POISON = """
import sys

class Poison:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {poisoned!r}:
            raise AssertionError(f"{{name}} was imported")

sys.meta_path.insert(0, Poison())
{then}
print("fine")
"""
ENGINES = ("vllm", "sglang")
NOT_IN_ENGINES = ("grpc", "google", "redis", "structlog", "click", "rich", "ortools", "numba", "prometheus_client")


def run(poisoned: tuple[str, ...], then: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EPLB_")} | variables
    program = POISON.format(poisoned=poisoned, then=then)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def test_switched_off_nothing_of_an_engine_and_nothing_of_torch_is_imported() -> None:
    then = "import agent.adviser.entry as entry\nentry.vllm()\nentry.sglang()"
    done = run((*ENGINES, "torch", "numpy", *NOT_IN_ENGINES), then)
    assert done.stdout == "fine\n", done.stderr


def test_switched_on_it_needs_what_engines_have() -> None:
    then = "import agent.adviser.vllm_plugin, agent.adviser.sglang_plugin"
    done = run((*ENGINES, *NOT_IN_ENGINES), then)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_in_a_process_without_the_engine_it_says_that_it_is_not_installed_and_does_not_raise(engine: str) -> None:
    """vLLM calls plug-ins without a net: one that raises takes a worker down."""
    then = f"import agent.adviser.entry as entry\nentry.{engine}()"
    done = run((), then, EPLB_ADVISER="/nowhere")
    assert done.stdout == "fine\n", done.stderr
    assert "adviser: NOT installed" in done.stderr


def test_entry_points_lead_to_functions() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, function in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        (target,) = points[group].values()
        module, _, name = target.partition(":")
        assert name == function
        assert callable(getattr(importlib.import_module(module), name))
