"""What the hook forces on an engine's environment: torch, numpy, the standard library and pure modules, nothing else."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = ("grpc", "google", "redis", "structlog", "click", "rich", "ortools", "prometheus_client", "numba", "safetensors")

PROGRAM = f"""
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is not in an engine's environment")

sys.meta_path.insert(0, Blocker())
import agent.hook, agent.transfer
for package in (agent.hook, agent.transfer):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{{package.__name__}}.{{module.name}}")
loaded = sorted(name for name in sys.modules if name.split(".")[0] in {BLOCKED!r})
assert not loaded, loaded
shell = ("pb", "rpc", "cli", "store")
pb = sorted(name for name in sys.modules if name.startswith("eplb_service.") and name.split(".")[1] in shell)
assert not pb, pb
try:
    import grpc
except ImportError:
    print("blocked")
"""


def test_hook_and_transfer_import_without_grpc_protobuf_and_the_service_s_shell() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "blocked"  # the blocker blocks
