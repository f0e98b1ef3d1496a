"""What building a MoE layer on Attention refuses, in which order, and that it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import fused_moe

from afd_shim import role
from afd_shim.errors import ConfigError, LayerError, UnsupportedModelError
from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.local_roles import LoadedModel, inspect_here, load_role, patched_vllm

LAYER: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 2,
    "hidden_size": 128,
    "intermediate_size": 64,
    "params_dtype": torch.bfloat16,
}


@pytest.fixture(scope="module")
def attention(world: None, checkpoint: Callable[..., Checkpoint]) -> Iterator[LoadedModel]:
    """An Attention model whose configuration the layers of the tests are added to."""
    inspect_here("Qwen3MoeForCausalLM")
    with patched_vllm():
        loaded = load_role(checkpoint("qwen3-moe").path, {"role": "attention"})
        yield loaded
        assert loaded.context is not None
        role.release(loaded.context)


@pytest.fixture
def context(attention: LoadedModel) -> Iterator[role.RoleContext]:
    """The role in force, about to build another model."""
    assert attention.context is not None
    registered = attention.config.compilation_config.static_forward_context
    before = dict(registered)
    with attention.context.build(role.Building.SKELETON):  # so that the loaded model's layers stay the context's
        attention.context.building = role.Building.ROLE
        yield attention.context
    registered.clear()
    registered.update(before)


def build(attention: LoadedModel, **arguments: Any) -> nn.Module:
    """Build one MoE layer as a model does."""
    with set_current_vllm_config(attention.config):
        runner: nn.Module = fused_moe.FusedMoEFactory(**(LAYER | {"prefix": "model.layers.9.mlp.experts"} | arguments))
    return runner


def ask_for_capture(attention: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask vLLM to return routed experts: a flag of the model's in 0.30, of the outputs' since."""
    holder: Any = getattr(attention.config, "aux_output_config", attention.config.model_config)
    assert holder.enable_return_routed_experts is False
    monkeypatch.setattr(holder, "enable_return_routed_experts", True)


IN_ORDER = [
    "connector",
    "enable_eplb",
    "num_redundant_experts",
    "enable_return_routed_experts",
    "routed_scaling_factor",
]


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("first", range(len(IN_ORDER)), ids=IN_ORDER)
def test_the_first_of_several_mistakes_is_named_and_nothing_is_registered(
    attention: LoadedModel,
    context: role.RoleContext,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    scale: float | None,
) -> None:
    """Each refusal comes before the later ones and before vLLM's factory runs."""
    mistakes = set(IN_ORDER[first:])
    arguments: dict[str, object] = {"routed_scaling_factor": scale}
    if "connector" in mistakes:
        monkeypatch.setattr(context, "device", torch.device("xpu"))
    if "enable_eplb" in mistakes:
        arguments["enable_eplb"] = True
    if "num_redundant_experts" in mistakes:
        arguments["num_redundant_experts"] = 2
    if "enable_return_routed_experts" in mistakes:
        ask_for_capture(attention, monkeypatch)
    before = list(attention.config.compilation_config.static_forward_context)

    with pytest.raises(ConfigError) as refused:
        build(attention, **arguments)

    assert refused.value.key == IN_ORDER[first]
    assert list(attention.config.compilation_config.static_forward_context) == before
    assert context.layers == []


def stateless_routing(hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool) -> None:
    """Route by what travels, like Llama 4 and PhiMoE."""


def routing_with_state() -> object:
    """Route by a parameter that stays on Attention, like Gemma 4."""
    scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def route(hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool) -> torch.Tensor:
        return scale

    return route


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hash_indices_table", torch.zeros(4, dtype=torch.int64)),
        ("bias_vl", torch.zeros(8)),
        ("zero_expert_type", "identity"),
        ("router", object()),
        ("runner_cls", nn.Module),
        ("is_sequence_parallel", True),
        ("custom_routing_function", routing_with_state()),
        ("fuse_shared_experts", True),
    ],
)
def test_a_layer_that_needs_what_does_not_travel_is_refused(
    attention: LoadedModel, context: role.RoleContext, key: str, value: object
) -> None:
    """The layer says what it needs, and whichever model has it is refused for that."""
    before = list(attention.config.compilation_config.static_forward_context)

    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.9\.mlp\.experts") as refused:
        build(attention, **{key: value})

    assert refused.value.key == key
    assert list(attention.config.compilation_config.static_forward_context) == before


def test_a_fused_shared_expert_gate_is_refused(attention: LoadedModel, context: role.RoleContext) -> None:
    """Fused with the router's gate it would belong to both roles."""
    gate = nn.Linear(128, 8)

    with pytest.raises(UnsupportedModelError) as refused:
        build(attention, gate=gate, shared_expert_gate=nn.Linear(128, 1))

    assert refused.value.key == "shared_expert_gate"


def test_routing_that_reads_only_what_travels_is_split(attention: LoadedModel, context: role.RoleContext) -> None:
    """A routing function without state runs on the FFN like any other."""
    build(attention, custom_routing_function=stateless_routing)

    [layer] = context.layers
    assert (layer.name, layer.index, layer.num_experts) == ("model.layers.9.mlp.experts", 9, 8)


def test_two_moe_layers_in_one_decoder_layer_are_refused(attention: LoadedModel, context: role.RoleContext) -> None:
    """One exchange per decoder layer travels."""
    build(attention, prefix="model.layers.9.mlp.text_experts")

    with pytest.raises(UnsupportedModelError, match="decoder layer 9 has two MoE layers"):
        build(attention, prefix="model.layers.9.mlp.vision_experts")


def test_a_duplicate_layer_name_stays_vllms_own_error(attention: LoadedModel, context: role.RoleContext) -> None:
    """A model that builds a layer twice is vLLM's to refuse, in vLLM's words."""
    build(attention)

    with pytest.raises(ValueError, match="Duplicate layer name"):
        build(attention)


def test_vllm_registers_the_layer_as_its_own(attention: LoadedModel, context: role.RoleContext) -> None:
    """The runner is found by name in the forward, which is how vLLM's custom op reaches it."""
    runner = build(attention)

    assert attention.config.compilation_config.static_forward_context["model.layers.9.mlp.experts"] is runner


def test_building_without_a_role_is_an_error(attention: LoadedModel, context: role.RoleContext) -> None:
    """A patched vLLM outside an AFD worker must not build half a model."""
    role.release(context)
    try:
        with pytest.raises(LayerError, match="no AFD role"):
            build(attention)
    finally:
        role.take(context)
