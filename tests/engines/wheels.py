"""Gets the load-balancing modules of engines' releases: from their wheels on the package index, without dependencies.

Only what is named here is kept, in a cache outside the tree; nothing of it is part of this project.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("EPLB_ENGINE_CACHE") or Path.home() / ".cache" / "eplb-service" / "engines")
PLATFORMS = (
    "manylinux_2_34_x86_64",
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
KEPT = {
    "vllm": ("vllm/distributed/eplb/", "vllm/plugins/__init__.py"),
    "sglang": ("sglang/srt/eplb/", "sglang/srt/plugins/"),
}
"""Members of each engine's wheel that are kept; everything else that they import is stood in for."""
WHEEL_BYTES = 600 << 20


class FetchError(Exception):
    """A release cannot be had; the sentence says why."""


def modules_of(engine: str, release: str) -> Path:
    """Folder to put on the module path. Fetches the release when it is not in the cache. Raises FetchError."""
    folder = CACHE / f"{engine}-{release}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(CACHE).free
    if free < 2 * WHEEL_BYTES:
        raise FetchError(
            f"{CACHE} has {free >> 20} MiB left; a wheel needs up to {WHEEL_BYTES >> 20} for a moment: set EPLB_ENGINE_CACHE"
        )
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        wheel = _download(engine, release, Path(temporary))
        kept = Path(temporary) / "kept"
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py") and name.startswith(KEPT[engine])]
            if not names:
                raise FetchError(f"{wheel.name} has none of {', '.join(KEPT[engine])}")
            archive.extractall(kept, names)
        kept.rename(folder)
    return folder


def _download(engine: str, release: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(into)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    done = subprocess.run(
        [*command, "--python-version", "3.11", f"{engine}=={release}"], capture_output=True, text=True, check=False
    )
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(f"pip download {engine}=={release} failed: {last}")
    return wheels[0]
