"""cpu_eplb_timing: on CPU, a rearrangement of experts is timed by the host's clock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from afd_shim.engine import Patch, Target

__all__ = ["PATCH"]

Rearrange = Callable[..., object]


def build(original: Rearrange) -> Rearrange:
    """Run vLLM's own rearrangement where `torch.Event` can be made."""
    from afd_shim.ffn.host_events import host_events

    @functools.wraps(original)
    def rearrange(self: object, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401 - passed on
        with host_events():
            return original(self, *args, **kwargs)

    return rearrange


PATCH = Patch(
    name="cpu_eplb_timing",
    target=Target("vllm.distributed.eplb.eplb_state:EplbState.rearrange", kind="method"),
    strategy="replace",
    build=build,
    why="EplbState.rearrange times itself with events of an accelerator, which raise where there is none",
    upstream="vllm/distributed/eplb/eplb_state.py, EplbState.rearrange, 0.30.0-0.33.0",
    releases=("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    until="vLLM's CPU backend supports expert load balancing",
    stacks=True,
    # What the FFN's balancer calls on every device (`afd_shim/compat/eplb.py`) is proven with it.
    relies_on=(
        *(
            Target(f"vllm.v1.worker.gpu.eplb_utils:EPLBController.{name}", kind="method")
            for name in (
                "__init__",
                "prepare_load",
                "maybe_register_model",
                "maybe_start_async_loop",
                "prepare_forward",
                "step",
            )
        ),
        *(
            Target(f"vllm.distributed.eplb.eplb_state:EplbState.{name}", kind="method")
            for name in ("__init__", "add_model", "prepare_forward", "step", "_should_record_current_step")
        ),
    ),
)
