"""Expert load balancing of a real FFN server with two ranks, driven by independent Attention ranks.

The Attention ranks are connectors in this process, so that the rows, the router logits and the order
of arrival are the test's own, and what should be counted can be counted by hand.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afd_shim.connectors.base import AttentionConnector, ExchangeHeader, Hello, Reply
from afd_shim.errors import PeerLostError
from afd_shim.ffn.placement import load_per_rank, read_rearrangements
from afd_shim.testing.checkpoints import Checkpoint, write_checkpoint
from afd_shim.testing.deployments import afd_config
from afd_shim.testing.peers import FFN_INSPECTION, meet
from afd_shim.testing.servers import Server, free_port, start_server

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
class Exchange:
    """What one Attention rank sends for one layer; `rows` and `logits` are real rows first."""

    rows: torch.Tensor
    logits: torch.Tensor
    real: int


@dataclass
class Deployment:
    """The server, and the Attention ranks that this test plays."""

    server: Server
    checkpoint: Checkpoint
    ranks: list[AttentionConnector]
    hello: Hello
    top_k: int
    steps: int = 0  # served steps expected of every FFN rank; warm-up is the first
    expected: dict[int, list[int]] = field(default_factory=dict)  # layer -> tokens per logical expert
    headers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def layers(self) -> tuple[int, ...]:
        """The MoE layers, in the order of the forward."""
        return self.hello.moe_layers

    def random(self, real: int, padding: int = 0, *, favourite: int | None = None) -> Exchange:
        """Rows of a request with random routing, or with one expert that every token chooses first."""
        rows = real + padding
        logits = torch.randn(rows, self.hello.num_experts)
        if favourite is not None:
            logits[:, favourite] += 10.0
        return Exchange(torch.randn(rows, self.hello.hidden_size), logits, real)

    def exchange(self, layer: int, requests: dict[int, Exchange], *, last: bool | None = None) -> list[torch.Tensor]:
        """Send the requests of one layer in the given order, then receive every answer."""
        sent = []
        last_layer = layer == self.layers[-1] if last is None else last
        for rank, request in requests.items():
            rows = request.rows.shape[0]
            header = ExchangeHeader(
                next(self.headers), layer, 0, rows, request.real, Reply.FINISHED, request.real == 0, last_layer
            )
            self.ranks[rank].send_attn_output(header, request.rows, request.logits)
            sent.append((rank, header, request))
            chosen = request.logits[: request.real].topk(self.top_k, dim=-1).indices.flatten()
            counts = torch.bincount(chosen, minlength=self.hello.num_experts).tolist()
            before = self.expected.setdefault(layer, [0] * self.hello.num_experts)
            self.expected[layer] = [a + b for a, b in zip(before, counts, strict=True)]
        return [
            self.ranks[rank].recv_ffn_output(header, torch.empty_like(request.rows)) for rank, header, request in sent
        ]

    def step(self, requests: dict[int, Exchange]) -> list[list[torch.Tensor]]:
        """One step of several Attention ranks, layer by layer."""
        return [self.exchange(layer, requests) for layer in self.layers]

    def advance_to_rearrangement(self) -> list[dict[str, Any]]:
        """Dummy steps until the next one rearranges; returns what both ranks say then."""
        told = self.inspect()
        for _ in range(INTERVAL - 1 - told[0]["rearrangement_step"]):
            self.tick()
        return self.inspect()

    def tick(self, rows: int = 1) -> None:
        """One dummy step; with 0 rows the FFN computes nothing and only steps."""
        self.exchange(self.layers[-1], {0: self.random(0, rows)})

    def inspect(self) -> list[dict[str, Any]]:
        """What both FFN ranks say, once they have ticked for all that was answered."""
        deadline = time.monotonic() + 20
        while True:
            first = self.server.rpc("inspect_eplb")
            second = self.server.rpc("inspect_eplb")
            if first == second or time.monotonic() > deadline:
                return second

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
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A real FFN server, two ranks, and three Attention ranks that have met it."""
    folder = tmp_path_factory.mktemp("eplb")
    checkpoint = write_checkpoint("qwen3-moe", folder / "model", dtype="float32")
    config = afd_config(
        "ffn",
        free_port(),
        compute_gate_on_attention=True,
        num_attention_ranks=ATTENTION_RANKS,
        num_ffn_ranks=FFN_RANKS,
    )
    server = start_server(
        "ffn",
        checkpoint.path,
        log_dir=folder,
        additional_config=config,
        dtype="float32",
        extra_args=(
            *("--worker-extension-cls", FFN_INSPECTION),
            *("--tensor-parallel-size", str(FFN_RANKS), "--enable-expert-parallel"),
            *("--enable-eplb", "--eplb-config", json.dumps(EPLB_CONFIG)),
        ),
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    with server:
        server.wait_ready(480)  # ranks of one server start slowly on two busy cores
        ranks, own = meet(server, config)
        top_k = json.loads((checkpoint.path / "config.json").read_text())["num_experts_per_tok"]
        yield Deployment(server, checkpoint, ranks, own, top_k)
        for connector in ranks:
            connector.close()


def test_warm_up_is_one_dummy_step_that_records_nothing(deployment: Deployment) -> None:
    """Both ranks have ticked once, equally, and no load is in the window."""
    told = deployment.inspect()

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

    told = deployment.inspect()
    assert deployment.recorded(told) == [deployment.expected[layer] for layer in deployment.layers]
    assert not any(any(layer) for layer in told[1]["window"]), "rows that every rank sees are recorded once"


def test_a_dummy_step_within_a_real_one_clears_nothing(deployment: Deployment) -> None:
    """vLLM's dummy step would clear what the real step in flight has recorded."""
    first, *others = deployment.layers
    deployment.exchange(first, {0: deployment.random(9)})
    deployment.step({1: deployment.random(0, 2)})
    for layer in others:
        deployment.exchange(layer, {0: deployment.random(9)})

    told = deployment.inspect()
    assert deployment.recorded(told) == [deployment.expected[layer] for layer in deployment.layers]


def _reference(deployment: Deployment, layer: int, request: Exchange) -> torch.Tensor:
    """The MoE layer from the checkpoint's own tensors, expert by expert."""
    weights = load_file(deployment.checkpoint.path / "model.safetensors")
    scores, chosen = request.logits.softmax(dim=-1).topk(deployment.top_k, dim=-1)
    scores = scores / scores.sum(dim=-1, keepdim=True)
    output = torch.zeros_like(request.rows)
    for row in range(request.rows.shape[0]):
        for score, expert in zip(scores[row], chosen[row].tolist(), strict=True):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up, down = (weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            x = request.rows[row]
            output[row] += score * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
    return output


def test_a_rearrangement_moves_weights_and_changes_no_output(deployment: Deployment) -> None:
    """Skewed traffic makes the hot expert's replicas move; every expert's weights follow the map."""
    favourite = 1
    probe = [deployment.random(11) for _ in deployment.layers]
    wanted = [_reference(deployment, layer, request) for layer, request in zip(deployment.layers, probe, strict=True)]

    def answers() -> list[torch.Tensor]:
        return [
            deployment.exchange(layer, {0: request})[0] for layer, request in zip(deployment.layers, probe, strict=True)
        ]

    torch.testing.assert_close(answers(), wanted, rtol=1e-5, atol=1e-5)
    before = deployment.inspect()
    by_expert = _checksums(before)

    while deployment.inspect()[0]["counters"]["rearrangements"] == 0:
        for _ in range(20):
            deployment.step({0: deployment.random(8, favourite=favourite)})

    after = deployment.inspect()
    assert after[0]["placement"] == after[1]["placement"] != before[0]["placement"]
    assert _checksums(after) == by_expert
    torch.testing.assert_close(answers(), wanted, rtol=1e-5, atol=1e-5)
    record = read_rearrangements(deployment.server.log_path)[0]
    assert {layer.layer for layer in record.layers} <= set(deployment.layers)
    for layer in record.layers:
        assert sum(load_per_rank(layer.load, FFN_RANKS)) > 0
        assert layer.after.count(favourite) > 1, "the hot expert has replicas"


def _checksums(told: Sequence[dict[str, Any]]) -> list[dict[int, set[str]]]:
    """Per layer, the checksums of all slots that hold each logical expert; equal replicas give one."""
    layers = []
    for row, placement in enumerate(told[0]["placement"]):
        slots = [checksum for rank in told for checksum in rank["checksums"][row]]
        held: dict[int, set[str]] = {}
        for expert, checksum in zip(placement, slots, strict=True):
            held.setdefault(expert, set()).add(checksum)
        assert all(len(checksums) == 1 for checksums in held.values())
        layers.append(held)
    return layers


@pytest.mark.newest_release
def test_ten_thousand_mixed_steps_leave_no_skew(deployment: Deployment) -> None:
    """Whatever mix arrives, both FFN ranks tick equally often, through ten rearrangements."""
    before = [rank["counters"]["steps"] for rank in deployment.inspect()]
    mix = random.Random(4)  # noqa: S311 - a reproducible mix, no secret
    last = deployment.layers[-1]
    for _ in range(10_000):
        members = mix.sample(range(ATTENTION_RANKS), mix.choice((1, 1, 1, 2, 3)))
        deployment.exchange(last, {rank: deployment.random(mix.randrange(3), mix.randrange(2)) for rank in members})

    told = deployment.inspect()
    steps = [rank["counters"]["steps"] for rank in told]
    assert steps[0] == steps[1] >= before[0] + 10_000
    assert told[0]["rearrangement_step"] == told[1]["rearrangement_step"]
    assert told[0]["placement"] == told[1]["placement"]
    assert told[0]["counters"]["rearrangements"] == told[1]["counters"]["rearrangements"] > 5


@pytest.mark.newest_release
def test_a_rank_that_is_late_for_a_rearrangement_is_waited_for(deployment: Deployment) -> None:
    """One rank is already in the rearrangement's collectives while the other stands still; then both agree."""
    told = deployment.advance_to_rearrangement()
    os.kill(told[1]["pid"], signal.SIGSTOP)
    deployment.tick(rows=0)
    time.sleep(1)
    os.kill(told[1]["pid"], signal.SIGCONT)

    after = deployment.inspect()
    assert [rank["counters"]["steps"] for rank in after] == [rank["counters"]["steps"] + 1 for rank in told]
    assert after[0]["rearrangement_step"] == after[1]["rearrangement_step"] == 0
    assert after[0]["placement"] == after[1]["placement"]
    assert _checksums(after) == _checksums(told)


@pytest.mark.newest_release
def test_a_rank_killed_during_a_rearrangement_ends_the_server(deployment: Deployment) -> None:
    """Nothing hangs: the Attention ranks hear of it, the server ends, and no worker outlives it."""
    told = deployment.advance_to_rearrangement()
    os.kill(told[1]["pid"], signal.SIGSTOP)
    deployment.tick(rows=0)
    time.sleep(0.5)  # rank 0 waits in the rearrangement's all-reduce
    os.kill(told[1]["pid"], signal.SIGKILL)

    with pytest.raises(PeerLostError):
        deployment.tick()
    deployment.server.wait_exit(20)
    deadline = time.monotonic() + 10
    while any(_runs(rank["pid"]) for rank in told) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_runs(rank["pid"]) for rank in told)


def _runs(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
