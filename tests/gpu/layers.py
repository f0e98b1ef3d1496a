"""MoE layers, split and native, bit for bit: one process per stage, no connection between them.

    python3 -m tests.gpu.layers native|split --models NAME,... --checkpoints DIR --out FILE

`native` runs stock vLLM's own MoE blocks; afd-shim patches nothing there. `split` builds both roles
in one process, joins them by an exchange in memory, and runs the same rows through the Attention
role's blocks. Both write every output; `compare` holds them against each other. Runs on whatever
vLLM's platform is; the GPU is where it matters.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.gpu.models import MODELS, write_model

__all__ = ["TOKENS", "compare"]

TOKENS = (1, 7, 64, 2048)
_MAX_TOKENS = max(TOKENS)


def inputs(hidden_size: int, tokens: int, layer: int) -> torch.Tensor:
    """The rows a block gets, the same in both stages: `[tokens, hidden_size]`, bfloat16, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * layer + tokens)
    return torch.randn(tokens, hidden_size, generator=generator).to(torch.bfloat16)


def compare(native: Path, split: Path) -> list[dict[str, Any]]:
    """Hold the two stages' files against each other, one row per model, gate placement and layer size.

    Returns:
        Rows with `equal` (every layer bit for bit), `smallest_peak` (the largest absolute output of the
        layer where that is least: zero proves nothing), `payload` (what travelled is exactly what the gate
        placement needs) or `error`.

    """
    expected, found = (torch.load(path, weights_only=False) for path in (native, split))
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        if model not in expected and model not in found:
            continue
        errors = (stage.get(model, {}).get("error") for stage in (expected, found))
        rows += [{"model": model, "error": error} for error in errors if error]
        for (gate, tokens), result in found.get(model, {}).get("results", {}).items():
            reference = expected.get(model, {}).get("results", {}).get((False, tokens))
            if reference is None:
                continue
            pairs = [(reference["outputs"][layer], result["outputs"][layer]) for layer in reference["outputs"]]
            different = sum(int((a != b).sum()) for a, b in pairs)
            rows.append(
                {
                    "model": model,
                    "gate": gate_name(model, on_attention=gate),
                    "tokens": tokens,
                    "layers": len(pairs),
                    "equal": all(torch.equal(a, b) for a, b in pairs),
                    "different_elements": different,
                    "smallest_peak": min(float(a.float().abs().max()) for a, _ in pairs),
                    "bytes_sent_per_layer": result["bytes"],
                    "payload": result["payload"],
                    "kernel": result["kernel"],
                }
            )
    return rows


def gate_name(model: str, *, on_attention: bool) -> str:
    """Where the gate is, in words."""
    return "external" if MODELS[model].has_own_gate else "Attention" if on_attention else "FFN"


def _config(path: Path, model: str, afd: dict[str, Any] | None) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    on_gpu = torch.cuda.is_available()
    extra: dict[str, Any] = (
        {"attention_backend": MODELS[model].attention_backend, **MODELS[model].engine} if on_gpu else {}
    )
    return EngineArgs(
        model=str(path),
        enforce_eager=True,
        max_model_len=_MAX_TOKENS,
        max_num_batched_tokens=_MAX_TOKENS,
        max_num_seqs=8,
        gpu_memory_utilization=0.2,
        additional_config=afd or {},
        **extra,
    ).create_engine_config()


def _start(config: Any) -> torch.device:
    """What a worker does before it builds a model; once per process."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    from afd_shim.testing.servers import free_port

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.accelerator.set_device_index(device)
    with set_current_vllm_config(config):
        backend = "nccl" if device.type == "cuda" else "gloo"
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, backend)
        ensure_model_parallel_initialized(1, 1)
    if device.type == "cuda":
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(device)
    return device


def _load(config: Any) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


def _blocks(model: torch.nn.Module) -> Iterator[tuple[int, torch.nn.Module]]:
    """The model's MoE blocks: the modules that hold a MoE runner as a child, by decoder layer."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.models.utils import extract_layer_index

    for name, module in model.named_modules():
        if any(isinstance(child, MoERunner) for child in module.children()):
            yield extract_layer_index(name), module


def _run_blocks(model: torch.nn.Module, config: Any, device: torch.device, tokens: int) -> dict[int, torch.Tensor]:
    from vllm.forward_context import set_forward_context

    hidden_size = config.model_config.get_hidden_size()
    outputs = {}
    with torch.inference_mode(), set_forward_context(None, config, num_tokens=tokens):
        for index, block in _blocks(model):
            outputs[index] = block(inputs(hidden_size, tokens, index).to(device)).cpu()
    return outputs


def _kernel(model: torch.nn.Module) -> str:
    """What computes the experts, as far as vLLM says."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runner = next(module for module in model.modules() if isinstance(module, MoERunner))
    method = getattr(runner.routed_experts, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None) or getattr(method, "kernel", None)
    experts = getattr(kernel, "fused_experts", None) or getattr(getattr(kernel, "impl", None), "fused_experts", None)
    return "/".join(type(part).__name__ for part in (method, experts) if part is not None)


def run_native(path: Path, model: str) -> dict[tuple[bool, int], dict[str, Any]]:
    """Stock vLLM's outputs, keyed as `run_split`'s with the gate on FFN."""
    config = _config(path, model, None)
    device = _start(config) if not torch.distributed.is_initialized() else _device()
    native = _load(config)
    return {(False, tokens): {"outputs": _run_blocks(native, config, device, tokens)} for tokens in TOKENS}


def run_split(path: Path, model: str) -> dict[tuple[bool, int], dict[str, Any]]:
    """Both roles' outputs, keyed by (gate on Attention, tokens)."""
    results = {}
    for gate in MODELS[model].gate_placements:
        pair = SplitPair(path, model, compute_gate_on_attention=gate)
        for tokens in TOKENS:
            pair.connector.sent.clear()
            outputs = _run_blocks(pair.attention, pair.attention_config, pair.device, tokens)
            results[gate, tokens] = {
                "outputs": outputs,
                "bytes": pair.connector.sent[0][0],
                "payload": all(fits for _, fits in pair.connector.sent),
                "kernel": _kernel(pair.ffn),
            }
    return results


class SplitPair:
    """Both roles of one model in this process, loaded as their workers load them."""

    def __init__(self, path: Path, model: str, *, compute_gate_on_attention: bool) -> None:
        from afd_shim.moe.proxy import RemoteFFNProxy

        self._gate = compute_gate_on_attention
        self._name = model
        self.ffn, self.ffn_config, ffn_context = self._load_role(path, "ffn")
        self.attention, self.attention_config, context = self._load_role(path, "attention")
        self.device = context.device
        self.connector = _memory_connector(ffn_context.layers, self.ffn_config, gate_here=self._sends_logits())
        context.proxy = RemoteFFNProxy(self.connector, sorted(layer.index for layer in context.layers))

    def _sends_logits(self) -> bool:
        return self._gate or MODELS[self._name].has_own_gate

    def _load_role(self, path: Path, role_name: str) -> tuple[torch.nn.Module, Any, Any]:
        from vllm.config import set_current_vllm_config

        from afd_shim import activation, role
        from afd_shim.moe.checkpoint import plan_checkpoint
        from afd_shim.testing.deployments import afd_config

        afd = afd_config(role_name, 1, compute_gate_on_attention=self._gate)
        config = _config(path, self._name, afd)
        activation.commit(f"{role_name}_worker")
        device = _start(config) if not torch.distributed.is_initialized() else _device()
        context = role.RoleContext(config=config.additional_config.afd, device=device)
        role.take(context)
        with set_current_vllm_config(config):
            context.plan = plan_checkpoint(config, context)
        return _load(config), config, context


def _device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def _memory_connector(layers: Any, config: Any, *, gate_here: bool) -> Any:
    """An exchange that runs the FFN's native layer at once, and keeps the size of what was sent."""
    from vllm.forward_context import set_forward_context

    from afd_shim.connectors.base import AttentionConnector, ExchangeHeader, ExchangeStats

    by_index = {layer.index: layer for layer in layers}

    class MemoryConnector(AttentionConnector):
        def __init__(self) -> None:
            self.stats = ExchangeStats()
            self.sent: list[tuple[int, bool]] = []
            """Bytes, and whether they are what the gate placement needs, of each exchange."""

        def connect(self) -> None:
            """Both sides are here."""

        def send_attn_output(
            self, header: ExchangeHeader, hidden_states: torch.Tensor, router_logits: torch.Tensor | None = None
        ) -> None:
            """Keep copies, as a wire would."""
            layer = by_index[header.layer]
            rows, width = hidden_states.shape
            needed = rows * width * hidden_states.element_size()
            fits = (router_logits is not None) is gate_here and rows == header.rows
            if router_logits is not None:
                needed += rows * layer.num_experts * router_logits.element_size()
            nbytes = sum(tensor.nbytes for tensor in (hidden_states, router_logits) if tensor is not None)
            self.sent.append((nbytes, fits and nbytes == needed and hidden_states.is_contiguous()))
            self._hidden = hidden_states.clone()
            self._logits = None if router_logits is None else router_logits.clone()

        def recv_ffn_output(self, header: ExchangeHeader, out: torch.Tensor) -> torch.Tensor:
            """Compute with the FFN's layer."""
            with set_forward_context(None, config, num_tokens=header.rows):
                output = by_index[header.layer].runner(
                    hidden_states=self._hidden, router_logits=self._hidden if self._logits is None else self._logits
                )
            return out.copy_(output)

        def close(self, reason: str | None = None) -> None:
            """Nothing to end."""

    return MemoryConnector()


def main() -> None:
    """Run one stage over the given models; one that fails is recorded and the next is run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=("native", "split"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    run = {"native": run_native, "split": run_split}[options.stage]
    found: dict[str, Any] = {}
    for model in options.models.split(","):
        started = time.perf_counter()
        try:
            found[model] = {"results": run(write_model(model, options.checkpoints), model)}
        except Exception as error:  # noqa: BLE001 - one model's failure is a result, the others still count
            traceback.print_exc()
            found[model] = {"error": f"{options.stage}: {type(error).__name__}: {error}"[:1500]}
        print(f"{options.stage} {model}: {time.perf_counter() - started:.1f} s", flush=True)  # noqa: T201
        torch.save(found, options.out)
    sys.exit(any("error" in result for result in found.values()))


if __name__ == "__main__":
    main()
