"""What each role builds in place of a native MoE layer; both go through vLLM's own factory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index

from afd_shim.config.checks import check_connector, routed_experts_capture_enabled
from afd_shim.errors import ConfigError, LayerError, UnsupportedModelError
from afd_shim.moe.experts import AFDRemoteRoutedExperts
from afd_shim.moe.layers import SHARED_EXPERTS, TRANSFORMS, FactoryCall, MoELayer
from afd_shim.moe.runner import AFDExternalRoutingMoERunner, AFDRemoteMoERunner

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from afd_shim.config import AFDConfig
    from afd_shim.role import RoleContext

__all__ = ["build_attention_moe_runner", "build_ffn_moe_runner", "record_native_layer", "require_layers"]

NativeFactory = Callable[..., "MoERunner"]

# Arguments of Attention's factory call that describe local experts, and what they are fixed to. Unit
# dimensions keep the parameter-free container apart from Attention's own tensor parallelism.
_FIXED_ON_ATTENTION: FactoryCall = {
    "quant_config": None,
    "gate": None,
    "shared_experts": None,
    "shared_expert_gate": None,
    "routed_input_transform": None,
    "routed_output_transform": None,
    "e_score_correction_bias": None,
    "n_shared_experts": None,
    "apply_routed_scale_to_output": False,  # the runner's own scale is then 1: the FFN has applied it
    "enable_eplb": False,
    "num_redundant_experts": 0,
    "is_sequence_parallel": False,
    "tp_size": 1,
    "dp_size": 1,
    "pcp_size": 1,
    "use_grouped_topk": False,  # no routing happens here: groups need not be checked against experts
    "num_expert_group": None,
    "topk_group": None,
    "custom_routing_function": None,
    "scoring_func": "softmax",
    "runner_args": None,
    "routed_experts_args": None,
    "routed_experts_cls": AFDRemoteRoutedExperts,
}

_WHOLE: FactoryCall = {"tp_size": 1, "dp_size": 1, "pcp_size": 1, "enable_eplb": False, "num_redundant_experts": 0}
"""Arguments of the factory call that shard a layer or replicate its experts, and what they are for the skeleton."""


def build_attention_moe_runner(factory: NativeFactory, call: Mapping[str, object], context: RoleContext) -> MoERunner:
    """Build the Attention role's MoE layer with vLLM's factory.

    Args:
        factory: vLLM's own `FusedMoEFactory`.
        call: the model's arguments by name.
        context: the role of this process.

    Returns:
        A runner without experts, registered as vLLM registers its own.

    Raises:
        ConfigError: device and connector do not fit; EPLB, redundant experts or routed-experts
            capture on Attention; a scale that is not finite. In this order, before vLLM's factory
            runs, so that nothing is registered.
        UnsupportedModelError: the layer needs something that does not travel.

    """
    config = get_current_vllm_config()
    name = str(call.get("prefix", ""))
    _reject_on_attention(call, context.config, config, context.device.type)
    _reject_untransportable(name, call, context.config)
    index = _claim_index(name, context)
    layer_gate = call.get("gate") if context.config.compute_gate_on_attention else None
    runs_routing_here = call.get("gate") is None or layer_gate is not None
    arguments = (
        dict(call)
        | _FIXED_ON_ATTENTION
        | {
            "gate": layer_gate,
            "runner_cls": AFDExternalRoutingMoERunner if runs_routing_here else AFDRemoteMoERunner,
        }
    )
    if context.config.shared_experts_on_attention:
        # The FFN's reply is raw: the runner's own forward scales it and adds the shared experts.
        for key in ("shared_experts", "apply_routed_scale_to_output"):
            arguments[key] = call.get(key, arguments[key])
    if call.get("routed_input_transform") is not None:
        # The factory is given the latent width; what travels is the model's.
        arguments["hidden_size"] = config.model_config.get_hidden_size()
    runner = factory(**arguments)
    layer = MoELayer.describe(call, runner, index, context.config)
    context.layers.append(layer)
    for module in layer.ffn_modules:
        module.to("meta")  # frees what this role does not own before the next layer is built
    return runner


def build_ffn_moe_runner(factory: NativeFactory, call: Mapping[str, object], context: RoleContext) -> MoERunner:
    """Build the FFN role's MoE layer: the native one without what Attention owns of it.

    Raises:
        UnsupportedModelError: the layer needs something that does not travel, or is built outside
            `make_layers`, where this role allocates nothing.

    """
    name = str(call.get("prefix", ""))
    _reject_untransportable(name, call, context.config)
    index = _claim_index(name, context)
    if torch.get_default_device().type == "meta":
        raise UnsupportedModelError(
            f"{name}: this model builds its MoE layers outside vLLM's make_layers, where the FFN role "
            "allocates nothing. Serve it unsplit."
        )
    arguments = dict(call)
    if context.config.compute_gate_on_attention:
        arguments["gate"] = None
    if context.config.shared_experts_on_attention:
        arguments |= dict.fromkeys(SHARED_EXPERTS)
        if call.get("apply_routed_scale_to_output"):
            arguments["routed_scaling_factor"] = 1.0  # Attention's runner applies it
    runner = factory(**arguments)
    context.layers.append(MoELayer.describe(call, runner, index, context.config))
    return runner


def record_native_layer(factory: NativeFactory, call: Mapping[str, object], context: RoleContext) -> MoERunner:
    """Build the layer as vLLM does and remember who would own its parts (the skeleton).

    It is whole, whatever the parallelism: an expert map on the meta device says nothing, and which of
    a role's ranks holds an expert does not change what the role owns.
    """
    runner = factory(**dict(call) | _WHOLE)
    name = str(call.get("prefix", ""))
    context.layers.append(MoELayer.describe(call, runner, extract_layer_index(name), context.config))
    return runner


def _reject_on_attention(call: Mapping[str, object], afd: AFDConfig, config: VllmConfig, device: str) -> None:
    check_connector(afd.connector, device)
    if call.get("enable_eplb"):
        raise ConfigError(
            "expert load balancing was asked for on the Attention role, which has no experts; "
            "give --enable-eplb to the FFN command only.",
            key="enable_eplb",
        )
    if call.get("num_redundant_experts"):
        raise ConfigError(
            "redundant experts were asked for on the Attention role, which has no experts; "
            "give num_redundant_experts to the FFN command only.",
            key="num_redundant_experts",
        )
    if routed_experts_capture_enabled(config):
        raise ConfigError(
            "routed-experts capture needs the routing on this rank, and the Attention role does not route; "
            "leave --enable-return-routed-experts out.",
            key="enable_return_routed_experts",
        )
    scale = call.get("routed_scaling_factor", 1.0)
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ConfigError(
            f"routed_scaling_factor is {scale!r}; the model's config must give a finite number.",
            key="routed_scaling_factor",
        )


def _reject_untransportable(name: str, call: Mapping[str, object], afd: AFDConfig) -> None:
    """Refuse what a layer needs beside hidden states and router logits."""
    reasons = {
        "hash_indices_table": "routes by input_ids (hash routing)",
        "bias_vl": "routes by input_ids (vision bias)",
        "zero_expert_type": "has zero experts",
        "router": "brings a router of its own",
        "runner_cls": "brings a MoE runner of its own",
        "moe_config_cls": "brings a MoE configuration of its own",
    }
    for key, reason in reasons.items():
        if call.get(key) is not None:
            raise UnsupportedModelError(
                f"{name}: the model {reason}, which does not travel; serve it unsplit.", key=key
            )
    if call.get("fuse_shared_experts") or call.get("n_shared_experts"):
        raise UnsupportedModelError(
            f"{name}: shared experts are fused into the routed ones; turn shared-expert fusion off.",
            key="fuse_shared_experts",
        )
    if call.get("is_sequence_parallel"):
        raise UnsupportedModelError(
            f"{name}: sequence-parallel MoE chunks the rows over tensor-parallel ranks; "
            "use another --all2all-backend, or tensor parallel size 1.",
            key="is_sequence_parallel",
        )
    if call.get("gate") is not None and call.get("shared_expert_gate") is not None:
        raise UnsupportedModelError(
            f"{name}: the router's and the shared expert's gates are fused into one; turn shared-expert fusion off.",
            key="shared_expert_gate",
        )
    if afd.shared_experts_on_attention and any(call.get(key) is not None for key in TRANSFORMS):
        raise UnsupportedModelError(
            f"{name}: the routed experts' output is transformed before the shared experts are added, on the FFN; "
            "leave afd.shared_experts_on_attention out.",
            key="shared_experts_on_attention",
        )
    held = _held_state(call.get("custom_routing_function"))
    if held is not None:
        raise UnsupportedModelError(
            f"{name}: its routing function reads {held} of the attention side, which does not travel; "
            "serve it unsplit.",
            key="custom_routing_function",
        )


def _held_state(function: object) -> str | None:
    """Name the module or tensor a routing function holds on to, or None when it is free of state."""
    if isinstance(function, functools.partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            if (held := _held_state(value)) is not None:
                return held
        return None
    if isinstance(function, (nn.Module, torch.Tensor)):
        return type(function).__name__
    if isinstance(function, MethodType):
        return _held_state(function.__self__) or _held_state(function.__func__)
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            if (held := _held_state(cell.cell_contents)) is not None:
                return held
    return None


def _claim_index(name: str, context: RoleContext) -> int:
    index = extract_layer_index(name)
    for layer in context.layers:
        if layer.index == index and layer.name != name:  # the same name twice is vLLM's own error
            raise UnsupportedModelError(
                f"decoder layer {index} has two MoE layers, {layer.name} and {name}; one exchange per layer travels. "
                "Serve this model unsplit."
            )
    return index


def require_layers(layers: Sequence[MoELayer], model: str, afd: AFDConfig) -> list[MoELayer]:
    """The MoE layers of a model, in the order of its forward.

    Raises:
        LayerError: when there is none: the model bypasses vLLM's factory.
        ConfigError: none has shared experts, and Attention was told to hold them.

    """
    if not layers:
        raise LayerError(
            f"{model} built no MoE layer through vLLM's FusedMoEFactory, so there is nothing to split; "
            "serve it unsplit."
        )
    if afd.shared_experts_on_attention and not any(layer.shared_experts for layer in layers):
        raise ConfigError(
            f"{model} hands no shared experts to its MoE layers, so there is nothing to hold on Attention; "
            "leave afd.shared_experts_on_attention out.",
            key="shared_experts_on_attention",
        )
    return sorted(layers, key=lambda layer: layer.index)
