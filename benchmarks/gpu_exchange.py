"""What the connector adds to a transfer: exchanges with an FFN that computes nothing, against bare transfers.

    python3 -m benchmarks.gpu_exchange --out exchange.json --transport tcp            # any number of GPUs
    python3 -m benchmarks.gpu_exchange --out exchange.json --transport nccl --gpus 0,1  # one GPU per role

Both move the same bytes there and back over the same transport in the same two processes, in
alternating blocks of back-to-back round trips; what is reported are medians over blocks. Bare means:
TCP, one socket, page-locked buffers, the same copies between device and host; NCCL, `send` and `recv`
of a torch ProcessGroupNCCL of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import socket
import statistics
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from afd_shim.config import AFDConfig
from afd_shim.connectors.base import AttentionConnector, ExchangeHeader, FFNConnector, Hello, Reply
from afd_shim.connectors.registry import create_attention_connector, create_ffn_connector
from afd_shim.connectors.sockets import Wakeup, dial, listen, tune_data
from afd_shim.connectors.staging import writable_bytes
from afd_shim.testing.servers import free_port

TOKENS = (1, 8, 32, 128, 512)
HIDDEN = (2048, 7168)
CONNECTORS = {"tcp": "TcpAFDConnector", "nccl": "P2pNcclAFDConnector"}
_LIMIT = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """What both processes do, in the same order."""

    transport: str
    devices: tuple[str, str]  # Attention's, FFN's
    hidden: int
    tokens: tuple[int, ...]
    blocks: int
    per_block: int
    port: int
    bare_port: int

    def rows(self) -> list[int]:
        """Rows of each block; the first of each size warms up."""
        return [rows for rows in self.tokens for _ in range(self.blocks + 1)]


def _config(plan: Plan) -> AFDConfig:
    return AFDConfig(
        role="ffn",
        connector=CONNECTORS[plan.transport],
        host="127.0.0.1",
        port=plan.port,
        num_attention_ranks=1,
        num_ffn_ranks=1,
        startup_timeout_s=60.0,
    )


def _hello(plan: Plan, role: str) -> Hello:
    return Hello(
        role=role,
        rank=0,
        release="benchmark",
        patch_digest="benchmark",
        model_fingerprint="benchmark",
        num_experts=8,
        hidden_size=plan.hidden,
        dtype="bfloat16",
        gate_on_attention=False,
        moe_layers=(0,),
        max_num_tokens=max(plan.tokens),
        num_attention_ranks=1,
        num_ffn_ranks=1,
    )


class Bare(ABC):
    """Round trips without a connector."""

    @abstractmethod
    def ask(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Send `rows`, receive as much into `out`."""

    @abstractmethod
    def answer(self, rows: torch.Tensor) -> None:
        """Receive into `rows`, and send it back."""


class BareTcp(Bare):
    """One socket and page-locked memory."""

    def __init__(self, plan: Plan, device: torch.device, *, listens: bool) -> None:
        self._device = device
        self._host = torch.empty(max(plan.tokens) * plan.hidden, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
        self._view = writable_bytes(self._host)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sock = _accept(plan.bare_port) if listens else _dial(plan.bare_port)

    def ask(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Bare.ask`."""
        self._send(rows)
        self._receive(out)

    def answer(self, rows: torch.Tensor) -> None:
        """See `Bare.answer`."""
        self._receive(rows)
        self._send(rows)

    def _send(self, rows: torch.Tensor) -> None:
        self._host[: rows.numel()].view(rows.shape).copy_(rows, non_blocking=True)
        self._wait()
        self._sock.sendall(self._view[: rows.nbytes])

    def _receive(self, rows: torch.Tensor) -> None:
        view, got = self._view[: rows.nbytes], 0
        while got < rows.nbytes:
            got += self._sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
        rows.copy_(self._host[: rows.numel()].view(rows.shape), non_blocking=True)

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.record()
            self._copied.synchronize()


class BareNccl(Bare):
    """A ProcessGroupNCCL of two."""

    def __init__(self, plan: Plan, *, listens: bool) -> None:
        from torch.distributed import ProcessGroupNCCL, TCPStore

        store = TCPStore("127.0.0.1", plan.bare_port, 2, is_master=listens)
        self._group: Any = ProcessGroupNCCL(store, 0 if listens else 1, 2, ProcessGroupNCCL.Options())
        self._peer = 1 if listens else 0

    def ask(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Bare.ask`."""
        self._group.send([rows], self._peer, 0).wait()
        self._group.recv([out], self._peer, 0).wait()

    def answer(self, rows: torch.Tensor) -> None:
        """See `Bare.answer`."""
        self._group.recv([rows], self._peer, 0).wait()
        self._group.send([rows], self._peer, 0).wait()


# The connector's own options and buffer sizes, so that only the connector differs.
def _accept(port: int) -> socket.socket:
    with listen("127.0.0.1", port) as listener:
        listener.settimeout(None)
        sock, _ = listener.accept()
    tune_data(sock)
    return sock


def _dial(port: int) -> socket.socket:
    sock = dial(("127.0.0.1", port), "the other process", time.monotonic() + 60, Wakeup())
    sock.settimeout(None)
    tune_data(sock)
    return sock


def _bare(plan: Plan, device: torch.device, *, listens: bool) -> Bare:
    return BareNccl(plan, listens=listens) if plan.transport == "nccl" else BareTcp(plan, device, listens=listens)


def _device(name: str) -> torch.device:
    torch.set_num_threads(1)  # copies between page-locked and pageable memory need no team of threads
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def serve(plan: Plan) -> None:
    """The FFN's process: every batch goes back as it came."""
    device = _device(plan.devices[1])
    connector = create_ffn_connector(_config(plan), _hello(plan, "ffn"), device=device, on_peer_lost=_lost)
    connector.connect()
    bare = _bare(plan, device, listens=True)
    for rows in plan.rows():
        _serve_block(connector, plan.per_block)
        buffer = torch.empty(rows, plan.hidden, dtype=torch.bfloat16, device=device)
        for _ in range(plan.per_block):
            bare.answer(buffer)
        _synchronize(device)
    connector.recv_attn_output()  # the goodbye
    connector.close()
    os._exit(0)


def _serve_block(connector: FFNConnector, count: int) -> None:
    for _ in range(count):
        batch = connector.recv_attn_output()
        assert batch is not None  # Attention says goodbye after the last block
        connector.send_ffn_output(batch, batch.hidden_states)


def ask(plan: Plan, results: Any) -> None:  # noqa: ANN401 - a multiprocessing queue
    """Attention's process: measures."""
    device = _device(plan.devices[0])
    connector = create_attention_connector(_config(plan), _hello(plan, "attention"), device=device, on_peer_lost=_lost)
    connector.connect()
    bare = _bare(plan, device, listens=False)
    times: dict[tuple[str, int], list[float]] = {}
    step = 0
    for rows in plan.rows():
        sent = torch.randn(rows, plan.hidden, device=device).to(torch.bfloat16)
        out = torch.empty_like(sent)
        _synchronize(device)
        started = time.perf_counter()
        step = _ask_block(connector, sent, out, step, plan.per_block)
        _synchronize(device)
        middle = time.perf_counter()
        assert torch.equal(sent, out)  # it is a transfer, or it is nothing
        _synchronize(device)
        again = time.perf_counter()
        for _ in range(plan.per_block):
            bare.ask(sent, out)
        _synchronize(device)
        ended = time.perf_counter()
        assert torch.equal(sent, out)
        times.setdefault(("connector", rows), []).append((middle - started) / plan.per_block)
        times.setdefault(("bare", rows), []).append((ended - again) / plan.per_block)
    connector.close()
    results.put(
        [
            {
                "transport": plan.transport,
                "tokens": rows,
                "hidden": plan.hidden,
                "connector_us": 1e6 * statistics.median(times["connector", rows][1:]),
                "bare_us": 1e6 * statistics.median(times["bare", rows][1:]),
                "ratio": statistics.median(
                    a / b for a, b in zip(times["connector", rows][1:], times["bare", rows][1:], strict=True)
                ),
            }
            for rows in plan.tokens
        ]
    )
    results.close()
    results.join_thread()
    os._exit(0)


def _ask_block(connector: AttentionConnector, sent: torch.Tensor, out: torch.Tensor, step: int, count: int) -> int:
    rows = sent.shape[0]
    for _ in range(count):
        header = ExchangeHeader(step, 0, 0, rows, rows, Reply.FINISHED, dummy=False, last_layer=True)
        connector.send_attn_output(header, sent)
        connector.recv_ffn_output(header, out)
        step += 1
    return step


def _lost(error: Exception) -> None:
    print(f"lost: {error}", file=sys.stderr, flush=True)


def measure(transport: str, devices: tuple[str, str], *, blocks: int, per_block: int) -> list[dict[str, Any]]:
    """Rows for every size over one transport.

    Raises:
        RuntimeError: a process ended without a result.

    """
    context = mp.get_context("spawn")
    found: list[dict[str, Any]] = []
    for hidden in HIDDEN:
        plan = Plan(transport, devices, hidden, TOKENS, blocks, per_block, free_port(), free_port())
        results = context.Queue()
        ffn = context.Process(target=serve, args=(plan,), daemon=True)
        attention = context.Process(target=ask, args=(plan, results), daemon=True)
        ffn.start()
        attention.start()
        try:
            deadline = time.monotonic() + 120
            while results.empty():
                if attention.exitcode not in (None, 0) or ffn.exitcode not in (None, 0):
                    raise RuntimeError(f"{transport}: a process ended with {attention.exitcode}, {ffn.exitcode}")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{transport}: no result within 120 s")
                time.sleep(0.05)
            found += results.get()
        finally:
            for process in (attention, ffn):
                process.kill()
                process.join()
    return found


def main() -> int:
    """Measure, print and write the rows; status 1 where a ratio is above 1.5."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--transport", choices=CONNECTORS, action="append", required=True)
    parser.add_argument("--gpus", default="0,0", help="Attention's and the FFN's GPU; 'cpu' for the host")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--per-block", type=int, default=60, help="round trips per block: a forward's MoE layers")
    options = parser.parse_args()
    names = ["cpu", "cpu"] if options.gpus == "cpu" else [f"cuda:{gpu}" for gpu in options.gpus.split(",")]
    rows: list[dict[str, Any]] = []
    for transport in options.transport:
        rows += measure(transport, (names[0], names[1]), blocks=options.blocks, per_block=options.per_block)
        options.out.write_text(json.dumps(rows, indent=1))
    for row in rows:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
    return int(any(row["ratio"] > _LIMIT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
