"""How a connector is used and misused, with both ends in one process."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from afd_shim.connectors import ExchangeHeader, Reply, create_attention_connector, create_ffn_connector, sockets
from afd_shim.errors import ConfigError, FrameError, PeerLostError, TransportError

rank_process: Any = importlib.import_module("rank_process")

CPU = torch.device("cpu")


class Pair:
    """One FFN rank and one or more Attention ranks, connected, in this process."""

    def __init__(self, attention: int = 1, **fields: Any) -> None:
        self.lost: list[PeerLostError] = []
        make_hello, counts = rank_process.make_hello, {"num_attention_ranks": attention, **fields}
        config = rank_process.Config(0, attention)
        ffn: Any = create_ffn_connector(config, make_hello("ffn", **counts), device=CPU, on_peer_lost=self.lost.append)
        self.ffn = ffn
        config.port = ffn.address[1]
        self.attentions = [
            create_attention_connector(
                config, make_hello("attention", rank, **counts), device=CPU, on_peer_lost=self.lost.append
            )
            for rank in range(attention)
        ]
        self.attention = self.attentions[0]
        connecting = [threading.Thread(target=each.connect) for each in (ffn, *self.attentions)]
        for thread in connecting:
            thread.start()
        for thread in connecting:
            thread.join()

    def close(self) -> None:
        """Close all ends."""
        for attention in self.attentions:
            attention.close()
        self.ffn.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """One rank of each role."""
    pair = Pair()
    yield pair
    pair.close()


def header(rows: int = 2, **fields: Any) -> ExchangeHeader:
    """Build the header of a real step's first layer."""
    return ExchangeHeader(0, 1, 0, rows, rows, Reply.FINISHED, dummy=False, last_layer=False)._replace(**fields)


def rows(count: int = 2, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Hidden states."""
    return torch.ones(count, width, dtype=dtype)


def exchange(pair: Pair) -> None:
    """Send one request and receive its answer."""
    asked = header()
    pair.attention.send_attn_output(asked, rows())
    pair.attention.recv_ffn_output(asked, rows())


def test_answer_is_written_to_the_buffer_given(pair: Pair) -> None:
    """The receive fills and returns `out` itself, and reads nothing of it."""
    asked, out = header(), torch.full((2, 64), 5.0, dtype=torch.bfloat16)
    pair.attention.send_attn_output(asked, rows())
    batch = pair.ffn.recv_attn_output()
    pair.ffn.send_ffn_output(batch, batch.hidden_states * 3)

    assert pair.attention.recv_ffn_output(asked, out) is out
    assert torch.equal(out, rows() * 3)


@pytest.mark.parametrize(
    ("asked", "hidden", "message"),
    [
        (header(), rows(3), "hidden_states"),
        (header(), rows(width=32), "hidden_states"),
        (header(), rows(dtype=torch.float16), "hidden_states"),
        (header(), rows(width=128)[:, ::2], "hidden_states"),
        (header(33), rows(33), "not what was agreed on"),
        (header(layer=4), rows(), "layer: 4"),
        (header(reply=Reply.RAW), rows(), "not what was agreed on"),
        (header(real_rows=3), rows(), "real rows: 3 of only 2"),
        (header(dummy=True), rows(), "real rows: 2 in a dummy forward"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_sent(
    pair: Pair, asked: ExchangeHeader, hidden: torch.Tensor, message: str
) -> None:
    """A wrong call is the caller's ValueError; the connection is as good as before."""
    with pytest.raises(ValueError, match=message):
        pair.attention.send_attn_output(asked, hidden)

    test_answer_is_written_to_the_buffer_given(pair)


def test_router_logits_travel_exactly_where_agreed(pair: Pair) -> None:
    """Logits that nobody expects, or that are missing or too narrow, never leave."""
    with pytest.raises(ValueError, match="router_logits travel exactly where"):
        pair.attention.send_attn_output(header(), rows(), torch.zeros(2, 8))
    gated = Pair(gate_on_attention=True)
    with pytest.raises(ValueError, match="router_logits travel exactly where"):
        gated.attention.send_attn_output(header(), rows())
    with pytest.raises(ValueError, match=r"router_logits: a \(2, 7\) .* contiguous \(2, 8\)"):
        gated.attention.send_attn_output(header(), rows(), torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"router_logits: torch.float64; only"):
        gated.attention.send_attn_output(header(), rows(), torch.zeros(2, 8, dtype=torch.float64))
    gated.close()


def test_one_request_at_a_time(pair: Pair) -> None:
    """A second request before the first answer could block both ends; it is refused."""
    pair.attention.send_attn_output(header(), rows())

    with pytest.raises(ValueError, match="has not been answered; receive it first"):
        pair.attention.send_attn_output(header(layer=2), rows())


def test_answer_must_be_of_the_request(pair: Pair) -> None:
    """Receiving for another header than the one sent is a mistake of the caller."""
    pair.attention.send_attn_output(header(), rows())

    with pytest.raises(ValueError, match="was not sent last"):
        pair.attention.recv_ffn_output(header(layer=2), rows())


def test_output_must_fit_the_batch(pair: Pair) -> None:
    """The FFN cannot send rows of another shape, dtype or layout, nor answer twice."""
    pair.attention.send_attn_output(header(), rows())
    batch = pair.ffn.recv_attn_output()
    for wrong in (rows(3), rows(dtype=torch.float32), rows(width=128)[:, ::2]):
        with pytest.raises(ValueError, match="output: a"):
            pair.ffn.send_ffn_output(batch, wrong)
    pair.ffn.send_ffn_output(batch, rows())

    with pytest.raises(ValueError, match="only once"):
        pair.ffn.send_ffn_output(batch, rows())


def test_close_wakes_a_waiting_ffn(pair: Pair) -> None:
    """Shutting an idle FFN down ends its serving loop without an error, at once."""
    closing = threading.Timer(0.3, pair.ffn.close)
    closing.start()
    started = time.monotonic()

    assert pair.ffn.recv_attn_output() is None
    assert time.monotonic() - started < 2
    closing.join()


def test_close_wakes_a_waiting_attention_rank(pair: Pair) -> None:
    """Shutting Attention down ends an exchange in flight with an error that says so."""
    asked = header()
    pair.attention.send_attn_output(asked, rows())
    closing = threading.Timer(0.3, pair.attention.close)
    closing.start()

    with pytest.raises(TransportError, match="Attention rank 0 was closed during an exchange"):
        pair.attention.recv_ffn_output(asked, rows())
    closing.join()
    assert pair.lost == []


def test_attention_is_shut_down_first(pair: Pair) -> None:
    """The FFN's loop ends in peace, even with a request unanswered; closing again does no harm."""
    pair.attention.send_attn_output(header(), rows())
    batch = pair.ffn.recv_attn_output()
    pair.attention.close()
    pair.attention.close()

    pair.ffn.send_ffn_output(batch, rows())

    assert pair.ffn.recv_attn_output() is None
    assert pair.lost == []


def test_ffn_is_shut_down_first(pair: Pair) -> None:
    """Attention's next exchange says that the FFN said goodbye: a clean loss."""
    pair.ffn.close()
    pair.ffn.close()

    with pytest.raises(PeerLostError, match=r"FFN rank 0 at 127.0.0.1:.* is gone: it said goodbye") as caught:
        exchange(pair)

    assert caught.value.clean


def test_close_may_be_called_by_the_loss_callback() -> None:
    """A worker may close its connector right where it hears of the loss."""
    closed = threading.Event()
    pair = Pair()

    def on_lost(_: PeerLostError) -> None:
        pair.attention.close()
        closed.set()

    pair.attention._members._on_peer_lost = on_lost  # type: ignore[attr-defined]  # the TCP connector's own
    pair.ffn.close("its loop failed")

    assert closed.wait(5)


def test_peer_that_breaks_the_protocol_is_named(pair: Pair) -> None:
    """Bytes that are no request end the FFN's loop with an error that names who sent them."""
    (sock,) = pair.attention._members.data.values()  # type: ignore[attr-defined]  # the TCP connector's own
    sock.sendall(bytes(64))

    with pytest.raises(FrameError, match="Attention rank 0 sent a bad frame: not a frame of this protocol"):
        pair.ffn.recv_attn_output()


def test_busy_ffn_is_no_dead_ffn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 33 MB request waits for an FFN that computes for longer than a lost host is given: nobody is lost."""
    monkeypatch.setattr(sockets, "LOST_HOST_MS", 1000)
    pair = Pair(attention=2, hidden_size=2048, max_num_tokens=8192)
    first, second = pair.attentions
    first.send_attn_output(header(1), rows(1, 2048))
    batch = pair.ffn.recv_attn_output()
    asked, out = header(8192), rows(8192, 2048)
    sending = threading.Thread(target=second.send_attn_output, args=(asked, rows(8192, 2048) * 2))
    sending.start()

    time.sleep(3)
    pair.ffn.send_ffn_output(batch, rows(1, 2048))

    waiting = pair.ffn.recv_attn_output()
    answering = threading.Thread(target=pair.ffn.send_ffn_output, args=(waiting, waiting.hidden_states))
    answering.start()
    sending.join()
    assert torch.equal(second.recv_ffn_output(asked, out), rows(8192, 2048) * 2)
    answering.join()
    assert pair.lost == []
    pair.close()


def test_connector_is_chosen_by_device() -> None:
    """A connector that cannot serve the device is refused before anything is opened."""
    config = rank_process.Config(0)
    with pytest.raises(ConfigError, match="TcpAFDConnector does not serve meta devices"):
        create_ffn_connector(config, rank_process.make_hello("ffn"), device=torch.device("meta"), on_peer_lost=print)


def test_independent_servers_have_ranks_of_their_own() -> None:
    """`first_attention_rank` shifts a server's ranks; one beyond the count has no place."""
    config = rank_process.Config(0, num_attention_ranks=2, connector_extra_config={"first_attention_rank": 1})
    hello = rank_process.make_hello("attention", 0, num_attention_ranks=2)

    second: Any = create_attention_connector(config, hello, device=CPU, on_peer_lost=print)

    assert second._members.name == "Attention rank 1"
    config.connector_extra_config["first_attention_rank"] = 2
    with pytest.raises(ConfigError, match="num_attention_ranks: 2, so attention rank 2 has no place"):
        create_attention_connector(config, hello, device=CPU, on_peer_lost=print)
