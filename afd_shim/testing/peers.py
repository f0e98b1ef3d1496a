"""Attention ranks that are only connectors: a test or a benchmark plays them against a real FFN server.

The rows, the router logits and the order of arrival are then the caller's own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from afd_shim.config import parse_afd_config
from afd_shim.connectors.base import AttentionConnector, ExchangeHeader, Hello, Reply
from afd_shim.connectors.registry import create_attention_connector
from afd_shim.testing.servers import Server

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FFN_INSPECTION", "PlayedAttention", "Request", "expert_checksums", "inspect_eplb", "is_running", "meet"]

FFN_INSPECTION = "afd_shim.testing.eplb_inspection.EplbInspection"
"""vLLM's `--worker-extension-cls` of an FFN server that is met here."""

_SETTLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Request:
    """What one Attention rank sends for one layer; `rows` and `logits` are real rows first."""

    rows: torch.Tensor
    logits: torch.Tensor
    real: int


@dataclass
class PlayedAttention:
    """Every Attention rank of a deployment; a context manager that says goodbye."""

    server: Server
    ranks: list[AttentionConnector]
    hello: Hello
    _steps: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self.ranks:
            rank.close()

    @property
    def layers(self) -> tuple[int, ...]:
        """The MoE layers, in the order of the forward."""
        return self.hello.moe_layers

    def random(self, real: int, padding: int = 0, *, favourite: int | None = None) -> Request:
        """Rows of a request with random routing, or with one expert that every token chooses first."""
        rows = real + padding
        logits = torch.randn(rows, self.hello.num_experts)
        if favourite is not None:
            logits[:, favourite] += 10.0
        return Request(torch.randn(rows, self.hello.hidden_size), logits, real)

    def halves(self, real: int) -> Request:
        """Rows that two random experts share, each with a weight of exactly one half, for a model with top-k 2.

        Halving is exact, and so the sum of both is rounded once: whichever ranks hold the experts, and in whichever
        order they are added, the output has the same bits.
        """
        experts = torch.rand(real, self.hello.num_experts).topk(2, dim=-1).indices
        logits = torch.full((real, self.hello.num_experts), -1000.0).scatter_(1, experts, 0.0)
        return Request(torch.randn(real, self.hello.hidden_size), logits, real)

    def exchange(self, layer: int, requests: Mapping[int, Request]) -> list[torch.Tensor]:
        """Send the requests of one layer in the given order, then receive every answer."""
        sent = []
        for rank, request in requests.items():
            header = ExchangeHeader(
                next(self._steps),
                layer,
                0,
                request.rows.shape[0],
                request.real,
                Reply.FINISHED,
                dummy=request.real == 0,
                last_layer=layer == self.layers[-1],
            )
            logits = request.logits if self.hello.gate_on_attention else None
            self.ranks[rank].send_attn_output(header, request.rows, logits)
            sent.append((rank, header, request))
        return [
            self.ranks[rank].recv_ffn_output(header, torch.empty_like(request.rows)) for rank, header, request in sent
        ]

    def step(self, requests: Mapping[int, Request]) -> list[list[torch.Tensor]]:
        """One step of several Attention ranks, layer by layer."""
        return [self.exchange(layer, requests) for layer in self.layers]

    def tick(self, rows: int = 1) -> None:
        """One dummy step; with 0 rows the FFN computes nothing and only steps."""
        self.exchange(self.layers[-1], {0: self.random(0, rows)})

    def advance_to_rearrangement(self, interval: int) -> list[dict[str, Any]]:
        """Dummy steps until the next one rearranges; returns what the FFN ranks say then."""
        for _ in range(interval - 1 - inspect_eplb(self.server)[0]["rearrangement_step"]):
            self.tick(rows=0)
        return inspect_eplb(self.server)


def meet(server: Server, additional_config: Mapping[str, object]) -> tuple[list[AttentionConnector], Hello]:
    """Play every Attention rank of a deployment.

    Args:
        server: a ready FFN server, with `FFN_INSPECTION`.
        additional_config: the one it was started with.

    Returns:
        The connected ranks, which the caller closes, and what the FFN says of itself.

    Raises:
        TransportError: the FFN refused a rank or did not answer.

    """
    afd = parse_afd_config(additional_config)
    assert afd is not None  # the server has taken it
    own = msgspec.convert(server.rpc("inspect_hello")[0], Hello)
    ranks = [
        create_attention_connector(
            afd,
            msgspec.structs.replace(own, role="attention", rank=rank),
            device=torch.device("cpu"),
            on_peer_lost=_ignore,
        )
        for rank in range(afd.num_attention_ranks)
    ]
    with ThreadPoolExecutor(len(ranks)) as pool:  # rendezvous needs all at once
        for connected in [pool.submit(rank.connect) for rank in ranks]:
            connected.result()
    return ranks, own


def inspect_eplb(server: Server) -> list[dict[str, Any]]:
    """What every FFN rank says of its balancer, once they have stepped for all that was answered."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        first = server.rpc("inspect_eplb")
        second = server.rpc("inspect_eplb")
        if first == second or time.monotonic() > deadline:
            return second


def expert_checksums(told: Sequence[Mapping[str, Any]]) -> list[dict[int, set[str]]]:
    """Per MoE layer, the checksums of all slots that hold each logical expert; equal replicas give one.

    Args:
        told: by `inspect_eplb`.

    """
    layers = []
    for row, placement in enumerate(told[0]["placement"]):
        slots = [checksum for rank in told for checksum in rank["checksums"][row]]
        held: dict[int, set[str]] = {}
        for expert, checksum in zip(placement, slots, strict=True):
            held.setdefault(expert, set()).add(checksum)
        layers.append(held)
    return layers


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _ignore(_: BaseException) -> None:
    """The next exchange raises the loss."""
