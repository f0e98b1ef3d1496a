"""Sockets: listen, dial until someone answers, and the options that hear a lost host.

A control connection is nearly always idle, so keepalive (2 s, then 3 probes a second apart) and
TCP_USER_TIMEOUT end it within 5 s of a host's silence. A data connection carries keepalive only:
TCP_USER_TIMEOUT would also end the connection to a living peer that computes for 5 s while a large
message waits for it (measured: a zero window counts as silence).
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from pathlib import Path

from afd_shim.errors import RendezvousTimeoutError, TransportError

logger = logging.getLogger("vllm.afd_shim")  # vLLM configures what is below "vllm"

LOST_HOST_MS = 5000
DATA_BUFFER_BYTES = 4 * 1024 * 1024
_RETRY_S = 0.2
_ATTEMPT_S = 5.0
LOG_EVERY_S = 10.0

Address = tuple[str, int]


def format_address(address: Address) -> str:
    """host:port, with the brackets that IPv6 needs."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Wakeup:
    """Becomes readable for good when set: ends every poll that includes it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_set = False

    def fileno(self) -> int:
        """What poll registers."""
        return self._fd

    def set(self) -> None:
        """From any thread, any number of times."""
        if not self.is_set:
            self.is_set = True
            os.eventfd_write(self._fd, 1)

    def __del__(self) -> None:
        os.close(self._fd)


def wait_for(sock: socket.socket, events: int, wakeup: Wakeup, timeout_s: float) -> bool:
    """Whether `sock` had one of poll's `events` (or an error) within `timeout_s`.

    False on timeout and when `wakeup` was set.
    """
    poller = select.poll()
    poller.register(sock, events)
    poller.register(wakeup, select.POLLIN)
    ready = poller.poll(max(0.0, timeout_s) * 1000)
    return any(fd == sock.fileno() for fd, _ in ready)


def tune_control(sock: socket.socket) -> None:
    """A lost host ends this connection within 5 s, idle or not."""
    tune_data(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_HOST_MS)


def tune_data(sock: socket.socket) -> None:
    """Send at once; a lost host ends this connection within 5 s while it is idle."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _enlarge_buffers(sock: socket.socket) -> None:
    """Let a whole message of common size wait in the kernel, where the host allows it.

    Before connecting or listening, since it decides TCP's window scale. Where the host's limit is
    lower the kernel's own tuning reaches further than a fixed size, and is left alone.
    """
    for option, limit in ((socket.SO_RCVBUF, "rmem_max"), (socket.SO_SNDBUF, "wmem_max")):
        try:
            allowed = int(Path("/proc/sys/net/core", limit).read_text())
        except OSError:  # not readable in some sandboxes: then the kernel decides
            continue
        if allowed >= DATA_BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, DATA_BUFFER_BYTES)


def listen(host: str, port: int) -> socket.socket:
    """A non-blocking listener on exactly `host` (name, IPv4 or IPv6) and `port` (0: any free one).

    Raises TransportError if the address is in use, is not this machine's, or does not resolve.
    """
    where = format_address((host, port))
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise TransportError(
            f"afd.host: {host!r} does not resolve ({error.strerror}); give an address of this machine."
        ) from error
    listener = socket.socket(family, kind, proto)
    try:
        # A restarted server binds while its predecessor's connections are still in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        _enlarge_buffers(listener)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        remedy = {
            errno.EADDRINUSE: "another program (or another FFN server) listens there: stop it, or "
            "give both roles another afd.port",
            errno.EADDRNOTAVAIL: "afd.host is not an address of this machine: FFN rank 0 listens "
            "there, so give one of its addresses",
            errno.EACCES: "this user may not listen there: give both roles an afd.port above 1023",
        }.get(error.errno or 0, "give both roles another afd.host or afd.port")
        raise TransportError(f"FFN rank 0 cannot listen on {where} ({error.strerror}); {remedy}.") from error
    listener.settimeout(0)
    return listener


def dial(address: Address, peer: str, deadline: float, wakeup: Wakeup) -> socket.socket:
    """Connect to `peer` at `address`, again and again until `deadline` (time.monotonic seconds).

    The socket is non-blocking. Says every 10 s what it waits for. Raises RendezvousTimeoutError,
    and TransportError when `wakeup` is set.
    """
    said = time.monotonic()
    while True:
        try:
            return _connect(address, min(deadline, time.monotonic() + _ATTEMPT_S), wakeup)
        except OSError as error:
            why = error.strerror or str(error)
        now = time.monotonic()
        if wakeup.is_set:
            raise TransportError(f"closed while waiting for {peer} at {format_address(address)}.")
        if now >= deadline:
            raise RendezvousTimeoutError(
                f"{peer} did not answer at {format_address(address)} ({why}); start it, or check "
                f"afd.host and afd.port, or raise afd.startup_timeout_s."
            )
        if now - said >= LOG_EVERY_S:
            said = now
            logger.info(
                "waiting for %s at %s (%s); giving up in %.0f s",
                peer,
                format_address(address),
                why,
                deadline - now,
            )
        poller = select.poll()
        poller.register(wakeup, select.POLLIN)
        poller.poll(min(_RETRY_S, deadline - now) * 1000)


def _connect(address: Address, deadline: float, wakeup: Wakeup) -> socket.socket:
    """One attempt at each address that the host resolves to; OSError of the last one."""
    failure = OSError(errno.EHOSTUNREACH, "the host has no address")
    for family, kind, proto, _, target in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        sock.settimeout(0)
        _enlarge_buffers(sock)
        status = sock.connect_ex(target)
        if status == errno.EINPROGRESS:
            answered = wait_for(sock, select.POLLOUT, wakeup, deadline - time.monotonic())
            status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if answered else errno.ETIMEDOUT
        if status == 0 and sock.getsockname() == sock.getpeername():
            # Dialling a free port of the ephemeral range can meet itself (simultaneous open).
            status = errno.ECONNREFUSED
        if status == 0:
            return sock
        sock.close()
        failure = OSError(status, os.strerror(status))
    raise failure
