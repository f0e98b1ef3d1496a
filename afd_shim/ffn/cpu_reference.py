"""What vLLM's CPU backend leaves out of expert parallelism, as torch code that is plainly a reference.

Correct first: it serves the tests and small machines. On GPUs vLLM's own kernels do all of this.
"""

from __future__ import annotations

import torch

__all__ = ["count_physical_experts", "own_experts", "physical_expert_ids"]

_NOBODY = -1
"""The physical expert of an id that no logical expert has."""

_KNUTH_MULTIPLIER = 2654435769  # floor(2**32 / phi): vLLM's choice of a replica by the token's place in the batch


def own_experts(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the chosen experts as this rank does, and give those of other ranks no weight.

    vLLM's CPU kernel (`cpu_fused_moe`) corrupts its memory for ids outside its own experts, -1
    included, so a choice that is another rank's runs one of ours, and counts nothing.

    Args:
        topk_ids: `[rows, top_k]`, global (physical) expert ids; negative ones are nobody's.
        topk_weights: `[rows, top_k]`.
        expert_map: `[global experts]`, the local number of each expert, -1 for those of other ranks.
        num_local_experts: experts of this rank.

    Returns:
        Ids and weights to run the kernel with, `[rows, top_k]`, in the dtypes of the arguments.

    """
    known = topk_ids.clamp(min=0).long()
    local = expert_map[known]
    ours = (local >= 0) & (topk_ids >= 0)
    spread = torch.where(ours, local, known % num_local_experts)
    return spread.to(topk_ids.dtype), torch.where(ours, topk_weights, 0.0).to(topk_weights.dtype)


def physical_expert_ids(
    topk_ids: torch.Tensor, logical_to_physical_map: torch.Tensor, logical_replica_count: torch.Tensor
) -> torch.Tensor:
    """Choose a replica of each logical expert, as vLLM's kernel does.

    Upstream: `vllm/model_executor/layers/fused_moe/router/base_router.py`,
    `_eplb_map_and_record_i32_kernel` (0.30.0-0.33.0). The choice depends on the row alone, so that
    every rank that sees the same rows makes the same one.

    Args:
        topk_ids: `[rows, top_k]`, logical expert ids; ids that no expert has become -1.
        logical_to_physical_map: `[logical experts, slots]`, -1 where there is no further replica.
        logical_replica_count: `[logical experts]`.

    Returns:
        `[rows, top_k]`, the dtype of `topk_ids`.

    """
    known = (topk_ids >= 0) & (topk_ids < logical_replica_count.shape[0])
    logical = torch.where(known, topk_ids, 0).long()
    row = torch.arange(topk_ids.shape[0], dtype=torch.int64, device=topk_ids.device).unsqueeze(-1)
    replica = ((row * _KNUTH_MULTIPLIER) & 0xFFFFFFFF) % logical_replica_count.clamp(min=1)[logical]
    physical = logical_to_physical_map[logical, replica]
    return torch.where(known, physical, _NOBODY).to(topk_ids.dtype)


def count_physical_experts(physical_ids: torch.Tensor, real_rows: int, expert_load: torch.Tensor) -> None:
    """Add the experts chosen by the first `real_rows` rows to `expert_load`, in place.

    Args:
        physical_ids: `[rows, top_k]`; ids that no physical expert has are not counted.
        real_rows: rows of real tokens; the others are padding and placeholders.
        expert_load: `[physical experts]`, int32, or a longer buffer that starts with them.

    """
    chosen = physical_ids[:real_rows].flatten().long()
    chosen = chosen[(chosen >= 0) & (chosen < expert_load.shape[0])]
    expert_load += torch.bincount(chosen, minlength=expert_load.shape[0]).to(expert_load.dtype)
