"""The FFN role's worker: MoE blocks only, no KV cache, serving its connector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afd_shim.errors import LayerError
from afd_shim.ffn.serving import ServingLoop
from afd_shim.workers.base import RoleWorker, logger
from afd_shim.workers.exit import end_server

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = ["FFNRole"]


class FFNRole(RoleWorker):
    """The experts, and whatever else of a MoE layer is not Attention's.

    EngineCore asks this worker for nothing after start-up: its scheduler stays empty, and the
    serving loop has a thread of its own.
    """

    patch_set = "ffn_worker"
    serving: ServingLoop | None = None

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """No attention, hence no KV cache."""
        return {}

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Nothing to initialise: there is no KV cache."""

    def compile_or_warm_up_model(self) -> Any:  # noqa: ANN401 - vLLM's CompilationTimes
        """Run every expert kernel once at full size, then start serving."""
        from vllm.v1.worker.worker_base import CompilationTimes

        self.serving = ServingLoop(
            vllm_config=self.vllm_config,
            afd=self.role.config,
            hello=self._hello(),
            layers=self.moe_layers,
            device=self.role.device,
            on_failure=self._on_failure,
        )
        self.serving.warm_up()
        self.serving.start()
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, *_args: object, **_kwargs: object) -> None:
        """Never called: the API server refuses requests before they are scheduled.

        Raises:
            LayerError: always.

        """
        raise LayerError("a request reached the FFN role, which has no attention; send it to the Attention server.")

    def check_health(self) -> None:
        """Raise what ended the serving loop, if it has ended."""
        super().check_health()
        if self.serving is not None:
            self.serving.raise_if_failed()

    def afd_stats(self) -> dict[str, Any]:
        """What this rank has served, read and holds; see `docs/` for the keys."""
        assert self.serving is not None  # start-up is over when RPCs are answered
        return self._stats(self.serving.stats) | {
            "max_batch_rows": self.serving.max_batch_rows,
            "steps": self.serving.steps,
        }

    def shutdown(self) -> None:
        """Stop serving, say goodbye, then shut down as vLLM does."""
        if self.serving is not None:
            self.serving.stop()
        super().shutdown()

    def _on_failure(self, error: BaseException) -> None:
        end_server(error, logger)
