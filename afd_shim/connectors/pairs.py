"""All pairs of one rank, and what happens to them when a peer is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from afd_shim.connectors.base import PeerLostCallback
from afd_shim.connectors.device_pair import DevicePair, GroupFactory
from afd_shim.connectors.framing import ConnectionEndedError
from afd_shim.connectors.membership import Membership
from afd_shim.errors import PeerLostError, TransportError

__all__ = ["Pairs"]


class Pairs:
    """The pairs of one rank, and what ends them: a peer that is lost unblocks every stream.

    Called as the membership's `on_peer_lost`.
    """

    def __init__(self, on_peer_lost: PeerLostCallback) -> None:
        self.lost: PeerLostError | None = None
        self._on_peer_lost = on_peer_lost
        self._pairs: dict[str, DevicePair] = {}

    def __call__(self, error: PeerLostError) -> None:
        """A peer is lost: tell this rank's owner, then let everything go on that waits for it."""
        self.lost = error  # before streams go on: whoever they unblock must find it
        self._on_peer_lost(error)  # a server ends in here, so that no result of an aborted transfer leaves it
        self.abort()

    def __getitem__(self, peer: str) -> DevicePair:
        return self._pairs[peer]

    def open(
        self, members: Membership, peer: str, device: torch.device, deadline: float, factory: GroupFactory
    ) -> None:
        """Set up the pair with `peer`; every rank takes its peers in ascending order, so that none waits in a ring."""
        rank = 0 if members.hello.role == "ffn" else 1
        with self.name_losses(members, peer):
            self._pairs[peer] = DevicePair(peer, rank, members.data[peer], device, deadline, factory)

    def close(self, peer: str) -> None:
        """End the pair with `peer`, which has said goodbye."""
        self._pairs.pop(peer).abort()

    def drain(self) -> None:
        """Wait, within bounds, for what was handed over."""
        for pair in list(self._pairs.values()):
            pair.drain()

    def abort(self) -> None:
        """End every communicator: whatever waits for a peer goes on."""
        for pair in list(self._pairs.values()):
            pair.abort()

    @property
    def are_idle(self) -> bool:
        """Whether nothing is in flight."""
        return all(pair.is_idle for pair in list(self._pairs.values()))

    @contextlib.contextmanager
    def name_losses(self, members: Membership, peer: str) -> Iterator[None]:
        """Turn what a transfer with `peer` raises into the reason: the peer, or our own closing."""
        if self.lost is not None:
            raise self.lost
        try:
            yield
        except (ConnectionEndedError, RuntimeError) as error:  # torch raises RuntimeError and its children
            if self.lost is not None:
                raise self.lost from error
            if members.closing.is_set:
                raise TransportError(f"{members.name} was closed during an exchange.") from error
            if isinstance(error, ConnectionEndedError):
                raise members.lost(peer) from error
            raise TransportError(
                f"a transfer between {members.name} and {peer} failed ({error}); restart both servers, with "
                "NCCL_DEBUG=INFO to see why."
            ) from error
