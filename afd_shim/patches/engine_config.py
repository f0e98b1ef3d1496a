"""engine_config: the one symbol that always differs, vLLM's configuration factory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from afd_shim.engine import Patch, Target

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

__all__ = ["PATCH"]

CreateEngineConfig = Callable[..., "VllmConfig"]


def build(original: CreateEngineConfig) -> CreateEngineConfig:
    """Wrap the factory: where `afd` is configured, validate and turn the finished configuration into a role's."""

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:  # noqa: ANN401 - passed on
        if not self.additional_config:
            return original(self, *args, **kwargs)
        from afd_shim.config.apply import apply_role  # only with an additional_config
        from afd_shim.config.eplb import withhold_eplb

        withheld = withhold_eplb(self)
        config = original(withheld.arguments, *args, **kwargs)
        withheld.restore(config)
        apply_role(config)
        return config

    return create_engine_config


PATCH = Patch(
    name="engine_config",
    target=Target("vllm.engine.arg_utils:EngineArgs.create_engine_config", kind="method"),
    strategy="replace",
    build=build,
    why="reads the 'afd' configuration once vLLM's own is finished, before any worker starts",
    upstream="vllm/engine/arg_utils.py, EngineArgs.create_engine_config, 0.30.0-0.33.0",
    releases=("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    until="vLLM gives plugins a hook on the finished VllmConfig",
    stacks=True,
)
