"""P2pNcclAFDConnector's own logic, with gloo in NCCL's place: the headers' order, who gets what, who is named."""

from __future__ import annotations

import datetime as dt
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroupGloo
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput

from afd_shim.connectors import ExchangeHeader, Hello, Reply, device_pair
from afd_shim.connectors.base import RoleName
from afd_shim.connectors.device_pair import DevicePair, Identity, PairStore
from afd_shim.connectors.framing import ConnectionEndedError
from afd_shim.connectors.p2p_nccl import P2pNcclAttentionConnector, P2pNcclFFNConnector
from afd_shim.errors import HandshakeError, PeerLostError, TransportError
from afd_shim.workers.outputs import CheckedOutput

CPU = torch.device("cpu")
HIDDEN, EXPERTS, MAX_ROWS = 16, 8, 64
LAYERS = (0, 1, 2)
TIMEOUT_S = 60.0


def gloo(store: Any, rank: int) -> Any:
    """A group of two that needs no GPU."""
    return ProcessGroupGloo(store, rank, 2, dt.timedelta(seconds=TIMEOUT_S))


@dataclass(frozen=True)
class Layout:
    """A deployment whose ranks are threads of this process."""

    attention: int = 1
    ffn: int = 1
    tp: int = 1
    gate_on_attention: bool = False
    port: int = 0
    lost: list[PeerLostError] = field(default_factory=list)

    def config(self) -> Any:
        """What a connector reads of the `afd` configuration."""
        return SimpleNamespace(
            connector="P2pNcclAFDConnector",
            host="127.0.0.1",
            port=self.port,
            num_attention_ranks=self.attention,
            num_ffn_ranks=self.ffn,
            connector_extra_config={},
            startup_timeout_s=TIMEOUT_S,
        )

    def hello(self, role: RoleName, rank: int) -> Hello:
        """A rank's Hello."""
        return Hello(
            role=role,
            rank=rank,
            release="0",
            patch_digest="0",
            model_fingerprint="0",
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            dtype="bfloat16",
            gate_on_attention=self.gate_on_attention,
            moe_layers=LAYERS,
            max_num_tokens=MAX_ROWS,
            num_attention_ranks=self.attention,
            num_ffn_ranks=self.ffn,
            attention_tp_size=self.tp if role == "attention" else 1,
        )

    def make_ffn(self, rank: int) -> P2pNcclFFNConnector:
        """An FFN rank, not yet connected."""
        return P2pNcclFFNConnector(self.config(), self.hello("ffn", rank), CPU, self.lost.append, group_factory=gloo)

    def make_attention(self, rank: int) -> P2pNcclAttentionConnector:
        """An Attention rank, not yet connected."""
        return P2pNcclAttentionConnector(
            self.config(), self.hello("attention", rank), CPU, self.lost.append, group_factory=gloo
        )


def moe(hidden: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
    """A layer that shows rows in the wrong place."""
    output = hidden * 2
    return output if logits is None else output + logits.sum(-1, keepdim=True).to(hidden.dtype)


def serve(connector: P2pNcclFFNConnector) -> int:
    """Answer every batch until the goodbyes; the most requests that ran together."""
    connector.connect()
    most = 0
    while (batch := connector.recv_attn_output()) is not None:
        most = max(most, len(batch.members))
        connector.send_ffn_output(batch, moe(batch.hidden_states, batch.router_logits).contiguous())
    connector.close()
    return most


def attend(layout: Layout, rank: int, siblings: threading.Barrier | None = None) -> int:
    """Exchange rows of many sizes, some padded, some none; the bytes that were sent.

    `siblings` are the ranks of one tensor parallel group: after each layer they add up what they hold.
    """
    connector = layout.make_attention(rank)
    connector.connect()
    group = rank // layout.tp
    generator = torch.Generator().manual_seed(group)
    for step in range(12):
        rows = (step * 7 + group) % (MAX_ROWS // layout.attention)
        for layer in LAYERS:
            hidden = torch.randn(rows, HIDDEN, generator=generator).to(torch.bfloat16)
            logits = torch.randn(rows, EXPERTS, generator=generator) if layout.gate_on_attention else None
            header = header_of(step, layer, rows, rows - rows // 3)
            connector.send_attn_output(header, hidden, logits)
            out = connector.recv_ffn_output(header, torch.empty_like(hidden))
            expected = moe(hidden, logits) if rank % layout.tp == 0 else torch.zeros_like(hidden)
            assert torch.equal(out, expected)
            if siblings is not None:
                siblings.wait(TIMEOUT_S)
    connector.close()
    return connector.stats.bytes_sent


def header_of(step: int, layer: int, rows: int, real_rows: int) -> ExchangeHeader:
    """A request of a real step."""
    return ExchangeHeader(step, layer, 0, rows, real_rows, Reply.FINISHED, dummy=False, last_layer=layer == LAYERS[-1])


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """One thread per rank."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(), id="1A1F"),
        pytest.param(Layout(gate_on_attention=True), id="1A1F gate on Attention"),
        pytest.param(Layout(attention=3, ffn=2, gate_on_attention=True), id="3A2F gate on Attention"),
        pytest.param(Layout(attention=4, ffn=2, tp=2), id="2 Attention groups of TP 2, 2F"),
    ],
)
def test_every_rank_gets_its_own_rows_back(layout: Layout, threads: ThreadPoolExecutor) -> None:
    """Whatever runs together: FFN rank 0 answers each group, and the other ranks of a group hold zeros."""
    first = layout.make_ffn(0)
    layout = replace(layout, port=first.address[1])
    ffn = [threads.submit(serve, first)]
    ffn += [threads.submit(serve, layout.make_ffn(rank)) for rank in range(1, layout.ffn)]
    groups = [threading.Barrier(layout.tp) for _ in range(layout.attention // layout.tp)]
    attention = [threads.submit(attend, layout, rank, groups[rank // layout.tp]) for rank in range(layout.attention)]

    assert all(future.result(TIMEOUT_S) > 0 for future in attention)
    assert all(future.result(TIMEOUT_S) >= 1 for future in ffn)


def test_only_rows_and_headers_travel(threads: ThreadPoolExecutor) -> None:
    """Gate on FFN: the hidden states and 64 bytes per request, no more."""
    first = Layout().make_ffn(0)
    layout = Layout(port=first.address[1])
    served = threads.submit(serve, first)

    sent = attend(layout, 0)

    requests = [(step * 7) % MAX_ROWS for step in range(12) for _ in LAYERS]
    assert sent == sum(requests) * HIDDEN * 2 + 64 * len(requests)
    served.result(TIMEOUT_S)


def test_a_peer_that_ends_is_named_and_its_answers_are_not_trusted(threads: ThreadPoolExecutor) -> None:
    """The rank in flight hears who ended and why; so does whoever asks before using what it received."""
    first = Layout().make_ffn(0)
    layout = Layout(port=first.address[1])
    serving = threads.submit(_serve_one_then_fail, first)
    connector = layout.make_attention(0)
    connector.connect()
    rows = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
    header = header_of(0, 0, 3, 3)
    connector.send_attn_output(header, rows)
    connector.recv_ffn_output(header, torch.empty_like(rows))
    serving.result(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while not layout.lost and time.monotonic() < deadline:
        time.sleep(0.01)

    with pytest.raises(PeerLostError, match=r"FFN rank 0 .* it ended with: the kernel failed"):
        connector.raise_if_lost()
    with pytest.raises(PeerLostError, match="the kernel failed"):
        connector.send_attn_output(header_of(0, 1, 3, 3), rows)
    connector.close()


def _serve_one_then_fail(connector: P2pNcclFFNConnector) -> None:
    connector.connect()
    batch = connector.recv_attn_output()
    assert batch is not None
    connector.send_ffn_output(batch, moe(batch.hidden_states, None))
    connector.close("the kernel failed")


Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A data connection."""
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def _pair(rank: int, sock: socket.socket, factory: Callable[[Any, int], Any] = gloo) -> DevicePair:
    return DevicePair(f"rank {1 - rank}", rank, sock, CPU, time.monotonic() + TIMEOUT_S, factory)


def test_different_nccl_libraries_are_refused(
    ends: Ends, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a communicator is made, naming both versions and what else would work."""
    versions = iter(("2.28.9", "2.27.3"))
    lock = threading.Lock()

    def identity(_: torch.device) -> Identity:
        with lock:
            return Identity(device="cpu", library=next(versions))

    monkeypatch.setattr(device_pair, "_identity", identity)
    opening: list[Future[DevicePair]] = [threads.submit(_pair, rank, sock) for rank, sock in enumerate(ends)]

    for future in opening:
        with pytest.raises(HandshakeError, match=r"NCCL 2\.2.* has 2\.2.*TcpAFDConnector"):
            future.result(TIMEOUT_S)


class _DoesNothing:
    """A communicator that reports success and moves nothing: what a disabled one does."""

    def __init__(self, *_: object) -> None:
        self.aborted = False

    def send(self, *_: object) -> _DoesNothing:
        return self

    recv = send

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def abort(self) -> None:
        self.aborted = True


def test_a_communicator_that_moves_nothing_is_noticed(ends: Ends, threads: ThreadPoolExecutor) -> None:
    """Set-up sees numbers arrive, or fails; nothing is served over a transport that turned itself off."""
    opening = [threads.submit(_pair, rank, sock, _DoesNothing) for rank, sock in enumerate(ends)]

    for future in opening:
        with pytest.raises(TransportError, match=r"reported success, but what .* sent arrived changed"):
            future.result(TIMEOUT_S)


def test_the_store_of_a_pair_hears_of_a_lost_peer(ends: Ends) -> None:
    """Torch reports a text only, so the store keeps the error itself."""
    left, right = ends
    store = PairStore(left, time.monotonic() + TIMEOUT_S)
    right.close()

    with pytest.raises(ConnectionEndedError):
        store.get("ncclUniqueId")
    assert isinstance(store.failure, ConnectionEndedError)


def test_the_store_of_a_pair_hands_over_what_the_peer_sets(ends: Ends) -> None:
    """Also bytes that are no text, and out of the order they are asked for."""
    left, right = (PairStore(sock, time.monotonic() + TIMEOUT_S) for sock in ends)
    right.set("first", b"\x00\xff")
    right.set("second", "text")

    assert left.get("second") == b"text"
    assert left.get("first") == b"\x00\xff"
    assert left.check(["first", "second"])
    assert not left.check(["third"])


class _Lost:
    """A transport that has lost its FFN."""

    def raise_if_lost(self) -> None:
        raise PeerLostError("FFN rank 0 is gone")


class _Result(AsyncModelRunnerOutput):
    """Device work that ends."""

    def get_output(self) -> Any:
        return EMPTY_MODEL_RUNNER_OUTPUT


def test_a_result_completed_after_a_loss_is_not_handed_out() -> None:
    """vLLM fetches the tokens after the step has returned; what an abort let through must not reach a client."""
    healthy = CheckedOutput(_Result(), cast("Any", SimpleNamespace(raise_if_lost=lambda: None)))
    assert healthy.get_output() is EMPTY_MODEL_RUNNER_OUTPUT
    with pytest.raises(PeerLostError, match="FFN rank 0 is gone"):
        CheckedOutput(_Result(), cast("Any", _Lost())).get_output()
