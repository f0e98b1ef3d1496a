"""FFN ranks above 0 over TCP: run what FFN rank 0's plans say, in their order."""

from __future__ import annotations

import torch

from afd_shim.connectors.base import Batch, ExchangeStats, Member
from afd_shim.connectors.batches import Rows, make_batch
from afd_shim.connectors.framing import ConnectionEndedError, recv_first, recv_rest
from afd_shim.connectors.joiner import HUB
from afd_shim.connectors.membership import Membership, peer_name
from afd_shim.connectors.sequencer import place
from afd_shim.connectors.staging import writable_bytes
from afd_shim.connectors.wire import EXCHANGE, ExchangeCodec, Kind, PlanCodec
from afd_shim.errors import FrameError, TransportError


class Follower:
    """The serving thread's half of an FFN rank above 0; see `FFNConnector`."""

    def __init__(self, members: Membership, device: torch.device, stats: ExchangeStats) -> None:
        agreement = members.agreement
        self._members = members
        self._stats = stats
        self._agreement = agreement
        self._codec = ExchangeCodec(agreement)
        self._plans = PlanCodec(agreement)
        self._plan = bytearray(self._plans.size)
        self._frame = bytearray(EXCHANGE.size)
        self._gap = bytearray(16)
        self._host = Rows(agreement, torch.device("cpu"), pinned=device.type == "cuda")
        self._hidden_bytes = writable_bytes(self._host.hidden)
        self._logits_bytes = writable_bytes(self._host.logits_memory)
        self._rows = self._host
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._rows = Rows(agreement, device)
            # torch leaves the constructor of Event untyped.
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._device = device

    def next_batch(self) -> Batch | None:
        """Wait for the next plan and its rows; None when closing, or when rank 0 said goodbye."""
        try:
            hub, plan = self._members.data[HUB], [memoryview(self._plan)]
            recv_rest(hub, plan, recv_first(hub, plan), self._plans.size)
        except ConnectionEndedError:
            if not self._members.closing.is_set:
                self._members.check_goodbye(HUB)
            return None
        step, entries = self._plans.decode(self._plan)
        self._stats.bytes_received += self._plans.size
        members = place(entries)
        if self._copied is not None:
            # The previous copy may still read the host rows that the sockets are about to fill.
            self._copied.synchronize()
        logits_dtype = entries[0].logits_dtype
        self._host.use_logits(logits_dtype)
        self._rows.use_logits(logits_dtype)
        for member in members:
            self._receive(member, logits_dtype)
        if self._copied is not None:
            self._rows.copy_from(self._host, 0, sum(m.header.rows for m in members), 0)
            self._copied.record(torch.cuda.current_stream(self._device))
        return make_batch(step, members, self._rows)

    def answer(self, batch: Batch, output: torch.Tensor) -> None:
        """FFN rank 0 alone answers."""

    def _receive(self, member: Member, logits_dtype: str) -> None:
        """One request's rows, straight to their places in the batch."""
        group, header, first_real, first_padding = member
        spans = (
            (first_real, first_real + header.real_rows),
            (first_padding, first_padding + header.rows - header.real_rows),
        )
        views = [memoryview(self._frame)]
        width = self._agreement.row_bytes
        views += [self._hidden_bytes[start * width : end * width] for start, end in spans]
        if logits_dtype:
            gap = self._agreement.logits_offset(header.rows) - header.rows * width
            width = self._agreement.logits_row_bytes(logits_dtype)
            views.append(memoryview(self._gap)[:gap])
            views += [self._logits_bytes[start * width : end * width] for start, end in spans]
        size = EXCHANGE.size + self._codec.payload_bytes(header.rows, logits_dtype)
        peer = peer_name("attention", self._members.topology.sender(group, self._members.hello.rank))
        try:
            recv_rest(self._members.data[peer], views, 0, size)
        except ConnectionEndedError as error:
            if self._members.closing.is_set:
                raise TransportError(f"{self._members.name} was closed.") from error
            raise self._members.lost(peer) from error
        found = self._codec.decode(self._frame, Kind.REQUEST)
        if found != (header, logits_dtype):
            raise FrameError(f"{peer} sent {found}, but FFN rank 0 planned {header}; restart all servers.")
        self._stats.bytes_received += size
