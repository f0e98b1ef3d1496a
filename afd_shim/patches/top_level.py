"""top_level: the same ownership rule for everything outside the decoder layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from afd_shim import role
from afd_shim.engine import Patch, Target

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

__all__ = ["PATCH"]

InitializeModel = Callable[..., "nn.Module"]


def build(original: InitializeModel) -> InitializeModel:
    """Build the FFN's model on the meta device but for its decoder layers; prune both roles' models."""
    import contextlib

    import torch

    from afd_shim.moe.pruning import drop_ffn_parts, forget_unreachable, keep_ffn_parts

    @functools.wraps(original)
    def initialize_model(vllm_config: VllmConfig, **kwargs: Any) -> nn.Module:  # noqa: ANN401 - passed on
        context = role.current()
        if context.building is role.Building.SKELETON:
            return original(vllm_config, **kwargs)
        attention = context.config.is_attention
        # Embeddings, head, final norm and vision towers are Attention's: the FFN allocates none of them.
        device = contextlib.nullcontext() if attention else torch.device("meta")
        with context.build(role.Building.ROLE) as layers, device:
            model = original(vllm_config, **kwargs)
        prune = drop_ffn_parts if attention else keep_ffn_parts
        prune(model, layers)
        for layer in layers:
            layer.release_foreign(attention=attention)
        forget_unreachable(model, vllm_config.compilation_config.static_forward_context)
        return model

    return initialize_model


PATCH = Patch(
    name="top_level",
    target=Target("vllm.model_executor.model_loader.utils:initialize_model", kind="function"),
    strategy="replace",
    build=build,
    why="a role holds nothing it does not own, vLLM's registrations included",
    upstream="vllm/model_executor/model_loader/utils.py, initialize_model, 0.30.0-0.33.0",
    releases=("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    until="vLLM builds models on the meta device and materialises what is loaded",
    after=("moe_factory", "decoder_layers"),
)
