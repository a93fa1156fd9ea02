"""Makes the committed code in `eplb_service/pb/` from the .proto files; `--check` fails when it is stale.

    python proto/generate.py [--check]

It needs grpcio-tools 1.71.2 (what newer ones emit is refused by protobuf 5.29; this one's output loads from there through
6.33), which wants an older protobuf than the planner's: so it runs in an environment of its own, made on first use.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "eplb_service" / "pb"
TOOLS = "grpcio-tools==1.71.2"
ENVIRONMENT = Path(os.environ.get("EPLB_PROTO_ENV", ROOT / ".venv" / "proto-tools"))


def tools_python() -> Path:
    """Interpreter of the tools' own environment, made on first use."""
    python = ENVIRONMENT / "bin" / "python"
    probe = [str(python), "-c", "import grpc_tools.protoc"]
    if not python.exists() or subprocess.run(probe, capture_output=True, check=False).returncode:
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", TOOLS, "setuptools<80"], check=True)
    return python


def generate(target: Path) -> dict[str, str]:
    """Generated files by path below `eplb_service/pb/`, imports rewritten to that package."""
    sources = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    command = [str(tools_python()), "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto")]
    command += [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, *sources], check=True)
    files = {}
    for path in sorted(target.rglob("*.py*")):
        text = path.read_text()
        if path.name.endswith("_grpc.py") and "Servicer" not in text:
            continue
        text = re.sub(r"^from eplb\.(\w+) import", r"from eplb_service.pb.\1 import", text, flags=re.MULTILINE)
        files[str(path.relative_to(target / "eplb"))] = text
    return files


def main() -> int:
    """Write, or compare with what is committed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when the committed code is stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        files = generate(Path(folder))
    stale = []
    for name, text in files.items():
        path = TARGET / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if check and stale:
        print(f"generated protocol code is stale: {', '.join(stale)}; run `make proto`", file=sys.stderr)
        return 1
    print(f"{len(files)} generated files, {len(stale)} {'stale' if check else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
