"""A peer that leaves: a goodbye, a reason, or a death; heard at once, idle or not."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import pytest

from afd_shim.connectors.hub import Hub
from afd_shim.connectors.membership import Membership
from afd_shim.connectors.sockets import LOST_HOST_MS
from afd_shim.errors import PeerLostError

from .conftest import MakeHello, Meeting, wait_until

CHILD = """
import sys, time, msgspec
from afd_shim.connectors.base import Hello
from afd_shim.connectors.hub import Hub
from afd_shim.connectors.joiner import Joiner
hello = msgspec.json.decode(sys.argv[1], type=Hello)
kind = Hub if hello.role == "ffn" and hello.rank == 0 else Joiner
member = kind(("127.0.0.1", int(sys.argv[2])), hello, print)
member.connect(time.monotonic() + 60)
print("connected", flush=True)
time.sleep(60)
"""

Process = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def process(meeting: Meeting) -> Iterator[Process]:
    """Start a rank in a process of its own."""
    started = []

    def start(hello: object, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, msgspec.json.encode(hello).decode(), str(port)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def pair(hello: MakeHello, meeting: Meeting) -> tuple[Hub, Membership]:
    """Connect one rank of each role."""
    hub = meeting.hub(hello("ffn"))
    joiner = meeting.joiner(hello("attention"), hub.address)
    for future in (meeting.connect(hub), meeting.connect(joiner)):
        future.result(30)
    return hub, joiner


def test_killed_attention_is_heard_idle(hello: MakeHello, meeting: Meeting, process: Process) -> None:
    """SIGKILL of an idle Attention rank is reported once, naming rank and address, and wakes a receive."""
    hub = meeting.hub(hello("ffn"))
    connected = meeting.connect(hub, timeout_s=60)
    child = process(hello("attention"), hub.address[1])
    connected.result(60)

    child.send_signal(signal.SIGKILL)

    with contextlib.suppress(ConnectionResetError):  # what the victim had not read yet turns the end into a reset
        assert hub.data["Attention rank 0"].recv(1) == b""
    wait_until(lambda: meeting.lost["ffn 0"])
    (error,) = meeting.lost["ffn 0"]
    assert "Attention rank 0 at 127.0.0.1:" in str(error)
    assert "its process ended" in str(error)
    assert "in flight on FFN rank 0: nothing" in str(error)
    assert not error.clean


def test_killed_ffn_is_heard_idle(hello: MakeHello, meeting: Meeting, process: Process, free_port: int) -> None:
    """The same the other way round."""
    child = process(hello("ffn"), free_port)
    joiner = meeting.joiner(hello("attention"), ("127.0.0.1", free_port))
    meeting.connect(joiner, timeout_s=60).result(60)

    child.send_signal(signal.SIGKILL)

    wait_until(lambda: meeting.lost["attention 0"])
    assert f"FFN rank 0 at 127.0.0.1:{free_port} is gone" in str(meeting.lost["attention 0"][0])


def test_goodbye_of_attention_is_no_loss(hello: MakeHello, meeting: Meeting) -> None:
    """An Attention server that is shut down leaves in peace; the FFN may go on without it."""
    hub, joiner = pair(hello, meeting)

    joiner.close(None)

    hub.check_goodbye("Attention rank 0")
    assert meeting.lost == {"ffn 0": [], "attention 0": []}


def test_goodbye_of_the_ffn_is_a_clean_loss(hello: MakeHello, meeting: Meeting) -> None:
    """Attention cannot go on without its FFN, and knows that it was shut down, not lost."""
    hub, joiner = pair(hello, meeting)

    hub.close(None)

    wait_until(lambda: meeting.lost["attention 0"])
    (error,) = meeting.lost["attention 0"]
    assert error.clean
    assert "it said goodbye" in str(error)
    assert str(joiner.lost("FFN rank 0")) == str(error)


def test_reason_reaches_the_peer(hello: MakeHello, meeting: Meeting) -> None:
    """Whoever ends with an error tells the others which."""
    hub, joiner = pair(hello, meeting)

    hub.close("OutOfMemoryError: 3 GiB")

    wait_until(lambda: meeting.lost["attention 0"])
    (error,) = meeting.lost["attention 0"]
    assert not error.clean
    assert "it ended with: OutOfMemoryError: 3 GiB" in str(error)
    assert isinstance(joiner.lost("FFN rank 0"), PeerLostError)


def test_both_closing_at_once_is_no_loss(hello: MakeHello, meeting: Meeting) -> None:
    """Two servers that are stopped together end without an error."""
    hub, joiner = pair(hello, meeting)

    joiner.closing.set()
    hub.close(None)
    joiner.close(None)

    assert meeting.lost == {"ffn 0": [], "attention 0": []}


def test_killed_ffn_rank_is_named_to_everyone(hello: MakeHello, meeting: Meeting, process: Process) -> None:
    """FFN rank 1 dies: rank 0 hears it and, closing, tells Attention who was the culprit."""
    counts = {"num_ffn_ranks": 2}
    hub = meeting.hub(hello("ffn", **counts))
    connected = meeting.connect(hub, timeout_s=60)
    child = process(hello("ffn", 1, **counts), hub.address[1])
    meeting.connect(meeting.joiner(hello("attention", **counts), hub.address), timeout_s=60).result(60)
    connected.result(60)

    child.send_signal(signal.SIGKILL)

    wait_until(lambda: meeting.lost["ffn 0"])
    hub.close(str(meeting.lost["ffn 0"][0]))
    wait_until(lambda: meeting.lost["attention 0"])
    assert "FFN rank 0 at" in str(meeting.lost["attention 0"][0])
    assert "FFN rank 1 at" in str(meeting.lost["attention 0"][0])


def test_data_connection_of_a_busy_peer_never_times_out(hello: MakeHello, meeting: Meeting) -> None:
    """A large message that waits for a computing peer must not look like a lost host.

    TCP_USER_TIMEOUT counts a zero window as silence: it is set where nothing large ever waits.
    """
    hub, joiner = pair(hello, meeting)

    def user_timeout(sock: socket.socket) -> int:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    data = [hub.data["Attention rank 0"], joiner.data["FFN rank 0"]]
    assert [user_timeout(sock) for sock in data] == [0, 0]
    controls = [channel.sock for member in (hub, joiner) for channel in member._control._channels.values()]  # type: ignore[union-attr]  # connected
    assert [user_timeout(sock) for sock in controls] == [LOST_HOST_MS, LOST_HOST_MS]
    for sock in (*data, *controls):
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (sock.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert (idle + interval * count) * 1000 <= LOST_HOST_MS
