"""P2pNcclAFDConnector: headers over TCP, payloads from GPU to GPU through NCCL.

A header announces each transfer; the receiver posts its receives in the order in which headers came.
Neither side waits on the host for a transfer: Attention posts the receive of an answer right after it
has sent, so both hosts may run ahead of their GPUs, and streams alone order the work.
"""

from __future__ import annotations

import time

import torch

from afd_shim.connectors.base import (
    Batch,
    ConnectorConfig,
    ExchangeHeader,
    Hello,
    PeerLostCallback,
)
from afd_shim.connectors.device_pair import GroupFactory, nccl_group
from afd_shim.connectors.framing import send_all
from afd_shim.connectors.joiner import HUB
from afd_shim.connectors.membership import peer_name
from afd_shim.connectors.p2p_follower import P2pFollower
from afd_shim.connectors.p2p_leader import P2pLeader
from afd_shim.connectors.pairs import Pairs
from afd_shim.connectors.tcp_attention import DTYPE_NAMES, TcpAttentionConnector, describe
from afd_shim.connectors.tcp_ffn import TcpFFNConnector
from afd_shim.connectors.wire import EXCHANGE, Agreement, Kind

__all__ = ["P2pNcclAttentionConnector", "P2pNcclFFNConnector"]


class P2pNcclAttentionConnector(TcpAttentionConnector):
    """Sends this rank's requests and receives FFN rank 0's answers through NCCL.

    `ExchangeStats.exchange_seconds` is this thread's time: transfers are not waited for.

    Raises ConfigError for a rank that has no place in the configured counts.
    """

    def __init__(
        self,
        afd_config: ConnectorConfig,
        hello: Hello,
        device: torch.device,
        on_peer_lost: PeerLostCallback,
        *,
        group_factory: GroupFactory = nccl_group,
    ) -> None:
        self._pairs = Pairs(on_peer_lost)
        self._factory = group_factory
        self._answered: ExchangeHeader | None = None
        super().__init__(afd_config, hello, device, self._pairs)

    def connect(self) -> None:
        """See `AttentionConnector.connect`.

        Raises ConfigError where a peer is on the same GPU.
        """
        deadline = time.monotonic() + self._timeout_s
        super().connect()
        for peer, _ in self._fed:
            self._pairs.open(self._members, peer, self._device, deadline, self._factory)

    def _prepare(self, agreement: Agreement) -> None:
        """Nothing is staged in host memory."""

    def send_attn_output(
        self,
        header: ExchangeHeader,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionConnector.send_attn_output`; enqueued on the current stream."""
        self._sent_at = time.perf_counter()
        self._check(header, hidden_states, router_logits)
        self._in_flight = header
        logits_dtype = "" if router_logits is None else DTYPE_NAMES[router_logits.dtype]
        self._codec.encode(self._frame, Kind.REQUEST, header, logits_dtype)
        for peer, sock in self._fed:
            with self._pairs.name_losses(self._members, peer):
                if peer == HUB:  # the others learn from its plans
                    with self._io:
                        send_all(sock, [self._frame], EXCHANGE.size)
                    self.stats.bytes_sent += EXCHANGE.size
                for tensor in (hidden_states, router_logits):
                    if tensor is not None:
                        self._pairs[peer].send(tensor)
                        self.stats.bytes_sent += tensor.nbytes

    def _receive(self, header: ExchangeHeader, out: torch.Tensor) -> None:
        with self._pairs.name_losses(self._members, HUB):
            self._pairs[HUB].recv(out)
        self._answered = header
        self.stats.bytes_received += out.nbytes

    def raise_if_lost(self) -> None:
        """Raise PeerLostError if a peer is gone: what the streams hold then is not an answer."""
        if self._pairs.lost is not None:
            raise self._pairs.lost

    def close(self, reason: str | None = None) -> None:
        """See the interface; without a reason, what is in flight may end first (5 s)."""
        if reason is None and self._pairs.lost is None:
            self._pairs.drain()
        super().close(reason)
        self._pairs.abort()

    def _describe_in_flight(self) -> str:
        header = self._in_flight
        if header is None and not self._pairs.are_idle:
            header = self._answered
        return "nothing" if header is None else describe(header)


class P2pNcclFFNConnector(TcpFFNConnector):
    """Receives batches and answers them through NCCL; FFN rank 0 sequences them for all.

    Raises ConfigError for a rank that has no place in the configured counts, and on rank 0
    TransportError if the address cannot be bound.
    """

    def __init__(
        self,
        afd_config: ConnectorConfig,
        hello: Hello,
        device: torch.device,
        on_peer_lost: PeerLostCallback,
        *,
        group_factory: GroupFactory = nccl_group,
    ) -> None:
        self._pairs = Pairs(on_peer_lost)
        self._factory = group_factory
        super().__init__(afd_config, hello, device, self._pairs)

    def _open_source(self) -> P2pLeader | P2pFollower:
        deadline = time.monotonic() + self._timeout_s
        members, topology = self._members, self._members.topology
        rank = members.hello.rank
        for group in range(topology.num_groups):
            peer = peer_name("attention", topology.sender(group, rank))
            if peer not in members.data:  # it said goodbye before it was ever served
                continue
            self._pairs.open(members, peer, self._device, deadline, self._factory)
        kind = P2pLeader if rank == 0 else P2pFollower
        return kind(members, self._device, self.stats, self._pairs)

    def send_ffn_output(self, batch: Batch, output: torch.Tensor) -> None:
        """See `FFNConnector.send_ffn_output`; enqueued on the current stream."""
        with self._pairs.name_losses(self._members, self._asking(batch)):
            super().send_ffn_output(batch, output)

    def close(self, reason: str | None = None) -> None:
        """See the interface; without a reason, what is in flight may end first (5 s)."""
        if reason is None and self._pairs.lost is None:
            self._pairs.drain()
        super().close(reason)
        self._pairs.abort()

    def _asking(self, batch: Batch) -> str:
        return peer_name("attention", self._members.topology.sender(batch.members[0].group, 0))
