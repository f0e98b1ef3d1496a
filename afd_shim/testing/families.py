"""Tiny models of the MoE families that afd-shim splits: configuration and tensors by name.

Names and shapes are those of the published checkpoints, as vLLM's loaders read them
(`vllm/model_executor/models/{deepseek_v2,qwen3_moe,qwen3_next,olmoe,granitemoe}.py`, 0.30 to 0.32).
Each tensor also says which role owns it. That is knowledge of its own, so tests can hold the
product's generic ownership rules against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from afd_shim.testing.tensors import Owner, TensorSpec
from afd_shim.testing.tokenizer import VOCAB_SIZE

__all__ = ["FAMILIES", "SIZES", "Family", "GateKind", "Size"]

GateKind = Literal["runner", "external"]
"""`runner`: the MoE runner applies the gate, which may move. `external`: the model itself calls it."""

Config = dict[str, object]


@dataclass(frozen=True, slots=True)
class Size:
    """Dimensions shared by all families; head sizes are each family's own."""

    hidden: int
    layers: int
    heads: int
    experts: int
    moe_intermediate: int
    dense_intermediate: int
    max_positions: int = 2048


SIZES: dict[str, Size] = {
    "tiny": Size(128, 4, 4, 8, 64, 256),
    # About 200 MB for each role in bfloat16 with DeepSeek-V2's layers: for memory measurements.
    "large": Size(1024, 12, 16, 16, 192, 1024),
}


def _every_layer(size: Size) -> list[int]:
    return list(range(size.layers))


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: how it is configured, what tensors it has, how its layers look."""

    name: str
    architecture: str
    gate: GateKind
    config: Callable[[Size], Config]
    tensors: Callable[[Size], Iterator[TensorSpec]]
    moe_layers: Callable[[Size], list[int]] = _every_layer
    can_tie_embeddings: bool = False  # whether vLLM's model honours `tie_word_embeddings`; the others ignore it

    @property
    def gate_placements(self) -> tuple[bool, ...]:
        """The values of `compute_gate_on_attention` that make a difference."""
        return (False, True) if self.gate == "runner" else (False,)


# Standard deviations. A linear layer keeps the scale of its input (gain 1); what is written back to
# the residual is amplified, so that attention and experts, not the last token, choose the next one.
_EMBEDDING_STD = 0.5
_ATTENTION_GAIN = 1.5
_MLP_GAIN = 4.0
_NORM_STD = 0.1


def _linear(name: str, out: int, size_in: int, owner: Owner, gain: float = 1.0) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (out, size_in), owner, gain * size_in**-0.5)


def _norm(name: str, size: int, mean: float = 1.0) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (size,), "attention", _NORM_STD, mean)


def _mlp(prefix: str, size: Size, intermediate: int, owner: Owner) -> Iterator[TensorSpec]:
    yield _linear(f"{prefix}.gate_proj", intermediate, size.hidden, owner)
    yield _linear(f"{prefix}.up_proj", intermediate, size.hidden, owner)
    yield _linear(f"{prefix}.down_proj", size.hidden, intermediate, owner, _MLP_GAIN)


def _experts(prefix: str, size: Size) -> Iterator[TensorSpec]:
    for expert in range(size.experts):
        yield from _mlp(f"{prefix}.experts.{expert}", size, size.moe_intermediate, "ffn")


def _qkv(prefix: str, size: Size, head: int, kv_heads: int, q_parts: int = 1) -> Iterator[TensorSpec]:
    yield _linear(f"{prefix}.q_proj", size.heads * head * q_parts, size.hidden, "attention", 2.0)
    yield _linear(f"{prefix}.k_proj", kv_heads * head, size.hidden, "attention", 2.0)
    yield _linear(f"{prefix}.v_proj", kv_heads * head, size.hidden, "attention")
    yield _linear(f"{prefix}.o_proj", size.hidden, size.heads * head, "attention", _ATTENTION_GAIN)


def _ends(size: Size, norm_mean: float = 1.0) -> Iterator[TensorSpec]:
    yield TensorSpec("model.embed_tokens.weight", (VOCAB_SIZE, size.hidden), "attention", _EMBEDDING_STD)
    yield _norm("model.norm", size.hidden, norm_mean)
    yield _linear("lm_head", VOCAB_SIZE, size.hidden, "attention")


def _layer_norms(layer: str, size: Size, mean: float = 1.0) -> Iterator[TensorSpec]:
    yield _norm(f"{layer}.input_layernorm", size.hidden, mean)
    yield _norm(f"{layer}.post_attention_layernorm", size.hidden, mean)


def _common(size: Size) -> Config:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "hidden_act": "silu",
        "max_position_embeddings": size.max_positions,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_theta": 10000.0,
    }


# --- DeepSeek-V2 and V3: MLA, first layer dense, shared experts ---------------------------------
# vLLM's CPU kernels for MLA are built for the real head sizes only.
_KV_LORA, _QK_ROPE, _QK_NOPE, _V_HEAD = 512, 64, 128, 128
_FIRST_DENSE = 1
_SHARED_EXPERTS = 2
_V3_Q_LORA = 96


def _deepseek_config(size: Size) -> Config:
    return _common(size) | {
        "model_type": "deepseek_v2",
        "intermediate_size": size.dense_intermediate,
        "moe_intermediate_size": size.moe_intermediate,
        "num_key_value_heads": size.heads,
        "kv_lora_rank": _KV_LORA,
        "q_lora_rank": None,
        "qk_rope_head_dim": _QK_ROPE,
        "qk_nope_head_dim": _QK_NOPE,
        "v_head_dim": _V_HEAD,
        "n_routed_experts": size.experts,
        "n_shared_experts": _SHARED_EXPERTS,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": _FIRST_DENSE,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    }


def _deepseek_v3_config(size: Size) -> Config:
    return _deepseek_config(size) | {
        "model_type": "deepseek_v3",
        "q_lora_rank": _V3_Q_LORA,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 4,
        "topk_group": 2,
        "moe_router_dtype": "float32",
        "num_nextn_predict_layers": 0,
    }


def _mla(prefix: str, size: Size, q_lora: int | None) -> Iterator[TensorSpec]:
    q_out = size.heads * (_QK_NOPE + _QK_ROPE)
    if q_lora is None:
        yield _linear(f"{prefix}.q_proj", q_out, size.hidden, "attention", 2.0)
    else:
        yield _linear(f"{prefix}.q_a_proj", q_lora, size.hidden, "attention")
        yield _norm(f"{prefix}.q_a_layernorm", q_lora)
        yield _linear(f"{prefix}.q_b_proj", q_out, q_lora, "attention", 2.0)
    yield _linear(f"{prefix}.kv_a_proj_with_mqa", _KV_LORA + _QK_ROPE, size.hidden, "attention")
    yield _norm(f"{prefix}.kv_a_layernorm", _KV_LORA)
    yield _linear(f"{prefix}.kv_b_proj", size.heads * (_QK_NOPE + _V_HEAD), _KV_LORA, "attention")
    yield _linear(f"{prefix}.o_proj", size.hidden, size.heads * _V_HEAD, "attention", _ATTENTION_GAIN)


def _deepseek_tensors(size: Size, *, q_lora: int | None = None, bias_std: float = 0.0) -> Iterator[TensorSpec]:
    yield from _ends(size)
    for index in range(size.layers):
        layer = f"model.layers.{index}"
        yield from _layer_norms(layer, size)
        yield from _mla(f"{layer}.self_attn", size, q_lora)
        if index < _FIRST_DENSE:
            yield from _mlp(f"{layer}.mlp", size, size.dense_intermediate, "attention")
            continue
        yield _linear(f"{layer}.mlp.gate", size.experts, size.hidden, "gate")
        if bias_std:
            name = f"{layer}.mlp.gate.e_score_correction_bias"
            yield TensorSpec(name, (size.experts,), "ffn", bias_std, dtype="float32")
        yield from _experts(f"{layer}.mlp", size)
        shared = size.moe_intermediate * _SHARED_EXPERTS
        yield from _mlp(f"{layer}.mlp.shared_experts", size, shared, "shared_experts")


def _deepseek_v3_tensors(size: Size) -> Iterator[TensorSpec]:
    # Sigmoid scores of unit-variance logits spread by about 0.2: a bias of that size changes choices.
    return _deepseek_tensors(size, q_lora=_V3_Q_LORA, bias_std=0.2)


def _after_first_dense(size: Size) -> list[int]:
    return list(range(_FIRST_DENSE, size.layers))


# --- Qwen3-MoE: grouped-query attention, every layer MoE, no shared experts ---------------------
_HEAD = 64


def _kv_heads(size: Size) -> int:
    return max(1, size.heads // 2)


def _qwen3_moe_config(size: Size) -> Config:
    return _common(size) | {
        "model_type": "qwen3_moe",
        "intermediate_size": size.dense_intermediate,
        "moe_intermediate_size": size.moe_intermediate,
        "num_key_value_heads": _kv_heads(size),
        "head_dim": _HEAD,
        "num_experts": size.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_moe_tensors(size: Size) -> Iterator[TensorSpec]:
    yield from _ends(size)
    for index in range(size.layers):
        layer = f"model.layers.{index}"
        yield from _layer_norms(layer, size)
        yield from _qkv(f"{layer}.self_attn", size, _HEAD, _kv_heads(size))
        yield _norm(f"{layer}.self_attn.q_norm", _HEAD)
        yield _norm(f"{layer}.self_attn.k_norm", _HEAD)
        yield _linear(f"{layer}.mlp.gate", size.experts, size.hidden, "gate")
        yield from _experts(f"{layer}.mlp", size)


# --- Qwen3-Next: gated delta net and full attention, a shared expert with its own gate ----------
_GDN_KEY_HEADS, _GDN_VALUE_HEADS, _GDN_HEAD, _GDN_CONV = 2, 4, 128, 4
_FULL_ATTENTION_EVERY = 4


def _qwen3_next_config(size: Size) -> Config:
    return _common(size) | {
        "model_type": "qwen3_next",
        "intermediate_size": size.dense_intermediate,
        "moe_intermediate_size": size.moe_intermediate,
        "shared_expert_intermediate_size": size.moe_intermediate,
        "num_key_value_heads": _kv_heads(size),
        "head_dim": _HEAD,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": _GDN_CONV,
        "linear_key_head_dim": _GDN_HEAD,
        "linear_value_head_dim": _GDN_HEAD,
        "linear_num_key_heads": _GDN_KEY_HEADS,
        "linear_num_value_heads": _GDN_VALUE_HEADS,
        "full_attention_interval": _FULL_ATTENTION_EVERY,
        "num_experts": size.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gated_delta_net(prefix: str, size: Size) -> Iterator[TensorSpec]:
    key, value = _GDN_KEY_HEADS * _GDN_HEAD, _GDN_VALUE_HEADS * _GDN_HEAD
    yield TensorSpec(f"{prefix}.conv1d.weight", (2 * key + value, 1, _GDN_CONV), "attention", 0.5)
    yield _linear(f"{prefix}.in_proj_qkvz", 2 * key + 2 * value, size.hidden, "attention")
    yield _linear(f"{prefix}.in_proj_ba", 2 * _GDN_VALUE_HEADS, size.hidden, "attention")
    yield TensorSpec(f"{prefix}.dt_bias", (_GDN_VALUE_HEADS,), "attention", 0.1, 1.0)
    # float32 in the model whatever the checkpoint's dtype.
    yield TensorSpec(f"{prefix}.A_log", (_GDN_VALUE_HEADS,), "attention", 0.5, 0.5)
    yield TensorSpec(f"{prefix}.norm.weight", (_GDN_HEAD,), "attention", _NORM_STD, 1.0)
    yield _linear(f"{prefix}.out_proj", size.hidden, value, "attention", _ATTENTION_GAIN)


def _qwen3_next_tensors(size: Size) -> Iterator[TensorSpec]:
    # Qwen3NextRMSNorm multiplies by 1 + weight; the gated norm of the delta net by its weight.
    yield from _ends(size, norm_mean=0.0)
    for index in range(size.layers):
        layer = f"model.layers.{index}"
        yield from _layer_norms(layer, size, mean=0.0)
        if (index + 1) % _FULL_ATTENTION_EVERY:
            yield from _gated_delta_net(f"{layer}.linear_attn", size)
        else:
            # The query projection carries the output gate too.
            yield from _qkv(f"{layer}.self_attn", size, _HEAD, _kv_heads(size), q_parts=2)
            yield _norm(f"{layer}.self_attn.q_norm", _HEAD, 0.0)
            yield _norm(f"{layer}.self_attn.k_norm", _HEAD, 0.0)
        yield _linear(f"{layer}.mlp.gate", size.experts, size.hidden, "gate")
        yield from _experts(f"{layer}.mlp", size)
        yield from _mlp(f"{layer}.mlp.shared_expert", size, size.moe_intermediate, "shared_experts")
        yield _linear(f"{layer}.mlp.shared_expert_gate", 1, size.hidden, "shared_experts")


# --- OLMoE: the model calls its gate itself ------------------------------------------------------
def _olmoe_config(size: Size) -> Config:
    return _common(size) | {
        "model_type": "olmoe",
        "intermediate_size": size.moe_intermediate,
        "num_key_value_heads": size.heads,
        "num_experts": size.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "clip_qkv": None,
    }


def _olmoe_tensors(size: Size) -> Iterator[TensorSpec]:
    yield from _ends(size)
    for index in range(size.layers):
        layer = f"model.layers.{index}"
        yield from _layer_norms(layer, size)
        yield from _qkv(f"{layer}.self_attn", size, size.hidden // size.heads, size.heads)
        yield _norm(f"{layer}.self_attn.q_norm", size.hidden)
        yield _norm(f"{layer}.self_attn.k_norm", size.hidden)
        # Unnormalised top-2 of 8 weighs about a third; a sharper gate keeps the experts audible.
        gate = _linear(f"{layer}.mlp.gate", size.experts, size.hidden, "attention")
        yield replace(gate, std=2.0 * gate.std)
        yield from _experts(f"{layer}.mlp", size)


# --- GraniteMoE: an external gate, and experts fused into tensors of other names ----------------
def _granitemoe_config(size: Size) -> Config:
    return _common(size) | {
        "model_type": "granitemoe",
        "intermediate_size": size.moe_intermediate,
        "num_key_value_heads": _kv_heads(size),
        "num_local_experts": size.experts,
        "num_experts_per_tok": 2,
        "attention_multiplier": (size.hidden // size.heads) ** -0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }


def _granitemoe_tensors(size: Size) -> Iterator[TensorSpec]:
    yield from _ends(size)
    for index in range(size.layers):
        layer = f"model.layers.{index}"
        yield from _layer_norms(layer, size)
        yield from _qkv(f"{layer}.self_attn", size, size.hidden // size.heads, _kv_heads(size))
        moe = f"{layer}.block_sparse_moe"
        yield _linear(f"{moe}.router.layer", size.experts, size.hidden, "attention")
        inputs = (size.experts, 2 * size.moe_intermediate, size.hidden)
        outputs = (size.experts, size.hidden, size.moe_intermediate)
        yield TensorSpec(f"{moe}.input_linear.weight", inputs, "ffn", size.hidden**-0.5)
        std = _MLP_GAIN * size.moe_intermediate**-0.5
        yield TensorSpec(f"{moe}.output_linear.weight", outputs, "ffn", std)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "deepseek-v2",
            "DeepseekV2ForCausalLM",
            "runner",
            config=_deepseek_config,
            tensors=_deepseek_tensors,
            moe_layers=_after_first_dense,
        ),
        Family(
            "deepseek-v3",
            "DeepseekV3ForCausalLM",
            "runner",
            config=_deepseek_v3_config,
            tensors=_deepseek_v3_tensors,
            moe_layers=_after_first_dense,
        ),
        Family(
            "qwen3-moe",
            "Qwen3MoeForCausalLM",
            "runner",
            config=_qwen3_moe_config,
            tensors=_qwen3_moe_tensors,
            can_tie_embeddings=True,
        ),
        Family(
            "qwen3-next",
            "Qwen3NextForCausalLM",
            "runner",
            config=_qwen3_next_config,
            tensors=_qwen3_next_tensors,
        ),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            "external",
            config=_olmoe_config,
            tensors=_olmoe_tensors,
        ),
        Family(
            "granitemoe",
            "GraniteMoeForCausalLM",
            "external",
            config=_granitemoe_config,
            tensors=_granitemoe_tensors,
            can_tie_embeddings=True,
        ),
    )
}
