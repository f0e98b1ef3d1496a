"""The Attention side of one exchange: parameter-free, and the only thing a runner talks to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from afd_shim.connectors.base import ExchangeHeader, Reply

if TYPE_CHECKING:
    from afd_shim.connectors.base import AttentionConnector

__all__ = ["RemoteFFNProxy"]


class RemoteFFNProxy:
    """One exchange with the FFN ranks per MoE layer: send hidden states, receive the layer's output.

    It owns no parameter. A transport that moves rows in another way (DeepEP M2N style) keeps a proxy
    of its own with this interface and rejects EPLB itself.

    Args:
        connector: the connected transport of this Attention rank.
        moe_layers: the layer ids that are exchanged, in the order of the model's forward.

    """

    def __init__(self, connector: AttentionConnector, moe_layers: list[int]) -> None:
        self.connector = connector
        self.forwards = 0
        self._first, self._last = moe_layers[0], moe_layers[-1]
        self._real_rows = 0
        self._buffers: dict[tuple[int, int], torch.Tensor] | None = None

    def begin_step(self, real_rows: int) -> None:
        """Tell how many rows of the coming forward are real tokens; 0 makes it a dummy step.

        Warm-up, profiling and idle data-parallel batches are dummy steps: they never come here, and
        `end_step` restores that state.
        """
        self._real_rows = real_rows

    def end_step(self) -> None:
        """Count every further row as a placeholder until the next `begin_step`."""
        self._real_rows = 0

    def keep_outputs(self) -> None:
        """Return every output in a buffer that keeps its address, one per layer and size.

        Captured graphs read the output of the exchange at the address they were captured with.
        """
        self._buffers = {}

    def exchange(
        self, layer: int, hidden_states: torch.Tensor, router_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one MoE layer on the FFN ranks.

        Args:
            layer: the decoder layer's index.
            hidden_states: `[rows, hidden]`, the model's dtype; read, never written.
            router_logits: `[rows, num_experts]` in the gate's dtype where Attention owns the gate.

        Returns:
            The layer's finished output, `[rows, hidden]`, in a buffer of its own.

        Raises:
            PeerLostError: naming the FFN rank that is gone.

        """
        if layer == self._first:
            self.forwards += 1
        rows = hidden_states.shape[0]
        header = ExchangeHeader(
            step=self.forwards - 1,
            layer=layer,
            stage=0,
            rows=rows,
            real_rows=min(rows, self._real_rows),
            reply=Reply.FINISHED,
            dummy=self._real_rows == 0,
            last_layer=layer == self._last,
        )
        hidden_states = hidden_states.contiguous()
        if router_logits is not None:
            router_logits = router_logits.contiguous()
        self.connector.send_attn_output(header, hidden_states, router_logits)
        # Dual-batch overlap yields here once a real all-to-all backend lets it be tested.
        return self.connector.recv_ffn_output(header, self._output(layer, hidden_states))

    def _output(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """A buffer for the output that aliases no input."""
        if self._buffers is None:
            return torch.empty_like(hidden_states)
        key = layer, hidden_states.shape[0]
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = torch.empty_like(hidden_states)
        return buffer
