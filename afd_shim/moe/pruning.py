"""Take out of a model what a role does not own, right after it was built."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from vllm.model_executor.models.utils import StageMissingLayer

from afd_shim.moe.layers import MoELayer, storage_key

__all__ = ["drop_ffn_parts", "forget_unreachable", "keep_ffn_parts"]


def drop_ffn_parts(root: nn.Module, layers: Collection[MoELayer]) -> None:
    """Attention: replace the modules the FFN owns below `root`, and drop its single parameters.

    What stands in their place is vLLM's `StageMissingLayer`: it raises when called, where an
    identity would pass its input through in silence.
    """
    # Parts of a module may stand elsewhere too: Qwen3-Next registers the shared expert's gate twice.
    modules = {
        id(part)
        for layer in layers
        for module in layer.ffn_modules
        for part in module.modules()
        if any(True for _ in part.parameters())
    }
    storages = {storage_key(tensor) for layer in layers for tensor in layer.ffn_tensors}
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in modules:
                _replace(parent, name, child, "ffn")
        for name, parameter in list(parent.named_parameters(recurse=False)):
            if storage_key(parameter) in storages:
                parent.register_parameter(name, None)


def keep_ffn_parts(root: nn.Module, layers: Collection[MoELayer]) -> None:
    """FFN: keep the MoE runners and their modules below `root`, replace everything else.

    Decoder layers themselves stay: models assert their type. A parameter that stays while the module
    around it goes (a score-correction bias on a gate that Attention owns) keeps its name in a bare
    holder, so that vLLM post-processes no half module.
    """
    kept = {id(part) for layer in layers for module in layer.owned_by_ffn() for part in module.modules()}
    storages = {storage_key(tensor) for layer in layers for tensor in layer.ffn_tensors}
    _keep(root, kept, storages)


def forget_unreachable(root: nn.Module, static_forward_context: dict[str, object]) -> None:
    """Drop vLLM's registrations of modules that are no longer part of the model.

    Upstream: `CompilationConfig.static_forward_context` (`vllm/config/compilation.py`), which
    otherwise keeps them and their weights alive and makes them ask for a KV cache.
    """
    alive = {id(module) for module in root.modules()}
    for name, module in list(static_forward_context.items()):
        if id(module) not in alive:
            del static_forward_context[name]


def _keep(parent: nn.Module, kept: Collection[int], storages: Collection[int]) -> None:
    for name, child in list(parent.named_children()):
        if id(child) in kept:
            continue
        if any(id(module) in kept for module in child.modules()) or isinstance(parent, nn.ModuleList):
            _keep(child, kept, storages)
        elif any(storage_key(parameter) in storages for parameter in child.parameters()):
            setattr(parent, name, _holder(child, storages))
            _discard(child)
        else:
            _replace(parent, name, child, "attention")
    for name, parameter in list(parent.named_parameters(recurse=False)):
        if storage_key(parameter) not in storages:
            parent.register_parameter(name, None)


def _holder(module: nn.Module, storages: Collection[int]) -> nn.Module:
    """A bare module with the parameters of `module` that stay, under the same names."""
    holder = nn.Module()
    for name, parameter in list(module.named_parameters(recurse=False)):
        if storage_key(parameter) in storages:
            holder.register_parameter(name, parameter)
            module.register_parameter(name, None)
    for name, child in module.named_children():
        if any(storage_key(parameter) in storages for parameter in child.parameters()):
            holder.add_module(name, _holder(child, storages))
    return holder


def _replace(parent: nn.Module, name: str, child: nn.Module, owner: str) -> None:
    if isinstance(child, StageMissingLayer):
        return
    setattr(parent, name, StageMissingLayer(owner))
    _discard(child)


def _discard(module: nn.Module) -> None:
    """Free a module's memory at once, whoever else still holds the module."""
    if any(tensor.device.type != "meta" for tensor in (*module.parameters(), *module.buffers())):
        module.to("meta")


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that live on a device."""
    unique: dict[int, torch.Tensor] = {storage_key(p): p for p in model.parameters() if p.device.type != "meta"}
    return sum(tensor.untyped_storage().nbytes() for tensor in unique.values())
