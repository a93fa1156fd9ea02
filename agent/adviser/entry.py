"""What engines load by name (entry points `vllm.general_plugins` and `sglang.srt.plugins`).

Inert until EPLB_ADVISER is set: nothing of an engine, and nothing of torch, is imported before. Engines may call it more than
once in a process, and one that raises takes vLLM down: whatever is wrong is said, and the engine keeps its own policy.
"""

from __future__ import annotations

import logging
import os

SWITCH = "EPLB_ADVISER"


def vllm() -> None:
    """Install the adviser in this vLLM process, if it is switched on."""
    if os.environ.get(SWITCH):
        logger = logging.getLogger("vllm.eplb_adviser")  # vLLM shows what its own loggers say
        try:
            from agent.adviser.vllm_plugin import install  # noqa: PLC0415  (nothing is imported while it is off)

            install(os.environ, logger)
        except Exception:
            logger.exception("adviser: NOT installed; vLLM keeps its own policy")


def sglang() -> None:
    """Install the adviser in this SGLang process, if it is switched on."""
    if os.environ.get(SWITCH):
        logger = logging.getLogger("sglang.eplb_adviser")
        try:
            from agent.adviser.sglang_plugin import install  # noqa: PLC0415  (nothing is imported while it is off)

            install(os.environ, logger)
        except Exception:
            logger.exception("adviser: NOT installed; SGLang keeps its own algorithm")
