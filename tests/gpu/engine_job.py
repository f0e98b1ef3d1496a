"""One engine in one process: unsplit, the Attention role or the FFN role; told by a JSON file what to do.

    python3 -m tests.gpu.engine_job JOB.json

The engine runs in this very process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), so batches are formed the
same way in every run. An FFN job serves until the file `stop` of its job appears.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PROMPTS"]

PROMPTS = (
    "The capital of France is",
    "A mixture of experts routes each token to a few of many feed-forward networks, and",
    "def main():",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen",
)


def memory(worker: Any) -> dict[str, int]:
    """Bytes on the device: what the allocator says, and what the model's parameters and KV cache take."""
    import torch

    worker = getattr(worker, "worker", worker)
    model = worker.model_runner.get_model()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    caches: list[Any] = getattr(worker.model_runner, "kv_caches", [])
    tensors = [t for cache in caches for t in (cache if isinstance(cache, (list, tuple)) else [cache])]
    kv = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    on_gpu = torch.cuda.is_available()
    return {
        "allocated": torch.cuda.memory_allocated() if on_gpu else 0,
        "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "parameters": sum(storages.values()),
        "kv_cache": sum(kv.values()),
    }


def graphs(worker: Any) -> dict[str, Any]:
    """How many CUDA graphs vLLM captured, and in what mode it runs."""
    from vllm.compilation.counter import compilation_counter

    worker = getattr(worker, "worker", worker)
    compilation = worker.vllm_config.compilation_config
    return {
        "captured": compilation_counter.num_cudagraph_captured,
        "mode": str(compilation.cudagraph_mode),
        "compile": str(compilation.mode),
        "split_at_moe": [op for op in compilation.splitting_ops or [] if "moe_forward" in op],
    }


def generate(llm: Any, tokens: int, prompts: Sequence[str] = PROMPTS) -> list[dict[str, Any]]:
    """Complete every prompt greedily in one batch: token ids and their log-probabilities."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                step[token].logprob
                for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
            ],
        }
        for output in outputs
    ]


def decode_speed(llm: Any, batches: list[int], vocabulary: int) -> list[dict[str, float]]:
    """Decode throughput at several batch sizes, in tokens per second, prefill taken off.

    Each batch is generated twice, with 2 and with 2 + 64 tokens; the difference is decoding alone.
    """
    from vllm import SamplingParams

    steps, rows = 64, []
    proxy = _proxy()
    for batch in batches:
        prompts = [{"prompt_token_ids": [(7 * i + j) % vocabulary for j in range(8)]} for i in range(batch)]
        seconds, exchanging = [], []
        for tokens in (2, 2, 2 + steps, 2 + steps):  # each length once to warm up
            before = proxy.connector.stats.exchange_seconds if proxy else 0.0
            started = time.perf_counter()
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
            exchanging.append((proxy.connector.stats.exchange_seconds if proxy else 0.0) - before)
        step = (seconds[3] - seconds[1]) / steps
        rows.append(
            {
                "batch": batch,
                "tokens_per_s": batch / step,
                "step_ms": 1e3 * step,
                "exchange_ms": 1e3 * (exchanging[3] - exchanging[1]) / steps,
            }
        )
    return rows


@contextlib.contextmanager
def exclusively(lock: str | None) -> Iterator[None]:
    """Measure alone: engines may start side by side, and take turns here."""
    if lock is None:
        yield
        return
    with Path(lock).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _proxy() -> Any:
    from afd_shim import role

    return role.current().proxy if role.active() else None


class LoadCount:
    """What every expert is chosen for, counted by hand where Attention owns the gate."""

    def __init__(self, top_k: int) -> None:
        import torch

        proxy = _proxy()
        exchange = proxy.exchange
        self.loads: dict[int, Any] = {}

        def counted(layer: int, hidden_states: Any, router_logits: Any) -> Any:
            real = min(hidden_states.shape[0], proxy._real_rows)
            # Of equal logits vLLM's kernels take the first expert, as a stable sort does.
            chosen = router_logits[:real].float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
            load = torch.bincount(chosen.flatten(), minlength=router_logits.shape[-1])
            self.loads[layer] = self.loads.get(layer, 0) + load
            return exchange(layer, hidden_states, router_logits)

        proxy.exchange = counted

    def tell(self) -> dict[str, list[int]]:
        """Tokens per logical expert, by layer."""
        return {str(layer): load.tolist() for layer, load in sorted(self.loads.items())}


def ask_ffn(job: dict[str, Any], phase: int) -> list[dict[str, Any]]:
    """Let the FFN job say how its expert load stands; nothing is in flight meanwhile."""
    Path(f"{job['inspect']}.{phase}.ask").touch()
    answer = Path(f"{job['inspect']}.{phase}.told")
    while not answer.exists():
        time.sleep(0.05)
    told: list[dict[str, Any]] = json.loads(answer.read_text())
    return told


def expert_load(worker: Any) -> dict[str, Any]:
    """How the expert load of one FFN rank stands: counters, placement, and the window summed over its steps."""
    balancer = getattr(worker, "worker", worker).balancer
    model = balancer._eplb.model
    return {
        "counters": balancer.counters(),
        "placement": model.physical_to_logical_map.tolist(),
        "window": model.expert_load_window.sum(dim=0).tolist(),
    }


def tell_load(llm: Any, job: dict[str, Any]) -> None:
    """Answer an `ask_ffn`, if there is one."""
    for ask in Path(job["inspect"]).parent.glob("*.ask"):
        answer = ask.with_suffix(".told")
        if answer.exists():
            continue
        told = None
        while told != (again := llm.collective_rpc(expert_load)):  # until every rank has ticked
            told = again
            time.sleep(0.2)
        answer.with_suffix(".part").write_text(json.dumps(told))
        answer.with_suffix(".part").rename(answer)


def time_experts() -> dict[str, Any]:
    """Measure, on the FFN, how long the device computes per batch; filled while the loop serves."""
    import torch

    from afd_shim.ffn.serving import ServingLoop

    compute = ServingLoop._compute
    spans: list[tuple[int, Any, Any]] = []

    def timed(self: ServingLoop, batch: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        output = compute(self, batch)
        end.record()
        spans.append((batch.hidden_states.shape[0], start, end))
        return output

    ServingLoop._compute = timed  # type: ignore[method-assign]
    return {"spans": spans}


def expert_times(spans: list[tuple[int, Any, Any]]) -> list[dict[str, float]]:
    """Median microseconds per batch, by rows."""
    import statistics

    by_rows: dict[int, list[float]] = {}
    for rows, start, end in spans:
        by_rows.setdefault(rows, []).append(1e3 * start.elapsed_time(end))
    return [
        {"rows": rows, "batches": len(times), "experts_us": statistics.median(times)}
        for rows, times in sorted(by_rows.items())
    ]


def exchange_splitting_ops() -> list[str]:
    """Where the Attention role's graphs are split, for an unsplit engine: what Inductor fuses is then the same."""
    from vllm.config import CompilationConfig

    from afd_shim.config.graphs import EXCHANGE_OPS

    updates = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
    return [*CompilationConfig._attention_ops, *updates, *EXCHANGE_OPS]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, do the work, and return what the parent wants to know."""
    from vllm import LLM

    result: dict[str, Any] = {"name": job["name"], "role": job["role"]}
    timed = time_experts() if job.get("time_experts") else None
    if job.get("split_at_moe"):
        job["engine"]["compilation_config"]["splitting_ops"] = exchange_splitting_ops()
    started = time.perf_counter()
    llm = LLM(model=job["model"], **job["engine"])
    result["start_s"] = time.perf_counter() - started
    if job["role"] == "ffn":
        serve(llm, job)
    else:
        result |= work(llm, job)
    result["memory"] = llm.collective_rpc(memory)[0]
    if job["role"] != "unsplit":
        result["stats"] = llm.collective_rpc("afd_stats")[0]
    if timed is not None:
        result["experts"] = expert_times(timed["spans"])
    result["version"] = _version()
    llm.llm_engine.engine_core.shutdown()
    return result


def serve(llm: Any, job: dict[str, Any]) -> None:
    """Let the FFN's loop serve until the parent has seen enough."""
    Path(job["ready"]).touch()
    while not Path(job["stop"]).exists():
        if job.get("inspect"):
            tell_load(llm, job)
        llm.collective_rpc("check_health")  # in this process nothing else tells that the loop has failed
        time.sleep(0.05)


def work(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Generate what the job asks for, and measure."""
    result: dict[str, Any] = {}
    if job.get("tokens"):
        runs = [generate(llm, job["tokens"]) for _ in range(job.get("repeat", 1))]
        result["outputs"] = runs[0]
        result["repeats"] = len(runs)
        result["repeats_equal"] = all(run == runs[0] for run in runs)
    if job.get("phases"):
        count = LoadCount(job["top_k"])
        result["phases"] = []
        for phase, tokens in enumerate(job["phases"]):
            outputs = generate(llm, tokens, job.get("prompts", PROMPTS))
            told = ask_ffn(job, phase) if job.get("inspect") else None
            result["phases"].append({"outputs": outputs, "counted": count.tell(), "told": told})
    if job.get("batches"):
        with exclusively(job.get("lock")):
            result["speed"] = decode_speed(llm, job["batches"], job["vocabulary"])
    result["graphs"] = llm.collective_rpc(graphs)[0]
    return result


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def main() -> None:
    """Run the job; the result file appears whole or not at all."""
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        result = run(job)
    except Exception:  # noqa: BLE001 - whatever it is, the parent reads it in the log
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an engine that failed half-way may keep the interpreter from ending
    out = Path(job["out"])
    out.with_suffix(".part").write_text(json.dumps(result))
    out.with_suffix(".part").rename(out)
    sys.stdout.flush()
    os._exit(0)  # what is left of the engine ends with the process


if __name__ == "__main__":
    main()
