"""Attention on one GPU, FFN on the others, NCCL between: `python3 -m tests.gpu.run_two_gpus --out DIR`.

The connector alone, what it adds to a bare transfer, engines token for token and twenty times over,
an FFN killed in mid-decode, decode throughput against tensor parallelism on the same GPUs, and expert
load balancing over two FFN ranks. Sections do not depend on each other; `--sections` picks some.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.gpu.balancing import balance
from tests.gpu.deployments import Deployment, compare_outputs, run_all, run_module
from tests.gpu.evidence import Evidence, tail
from tests.gpu.layers import gate_name
from tests.gpu.loss import kill_in_mid_decode
from tests.gpu.models import MODELS, write_model
from tests.gpu.run_one_gpu import engine, graph_engine, must_be_exact
from tests.gpu.throughput import lite_throughput

SECTIONS = ("peers", "exchange", "engines", "loss", "throughput", "eplb")
NCCL = "P2pNcclAFDConnector"
REPEAT = 20


class Run:
    """The sections; each uses both GPUs."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder

    def peers(self, evidence: Evidence) -> bool:
        """Bare connectors over NCCL: values, bytes, a dead peer."""
        log, out = self.folder / "peers.log", self.folder / "peers.json"
        run_module("tests.gpu.peers", str(out), "nccl", "kill", timeout=150, log=log, gpus="0,1")
        found = json.loads(out.read_text()) if out.exists() else {}
        evidence.table("peers", [{"case": case, "ok": case_found["ok"]} for case, case_found in found.items()])
        held = found.keys() == {"nccl", "kill"} and all(result["ok"] for result in found.values())
        shown = json.dumps(found, indent=1)[:3000] + ("" if held else f"\n{tail(log, 80)}")
        evidence.text(f"```\n{shown}\n```")
        return held

    def exchange(self, evidence: Evidence) -> bool:
        """What the connector adds to a bare transfer, NCCL and TCP."""
        log, out = self.folder / "exchange.log", self.folder / "exchange.json"
        arguments = ("--out", str(out), "--transport", "nccl", "--transport", "tcp", "--gpus", "0,1")
        status = run_module("benchmarks.gpu_exchange", *arguments, timeout=200, log=log, gpus="0,1")
        evidence.table("exchange", json.loads(out.read_text()) if out.exists() else [])
        if status:
            evidence.text(f"```\n{tail(log, 40)}\n```")
        return status == 0

    def engines(self, evidence: Evidence) -> bool:
        """Generated tokens over NCCL against unsplit, eager and PIECEWISE, every generation the same."""
        runs = []
        for model in ("deepseek-v2", "qwen3-moe"):
            path = write_model(model, self.folder / "checkpoints")
            for mode in ("eager", "PIECEWISE"):
                kind = engine(model) if mode == "eager" else graph_engine(model, "FULL_AND_PIECEWISE")
                unsplit = engine(model) if mode == "eager" else graph_engine(model, "PIECEWISE")
                runs.append(Deployment(f"{model} unsplit {mode}", path, unsplit, {"tokens": 32}))
                if mode == "PIECEWISE":
                    alike = {"tokens": 32, "split_at_moe": True}
                    runs.append(Deployment(f"{model} unsplit compiled-alike", path, graph_engine(model, "NONE"), alike))
                for gate in MODELS[model].gate_placements:
                    split = {"connector": NCCL, "compute_gate_on_attention": gate}
                    name = f"{model} split {mode} gate {gate_name(model, on_attention=gate)}"
                    work = {"tokens": 32, "repeat": REPEAT}
                    runs.append(Deployment(name, path, kind, work, split=split, gpus=("0", "1")))
        found = run_all(
            runs, self.folder / "engines", timeout=self.options.engine_seconds, at_once=self.options.at_once
        )
        rows = []
        for name, result in found.items():
            model, layout, mode = name.split(" ")[:3]
            if "error" in result:
                rows.append({"run": name, "error": result["error"][-200:]})
                evidence.text(f"```\n{name}: {result['error'][-5000:]}\n```")
            elif layout == "split":
                for reference in ("eager", "PIECEWISE", "compiled-alike") if mode == "PIECEWISE" else ("eager",):
                    expected = found[f"{model} unsplit {reference}"]
                    if "error" not in expected:
                        compared = compare_outputs(expected, result)
                        row = {"run": name, "against": f"unsplit {reference}", "repeats": result["repeats"]}
                        rows.append(row | {"repeats_equal": result["repeats_equal"]} | compared)
        evidence.table("engines", rows)
        held = [row for row in rows if "tokens_equal" in row]
        return (
            len(held) == len(rows) > 0
            and all(row["repeats_equal"] for row in held)
            and all(row["tokens_equal"] and row["logprobs_equal"] for row in held if must_be_exact(row))
        )

    def loss(self, evidence: Evidence) -> bool:
        """A role killed in mid-decode."""
        path = write_model("qwen3-moe", self.folder / "checkpoints")
        rows = kill_in_mid_decode("qwen3-moe", path, self.folder, connector=NCCL, gpus=("0", "1"), timeout=150)
        evidence.table("loss", rows)
        return all(row["ok"] for row in rows)

    def throughput(self, evidence: Evidence) -> bool:
        """Decode throughput, split over two GPUs against tensor parallelism on the same two."""
        rows = lite_throughput(
            self.folder,
            gpus=("0", "1"),
            connector=NCCL,
            timeout=self.options.lite_seconds,
            evidence=evidence,
            unsplit_tp=2,
        )
        evidence.table("throughput", rows)
        evidence.text(
            "exchange: Attention's own thread in send and receive, which over NCCL only enqueue: device time of wire "
            "and experts is in `rest`. experts: the FFN's device time for one layer."
        )
        return all("error" not in row for row in rows)

    def eplb(self, evidence: Evidence) -> bool:
        """Expert load balancing over two FFN ranks, Attention beside one of them over TCP."""
        rows = balance(self.folder, timeout=self.options.eplb_seconds, evidence=evidence)
        evidence.table("eplb", rows)
        return bool(rows) and all(row.get("ok") for row in rows)


def main() -> int:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--at-once", type=int, default=6, help="deployments that run side by side")
    parser.add_argument("--engine-seconds", type=float, default=240.0)
    parser.add_argument("--lite-seconds", type=float, default=240.0)
    parser.add_argument("--eplb-seconds", type=float, default=240.0)
    options = parser.parse_args()
    run = Run(options, Path(tempfile.mkdtemp(prefix="afd-gpu-")))
    evidence = Evidence("two-gpus", "Two GPUs: Attention on one, FFN on the other", options.out)
    titles: dict[str, tuple[str, Callable[[Evidence], bool]]] = {
        "peers": ("The connector alone, over NCCL", run.peers),
        "exchange": ("The exchange against a bare transfer", run.exchange),
        "engines": (f"Engines over NCCL, {REPEAT} generations each", run.engines),
        "loss": ("A role killed in mid-decode", run.loss),
        "throughput": ("Decode throughput, DeepSeek-V2-Lite's shape, against TP=2", run.throughput),
        "eplb": ("Expert load balancing over two FFN ranks", run.eplb),
    }
    for section in SECTIONS:
        if section in options.sections.split(","):
            evidence.section(*titles[section])
    return evidence.finish()


if __name__ == "__main__":
    sys.exit(main())
