"""The `vllm.general_plugins` entry point: tiny on purpose (vLLM skips a plugin whose import fails)."""

from __future__ import annotations


def register() -> None:
    """Arm afd-shim in this process; vLLM calls it in every process it starts."""
