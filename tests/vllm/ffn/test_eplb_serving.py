"""Expert load balancing of a real FFN server with two ranks, driven by independent Attention ranks.

The Attention ranks are connectors in this process, so that the rows, the router logits and the order
of arrival are the test's own, and what should be counted can be counted by hand.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from afd_shim.errors import PeerLostError
from afd_shim.ffn.placement import load_per_rank, read_rearrangements
from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.deployments import afd_config
from afd_shim.testing.peers import (
    FFN_INSPECTION,
    PlayedAttention,
    Request,
    expert_checksums,
    inspect_eplb,
    is_running,
    meet,
)
from afd_shim.testing.servers import cores_of_ranks, free_port, start_server

MakeCheckpoint = Callable[..., Checkpoint]

pytestmark = pytest.mark.timeout(600)  # the first test starts the server

ATTENTION_RANKS = 3
FFN_RANKS = 2
REDUNDANT = 2
INTERVAL = 1000  # steps between rearrangements; the window is as long, so that every step is recorded
EPLB_CONFIG = {
    "use_async": False,
    "num_redundant_experts": REDUNDANT,
    "window_size": INTERVAL,
    "step_interval": INTERVAL,
    "log_balancedness": True,
    "log_balancedness_interval": 10**6,
}


@dataclass
class Deployment(PlayedAttention):
    """The Attention ranks that this test plays, and what they have asked for."""

    top_k: int = 0
    expected: dict[int, list[int]] = field(default_factory=dict)  # layer -> tokens per logical expert

    def exchange(self, layer: int, requests: Mapping[int, Request]) -> list[torch.Tensor]:
        """Count by hand what is sent."""
        for request in requests.values():
            chosen = request.logits[: request.real].topk(self.top_k, dim=-1).indices.flatten()
            counts = torch.bincount(chosen, minlength=self.hello.num_experts).tolist()
            before = self.expected.setdefault(layer, [0] * self.hello.num_experts)
            self.expected[layer] = [a + b for a, b in zip(before, counts, strict=True)]
        return super().exchange(layer, requests)

    def recorded(self, told: Sequence[dict[str, Any]]) -> list[list[int]]:
        """The load of each logical expert per layer, summed over both ranks' windows."""
        totals = []
        for row, placement in enumerate(told[0]["placement"]):
            layer = [0] * self.hello.num_experts
            for rank in told:
                for expert, tokens in zip(placement, rank["window"][row], strict=True):
                    layer[expert] += tokens
            totals.append(layer)
        return totals


@pytest.fixture(scope="module")
def deployment(checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A real FFN server, two ranks, and three Attention ranks that have met it."""
    model = checkpoint("qwen3-moe", dtype="float32").path
    config = afd_config(
        "ffn",
        free_port(),
        compute_gate_on_attention=True,
        num_attention_ranks=ATTENTION_RANKS,
        num_ffn_ranks=FFN_RANKS,
    )
    server = start_server(
        "ffn",
        model,
        log_dir=tmp_path_factory.mktemp("eplb"),
        additional_config=config,
        dtype="float32",
        extra_args=(
            *("--worker-extension-cls", FFN_INSPECTION),
            *("--tensor-parallel-size", str(FFN_RANKS), "--enable-expert-parallel"),
            *("--enable-eplb", "--eplb-config", json.dumps(EPLB_CONFIG)),
        ),
        env=cores_of_ranks(FFN_RANKS),
    )
    with server:
        server.wait_ready(480)  # ranks of one server start slowly on two busy cores
        top_k = json.loads((model / "config.json").read_text())["num_experts_per_tok"]
        with Deployment(server, *meet(server, config), top_k=top_k) as played:
            yield played


def test_warm_up_is_one_dummy_step_that_records_nothing(deployment: Deployment) -> None:
    """Both ranks have ticked once, equally, and no load is in the window."""
    told = inspect_eplb(deployment.server)

    assert [rank["counters"]["steps"] for rank in told] == [1, 1]
    assert [rank["counters"]["dummy_steps"] for rank in told] == [1, 1]
    assert told[0]["rearrangement_step"] == told[1]["rearrangement_step"] == INTERVAL - INTERVAL // 4 + 1
    assert not any(any(layer) for rank in told for layer in rank["window"])


def test_the_recorded_load_is_the_brute_force_count(deployment: Deployment) -> None:
    """Real tokens count, once; padding and idle ranks do not, whoever is idle and whoever comes first."""
    make = deployment.random
    placeholder = make(0, 1)
    deployment.step({0: make(5)})  # 1A2F: nobody else has anything to send
    deployment.step({0: make(7), 1: make(3, 4)})  # 2A2F, one padded
    deployment.step({0: make(2), 1: make(6, 1), 2: make(4)})  # 3A2F
    deployment.step({0: placeholder, 1: make(8), 2: make(3)})  # one idle peer first
    deployment.step({1: make(8), 2: make(3), 0: placeholder})  # one idle peer last
    deployment.step(dict.fromkeys(range(3), placeholder))  # all idle

    told = inspect_eplb(deployment.server)
    assert deployment.recorded(told) == [deployment.expected[layer] for layer in deployment.layers]
    assert not any(any(layer) for layer in told[1]["window"]), "rows that every rank sees are recorded once"


def test_a_dummy_step_within_a_real_one_clears_nothing(deployment: Deployment) -> None:
    """vLLM's dummy step would clear what the real step in flight has recorded."""
    first, *others = deployment.layers
    deployment.exchange(first, {0: deployment.random(9)})
    deployment.step({1: deployment.random(0, 2)})
    for layer in others:
        deployment.exchange(layer, {0: deployment.random(9)})

    told = inspect_eplb(deployment.server)
    assert deployment.recorded(told) == [deployment.expected[layer] for layer in deployment.layers]


def test_a_rearrangement_moves_weights_and_changes_no_output(
    deployment: Deployment, native_moe: Callable[[PlayedAttention, Sequence[Request]], list[torch.Tensor]]
) -> None:
    """Skewed traffic makes the hot expert's replicas move; every expert's weights follow the map."""
    favourite = 1
    probe = [deployment.halves(11) for _ in deployment.layers]
    wanted = native_moe(deployment, probe)

    def answers() -> list[torch.Tensor]:
        return [
            deployment.exchange(layer, {0: request})[0] for layer, request in zip(deployment.layers, probe, strict=True)
        ]

    assert all(map(torch.equal, answers(), wanted))
    before = inspect_eplb(deployment.server)
    by_expert = expert_checksums(before)
    assert all(len(checksums) == 1 for layer in by_expert for checksums in layer.values()), "replicas are alike"

    while inspect_eplb(deployment.server)[0]["counters"]["rearrangements"] == 0:
        for _ in range(20):
            deployment.step({0: deployment.random(8, favourite=favourite)})

    after = inspect_eplb(deployment.server)
    assert after[0]["placement"] == after[1]["placement"] != before[0]["placement"]
    assert expert_checksums(after) == by_expert
    assert all(map(torch.equal, answers(), wanted))
    record = read_rearrangements(deployment.server.log_path)[0]
    assert {layer.layer for layer in record.layers} <= set(deployment.layers)
    for layer in record.layers:
        assert sum(load_per_rank(layer.load, FFN_RANKS)) > 0
        assert layer.after.count(favourite) > 1, "the hot expert has replicas"


@pytest.mark.newest_release
def test_ten_thousand_mixed_steps_leave_no_skew(deployment: Deployment) -> None:
    """Whatever mix arrives, both FFN ranks tick equally often, through ten rearrangements."""
    before = [rank["counters"]["steps"] for rank in inspect_eplb(deployment.server)]
    mix = random.Random(4)  # noqa: S311 - a reproducible mix, no secret
    last = deployment.layers[-1]
    for _ in range(10_000):
        members = mix.sample(range(ATTENTION_RANKS), mix.choice((1, 1, 1, 2, 3)))
        deployment.exchange(last, {rank: deployment.random(mix.randrange(3), mix.randrange(2)) for rank in members})

    told = inspect_eplb(deployment.server)
    steps = [rank["counters"]["steps"] for rank in told]
    assert steps[0] == steps[1] >= before[0] + 10_000
    assert told[0]["rearrangement_step"] == told[1]["rearrangement_step"]
    assert told[0]["placement"] == told[1]["placement"]
    assert told[0]["counters"]["rearrangements"] == told[1]["counters"]["rearrangements"] > 5


@pytest.mark.newest_release
def test_a_rank_that_is_late_for_a_rearrangement_is_waited_for(deployment: Deployment) -> None:
    """One rank is already in the rearrangement's collectives while the other stands still; then both agree."""
    told = deployment.advance_to_rearrangement(INTERVAL)
    os.kill(told[1]["pid"], signal.SIGSTOP)
    deployment.tick(rows=0)
    time.sleep(1)
    os.kill(told[1]["pid"], signal.SIGCONT)

    after = inspect_eplb(deployment.server)
    assert [rank["counters"]["steps"] for rank in after] == [rank["counters"]["steps"] + 1 for rank in told]
    assert after[0]["rearrangement_step"] == after[1]["rearrangement_step"] == 0
    assert after[0]["placement"] == after[1]["placement"]
    assert expert_checksums(after) == expert_checksums(told)


@pytest.mark.newest_release
def test_a_rank_killed_during_a_rearrangement_ends_the_server(deployment: Deployment) -> None:
    """Nothing hangs: the Attention ranks hear of it, the server ends, and no worker outlives it."""
    told = deployment.advance_to_rearrangement(INTERVAL)
    os.kill(told[1]["pid"], signal.SIGSTOP)
    deployment.tick(rows=0)
    time.sleep(0.5)  # rank 0 waits in the rearrangement's all-reduce
    os.kill(told[1]["pid"], signal.SIGKILL)

    with pytest.raises(PeerLostError, match="FFN rank"):
        deployment.tick()
    deployment.server.wait_exit(20)
    deadline = time.monotonic() + 10
    while any(is_running(rank["pid"]) for rank in told) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_running(rank["pid"]) for rank in told)
    # Rank 0 tells what it could not do, unless vLLM's executor, which names the dead worker, is faster.
    log = deployment.server.log()
    assert "FFN rank 0 could not rearrange experts" in log or "VllmWorker-1 died unexpectedly" in log
