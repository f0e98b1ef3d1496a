"""FFN rank 0 over TCP: receives requests as they arrive, publishes plans, answers."""

from __future__ import annotations

import select
import socket

import torch

from afd_shim.connectors.base import Batch, ExchangeHeader, ExchangeStats
from afd_shim.connectors.batches import Request, Rows, make_batch
from afd_shim.connectors.framing import ConnectionEndedError, ready, recv_first, recv_rest, recv_some, send_all
from afd_shim.connectors.membership import Membership, peer_name
from afd_shim.connectors.sequencer import Plan, Sequencer, place
from afd_shim.connectors.staging import staging_for
from afd_shim.connectors.wire import EXCHANGE, ExchangeCodec, Kind, PlanCodec, PlanEntry
from afd_shim.errors import FrameError


class _Link:
    """The data connection of one Attention group, and the request that is arriving on it."""

    def __init__(self, group: int, peer: str, sock: socket.socket, request: Request) -> None:
        self.group = group
        self.peer = peer
        self.sock = sock
        self.request = request
        self.frame = bytearray(EXCHANGE.size)
        self.views = [memoryview(self.frame), request.payload]
        self.header: ExchangeHeader | None = None
        self.logits_dtype = ""
        self.got = 0
        self.size = 0


class Leader:
    """The serving thread's half of FFN rank 0; see `FFNConnector`."""

    def __init__(self, members: Membership, device: torch.device, stats: ExchangeStats) -> None:
        agreement = members.agreement
        topology = members.topology
        self._members = members
        self._stats = stats
        self._codec = ExchangeCodec(agreement)
        self._plans = PlanCodec(agreement)
        self._sequencer = Sequencer(agreement.max_rows)
        self._row_bytes = agreement.row_bytes
        self._on_device = device.type != "cpu"
        self._merged = Rows(agreement, device)
        self._staging = staging_for(device, agreement.max_rows * agreement.row_bytes)
        self._answer = bytearray(EXCHANGE.size)
        self._answer_view = memoryview(self._answer)
        self._followers = [
            (name, members.data[name]) for name in (peer_name("ffn", rank) for rank in range(1, topology.num_ffn_ranks))
        ]
        self._poller = select.poll()
        self._links: dict[int, _Link] = {}
        for group in range(topology.num_groups):
            peer = peer_name("attention", topology.sender(group, 0))
            sock = members.data.get(peer)
            if sock is None:  # it said goodbye before it was ever served
                continue
            request = Request(agreement, pinned=self._on_device)
            self._links[sock.fileno()] = _Link(group, peer, sock, request)
            self._poller.register(sock, select.POLLIN)
        self._by_group = {link.group: link for link in self._links.values()}

    def next_batch(self) -> Batch | None:
        """Wait for a batch; None when closing, or when every Attention rank said goodbye."""
        wait = False  # first take what has arrived, so that requests are merged
        while True:
            if len(self._links) > 1:
                for fd, _ in ready(self._poller, wait=wait):
                    self._read(self._links[fd], wait=False)
            elif wait:
                # Nothing else can arrive: waiting in the receive itself saves a system call.
                self._read(next(iter(self._links.values())), wait=True)
            plan = self._sequencer.next_plan()
            if plan is not None:
                return self._batch(plan)
            if not self._links or self._members.closing.is_set:
                return None
            wait = True

    def _read(self, link: _Link, *, wait: bool) -> None:
        """Take what has arrived on `link`, or wait for it; a complete request goes to the sequencer."""
        try:
            if wait and link.got == 0:
                link.got = recv_first(link.sock, link.views)
            else:
                link.got = recv_some(link.sock, link.views, link.got, 0 if wait else socket.MSG_DONTWAIT)
            if link.header is None and link.got >= EXCHANGE.size:
                self._begin(link)
            if wait and link.header is not None and link.got < link.size:
                rest = [link.views[0], link.request.payload[: link.size - EXCHANGE.size]]
                recv_rest(link.sock, rest, link.got, link.size)
                link.got = link.size
        except ConnectionEndedError:
            if not self._members.closing.is_set:
                self._members.check_goodbye(link.peer)
                self._drop(link)
            return
        if link.header is not None and link.got > link.size:
            raise FrameError(f"{link.peer} sent a second request before the first was answered; restart both servers.")
        if link.header is not None and link.got == link.size:
            link.request.arrived(link.header.rows, link.logits_dtype)
            self._stats.bytes_received += link.size
            self._sequencer.arrive(PlanEntry(link.group, link.header, link.logits_dtype))
            link.header = None
            link.got = 0

    def _begin(self, link: _Link) -> None:
        """The header of a request is complete; FrameError unless it is one that was agreed on."""
        try:
            link.header, link.logits_dtype = self._codec.decode(link.frame, Kind.REQUEST)
        except FrameError as error:
            raise FrameError(f"{link.peer} sent a bad frame: {error} Restart both servers.") from error
        link.size = EXCHANGE.size + self._codec.payload_bytes(link.header.rows, link.logits_dtype)

    def _batch(self, plan: Plan) -> Batch:
        if self._followers:
            frame = self._plans.encode(plan.step, plan.entries)
            for peer, sock in self._followers:
                try:
                    send_all(sock, [frame], len(frame))
                except ConnectionEndedError as error:
                    raise self._members.lost(peer) from error
                self._stats.bytes_sent += len(frame)
        members = place(plan.entries)
        if len(members) == 1 and not self._on_device:
            return make_batch(plan.step, members, self._by_group[members[0].group].request)
        self._merged.use_logits(plan.entries[0].logits_dtype)
        for group, header, first_real, first_padding in members:
            source = self._by_group[group].request
            self._merged.copy_from(source, 0, header.real_rows, first_real)
            self._merged.copy_from(source, header.real_rows, header.rows, first_padding)
        return make_batch(plan.step, members, self._merged)

    def answer(self, batch: Batch, output: torch.Tensor) -> None:
        """Send every member its rows. Raises PeerLostError."""
        data = self._staging.outgoing((output,))[0]
        width = self._row_bytes
        for group, header, first_real, first_padding in batch.members:
            link = self._by_group[group]
            size = EXCHANGE.size + self._codec.encode(self._answer, Kind.REPLY, header)
            padding = header.rows - header.real_rows
            views = [self._answer_view, data[first_real * width : (first_real + header.real_rows) * width]]
            if padding:
                views.append(data[first_padding * width : (first_padding + padding) * width])
            try:
                send_all(link.sock, views, size)
            except ConnectionEndedError:
                if self._members.closing.is_set:
                    return
                self._members.check_goodbye(link.peer)  # the next receive drops it
                continue
            self._stats.bytes_sent += size

    def _drop(self, link: _Link) -> None:
        fd = link.sock.fileno()
        self._poller.unregister(fd)
        del self._links[fd]
