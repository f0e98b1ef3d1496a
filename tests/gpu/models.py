"""The checkpoints that the GPU runs use: the shipped families at sizes GPU kernels take, and three more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from afd_shim.testing.checkpoints import write_checkpoint
from afd_shim.testing.families import FAMILIES, SIZES, Family, Size
from afd_shim.testing.tensors import TensorSpec

__all__ = ["LITE_CONFIG", "MODELS", "Model", "write_lite_config", "write_model"]

SIZE = "gpu"
SIZES[SIZE] = Size(hidden=512, layers=4, heads=8, experts=16, moe_intermediate=256, dense_intermediate=512)

_FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Model:
    """One model of a run.

    Attributes:
        family: a key of `FAMILIES`.
        fp8: the checkpoint's linear layers and experts are quantised in blocks, as DeepSeek-V3's are.
        attention_backend: vLLM's flag; MLA models have backends of their own.
        engine: more of vLLM's flags that this model needs on a machine without FlashInfer.

    """

    family: str
    fp8: bool = False
    attention_backend: str | None = "TRITON_ATTN"
    engine: Mapping[str, str] = field(default_factory=dict)

    @property
    def gate_placements(self) -> tuple[bool, ...]:
        """The values of `compute_gate_on_attention` that make a difference."""
        return FAMILIES[self.family].gate_placements

    @property
    def has_own_gate(self) -> bool:
        """Whether the model calls its gate itself."""
        return FAMILIES[self.family].gate == "external"


def _qwen3_5_config(size: Size) -> dict[str, object]:
    """Qwen3.5's text model: Qwen3-Next's layers under other names, interleaved multimodal RoPE."""
    config = FAMILIES["qwen3-next"].config(size)
    for key in ("full_attention_interval", "partial_rotary_factor", "rope_theta", "decoder_sparse_step"):
        config.pop(key, None)
    return config | {
        "model_type": "qwen3_5_moe_text",
        "head_dim": 256,
        "layer_types": [
            "full_attention" if (index + 1) % 4 == 0 else "linear_attention" for index in range(size.layers)
        ],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "attn_output_gate": True,
    }


def _qwen3_5_tensors(size: Size) -> Iterator[TensorSpec]:
    """Qwen3-Next's, with the delta net's projections apart and attention's heads of 256."""
    head_ratio = 256 // 64
    for spec in FAMILIES["qwen3-next"].tensors(size):
        prefix, _, suffix = spec.name.rpartition(".linear_attn.")
        if suffix == "in_proj_qkvz.weight":
            key, value = 2 * 128, 4 * 128
            yield replace(spec, name=f"{prefix}.linear_attn.in_proj_qkv.weight", shape=(2 * key + value, size.hidden))
            yield replace(spec, name=f"{prefix}.linear_attn.in_proj_z.weight", shape=(value, size.hidden))
        elif suffix == "in_proj_ba.weight":
            for half in "ba":
                yield replace(spec, name=f"{prefix}.linear_attn.in_proj_{half}.weight", shape=(4, size.hidden))
        elif ".self_attn." in spec.name:
            out, *rest = spec.shape
            if spec.name.endswith("o_proj.weight"):
                yield replace(spec, shape=(out, rest[0] * head_ratio))
            else:
                yield replace(spec, shape=(out * head_ratio, *rest))
        else:
            yield spec


FAMILIES["qwen3.5-moe"] = Family(
    "qwen3.5-moe", "Qwen3_5MoeForCausalLM", "runner", config=_qwen3_5_config, tensors=_qwen3_5_tensors
)

MODELS: dict[str, Model] = {
    "deepseek-v2": Model("deepseek-v2", attention_backend="TRITON_MLA"),
    "deepseek-v3": Model("deepseek-v3", attention_backend="TRITON_MLA"),
    "qwen3-moe": Model("qwen3-moe"),
    "qwen3-next": Model("qwen3-next", engine={"gdn_prefill_backend": "triton"}),
    "qwen3.5-moe": Model("qwen3.5-moe", engine={"gdn_prefill_backend": "triton"}),
    "olmoe": Model("olmoe"),
    "granitemoe": Model("granitemoe"),
    "qwen3-moe-fp8": Model("qwen3-moe", fp8=True),
}

LITE_CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""DeepSeek-V2-Lite's shape; its weights are vLLM's dummy ones."""


def write_model(name: str, root: Path) -> Path:
    """Write the checkpoint of `MODELS[name]` below `root`, if it is not there; its directory."""
    path = root / name
    if not (path / "config.json").exists():
        model = MODELS[name]
        write_checkpoint(model.family, path, size=SIZE)
        if model.fp8:
            _quantise(path)
    return path


def write_lite_config(root: Path) -> Path:
    """Write the configuration of a DeepSeek-V2-Lite without weights or tokenizer; its directory."""
    path = root / "deepseek-v2-lite"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(LITE_CONFIG))
    return path


def _quantise(path: Path) -> None:
    """Turn a bfloat16 checkpoint's projections into float8 blocks of 128 x 128 with their scales."""
    import torch
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, weight in list(tensors.items()):
        if weight.dim() != 2 or not name.endswith("_proj.weight"):
            continue
        rows, columns = (size // _FP8_BLOCK for size in weight.shape)
        blocks = weight.float().view(rows, _FP8_BLOCK, columns, _FP8_BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-6) / torch.finfo(torch.float8_e4m3fn).max
        quantised = (blocks / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        tensors[name] = quantised.contiguous()
        tensors[name.replace(".weight", ".weight_scale_inv")] = scale.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
        # vLLM would take the router's weight for float8 too, and look for scales that no checkpoint has.
        "modules_to_not_convert": [name.removesuffix(".weight") for name in tensors if name.endswith(".gate.weight")],
    }
    (path / "config.json").write_text(json.dumps(config))
