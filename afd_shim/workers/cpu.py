"""Both roles over vLLM's CPU worker."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from afd_shim.workers.attention import AttentionRole
from afd_shim.workers.ffn import FFNRole

__all__ = ["AttentionWorker", "FFNWorker"]


class AttentionWorker(AttentionRole, CPUWorker):
    """The Attention role on CPU."""


class FFNWorker(FFNRole, CPUWorker):
    """The FFN role on CPU."""
