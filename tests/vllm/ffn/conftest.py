"""What an FFN server's answers are held against: the same layers, as unsplit vLLM runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.peers import PlayedAttention, Request

NativeMoE = Callable[[PlayedAttention, Sequence[Request]], list[torch.Tensor]]


@pytest.fixture(scope="module")
def native_moe(world: None, checkpoint: Callable[..., Checkpoint]) -> NativeMoE:
    """Stock vLLM's own MoE layers of the float32 Qwen3-MoE, one rank, all experts: one request for each layer."""
    from afd_shim.testing.local_roles import inspect_here, load_model

    tiny = checkpoint("qwen3-moe", dtype="float32")
    inspect_here(tiny.family.architecture)
    model = load_model(tiny.path, dtype="float32")
    runners = model.runners()
    for runner in runners.values():
        runner.gate = None  # the requests bring their own router logits, as Attention's gate would

    def run(played: PlayedAttention, requests: Sequence[Request]) -> list[torch.Tensor]:
        return [
            model.run(runners[layer], hidden_states=request.rows, router_logits=request.logits)
            for layer, request in zip(played.layers, requests, strict=True)
        ]

    return run
