"""FFN rank 0's side of the rendezvous: it listens, compares, and says when everyone is here."""

from __future__ import annotations

import logging
import secrets
import time

from afd_shim.connectors import handshake
from afd_shim.connectors.base import Hello, PeerLostCallback
from afd_shim.connectors.control import Channel, ControlThread
from afd_shim.connectors.handshake import Attach, Join, Ready, Roster, Welcome
from afd_shim.connectors.membership import Departure, Membership, peer_name
from afd_shim.connectors.sockets import Address, format_address, listen
from afd_shim.connectors.topology import Topology
from afd_shim.connectors.wire import Kind
from afd_shim.errors import ConfigError, FrameError, RendezvousTimeoutError

logger = logging.getLogger("vllm.afd_shim")  # vLLM configures what is below "vllm"


class Hub(Membership):
    """The ranks that have joined FFN rank 0. Everyone keeps a control connection to it."""

    def __init__(self, address: Address, hello: Hello, on_peer_lost: PeerLostCallback) -> None:
        super().__init__(hello, on_peer_lost)
        self._address = address
        self._joined: dict[str, tuple[Channel, Join]] = {}
        self._everyone = [peer_name("ffn", rank) for rank in range(1, hello.num_ffn_ranks)] + [
            peer_name("attention", rank) for rank in range(hello.num_attention_ranks)
        ]
        self._listener = listen(*address)
        """Bound at once: an address in use is an error before anything is waited for."""

        bound: Address = self._listener.getsockname()[:2]
        self.address = bound

    def connect(self, deadline: float) -> None:
        """See `FFNConnector.connect`."""
        started = time.monotonic()
        with self._changed:
            if self.closing.is_set:
                return
            self._control = ControlThread(self.name, self, self._listener)
            self._control.start()
        logger.info("%s listens on %s", self.name, format_address(self.address))
        arrived = self._wait(
            lambda: self._is_complete() or self._fatal is not None,
            deadline,
            lambda: ", ".join(self._missing()),
        )
        if self.closing.is_set:
            return
        self._raise_fatal()
        if not arrived:
            raise RendezvousTimeoutError(
                f"{', '.join(self._missing())} did not arrive at {format_address(self.address)} "
                f"within {deadline - started:.0f} s; start the missing servers (their log says "
                f"what they wait for), or raise afd.startup_timeout_s."
            )
        logger.info("%s: everyone is here", self.name)

    def _missing(self) -> list[str]:
        if self.is_established:
            return [f"{peer}'s data connection" for peer in sorted(self._unattached())]
        return [peer for peer in self._everyone if peer not in self._joined]

    def _is_complete(self) -> bool:
        return self.is_established and not self._unattached()

    def _unattached(self) -> set[str]:
        return self._expected_data() - self.data.keys() - self._departed.keys()

    def close(self, reason: str | None) -> None:
        """See `Membership.close`."""
        super().close(reason)
        if self._control is None:  # nobody else owns the listener yet
            self._listener.close()

    def _expected_data(self) -> set[str]:
        groups = range(self.topology.num_groups)
        return {peer_name("attention", self.topology.sender(group, 0)) for group in groups} | {
            peer_name("ffn", rank) for rank in range(1, self.topology.num_ffn_ranks)
        }

    def _can_go_on_without(self, peer: str, departure: Departure) -> bool:
        return departure.clean and peer.startswith("Attention")

    def on_frame(self, channel: Channel, kind: Kind, body: bytes) -> None:
        """A frame arrived (control.Handler)."""
        if channel.peer is not None and kind is Kind.GOODBYE:
            self._take_goodbye(channel, body)
        elif channel.peer is None and kind is Kind.HELLO:
            self._join(channel, handshake.decode(Join, body))
        elif channel.peer is None and kind is Kind.ATTACH:
            self._attach(channel, handshake.decode(Attach, body))
        else:
            raise FrameError(f"{kind.name} has no place here")

    def on_closed(self, channel: Channel, error: FrameError | None) -> None:
        """A peer's control connection has ended (control.Handler)."""
        assert channel.peer is not None
        if self.is_established:
            super().on_closed(channel, error)
            return
        # It may come again until everyone is here.
        self._goodbyes.pop(channel.peer, None)
        logger.warning("%s left before everyone was here", channel)
        with self._changed:
            del self._joined[channel.peer]
        self._announce()

    def _join(self, channel: Channel, join: Join) -> None:
        hello = join.hello
        refusal = self._refusal(hello)
        if refusal:
            raise FrameError(refusal)
        channel.welcome(peer_name(hello.role, hello.rank))
        logger.info("%s has joined", channel)
        with self._changed:
            assert channel.peer is not None
            self._joined[channel.peer] = (channel, join)
        self._tell(channel, Welcome(self.hello), Kind.WELCOME)
        self._announce()

    def _refusal(self, hello: Hello) -> str:
        """Why `hello` gets no place; empty if it gets one."""
        found = handshake.disagreements(self.hello, hello)
        if found:
            return handshake.refusal(self.hello, hello, found)
        peer = peer_name(hello.role, hello.rank)
        if peer == self.name:
            return f"{peer} is this server; start one FFN server only"
        if peer not in self._everyone:
            return (
                f"{peer} has no place: afd.num_{hello.role}_ranks counts the {hello.role} ranks of all servers together"
            )
        taken = self._joined.get(peer)
        if taken is not None:
            return (
                f"{peer} is already served (from {taken[0].address}); give every Attention server "
                f"ranks of its own, and restart the FFN server too when restarting one"
            )
        for _, join in self._joined.values():
            other = join.hello
            if hello.role == other.role == "attention" and hello.attention_tp_size != other.attention_tp_size:
                return (
                    f"attention_tp_size: {hello.attention_tp_size} on {peer}, "
                    f"{other.attention_tp_size} on Attention rank {other.rank}; give all Attention "
                    f"servers the same --tensor-parallel-size"
                )
        if hello.role == "attention":
            try:
                Topology(hello.num_attention_ranks, hello.num_ffn_ranks, hello.attention_tp_size)
            except ConfigError as error:
                return str(error)
        return ""

    def _announce(self) -> None:
        """Tell everyone who is missing, or that nobody is."""
        missing = self._missing()
        channels = [channel for channel, _ in self._joined.values()]
        if missing:
            for channel in channels:
                self._tell(channel, Roster(tuple(missing)), Kind.ROSTER)
            return
        joins = [join for _, join in self._joined.values()]
        attention = next(join.hello for join in joins if join.hello.role == "attention")
        endpoints = {
            join.hello.rank: (channel.host, join.data_port)
            for channel, join in self._joined.values()
            if join.hello.role == "ffn"
        }
        ready = Ready(
            session=secrets.token_hex(16),
            attention_tp_size=attention.attention_tp_size,
            ffn_endpoints=tuple(endpoints[rank] for rank in sorted(endpoints)),
        )
        self._establish(ready, self.hello)
        for channel in channels:
            self._tell(channel, ready, Kind.READY)

    def _tell(self, channel: Channel, message: handshake.Message, kind: Kind) -> None:
        try:
            channel.send(message, kind)
        except OSError as error:  # its end is read next, and handled there
            logger.debug("%s did not hear the %s: %s", channel, kind.name, error)
