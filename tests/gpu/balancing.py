"""Expert load balancing over two FFN ranks: recorded load, rearrangement, and what it does to tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.gpu.deployments import Deployment, compare_outputs, run_all
from tests.gpu.evidence import Evidence
from tests.gpu.models import LITE_CONFIG, MODELS, write_model

__all__ = ["balance"]

_LITE_LAYERS = 6  # of 27: the experts are what matters, and 31 GB of random weights take long to write
_INTERVAL = 400  # steps; vLLM's first rearrangement comes after a quarter of them
_PHASES = (40, 160)  # tokens: before the first rearrangement, and across it
_PROMPTS = ("a a a a a a a a a a a a", "the the the the the the", "a a a a a a a b", "def def def def")


def balance(folder: Path, *, timeout: float, evidence: Evidence) -> list[dict[str, Any]]:
    """Run each model without balancing, with synchronous and with asynchronous balancing; a row each.

    DeepSeek-V2-Lite's layers with 32 redundant experts (96 physical, 48 per FFN rank) in bfloat16, and
    a small Qwen3-MoE in float32, where tokens must not change at all.
    """
    lite = write_lite_checkpoint(folder / "lite-6-layers")
    small = write_model("qwen3-moe", folder / "checkpoints")
    cases = {
        "lite bfloat16": (lite, "bfloat16", "TRITON_MLA", 32, 6),
        "qwen3-moe float32": (small, "float32", MODELS["qwen3-moe"].attention_backend, 4, 2),
    }
    runs = [
        _deployment(f"{case} {mode}", path, folder, mode, dtype, backend, redundant, top_k)
        for case, (path, dtype, backend, redundant, top_k) in cases.items()
        for mode in ("none", "sync", "async")
    ]
    found = run_all(runs, folder / "eplb", timeout=timeout, at_once=3)
    rows = []
    for case in cases:
        for mode in ("none", "sync", "async"):
            result = found[f"{case} {mode}"]
            if "error" in result:
                rows.append({"run": f"{case} {mode}", "ok": False, "error": result["error"][-200:]})
                evidence.text(f"```\n{case} {mode}: {result['error'][-5000:]}\n```")
            elif mode != "none":
                rows.append(_row(f"{case} {mode}", found.get(f"{case} none", {}), result))
    return rows


def _deployment(
    name: str, path: Path, folder: Path, mode: str, dtype: str, backend: str | None, redundant: int, top_k: int
) -> Deployment:
    inspect = str(folder / "eplb" / name / "load")
    engine: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 512 << 20,
        "gpu_memory_utilization": 0.25,
        "enable_prefix_caching": False,
        "attention_backend": backend,
        "enforce_eager": True,
    }
    ffn: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    if mode != "none":
        ffn |= {
            "enable_eplb": True,
            "eplb_config": {
                "use_async": mode == "async",
                "num_redundant_experts": redundant,
                "window_size": _INTERVAL,
                "step_interval": _INTERVAL,
                "log_balancedness": True,
                "log_balancedness_interval": 10**6,
            },
        }
    told = {"inspect": inspect} if mode != "none" else {}
    return Deployment(
        name,
        path,
        engine,
        {"phases": list(_PHASES), "prompts": list(_PROMPTS), "top_k": top_k, **told},
        split={"compute_gate_on_attention": True, "num_ffn_ranks": 2},
        gpus=("0", "0,1"),
        ffn_engine=ffn,
        ffn_work=told,
        env={"VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
    )


def _row(name: str, without: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    before, after = found["phases"]
    recorded = _recorded(before["told"])
    counted = list(before["counted"].values())
    row: dict[str, Any] = {
        "run": name,
        "load_equal": recorded == counted,
        "recorded_tokens": sum(map(sum, recorded)),
        "rearrangements": after["told"][0]["counters"]["rearrangements"],
        "placement_changed": after["told"][0]["placement"] != before["told"][0]["placement"],
        "ticks_equal": len({rank["counters"]["steps"] for rank in after["told"]}) == 1,
        "seconds_still": after["told"][0]["counters"]["rearrangement_seconds"],
    }
    if "phases" in without:
        # The second phase runs across the rearrangement; the first is before it.
        row |= compare_outputs(without["phases"][1], after)
    exact = "float32" not in name or row.get("tokens_equal", False)
    row["ok"] = bool(
        row["load_equal"] and row["recorded_tokens"] and row["rearrangements"] and row["ticks_equal"] and exact
    )
    return row


def _recorded(told: list[dict[str, Any]]) -> list[list[int]]:
    """Tokens per logical expert and layer, summed over the ranks' windows."""
    layers = []
    for row, placement in enumerate(told[0]["placement"]):
        load = [0] * (max(placement) + 1)
        for rank in told:
            for expert, tokens in zip(placement, rank["window"][row], strict=True):
                load[expert] += tokens
        layers.append(load)
    return layers


def write_lite_checkpoint(path: Path) -> Path:
    """Write the first layers of a random DeepSeek-V2-Lite, drawn on the GPU; its directory."""
    import torch
    from safetensors.torch import save_file

    from afd_shim.testing.families import FAMILIES, Size
    from afd_shim.testing.tokenizer import write_tokenizer

    number = {key: value for key, value in LITE_CONFIG.items() if isinstance(value, int)}
    size = Size(
        hidden=number["hidden_size"],
        layers=_LITE_LAYERS,
        heads=number["num_attention_heads"],
        experts=number["n_routed_experts"],
        moe_intermediate=number["moe_intermediate_size"],
        dense_intermediate=number["intermediate_size"],
    )
    family = FAMILIES["deepseek-v2"]
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for spec in family.tensors(size):
        values = torch.randn(spec.shape, generator=generator, device=device) * spec.std + spec.mean
        tensors[spec.name] = values.to(torch.bfloat16).cpu()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = family.config(size) | {
        "architectures": [family.architecture],
        "torch_dtype": "bfloat16",
        "num_experts_per_tok": number["num_experts_per_tok"],
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    return path
