"""What runs in a rank's own process: a connector, and the simplest MoE layer that shows every mistake."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from afd_shim.connectors import (
    Batch,
    ExchangeHeader,
    Hello,
    Reply,
    create_attention_connector,
    create_ffn_connector,
)
from afd_shim.connectors.base import RoleName
from afd_shim.errors import PeerLostError
from afd_shim.ffn.cpu_reference import count_physical_experts

CPU = torch.device("cpu")


@dataclass
class Config:
    """What a connector reads of the `afd` configuration."""

    port: int
    num_attention_ranks: int = 1
    num_ffn_ranks: int = 1
    connector: str = "TcpAFDConnector"
    host: str = "127.0.0.1"
    connector_extra_config: dict[str, Any] = field(default_factory=dict)
    startup_timeout_s: float = 120.0


def make_hello(role: RoleName, rank: int = 0, **fields: Any) -> Hello:
    """Build a rank's Hello; keywords are its fields."""
    defaults: dict[str, Any] = {
        "release": "0.32.0",
        "patch_digest": "0123abcd",
        "model_fingerprint": "model-1",
        "num_experts": 8,
        "hidden_size": 64,
        "dtype": "bfloat16",
        "gate_on_attention": False,
        "moe_layers": (1, 2, 3),
        "max_num_tokens": 32,
        "num_attention_ranks": 1,
        "num_ffn_ranks": 1,
    }
    return Hello(role=role, rank=rank, **defaults | fields)


@dataclass
class Work:
    """The forwards of one Attention rank: steps of most, no, then random rows; some padded, some dummy."""

    steps: int
    seed: int
    max_rows: int
    pause_s: float = 0.0
    tp_rank: int = 0


@dataclass
class Served:
    """One batch, as an FFN rank saw it."""

    layer: int
    stage: int
    step: int
    rows: int
    real_rows: int
    dummy: bool
    ends_step: bool
    groups: tuple[int, ...]
    checksum: str
    load: tuple[int, ...]  # what an FFN rank 0 that balances experts records


def moe(layer: int, hidden: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
    """Compute each row from that row alone, exactly in every dtype: small integers stay small."""
    output = hidden + layer
    if logits is not None:
        output = output + logits.sum(dim=1, keepdim=True).to(hidden.dtype)
    return output


def choose_experts(logits: torch.Tensor) -> torch.Tensor:
    """The two experts of each row, without ties: [rows, 2]."""
    return (logits.float() * logits.shape[1] + torch.arange(logits.shape[1])).topk(2, dim=-1).indices


def record_load(batch: Batch, num_experts: int) -> tuple[int, ...]:
    """What vLLM's router records of a batch: the experts of as many rows as it is told are real ones."""
    load = torch.zeros(num_experts, dtype=torch.int32)
    if batch.router_logits is not None:
        count_physical_experts(choose_experts(batch.router_logits), batch.real_rows, load)
    return tuple(load.tolist())


def make_rows(
    generator: torch.Generator, hello: Hello, header: ExchangeHeader, logits_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random rows of small integers; real ones are positive, all others negative."""
    shape = (header.rows, hello.hidden_size)
    hidden = torch.randint(1, 50, shape, generator=generator).to(getattr(torch, hello.dtype))
    hidden[header.real_rows :] *= -1
    if not hello.gate_on_attention:
        return hidden, None
    logits = torch.randint(-3, 4, (header.rows, hello.num_experts), generator=generator).to(logits_dtype)
    return hidden, logits


def serve(connector: Any, num_experts: int, delay_s: float) -> list[Served]:
    """Serve until everyone has said goodbye; what was served, in order."""
    served: list[Served] = []
    while True:
        batch: Batch | None = connector.recv_attn_output()
        if batch is None:
            return served
        hidden = batch.hidden_states
        real, padding = hidden[: batch.real_rows], hidden[batch.real_rows :]
        assert bool((real > 0).all()), "a padding row among the real ones"
        assert bool((padding < 0).all()), "a real row among the padding"
        content = hidden.contiguous().view(torch.uint8).numpy().tobytes()
        if batch.router_logits is not None:
            content += batch.router_logits.contiguous().view(torch.uint8).numpy().tobytes()
        served.append(
            Served(
                batch.layer,
                batch.stage,
                batch.step,
                hidden.shape[0],
                batch.real_rows,
                batch.dummy,
                batch.ends_step,
                tuple(member.group for member in batch.members),
                hashlib.sha256(content).hexdigest(),
                record_load(batch, num_experts),
            )
        )
        time.sleep(delay_s)
        connector.send_ffn_output(batch, moe(batch.layer, hidden, batch.router_logits))


def attend(connector: Any, hello: Hello, logits_dtype: torch.dtype, work: Work) -> dict[str, Any]:
    """Run the forwards of `work`; every answer is compared with what the rows give unmerged."""
    generator = torch.Generator().manual_seed(work.seed)
    counts: dict[str, Any] = {"exchanges": 0, "rows": 0, "real_rows": 0, "steps": 0}
    counts["load"] = [0] * hello.num_experts
    for step in range(work.steps):
        rows = int(torch.randint(0, work.max_rows + 1, (1,), generator=generator))
        rows = (work.max_rows, 0, rows)[min(step, 2)]
        dummy = step % 5 == 4
        real_rows = 0 if dummy else int(torch.randint(0, rows + 1, (1,), generator=generator))
        for layer in hello.moe_layers:
            header = ExchangeHeader(
                step, layer, 0, rows, real_rows, Reply.FINISHED, dummy, layer == hello.moe_layers[-1]
            )
            hidden, logits = make_rows(generator, hello, header, logits_dtype)
            expected = moe(layer, hidden, logits) if work.tp_rank == 0 else torch.zeros_like(hidden)
            connector.send_attn_output(header, hidden, logits)
            if logits is not None:
                for expert in choose_experts(logits[:real_rows]).flatten().tolist():
                    counts["load"][expert] += 1
            hidden.fill_(7)  # the connector is done with it: a late read would show
            out = connector.recv_ffn_output(header, torch.full_like(hidden, -99))
            assert torch.equal(out, expected), f"{hello.rank}: {header}"
            counts["exchanges"] += 1
            counts["rows"] += rows
            counts["real_rows"] += real_rows
        counts["steps"] += 1
        time.sleep(work.pause_s)
    return counts


def main(pipe: Connection, hello: Hello, port: int, logits_dtype: str) -> None:
    """A rank: connects, says so, then does what the pipe asks until it asks for nothing more.

    Answers are ("connected", port), ("result", value), ("error", type, text, seconds since the epoch)
    and, from the connector's own thread, ("lost", text, clean, seconds since the epoch).
    """
    torch.set_num_threads(1)
    lock = threading.Lock()

    def say(*message: object) -> None:
        with lock:
            pipe.send(message)

    def on_peer_lost(error: PeerLostError) -> None:
        say("lost", str(error), error.clean, time.time())

    config = Config(port, hello.num_attention_ranks, hello.num_ffn_ranks)
    create = create_ffn_connector if hello.role == "ffn" else create_attention_connector
    connector: Any = create(config, hello, device=CPU, on_peer_lost=on_peer_lost)
    say("listens", connector.address[1] if hello.role == "ffn" and hello.rank == 0 else port)
    try:
        connector.connect()
        say("connected")
        while True:
            order, *arguments = pipe.recv()
            if order == "serve":
                say("result", serve(connector, hello.num_experts, *arguments))
            elif order == "attend":
                say("result", attend(connector, hello, getattr(torch, logits_dtype), *arguments))
            elif order == "close":
                connector.close(*arguments)
                say("result", connector.stats)
            else:
                return
    except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
        say("error", type(error).__name__, str(error), time.time())
        pipe.recv()
        connector.close(str(error))
    finally:
        connector.close()
