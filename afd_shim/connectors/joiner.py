"""Everyone else's side of the rendezvous: find FFN rank 0, agree, connect the data."""

from __future__ import annotations

import logging
import select
import socket
import time

from afd_shim.connectors import handshake, wire
from afd_shim.connectors.base import Hello, PeerLostCallback
from afd_shim.connectors.control import Channel, ControlThread
from afd_shim.connectors.handshake import Attach, Join, Ready, Refusal, Roster, Welcome
from afd_shim.connectors.membership import Departure, Membership, peer_name
from afd_shim.connectors.sockets import Address, dial, format_address, listen, tune_data, wait_for
from afd_shim.connectors.wire import Kind
from afd_shim.errors import (
    FrameError,
    HandshakeError,
    PeerLostError,
    RendezvousTimeoutError,
    TransportError,
)

logger = logging.getLogger("vllm.afd_shim")  # vLLM configures what is below "vllm"

HUB = peer_name("ffn", 0)
_PAUSE_S = 0.5


class Joiner(Membership):
    """An Attention rank, or an FFN rank above 0, and its connections."""

    def __init__(self, address: Address, hello: Hello, on_peer_lost: PeerLostCallback) -> None:
        super().__init__(hello, on_peer_lost)
        self._address = address
        self._refused: str | None = None
        self._missing: tuple[str, ...] = ()
        self._ffn: Hello | None = None
        self._ready: Ready | None = None
        self._data_port = 0

    def connect(self, deadline: float) -> None:
        """See `AttentionConnector.connect`."""
        while not self._join(deadline):
            # FFN rank 0 ended before everyone was there; it may come again.
            logger.info("%s left before everyone was there; waiting for it again", HUB)
            self._wait(lambda: False, min(deadline, time.monotonic() + _PAUSE_S), lambda: HUB)
        assert self._ready is not None
        for rank, address in self._data_targets(self._ready):
            self._connect_data(peer_name("ffn", rank), address, deadline)
        complete = self._wait(
            lambda: self._expected_data() <= self.data.keys() or self._fatal is not None,
            deadline,
            lambda: ", ".join(sorted(self._expected_data() - self.data.keys())),
        )
        self._raise_if_closing("everyone's data connections")
        self._raise_fatal()
        if not complete:
            missing = ", ".join(sorted(self._expected_data() - self.data.keys()))
            raise RendezvousTimeoutError(f"no data connection with {missing} in time; raise afd.startup_timeout_s.")
        logger.info("%s is connected to %s", self.name, ", ".join(sorted(self.data)))

    def _join(self, deadline: float) -> bool:
        """Whether everyone is here; False if FFN rank 0 went away before."""
        sock = dial(self._address, HUB, deadline, self.closing)
        channel = Channel(sock, HUB)
        self._start_control(channel)
        with self._changed:
            self._departed.clear()
            self._ffn, self._missing = None, ()
        try:
            channel.send(Join(self.hello, self._data_port), Kind.HELLO)
        except OSError as error:
            logger.debug("%s: %s", channel, error)
            sock.close()
            return False
        assert self._control is not None
        self._control.adopt(channel)
        self._wait(
            lambda: bool(self._ready or self._refused or self._departed),
            deadline,
            lambda: ", ".join(self._missing) or f"{HUB}'s answer",
        )
        self._raise_if_closing(", ".join(self._missing) or HUB)
        if self._refused:
            raise HandshakeError(f"{HUB} at {format_address(self._address)} refused {self.name}: {self._refused}")
        if self._ready:
            return True
        if time.monotonic() < deadline:
            return False
        missing = ", ".join(self._missing) or f"{HUB}'s answer"
        raise RendezvousTimeoutError(
            f"{missing} did not arrive at {HUB} ({format_address(self._address)}) in time; start "
            f"the missing servers, or raise afd.startup_timeout_s."
        )

    def _start_control(self, channel: Channel) -> None:
        if self._control is not None:
            return
        listener: socket.socket | None = None
        if self.hello.role == "ffn":
            # The address by which FFN rank 0 is reached is one that Attention reaches too.
            listener = listen(channel.sock.getsockname()[0], 0)
            self._data_port = listener.getsockname()[1]
        self._control = ControlThread(self.name, self, listener)
        self._control.start()

    def _data_targets(self, ready: Ready) -> list[tuple[int, Address]]:
        """The FFN ranks that this one opens data connections to."""
        endpoints: list[Address] = [self._address, *ready.ffn_endpoints]
        if self.hello.role == "ffn":
            return [(0, endpoints[0])]
        return [(rank, endpoints[rank]) for rank in self.topology.ffn_ranks_fed_by(self.hello.rank)]

    def _expected_data(self) -> set[str]:
        if self.hello.role == "attention":
            fed = self.topology.ffn_ranks_fed_by(self.hello.rank)
            return {peer_name("ffn", rank) for rank in fed}
        senders = {
            peer_name("attention", self.topology.sender(group, self.hello.rank))
            for group in range(self.topology.num_groups)
        }
        return senders | {HUB}

    def _connect_data(self, peer: str, address: Address, deadline: float) -> None:
        """Open the data connection to `peer`, and wait until it is let in."""
        sock = dial(address, peer, deadline, self.closing)
        assert self._ready is not None
        attach = Attach(self._ready.session, self.hello.role, self.hello.rank)
        try:
            sock.sendall(wire.encode_control(Kind.ATTACH, handshake.encode(attach)))
            self._await_attached(sock, deadline)
        except (OSError, TransportError) as error:
            sock.close()
            self._raise_if_closing(peer)
            self._raise_fatal()
            if isinstance(error, TransportError):
                raise
            raise PeerLostError(
                f"{peer} at {format_address(address)} is gone: {error} (in flight on {self.name}: "
                f"the rendezvous). Restart it and this server.",
                peer=peer,
            ) from error
        tune_data(sock)
        sock.settimeout(None)
        with self._changed:
            self.data[peer] = sock

    def _await_attached(self, sock: socket.socket, deadline: float) -> None:
        frame = bytearray()
        end = wire.PREFIX.size
        while len(frame) < end:
            if not wait_for(sock, select.POLLIN, self.closing, deadline - time.monotonic()):
                raise RendezvousTimeoutError("a data connection was not let in in time; raise afd.startup_timeout_s.")
            data = sock.recv(end - len(frame))
            if not data:
                raise ConnectionResetError("it closed the data connection")
            frame += data
            if len(frame) == wire.PREFIX.size:
                prefix = wire.decode_prefix(frame)
                wire.check_control_prefix(prefix)
                end += prefix.body_bytes
        if prefix.kind == Kind.REFUSAL:
            body = bytes(frame[wire.PREFIX.size :])
            raise HandshakeError(handshake.decode(Refusal, body).reason)
        if prefix.kind != Kind.ATTACHED:
            raise FrameError(f"{Kind(prefix.kind).name} instead of ATTACHED.")

    def _raise_if_closing(self, waiting_for: str) -> None:
        if self.closing.is_set:
            raise TransportError(f"{self.name} was closed while waiting for {waiting_for}.")

    def _can_go_on_without(self, peer: str, departure: Departure) -> bool:
        # Only FFN rank 0 has a control connection to this rank; the other FFN ranks end with it.
        return departure.clean and self.hello.role == "ffn"

    def on_frame(self, channel: Channel, kind: Kind, body: bytes) -> None:
        """A frame arrived (control.Handler)."""
        if channel.peer is None:
            if kind is not Kind.ATTACH:
                raise FrameError(f"{kind.name} has no place here")
            self._attach(channel, handshake.decode(Attach, body))
            return
        with self._changed:
            if kind is Kind.GOODBYE:
                self._take_goodbye(channel, body)
            elif kind is Kind.WELCOME:
                self._ffn = handshake.decode(Welcome, body).hello
            elif kind is Kind.REFUSAL:
                self._refused = handshake.decode(Refusal, body).reason
            elif kind is Kind.ROSTER:
                self._missing = handshake.decode(Roster, body).missing
            elif kind is not Kind.READY or self._ffn is None or self._ready is not None:
                raise FrameError(f"{kind.name} has no place here")
        if kind is Kind.READY:
            assert self._ffn is not None
            ready = handshake.decode(Ready, body)
            self._establish(ready, self._ffn)
            self._ready = ready
        with self._changed:
            self._changed.notify_all()

    def on_closed(self, channel: Channel, error: FrameError | None) -> None:
        """FFN rank 0's control connection has ended (control.Handler)."""
        if error is not None and not self.is_established:
            with self._changed:
                self._refused = str(error)
        super().on_closed(channel, error)
