"""moe_factory: MoE layers of a role, built by vLLM's own factory with our runner and experts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from afd_shim import role
from afd_shim.engine import Patch, Target

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

__all__ = ["PATCH"]

Factory = Callable[..., "MoERunner"]


def build(original: Factory) -> Factory:
    """Let the role of this process build each MoE layer; the arguments are the model's, by name."""
    from afd_shim.moe import factory

    signature = inspect.signature(original)  # Jamba passes its first four arguments by position

    @functools.wraps(original)
    def fused_moe_factory(*args: Any, **kwargs: Any) -> MoERunner:  # noqa: ANN401 - passed on
        context = role.current()
        call = signature.bind(*args, **kwargs).arguments
        if context.building is role.Building.SKELETON:
            return factory.record_native_layer(original, call, context)
        if context.config.is_attention:
            return factory.build_attention_moe_runner(original, call, context)
        return factory.build_ffn_moe_runner(original, call, context)

    return fused_moe_factory


_FUSED_MOE = "vllm.model_executor.layers.fused_moe"

PATCH = Patch(
    name="moe_factory",
    target=Target(f"{_FUSED_MOE}.layer:FusedMoEFactory", kind="function"),
    strategy="replace",
    build=build,
    why="injects the AFD MoE runner and the parameter-free experts (Attention), detaches the gate (FFN)",
    upstream="vllm/model_executor/layers/fused_moe/layer.py, FusedMoEFactory, 0.30.0-0.33.0",
    releases=("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    until="vLLM lets a plugin choose the default runner and routed experts",
    relies_on=(
        Target(f"{_FUSED_MOE}.runner.moe_runner:MoERunner.__init__", kind="method"),
        Target(f"{_FUSED_MOE}.runner.moe_runner:MoERunner.forward", kind="method"),
        Target(f"{_FUSED_MOE}.runner.moe_runner:MoERunner._forward_impl", kind="method"),
        Target(f"{_FUSED_MOE}.runner.moe_runner:MoERunner._select_forward", kind="method"),
        Target(f"{_FUSED_MOE}.runner.moe_runner:MoERunner._maybe_apply_routed_scale_to_output", kind="method"),
        Target(f"{_FUSED_MOE}.runner.moe_runner:MoERunner._maybe_reduce_final_output", kind="method"),
        Target(f"{_FUSED_MOE}.runner.shared_experts:SharedExperts.__init__", kind="method"),
        Target(f"{_FUSED_MOE}.routed_experts:RoutedExperts.__init__", kind="method"),
        Target(f"{_FUSED_MOE}.routed_experts:RoutedExperts._get_quant_method", kind="method"),
        Target(f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase", kind="class"),
    ),
)
