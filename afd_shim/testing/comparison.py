"""Serve a checkpoint unsplit and split, and hold one against the other.

Both the demo and the end-to-end tests are made of this: real servers, greedy generation one request
at a time, and every number taken from outside the product where there is an outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from afd_shim.testing.checkpoints import Checkpoint, Role
from afd_shim.testing.deployments import Split, start_split, start_unsplit
from afd_shim.testing.servers import Completion, Server

__all__ = ["MAX_TOKENS", "PROMPTS", "RoleReads", "SplitRun", "generate", "run_split", "run_unsplit"]

PROMPTS = ("The capital of France is", "A mixture of experts routes each token", "def main():")
MAX_TOKENS = 32
MIN_DISTINCT_TOKENS = 8
"""A model that repeats itself would hide differences."""
MAX_READ_RATIO = 1.05
"""What a role may read from disk, against the bytes of what it owns."""

_ZEROED_EXPERT = 0


@dataclass(frozen=True, slots=True)
class RoleReads:
    """Bytes that a role's process has read from the checkpoint, and the bytes of what it owns."""

    read: int
    owned: int

    @property
    def ratio(self) -> float:
        """1.0 is ideal."""
        return self.read / self.owned


@dataclass(frozen=True, slots=True)
class SplitRun:
    """What one split deployment did, next to what unsplit vLLM generated."""

    checkpoint: Checkpoint
    compute_gate_on_attention: bool
    expected: tuple[Completion, ...]
    outputs: tuple[Completion, ...]
    outputs_with_zeroed_expert: tuple[Completion, ...]
    reads: dict[Role, RoleReads]
    forwards: int
    exchanges: int
    exchanges_on_ffn: int
    exchange_seconds: float

    @property
    def gate(self) -> str:
        """Where the gate was: `FFN`, `Attention`, or `external` where the model calls it itself."""
        if self.checkpoint.family.gate == "external":
            return "external"
        return "Attention" if self.compute_gate_on_attention else "FFN"

    @property
    def identical_tokens(self) -> int:
        """Tokens equal to the unsplit ones, up to each output's first difference."""
        return sum(_common_prefix(*pair) for pair in zip(self.expected, self.outputs, strict=True))

    @property
    def microseconds_per_exchange(self) -> float:
        """Mean time from sending a layer's input to holding its output: wire and experts."""
        return 1e6 * self.exchange_seconds / max(1, self.exchanges)

    @property
    def expected_exchanges(self) -> int:
        """One for each MoE layer and forward."""
        return len(self.checkpoint.moe_layers) * self.forwards

    def failures(self) -> list[str]:
        """Everything that does not hold, one sentence each; empty means that the split is proven."""
        found = []
        if self.outputs != self.expected:
            found.append(
                f"{self.identical_tokens} of {sum(len(one.token_ids) for one in self.expected)} tokens "
                "are those of unsplit vLLM"
            )
        distinct = min(len(set(output.token_ids)) for output in self.expected)
        if distinct < MIN_DISTINCT_TOKENS:
            found.append(f"an output has only {distinct} distinct tokens, so it proves little")
        if self.outputs_with_zeroed_expert == self.outputs:
            found.append("zeroing an expert on the FFN changed nothing, so the FFN's experts are not the ones in use")
        if not self.forwards or {self.exchanges, self.exchanges_on_ffn} != {self.expected_exchanges}:
            layers = len(self.checkpoint.moe_layers)
            found.append(
                f"{self.exchanges} exchanges on Attention and {self.exchanges_on_ffn} on the FFN, where "
                f"{self.forwards} forwards of {layers} MoE layers make {self.expected_exchanges}"
            )
        found += [
            f"the {role} role read {reads.read} bytes and owns {reads.owned}"
            for role, reads in self.reads.items()
            if not 1.0 <= reads.ratio <= MAX_READ_RATIO
        ]
        return found


def run_unsplit(
    checkpoint: Checkpoint,
    log_dir: Path,
    *,
    prompts: Sequence[str] = PROMPTS,
    core: int = 0,
    eager: bool = True,
    env: Mapping[str, str] | None = None,
) -> tuple[Completion, ...]:
    """Generate with stock vLLM, without an `afd` configuration.

    Raises:
        ServerError: the server did not start or answer.

    """
    name = f"{checkpoint.family.name}-unsplit"
    with start_unsplit(checkpoint, log_dir, name=name, core=core, eager=eager, env=env) as server:
        server.wait_ready()
        return generate(server, prompts)


def run_split(
    checkpoint: Checkpoint,
    log_dir: Path,
    *,
    expected: tuple[Completion, ...],
    compute_gate_on_attention: bool = False,
    shared_experts_on_attention: bool = False,
    eager: bool = True,
    env: Mapping[str, str] | None = None,
) -> SplitRun:
    """Generate with two servers, one per role, and collect what they did.

    Raises:
        ServerError: a server did not start or answer.

    """
    placed = {
        "compute_gate_on_attention": compute_gate_on_attention,
        "shared_experts_on_attention": shared_experts_on_attention,
    }
    with start_split(checkpoint, log_dir, placed=placed, eager=eager, env=env) as deployment:
        deployment.wait_ready()
        outputs = generate(deployment.attention)
        (attention,) = deployment.attention.rpc("afd_stats")
        (ffn,) = deployment.ffn.rpc("afd_stats")
        reads = _reads(deployment, checkpoint, placed)
        deployment.ffn.rpc("zero_expert", _ZEROED_EXPERT)
        zeroed = generate(deployment.attention)
    return SplitRun(
        checkpoint=checkpoint,
        compute_gate_on_attention=compute_gate_on_attention,
        expected=expected,
        outputs=outputs,
        outputs_with_zeroed_expert=zeroed,
        reads=reads,
        forwards=cast("int", attention["forwards"]),
        exchanges=cast("int", attention["exchanges"]),
        exchanges_on_ffn=cast("int", ffn["exchanges"]),
        exchange_seconds=cast("float", attention["exchange_seconds"]),
    )


def generate(server: Server, prompts: Sequence[str] = PROMPTS) -> tuple[Completion, ...]:
    """Complete every prompt, one request at a time."""
    return tuple(server.complete(prompt, max_tokens=MAX_TOKENS) for prompt in prompts)


def _reads(deployment: Split, checkpoint: Checkpoint, placed: Mapping[str, bool]) -> dict[Role, RoleReads]:
    servers: dict[Role, Server] = {"attention": deployment.attention, "ffn": deployment.ffn}
    return {
        role: RoleReads(
            read=cast("int", server.rpc("inspect_reads")[0]["bytes"]),
            owned=checkpoint.owned_bytes(role, **placed),
        )
        for role, server in servers.items()
    }


def _common_prefix(first: Completion, second: Completion) -> int:
    pairs = zip(first.token_ids, second.token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first.token_ids), len(second.token_ids)))
