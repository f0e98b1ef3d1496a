"""Sending and receiving whole frames on a blocking data connection."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from typing import Final

POLL_S: Final = 200e-6
"""How long a wait keeps asking before it sleeps, in seconds. Being woken costs more than all else an
exchange does; an idle server still sleeps. It asks without `sched_yield`: where another process wants the
core too, Linux (EEVDF, 6.6 and later) moves the caller's deadline at every yield, and a loop of them leaves
it unscheduled for seconds afterwards."""


class ConnectionEndedError(ConnectionError):
    """The peer's data connection has ended; its control connection knows why."""


def send_all(sock: socket.socket, views: Sequence[memoryview | bytearray], size: int) -> None:
    """Send all `size` bytes of `views`, gathered by the kernel. Raises ConnectionEndedError."""
    try:
        sent = sock.sendmsg(views)
        while sent < size:
            sent += sock.sendmsg(_after(views, sent))
    except OSError as error:
        raise ConnectionEndedError(str(error)) from error


def recv_some(sock: socket.socket, views: Sequence[memoryview | bytearray], got: int, flags: int = 0) -> int:
    """Receive into `views`, of which `got` bytes are filled; how many are then.

    With MSG_DONTWAIT and nothing there, `got` again. Raises ConnectionEndedError.
    """
    try:
        count = sock.recvmsg_into(_after(views, got) if got else views, 0, flags)[0]
    except BlockingIOError:
        return got
    except OSError as error:
        raise ConnectionEndedError(str(error)) from error
    if count == 0:
        raise ConnectionEndedError("the peer closed it")
    return got + count


def recv_first(sock: socket.socket, views: Sequence[memoryview | bytearray]) -> int:
    """Wait for a frame to begin: how many bytes of `views` are filled then. Raises ConnectionEndedError."""
    got = _poll(sock, views, 0, 1)
    return got or recv_some(sock, views, 0)


def recv_rest(sock: socket.socket, views: Sequence[memoryview | bytearray], got: int, size: int) -> None:
    """Receive until `size` bytes of `views` are filled, of which `got` are.

    Raises ConnectionEndedError.
    """
    got = _poll(sock, views, got, size)
    while got < size:
        got = recv_some(sock, views, got, socket.MSG_WAITALL)


def _poll(sock: socket.socket, views: Sequence[memoryview | bytearray], got: int, size: int) -> int:
    """Receive without sleeping, for POLL_S at most, until `size` bytes of `views` are filled; how many are then."""
    deadline = time.perf_counter() + POLL_S
    while got < size and time.perf_counter() < deadline:
        got = recv_some(sock, views, got, socket.MSG_DONTWAIT)
    return got


def ready(poller: select.poll, *, wait: bool) -> list[tuple[int, int]]:
    """The (file descriptor, event) pairs that are ready; with `wait` at least one, asked for before it sleeps."""
    deadline = time.perf_counter() + POLL_S if wait else 0.0
    found = poller.poll(0)
    while not found and time.perf_counter() < deadline:
        found = poller.poll(0)
    return found if found or not wait else poller.poll(None)


def _after(views: Sequence[memoryview | bytearray], done: int) -> list[memoryview]:
    """What is left of `views` after `done` bytes."""
    left = []
    for view in views:
        size = len(view)
        if done >= size:
            done -= size
        else:
            left.append(memoryview(view)[done:])
            done = 0
    return left
