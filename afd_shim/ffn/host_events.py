"""Timing events for a machine without an accelerator, where `torch.Event` cannot be made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["HostEvent", "host_events"]


class HostEvent:
    """Stands in for `torch.Event` and `torch.cuda.Event` where everything runs in order on the host."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._recorded_at = 0.0

    def record(self, _stream: object = None) -> None:
        """Take the time."""
        self._recorded_at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is pending on the host."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end._recorded_at - self._recorded_at) * 1e3


@contextmanager
def host_events() -> Iterator[None]:
    """Let `torch.Event` and `torch.cuda.Event` be `HostEvent` meanwhile, in this process.

    Upstream: vLLM's CPU model runner does the same around its constructor
    (`vllm/v1/worker/cpu_model_runner.py`, 0.30.0-0.33.0).
    """
    saved = torch.Event, torch.cuda.Event
    torch.Event = torch.cuda.Event = HostEvent  # type: ignore[misc,assignment]  # a stand-in, as vLLM's own
    try:
        yield
    finally:
        torch.Event, torch.cuda.Event = saved  # type: ignore[misc]
