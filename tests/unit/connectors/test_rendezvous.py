"""Ranks find each other over real sockets, in any order, whatever else knocks on the port."""

from __future__ import annotations

import socket
import struct
import time

import pytest

from afd_shim.connectors import control, handshake, wire
from afd_shim.connectors.base import Hello
from afd_shim.connectors.membership import Membership
from afd_shim.connectors.wire import Kind
from afd_shim.errors import HandshakeError, RendezvousTimeoutError, TransportError

from .conftest import MakeHello, Meeting, wait_until


def everyone(hello: MakeHello, attention: int, ffn: int, tp: int = 1) -> tuple[Hello, list[Hello]]:
    """FFN rank 0's Hello, and those of all others."""
    counts = {"num_attention_ranks": attention, "num_ffn_ranks": ffn}
    others = [hello("ffn", rank, **counts) for rank in range(1, ffn)]
    others += [hello("attention", rank, attention_tp_size=tp, **counts) for rank in range(attention)]
    return hello("ffn", 0, **counts), others


@pytest.mark.parametrize(
    ("attention", "ffn", "tp"), [(1, 1, 1), (3, 1, 1), (1, 3, 1), (2, 2, 1), (3, 2, 1), (2, 1, 2), (4, 3, 2)]
)
def test_everyone_meets(hello: MakeHello, meeting: Meeting, attention: int, ffn: int, tp: int) -> None:
    """Every layout connects each Attention rank to the FFN ranks it feeds, and FFN ranks to rank 0."""
    first, others = everyone(hello, attention, ffn, tp)
    hub = meeting.hub(first)
    joiners = [meeting.joiner(other, hub.address) for other in others]

    for future in [meeting.connect(member) for member in (*joiners, hub)]:
        future.result(30)

    ends = {(member.name, peer) for member in (hub, *joiners) for peer in member.data}
    assert ends == {(peer, name) for name, peer in ends}
    groups = range(attention // tp)
    for rank in range(ffn):
        senders = {f"Attention rank {group * tp + rank % tp}" for group in groups}
        assert {peer for name, peer in ends if name == f"FFN rank {rank}" and peer.startswith("Att")} == senders


def test_data_connections_carry_bytes_both_ways(hello: MakeHello, meeting: Meeting) -> None:
    """After the rendezvous nothing of it is left on the data connection."""
    hub = meeting.hub(hello("ffn"))
    joiner = meeting.joiner(hello("attention"), hub.address)
    for future in (meeting.connect(hub), meeting.connect(joiner)):
        future.result(30)

    hub.data["Attention rank 0"].sendall(b"down")
    joiner.data["FFN rank 0"].sendall(b"up")

    assert joiner.data["FFN rank 0"].recv(100) == b"down"
    assert hub.data["Attention rank 0"].recv(100) == b"up"


def test_attention_may_be_first(hello: MakeHello, meeting: Meeting, free_port: int) -> None:
    """Attention waits for an FFN that does not listen yet."""
    address = ("127.0.0.1", free_port)
    waiting = meeting.connect(meeting.joiner(hello("attention"), address))
    time.sleep(0.5)
    assert not waiting.done()

    meeting.connect(meeting.hub(hello("ffn"), address)).result(30)

    waiting.result(30)


def test_ffn_restarted_before_everyone_was_there(hello: MakeHello, meeting: Meeting, free_port: int) -> None:
    """Attention ranks that wait with an FFN find the next one, if that one goes away."""
    address = ("127.0.0.1", free_port)
    counts = {"num_attention_ranks": 2}
    first = meeting.hub(hello("ffn", **counts), address)
    meeting.connect(first)
    waiting = meeting.connect(meeting.joiner(hello("attention", 0, **counts), address))
    wait_until(lambda: first._joined)
    first.close(None)

    second = meeting.connect(meeting.hub(hello("ffn", **counts), address))
    other = meeting.connect(meeting.joiner(hello("attention", 1, **counts), address))

    for future in (waiting, other, second):
        future.result(30)
    assert meeting.lost == {"ffn 0": [], "attention 0": [], "attention 1": []}


def test_attention_restarted_before_everyone_was_there(hello: MakeHello, meeting: Meeting) -> None:
    """A rank that leaves early frees its place."""
    counts = {"num_attention_ranks": 2}
    hub = meeting.hub(hello("ffn", **counts))
    connected = meeting.connect(hub)
    early = meeting.joiner(hello("attention", 0, **counts), hub.address)
    meeting.connect(early)
    wait_until(lambda: hub._joined)
    early.close(None)
    wait_until(lambda: not hub._joined)

    again = [meeting.connect(meeting.joiner(hello("attention", rank, **counts), hub.address)) for rank in (0, 1)]

    for future in (connected, *again):
        future.result(30)


def test_ffn_names_who_is_missing(hello: MakeHello, meeting: Meeting) -> None:
    """The FFN's error lists exactly the ranks that did not come, and its address."""
    counts = {"num_attention_ranks": 3, "num_ffn_ranks": 2}
    hub = meeting.hub(hello("ffn", **counts))
    meeting.connect(meeting.joiner(hello("attention", 1, **counts), hub.address))

    with pytest.raises(
        RendezvousTimeoutError, match=r"^FFN rank 1, Attention rank 0, Attention rank 2 did not"
    ) as error:
        meeting.connect(hub, timeout_s=1).result(30)

    assert f"127.0.0.1:{hub.address[1]} within 1 s" in str(error.value)


def test_attention_names_who_else_is_missing(hello: MakeHello, meeting: Meeting) -> None:
    """An Attention rank learns from FFN rank 0 whom both are waiting for."""
    counts = {"num_attention_ranks": 2}
    hub = meeting.hub(hello("ffn", **counts))
    meeting.connect(hub)

    with pytest.raises(RendezvousTimeoutError, match=r"^Attention rank 1 did not arrive at FFN rank 0"):
        meeting.connect(meeting.joiner(hello("attention", 0, **counts), hub.address), timeout_s=1).result(30)


def test_attention_names_an_ffn_that_never_came(hello: MakeHello, meeting: Meeting, free_port: int) -> None:
    """Nobody listens: the error says who, where and why."""
    joiner = meeting.joiner(hello("attention"), ("127.0.0.1", free_port))

    with pytest.raises(RendezvousTimeoutError, match=f"FFN rank 0 did not answer at 127.0.0.1:{free_port} .*refused"):
        meeting.connect(joiner, timeout_s=0.5).result(30)


def test_waiting_is_said(
    hello: MakeHello, meeting: Meeting, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """While it waits, each side says for whom."""
    for module in ("membership", "sockets"):
        monkeypatch.setattr(f"afd_shim.connectors.{module}.LOG_EVERY_S", 0.2)
    counts = {"num_attention_ranks": 2}
    hub = meeting.hub(hello("ffn", **counts))
    meeting.connect(hub)
    meeting.connect(meeting.joiner(hello("attention", 0, **counts), hub.address))

    wait_until(lambda: "FFN rank 0: waiting for Attention rank 1; giving up in" in log.text)
    wait_until(lambda: "Attention rank 0: waiting for Attention rank 1; giving up in" in log.text)


def test_port_in_use_is_an_error_at_once(hello: MakeHello, meeting: Meeting) -> None:
    """A second FFN server on the port is told what to do before anything is waited for."""
    hub = meeting.hub(hello("ffn"))

    with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{hub.address[1]} .* another afd.port"):
        meeting.hub(hello("ffn"), hub.address)


def test_foreign_host_is_an_error_at_once(hello: MakeHello, meeting: Meeting) -> None:
    """An address of another machine cannot be bound; a name that does not exist neither."""
    with pytest.raises(TransportError, match="not an address of this machine"):
        meeting.hub(hello("ffn"), ("192.0.2.1", 6239))
    with pytest.raises(TransportError, match=r"afd.host: 'no-such-host.invalid' does not resolve"):
        meeting.hub(hello("ffn"), ("no-such-host.invalid", 6239))


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_hosts_by_name_and_ipv6(hello: MakeHello, meeting: Meeting, host: str) -> None:
    """IPv6 and names serve as well as 127.0.0.1; FFN ranks above 0 follow rank 0's family."""
    first, others = everyone(hello, 1, 2)
    try:
        hub = meeting.hub(first, (host, 0))
    except TransportError:
        pytest.skip(f"this machine has no {host}")
    members: list[Membership] = [meeting.joiner(other, (host, hub.address[1])) for other in others]

    for future in [meeting.connect(member) for member in (hub, *members)]:
        future.result(30)


def test_disagreement_is_listed_and_the_right_peer_still_served(hello: MakeHello, meeting: Meeting) -> None:
    """The wrong server is refused with every difference; the FFN goes on waiting for the right one."""
    hub = meeting.hub(hello("ffn"))
    connected = meeting.connect(hub)
    wrong = meeting.joiner(hello("attention", dtype="float16", release="0.30.0"), hub.address)

    with pytest.raises(HandshakeError, match=r"(?s)release: '0.30.0' on att.*'0.32.0' on ffn.*dtype: 'float16'"):
        meeting.connect(wrong).result(30)

    meeting.connect(meeting.joiner(hello("attention"), hub.address)).result(30)
    connected.result(30)


def test_taken_rank_is_refused(hello: MakeHello, meeting: Meeting) -> None:
    """Two servers with the same rank: the second one is told so, before and after everyone is there."""
    counts = {"num_attention_ranks": 2}
    hub = meeting.hub(hello("ffn", **counts))
    connected = meeting.connect(hub)
    meeting.connect(meeting.joiner(hello("attention", 0, **counts), hub.address))
    wait_until(lambda: "Attention rank 0" in hub._joined)

    with pytest.raises(HandshakeError, match="Attention rank 0 is already served"):
        meeting.connect(meeting.joiner(hello("attention", 0, **counts), hub.address)).result(30)
    meeting.connect(meeting.joiner(hello("attention", 1, **counts), hub.address)).result(30)
    connected.result(30)
    with pytest.raises(HandshakeError, match="Attention rank 1 is already served"):
        meeting.connect(meeting.joiner(hello("attention", 1, **counts), hub.address)).result(30)


@pytest.mark.parametrize(
    ("rank", "fields", "message"),
    [
        (2, {}, "Attention rank 2 has no place"),
        (1, {"attention_tp_size": 2}, "attention_tp_size: 2 on Attention rank 1, 1 on Attention rank 0"),
        (1, {"attention_tp_size": 3}, "attention_tp_size: 3 on Attention rank 1"),
    ],
)
def test_impossible_layout_is_refused(
    hello: MakeHello, meeting: Meeting, rank: int, fields: dict[str, int], message: str
) -> None:
    """A rank that has no place, or another tensor parallel size, would give wrong sums."""
    counts = {"num_attention_ranks": 2}
    hub = meeting.hub(hello("ffn", **counts))
    meeting.connect(hub)
    meeting.connect(meeting.joiner(hello("attention", 0, **counts), hub.address))
    wait_until(lambda: "Attention rank 0" in hub._joined)

    with pytest.raises(HandshakeError, match=message):
        meeting.connect(meeting.joiner(hello("attention", rank, **counts, **fields), hub.address)).result(30)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(64),
    "oversized": wire.PREFIX.pack(wire.MAGIC, 1, Kind.HELLO, 0, 2**40),
    "version": wire.PREFIX.pack(wire.MAGIC, 9, Kind.HELLO, 0, 2) + b"{}",
    "data frame": wire.PREFIX.pack(wire.MAGIC, 1, Kind.REQUEST, 0, 48) + bytes(48),
    "not json": wire.encode_control(Kind.HELLO, b"\x80\x04pickle"),
    "unasked goodbye": wire.encode_control(Kind.GOODBYE, b"{}"),
    "foreign role": wire.encode_control(Kind.HELLO, b'{"hello": {"role": "other", "rank": 0}, "data_port": 1}'),
    "endless role": wire.encode_control(Kind.HELLO, b'{"hello": {"role": "%s"}}' % (b"x" * 20_000)),
    "forged session": wire.encode_control(Kind.ATTACH, handshake.encode(handshake.Attach("0" * 32, "attention", 0))),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_refused_and_the_listener_lives_on(
    hello: MakeHello, meeting: Meeting, log: pytest.LogCaptureFixture, what: str
) -> None:
    """Foreign bytes end their own connection, with a line in the log, before and after the rendezvous."""
    hub = meeting.hub(hello("ffn"))
    connected = meeting.connect(hub)
    strangers = []
    for _ in range(2):
        stranger = socket.create_connection(hub.address, timeout=10)
        stranger.sendall(GARBAGE[what])
        strangers.append(stranger)
        if not connected.done():
            meeting.connect(meeting.joiner(hello("attention"), hub.address)).result(30)
            connected.result(30)

    for stranger in strangers:
        while stranger.recv(4096):
            pass
        stranger.close()
    assert log.text.count("refused the connection from 127.0.0.1") == 2
    assert meeting.lost == {"ffn 0": [], "attention 0": []}


def test_a_sender_without_end_gets_one_piece_of_attention_at_a_time() -> None:
    """Whoever sends faster than frames are read neither fills memory nor keeps the control thread from others."""
    sent = 10_000
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        sock, _ = listener.accept()
        channel = control.Channel(sock, None)
        sender.sendall(wire.encode_control(Kind.WELCOME, b"") * sent)
        pieces: list[int] = []
        while sum(pieces) < sent:
            pieces.append(len(channel.read()[0]))
        sock.close()

    assert max(pieces) <= wire.MAX_CONTROL_BODY // wire.PREFIX.size + 1


def test_silent_connections_hold_nobody_up(
    hello: MakeHello, meeting: Meeting, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """Half-open connections neither delay the others nor stay for ever."""
    monkeypatch.setattr(control, "IDENTIFY_WITHIN_S", 0.5)
    hub = meeting.hub(hello("ffn"))
    connected = meeting.connect(hub)
    silent = [socket.create_connection(hub.address, timeout=10) for _ in range(20)]
    silent[0].sendall(wire.MAGIC)  # and never the rest

    meeting.connect(meeting.joiner(hello("attention"), hub.address)).result(30)

    connected.result(30)
    for sock in silent:
        while sock.recv(4096):
            pass
        sock.close()
    assert log.text.count("did not say who it is") == 20


def test_attention_that_dials_a_foreign_server_is_told(hello: MakeHello, meeting: Meeting) -> None:
    """afd.port of another service: an error at once, not a wait until the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        joiner = meeting.joiner(hello("attention"), foreign.getsockname()[:2])
        future = meeting.connect(joiner)
        connection, _ = foreign.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with pytest.raises(HandshakeError, match="not an afd-shim frame"):
            future.result(30)
        connection.close()


def test_close_ends_a_waiting_ffn(hello: MakeHello, meeting: Meeting) -> None:
    """An FFN that is shut down while it waits returns, without an error."""
    hub = meeting.hub(hello("ffn"))
    future = meeting.connect(hub)
    time.sleep(0.2)

    hub.close(None)

    future.result(2)


@pytest.mark.parametrize("listens", [True, False])
def test_close_ends_a_waiting_attention_rank(hello: MakeHello, meeting: Meeting, free_port: int, listens: bool) -> None:
    """An Attention server that is shut down while it waits says so at once."""
    address = ("127.0.0.1", free_port)
    if listens:
        meeting.connect(meeting.hub(hello("ffn", num_attention_ranks=2), address))
    joiner = meeting.joiner(hello("attention", num_attention_ranks=2), address)
    future = meeting.connect(joiner)
    time.sleep(0.5)

    joiner.close(None)

    with pytest.raises(TransportError, match="closed while waiting for"):
        future.result(2)


def test_close_before_connect_leaves_nothing(hello: MakeHello, meeting: Meeting, free_port: int) -> None:
    """Closing what was never connected frees its port; connecting afterwards does nothing."""
    address = ("127.0.0.1", free_port)
    hub = meeting.hub(hello("ffn"), address)
    hub.close(None)
    hub.close(None)

    meeting.connect(hub).result(2)
    meeting.hub(hello("ffn"), address)


def test_prefix_is_the_same_in_every_version() -> None:
    """Two versions must be able to refuse each other: the first 16 bytes never change."""
    assert wire.PREFIX.pack(wire.MAGIC, 1, Kind.REFUSAL, 0, 5) == struct.pack("<4sBBHQ", b"AFDx", 1, 3, 0, 5)
