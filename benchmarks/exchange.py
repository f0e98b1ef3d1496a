"""What one exchange costs over the wire's own round trip, on CPU.

    python benchmarks/exchange.py [--tokens 1 8 32 64 128] [--hidden 2048] [--blocks 15] [--out FILE.json]

Five ways to move the same rows there and back between two processes pinned to two cores, in
alternating blocks of back-to-back round trips:

    tcp        one socket and nothing else, as many bytes as the exchange sends
    polling    the same, but like the connector it asks for the answer again and again instead of sleeping
    connector  TcpAFDConnector, whose FFN side answers at once
    shim       what production calls: the MoE runner on Attention; the serving loop on FFN, with experts
               that compute nothing
    gloo       torch.distributed's gloo, send and recv

Reported are medians and 99th percentiles over all blocks. Exits with 1 unless `shim` stays within 1.5 x
`tcp` at 128 tokens and within 40 us of it below. What it adds to `polling` is its own work, reported
without a bound. Run it on a quiet machine: both cores are needed whole.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from afd_shim.config import AFDConfig, Role
from afd_shim.connectors import ExchangeHeader, Hello, Reply, create_attention_connector, create_ffn_connector
from afd_shim.connectors.sockets import Wakeup, dial, listen, tune_data
from afd_shim.connectors.wire import EXCHANGE
from afd_shim.testing.servers import free_port

LAYER = 1
WARM_UP = 50
START_WITHIN_S = 300.0
MAX_RATIO = 1.5
MAX_ADDED_US = 40.0


def hello(name: str, hidden: int, max_tokens: int) -> Hello:
    """Both roles' Hello."""
    return Hello(
        role=name,
        rank=0,
        release="benchmark",
        patch_digest="benchmark",
        model_fingerprint="benchmark",
        num_experts=8,
        hidden_size=hidden,
        dtype="bfloat16",
        gate_on_attention=False,
        moe_layers=(LAYER,),
        max_num_tokens=max_tokens,
        num_attention_ranks=1,
        num_ffn_ranks=1,
    )


def config(name: str, port: int) -> AFDConfig:
    """Both roles' configuration."""
    return AFDConfig(
        role=Role(name),
        connector="TcpAFDConnector",
        host="127.0.0.1",
        port=port,
        num_attention_ranks=1,
        num_ffn_ranks=1,
        startup_timeout_s=START_WITHIN_S,
    )


class Way(ABC):
    """One way to move rows there and back; `ask` runs here, `answer` in a process of its own."""

    def __init__(self, port: int, hidden: int, max_tokens: int) -> None:
        self.port = port
        self.hidden = hidden
        self.max_tokens = max_tokens

    @abstractmethod
    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Connect, as Attention does."""

    @abstractmethod
    def ask(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Send `rows`, receive as many into `out`."""

    @abstractmethod
    def answer(self, blocks: Connection) -> None:
        """Send back what comes, until asked for no more; `blocks` gives (tokens, count) or None."""


class Tcp(Way):
    """One socket, with the connector's own options and buffer sizes."""

    flags = 0

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """See `Way`."""
        self.sock = dial(("127.0.0.1", self.port), "the other process", time.monotonic() + START_WITHIN_S, Wakeup())
        self.sock.settimeout(None)
        tune_data(self.sock)
        self.buffer = memoryview(bytearray(EXCHANGE.size + self.max_tokens * self.hidden * 2))
        yield
        self.sock.close()

    def ask(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Way`."""
        view = self.buffer[: EXCHANGE.size + rows.nbytes]
        self.sock.sendall(view)
        self._receive(self.sock, view)

    def answer(self, blocks: Connection) -> None:
        """See `Way`."""
        with listen("127.0.0.1", self.port) as listener:
            listener.settimeout(None)
            sock, _ = listener.accept()
        tune_data(sock)
        buffer = memoryview(bytearray(EXCHANGE.size + self.max_tokens * self.hidden * 2))
        while (block := blocks.recv()) is not None:
            tokens, count = block
            view = buffer[: EXCHANGE.size + tokens * self.hidden * 2]
            for _ in range(count):
                self._receive(sock, view)
                sock.sendall(view)
        sock.close()

    def _receive(self, sock: socket.socket, view: memoryview) -> None:
        got = 0
        while got < len(view):
            with contextlib.suppress(BlockingIOError):
                got += sock.recv_into(view[got:], 0, self.flags)


class Polling(Tcp):
    """As `Tcp`, with receives that never sleep."""

    flags = socket.MSG_DONTWAIT


class Gloo(Way):
    """A gloo group of two."""

    def _group(self, rank: int) -> ProcessGroupGloo:
        store = TCPStore("127.0.0.1", self.port, 2, is_master=rank == 1)
        return ProcessGroupGloo(store, rank, 2, dt.timedelta(seconds=START_WITHIN_S))

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """See `Way`."""
        self.group = self._group(0)
        yield

    def ask(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Way`."""
        self.group.send([rows], 1, 0).wait()
        self.group.recv([out], 1, 0).wait()

    def answer(self, blocks: Connection) -> None:
        """See `Way`."""
        group = self._group(1)
        while (block := blocks.recv()) is not None:
            tokens, count = block
            rows = torch.empty(tokens, self.hidden, dtype=torch.bfloat16)
            for _ in range(count):
                group.recv([rows], 0, 0).wait()
                group.send([rows], 0, 0).wait()


class Connector(Way):
    """The connector alone."""

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """See `Way`."""
        mine = hello("attention", self.hidden, self.max_tokens)
        self.connector = create_attention_connector(
            config("attention", self.port), mine, device=torch.device("cpu"), on_peer_lost=lost
        )
        self.connector.connect()
        yield
        self.connector.close()

    def ask(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Way`."""
        count = rows.shape[0]
        header = ExchangeHeader(0, LAYER, 0, count, count, Reply.FINISHED, dummy=False, last_layer=True)
        self.connector.send_attn_output(header, rows)
        self.connector.recv_ffn_output(header, out)

    def answer(self, blocks: Connection) -> None:
        """See `Way`; the connector needs not be told what comes."""
        mine = hello("ffn", self.hidden, self.max_tokens)
        connector = create_ffn_connector(config("ffn", self.port), mine, device=torch.device("cpu"), on_peer_lost=lost)
        connector.connect()
        while (batch := connector.recv_attn_output()) is not None:
            connector.send_ffn_output(batch, batch.hidden_states)
        connector.close()


class Shim(Connector):
    """What production calls: the runner on Attention, the serving loop on FFN.

    vLLM is imported here only, so that the other processes start at once.
    """

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """See `Way`."""
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.forward_context import set_forward_context
        from vllm.model_executor.layers.fused_moe import FusedMoEFactory

        from afd_shim import role
        from afd_shim.moe.factory import build_attention_moe_runner
        from afd_shim.moe.proxy import RemoteFFNProxy
        from afd_shim.testing.local_roles import local_world

        vllm_config = VllmConfig()
        afd = config("attention", self.port)
        context = role.RoleContext(config=afd, device=torch.device("cpu"))
        with local_world(), set_current_vllm_config(vllm_config), super().asking():
            layer: dict[str, Any] = {
                "num_experts": 8,
                "top_k": 2,
                "hidden_size": self.hidden,
                "intermediate_size": 64,
                "params_dtype": torch.bfloat16,
                "gate": torch.nn.Linear(1, 1),
                "prefix": f"model.layers.{LAYER}.mlp.experts",
            }
            role.take(context)
            self.runner = build_attention_moe_runner(FusedMoEFactory, layer, context)
            context.proxy = RemoteFFNProxy(self.connector, [LAYER])
            context.proxy.begin_step(self.max_tokens)
            # In production one such context surrounds the whole forward of a step.
            with set_forward_context(None, vllm_config, num_tokens=1), torch.inference_mode():
                yield
            role.release(context)

    def ask(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Way`; the runner allocates its output."""
        self.runner(hidden_states=rows, router_logits=rows)

    def answer(self, blocks: Connection) -> None:
        """See `Way`; the loop needs not be told what comes."""
        from vllm.config import VllmConfig

        from afd_shim.ffn.serving import ServingLoop
        from afd_shim.moe.layers import MoELayer

        layer: Any = MoELayer("experts", LAYER, 8, "ffn", NoExperts())  # type: ignore[arg-type]  # a runner's call is all it needs
        serving = ServingLoop(
            vllm_config=VllmConfig(),
            afd=config("ffn", self.port),
            hello=hello("ffn", self.hidden, self.max_tokens),
            layers=[layer],
            device=torch.device("cpu"),
            on_failure=lost,
        )
        serving.start()
        assert blocks.recv() is None
        serving.stop()


class NoExperts:
    """Stands in for the native MoE runner: gives the rows back."""

    def __call__(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """Compute nothing."""
        return hidden_states


WAYS = {"tcp": Tcp, "polling": Polling, "connector": Connector, "shim": Shim, "gloo": Gloo}
TOLD = ("tcp", "polling", "gloo")
"""The ways whose answering process must be told what comes."""


def lost(error: BaseException) -> None:
    """A benchmark whose peer is gone says why; the next exchange fails."""
    print(error, file=sys.stderr)


def answer(way: Way, core: int, blocks: Connection) -> None:
    """The answering process of one way."""
    pin(core)
    way.answer(blocks)


def pin(core: int) -> None:
    """Keep this process on one core, with no team of threads."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)


def measure(options: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    """Round trips in microseconds, by tokens and way."""
    context = multiprocessing.get_context("spawn")
    times: dict[int, dict[str, list[float]]] = {tokens: {name: [] for name in WAYS} for tokens in options.tokens}
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("two cores are needed, one for each side")
    with contextlib.ExitStack() as stack:
        ways, pipes = {}, {}
        for name, kind in WAYS.items():
            ways[name] = kind(free_port(), options.hidden, max(options.tokens))
            pipes[name], theirs = context.Pipe()
            process = context.Process(target=answer, args=(ways[name], cores[1], theirs), daemon=True)
            process.start()
            stack.callback(process.join, 10)
        pin(cores[0])
        for way in ways.values():
            stack.enter_context(way.asking())
        for pipe in pipes.values():
            stack.callback(pipe.send, None)
        for tokens in options.tokens:
            rows = torch.randn(tokens, options.hidden).to(torch.bfloat16)
            out = torch.empty_like(rows)
            for block in range(options.blocks + 1):
                for name, way in ways.items():
                    count = options.per_block if block else WARM_UP
                    if name in TOLD:
                        pipes[name].send((tokens, count))
                    samples = run(way, rows, out, count)
                    times[tokens][name] += samples if block else []
    return times


def run(way: Way, rows: torch.Tensor, out: torch.Tensor, count: int) -> list[float]:
    """Microseconds of `count` round trips, one after the other."""
    samples = []
    for _ in range(count):
        started = time.perf_counter()
        way.ask(rows, out)
        samples.append((time.perf_counter() - started) * 1e6)
    return samples


def main() -> int:
    """Measure, print a table, say whether the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--per-block", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    times = measure(options)
    table = {
        tokens: {
            name: {"median": statistics.median(samples), "p99": statistics.quantiles(samples, n=100)[98]}
            for name, samples in by_way.items()
        }
        for tokens, by_way in times.items()
    }
    print(f"round trips in us, median (p99), hidden {options.hidden}, bfloat16, load {os.getloadavg()[0]:.1f}")
    print(f"{'tokens':>6}" + "".join(f"{name:>18}" for name in WAYS) + "   shim/tcp  shim-tcp  shim-polling  shim/gloo")
    holds = True
    for tokens, row in table.items():
        tcp, polling, shim, gloo = (row[name]["median"] for name in ("tcp", "polling", "shim", "gloo"))
        cells = "".join(f"{cell['median']:>9.1f} ({cell['p99']:6.0f})" for cell in row.values())
        print(f"{tokens:>6}{cells}{shim / tcp:>11.2f}{shim - tcp:>10.1f}{shim - polling:>14.1f}{shim / gloo:>11.2f}")
        holds &= shim / tcp <= MAX_RATIO if tokens >= 128 else shim - tcp <= MAX_ADDED_US
    if options.out:
        options.out.write_text(json.dumps(table, indent=1), encoding="utf-8")
    print("the bounds hold" if holds else f"past a bound: {MAX_RATIO} x at 128 tokens, {MAX_ADDED_US} us below")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
