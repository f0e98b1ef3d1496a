"""The FFN's serving loop: take a batch, run one native MoE layer, answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import TYPE_CHECKING, cast

import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context, set_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform

from afd_shim.connectors.base import Batch, ExchangeStats, FFNConnector, Hello
from afd_shim.connectors.registry import create_ffn_connector
from afd_shim.errors import LayerError, PeerLostError, ServingLoopError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from afd_shim.config import AFDConfig
    from afd_shim.ffn.eplb import ExpertLoadBalancer
    from afd_shim.moe.layers import MoELayer

__all__ = ["ServingLoop"]

logger = init_logger("vllm.afd_shim")

_STOP_TIMEOUT_S = 5.0


class ServingLoop:
    """Serves every Attention rank of a deployment, one layer batch at a time, in its own thread.

    Args:
        vllm_config: vLLM's configuration of this worker.
        afd: the AFD configuration.
        hello: what this rank tells its peers.
        layers: the native MoE layers, in the order of the model's forward.
        device: where they live.
        balancer: steps with what is served; None without expert load balancing.
        on_failure: called from the serving thread with the error that ended it.

    """

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        afd: AFDConfig,
        hello: Hello,
        layers: Sequence[MoELayer],
        device: torch.device,
        balancer: ExpertLoadBalancer | None = None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.max_batch_rows = 0
        self.steps = 0
        self._context = _forward_context(vllm_config, hello.max_num_tokens)
        self._afd = afd
        self._hello = hello
        self._layers = {layer.index: layer for layer in layers}
        self._device = device
        self._balancer = balancer
        self._on_failure = on_failure
        self._served = ExchangeStats()  # of connections that have ended
        self._connector: FFNConnector | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="afd-serving", daemon=True)

    @property
    def stats(self) -> ExchangeStats:
        """What was served since start-up, over all connections."""
        connector = self._connector
        return self._served if connector is None else _sum(self._served, connector.stats)

    def start(self) -> None:
        """Start serving; returns at once, while the loop waits for the Attention ranks."""
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye to the Attention ranks and end the loop; from another thread, repeatable."""
        self._stopping.set()
        if self._connector is not None:
            self._connector.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_TIMEOUT_S)

    def raise_if_failed(self) -> None:
        """Raise the error that ended the loop.

        Raises:
            ServingLoopError: from the real error.

        """
        if self._error is not None:
            raise ServingLoopError(
                f"the FFN's serving loop ended: {self._error}; restart this server."
            ) from self._error

    def warm_up(self) -> None:
        """Run every MoE layer at full size: what kernels allocate later they allocate now."""
        rows = self._hello.max_num_tokens
        dtype = getattr(torch, self._hello.dtype)
        hidden = torch.zeros(rows, self._hello.hidden_size, dtype=dtype, device=self._device)
        with inference_mode():
            if self._balancer is not None:
                self._balancer.prepare_warm_up()
            for layer in self._layers.values():
                logits = None
                if layer.gate != "ffn":
                    logits = torch.zeros(rows, layer.num_experts, dtype=dtype, device=self._device)
                self._forward(layer, hidden, logits)
            if self._balancer is not None:
                self._balancer.end_warm_up()

    def _run(self) -> None:
        try:
            current_platform.set_device(self._device)
            while not self._stopping.is_set():
                self._serve_one_connection()
        except BaseException as error:  # noqa: BLE001 - a thread's error reaches nobody unless it is carried out
            if self._stopping.is_set():
                return
            self._error = error
            self._close(str(error))
            self._on_failure(error)

    def _serve_one_connection(self) -> None:
        """Meet the Attention ranks and serve them until all have said goodbye."""
        lost: list[PeerLostError] = []
        connector = create_ffn_connector(self._afd, self._hello, device=self._device, on_peer_lost=lost.append)
        self._connector = connector
        afd = self._afd
        logger.info("AFD: waiting for %d Attention ranks at %s:%d", afd.num_attention_ranks, afd.host, afd.port)
        connector.connect()
        if not self._stopping.is_set():
            logger.info("AFD: serving %d MoE layers", len(self._layers))
        with inference_mode():
            while (batch := connector.recv_attn_output()) is not None:
                connector.send_ffn_output(batch, self._compute(batch))
                if self._balancer is not None:
                    self._balancer.eplb_step(batch)
        if lost:
            raise lost[0]
        self._close()
        if not self._stopping.is_set():
            logger.info("AFD: every Attention rank has said goodbye")

    def _compute(self, batch: Batch) -> torch.Tensor:
        layer = self._layers.get(batch.layer)
        if layer is None:
            raise LayerError(
                f"a request names MoE layer {batch.layer}, this model has {sorted(self._layers)}; "
                "give both roles the same model."
            )
        rows = batch.hidden_states.shape[0]
        self.max_batch_rows = max(self.max_batch_rows, rows)
        self.steps += batch.ends_step
        if rows == 0:
            return torch.empty_like(batch.hidden_states)
        if self._balancer is not None:
            self._balancer.prepare_forward(batch)
        return self._forward(layer, batch.hidden_states, batch.router_logits)

    def _forward(
        self, layer: MoELayer, hidden_states: torch.Tensor, router_logits: torch.Tensor | None
    ) -> torch.Tensor:
        """Run vLLM's own MoE layer, as the model's forward would.

        Args:
            layer: the layer to run.
            hidden_states: `[rows, hidden]`.
            router_logits: `[rows, num_experts]`, or None where the runner owns the gate; it is then
                given the placeholder that models give it.

        Returns:
            `[rows, hidden]`, finished: scaled, shared experts added, reduced.

        """
        with override_forward_context(self._context):
            output: torch.Tensor = layer.runner(
                hidden_states=hidden_states,
                router_logits=hidden_states if router_logits is None else router_logits,
            )
        return output

    def _close(self, reason: str | None = None) -> None:
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.close(reason)
            self._served = _sum(self._served, connector.stats)


def _forward_context(config: VllmConfig, num_tokens: int) -> ForwardContext:
    """vLLM's forward context, one for all batches: without data parallelism it knows nothing of their size.

    It is put in force for each layer alone: the context is vLLM's for the whole process, where an Attention role may
    run its own model.
    """
    with set_forward_context(None, config, num_tokens=num_tokens):
        context = get_forward_context()
    context.all_moe_layers = None  # layers run in the order they are asked for, not in the model's
    return context


def inference_mode() -> AbstractContextManager[object]:
    """vLLM's inference mode on this platform; gradient modes are per thread, so this thread needs its own."""
    return cast("AbstractContextManager[object]", current_platform.inference_mode())  # type: ignore[no-untyped-call]


def _sum(first: ExchangeStats, second: ExchangeStats) -> ExchangeStats:
    """Add two connections' counters."""
    return ExchangeStats(
        **{field.name: getattr(first, field.name) + getattr(second, field.name) for field in fields(ExchangeStats)}
    )
