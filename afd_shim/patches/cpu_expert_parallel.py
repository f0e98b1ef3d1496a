"""cpu_expert_parallel: on CPU, an FFN rank computes its own experts only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from afd_shim.engine import Patch, Target

if TYPE_CHECKING:
    import torch

__all__ = ["PATCH"]

Apply = Callable[..., None]


def build(original: Apply) -> Apply:
    """Number the chosen experts as this rank does before vLLM's kernel runs; those of other ranks weigh nothing."""
    from afd_shim.errors import LayerError
    from afd_shim.ffn.cpu_reference import own_experts

    @functools.wraps(original)
    def apply(
        self: object,
        *,
        w1: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **kwargs: Any,  # noqa: ANN401 - passed on
    ) -> None:
        if expert_map is not None:
            if apply_router_weight_on_input:
                raise LayerError(
                    "this model weighs the experts' input, and vLLM's CPU kernel then ignores the weights by which "
                    "expert parallelism tells the experts of other ranks; leave --enable-expert-parallel out on CPU."
                )
            topk_ids, topk_weights = own_experts(topk_ids, topk_weights, expert_map, w1.shape[0])
        original(
            self,
            w1=w1,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
            **kwargs,
        )

    return apply


_FUSED_MOE = "vllm.model_executor.layers.fused_moe"

PATCH = Patch(
    name="cpu_expert_parallel",
    target=Target(f"{_FUSED_MOE}.experts.cpu_moe:CPUUnquantizedExperts.apply", kind="method"),
    strategy="replace",
    build=build,
    why="vLLM's CPU experts ignore expert_map: with expert parallelism they add the wrong experts' outputs",
    upstream="vllm/model_executor/layers/fused_moe/experts/cpu_moe.py, CPUUnquantizedExperts.apply, 0.30.0-0.32.0",
    releases=("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    until="vLLM's CPU experts honour expert_map",
    # The kernel is called by keyword.
    relies_on=(Target(f"{_FUSED_MOE}.modular_kernel:FusedMoEKernelModularImpl._fused_experts", kind="method"),),
)
