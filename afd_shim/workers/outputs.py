"""A step's result, handed out only if every answer in it can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.outputs import AsyncModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

    from afd_shim.connectors.base import AttentionConnector

__all__ = ["CheckedOutput"]


class CheckedOutput(AsyncModelRunnerOutput):
    """A result whose device work is still under way when the step returns.

    A transport that only enqueues its receives lets streams go on when a peer is lost; what they
    computed then is no result.

    Upstream: `vllm/v1/outputs.py`, `AsyncModelRunnerOutput` (0.30.0-0.33.0), which vLLM's executors ask
    for its output once, in a thread of theirs.
    """

    def __init__(self, output: AsyncModelRunnerOutput, connector: AttentionConnector) -> None:
        self._output = output
        self._connector = connector

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the result as vLLM does.

        Raises:
            PeerLostError: an FFN rank was lost before the result was complete.

        """
        output = self._output.get_output()
        self._connector.raise_if_lost()
        return output
