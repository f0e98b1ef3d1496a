"""decoder_layers: what a role does not own leaves right after each decoder layer is built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from afd_shim import role
from afd_shim.engine import Patch, Target

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PATCH"]

LayerFn = Callable[..., "nn.Module"]
MakeLayers = Callable[[int, LayerFn, str], "tuple[int, int, nn.ModuleList]"]


def build(original: MakeLayers) -> MakeLayers:
    """Build each layer on the device, then prune it, so that at most one is whole at a time."""
    import torch

    from afd_shim.moe.pruning import drop_ffn_parts, keep_ffn_parts

    @functools.wraps(original)
    def make_layers(num_hidden_layers: int, layer_fn: LayerFn, prefix: str) -> tuple[int, int, nn.ModuleList]:
        context = role.current()
        if context.building is role.Building.SKELETON:
            return original(num_hidden_layers, layer_fn, prefix)

        @functools.wraps(layer_fn)
        def pruned_layer(prefix: str) -> nn.Module:
            first = len(context.layers)
            with torch.device(context.device):
                layer = layer_fn(prefix=prefix)
            prune = drop_ffn_parts if context.config.is_attention else keep_ffn_parts
            prune(layer, context.layers[first:])
            return layer

        return original(num_hidden_layers, pruned_layer, prefix)

    return make_layers


PATCH = Patch(
    name="decoder_layers",
    target=Target("vllm.model_executor.models.utils:make_layers", kind="function"),
    strategy="replace",
    build=build,
    why="a role never holds more than one decoder layer's worth of what it does not own",
    upstream="vllm/model_executor/models/utils.py, make_layers, 0.30.0-0.33.0",
    releases=("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    until="vLLM builds models on the meta device and materialises what is loaded",
    after=("moe_factory",),
    relies_on=(Target("vllm.model_executor.models.utils:StageMissingLayer", kind="class"),),
)
