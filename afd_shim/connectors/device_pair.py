"""Two ranks that move tensors from GPU to GPU: one NCCL communicator, set up over their data connection.

Its own ProcessGroupNCCL, so that vLLM's groups are untouched, and one for each pair of ranks, so that
one peer can leave without the others. No second port: what NCCL's set-up needs to exchange travels on
the TCP connection that the two have already.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol, cast

import msgspec
import torch
from torch.distributed.distributed_c10d import Store

from afd_shim.connectors.base import PROTOCOL_VERSION
from afd_shim.connectors.framing import ConnectionEndedError, recv_rest, send_all
from afd_shim.connectors.wire import MAGIC, MAX_CONTROL_BODY, PREFIX, Kind, decode_prefix
from afd_shim.errors import ConfigError, FrameError, HandshakeError, RendezvousTimeoutError, TransportError

__all__ = ["DevicePair", "GroupFactory", "PairStore", "nccl_group"]

logger = logging.getLogger("vllm.afd_shim")  # vLLM configures what is below "vllm"

_FOREVER: Final = dt.timedelta(days=365)
"""TCP hears a dead peer at once; an idle deployment is no error, so NCCL's own clock never ends one."""

_DRAIN_S: Final = 5.0
_POLL_S: Final = 0.0005


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    value: bytes


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one side of a pair tells the other before NCCL starts."""

    device: str
    """The GPU's UUID."""

    library: str
    """NCCL's version."""


class PairStore(Store):
    """The store NCCL sets a communicator up with, for two processes that share a connection.

    Upstream: `torch.distributed.Store`, which Python may subclass (torch 2.11 to 2.13). What one side
    sets, the other gets; NCCL needs no more (its unique id). Used during set-up only.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__()
        self.failure: Exception | None = None
        """What went wrong on the connection: torch reports a text only."""

        self._sock = sock
        self._deadline = deadline
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Tell the peer `value`."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        body = msgspec.json.encode(_Entry(key, data))
        frame = bytearray(PREFIX.pack(MAGIC, PROTOCOL_VERSION, Kind.PAIR, 0, len(body)) + body)
        with self._remember():
            send_all(self._sock, [frame], len(frame))

    def get(self, key: str) -> bytes:
        """Wait for what the peer, or this side, has set."""
        with self._remember():
            while key not in self._values:
                entry = self._receive()
                self._values[entry.key] = entry.value
        return self._values[key]

    def wait(self, keys: list[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until all of `keys` are set; the connection's own deadline counts."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all of `keys` are known here, without waiting."""
        return all(key in self._values for key in keys)

    def clone(self) -> PairStore:
        """Torch's threads may ask for a store of their own; they only ever `check` it."""
        return self

    def _receive(self) -> _Entry:
        prefix = bytearray(PREFIX.size)
        self._fill(prefix)
        version, kind, size = decode_prefix(prefix)
        if version != PROTOCOL_VERSION or kind != Kind.PAIR or size > MAX_CONTROL_BODY:
            raise FrameError(f"kind {kind}, version {version}, {size} bytes while a pair of GPUs was set up.")
        body = bytearray(size)
        self._fill(body)
        try:
            return msgspec.json.decode(body, type=_Entry)
        except msgspec.MsgspecError as error:
            raise FrameError(f"an unreadable PAIR: {error}") from error

    def _fill(self, buffer: bytearray) -> None:
        self._sock.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            recv_rest(self._sock, [buffer], 0, len(buffer))
        finally:
            self._sock.settimeout(None)

    @contextlib.contextmanager
    def _remember(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = error
            raise


class _Work(Protocol):
    def wait(self) -> bool: ...
    def is_completed(self) -> bool: ...


class Group(Protocol):
    """What a pair needs of torch's `ProcessGroupNCCL`; tests without a GPU use gloo's."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> _Work: ...
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> _Work: ...
    def abort(self) -> None: ...


GroupFactory = Callable[[Store, int], Group]
"""Makes the group of two ranks (store, own rank)."""


def nccl_group(store: Store, rank: int) -> Group:
    """A ProcessGroupNCCL of two ranks; the communicator is made by the first transfer."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = _FOREVER  # noqa: SLF001 - torch has no public name for it
    options.global_ranks_in_group = [0, 1]
    # torch's stubs leave out what every backend inherits.
    return cast("Group", ProcessGroupNCCL(store, rank, 2, options))


class DevicePair:
    """One end of a pair: sends to and receives from its peer, in order, on the current stream.

    Args:
        peer: the peer's name, for messages.
        rank: 0 on the FFN's side, 1 on Attention's.
        sock: the data connection of the two, blocking.
        device: where this side's tensors are.
        deadline: until when set-up may take (time.monotonic seconds).
        factory: makes the group.

    Raises:
        ConfigError: both ends are on one GPU, which NCCL cannot serve.
        HandshakeError: the two have different NCCL libraries.
        RendezvousTimeoutError: the first transfer did not arrive in time.
        TransportError: what was transferred arrived changed, or NCCL failed.
        ConnectionEndedError: the peer's data connection has ended.

    """

    def __init__(
        self,
        peer: str,
        rank: int,
        sock: socket.socket,
        device: torch.device,
        deadline: float,
        factory: GroupFactory = nccl_group,
    ) -> None:
        self.peer = peer
        self._rank = rank
        self._device = device
        self._last: _Work | None = None
        self._aborted = False
        self._store = PairStore(sock, deadline)  # torch does not keep the Python half of it alive
        try:
            self._introduce()
            self._group = factory(self._store, rank)
            self._probe(deadline)
        except ConnectionEndedError:
            raise
        except (TransportError, ConfigError):
            self.abort()
            raise
        except Exception as error:
            self.abort()
            cause = self._store.failure or error
            if isinstance(cause, ConnectionEndedError):
                raise cause from error
            raise TransportError(
                f"NCCL could not connect this GPU with {peer}'s ({type(error).__name__}: {error}); "
                "set NCCL_DEBUG=INFO on both for NCCL's own words, or use TcpAFDConnector."
            ) from error

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor on the current stream; it may be reused by later work on that stream."""
        if tensor.numel():
            self._last = self._group.send([tensor], 1 - self._rank, 0)
            self._last.wait()  # the stream waits, not this thread

    def recv(self, tensor: torch.Tensor) -> None:
        """Receive into a contiguous tensor on the current stream; later work on that stream reads it."""
        if tensor.numel():
            self._last = self._group.recv([tensor], 1 - self._rank, 0)
            self._last.wait()  # the stream waits, not this thread

    @property
    def is_idle(self) -> bool:
        """Whether everything that was handed over has been transferred."""
        return self._last is None or self._aborted or self._last.is_completed()

    def drain(self) -> None:
        """Wait up to 5 s for what was handed over, so that an orderly end cuts nothing off."""
        deadline = time.monotonic() + _DRAIN_S
        while not self.is_idle and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def abort(self) -> None:
        """End the communicator, whatever is in flight; from any thread, repeatable.

        Kernels that wait for the peer end, and the streams that wait for them go on.
        """
        if self._aborted or not hasattr(self, "_group"):
            return
        self._aborted = True
        try:
            self._group.abort()
        except RuntimeError as error:  # it had failed already
            logger.debug("aborting the pair with %s: %s", self.peer, error)

    def _introduce(self) -> None:
        ours = _identity(self._device)
        self._store.set(f"identity/{self._rank}", msgspec.json.encode(ours))
        theirs = msgspec.json.decode(self._store.get(f"identity/{1 - self._rank}"), type=Identity)
        if self._device.type == "cuda" and ours.device == theirs.device:
            raise ConfigError(
                f"this rank and {self.peer} are both on GPU {ours.device}, and two ranks cannot share a GPU under "
                "NCCL; use TcpAFDConnector, or give each role GPUs of its own (CUDA_VISIBLE_DEVICES).",
                key="connector",
            )
        if ours.library != theirs.library:
            raise HandshakeError(
                f"this rank has NCCL {ours.library}, {self.peer} has {theirs.library}; install the same torch on both, "
                "or use TcpAFDConnector."
            )

    def _probe(self, deadline: float) -> None:
        """Make the communicator, and see numbers arrive: nothing is served over one that does nothing."""
        sent = torch.arange(256, dtype=torch.float32, device=self._device)
        got = torch.zeros_like(sent)
        for turn in (0, 1):
            self.send(sent) if turn == self._rank else self.recv(got)
            while not self.is_idle:
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError(
                        f"the first transfer between this GPU and {self.peer}'s did not end in time; check that NCCL "
                        "works between the two (NCCL_DEBUG=INFO), raise afd.startup_timeout_s, or use TcpAFDConnector."
                    )
                time.sleep(_POLL_S)
        if not torch.equal(sent, got):
            raise TransportError(
                f"NCCL reported success, but what {self.peer} sent arrived changed; use TcpAFDConnector, and report "
                "this with the output of NCCL_DEBUG=INFO."
            )


def _identity(device: torch.device) -> Identity:
    if device.type != "cuda":
        return Identity(device=str(device), library="")
    library = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Identity(device=str(torch.cuda.get_device_properties(device).uuid), library=library)
