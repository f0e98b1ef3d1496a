"""MoE runners of the Attention role: vLLM's own runner with the experts' part sent away."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models.utils import extract_layer_index

from afd_shim import role
from afd_shim.errors import LayerError
from afd_shim.moe.proxy import RemoteFFNProxy

__all__ = ["AFDExternalRoutingMoERunner", "AFDRemoteMoERunner"]


class AFDRemoteMoERunner(MoERunner):
    """Gate on FFN: sends the hidden states and receives the layer's output.

    Upstream: `vllm/model_executor/layers/fused_moe/runner/moe_runner.py`, `MoERunner`
    (0.30.0-0.33.0). `forward` stays vLLM's after two checks, with `_forward_impl` replaced. Without
    shared experts, transforms or scale of its own, what it returns is the FFN's reply, untouched: eager
    forwards then take that reply without the operator around it, which Dynamo alone needs. With
    `shared_experts_on_attention` the reply is raw: the shared experts run here while it is on its way,
    and vLLM's `forward` scales and adds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature differs between releases
        super().__init__(*args, **kwargs)
        self._layer_index: int = extract_layer_index(self.layer_name)
        self._finishes_here = self.shared_experts is not None or self.routed_scaling_factor != 1.0

    def _select_forward(self) -> Any:  # noqa: ANN401 - vLLM's return type: a function or an operator
        # vLLM's CPU runner calls the body directly, and Dynamo would trace into the socket.
        return torch.ops.vllm.moe_forward if self.shared_experts is None else torch.ops.vllm.moe_forward_shared

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the MoE layer remotely.

        Args:
            hidden_states: `[rows, hidden]`.
            router_logits: `[rows, num_experts]`, or a placeholder where the runner owns the gate.
            input_ids: must be None; not transported.
            shared_experts_input: must be None; not transported.

        Returns:
            `[rows, hidden]`, the dtype of `hidden_states`.

        Raises:
            LayerError: for an argument that is not transported.

        """
        if input_ids is not None:
            raise LayerError(f"{self.layer_name}: routing by input_ids is not transported; serve this model unsplit.")
        if shared_experts_input is not None:
            raise LayerError(
                f"{self.layer_name}: shared_experts_input given by the model is not transported; "
                "serve this model unsplit."
            )
        if self._finishes_here or torch.compiler.is_compiling():
            return super().forward(hidden_states, router_logits)
        reply = self._forward_impl(hidden_states, router_logits, None)
        assert isinstance(reply, torch.Tensor)  # a pair only with shared experts
        return reply

    def _forward_impl(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return self._exchange(hidden_states, None, shared_experts_input)

    def _exchange(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The FFN's reply; behind the shared experts' output where they are here."""
        proxy, shared = self._proxy(), self.shared_experts
        if shared is None:
            return proxy.exchange(self._layer_index, hidden_states, router_logits)
        # vLLM's wrapper around them decides when and on which stream they run; here they run now.
        experts = shared._layer  # noqa: SLF001 - the module the model made
        return proxy.exchange_beside(
            self._layer_index, hidden_states, router_logits, lambda: experts(shared_experts_input)
        )

    def _proxy(self) -> RemoteFFNProxy:
        proxy = role.current().proxy
        if proxy is None:
            raise LayerError(
                f"{self.layer_name}: a forward ran before the FFN ranks were connected; "
                "load the model through an AFD worker."
            )
        return proxy


class AFDExternalRoutingMoERunner(AFDRemoteMoERunner):
    """Gate on Attention: sends hidden states and router logits.

    The gate is either the runner's own (`compute_gate_on_attention`), applied exactly as the native
    runner does, or one the model calls itself, whose logits arrive as `router_logits`.
    """

    def _forward_impl(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        width = self.moe_config.num_logical_experts
        if router_logits.shape[-1] != width:
            raise LayerError(
                f"{self.layer_name}: router logits have width {router_logits.shape[-1]}, the layer has {width} "
                "experts. Nothing was sent. Report this with the model's name: its gate was not applied."
            )
        return self._exchange(hidden_states, router_logits, shared_experts_input)
