"""TcpAFDConnector on an Attention rank."""

from __future__ import annotations

import operator
import threading
import time

import torch

from afd_shim.connectors.base import (
    AttentionConnector,
    ConnectorConfig,
    ExchangeHeader,
    ExchangeStats,
    Hello,
    PeerLostCallback,
)
from afd_shim.connectors.framing import ConnectionEndedError, recv_first, recv_rest, send_all
from afd_shim.connectors.joiner import HUB, Joiner
from afd_shim.connectors.membership import peer_name
from afd_shim.connectors.staging import InPlace, Staging, staging_for
from afd_shim.connectors.topology import check_rank
from afd_shim.connectors.wire import DTYPES, EXCHANGE, Agreement, ExchangeCodec, Kind, check_header
from afd_shim.errors import FrameError, PeerLostError, TransportError

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
"""What the dtypes that travel are called on the wire."""

_PADDING = memoryview(bytes(16))


class TcpAttentionConnector(AttentionConnector):
    """Sends this rank's requests over TCP, and receives FFN rank 0's answers.

    Raises ConfigError for a rank that has no place in the configured counts.
    """

    def __init__(
        self,
        afd_config: ConnectorConfig,
        hello: Hello,
        device: torch.device,
        on_peer_lost: PeerLostCallback,
    ) -> None:
        check_rank("attention", hello.rank, hello.num_attention_ranks)
        self.stats = ExchangeStats()
        self._timeout_s = afd_config.startup_timeout_s
        self._device = device
        self._is_here = operator.attrgetter(f"is_{device.type}")  # a quarter of what comparing devices costs
        self._members = Joiner((afd_config.host, afd_config.port), hello, on_peer_lost)
        self._members.in_flight = self._describe_in_flight
        self._in_flight: ExchangeHeader | None = None
        self._sent_at = 0.0
        self._io = threading.Lock()
        """Held while a data connection is used: `close` waits for it before it closes them."""

        self._frame = bytearray(EXCHANGE.size)
        self._frame_view = memoryview(self._frame)
        self._answer = bytearray(EXCHANGE.size)
        self._answer_view = memoryview(self._answer)
        self._expected = bytearray(EXCHANGE.size)
        self._staging: Staging = InPlace()

    def connect(self) -> None:
        """See `AttentionConnector.connect`."""
        self._members.connect(time.monotonic() + self._timeout_s)
        agreement = self._members.agreement
        self._agreement: Agreement = agreement
        self._codec = ExchangeCodec(agreement)
        self._prepare(agreement)
        self._dtype: torch.dtype = getattr(torch, agreement.dtype)
        topology = self._members.topology
        rank = self._members.hello.rank
        self._fed = [
            (name, self._members.data[name])
            for name in (peer_name("ffn", ffn) for ffn in topology.ffn_ranks_fed_by(rank))
        ]
        self._is_answered = topology.is_answered(rank)

    def _prepare(self, agreement: Agreement) -> None:
        """Get ready to move payloads of up to what was agreed on."""
        self._staging = staging_for(self._device, agreement.max_payload_bytes)

    def send_attn_output(
        self,
        header: ExchangeHeader,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionConnector.send_attn_output`."""
        self._sent_at = time.perf_counter()
        self._check(header, hidden_states, router_logits)
        self._in_flight = header
        with self._io:
            logits_dtype = "" if router_logits is None else DTYPE_NAMES[router_logits.dtype]
            payload = self._codec.encode(self._frame, Kind.REQUEST, header, logits_dtype)
            if router_logits is None:
                views = [self._frame_view, *self._staging.outgoing((hidden_states,))]
            else:
                hidden, logits = self._staging.outgoing((hidden_states, router_logits))
                gap = self._agreement.logits_offset(header.rows) - len(hidden)
                views = [self._frame_view, hidden, _PADDING[:gap], logits]
            size = EXCHANGE.size + payload
            for peer, sock in self._fed:
                try:
                    send_all(sock, views, size)
                except ConnectionEndedError as error:
                    raise self._ended(peer) from error
                self.stats.bytes_sent += size

    def recv_ffn_output(self, header: ExchangeHeader, out: torch.Tensor) -> torch.Tensor:
        """See `AttentionConnector.recv_ffn_output`."""
        if header is not self._in_flight:
            raise ValueError(f"{header} was not sent last; receive each answer before sending on.")
        self._check_rows("out", out, header.rows, self._agreement.hidden_size, self._dtype)
        if self._is_answered:
            with self._io:
                self._receive(header, out)
        else:
            # The group's first rank holds the sum; adding zeros leaves it as it is.
            out.zero_()
        self._in_flight = None
        stats = self.stats
        stats.exchanges += 1
        stats.rows += header.rows
        stats.real_rows += header.real_rows
        stats.exchange_seconds += time.perf_counter() - self._sent_at
        return out

    def _receive(self, header: ExchangeHeader, out: torch.Tensor) -> None:
        sock = self._members.data.get(HUB)
        if sock is None:
            raise self._ended(HUB)
        # All of this runs while the FFN computes; what follows the receive is kept short.
        size = EXCHANGE.size + self._codec.encode(self._expected, Kind.REPLY, header)
        views = [self._answer_view, self._staging.incoming(out)]
        try:
            got = recv_first(sock, views)
            if got < EXCHANGE.size:
                recv_rest(sock, views[:1], got, EXCHANGE.size)
                got = EXCHANGE.size
            if self._answer != self._expected:
                answer, _ = self._codec.decode(self._answer, Kind.REPLY)
                raise FrameError(f"{HUB} answered {answer} to {header}; restart both servers.")
            recv_rest(sock, views, got, size)
        except ConnectionEndedError as error:
            raise self._ended(HUB) from error
        self._staging.landed(out)
        self.stats.bytes_received += size

    def close(self, reason: str | None = None) -> None:
        """See `AttentionConnector.close`."""
        self._members.close(reason)
        with self._io:
            for connection in self._members.data.values():
                connection.close()
            self._members.data.clear()

    def _check(
        self,
        header: ExchangeHeader,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None,
    ) -> None:
        if self._in_flight is not None:
            raise ValueError(f"{self._in_flight} has not been answered; receive it first.")
        agreed = self._agreement
        if header.reply != agreed.reply or header.rows > agreed.max_rows:
            raise ValueError(f"{header} is not what was agreed on: {agreed}.")
        try:
            check_header(header, agreed)
        except FrameError as error:
            raise ValueError(f"{header}: {error}") from error
        self._check_rows("hidden_states", hidden_states, header.rows, agreed.hidden_size, self._dtype)
        if (router_logits is None) != (agreed.num_experts == 0):
            raise ValueError("router_logits travel exactly where Attention owns the gate.")
        if router_logits is not None:
            dtype = router_logits.dtype
            if dtype not in DTYPE_NAMES:
                raise ValueError(f"router_logits: {dtype}; only {list(DTYPE_NAMES)} travel.")
            self._check_rows("router_logits", router_logits, header.rows, agreed.num_experts, dtype)

    def _check_rows(self, what: str, tensor: torch.Tensor, rows: int, width: int, dtype: torch.dtype) -> None:
        if (
            tensor.shape != (rows, width)
            or tensor.dtype != dtype
            or not tensor.is_contiguous()
            or not self._is_here(tensor)
        ):
            raise ValueError(
                f"{what}: a {tuple(tensor.shape)} {tensor.dtype} tensor on {tensor.device}, but a "
                f"contiguous {(rows, width)} {dtype} one on {self._device} was agreed."
            )

    def _ended(self, peer: str) -> PeerLostError | TransportError:
        if self._members.closing.is_set:
            return TransportError(f"{self._members.name} was closed during an exchange.")
        return self._members.lost(peer)

    def _describe_in_flight(self) -> str:
        header = self._in_flight
        return "nothing" if header is None else describe(header)


def describe(header: ExchangeHeader) -> str:
    """One exchange, for a message."""
    return f"step {header.step}, layer {header.layer}, stage {header.stage}, {header.rows} rows"
