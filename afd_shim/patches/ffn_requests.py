"""ffn_requests: inference sent to an FFN server is a client error, and the server lives on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

from afd_shim.engine import Patch, Target

__all__ = ["PATCH"]


def build(original: Callable[..., object]) -> Callable[..., NoReturn]:
    """Refuse every request with vLLM's own validation error: entry points answer it as HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    @functools.wraps(original)
    def process_inputs(*_args: object, **_kwargs: object) -> NoReturn:
        raise VLLMValidationError(
            "this server holds the FFN role of an Attention-FFN disaggregated deployment: it has experts only and "
            "answers no inference requests. Send the request to the Attention server, the one started with "
            '"role": "attention" in its \'afd\' configuration.'
        )

    return process_inputs


PATCH = Patch(
    name="ffn_requests",
    target=Target("vllm.v1.engine.input_processor:InputProcessor.process_inputs", kind="method"),
    strategy="replace",
    build=build,
    why="a request that reached the scheduler would be executed on a worker without attention and end the engine",
    upstream="vllm/v1/engine/input_processor.py, InputProcessor.process_inputs, 0.30.0-0.33.0",
    releases=("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    until="vLLM can start an engine that takes no requests",
)
