"""Two servers, one killed in mid-decode: what the other says, and how fast."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # comes with vLLM

from afd_shim.testing.deployments import afd_config
from afd_shim.testing.servers import Server, ServerError, free_port, start_server
from tests.gpu.deployments import ENVIRONMENT
from tests.gpu.models import MODELS

__all__ = ["kill_in_mid_decode"]

LIMIT_S = 5.0


def kill_in_mid_decode(
    model: str, path: Path, folder: Path, *, connector: str, gpus: tuple[str, str], timeout: float
) -> list[dict[str, Any]]:
    """Kill the FFN, then (in a second deployment) Attention; a row each.

    Args:
        model: a key of `MODELS`.
        path: its checkpoint.
        folder: for logs.
        connector: the name in the `afd` configuration.
        gpus: Attention's and the FFN's.
        timeout: seconds for everything.

    """
    with ThreadPoolExecutor(2) as pool:
        victims = ("ffn", "attention")
        return list(pool.map(lambda victim: _kill(victim, model, path, folder, connector, gpus, timeout), victims))


def _kill(
    victim: str, model: str, path: Path, folder: Path, connector: str, gpus: tuple[str, str], timeout: float
) -> dict[str, Any]:
    port = free_port()
    servers: dict[str, Server] = {}
    row: dict[str, Any] = {"killed": victim, "connector": connector}
    try:
        for role, gpu in zip(("attention", "ffn"), gpus, strict=True):
            env = {key: value for key, value in ENVIRONMENT.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
            backend = MODELS[model].attention_backend
            servers[role] = start_server(
                f"loss-{victim}-{role}",
                path,
                log_dir=folder,
                additional_config=afd_config(role, port, connector=connector),
                extra_args=(
                    *("--gpu-memory-utilization", "0.1", "--no-enable-prefix-caching"),
                    *(("--attention-backend", backend) if backend else ()),
                ),
                env=env | {"CUDA_VISIBLE_DEVICES": gpu},
            )
        for server in servers.values():
            server.wait_ready(timeout)
        with ThreadPoolExecutor(1) as client:
            request = client.submit(servers["attention"].complete, "Tell me", max_tokens=480)
            started = _exchanges(servers["ffn"])
            while _exchanges(servers["ffn"]) < started + 20:
                time.sleep(0.01)
            survivor = servers["attention" if victim == "ffn" else "ffn"]
            engine = [
                child
                for child in psutil.Process(survivor.process.pid).children(recursive=True)
                if "resource_tracker" not in " ".join(child.cmdline())
            ]
            killed_at = time.monotonic()
            servers[victim].kill()
            try:
                request.result(timeout=30)
                row["client"] = "was answered: nothing was in flight"
            except ServerError as error:
                row["client"] = str(error)[:120]
            row["client_s"] = time.monotonic() - killed_at
        psutil.wait_procs(engine, timeout=30)
        row["engine_gone_s"] = time.monotonic() - killed_at
        survivor.wait_exit(timeout=30)
        # What comes after the engine is vLLM's own way to end its API server.
        row["server_gone_s"] = time.monotonic() - killed_at
        said = re.search(r"AFD: PeerLostError: (.*)", survivor.log())
        row["said"] = said.group(1) if said else ""
        row["ok"] = row["engine_gone_s"] <= LIMIT_S and bool(engine and said)
    except (ServerError, OSError) as error:
        row |= {"ok": False, "error": str(error)[-3000:]}
    finally:
        for server in servers.values():
            server.stop()
    return row


def _exchanges(server: Server) -> int:
    return int(str(server.rpc("afd_stats")[0]["exchanges"]))
