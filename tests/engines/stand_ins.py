"""What the engines' modules import and a CPU lacks: our own stand-ins, made when they are asked for.

A name that no test needs is an empty class: it serves in annotations, and fails where it is used.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.cpu_device import Event, Stream


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of a package that are not in the folder of real ones. values: module → name → what it is."""

    def __init__(self, package: str, values: Mapping[str, Mapping[str, Any]]) -> None:
        self._package, self._values = package, values

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Any module of the package; asked last."""
        if name.split(".", maxsplit=1)[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Empty."""
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill it, and answer for any other name."""
        vars(module).update(self._values.get(module.__name__, {}))
        known = self._values.get(module.__name__, {})

        def missing(name: str) -> Any:
            if name.startswith("__") or known.get("__only__"):
                raise AttributeError(f"stand-in {module.__name__} has no {name}")
            found = type(name, (), {"__doc__": f"Stands in for {module.__name__}.{name}."})
            setattr(module, name, found)
            return found

        module.__getattr__ = missing  # type: ignore[method-assign]


def put_in_place(folder: Path, package: str, release: str, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Real modules from the folder, stand-ins for the rest, and a device that is the CPU."""
    sys.path.insert(0, str(folder))
    sys.meta_path.append(StandIns(package, values))
    vars(__import__(package))["__version__"] = release
    _device_of_cpu()


class EngineLogger(logging.Logger):
    """Engines' loggers say some things once."""

    def warning_once(self, message: str, *args: object) -> None:
        """As often as it is called."""
        self.warning(message, *args)

    def info_once(self, message: str, *args: object) -> None:
        """As often as it is called."""
        self.info(message, *args)

    debug_once = info_once


def init_logger(name: str) -> logging.Logger:
    """For `vllm.logger`."""
    logging.setLoggerClass(EngineLogger)
    try:
        return logging.getLogger(name)
    finally:
        logging.setLoggerClass(logging.Logger)


def _device_of_cpu() -> None:
    stream = Stream()
    torch_module: Any = torch
    torch_module.Event, torch_module.Stream = Event, Stream
    cuda, accelerator = torch_module.cuda, torch_module.accelerator
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream = accelerator.current_stream = lambda *_args, **_kwargs: stream
    cuda.stream = lambda *_args: contextlib.nullcontext()
    cuda.synchronize = accelerator.synchronize = lambda *_args: None
    cuda.set_device = accelerator.set_device_index = accelerator.set_stream = lambda *_args: None
    accelerator.current_accelerator = lambda *_args: torch.device("cpu")
    cuda.empty_cache = lambda: None
    torch_module.get_device_module = lambda *_args: types.SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None)
