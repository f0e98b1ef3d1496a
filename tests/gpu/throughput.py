"""Decode throughput on DeepSeek-V2-Lite's shape with random weights, split against unsplit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gpu.deployments import Deployment, run_all
from tests.gpu.evidence import Evidence
from tests.gpu.models import LITE_CONFIG, write_lite_config

__all__ = ["lite_throughput"]

BATCHES = (1, 16, 64, 256)


def lite_throughput(
    folder: Path, *, gpus: tuple[str, str], connector: str, timeout: float, evidence: Evidence, unsplit_tp: int = 1
) -> list[dict[str, Any]]:
    """Run DeepSeek-V2-Lite's shape unsplit and split, started together, measured in turns; rows per batch size."""
    path = write_lite_config(folder)
    common: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": max(BATCHES),
        "kv_cache_memory_bytes": 4 << 30,
        "gpu_memory_utilization": 0.2,
        "enable_prefix_caching": False,
        "attention_backend": "TRITON_MLA",
    }
    folder = folder / "lite"
    folder.mkdir(exist_ok=True)
    work = {"batches": list(BATCHES), "vocabulary": LITE_CONFIG["vocab_size"], "lock": str(folder / "lock")}
    graphs = {"compilation_config": {"cudagraph_capture_sizes": list(BATCHES)}}
    parallel = {"tensor_parallel_size": unsplit_tp}
    tp_gpus = (",".join(str(i) for i in range(unsplit_tp)), "")
    split = {"connector": connector}
    runs = [
        Deployment("unsplit full graphs", path, common | graphs | parallel, work, gpus=tp_gpus),
        Deployment("unsplit eager", path, common | {"enforce_eager": True} | parallel, work, gpus=tp_gpus),
        Deployment(
            "split PIECEWISE", path, common | graphs, work, split=split, gpus=gpus, ffn_work={"time_experts": True}
        ),
        Deployment(
            "split eager",
            path,
            common | {"enforce_eager": True},
            work,
            split=split,
            gpus=gpus,
            ffn_work={"time_experts": True},
        ),
    ]
    found = run_all(runs, folder, timeout=timeout, at_once=len(runs))
    base = {
        kind: {row["batch"]: row["tokens_per_s"] for row in found[f"unsplit {kind}"].get("speed", [])}
        for kind in ("full graphs", "eager")
    }
    rows: list[dict[str, Any]] = []
    layers = int(str(LITE_CONFIG["num_hidden_layers"])) - 1
    for name, result in found.items():
        if "error" in result:
            rows.append({"run": name, "error": result["error"][-200:]})
            evidence.text(f"```\n{name}: {result['error'][-4000:]}\n```")
            continue
        experts = {row["rows"]: row["experts_us"] for row in result.get("ffn", {}).get("experts", [])}
        for row in result["speed"]:
            exchange_us = 1e3 * row["exchange_ms"] / layers
            rows.append(
                {
                    "run": name,
                    "graphs": result["graphs"]["mode"],
                    "batch": row["batch"],
                    "tokens_per_s": row["tokens_per_s"],
                    "of_unsplit": _share(row, base["full graphs"]),
                    "of_unsplit_eager": _share(row, base["eager"]),
                    "step_ms": row["step_ms"],
                    "exchange_us_per_layer": exchange_us or None,
                    "experts_us_per_layer": experts.get(row["batch"]),
                    "rest_us_per_layer": (1e3 * row["step_ms"] / layers - exchange_us) if exchange_us else None,
                }
            )
    return rows


def _share(row: dict[str, Any], base: dict[int, float]) -> float | None:
    return row["tokens_per_s"] / base[row["batch"]] if row["batch"] in base else None
