"""Routed experts that own nothing: the Attention role's stand-in for vLLM's `RoutedExperts`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from afd_shim.errors import LayerError

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

__all__ = ["AFDRemoteMoEMethod", "AFDRemoteRoutedExperts"]


class AFDRemoteMoEMethod(FusedMoEMethodBase):
    """A fused-MoE method that allocates no weight and runs no kernel.

    Upstream: `vllm/model_executor/layers/fused_moe/fused_moe_method_base.py`, `FusedMoEMethodBase`
    (0.30.0-0.33.0). `apply` stays vLLM's, which raises: nothing may compute experts here.
    """

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        """Create nothing: the weights live on the FFN ranks."""

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig | None:
        """No weights, hence no quantisation to describe."""
        return None

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: object
    ) -> tuple[int, int]:
        """Keep the sizes: padding for kernels is the FFN's business, not the wire's."""
        return hidden_size, intermediate_size_per_partition


class AFDRemoteRoutedExperts(RoutedExperts):
    """Routed experts without parameters; the experts themselves are on the FFN ranks.

    Upstream: `vllm/model_executor/layers/fused_moe/routed_experts.py`, `RoutedExperts`
    (0.30.0-0.33.0), whose constructor is kept as it is in each release.
    """

    def _get_quant_method(
        self, prefix: str, quant_config: QuantizationConfig | None, moe_config: FusedMoEConfig
    ) -> FusedMoEMethodBase:
        return AFDRemoteMoEMethod(moe_config)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        """Refuse expert tensors.

        Raises:
            LayerError: for the first tensor given: success would hide an unfiltered checkpoint.

        """
        for name, _ in weights:
            raise LayerError(
                f"expert tensor {self.layer_name}.{name} was given to the Attention role, which owns no experts. "
                "Report this with the model's name: its checkpoint names were attributed wrongly."
            )
        return set()
