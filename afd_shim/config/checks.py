"""One validator for everything that stands next to the `afd` configuration.

Each check reads vLLM's finished configuration and raises one error of its own, before anything loads.
vLLM's objects are only read here; nothing is imported from it, so that the checks cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from afd_shim.config.eplb import check_ffn_eplb
from afd_shim.config.models import check_architectures
from afd_shim.config.schema import AFDConfig
from afd_shim.connectors.registry import CONNECTORS, parse_extra_config, supported_device_types
from afd_shim.connectors.topology import check_rank
from afd_shim.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["CHECKS", "check_connector", "check_vllm_config", "routed_experts_capture_enabled"]

_SELECTIVE_LOAD_FORMATS = ("auto", "hf", "safetensors", "mistral", "dummy")
_STOCK_WORKERS = ("auto", "vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker")

Check = Callable[[AFDConfig, "VllmConfig"], None]


def check_vllm_config(afd: AFDConfig, config: VllmConfig, device_type: str) -> None:
    """Refuse what cannot be served split.

    Args:
        afd: the parsed AFD configuration.
        config: vLLM's finished configuration; read only.
        device_type: `cpu` or `cuda`, vLLM's `current_platform.device_type`.

    Raises:
        ConfigError: the first complaint; `key` names the flag.
        UnsupportedModelError: the model cannot be split.

    """
    check_connector(afd.connector, device_type)
    extra = parse_extra_config(afd.connector, afd.connector_extra_config)
    if afd.is_attention:
        check_rank("attention", extra.first_attention_rank, afd.num_attention_ranks)
    for check in CHECKS:
        check(afd, config)


def check_connector(connector: str, device_type: str) -> None:
    """Refuse a connector that is unknown, or that cannot serve this device type (R16)."""
    if device_type not in supported_device_types(connector):
        fitting = [name for name in CONNECTORS if device_type in supported_device_types(name)]
        remedy = f"use {' or '.join(fitting)}" if fitting else "AFD runs on CPU and CUDA devices only"
        raise ConfigError(f"{connector} cannot serve a {device_type!r} device; {remedy}.", key="connector")


def routed_experts_capture_enabled(config: VllmConfig) -> bool:
    """Whether vLLM is asked to return routed experts.

    The flag is `model_config.enable_return_routed_experts` in 0.30 and stands in
    `aux_output_config` from 0.31 on.
    """
    holders = (config.model_config, getattr(config, "aux_output_config", None))
    return any(getattr(holder, "enable_return_routed_experts", False) for holder in holders)


def _model(_: AFDConfig, config: VllmConfig) -> None:
    check_architectures(config.model_config.architectures)
    if not config.model_config.is_moe:
        raise ConfigError(
            f"{config.model_config.model} has no MoE layers, so there is nothing to put on FFN ranks; "
            "serve it without the 'afd' configuration.",
            key="model",
        )


def _worker(_: AFDConfig, config: VllmConfig) -> None:
    worker = config.parallel_config.worker_cls
    if worker not in _STOCK_WORKERS and not worker.startswith("afd_shim."):
        raise ConfigError(
            f"--worker-cls is {worker!r}, and AFD brings workers of its own over vLLM's; leave --worker-cls out.",
            key="worker_cls",
        )


def _executor(_: AFDConfig, config: VllmConfig) -> None:
    executor = config.parallel_config.distributed_executor_backend
    if executor not in (None, "mp", "uni"):
        raise ConfigError(
            f"--distributed-executor-backend {executor} is not supported with AFD, whose workers end their server when "
            "a peer is lost; use 'mp', or leave it out.",
            key="distributed_executor_backend",
        )


def _ranks(afd: AFDConfig, config: VllmConfig) -> None:
    parallel = config.parallel_config
    if afd.is_attention:
        if parallel.tensor_parallel_size > 1 or parallel.data_parallel_size > 1:
            raise ConfigError(
                f"the Attention server asks for tensor parallel {parallel.tensor_parallel_size} x data parallel "
                f"{parallel.data_parallel_size}; more than one Attention rank in one server is not supported yet. "
                "Use --tensor-parallel-size 1 --data-parallel-size 1.",
                key="num_attention_ranks",
            )
        return
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            f"the FFN server asks for data parallel {parallel.data_parallel_size}; FFN ranks form one "
            "tensor-parallel group. Use --tensor-parallel-size with --enable-expert-parallel instead.",
            key="data_parallel_size",
        )
    if parallel.tensor_parallel_size != afd.num_ffn_ranks:
        raise ConfigError(
            f"'afd.num_ffn_ranks' is {afd.num_ffn_ranks}, and this server has {parallel.tensor_parallel_size} ranks "
            "(tensor parallel size); make the two equal.",
            key="num_ffn_ranks",
        )


def _parallelism(_: AFDConfig, config: VllmConfig) -> None:
    parallel = config.parallel_config
    refused = (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
    )
    for key, words in refused:
        size = getattr(parallel, key)
        if size > 1:
            flag = "--" + key.replace("_", "-")
            raise ConfigError(f"{words} ({size}) is not supported with AFD; leave {flag} at 1.", key=key)
    if parallel.use_ubatching:
        raise ConfigError(
            "dual-batch overlap (--enable-dbo, --ubatch-size) is not supported with AFD; leave it out.",
            key="enable_dbo",
        )
    if parallel.enable_elastic_ep:
        raise ConfigError(
            "elastic expert parallelism is not supported with AFD; leave --enable-elastic-ep out.",
            key="enable_elastic_ep",
        )
    if parallel.use_sequence_parallel_moe:
        raise ConfigError(
            "sequence-parallel MoE (tensor x data parallel with expert parallel) is not supported with AFD; "
            "use data parallel size 1 or another --all2all-backend.",
            key="all2all_backend",
        )


def _eplb(afd: AFDConfig, config: VllmConfig) -> None:
    if afd.is_attention and config.parallel_config.enable_eplb:
        raise ConfigError(
            "the Attention role has no experts to balance; "
            "give --enable-eplb and --eplb-config to the FFN command only.",
            key="enable_eplb",
        )
    if afd.is_attention and config.parallel_config.eplb_config.num_redundant_experts:
        raise ConfigError(
            "the Attention role has no experts to replicate; give num_redundant_experts to the FFN command only.",
            key="num_redundant_experts",
        )


def _cpu_experts(afd: AFDConfig, config: VllmConfig) -> None:
    expert_parallel = config.parallel_config.enable_expert_parallel and config.parallel_config.tensor_parallel_size > 1
    if afd.is_attention or not expert_parallel or config.device_config.device_type != "cpu":
        return
    if config.model_config.quantization is not None:
        raise ConfigError(
            f"vLLM's CPU kernels for {config.model_config.quantization} experts ignore which rank holds an expert; "
            "leave --enable-expert-parallel out, or serve an unquantized checkpoint.",
            key="enable_expert_parallel",
        )


def _capture(_: AFDConfig, config: VllmConfig) -> None:
    if routed_experts_capture_enabled(config):
        raise ConfigError(
            "routed-experts capture needs the routing next to the scheduler, and AFD routes on the FFN; "
            "leave --enable-return-routed-experts out.",
            key="enable_return_routed_experts",
        )


def _decoding(_: AFDConfig, config: VllmConfig) -> None:
    if config.speculative_config is not None:
        raise ConfigError(
            "speculative decoding is not supported with AFD; leave --speculative-config out.", key="speculative_config"
        )
    if config.lora_config is not None:
        raise ConfigError("LoRA is not supported with AFD; leave --enable-lora out.", key="enable_lora")


def _loading(_: AFDConfig, config: VllmConfig) -> None:
    load = config.load_config
    if str(load.load_format) not in _SELECTIVE_LOAD_FORMATS:
        raise ConfigError(
            f"--load-format {load.load_format} reads every weight, and a role reads only what it owns; "
            f"use one of {', '.join(_SELECTIVE_LOAD_FORMATS)}.",
            key="load_format",
        )
    if load.safetensors_load_strategy not in (None, "lazy"):
        raise ConfigError(
            f"--safetensors-load-strategy {load.safetensors_load_strategy} reads whole files, and a role reads only "
            "what it owns; use 'lazy' or leave it out.",
            key="safetensors_load_strategy",
        )
    if (load.model_loader_extra_config or {}).get("enable_multithread_load"):
        raise ConfigError(
            "the multi-threaded loader reads whole files, and a role reads only what it owns; "
            "leave enable_multithread_load out of --model-loader-extra-config.",
            key="model_loader_extra_config",
        )


def _kernels(_: AFDConfig, config: VllmConfig) -> None:
    backend = str(config.kernel_config.moe_backend)
    if "mega_moe" in backend or backend.startswith("flashinfer_moe_ep"):
        raise ConfigError(
            f"--moe-backend {backend} replaces whole MoE layers by kernels that communicate themselves; "
            "use another backend, or 'auto'.",
            key="moe_backend",
        )
    extra = config.additional_config
    if isinstance(extra, dict) and extra.get("decode_backend") not in (None, "auto"):
        raise ConfigError(
            f"decode_backend {extra['decode_backend']!r} bypasses the MoE runner; leave it out of --additional-config.",
            key="decode_backend",
        )


CHECKS: tuple[Check, ...] = (
    _model,
    _worker,
    _executor,
    _ranks,
    _parallelism,
    _eplb,
    check_ffn_eplb,
    _cpu_experts,
    _capture,
    _decoding,
    _loading,
    _kernels,
)
"""In the order they are made."""
