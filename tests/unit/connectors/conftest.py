"""Ranks that meet over real sockets in one process; no torch, no tensors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from afd_shim.connectors.base import Hello, Reply
from afd_shim.connectors.hub import Hub
from afd_shim.connectors.joiner import Joiner
from afd_shim.connectors.membership import Membership
from afd_shim.connectors.wire import Agreement
from afd_shim.errors import PeerLostError
from afd_shim.testing import servers

HELLO = Hello(
    role="attention",
    rank=0,
    release="0.32.0",
    patch_digest="0123abcd",
    model_fingerprint="model-1",
    num_experts=8,
    hidden_size=16,
    dtype="bfloat16",
    gate_on_attention=False,
    moe_layers=(1, 2, 3),
    max_num_tokens=32,
    num_attention_ranks=1,
    num_ffn_ranks=1,
)

MakeHello = Callable[..., Hello]


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait for `condition`, which another thread brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def hello() -> MakeHello:
    """Build the Hello of a rank; keywords are its fields."""

    def build(role: str, rank: int = 0, **fields: Any) -> Hello:
        return msgspec.structs.replace(HELLO, role=role, rank=rank, **fields)

    return build


@pytest.fixture
def agreement() -> Agreement:
    """What two ranks with router logits agree on."""
    return Agreement(
        max_rows=32,
        hidden_size=16,
        dtype="bfloat16",
        num_experts=8,
        moe_layers=frozenset((1, 2, 3)),
        reply=Reply.FINISHED,
        num_groups=3,
    )


class Meeting:
    """Starts ranks in threads of their own, and closes them all."""

    def __init__(self) -> None:
        self.members: list[Membership] = []
        self.lost: dict[str, list[PeerLostError]] = {}

    def hub(self, hello: Hello, address: tuple[str, int] = ("127.0.0.1", 0)) -> Hub:
        """FFN rank 0, listening."""
        hub = Hub(address, hello, self._on_lost(hello))
        self.members.append(hub)
        return hub

    def joiner(self, hello: Hello, address: tuple[str, int]) -> Joiner:
        """Another rank."""
        joiner = Joiner(address, hello, self._on_lost(hello))
        self.members.append(joiner)
        return joiner

    def connect(self, member: Membership, timeout_s: float = 30.0) -> Future[None]:
        """Connect in a thread; the future ends when `connect` does."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                member.connect(time.monotonic() + timeout_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, daemon=True).start()
        return future

    def close(self) -> None:
        """Close every rank."""
        for member in self.members:
            member.close(None)
            for connection in member.data.values():
                connection.close()

    def _on_lost(self, hello: Hello) -> Callable[[PeerLostError], None]:
        return self.lost.setdefault(f"{hello.role} {hello.rank}", []).append


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    """Ranks to start; all are closed at the end, and no control thread is left."""
    meeting = Meeting()
    yield meeting
    meeting.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("afd-control")]
    assert left == []


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged, also where an imported vLLM keeps its loggers from the root."""
    logger = logging.getLogger("vllm.afd_shim")
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level("INFO", logger.name)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    return servers.free_port()
