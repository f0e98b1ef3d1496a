"""What stands next to `afd` and cannot be served split: one refusal each, naming the flag and the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from afd_shim.config import AFD_KEY, AFDConfig, parse_afd_config
from afd_shim.config.checks import check_vllm_config
from afd_shim.config.models import REFUSED_ARCHITECTURES, check_architectures
from afd_shim.errors import ConfigError, UnsupportedModelError

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def vllm_config(**changes: Any) -> Any:
    """What the checks read of vLLM's configuration; a key such as `parallel_config.enable_dbo` changes one value."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            architectures=["DeepseekV2ForCausalLM"],
            is_moe=True,
            model="deepseek-ai/DeepSeek-V2-Lite",
            enable_return_routed_experts=False,
            quantization=None,
            get_num_experts=lambda: 64,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(
            worker_cls=CPU_WORKER,
            distributed_executor_backend="mp",
            tensor_parallel_size=1,
            data_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            enable_expert_parallel=False,
            use_ubatching=False,
            enable_elastic_ep=False,
            use_sequence_parallel_moe=False,
            enable_eplb=False,
            eplb_config=SimpleNamespace(num_redundant_experts=0),
        ),
        load_config=SimpleNamespace(load_format="auto", safetensors_load_strategy=None, model_loader_extra_config={}),
        kernel_config=SimpleNamespace(moe_backend="auto"),
        speculative_config=None,
        lora_config=None,
        additional_config={AFD_KEY: {}},
    )
    for path, value in changes.items():
        *holders, name = path.split(".")
        holder = config
        for part in holders:
            holder = getattr(holder, part)
        setattr(holder, name, value)
    return config


def afd_config(**changes: object) -> AFDConfig:
    """The AFD configuration of one rank per role."""
    raw: dict[str, object] = {
        "role": "attention",
        "connector": "TcpAFDConnector",
        "host": "127.0.0.1",
        "port": 6239,
        "num_attention_ranks": 1,
        "num_ffn_ranks": 1,
    }
    config = parse_afd_config({AFD_KEY: raw | changes})
    assert config is not None
    return config


def refusal(config: Any, *, device_type: str = "cpu", **afd: object) -> ConfigError:
    """The error that a configuration ends in."""
    with pytest.raises(ConfigError) as refused:
        check_vllm_config(afd_config(**afd), config, device_type)
    assert str(refused.value).endswith(".")
    return refused.value


@pytest.mark.parametrize("role", ["attention", "ffn"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_plain_configuration_is_accepted(role: str, device_type: str) -> None:
    """Nothing to complain about on either role and device."""
    check_vllm_config(afd_config(role=role), vllm_config(), device_type)


# What is changed in vLLM's configuration, the key the error carries, and what it tells to do.
BOTH_ROLES: list[tuple[str, object, str, str]] = [
    ("parallel_config.worker_cls", "mine.Worker", "worker_cls", "leave --worker-cls out"),
    ("parallel_config.distributed_executor_backend", "ray", "distributed_executor_backend", "use 'mp'"),
    ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size", "--pipeline-parallel-size"),
    (
        "parallel_config.prefill_context_parallel_size",
        2,
        "prefill_context_parallel_size",
        "--prefill-context-parallel-size",
    ),
    (
        "parallel_config.decode_context_parallel_size",
        2,
        "decode_context_parallel_size",
        "--decode-context-parallel-size",
    ),
    ("parallel_config.use_ubatching", True, "enable_dbo", "--enable-dbo"),
    ("parallel_config.enable_elastic_ep", True, "enable_elastic_ep", "leave --enable-elastic-ep out"),
    ("parallel_config.use_sequence_parallel_moe", True, "all2all_backend", "--all2all-backend"),
    ("model_config.enable_return_routed_experts", True, "enable_return_routed_experts", "leave --enable-return"),
    (
        "aux_output_config",
        SimpleNamespace(enable_return_routed_experts=True),
        "enable_return_routed_experts",
        "leave --enable-return",
    ),
    ("speculative_config", SimpleNamespace(), "speculative_config", "leave --speculative-config out"),
    ("lora_config", SimpleNamespace(), "enable_lora", "leave --enable-lora out"),
    ("load_config.load_format", "pt", "load_format", "--load-format pt"),
    ("load_config.load_format", "runai_streamer", "load_format", "safetensors"),
    ("load_config.load_format", "tensorizer", "load_format", "safetensors"),
    ("load_config.load_format", "fastsafetensors", "load_format", "safetensors"),
    ("load_config.safetensors_load_strategy", "eager", "safetensors_load_strategy", "'lazy'"),
    ("load_config.safetensors_load_strategy", "prefetch", "safetensors_load_strategy", "'lazy'"),
    (
        "load_config.model_loader_extra_config",
        {"enable_multithread_load": True},
        "model_loader_extra_config",
        "--model-loader-extra-config",
    ),
    ("kernel_config.moe_backend", "deep_gemm_mega_moe", "moe_backend", "--moe-backend deep_gemm_mega_moe"),
    ("kernel_config.moe_backend", "flashinfer_moe_ep_cutlass", "moe_backend", "another backend"),
    (
        "additional_config",
        {AFD_KEY: {}, "decode_backend": "latency_specialized"},
        "decode_backend",
        "--additional-config",
    ),
    ("model_config.is_moe", False, "model", "serve it without the 'afd' configuration"),
    ("model_config.architectures", ["DeepseekV4ForCausalLM"], "model", "without the 'afd' configuration"),
]


@pytest.mark.parametrize("role", ["attention", "ffn"])
@pytest.mark.parametrize(("path", "value", "key", "remedy"), BOTH_ROLES)
def test_a_flag_that_does_not_fit_is_refused_on_both_roles(
    role: str, path: str, value: object, key: str, remedy: str
) -> None:
    """Both commands are refused, so that no half of a deployment starts."""
    error = refusal(vllm_config(**{path: value}), role=role)

    assert error.key == key
    assert remedy in str(error)


ATTENTION_ONLY: list[tuple[str, object, str]] = [
    ("parallel_config.enable_eplb", True, "enable_eplb"),
    ("parallel_config.eplb_config", SimpleNamespace(num_redundant_experts=32), "num_redundant_experts"),
]


@pytest.mark.parametrize(("path", "value", "key"), ATTENTION_ONLY)
def test_expert_load_balancing_belongs_to_the_ffn_command(path: str, value: object, key: str) -> None:
    """Attention has no experts to balance; the error says which command wants the flag."""
    error = refusal(vllm_config(**{path: value}), role="attention")

    assert error.key == key
    assert "FFN command only" in str(error)


@pytest.mark.parametrize(("device_type", "supported"), [("cpu", True), ("cuda", True), ("xpu", False), ("tpu", False)])
def test_the_tcp_connector_serves_cpu_and_cuda(device_type: str, supported: bool) -> None:
    """Any other device is refused by name."""
    if supported:
        check_vllm_config(afd_config(), vllm_config(), device_type)
        return

    error = refusal(vllm_config(), device_type=device_type)
    assert error.key == "connector"
    assert repr(device_type) in str(error)


def test_an_unknown_connector_is_refused_with_the_known_ones() -> None:
    """A misspelt connector."""
    error = refusal(vllm_config(), connector="TcpConnector")

    assert error.key == "connector"
    assert "TcpAFDConnector" in str(error)


@pytest.mark.parametrize("flag", ["tensor_parallel_size", "data_parallel_size"])
def test_an_attention_server_has_one_rank(flag: str) -> None:
    """More than one is not supported yet, and the error says which flags to leave at 1."""
    error = refusal(vllm_config(**{f"parallel_config.{flag}": 2}), role="attention", num_attention_ranks=2)

    assert error.key == "num_attention_ranks"
    assert "--" + flag.replace("_", "-") + " 1" in str(error)


def test_the_connectors_own_options_are_checked_before_anything_loads() -> None:
    """An unknown key is refused with the known ones, and a first rank has to be one of those that there are."""
    unknown = refusal(vllm_config(), connector_extra_config={"first_rank": 1})
    beyond = refusal(vllm_config(), num_attention_ranks=2, connector_extra_config={"first_attention_rank": 2})

    assert unknown.key == "connector_extra_config"
    assert "first_attention_rank" in str(unknown)
    assert beyond.key == "num_attention_ranks"
    check_vllm_config(
        afd_config(num_attention_ranks=2, connector_extra_config={"first_attention_rank": 1}), vllm_config(), "cpu"
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_ffn_ranks_must_be_the_servers_tensor_parallel_size(ranks: int) -> None:
    """Two ranks here, another number in the configuration."""
    error = refusal(vllm_config(**{"parallel_config.tensor_parallel_size": 2}), role="ffn", num_ffn_ranks=ranks)

    assert error.key == "num_ffn_ranks"
    assert "2 ranks" in str(error)


def test_ffn_ranks_form_no_data_parallel_group() -> None:
    """Every FFN rank sees every row once: data parallel would split them."""
    error = refusal(vllm_config(**{"parallel_config.data_parallel_size": 2}), role="ffn", num_ffn_ranks=2)

    assert error.key == "data_parallel_size"
    assert "--enable-expert-parallel" in str(error)


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "mistral", "dummy"])
def test_load_formats_that_read_selectively_are_accepted(load_format: str) -> None:
    """And `dummy`, which reads nothing."""
    check_vllm_config(afd_config(), vllm_config(**{"load_config.load_format": load_format}), "cpu")


@pytest.mark.parametrize("worker", ["auto", CPU_WORKER, "vllm.v1.worker.gpu_worker.Worker", "afd_shim.workers.cpu.X"])
def test_workers_of_vllm_and_ours_are_accepted(worker: str) -> None:
    """The configuration may pass twice: the second time the worker is ours."""
    check_vllm_config(afd_config(), vllm_config(**{"parallel_config.worker_cls": worker}), "cpu")


@pytest.mark.parametrize("architecture", sorted(REFUSED_ARCHITECTURES))
def test_each_refused_architecture_is_named_with_its_reason(architecture: str) -> None:
    """The error repeats the architecture as config.json has it, says why, and what to do."""
    with pytest.raises(UnsupportedModelError) as refused:
        check_architectures(["Other", architecture])

    assert refused.value.key == "model"
    assert str(refused.value) == (
        f"{architecture} cannot be split: {REFUSED_ARCHITECTURES[architecture]}. "
        "Serve it without the 'afd' configuration."
    )


def test_every_other_architecture_is_let_through() -> None:
    """The rule is generic: only what cannot work is listed."""
    check_architectures(["DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "SomethingNew"])


def test_the_checks_only_read() -> None:
    """No flag of vLLM's is changed by looking at it."""
    config = vllm_config()
    before = repr(config)

    check_vllm_config(afd_config(), cast("Any", config), "cpu")

    assert repr(config) == before


BALANCED = {
    "parallel_config.enable_eplb": True,
    "parallel_config.enable_expert_parallel": True,
    "parallel_config.tensor_parallel_size": 2,
}


def test_ffn_balances_experts_that_divide_by_its_ranks() -> None:
    """DeepSeek-V2-Lite's 64 experts and 32 redundant ones on two FFN ranks are the recipe."""
    config = vllm_config(**BALANCED, **{"parallel_config.eplb_config.num_redundant_experts": 32})

    check_vllm_config(afd_config(role="ffn", num_ffn_ranks=2), config, "cpu")


def test_experts_that_do_not_divide_by_the_ranks_are_refused_with_a_number_that_does() -> None:
    """Maps of unequal shares index experts that do not exist."""
    config = vllm_config(**BALANCED, **{"parallel_config.eplb_config.num_redundant_experts": 3})

    error = refusal(config, role="ffn", num_ffn_ranks=2)

    assert error.key == "num_redundant_experts"
    assert '"num_redundant_experts": 4' in str(error)


@pytest.mark.parametrize(
    "change", [{"parallel_config.enable_expert_parallel": False}, {"parallel_config.tensor_parallel_size": 1}]
)
def test_balancing_without_ranks_to_balance_is_refused(change: dict[str, Any]) -> None:
    """vLLM checks this too, but not on CPU, where the flag is taken out of its sight."""
    config = vllm_config(**(BALANCED | change))
    ranks = config.parallel_config.tensor_parallel_size

    assert refusal(config, role="ffn", num_ffn_ranks=ranks).key == "enable_eplb"


def test_quantized_experts_are_not_shared_between_ranks_on_cpu() -> None:
    """vLLM's CPU kernels ignore the expert map, and only the unquantized one is mended."""
    changes = {**BALANCED, "parallel_config.enable_eplb": False, "model_config.quantization": "fp8"}

    assert refusal(vllm_config(**changes), role="ffn", num_ffn_ranks=2).key == "enable_expert_parallel"
    config = vllm_config(**changes, **{"device_config.device_type": "cuda"})
    check_vllm_config(afd_config(role="ffn", num_ffn_ranks=2), config, "cuda")
