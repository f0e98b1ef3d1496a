"""Sending and receiving whole frames on a blocking data connection."""

from __future__ import annotations

import socket
from collections.abc import Sequence


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


def recv_rest(sock: socket.socket, views: Sequence[memoryview | bytearray], got: int, size: int) -> None:
    """Receive until `size` bytes of `views` are filled, of which `got` are.

    Raises ConnectionEndedError.
    """
    while got < size:
        got = recv_some(sock, views, got, socket.MSG_WAITALL)


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
