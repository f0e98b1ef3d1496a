"""guard: on a vLLM without a row in the compat matrix, AFD cannot be asked for by mistake."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from afd_shim.engine import Patch, Target

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

__all__ = ["PATCH"]

CreateEngineConfig = Callable[..., "VllmConfig"]


def build(original: CreateEngineConfig) -> CreateEngineConfig:
    """Refuse an `afd` configuration before vLLM does anything with it; pass everything else through."""

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:  # noqa: ANN401 - passed on
        asked: object = getattr(self, "additional_config", None)
        if isinstance(asked, Mapping) and "afd" in asked:
            from afd_shim.activation import refusal

            raise refusal()
        return original(self, *args, **kwargs)

    return create_engine_config


PATCH = Patch(
    name="guard",
    target=Target("vllm.engine.arg_utils:EngineArgs.create_engine_config", kind="method"),
    strategy="replace",
    build=build,
    why="on an unsupported vLLM an 'afd' configuration would be ignored and the model served unsplit",
    upstream="vllm/engine/arg_utils.py, EngineArgs.create_engine_config, any release",
    releases=("any",),
    until="never: it is for the releases that nobody has seen yet",
    stacks=True,
)
