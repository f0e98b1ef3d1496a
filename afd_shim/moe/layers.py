"""Who owns what of one MoE layer, decided by the module objects the model hands to vLLM's factory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from afd_shim.config import AFDConfig

__all__ = ["SHARED_EXPERTS", "TRANSFORMS", "FactoryCall", "GatePlacement", "MoELayer", "ffn_storages", "storage_key"]

TRANSFORMS = ("routed_input_transform", "routed_output_transform")
"""The factory's arguments that are modules of the FFN role in every placement."""

SHARED_EXPERTS = ("shared_experts", "shared_expert_gate")
"""Those that are the FFN's without `shared_experts_on_attention`."""

FactoryCall = dict[str, object]
"""The factory's arguments by name."""

GatePlacement = str
"""`ffn`, `attention`, or `external` where the model calls its gate itself, on Attention."""


def storage_key(tensor: torch.Tensor) -> int:
    """Identify the memory behind a tensor; views share it, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - no public identity exists for meta storages


@dataclass(slots=True, eq=False)
class MoELayer:
    """One MoE layer of the model under construction.

    Attributes:
        name: the layer's prefix, e.g. `model.layers.1.mlp.experts`.
        index: the decoder layer's index.
        num_experts: logical experts, the width of the router logits.
        gate: where the gate is applied.
        shared_experts: the layer has shared experts, wherever they are.
        runner: what the factory returned.
        ffn_modules: the modules that are the FFN's.
        ffn_tensors: single parameters that are the FFN's whatever module they stand in (the
            score-correction bias). Held, so that nothing else can take over their storage's address.

    """

    name: str
    index: int
    num_experts: int
    gate: GatePlacement
    shared_experts: bool
    runner: MoERunner
    ffn_modules: list[nn.Module] = field(default_factory=list)
    ffn_tensors: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def describe(cls, call: Mapping[str, object], runner: MoERunner, index: int, afd: AFDConfig) -> MoELayer:
        """Describe the layer a factory call with these (native) arguments builds in such a deployment."""
        gate = call.get("gate")
        placement = "external" if gate is None else "attention" if afd.compute_gate_on_attention else "ffn"
        keys = TRANSFORMS if afd.shared_experts_on_attention else (*SHARED_EXPERTS, *TRANSFORMS)
        modules = [module for key in keys if isinstance(module := call.get(key), nn.Module)]
        if placement == "ffn" and isinstance(gate, nn.Module):
            modules.append(gate)
        bias = call.get("e_score_correction_bias")
        return cls(
            name=str(call.get("prefix", "")),
            index=index,
            num_experts=int(call["num_experts"]),  # type: ignore[call-overload]  # an int in every release
            gate=placement,
            shared_experts=call.get("shared_experts") is not None,
            runner=runner,
            ffn_modules=modules,
            ffn_tensors=[bias] if isinstance(bias, torch.Tensor) else [],
        )

    def release_foreign(self, *, attention: bool) -> None:
        """Let go of the FFN's modules and tensors once the model is pruned, where they are not ours."""
        if attention:
            self.ffn_modules.clear()
            self.ffn_tensors.clear()

    def owned_by_ffn(self) -> Iterator[nn.Module]:
        """The runner and every module the FFN owns."""
        yield self.runner
        yield from self.ffn_modules


def ffn_storages(layers: Iterable[MoELayer]) -> set[int]:
    """Storages of every parameter and buffer the FFN owns in a natively built model.

    A gate that stays with Attention is a child of the native runner too, hence of no concern here:
    only the runner's routed experts are counted.
    """
    storages: set[int] = set()
    for layer in layers:
        storages |= {storage_key(tensor) for tensor in layer.ffn_tensors}
        for module in (layer.runner.routed_experts, *layer.ffn_modules):
            storages |= {storage_key(tensor) for tensor in module.parameters()}
            storages |= {storage_key(tensor) for tensor in module.buffers()}
    return storages
