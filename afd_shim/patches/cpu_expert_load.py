"""cpu_expert_load: on CPU, the router maps logical to physical experts and records their load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from afd_shim.engine import Patch, Target

if TYPE_CHECKING:
    import torch

__all__ = ["PATCH"]

MapAndRecord = Callable[..., "torch.Tensor"]


def build(original: MapAndRecord) -> MapAndRecord:
    """Do in torch what vLLM's kernel does on a GPU; stock vLLM returns the logical ids on CPU."""
    from afd_shim.ffn.cpu_reference import count_physical_experts, physical_expert_ids

    @functools.wraps(original)
    def eplb_map_to_physical_and_record(
        topk_ids: torch.Tensor,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
        record_enabled: torch.Tensor,
        num_unpadded_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        physical = physical_expert_ids(topk_ids, logical_to_physical_map, logical_replica_count)
        if bool(record_enabled):
            rows = physical.shape[0] if num_unpadded_tokens is None else int(num_unpadded_tokens)
            count_physical_experts(physical, rows, expert_load_view)
        return physical

    return eplb_map_to_physical_and_record


_ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router"

PATCH = Patch(
    name="cpu_expert_load",
    target=Target(f"{_ROUTER}:eplb_map_to_physical_and_record", kind="function"),
    strategy="replace",
    build=build,
    why="vLLM's CPU router neither maps experts to their replicas nor records their load",
    upstream="vllm/model_executor/layers/fused_moe/router/base_router.py, eplb_map_to_physical_and_record, "
    "0.30.0-0.33.0",
    releases=("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    until="vLLM's CPU backend supports expert load balancing",
    relies_on=(
        Target(f"{_ROUTER}:BaseRouter._apply_eplb_mapping", kind="method"),
        Target(f"{_ROUTER}:BaseRouter._select_experts", kind="method"),
    ),
)
