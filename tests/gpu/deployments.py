"""Engine jobs as subprocesses: start them together, wait for them, compare what they generated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afd_shim.testing.deployments import afd_config
from afd_shim.testing.servers import free_port

__all__ = ["ENVIRONMENT", "Deployment", "compare_outputs", "run_all", "run_module"]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
"""FlashInfer and DeepGEMM are not on the GPU machine; the engine runs in the job's own process."""


@dataclass(slots=True)
class Deployment:
    """One engine, or an Attention and an FFN engine, on given GPUs.

    Attributes:
        name: for files and messages.
        model: a checkpoint directory.
        engine: keyword arguments of vLLM's `LLM`, for both roles.
        work: what the generating engine does (see `engine_job`).
        split: None for unsplit vLLM; else keys of the `afd` configuration.
        gpus: the GPU of the generating engine, and that of the FFN. Comma-separated ones for several.
        ffn_engine: more arguments for the FFN engine.
        env: more environment variables.

    """

    name: str
    model: Path
    engine: Mapping[str, Any]
    work: Mapping[str, Any]
    split: Mapping[str, Any] | None = None
    gpus: tuple[str, str] = ("0", "0")
    ffn_engine: Mapping[str, Any] = field(default_factory=dict)
    ffn_work: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def run(self, folder: Path, timeout: float) -> dict[str, Any]:
        """Run to the end; what the generating engine reported, the FFN's report under `ffn`.

        Raises:
            RuntimeError: an engine failed or took too long; the end of its log is in the message.

        """
        folder = folder / self.name
        folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout
        if self.split is None:
            (job,) = jobs = [self._start(folder, "unsplit", self.engine, self.work, self.gpus[0])]
        else:
            port = free_port()
            roles = {
                role: {**self.engine, "additional_config": afd_config(role, port, **self.split)}
                for role in ("attention", "ffn")
            }
            jobs = [
                self._start(folder, "attention", roles["attention"], self.work, self.gpus[0]),
                self._start(folder, "ffn", {**roles["ffn"], **self.ffn_engine}, self.ffn_work, self.gpus[1]),
            ]
            job = jobs[0]
        try:
            result = job.wait(deadline, others=jobs[1:])
            for other in jobs[1:]:
                other.stop.touch()
                result["ffn"] = other.wait(deadline, others=[])
            return result
        finally:
            for started in jobs:
                started.kill()

    def _start(self, folder: Path, role: str, engine: Mapping[str, Any], work: Mapping[str, Any], gpus: str) -> _Job:
        job = folder / f"{role}.json"
        spec = {
            "name": self.name,
            "role": role,
            "model": str(self.model),
            "engine": dict(engine),
            "out": str(folder / f"{role}.result"),
            "stop": str(folder / f"{role}.stop"),
            "ready": str(folder / f"{role}.ready"),
            **work,
        }
        job.write_text(json.dumps(spec))
        env = os.environ | ENVIRONMENT | dict(self.env)
        if "CUDA_VISIBLE_DEVICES" not in self.env:
            env["CUDA_VISIBLE_DEVICES"] = gpus
        log = folder / f"{role}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.engine_job", str(job)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        return _Job(f"{self.name}/{role}", process, log, Path(spec["out"]), Path(spec["stop"]))


@dataclass(slots=True)
class _Job:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    out: Path
    stop: Path

    def wait(self, deadline: float, others: Sequence[_Job]) -> dict[str, Any]:
        while not self.out.exists():
            if time.monotonic() > deadline:
                tails = "\n".join(f"{job.name}:\n{job.tail()}" for job in (self, *others))
                raise RuntimeError(f"{self.name} took too long:\n{tails}")
            for job in (self, *others):
                if job.process.poll() is not None and not job.out.exists():
                    raise RuntimeError(f"{job.name} ended with {job.process.returncode}:\n{job.tail()}")
            time.sleep(0.1)
        result: dict[str, Any] = json.loads(self.out.read_text())
        return result

    def tail(self) -> str:
        """The last lines of the log, where the reason is."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-45:])

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_all(
    deployments: Sequence[Deployment], folder: Path, *, timeout: float, at_once: int = 4
) -> dict[str, dict[str, Any]]:
    """Run several deployments, some at a time; a failed one has only the key `error`."""

    def run(deployment: Deployment) -> dict[str, Any]:
        try:
            return deployment.run(folder, max(1.0, end - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - one failure is a result, the others still count
            return {"error": f"{type(error).__name__}: {error}"}

    end = time.monotonic() + timeout
    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip((d.name for d in deployments), pool.map(run, deployments), strict=True))


def run_module(module: str, *arguments: str, timeout: float, log: Path, gpus: str = "0") -> int:
    """Run a module of this repository as a process; its exit status (-9 where it took too long)."""
    env = os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": gpus}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


def compare_outputs(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Tokens and log-probabilities of two runs: equal, or where they part and by how much."""
    total = same = 0
    first: dict[str, Any] | None = None
    gap = 0.0
    for index, (a, b) in enumerate(zip(expected["outputs"], found["outputs"], strict=True)):
        pairs = list(zip(a["tokens"], b["tokens"], strict=True))
        common = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        total += len(pairs)
        same += common
        gaps = [abs(x - y) for x, y in zip(a["logprobs"][:common], b["logprobs"][:common], strict=True)]
        gap = max([gap, *gaps])
        if common < len(pairs) and (first is None or common < first["token"]):
            first = {
                "prompt": index,
                "token": common,
                "expected": pairs[common][0],
                "found": pairs[common][1],
                "logprobs": [a["logprobs"][common], b["logprobs"][common]],
            }
    return {
        "tokens_equal": same == total,
        "tokens": f"{same} of {total}",
        "logprobs_equal": same == total and gap == 0.0,
        "largest_logprob_gap": gap,
        "first_divergence": first,
        "distinct_tokens": min(len(set(output["tokens"])) for output in expected["outputs"]),
    }
