"""Native models and models of both roles in one process, for tests that look at single layers.

In production each role has a process of its own. Here they share one, which works because nothing
but building a model asks which role is in force, and because Attention waits while the FFN computes.

WARNING: `patched_vllm` changes this process: vLLM's single-rank world, and afd-shim's patches. Both
are undone when it ends.
"""

from __future__ import annotations

import gc
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm.v1.worker.cpu_worker  # noqa: F401 - completes torch.accelerator for CPU builds, as every CPU worker does
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models import utils as model_utils
from vllm.model_executor.models.utils import extract_layer_index

from afd_shim import activation, role
from afd_shim.compat import installed_release
from afd_shim.config.apply import RoleConfig
from afd_shim.connectors.base import Hello, Reply
from afd_shim.connectors.registry import create_attention_connector
from afd_shim.ffn.serving import ServingLoop
from afd_shim.moe.checkpoint import plan_checkpoint
from afd_shim.moe.factory import require_layers
from afd_shim.moe.proxy import RemoteFFNProxy
from afd_shim.moe.reading import tensor_by_tensor

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "LoadedModel",
    "connected",
    "engine_config",
    "inspect_here",
    "load_model",
    "load_role",
    "local_world",
    "patched_vllm",
]


@dataclass(slots=True)
class LoadedModel:
    """A model as vLLM serves it, and the configuration it was built with; `context` is None on a native one."""

    model: nn.Module
    config: VllmConfig
    context: role.RoleContext | None = None

    def runners(self) -> dict[int, MoERunner]:
        """The MoE runner of each decoder layer that has one, by the layer's index."""
        named = ((name, module) for name, module in self.model.named_modules() if isinstance(module, MoERunner))
        return {extract_layer_index(name): module for name, module in named}

    def blocks(self) -> dict[int, nn.Module]:
        """The model's own MoE block around each runner: what a decoder layer calls."""
        names = [name for name, module in self.model.named_modules() if isinstance(module, MoERunner)]
        return {extract_layer_index(name): self.model.get_submodule(name.rpartition(".")[0]) for name in names}

    def run(self, block: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Call a part of the model as its forward would; the first argument has one row per token."""
        tokens = next(iter((*args, *kwargs.values()))).shape[0]
        with (
            set_current_vllm_config(self.config),
            set_forward_context(None, self.config, num_tokens=tokens),
            torch.inference_mode(),
        ):
            output: torch.Tensor = block(*args, **kwargs)
        return output


@contextmanager
def local_world() -> Iterator[None]:
    """Give this process vLLM's distributed world of one rank."""
    with tempfile.TemporaryDirectory() as store, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


@contextmanager
def patched_vllm() -> Iterator[None]:
    """Put the patches of both roles' workers in force, and take them out again."""
    activation.arm()
    activation.commit("attention_worker")
    activation.commit("ffn_worker")
    try:
        yield
    finally:
        gc.collect()
        # vLLM remembers by `id()` what pruned models lacked: native ones may take their addresses.
        model_utils._model_to_pp_missing_layer_names.clear()  # noqa: SLF001 - as afd_shim.moe.checkpoint does
        activation.deactivate()
        activation.arm()


def engine_config(path: Path, **engine_args: Any) -> VllmConfig:  # noqa: ANN401 - passed on
    """Build vLLM's configuration for a tiny checkpoint, as `vllm serve` would."""
    arguments = {"enforce_eager": True, "max_model_len": 256, "max_num_batched_tokens": 256} | engine_args
    return EngineArgs(model=str(path), **arguments).create_engine_config()


def inspect_here(architecture: str) -> None:
    """Spare the subprocess vLLM inspects an architecture in: 10 s each, the first time on a machine."""
    entry = ModelRegistry.models[architecture]
    ModelRegistry.register_model(architecture, entry.load_model_cls())


def load_model(path: Path, **engine_args: Any) -> LoadedModel:  # noqa: ANN401 - passed on
    """Build and load a model with stock vLLM, which must not be patched yet."""
    config = engine_config(path, **engine_args)
    with set_current_vllm_config(config):
        return LoadedModel(get_model(vllm_config=config), config)


def load_role(path: Path, afd: dict[str, object], **engine_args: Any) -> LoadedModel:  # noqa: ANN401 - passed on
    """Build and load what a role owns, as its worker does; the role stays in force.

    Args:
        path: the checkpoint.
        afd: the AFD configuration; what it leaves out gets a value that fits one rank per role.
        engine_args: more arguments for `EngineArgs`.

    """
    one_rank = {"connector": "TcpAFDConnector", "host": "127.0.0.1", "num_attention_ranks": 1, "num_ffn_ranks": 1}
    given = one_rank | {"port": 1, "startup_timeout_s": 30.0} | afd
    config = engine_config(path, additional_config={"afd": given}, **engine_args)
    assert isinstance(config.additional_config, RoleConfig)
    context = role.RoleContext(config=config.additional_config.afd, device=torch.device("cpu"))
    role.take(context)
    with set_current_vllm_config(config):
        context.plan = plan_checkpoint(config, context)
        with tensor_by_tensor():
            model = get_model(vllm_config=config)
    require_layers(context.layers, str(path), context.config)
    return LoadedModel(model, config, context)


@contextmanager
def connected(attention: LoadedModel, ffn: LoadedModel) -> Iterator[ServingLoop]:
    """Let the FFN's serving loop serve the Attention model over loopback; yields the loop.

    Experts and shared experts take turns: in one process vLLM's CPU kernels would write into the same scratch memory.
    """
    assert attention.context is not None
    assert ffn.context is not None
    failures: list[BaseException] = []
    serving = ServingLoop(
        vllm_config=ffn.config,
        afd=ffn.context.config,
        hello=_hello(ffn),
        layers=require_layers(ffn.context.layers, "ffn", ffn.context.config),
        device=ffn.context.device,
        on_failure=failures.append,
    )
    kernels = threading.Lock()

    def in_turn(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:  # noqa: ANN401 - passed on
            with kernels:
                return call(*args)

        return run

    serving._compute = in_turn(serving._compute)  # type: ignore[method-assign]  # noqa: SLF001 - runs the experts
    serving.start()
    hello = _hello(attention)
    connector = create_attention_connector(
        attention.context.config, hello, device=attention.context.device, on_peer_lost=failures.append
    )
    connector.connect()
    proxy = RemoteFFNProxy(connector, list(hello.moe_layers), reply=hello.reply)
    beside = proxy.exchange_beside
    proxy.exchange_beside = (  # type: ignore[method-assign]
        lambda layer, hidden_states, router_logits, compute: beside(
            layer, hidden_states, router_logits, in_turn(compute)
        )
    )
    attention.context.proxy = proxy
    role.take(attention.context)
    try:
        yield serving
    finally:
        attention.context.proxy = None
        role.release(attention.context)
        connector.close()
        serving.stop()
    if failures:
        raise failures[0]


def _hello(loaded: LoadedModel) -> Hello:
    assert loaded.context is not None
    afd = loaded.context.config
    layers = require_layers(loaded.context.layers, "model", afd)
    model = loaded.config.model_config
    return Hello(
        role=afd.role.value,
        rank=0,
        release=installed_release(),
        patch_digest=activation.digest(),
        model_fingerprint="tiny",
        num_experts=layers[0].num_experts,
        hidden_size=model.get_hidden_size(),
        dtype=str(model.dtype).removeprefix("torch."),
        gate_on_attention=layers[0].gate != "ffn",
        moe_layers=tuple(layer.index for layer in layers),
        max_num_tokens=loaded.config.scheduler_config.max_num_batched_tokens,
        num_attention_ranks=1,
        num_ffn_ranks=1,
        reply=Reply.RAW if afd.shared_experts_on_attention else Reply.FINISHED,
    )
