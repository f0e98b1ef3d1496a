"""cpu_eplb_event: on CPU, vLLM 0.30's EPLB state can be made at all."""

from __future__ import annotations

import functools
from collections.abc import Callable

from afd_shim.engine import Patch, Target

__all__ = ["PATCH"]

Initialise = Callable[..., None]


def build(original: Initialise) -> Initialise:
    """Make the event that wakes the asynchronous worker, which never runs on CPU, out of host events."""
    from afd_shim.ffn.host_events import host_events

    @functools.wraps(original)
    def __init__(self: object) -> None:  # noqa: N807 - it replaces one
        with host_events():
            original(self)

    return __init__


PATCH = Patch(
    name="cpu_eplb_event",
    target=Target("vllm.distributed.eplb.eplb_utils:CpuGpuEvent.__init__", kind="method"),
    strategy="replace",
    build=build,
    why="EplbState makes a CUDA event when it is built, also in synchronous mode, which raises without CUDA",
    upstream="vllm/distributed/eplb/eplb_utils.py, CpuGpuEvent.__init__, 0.30.0 (0.31.0 uses torch.Event)",
    releases=("0.30.0",),
    until="0.30.0 is no longer supported",
    stacks=True,
)
