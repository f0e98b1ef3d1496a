"""Ranks in processes of their own, over real sockets."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from afd_shim.connectors import Hello

sys.path.insert(0, str(Path(__file__).parent))  # children import rank_process by this name
rank_process: Any = importlib.import_module("rank_process")
make_hello = rank_process.make_hello

# A server that has imported torch once forks every rank: a start costs milliseconds, not seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "rank_process"])

ANSWER_WITHIN_S = 120.0


class Rank:
    """One rank's process, and the pipe to it."""

    def __init__(self, hello: Hello, port: int, logits_dtype: str) -> None:
        self.pipe: Connection
        self.pipe, theirs = CONTEXT.Pipe()
        self.hello = hello
        self.lost: list[tuple[Any, ...]] = []
        self.process = CONTEXT.Process(target=rank_process.main, args=(theirs, hello, port, logits_dtype), daemon=True)
        self.process.start()
        theirs.close()
        self.port: int = self.expect("listens")[0]

    def order(self, *order: object) -> None:
        """Ask for something; `result` or `expect` takes the answer."""
        self.pipe.send(order)

    def expect(self, kind: str) -> Any:
        """Wait for an answer of `kind`; the fields that follow."""
        while True:
            assert self.pipe.poll(ANSWER_WITHIN_S), f"{self.hello.role} {self.hello.rank}: no {kind}"
            answer = self.pipe.recv()
            if answer[0] == kind:
                return answer[1:]
            assert answer[0] == "lost", answer
            self.lost.append(answer[1:])

    def expect_lost(self) -> None:
        """Wait until the callback has told of a lost peer; it may come after the call that failed."""
        if not self.lost:
            self.lost.append(self.expect("lost"))

    def result(self) -> Any:
        """Wait for the result of the last order."""
        return self.expect("result")[0]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()


class Deployment:
    """The ranks of both roles, connected."""

    def __init__(self, attention: int, ffn: int, *, logits_dtype: str = "float32", tp: int = 1, **fields: Any) -> None:
        counts = {"num_attention_ranks": attention, "num_ffn_ranks": ffn, **fields}
        first = Rank(make_hello("ffn", 0, **counts), 0, logits_dtype)
        self.ffn = [first]
        self.attention: list[Rank] = []
        self.ffn += [Rank(make_hello("ffn", rank, **counts), first.port, logits_dtype) for rank in range(1, ffn)]
        for rank in range(attention):
            hello = make_hello("attention", rank, attention_tp_size=tp, **counts)
            self.attention.append(Rank(hello, first.port, logits_dtype))
        for each in self.ranks:
            each.expect("connected")

    @property
    def ranks(self) -> list[Rank]:
        """All of them."""
        return self.ffn + self.attention

    def close(self) -> None:
        """End every process."""
        for rank in self.ranks:
            rank.kill()
            rank.process.join()
            rank.pipe.close()


@pytest.fixture
def deploy() -> Iterator[Any]:
    """Start a Deployment; arguments are its own."""
    started: list[Deployment] = []

    def start(attention: int, ffn: int, **fields: Any) -> Deployment:
        started.append(Deployment(attention, ffn, **fields))
        return started[-1]

    yield start
    for deployment in started:
        deployment.close()
