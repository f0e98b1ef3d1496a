"""Both roles over vLLM's GPU worker, with either of its model runners."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from afd_shim.workers.attention import AttentionRole
from afd_shim.workers.ffn import FFNRole

__all__ = ["AttentionWorker", "FFNWorker"]


class AttentionWorker(AttentionRole, Worker):
    """The Attention role on CUDA."""


class FFNWorker(FFNRole, Worker):
    """The FFN role on CUDA."""
