"""TcpAFDConnector on an FFN rank."""

from __future__ import annotations

import threading
import time
from typing import Protocol

import torch

from afd_shim.connectors.base import (
    Batch,
    ConnectorConfig,
    ExchangeStats,
    FFNConnector,
    Hello,
    PeerLostCallback,
)
from afd_shim.connectors.hub import Hub
from afd_shim.connectors.joiner import Joiner
from afd_shim.connectors.membership import Membership
from afd_shim.connectors.tcp_follower import Follower
from afd_shim.connectors.tcp_leader import Leader
from afd_shim.connectors.topology import check_rank


class BatchSource(Protocol):
    """The serving thread's half of a connector: FFN rank 0's, or another FFN rank's."""

    def next_batch(self) -> Batch | None:
        """Wait for a batch; None when closing, or when nobody is left to serve."""

    def answer(self, batch: Batch, output: torch.Tensor) -> None:
        """Send every member its rows, on FFN rank 0; nothing on the others."""


class TcpFFNConnector(FFNConnector):
    """Receives batches over TCP; FFN rank 0 sequences them for all, and answers.

    Raises ConfigError for a rank that has no place in the configured counts, and on rank 0
    TransportError if the address cannot be bound.
    """

    def __init__(
        self,
        afd_config: ConnectorConfig,
        hello: Hello,
        device: torch.device,
        on_peer_lost: PeerLostCallback,
    ) -> None:
        check_rank("ffn", hello.rank, hello.num_ffn_ranks)
        self.stats = ExchangeStats()
        self._timeout_s = afd_config.startup_timeout_s
        self._device = device
        address = (afd_config.host, afd_config.port)
        kind = Hub if hello.rank == 0 else Joiner
        self._members: Membership = kind(address, hello, on_peer_lost)
        self._members.in_flight = self._describe_in_flight
        self._source: BatchSource | None = None
        self._in_flight: Batch | None = None
        self._received_at = 0.0
        self._io = threading.Lock()
        """Held while data connections are used: `close` waits for it before it closes them."""

    @property
    def address(self) -> tuple[str, int]:
        """Where FFN rank 0 listens (the port that was bound, where 0 was configured)."""
        assert isinstance(self._members, Hub)
        return self._members.address

    def connect(self) -> None:
        """See `FFNConnector.connect`."""
        self._members.connect(time.monotonic() + self._timeout_s)
        if self._members.closing.is_set:
            return
        with self._io:
            self._source = self._open_source()

    def _open_source(self) -> BatchSource:
        """What receives batches, once everyone is here."""
        kind = Leader if isinstance(self._members, Hub) else Follower
        return kind(self._members, self._device, self.stats)

    def recv_attn_output(self) -> Batch | None:
        """See `FFNConnector.recv_attn_output`."""
        with self._io:
            if self._source is None or self._members.closing.is_set:
                return None
            self._in_flight = None
            batch = self._source.next_batch()
            self._in_flight = batch
            self._received_at = time.perf_counter()
        if batch is None:
            self._members.close(None)  # the other FFN ranks end when rank 0 says goodbye
        return batch

    def send_ffn_output(self, batch: Batch, output: torch.Tensor) -> None:
        """See `FFNConnector.send_ffn_output`."""
        like = batch.hidden_states
        if batch is not self._in_flight:
            raise ValueError("only the batch received last can be answered, and only once.")
        if (
            output.shape != like.shape
            or output.dtype != like.dtype
            or output.device != like.device
            or not output.is_contiguous()
        ):
            raise ValueError(
                f"output: a {tuple(output.shape)} {output.dtype} tensor on {output.device}, but a "
                f"contiguous {tuple(like.shape)} {like.dtype} one on {like.device} was agreed."
            )
        with self._io:
            if self._source is not None:
                self._source.answer(batch, output)
        self._in_flight = None
        stats = self.stats
        stats.exchanges += 1
        stats.rows += like.shape[0]
        stats.real_rows += batch.real_rows
        stats.exchange_seconds += time.perf_counter() - self._received_at

    def close(self, reason: str | None = None) -> None:
        """See `FFNConnector.close`."""
        self._members.close(reason)
        with self._io:
            for connection in self._members.data.values():
                connection.close()
            self._members.data.clear()
            self._source = None

    def _describe_in_flight(self) -> str:
        batch = self._in_flight
        if batch is None:
            return "nothing"
        return f"layer {batch.layer}, stage {batch.stage}, {batch.hidden_states.shape[0]} rows"
