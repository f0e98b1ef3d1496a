"""What the workers of both roles share: take the role, know the checkpoint, meet the peers."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from afd_shim import activation, role
from afd_shim.compat import installed_release
from afd_shim.config.apply import RoleConfig
from afd_shim.connectors.base import ExchangeStats, Hello, Reply
from afd_shim.errors import ConfigError, LayerError
from afd_shim.moe.checkpoint import plan_checkpoint
from afd_shim.moe.factory import require_layers
from afd_shim.moe.pruning import parameter_bytes
from afd_shim.moe.reading import tensor_by_tensor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_worker import Worker as Base

    from afd_shim.moe.layers import MoELayer
else:
    Base = object  # the platform's worker comes after this class: workers/cpu.py, workers/gpu.py

__all__ = ["RoleWorker"]

logger = init_logger("vllm.afd_shim")


class RoleWorker(Base):
    """Mixed in front of vLLM's default worker of a platform.

    Upstream: `vllm/v1/worker/gpu_worker.py`, `Worker`, and `vllm/v1/worker/cpu_worker.py`,
    `CPUWorker` (0.30.0-0.33.0). vLLM resolves the class in the worker process with the
    configuration in hand, before any model is built: that is where the patches are committed.
    """

    patch_set: str

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        if not isinstance(vllm_config.additional_config, RoleConfig):
            raise ConfigError(
                f"{type(self).__name__} was started without an 'afd' configuration; "
                "do not set --worker-cls yourself: afd-shim does when additional_config has an 'afd' key.",
                key="worker_cls",
            )
        activation.commit(self.patch_set)
        self.selected = vllm_config.additional_config.digest
        self.role = role.RoleContext(
            config=vllm_config.additional_config.afd,
            device=torch.device(vllm_config.device_config.device_type),
        )
        role.take(self.role)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """Initialise the device as vLLM does, and keep which one it is."""
        super().init_device()
        assert self.device is not None  # vLLM has just set it
        self.role.device = self.device

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature differs between releases
        """Load what this role owns.

        Raises:
            AfdShimError: the model cannot be split, or a patch is not in force.

        """
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.role.plan = plan_checkpoint(self.vllm_config, self.role)
        activation.require(self.patch_set, selected=self.selected)  # before weights load
        with tensor_by_tensor():
            super().load_model(*args, **kwargs)
        activation.require(self.patch_set)  # and what has been in force meanwhile
        self.moe_layers: list[MoELayer] = require_layers(self.role.layers, self.model_config.model, self.role.config)
        self._check_layers()
        if self.role.plan.selective:
            logger.info(
                "AFD: %s rank %d read %.1f MB and holds %.1f MB of parameters",
                self.role.config.role.value,
                self.rank,
                self.role.plan.bytes_read / 1e6,
                parameter_bytes(self.model_runner.get_model()) / 1e6,
            )

    def _check_layers(self) -> None:
        """Check that every MoE layer of the loaded model is the role's own.

        Raises:
            LayerError: naming a layer that is vLLM's where it must be ours, or the reverse.

        """
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        from afd_shim.moe.runner import AFDRemoteMoERunner

        remote = self.role.config.is_attention
        ours = {id(layer.runner) for layer in self.moe_layers}
        for name, module in self.model_runner.get_model().named_modules():
            if not isinstance(module, MoERunner):
                continue
            if id(module) not in ours or isinstance(module, AFDRemoteMoERunner) is not remote:
                raise LayerError(
                    f"{name} was not built for the {self.role.config.role.value} role: the model's module took "
                    "vLLM's factory before afd-shim replaced it. Run 'afd-shim doctor' and report its output."
                )

    def _hello(self) -> Hello:
        """What this rank tells its peers about itself."""
        config = self.model_config
        gate_on_attention = self.moe_layers[0].gate != "ffn"
        identity = {
            "architectures": list(config.architectures),
            "config": config.hf_text_config.to_dict(),
            "layers": [(layer.index, layer.num_experts, layer.gate) for layer in self.moe_layers],
        }
        fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return Hello(
            role=self.role.config.role.value,
            rank=self.rank,
            release=installed_release(),
            patch_digest=activation.digest(),
            model_fingerprint=fingerprint,
            num_experts=self.moe_layers[0].num_experts,
            hidden_size=config.get_hidden_size(),
            dtype=str(config.dtype).removeprefix("torch."),
            gate_on_attention=gate_on_attention,
            moe_layers=tuple(layer.index for layer in self.moe_layers),
            max_num_tokens=self.scheduler_config.max_num_batched_tokens,
            num_attention_ranks=self.role.config.num_attention_ranks,
            num_ffn_ranks=self.role.config.num_ffn_ranks,
            reply=Reply.RAW if self.role.config.shared_experts_on_attention else Reply.FINISHED,
        )

    def _stats(self, exchanged: ExchangeStats) -> dict[str, Any]:
        plan = self.role.plan
        assert plan is not None  # asked after load_model
        return {
            "role": self.role.config.role.value,
            "rank": self.rank,
            "release": installed_release(),
            "digest": activation.digest(),
            "moe_layers": len(self.moe_layers),
            "gate": self.moe_layers[0].gate,
            "exchanges": exchanged.exchanges,
            "rows": exchanged.rows,
            "real_rows": exchanged.real_rows,
            "bytes_sent": exchanged.bytes_sent,
            "bytes_received": exchanged.bytes_received,
            "exchange_seconds": exchanged.exchange_seconds,
            "weight_bytes_read": plan.bytes_read,
            "weight_bytes_owned": plan.bytes_owned,
            "weight_bytes_total": plan.bytes_total,
            "parameter_bytes": parameter_bytes(self.model_runner.get_model()),
        }

    def shutdown(self) -> None:
        """Release vLLM's worker and give the role back."""
        role.release(self.role)
        super().shutdown()
