"""weight_reads: a role reads from disk only what it owns."""

from __future__ import annotations

import functools
from collections.abc import Callable

from afd_shim import role
from afd_shim.engine import Patch, Target

__all__ = ["PATCH"]

ShouldSkip = Callable[[str, "set[int] | None"], bool]


def build(original: ShouldSkip) -> ShouldSkip:
    """Skip names of the other role before their tensor is read; vLLM's own rule still applies."""

    @functools.wraps(original)
    def should_skip_weight(weight_name: str, local_expert_ids: set[int] | None) -> bool:
        if original(weight_name, local_expert_ids):
            return True
        plan = role.current().plan
        return plan is not None and plan.skips(weight_name)

    return should_skip_weight


PATCH = Patch(
    name="weight_reads",
    target=Target("vllm.model_executor.model_loader.ep_weight_filter:should_skip_weight", kind="function"),
    strategy="replace",
    build=build,
    why="vLLM asks it for every checkpoint name before the tensor is read",
    upstream="vllm/model_executor/model_loader/ep_weight_filter.py, should_skip_weight, 0.30.0-0.33.0",
    releases=("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    until="vLLM lets a model loader filter names before it reads",
    relies_on=(
        Target("vllm.model_executor.model_loader.weight_utils:safetensors_weights_iterator", kind="function"),
        Target("vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights", kind="method"),
    ),
)
