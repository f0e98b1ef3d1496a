"""vLLM's own kernel that records expert load, on batches as the FFN merges them, against counting by hand.

    python3 -m tests.gpu.record_kernel --out FILE.json

Each row of the result is one mixture of Attention servers: their real and their padding rows, merged
real rows first. Counted by hand is what the real rows chose; the torch reference that CPU ranks use
must map and count alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.base_router import eplb_map_to_physical_and_record

from afd_shim.connectors.base import ExchangeHeader, Reply
from afd_shim.connectors.sequencer import place
from afd_shim.connectors.wire import PlanEntry
from afd_shim.ffn.cpu_reference import count_physical_experts, physical_expert_ids

EXPERTS, REDUNDANT, TOP_K = 64, 32, 6
SERVERS: dict[str, list[tuple[int, int]]] = {
    "1A": [(33, 31)],
    "2A": [(7, 1), (2, 14)],
    "3A": [(1, 0), (64, 0), (5, 59)],
    "idle peer first": [(0, 16), (9, 7)],
    "idle peer last": [(9, 7), (0, 16)],
    "all idle": [(0, 8), (0, 8)],
    "large": [(1000, 24), (1000, 24)],
}
"""Real rows and padding rows of each server's request."""


def placement(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical experts by logical expert (-1 where there is none), and how many each has."""
    copies = [[expert] for expert in range(EXPERTS)]
    chosen = torch.randint(0, EXPERTS, (REDUNDANT,), generator=generator).tolist()
    for physical, expert in enumerate(chosen, start=EXPERTS):
        copies[expert].append(physical)
    width = max(map(len, copies))
    to_physical = torch.tensor([row + [-1] * (width - len(row)) for row in copies])
    return to_physical, torch.tensor([len(row) for row in copies])


def merged(servers: list[tuple[int, int]], generator: torch.Generator) -> tuple[torch.Tensor, list[list[int]]]:
    """The experts chosen by a merged batch, `[rows, TOP_K]`, and those chosen by real rows alone."""
    entries = [
        PlanEntry(group, ExchangeHeader(0, 0, 0, real + padding, real, Reply.FINISHED, real == 0, last_layer=True))
        for group, (real, padding) in enumerate(servers)
    ]
    rows = sum(real + padding for real, padding in servers)
    batch = torch.full((rows, TOP_K), -7, dtype=torch.int32)
    chosen: list[list[int]] = []
    for (group, header, first_real, first_padding), (real, padding) in zip(place(entries), servers, strict=True):
        assert (group, header.real_rows) == (entries[group].group, real)
        scores = torch.rand(real + padding, EXPERTS, generator=generator) ** torch.linspace(1, 4, EXPERTS)
        experts = scores.topk(TOP_K).indices.to(torch.int32)
        batch[first_real : first_real + real] = experts[:real]
        batch[first_padding : first_padding + padding] = experts[real:]
        chosen += experts[:real].tolist()
    assert (batch >= 0).all()
    return batch, chosen


def compare(name: str, device: torch.device) -> dict[str, Any]:
    """One mixture of servers: what the kernel recorded, and whether it is what was chosen."""
    generator = torch.Generator().manual_seed(len(name))
    to_physical, replicas = placement(generator)
    batch, chosen = merged(SERVERS[name], generator)
    load = torch.zeros(EXPERTS + REDUNDANT, dtype=torch.int32, device=device)
    physical = eplb_map_to_physical_and_record(
        topk_ids=batch.to(device),
        expert_load_view=load,
        logical_to_physical_map=to_physical.to(device),
        logical_replica_count=replicas.to(device),
        record_enabled=torch.ones((), dtype=torch.bool, device=device),
        num_unpadded_tokens=torch.tensor(len(chosen), dtype=torch.int32, device=device),
    )
    by_hand = [0] * EXPERTS
    for row in chosen:
        for expert in row:
            by_hand[expert] += 1
    recorded = load.cpu()
    by_logical = [int(recorded[[p for p in row if p >= 0]].sum()) for row in to_physical.tolist()]
    expected = physical_expert_ids(batch, to_physical, replicas)
    reference = torch.zeros_like(recorded)
    count_physical_experts(expected, len(chosen), reference)
    return {
        "servers": name,
        "rows": len(batch),
        "real_rows": len(chosen),
        "recorded": int(recorded.sum()),
        "equals_counting_by_hand": by_logical == by_hand,
        "reference_maps_alike": bool(torch.equal(physical.cpu().long(), expected.long())),
        "reference_counts_alike": bool(torch.equal(recorded, reference)),
    }


def main() -> int:
    """Compare every mixture; 0 if all agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [compare(name, torch.device("cuda")) for name in SERVERS]
    options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0 if all(all(value for value in row.values() if isinstance(value, bool)) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
