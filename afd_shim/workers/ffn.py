"""The FFN role's worker: MoE blocks only, no KV cache, serving its connector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afd_shim import activation
from afd_shim.compat import installed_release
from afd_shim.compat.eplb import Eplb
from afd_shim.errors import ConfigError, LayerError
from afd_shim.ffn.eplb import ExpertLoadBalancer
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
    balancer: ExpertLoadBalancer | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature differs between releases
        """Load what the FFN owns, and register it with vLLM's expert load balancer where that is on.

        Raises:
            ConfigError: the model's experts cannot be balanced.
            AfdShimError: as the base class says.

        """
        sets = self._cpu_sets()
        for name in sets:
            activation.commit(name)
        eplb: Eplb | None = None
        if self.parallel_config.enable_eplb:
            eplb = Eplb(self.parallel_config, self.model_config, self.role.device, installed_release())
            eplb.prepare_load()
        for name in sets:
            activation.require(name)
        super().load_model(*args, **kwargs)
        for name in sets:
            activation.require(name)
        if eplb is not None:
            self.balancer = self._balance(eplb)

    def _cpu_sets(self) -> list[str]:
        """The patch sets that supply what vLLM's CPU backend leaves out."""
        parallel = self.parallel_config
        if self.role.device.type != "cpu" or not parallel.enable_expert_parallel:
            return []
        return ["ffn_cpu_expert_parallel", "ffn_cpu_eplb"] if parallel.enable_eplb else ["ffn_cpu_expert_parallel"]

    def _balance(self, eplb: Eplb) -> ExpertLoadBalancer:
        if not eplb.register(self.model_runner.get_model(), self.model_runner):
            raise ConfigError(
                f"{self.model_config.model} does not follow vLLM's MixtureOfExperts protocol, so its experts cannot be "
                "balanced; leave --enable-eplb out.",
                key="enable_eplb",
            )
        return ExpertLoadBalancer(
            eplb,
            self.moe_layers,
            rank=self.rank,
            num_ranks=self.role.config.num_ffn_ranks,
            log_placement=self.parallel_config.eplb_config.log_balancedness,
        )

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
            balancer=self.balancer,
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
        """What this rank has served, read and holds; see `RoleWorker._stats`; and its expert load balancing."""
        assert self.serving is not None  # start-up is over when RPCs are answered
        stats = self._stats(self.serving.stats) | {
            "max_batch_rows": self.serving.max_batch_rows,
            "steps": self.serving.steps,
        }
        return stats if self.balancer is None else stats | {"eplb": self.balancer.counters()}

    def shutdown(self) -> None:
        """Stop serving, say goodbye, let experts arrive that are on their way, then shut down as vLLM does."""
        if self.serving is not None:
            self.serving.stop()
        if self.balancer is not None:
            self.balancer.close()
        super().shutdown()

    def _on_failure(self, error: BaseException) -> None:
        end_server(error, logger)
