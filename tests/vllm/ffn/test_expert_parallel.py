"""Expert parallelism over two FFN ranks without load balancing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.deployments import afd_config
from afd_shim.testing.peers import FFN_INSPECTION, PlayedAttention, Request, meet
from afd_shim.testing.servers import cores_of_ranks, free_port, start_server

pytestmark = [pytest.mark.newest_release, pytest.mark.timeout(600)]


def test_two_ranks_with_half_of_the_experts_each_compute_the_unsplit_layer(
    checkpoint: Callable[..., Checkpoint],
    native_moe: Callable[[PlayedAttention, Sequence[Request]], list[torch.Tensor]],
    tmp_path: Path,
) -> None:
    """Bit for bit; and nothing of a balancer exists."""
    tiny = checkpoint("qwen3-moe", dtype="float32")
    config = afd_config("ffn", free_port(), compute_gate_on_attention=True, num_ffn_ranks=2)
    server = start_server(
        "ffn",
        tiny.path,
        log_dir=tmp_path,
        additional_config=config,
        dtype="float32",
        extra_args=(
            *("--worker-extension-cls", FFN_INSPECTION),
            *("--tensor-parallel-size", "2", "--enable-expert-parallel"),
        ),
        env=cores_of_ranks(2),
    )
    with server:
        server.wait_ready(480)
        with PlayedAttention(server, *meet(server, config)) as played:
            for rows in (1, 7, 64):
                requests = [played.halves(rows) for _ in played.layers]
                answers = [
                    played.exchange(layer, {0: request})[0]
                    for layer, request in zip(played.layers, requests, strict=True)
                ]
                assert all(map(torch.equal, answers, native_moe(played, requests)))
        stats = server.rpc("afd_stats")

    owned = tiny.owned_bytes("ffn", compute_gate_on_attention=True)
    assert [rank["parameter_bytes"] for rank in stats] == [owned // 2] * 2
    assert not any("eplb" in rank for rank in stats)
