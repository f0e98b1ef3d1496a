"""The Attention role's worker: vLLM's own, whose MoE layers are elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput

from afd_shim.connectors.registry import create_attention_connector
from afd_shim.moe.proxy import RemoteFFNProxy
from afd_shim.workers.base import RoleWorker, logger
from afd_shim.workers.exit import end_server
from afd_shim.workers.outputs import CheckedOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from afd_shim.errors import PeerLostError

__all__ = ["AttentionRole"]


class AttentionRole(RoleWorker):
    """Attention, the KV cache, and everything else of the model but the experts."""

    patch_set = "attention_worker"
    _is_warm = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature differs between releases
        """Load what Attention owns, then meet the FFN ranks.

        Both roles load at the same time and meet afterwards, so either may be started first.

        Raises:
            RendezvousTimeoutError: naming the FFN ranks that did not come.
            HandshakeError: naming what the roles disagree on.

        """
        super().load_model(*args, **kwargs)
        gates = {layer.gate for layer in self.moe_layers}
        if gates == {"external"} and not self.role.config.compute_gate_on_attention:
            logger.info("AFD: this model calls its gate itself, on Attention; the router logits travel.")
        hello = self._hello()
        connector = create_attention_connector(
            self.role.config, hello, device=self.role.device, on_peer_lost=self._on_peer_lost
        )
        connector.connect()
        proxy = RemoteFFNProxy(connector, list(hello.moe_layers), reply=hello.reply)
        compilation = self.vllm_config.compilation_config
        if compilation.cudagraph_mode:
            proxy.keep_outputs(
                compilation.max_cudagraph_capture_size,
                hello.hidden_size,
                getattr(torch, hello.dtype),
                self.role.device,
            )
        self.role.proxy = proxy

    def compile_or_warm_up_model(self) -> Any:  # noqa: ANN401 - vLLM's CompilationTimes
        """Warm up and capture as vLLM does; every forward until then is a dummy step."""
        times = super().compile_or_warm_up_model()
        self._is_warm = True
        return times

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
        """Run a real step; forwards outside of it (warm-up, profiling, idle batches) are dummy steps."""
        proxy = self.role.proxy
        assert proxy is not None  # load_model has connected
        # vLLM's GPU worker warms its kernels up through this method.
        proxy.begin_step(scheduler_output.total_num_scheduled_tokens if self._is_warm else 0)
        try:
            return self._unless_lost(super().execute_model(scheduler_output, *args, **kwargs))
        finally:
            proxy.end_step()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
        """Sample as vLLM does, from nothing but answers of living peers."""
        return self._unless_lost(super().sample_tokens(*args, **kwargs))

    def _unless_lost(self, result: Any) -> Any:  # noqa: ANN401 - passed on
        assert self.role.proxy is not None  # load_model has connected
        connector = self.role.proxy.connector
        connector.raise_if_lost()
        return CheckedOutput(result, connector) if isinstance(result, AsyncModelRunnerOutput) else result

    def afd_stats(self) -> dict[str, Any]:
        """What this rank has exchanged, read and holds; see `RoleWorker._stats`; and its forwards."""
        proxy = self.role.proxy
        assert proxy is not None  # load_model has connected
        return self._stats(proxy.connector.stats) | {"forwards": proxy.forwards}

    def shutdown(self) -> None:
        """Say goodbye to the FFN ranks, then shut down as vLLM does."""
        if self.role.proxy is not None:
            self.role.proxy.connector.close()
        super().shutdown()

    def _on_peer_lost(self, error: PeerLostError) -> None:
        end_server(error, logger)
