"""FFN rank 0 over NCCL: reads headers as they arrive, publishes plans, moves rows from GPU to GPU."""

from __future__ import annotations

import select
import socket
from collections import deque

import torch

from afd_shim.connectors.base import Batch, ExchangeStats, Member
from afd_shim.connectors.batches import Rows, make_batch
from afd_shim.connectors.framing import ConnectionEndedError, ready, send_all
from afd_shim.connectors.membership import Membership, peer_name
from afd_shim.connectors.pairs import Pairs
from afd_shim.connectors.sequencer import Plan, Sequencer, place
from afd_shim.connectors.wire import EXCHANGE, ExchangeCodec, Kind, PlanCodec, PlanEntry
from afd_shim.errors import FrameError

_MAX_WAITING = 4096
"""Headers of one group that may wait: far more than the MoE layers of two forwards."""

_READ_BYTES = 64 * EXCHANGE.size


class _Link:
    """One Attention group: its connection for headers, and the requests it has announced."""

    def __init__(self, group: int, peer: str, sock: socket.socket, rows: Rows) -> None:
        self.group = group
        self.peer = peer
        self.sock = sock
        self.rows = rows
        self.inbox = bytearray()
        self.waiting: deque[PlanEntry] = deque()
        """Announced, oldest first; Attention runs ahead of its GPU, so there may be several."""

        self.active: PlanEntry | None = None
        """The request that is with the sequencer, or being computed."""

        self.has_ended = False
        """Its rank has said goodbye: what is left to answer has no rows."""


class P2pLeader:
    """The serving thread's half of FFN rank 0; see `FFNConnector`.

    Each group's rows arrive in a buffer of its own. One set is enough: the receive of a request waits,
    on the stream, for whatever still reads the buffer.
    """

    def __init__(self, members: Membership, device: torch.device, stats: ExchangeStats, pairs: Pairs) -> None:
        agreement = members.agreement
        topology = members.topology
        self._members = members
        self._stats = stats
        self._pairs = pairs
        self._agreement = agreement
        self._codec = ExchangeCodec(agreement)
        self._plans = PlanCodec(agreement)
        self._sequencer = Sequencer(agreement.max_rows)
        self._merged = Rows(agreement, device) if topology.num_groups > 1 else None
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
            self._links[sock.fileno()] = _Link(group, peer, sock, Rows(agreement, device))
            self._poller.register(sock, select.POLLIN)
        self._by_group = {link.group: link for link in self._links.values()}

    def next_batch(self) -> Batch | None:
        """Announce and receive a batch; None when closing, or when every Attention rank said goodbye."""
        wait = False  # first take what has arrived, so that requests are merged
        while True:
            for fd, _ in ready(self._poller, wait=wait):
                self._read(self._links[fd])
            plan = self._sequencer.next_plan()
            if plan is not None:
                return self._batch(plan)
            if not self._links or self._members.closing.is_set:
                return None
            wait = True

    def answer(self, batch: Batch, output: torch.Tensor) -> None:
        """Send every member its rows, and let its next request in. Raises PeerLostError."""
        for member in batch.members:
            link = self._by_group[member.group]
            rows = output if len(batch.members) == 1 else _rows_of(member, output)
            with self._pairs.name_losses(self._members, link.peer):
                self._pairs[link.peer].send(rows)
            self._stats.bytes_sent += rows.nbytes
            link.active = None
            self._let_in(link)
            if link.has_ended and link.active is None:
                self._drop(link)

    def _read(self, link: _Link) -> None:
        """Take the headers that have arrived on `link`."""
        try:
            data = link.sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if not self._members.closing.is_set:
                self._end(link)
            return
        link.inbox += data
        self._stats.bytes_received += len(data)
        while len(link.inbox) >= EXCHANGE.size:
            try:
                entry = PlanEntry(link.group, *self._codec.decode(link.inbox, Kind.REQUEST))
            except FrameError as error:
                raise FrameError(f"{link.peer}: {error} Restart both servers.") from error
            del link.inbox[: EXCHANGE.size]
            link.waiting.append(entry)
        if len(link.waiting) > _MAX_WAITING:
            raise FrameError(f"{link.peer}: more than {_MAX_WAITING} requests wait for answers; restart both.")
        self._let_in(link)

    def _let_in(self, link: _Link) -> None:
        """Hand a group's oldest request to the sequencer, one at a time: the next one builds on its answer."""
        if link.waiting and link.active is None:
            link.active = link.waiting.popleft()
            self._sequencer.arrive(link.active)

    def _end(self, link: _Link) -> None:
        """A connection has ended. Raises PeerLostError unless its rank said goodbye and awaits no rows."""
        self._members.check_goodbye(link.peer)
        left = [*link.waiting] if link.active is None else [link.active, *link.waiting]
        if any(entry.header.rows for entry in left):
            raise self._members.lost(link.peer)
        self._poller.unregister(link.sock)
        link.has_ended = True
        if link.active is None:
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        del self._links[link.sock.fileno()]
        self._pairs.close(link.peer)

    def _batch(self, plan: Plan) -> Batch:
        self._publish(plan)
        members = place(plan.entries)
        for entry in plan.entries:
            self._receive(self._by_group[entry.group], entry)
        if len(members) == 1:
            return make_batch(plan.step, members, self._by_group[members[0].group].rows)
        assert self._merged is not None  # one group alone never has two requests in a plan
        self._merged.use_logits(plan.entries[0].logits_dtype)
        for group, header, first_real, first_padding in members:
            source = self._by_group[group].rows
            self._merged.copy_from(source, 0, header.real_rows, first_real)
            self._merged.copy_from(source, header.real_rows, header.rows, first_padding)
        return make_batch(plan.step, members, self._merged)

    def _publish(self, plan: Plan) -> None:
        if not self._followers:
            return
        frame = self._plans.encode(plan.step, plan.entries)
        for peer, sock in self._followers:
            try:
                send_all(sock, [frame], len(frame))
            except ConnectionEndedError as error:
                raise self._members.lost(peer) from error
            self._stats.bytes_sent += len(frame)

    def _receive(self, link: _Link, entry: PlanEntry) -> None:
        self._stats.bytes_received += receive_rows(self._pairs, self._members, link.peer, link.rows, entry)


def receive_rows(pairs: Pairs, members: Membership, peer: str, rows: Rows, entry: PlanEntry) -> int:
    """Receive one request from `peer` into the first rows of `rows`; its bytes.

    Raises PeerLostError, TransportError.
    """
    count, size = entry.header.rows, 0
    rows.use_logits(entry.logits_dtype)
    with pairs.name_losses(members, peer):
        for tensor in (rows.hidden, rows.logits):
            if tensor is not None:
                pairs[peer].recv(tensor[:count])
                size += tensor[:count].nbytes
    return size


def _rows_of(member: Member, output: torch.Tensor) -> torch.Tensor:
    """One member's rows of a merged output, contiguous and in the member's own order."""
    _, header, first_real, first_padding = member
    real = output[first_real : first_real + header.real_rows]
    padding = output[first_padding : first_padding + header.rows - header.real_rows]
    if not padding.shape[0]:
        return real
    return torch.cat((real, padding)) if real.shape[0] else padding
