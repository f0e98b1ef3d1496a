"""Everything that one GPU can show, in one go: `python3 -m tests.gpu.run_one_gpu --out DIR`.

Layers bit for bit, engines token for token through two processes and TCP, graphs, memory, what NCCL
does with one GPU, and decode throughput on DeepSeek-V2-Lite's shape. Sections do not depend on each
other; `--sections` picks some. Exit status 0 means that everything held.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.deployments import Deployment, compare_outputs, run_all, run_module
from tests.gpu.evidence import Evidence, tail
from tests.gpu.layers import compare, gate_name
from tests.gpu.loss import kill_in_mid_decode
from tests.gpu.models import MODELS, write_model
from tests.gpu.throughput import lite_throughput

SECTIONS = ("layers", "nccl", "record", "engines", "memory", "exchange", "loss", "throughput")
LAYER_MODELS = ",".join(MODELS)
EAGER_MODELS = "deepseek-v2,qwen3-moe,olmoe,qwen3.5-moe,qwen3-moe-fp8"
GRAPH_MODELS = "qwen3-moe,deepseek-v2"
WITHOUT_SHARED_EXPERTS = ("qwen3-moe",)

_TOKENS = 32
_MIN_DISTINCT = 6


def engine(model: str, **more: object) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` for a small engine."""
    return {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.1,
        "enable_prefix_caching": False,
        "attention_backend": MODELS[model].attention_backend,
        "enforce_eager": True,
        **MODELS[model].engine,
        **more,
    }


def graph_engine(model: str, mode: str) -> dict[str, Any]:
    """As `engine`, compiled, with CUDA graphs of a few sizes."""
    return engine(
        model, enforce_eager=False, compilation_config={"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8]}
    )


def deployments(checkpoints: Path, eager_models: list[str], graph_models: list[str]) -> list[Deployment]:
    """The engines: unsplit and split, eager and with graphs."""
    work = {"tokens": _TOKENS}
    found = []
    for model in eager_models:
        path = write_model(model, checkpoints)
        found.append(Deployment(f"{model} unsplit eager", path, engine(model), work))
        for gate in MODELS[model].gate_placements:
            split = {"compute_gate_on_attention": gate}
            name = f"{model} split eager gate {gate_name(model, on_attention=gate)}"
            found.append(Deployment(name, path, engine(model), work, split=split))
    for model in graph_models:
        path = write_model(model, checkpoints)
        found.append(Deployment(f"{model} unsplit PIECEWISE", path, graph_engine(model, "PIECEWISE"), work))
        # Stock MoE layers return memory that moves, so they cannot run between graphs: compiled only.
        like_ours = work | {"split_at_moe": True}
        found.append(Deployment(f"{model} unsplit compiled-alike", path, graph_engine(model, "NONE"), like_ours))
        for gate in MODELS[model].gate_placements:
            split = {"compute_gate_on_attention": gate}
            name = f"{model} split PIECEWISE gate {gate_name(model, on_attention=gate)}"
            # Asked for what vLLM does by default, which holds full graphs: the Attention role turns it down.
            found.append(Deployment(name, path, graph_engine(model, "FULL_AND_PIECEWISE"), work, split=split))
    return found


class Run:
    """The sections; what several need is started once, at the beginning."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.layer_models = options.layer_models.split(",")
        self.eager_models = options.eager_models.split(",") if options.eager_models else []
        self.graph_models = options.graph_models.split(",") if options.graph_models else []
        self._pool = ThreadPoolExecutor(8)
        self._layers: list[Future[int]] = []
        self._nccl: Future[int] | None = None
        self._engines: Future[dict[str, dict[str, Any]]] | None = None

    def start(self, sections: list[str]) -> None:
        """Start what may run side by side: comparisons care about results, not about time."""
        for model in {*self.layer_models, *self.eager_models, *self.graph_models, "qwen3-moe"}:
            write_model(model, self.checkpoints)
        if "layers" in sections:
            for stage in ("native", "split"):
                arguments = (
                    *(stage, "--models", ",".join(self.layer_models)),
                    *("--checkpoints", str(self.checkpoints), "--out", str(self.folder / f"{stage}.pt")),
                )
                self._layers.append(
                    self._pool.submit(
                        run_module, "tests.gpu.layers", *arguments, timeout=240, log=self.folder / f"{stage}.log"
                    )
                )
        if "nccl" in sections:
            checks = (str(self.folder / "peers.json"), "world1", "same_gpu", "gloo")
            self._nccl = self._pool.submit(
                run_module, "tests.gpu.peers", *checks, timeout=180, log=self.folder / "peers.log"
            )
        if {"engines", "memory"} & set(sections):
            self._engines = self._pool.submit(
                run_all,
                deployments(self.checkpoints, self.eager_models, self.graph_models),
                self.folder / "engines",
                timeout=self.options.engine_seconds,
                at_once=self.options.at_once,
            )

    def layers(self, evidence: Evidence) -> bool:
        """The split MoE block against the native one, bit for bit."""
        for future in self._layers:
            future.result()
        rows = compare(self.folder / "native.pt", self.folder / "split.pt")
        evidence.table("layers", rows)
        if any("error" in row for row in rows):
            for stage in ("native", "split"):
                evidence.text(f"```\n{stage}:\n{tail(self.folder / f'{stage}.log', 60)}\n```")
        covered = {row["model"] for row in rows if row.get("equal")}
        return covered == set(self.layer_models) and all(
            row.get("equal") and row["smallest_peak"] > 0 and row["payload"] for row in rows
        )

    def nccl(self, evidence: Evidence) -> bool:
        """What NCCL and the connector's own logic do with one GPU."""
        assert self._nccl is not None
        self._nccl.result()
        found = json.loads((self.folder / "peers.json").read_text())
        rows = [{"case": case, "ok": result["ok"], "seconds": result.get("seconds")} for case, result in found.items()]
        evidence.table("nccl", rows)
        evidence.data("peers", found)
        if all(row["ok"] for row in rows):
            message = next(r["message"] for r in found["same_gpu"].values() if isinstance(r, dict) and "message" in r)
            evidence.text(f"Two ranks on one GPU: {message}")
            return True
        evidence.text(f"```\n{json.dumps(found, indent=1)[:4000]}\n{tail(self.folder / 'peers.log', 60)}\n```")
        return False

    def engines(self, evidence: Evidence) -> bool:
        """Generated tokens and log-probabilities, split against unsplit."""
        found = self._engine_results()
        rows = []
        for name, result in found.items():
            model, kind, mode = name.split(" ")[:3]
            row: dict[str, Any] = {"run": name}
            if "error" in result:
                rows.append(row | {"error": result["error"][-200:]})
                evidence.text(f"```\n{name}: {result['error'][-5000:]}\n```")
                continue
            row |= {"start_s": result["start_s"], "graphs": result["graphs"]["captured"] or None}
            if kind == "split":
                for reference in ("eager", "PIECEWISE", "compiled-alike") if mode == "PIECEWISE" else ("eager",):
                    expected = found.get(f"{model} unsplit {reference}", {"error": ""})
                    if "error" not in expected:
                        rows.append(row | {"against": f"unsplit {reference}"} | compare_outputs(expected, result))
            else:
                rows.append(row | {"against": "", "tokens_equal": None})
        evidence.table("engines", rows)
        held = [row for row in rows if row.get("tokens_equal") is not None]
        exact = [row for row in held if must_be_exact(row)]
        evidence.text(
            "Eager runs must be equal in tokens and log-probabilities. So must PIECEWISE runs of models without shared "
            "experts, against an unsplit engine compiled alike (split at the MoE layers too, no graphs): there "
            "Inductor fuses the same pieces. Elsewhere it rounds differently, because it keeps float32 between fused "
            "operations: compared and reported, not required."
        )
        return (
            not any("error" in row for row in rows)
            and bool(exact)
            and all(row["tokens_equal"] and row["logprobs_equal"] for row in exact)
            and all(row["distinct_tokens"] >= _MIN_DISTINCT for row in held)
            and all(self._graphs_are_ours(found[row["run"]]) for row in held if " PIECEWISE " in row["run"])
        )

    @staticmethod
    def _graphs_are_ours(result: dict[str, Any]) -> bool:
        graphs, stats = result["graphs"], result["stats"]
        ran = stats["exchanges"] == stats["forwards"] * stats["moe_layers"] and stats["real_rows"] > 0
        return bool(graphs["mode"] == "PIECEWISE" and graphs["captured"] and graphs["split_at_moe"] and ran)

    def memory(self, evidence: Evidence) -> bool:
        """What each role holds on the device: numbers from the allocator."""
        found = self._engine_results()
        rows, held = [], True
        for model in self.eager_models:
            unsplit = found.get(f"{model} unsplit eager", {})
            split = next((r for name, r in found.items() if name.startswith(f"{model} split eager")), {})
            if "memory" not in unsplit or "memory" not in split:
                held = False
                continue
            roles = {"unsplit": unsplit, "attention": split, "ffn": split["ffn"]}
            rows += [
                {"model": model, "role": role}
                | {f"{key}_MB": value / 1e6 for key, value in result["memory"].items()}
                | {
                    "read_MB": result["stats"]["weight_bytes_read"] / 1e6 if "stats" in result else None,
                    "owned_MB": result["stats"]["weight_bytes_owned"] / 1e6 if "stats" in result else None,
                }
                for role, result in roles.items()
            ]
            whole, attention, ffn = (roles[role]["memory"] for role in roles)
            # Padding by kernels may add to the FFN's; nothing may be held twice.
            together = attention["parameters"] + ffn["parameters"]
            held = held and 0.98 <= together / whole["parameters"] <= 1.02 and ffn["kv_cache"] == 0
            held = held and attention["kv_cache"] == whole["kv_cache"]
        evidence.table("memory", rows)
        return held and bool(rows)

    def record(self, evidence: Evidence) -> bool:
        """The kernel of vLLM that records expert load, against counting by hand."""
        return self._script(evidence, "record", "tests.gpu.record_kernel")

    def exchange(self, evidence: Evidence) -> bool:
        """What the TCP connector adds to a bare transfer between two processes on this GPU."""
        return self._script(evidence, "exchange", "benchmarks.gpu_exchange", "--transport", "tcp")

    def _script(self, evidence: Evidence, name: str, module: str, *arguments: str) -> bool:
        """Run a module that writes its rows as JSON to `--out`, and exits with 0 if they hold."""
        log, out = self.folder / f"{name}.log", self.folder / f"{name}.json"
        status = run_module(module, "--out", str(out), *arguments, timeout=120, log=log)
        evidence.table(name, json.loads(out.read_text()) if out.exists() else [])
        if status:
            evidence.text(f"```\n{tail(log, 40)}\n```")
        return status == 0

    def loss(self, evidence: Evidence) -> bool:
        """A role killed in mid-decode, TCP; with nothing beside it, because it is about time."""
        path = write_model("qwen3-moe", self.checkpoints)
        rows = kill_in_mid_decode(
            "qwen3-moe", path, self.folder, connector="TcpAFDConnector", gpus=("0", "0"), timeout=200
        )
        evidence.table("loss", rows)
        for row in rows:
            if not row["ok"]:
                for log in sorted(self.folder.glob(f"loss-{row['killed']}-*.log")):
                    evidence.text(f"```\n{log.name}:\n{tail(log, 60)}\n```")
        return all(row["ok"] for row in rows)

    def throughput(self, evidence: Evidence) -> bool:
        """Decode throughput on DeepSeek-V2-Lite's shape, both roles on this GPU, TCP between them."""
        rows = lite_throughput(
            self.folder,
            gpus=("0", "0"),
            connector="TcpAFDConnector",
            timeout=self.options.lite_seconds,
            evidence=evidence,
        )
        evidence.table("throughput", rows)
        evidence.text(
            "step: one decode step of the whole engine. exchange: the part of it between sending a layer's input and "
            "holding its output, which over TCP contains the wait for Attention's own kernels. experts: the FFN's "
            "device time for one layer, gaps between its launches included. Both roles share one GPU here: a split "
            "engine can only lose. What eager launches cost on this machine is in the unsplit eager rows."
        )
        return all("error" not in row for row in rows)

    def _engine_results(self) -> dict[str, dict[str, Any]]:
        assert self._engines is not None
        return self._engines.result()


def must_be_exact(row: dict[str, Any]) -> bool:
    """Whether a comparison has no reason to differ: see the text of the engines' section."""
    model = row["run"].split(" ")[0]
    alike = row["against"] == "unsplit compiled-alike" and model in WITHOUT_SHARED_EXPERTS
    return " eager " in row["run"] or alike


def main() -> int:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--layer-models", default=LAYER_MODELS)
    parser.add_argument("--eager-models", default=EAGER_MODELS)
    parser.add_argument("--graph-models", default=GRAPH_MODELS)
    parser.add_argument("--at-once", type=int, default=6, help="deployments that run side by side")
    parser.add_argument("--engine-seconds", type=float, default=300.0)
    parser.add_argument("--lite-seconds", type=float, default=240.0)
    options = parser.parse_args()
    sections = [section for section in SECTIONS if section in options.sections.split(",")]
    folder = Path(tempfile.mkdtemp(prefix="afd-gpu-"))
    run = Run(options, folder)
    evidence = Evidence("one-gpu", "One GPU: what the split shows", options.out)

    def start(_: Evidence) -> bool:
        run.start(sections)
        return True

    evidence.section("start", start)
    titles: dict[str, tuple[str, Callable[[Evidence], bool]]] = {
        "layers": ("Split MoE blocks equal the native ones, bit for bit", run.layers),
        "nccl": ("NCCL and the connector's logic on one GPU", run.nccl),
        "record": ("Recorded expert load equals counting by hand", run.record),
        "engines": ("Engines through two processes and TCP", run.engines),
        "memory": ("Device memory by role", run.memory),
        "exchange": ("The exchange over TCP against a bare transfer", run.exchange),
        "loss": ("A role killed in mid-decode", run.loss),
        "throughput": ("Decode throughput, DeepSeek-V2-Lite's shape", run.throughput),
    }
    for section in sections:
        evidence.section(*titles[section])
    return evidence.finish()


if __name__ == "__main__":
    sys.exit(main())
