"""Turn vLLM's finished configuration into the one of a role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afd_shim import activation
from afd_shim.config.checks import check_vllm_config
from afd_shim.config.graphs import split_graphs_at_exchanges
from afd_shim.config.schema import AFD_KEY, AFDConfig, parse_afd_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["RoleConfig", "apply_role"]

_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "afd_shim.workers.cpu",
    "vllm.v1.worker.gpu_worker.Worker": "afd_shim.workers.gpu",
}
"""vLLM's default worker of a platform, and our module with both roles' workers over it."""


class RoleConfig(dict[str, Any]):
    """vLLM's `additional_config` with the AFD configuration beside it.

    As a dictionary, and so in vLLM's compile-cache key, it holds what decides what is computed.
    Addresses stay out of it: another port is no reason to compile again.
    """

    afd: AFDConfig
    digest: str
    """Of the patch sets that the process which read the configuration selected."""

    @classmethod
    def of(cls, additional_config: dict[str, Any], afd: AFDConfig, digest: str) -> RoleConfig:
        """The given additional configuration, with `afd` reduced to what may be hashed."""
        # `{**...}` keeps what a second call finds there as it is: doing this twice changes nothing.
        config = cls({**additional_config, AFD_KEY: afd.hashed()})
        config.afd = afd
        config.digest = digest
        return config


def apply_role(config: VllmConfig) -> None:
    """Validate, and make `config` that of an AFD role; without `afd` in it, do nothing.

    Raises:
        ConfigError: naming the key or flag at fault.
        EngineError: this vLLM cannot be split; see `afd-shim doctor`.

    """
    if isinstance(config.additional_config, RoleConfig):
        return
    afd = parse_afd_config(config.additional_config)
    if afd is None:
        return
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    # Propagates to vLLM's handlers; afd_shim has none of its own.
    logger = init_logger("vllm.afd_shim")
    activation.require_supported()
    check_vllm_config(afd, config, current_platform.device_type)
    parallel = config.parallel_config
    module = _WORKERS.get(parallel.worker_cls)
    if module is not None:
        parallel.worker_cls = f"{module}.{'AttentionWorker' if afd.is_attention else 'FFNWorker'}"
    if config.load_config.safetensors_load_strategy is None:
        # vLLM's own default would read whole files ahead on network file systems.
        config.load_config.safetensors_load_strategy = "lazy"
    if afd.is_attention:
        split_graphs_at_exchanges(config)
    else:
        if config.cache_config.enable_prefix_caching:
            logger.info("AFD: prefix caching is off on the FFN role: it has no KV cache.")
            config.cache_config.enable_prefix_caching = False
        activation.commit("ffn_frontend")
    assert isinstance(config.additional_config, dict)  # parse_afd_config found a key in it
    config.additional_config = RoleConfig.of(config.additional_config, afd, activation.digest())
    logger.info(
        "AFD: this server takes the %s role (%s at %s:%d, %d Attention and %d FFN ranks, gate on %s; patch digest %s)",
        afd.role.value,
        afd.connector,
        afd.host,
        afd.port,
        afd.num_attention_ranks,
        afd.num_ffn_ranks,
        "Attention" if afd.compute_gate_on_attention else "FFN",
        config.additional_config.digest,
    )
