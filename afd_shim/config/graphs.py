"""CUDA graphs on the Attention role: captured between the exchanges, never across one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from afd_shim.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig

__all__ = ["EXCHANGE_OPS", "split_graphs_at_exchanges"]

EXCHANGE_OPS = ("vllm::moe_forward", "vllm::moe_forward_shared")
"""vLLM's operators behind which a MoE layer, hence the exchange, runs.

Upstream: `vllm/model_executor/layers/fused_moe/runner/moe_runner.py` (0.30.0-0.33.0).
"""


def split_graphs_at_exchanges(config: VllmConfig) -> None:
    """Make every CUDA graph of the Attention role end before an exchange and start after it.

    The exchange is Python: a graph that holds a whole forward would capture it once and never run
    it again. So full graphs become piecewise ones, split at the MoE layers as they are at attention,
    and where vLLM cannot split, graphs are turned off; either is said in one warning. Where there are
    no graphs (CPU, eager) nothing changes. vLLM may run `VllmConfig.__post_init__` again after it.

    Args:
        config: vLLM's finished configuration; its compilation part is changed.

    Raises:
        ConfigError: naming the architecture, where vLLM captures breakable graphs, which know nothing
            of the exchange.

    Upstream: `CompilationConfig.splitting_ops` and `cudagraph_mode` (`vllm/config/compilation.py`),
    `VllmConfig._maybe_enable_breakable_cudagraph` (`vllm/config/vllm.py`), 0.30.0-0.33.0.

    """
    from vllm import envs
    from vllm.config import CUDAGraphMode
    from vllm.logger import init_logger

    logger = init_logger("vllm.afd_shim")
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode == CUDAGraphMode.NONE:
        return
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:  # vLLM sets it itself for some architectures
        raise ConfigError(
            f"{', '.join(config.model_config.architectures)} would be captured as breakable CUDA graphs, which do not "
            "break at AFD's exchange; set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or use --enforce-eager.",
            key="cudagraph_mode",
        )
    if not _splits_at_attention(compilation):
        logger.warning(
            "AFD: CUDA graphs are off on the Attention role: %s graphs would hold the exchange, and compilation mode "
            "%s with splitting_ops %s does not split them.",
            mode.name,
            compilation.mode,
            compilation.splitting_ops,
        )
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.max_cudagraph_capture_size = 0
        compilation.cudagraph_capture_sizes = []
        return
    if mode.has_full_cudagraphs():
        logger.warning(
            "AFD: %s CUDA graphs would hold the exchange, so the Attention role uses PIECEWISE ones.", mode.name
        )
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    assert compilation.splitting_ops is not None  # what splits at attention names it there
    compilation.splitting_ops += [op for op in EXCHANGE_OPS if op not in compilation.splitting_ops]


def _splits_at_attention(compilation: CompilationConfig) -> bool:
    from vllm.config import CompilationMode

    return compilation.mode == CompilationMode.VLLM_COMPILE and compilation.splitting_ops_contain_attention()
