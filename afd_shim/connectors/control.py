"""The control thread: accepts connections, reads control frames, hears who is gone.

One per connector. It sleeps in poll and costs the exchange nothing. What frames mean is the
handler's business (hub.py, joiner.py); who is malformed, silent or foreign is refused here.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from typing import Protocol

from afd_shim.connectors import handshake, wire
from afd_shim.connectors.sockets import Address, format_address, tune_control
from afd_shim.connectors.wire import Kind
from afd_shim.errors import FrameError

logger = logging.getLogger("vllm.afd_shim")  # vLLM configures what is below "vllm"

IDENTIFY_WITHIN_S = 10.0
"""A connection that has not said who it is by then is closed."""

_LONGEST_REASON = 4000
"""Characters of a refusal, which repeats what a stranger sent; each takes up to six bytes of a frame's 64 Ki."""


class Channel:
    """A control connection, or one that has yet to say what it is."""

    def __init__(self, sock: socket.socket, peer: str | None) -> None:
        self.sock = sock
        remote: Address = sock.getpeername()[:2]
        self.host = remote[0]
        self.address = format_address(remote)
        self.peer = peer
        """ "FFN rank 0", once it is known."""

        self.deadline = time.monotonic() + IDENTIFY_WITHIN_S if peer is None else None
        self._inbox = bytearray()
        tune_control(sock)
        sock.settimeout(0)

    def __str__(self) -> str:
        return f"{self.peer} at {self.address}" if self.peer else self.address

    def send(self, message: handshake.Message, kind: Kind) -> None:
        """Send a frame; it is small and the connection idle, so it never waits. Raises OSError."""
        self.sock.sendall(wire.encode_control(kind, handshake.encode(message)))

    def read(self) -> tuple[list[tuple[Kind, bytes]], bool]:
        """(complete frames that have arrived, whether the connection has ended).

        Takes one piece of what has arrived, so that no peer holds the thread or its memory; poll comes back
        for the rest. Raises FrameError.
        """
        try:
            data = self.sock.recv(wire.MAX_CONTROL_BODY)
        except BlockingIOError:
            return [], False
        except OSError as error:
            logger.debug("%s: %s", self, error)
            return [], True
        self._inbox += data
        return self._take_frames(), not data

    def _take_frames(self) -> list[tuple[Kind, bytes]]:
        frames = []
        while len(self._inbox) >= wire.PREFIX.size:
            prefix = wire.decode_prefix(self._inbox)
            wire.check_control_prefix(prefix)
            end = wire.PREFIX.size + prefix.body_bytes
            if len(self._inbox) < end:
                break
            frames.append((Kind(prefix.kind), bytes(self._inbox[wire.PREFIX.size : end])))
            del self._inbox[:end]
        return frames

    def welcome(self, peer: str) -> None:
        """It has said who it is."""
        self.peer = peer
        self.deadline = None

    def into_data_connection(self) -> socket.socket:
        """The socket, blocking and with a data connection's options."""
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self.sock.settimeout(None)
        return self.sock

    @property
    def is_drained(self) -> bool:
        """No byte of a further frame has arrived."""
        return not self._inbox


class Handler(Protocol):
    """What a connector does about its channels; called from the control thread only."""

    def on_frame(self, channel: Channel, kind: Kind, body: bytes) -> None:
        """A frame arrived. FrameError refuses the channel."""

    def on_closed(self, channel: Channel, error: FrameError | None) -> None:
        """A channel with a peer has ended and is closed; `error` if we ended it for a bad frame."""


class ControlThread(threading.Thread):
    """Polls a listener (if any) and the channels until `stop`."""

    def __init__(self, name: str, handler: Handler, listener: socket.socket | None) -> None:
        super().__init__(name=f"afd-control-{name}", daemon=True)
        self._handler = handler
        self._listener = listener
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._farewell = handshake.Goodbye()

    def adopt(self, channel: Channel) -> None:
        """Read `channel` from now on; from any thread. Closes it if the thread has stopped."""
        with self._lock:
            if self._stopping:
                channel.sock.close()
                return
            self._channels[channel.sock.fileno()] = channel
            os.eventfd_write(self._wake, 1)

    def release(self, channel: Channel) -> None:
        """Stop reading `channel`, leave its socket open; from the control thread."""
        with self._lock:
            self._channels.pop(channel.sock.fileno(), None)

    def stop(self, reason: str | None) -> None:
        """Say goodbye on every channel and end; returns when done, unless the thread calls it."""
        with self._lock:
            if not self._stopping:
                self._farewell = handshake.Goodbye(reason or "")
                self._stopping = True
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self and self.ident is not None:
            self.join()

    def run(self) -> None:
        """Until `stop`."""
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # a defect of ours: everyone must hear that nobody listens now
            logger.exception("the control thread failed")
            self._farewell = handshake.Goodbye(f"its control thread failed: {error!r}")
            for channel in self._end():
                self._handler.on_closed(channel, None)
        else:
            self._end()

    def _turn(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._listener is not None:
            poller.register(self._listener, select.POLLIN)
        with self._lock:
            channels = dict(self._channels)
        for fd in channels:
            poller.register(fd, select.POLLIN | select.POLLRDHUP)
        deadlines = [c.deadline for c in channels.values() if c.deadline is not None]
        timeout_ms = max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None
        for fd, _ in poller.poll(timeout_ms):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif fd in channels:
                self._read(channels[fd])
            else:
                self._accept()
        self._refuse_silent(channels)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
            channel = Channel(sock, None)
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning("a connection could not be accepted: %s", error)
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(0.1)  # it is still waiting: without a pause this would spin
            return
        with self._lock:
            self._channels[channel.sock.fileno()] = channel

    def _read(self, channel: Channel) -> None:
        if not self._has(channel):
            return
        try:
            frames, ended = channel.read()
            for kind, body in frames:
                self._handler.on_frame(channel, kind, body)
        except FrameError as error:
            self.refuse(channel, str(error))
            if channel.peer is not None:
                self._handler.on_closed(channel, error)
            return
        if ended and self._has(channel):
            self.release(channel)
            channel.sock.close()
            if channel.peer is not None:
                self._handler.on_closed(channel, None)
            else:
                logger.warning("%s closed its connection before saying who it is", channel)

    def _has(self, channel: Channel) -> bool:
        return self._channels.get(channel.sock.fileno()) is channel

    def refuse(self, channel: Channel, reason: str) -> None:
        """Tell `channel` why, close it, log it; from the control thread."""
        logger.warning("refused the connection from %s: %s", channel, reason[:_LONGEST_REASON])
        self.release(channel)
        try:
            channel.send(handshake.Refusal(reason[:_LONGEST_REASON]), Kind.REFUSAL)
        except OSError as error:
            logger.debug("%s did not hear why: %s", channel, error)
        channel.sock.close()

    def _refuse_silent(self, channels: dict[int, Channel]) -> None:
        now = time.monotonic()
        for channel in channels.values():
            if channel.deadline is not None and channel.deadline <= now and self._has(channel):
                self.refuse(channel, f"it did not say who it is within {IDENTIFY_WITHIN_S:.0f} s")

    def _end(self) -> list[Channel]:
        """Say goodbye, close everything; the channels that had a peer."""
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            self._stopping = True
            channels, self._channels = list(self._channels.values()), {}
            os.close(self._wake)
        for channel in channels:
            if channel.peer is not None:
                try:
                    channel.send(self._farewell, Kind.GOODBYE)
                except OSError as error:
                    logger.debug("%s did not hear the goodbye: %s", channel, error)
            channel.sock.close()
        return [channel for channel in channels if channel.peer is not None]
