"""The Attention side of one exchange: parameter-free, and the only thing a runner talks to."""

from __future__ import annotations

from collections.abc import Callable
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
        reply: what the FFN answers with.

    """

    def __init__(self, connector: AttentionConnector, moe_layers: list[int], *, reply: Reply = Reply.FINISHED) -> None:
        self.connector = connector
        self.forwards = 0
        self._layers = moe_layers
        self._reply = reply
        self._first, self._last = moe_layers[0], moe_layers[-1]
        self._real_rows = 0
        self._kept: dict[int, torch.Tensor] = {}
        self._kept_beside: dict[int, torch.Tensor] = {}
        self._max_kept_rows = 0

    def begin_step(self, real_rows: int) -> None:
        """Tell how many rows of the coming forward are real tokens; 0 makes it a dummy step.

        Warm-up, profiling and idle data-parallel batches are dummy steps: they never come here, and
        `end_step` restores that state.
        """
        self._real_rows = real_rows

    def end_step(self) -> None:
        """Count every further row as a placeholder until the next `begin_step`."""
        self._real_rows = 0

    def keep_outputs(self, max_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Return outputs of up to `max_rows` rows in memory that keeps its address.

        One buffer per layer, and one more for what `exchange_beside` computes here. Captured graphs read an
        exchange's outputs at the addresses they were captured with. Graphs of different sizes share a
        layer's buffers: only one of them runs at a time. Allocated at once, so that vLLM's memory
        profiling counts it.

        Args:
            max_rows: rows of the largest captured graph.
            hidden_size: the model's.
            dtype: the model's.
            device: the model's.

        """
        self._max_kept_rows = max_rows

        def buffers() -> dict[int, torch.Tensor]:
            return {layer: torch.empty(max_rows, hidden_size, dtype=dtype, device=device) for layer in self._layers}

        self._kept = buffers()
        if self._reply is Reply.RAW:
            self._kept_beside = buffers()

    def exchange(
        self, layer: int, hidden_states: torch.Tensor, router_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one MoE layer on the FFN ranks.

        Args:
            layer: the decoder layer's index.
            hidden_states: `[rows, hidden]`, the model's dtype; read, never written.
            router_logits: `[rows, num_experts]` in the gate's dtype where Attention owns the gate.

        Returns:
            The FFN's reply, `[rows, hidden]`, in a buffer of its own.

        Raises:
            PeerLostError: naming the FFN rank that is gone.

        """
        header, out = self._send(layer, hidden_states, router_logits)
        # Dual-batch overlap yields here once a real all-to-all backend lets it be tested.
        return self.connector.recv_ffn_output(header, out)

    def exchange_beside(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None,
        compute: Callable[[], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one MoE layer on the FFN ranks, and `compute` here while they do.

        Args:
            layer: as for `exchange`.
            hidden_states: as for `exchange`.
            router_logits: as for `exchange`.
            compute: gives `[rows, hidden]` from this rank alone: the shared experts.

        Returns:
            What `compute` gave and the FFN's reply, each in a buffer of its own.

        Raises:
            PeerLostError: naming the FFN rank that is gone.

        """
        header, out = self._send(layer, hidden_states, router_logits)
        beside = compute()
        if header.rows <= self._max_kept_rows:
            beside = self._kept_beside[layer][: header.rows].copy_(beside)
        return beside, self.connector.recv_ffn_output(header, out)

    def _send(
        self, layer: int, hidden_states: torch.Tensor, router_logits: torch.Tensor | None
    ) -> tuple[ExchangeHeader, torch.Tensor]:
        """Send a request; its header, and where its reply goes."""
        if layer == self._first:
            self.forwards += 1
        rows = hidden_states.shape[0]
        header = ExchangeHeader(
            step=self.forwards - 1,
            layer=layer,
            stage=0,
            rows=rows,
            real_rows=min(rows, self._real_rows),
            reply=self._reply,
            dummy=self._real_rows == 0,
            last_layer=layer == self._last,
        )
        hidden_states = hidden_states.contiguous()
        if router_logits is not None:
            router_logits = router_logits.contiguous()
        self.connector.send_attn_output(header, hidden_states, router_logits)
        return header, self._output(layer, hidden_states)

    def _output(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """A buffer for the output that aliases no input."""
        rows = hidden_states.shape[0]
        if rows <= self._max_kept_rows:
            return self._kept[layer][:rows]
        return torch.empty_like(hidden_states)
