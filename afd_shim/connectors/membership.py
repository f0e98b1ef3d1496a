"""Who is connected, who is gone and why, and the data connections: one per connector.

The control thread writes it, the connector's own thread waits on it. hub.py (FFN rank 0) and
joiner.py (everyone else) are its two kinds.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from afd_shim.connectors import handshake
from afd_shim.connectors.base import Hello, PeerLostCallback
from afd_shim.connectors.control import Channel, ControlThread
from afd_shim.connectors.handshake import Attach, Attached, Goodbye, Ready
from afd_shim.connectors.sockets import LOG_EVERY_S, Wakeup
from afd_shim.connectors.topology import Topology
from afd_shim.connectors.wire import Agreement, Kind
from afd_shim.errors import FrameError, PeerLostError

logger = logging.getLogger("vllm.afd_shim")  # vLLM configures what is below "vllm"

VERDICT_WITHIN_S = 2.0
_DIED = "its process ended or its host no longer answers"


def peer_name(role: str, rank: int) -> str:
    """How messages name a rank: "Attention rank 1", "FFN rank 0"."""
    return f"{'FFN' if role == 'ffn' else 'Attention'} rank {rank}"


class Departure(NamedTuple):
    """How a peer left; `clean` is a goodbye without a reason."""

    how: str
    clean: bool
    address: str


class Membership(ABC):
    """State shared by a connector and its control thread; see the module."""

    topology: Topology
    agreement: Agreement

    def __init__(self, hello: Hello, on_peer_lost: PeerLostCallback) -> None:
        self.hello = hello
        self.name = peer_name(hello.role, hello.rank)
        self.closing = Wakeup()
        self.data: dict[str, socket.socket] = {}
        """The data connections by peer, blocking."""

        self.in_flight: Callable[[], str] = lambda: "nothing"
        """Says what is being exchanged; set by the connector."""

        self._on_peer_lost = on_peer_lost
        self._changed = threading.Condition()
        self._control: ControlThread | None = None
        self._goodbyes: dict[str, Goodbye] = {}
        self._departed: dict[str, Departure] = {}
        self._fatal: str | None = None
        """The first peer that left and that this rank cannot go on without."""

        self._session: str | None = None
        self._early: list[tuple[Channel, Attach]] = []

    @abstractmethod
    def connect(self, deadline: float) -> None:
        """Meet everyone until `deadline` (time.monotonic seconds)."""

    @abstractmethod
    def _expected_data(self) -> set[str]:
        """The peers whose data connections are awaited or made."""

    @abstractmethod
    def _can_go_on_without(self, peer: str, departure: Departure) -> bool:
        """Whether this rank still has work when `peer` has left so."""

    @property
    def is_established(self) -> bool:
        """Everyone is here: from now on a departure counts."""
        return self._session is not None

    def check_goodbye(self, peer: str) -> None:
        """PeerLostError unless `peer`, whose data connection has ended, said goodbye in peace."""
        with self._changed:
            self._changed.wait_for(lambda: self._culprit(peer) is not None, VERDICT_WITHIN_S)
            departure = self._departed.get(peer)
            fatal = self._fatal
        if fatal or departure is None or not self._can_go_on_without(peer, departure):
            raise self.lost(peer)

    def lost(self, peer: str) -> PeerLostError:
        """The error for `peer`, whose data connection has ended.

        The goodbye, or the true culprit, is heard on the control connection a moment later.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._culprit(peer) is not None, VERDICT_WITHIN_S)
            culprit = self._culprit(peer) or peer
            departure = self._departed.get(culprit)
        return self._lost(culprit, departure or Departure("its data connection broke", clean=False, address=""))

    def _culprit(self, peer: str) -> str | None:
        return self._fatal or (peer if peer in self._departed else None)

    def _lost(self, peer: str, departure: Departure) -> PeerLostError:
        where = f"{peer} at {departure.address}" if departure.address else peer
        return PeerLostError(
            f"{where} is gone: {departure.how} (in flight on {self.name}: {self.in_flight()}). "
            f"Restart it and this server.",
            peer=where,
            clean=departure.clean,
        )

    def close(self, reason: str | None) -> None:
        """Say goodbye and wake whoever waits; data connections are shut, not closed."""
        self.closing.set()
        with self._changed:
            self._changed.notify_all()
            control, connections = self._control, list(self.data.values())
        if control is not None:
            control.stop(reason)
        for connection in connections:
            _shut(connection)

    # The control thread's side.

    def on_closed(self, channel: Channel, error: FrameError | None) -> None:
        """A peer's control connection has ended (control.Handler)."""
        assert channel.peer is not None
        goodbye = self._goodbyes.pop(channel.peer, None)
        if error is not None:
            departure = Departure(f"it sent {error}", clean=False, address=channel.address)
        elif goodbye is None:
            departure = Departure(_DIED, clean=False, address=channel.address)
        elif goodbye.reason:
            departure = Departure(f"it ended with: {goodbye.reason}", clean=False, address=channel.address)
        else:
            departure = Departure("it said goodbye", clean=True, address=channel.address)
        self._depart(channel.peer, departure)

    def _depart(self, peer: str, departure: Departure) -> None:
        with self._changed:
            self._departed[peer] = departure
            counts = self.is_established and not self.closing.is_set
            fatal = counts and not self._can_go_on_without(peer, departure)
            if fatal and self._fatal is None:
                self._fatal = peer
            connections = list(self.data.values())
            self._changed.notify_all()
        if fatal:
            error = self._lost(peer, departure)
            # Whoever is blocked on a data connection wakes, and finds the culprit above.
            for connection in connections:
                _shut(connection)
            self._on_peer_lost(error)
        elif counts:
            logger.info("%s (%s): %s", peer, departure.address, departure.how)

    def _take_goodbye(self, channel: Channel, body: bytes) -> None:
        assert channel.peer is not None
        self._goodbyes[channel.peer] = handshake.decode(Goodbye, body)

    def _attach(self, channel: Channel, attach: Attach) -> None:
        """A data connection: out of the control thread's hands, into `data`."""
        if self._session is None:
            # Attention heard that everyone is here before this rank did.
            self._early.append((channel, attach))
            return
        peer = peer_name(attach.role, attach.rank)
        if not hmac.compare_digest(attach.session.encode(), self._session.encode()):
            raise FrameError(f"{peer} shows another rendezvous's session")
        if peer not in self._expected_data() or peer in self.data:
            raise FrameError(f"no data connection of {peer} is awaited")
        if not channel.is_drained:
            raise FrameError(f"{peer} sent data before it was let in")
        assert self._control is not None
        self._control.release(channel)
        try:
            channel.send(Attached(), Kind.ATTACHED)
        except OSError as error:  # its death is heard on its control connection
            logger.warning("%s left while its data connection was let in: %s", peer, error)
            channel.sock.close()
            return
        with self._changed:
            self.data[peer] = channel.into_data_connection()
            self._changed.notify_all()

    def _establish(self, ready: Ready, ffn: Hello) -> None:
        """Everyone is here: fix what was agreed, let in the data connections."""
        self.topology = Topology(self.hello.num_attention_ranks, self.hello.num_ffn_ranks, ready.attention_tp_size)
        self.agreement = handshake.agree(ffn, num_groups=self.topology.num_groups)
        with self._changed:
            self._session = ready.session
            self._changed.notify_all()
        early, self._early = self._early, []
        for channel, attach in early:
            try:
                self._attach(channel, attach)
            except FrameError as error:
                assert self._control is not None
                self._control.refuse(channel, str(error))

    def _wait(self, done: Callable[[], bool], deadline: float, waiting_for: Callable[[], str]) -> bool:
        """Wait until `done` (True) or `deadline` or closing (False), saying what for every 10 s."""
        with self._changed:
            while not done():
                left = deadline - time.monotonic()
                if left <= 0 or self.closing.is_set:
                    return False
                if not self._changed.wait_for(lambda: done() or self.closing.is_set, min(left, LOG_EVERY_S)):
                    logger.info(
                        "%s: waiting for %s; giving up in %.0f s",
                        self.name,
                        waiting_for(),
                        max(0.0, deadline - time.monotonic()),
                    )
            return True

    def _raise_fatal(self) -> None:
        """PeerLostError if someone left whom this rank cannot go on without."""
        if self._fatal is not None:
            raise self._lost(self._fatal, self._departed[self._fatal])


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # already disconnected, which is what was wanted
        logger.debug("shutting a data connection: %s", error)
