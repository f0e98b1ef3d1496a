"""Connectors alone, without vLLM: one process per rank, an FFN that computes something checkable.

    python3 -m tests.gpu.peers OUT.json CASE...

Cases: `world1` (NCCL's own part with one rank), `same_gpu` (two ranks on one GPU are refused),
`gloo` (the connector's logic over gloo, CPU tensors), `nccl` (one Attention and one FFN rank on two
GPUs), `kill` (the FFN dies in mid-exchange, two GPUs).
"""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing as mp
import os
import queue as queues
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from afd_shim.config import AFDConfig, Role
from afd_shim.connectors.base import ExchangeHeader, Hello, Reply, RoleName
from afd_shim.connectors.device_pair import Group, GroupFactory, PairStore, nccl_group
from afd_shim.connectors.p2p_nccl import P2pNcclAttentionConnector, P2pNcclFFNConnector
from afd_shim.errors import PeerLostError
from afd_shim.testing.servers import free_port

__all__ = ["Peers"]

_LAYERS = (0, 1, 2, 3)
_EXPERTS = 8


@dataclass(frozen=True, slots=True)
class Peers:
    """One deployment of bare connectors."""

    attention_ranks: int = 1
    ffn_ranks: int = 1
    gate_on_attention: bool = False
    hidden: int = 256
    max_rows: int = 512
    steps: int = 50
    transport: str = "gloo"  # or nccl
    die_at: int | None = None  # the batch at which the FFN process dies
    same_gpu: bool = False
    port: int = 0

    def config(self) -> AFDConfig:
        """The `afd` configuration of every rank."""
        return AFDConfig(
            role=Role.FFN,
            connector="P2pNcclAFDConnector",
            host="127.0.0.1",
            port=self.port,
            num_attention_ranks=self.attention_ranks,
            num_ffn_ranks=self.ffn_ranks,
            startup_timeout_s=60.0,
        )

    def hello(self, role: RoleName, rank: int) -> Hello:
        """What a rank says of itself."""
        return Hello(
            role=role,
            rank=rank,
            release="test",
            patch_digest="test",
            model_fingerprint="test",
            num_experts=_EXPERTS,
            hidden_size=self.hidden,
            dtype="bfloat16",
            gate_on_attention=self.gate_on_attention,
            moe_layers=_LAYERS,
            max_num_tokens=self.max_rows,
            num_attention_ranks=self.attention_ranks,
            num_ffn_ranks=self.ffn_ranks,
        )

    def device(self, role: str, rank: int) -> torch.device:
        """Where a rank's tensors are; this process's current device, too."""
        if self.transport == "gloo":
            return torch.device("cpu")
        first = 0 if role == "ffn" or self.same_gpu else self.ffn_ranks
        device = torch.device("cuda", first + rank)
        torch.cuda.set_device(device)
        return device

    def factory(self) -> GroupFactory:
        """What makes the groups of two."""
        return nccl_group if self.transport == "nccl" else _gloo_group


def _gloo_group(store: Any, rank: int) -> Group:
    from torch.distributed import ProcessGroupGloo

    group: Group = ProcessGroupGloo(store, rank, 2, dt.timedelta(seconds=60))  # type: ignore[assignment]
    return group


def _expected(hidden: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
    doubled = hidden * 2
    return doubled if logits is None else doubled + logits.sum(-1, keepdim=True).to(hidden.dtype)


def _ffn(peers: Peers, rank: int) -> dict[str, Any]:
    lost: list[PeerLostError] = []
    connector = P2pNcclFFNConnector(
        peers.config(), peers.hello("ffn", rank), peers.device("ffn", rank), lost.append, group_factory=peers.factory()
    )
    connector.connect()
    batches = most = 0
    while (batch := connector.recv_attn_output()) is not None:
        batches += 1
        most = max(most, len(batch.members))
        if batches == peers.die_at:
            print(f"died at {time.time()}", flush=True)  # noqa: T201
            os._exit(9)
        connector.send_ffn_output(batch, _expected(batch.hidden_states, batch.router_logits).contiguous())
    if lost:
        raise lost[0]
    connector.close()
    return {"batches": batches, "largest_batch": most, "bytes_sent": connector.stats.bytes_sent}


def _attention(peers: Peers, rank: int) -> dict[str, Any]:
    lost: list[tuple[float, PeerLostError]] = []
    device = peers.device("attention", rank)
    connector = P2pNcclAttentionConnector(
        peers.config(),
        peers.hello("attention", rank),
        device,
        lambda error: lost.append((time.time(), error)),
        group_factory=peers.factory(),
    )
    connector.connect()
    generator = torch.Generator().manual_seed(rank)
    wrong: list[torch.Tensor] = []
    sent = 0
    try:
        for step in range(peers.steps):
            rows = (1, 7, 64, peers.max_rows // peers.attention_ranks, 0)[(step + rank) % 5]
            for layer in _LAYERS:
                hidden = torch.randn(rows, peers.hidden, generator=generator).to(torch.bfloat16).to(device)
                logits = (
                    torch.randn(rows, _EXPERTS, generator=generator).to(device) if peers.gate_on_attention else None
                )
                real = rows - rows // 3
                header = ExchangeHeader(step, layer, 0, rows, real, Reply.FINISHED, False, layer == _LAYERS[-1])  # noqa: FBT003
                connector.send_attn_output(header, hidden, logits)
                answer = connector.recv_ffn_output(header, torch.empty_like(hidden))
                wrong.append((answer != _expected(hidden, logits)).sum())
                sent += hidden.nbytes + (0 if logits is None else logits.nbytes)
        differences = int(torch.stack(wrong).sum().item())
        connector.raise_if_lost()
    except PeerLostError as error:
        return {"raised": str(error), "heard_at": lost[0][0] if lost else None, "raised_at": time.time()}
    connector.close()
    headers = 64 * len(_LAYERS) * peers.steps
    return {
        "differences": differences,
        "exact_bytes": connector.stats.bytes_sent == sent * peers.ffn_ranks + headers,
    }


def _process(work: Callable[..., dict[str, Any]], results: Any, peers: Peers, name: str, rank: int) -> None:
    try:
        results.put((f"{name}{rank}", work(peers, rank)))
    except Exception as error:  # noqa: BLE001 - an expected error is a result
        traceback.print_exc()
        results.put((f"{name}{rank}", {"error": type(error).__name__, "message": str(error)}))
    results.close()
    results.join_thread()
    os._exit(0)


def run(peers: Peers, timeout: float = 90.0) -> dict[str, dict[str, Any]]:
    """Run every rank in a process of its own; what each returned or raised."""
    context = mp.get_context("spawn")
    peers = replace(peers, port=free_port())
    results = context.Queue()
    ranks = [("ffn", _ffn, rank) for rank in range(peers.ffn_ranks)]
    ranks += [("attention", _attention, rank) for rank in range(peers.attention_ranks)]
    processes = [
        context.Process(target=_process, args=(work, results, peers, name, rank), daemon=True)
        for name, work, rank in ranks
    ]
    for process in processes:
        process.start()
    found: dict[str, dict[str, Any]] = {}
    awaited = len(ranks) - (peers.die_at is not None)
    deadline = time.monotonic() + timeout
    while len(found) < awaited and time.monotonic() < deadline:
        try:
            name, result = results.get(timeout=1.0)
        except queues.Empty:
            continue
        found[name] = result
    for process in processes:
        process.kill()
        process.join()
    return found


def world1() -> dict[str, Any]:
    """NCCL's own part as far as one rank goes: the store written in Python, options, abort."""
    left, right = socket.socketpair()
    store = PairStore(left, time.monotonic() + 30)
    from torch.distributed import ProcessGroupNCCL

    group: Any = ProcessGroupNCCL(store, 0, 1, ProcessGroupNCCL.Options())
    tensor = torch.arange(16, device="cuda:0", dtype=torch.float32)
    group.allreduce([tensor]).wait()
    torch.cuda.synchronize()
    kept = bool(torch.equal(tensor.cpu(), torch.arange(16, dtype=torch.float32)))
    group.abort()
    right.setblocking(False)  # noqa: FBT003
    unused: Any = nccl_group(PairStore(right, time.monotonic() + 30), 0)
    unused.abort()
    return {"ok": kept and bool(store._values), "keys": sorted(store._values)}


def same_gpu() -> dict[str, Any]:
    """Two ranks on one GPU."""
    found = run(Peers(transport="nccl", same_gpu=True))
    texts = [result.get("message", "") for result in found.values()]
    return {"ok": any("cannot share a GPU" in text and "TcpAFDConnector" in text for text in texts), **found}


def gloo() -> dict[str, Any]:
    """Several topologies over gloo."""
    cases = {
        "1A1F": Peers(),
        "1A1F gate": Peers(gate_on_attention=True),
        "3A2F gate": Peers(attention_ranks=3, ffn_ranks=2, gate_on_attention=True, steps=20),
    }
    found = {name: run(peers) for name, peers in cases.items()}
    return {"ok": all(_holds(case) for case in found.values()), **found}


def nccl() -> dict[str, Any]:
    """One Attention rank and one FFN rank on two GPUs, both gate placements."""
    cases = {
        "gate on FFN": Peers(transport="nccl", hidden=2048, steps=400),
        "gate on Attention": Peers(transport="nccl", hidden=7168, steps=400, gate_on_attention=True),
    }
    found = {name: run(peers) for name, peers in cases.items()}
    return {"ok": all(_holds(case) for case in found.values()), **found}


def kill() -> dict[str, Any]:
    """An FFN process that dies with an exchange in flight: named at once, and streams go on."""
    found = run(Peers(transport="nccl", hidden=2048, steps=400, die_at=200))
    attention = found.get("attention0", {})
    return {"ok": "FFN rank 0" in attention.get("raised", ""), **found}


def _holds(found: dict[str, dict[str, Any]]) -> bool:
    attention = [result for name, result in found.items() if name.startswith("attention")]
    return bool(attention) and all(result.get("differences") == 0 and result.get("exact_bytes") for result in attention)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "world1": world1,
    "same_gpu": same_gpu,
    "gloo": gloo,
    "nccl": nccl,
    "kill": kill,
}


def main() -> None:
    """Run the cases; every one is recorded whatever becomes of the others."""
    out, *names = sys.argv[1:]
    found: dict[str, Any] = {}
    for name in names:
        started = time.monotonic()
        try:
            found[name] = CASES[name]()
        except Exception as error:  # noqa: BLE001 - a failure is a result
            traceback.print_exc()
            found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        found[name]["seconds"] = time.monotonic() - started
        Path(out).write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
