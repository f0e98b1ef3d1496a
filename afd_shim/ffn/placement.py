"""Which experts each FFN rank holds, before and after a rearrangement: records, their log, their words.

Nothing here imports torch or vLLM: logs are read where neither is installed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "LOG_MARK",
    "LayerPlacement",
    "Rearrangement",
    "balancedness",
    "expected_load",
    "format_placement",
    "load_per_rank",
    "read_rearrangements",
]

LOG_MARK = "AFD EPLB placement: "
"""What stands before a record in the server's log."""


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """One MoE layer: what was where, what is where, and what its experts were asked for.

    Attributes:
        layer: the decoder layer's index.
        before: the logical expert in each physical slot; ranks hold equal, consecutive shares.
        after: the same after the rearrangement.
        load: tokens recorded for each physical slot under `before`.

    """

    layer: int
    before: list[int]
    after: list[int]
    load: list[int]


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """One committed change of the expert placement."""

    number: int  # of this server, from 1
    step: int  # served steps before it
    seconds: float  # for which serving stood still
    num_ranks: int
    layers: list[LayerPlacement]  # those that changed

    def log_line(self) -> str:
        """The record as it stands in the log: one line of JSON behind `LOG_MARK`."""
        return LOG_MARK + json.dumps(asdict(self), separators=(",", ":"))


def load_per_rank(load: Sequence[float], num_ranks: int) -> list[float]:
    """Sum the physical slots' load over each rank's share of them."""
    share = len(load) // num_ranks
    return [sum(load[rank * share : (rank + 1) * share]) for rank in range(num_ranks)]


def expected_load(placement: LayerPlacement) -> list[float]:
    """The load each slot would have had under `after`: an expert's tokens, shared evenly by its replicas."""
    tokens: Counter[int] = Counter()
    for expert, count in zip(placement.before, placement.load, strict=True):
        tokens[expert] += count
    replicas = Counter(placement.after)
    return [tokens[expert] / replicas[expert] for expert in placement.after]


def balancedness(per_rank: Sequence[float]) -> float:
    """Mean over maximum, vLLM's measure: 1 is perfect balance; 1 also where nothing was recorded."""
    highest = max(per_rank)
    return sum(per_rank) / len(per_rank) / highest if highest else 1.0


def format_placement(record: Rearrangement) -> Iterator[str]:
    """Tell a rearrangement in words, one line per MoE layer and rank.

    Yields:
        Lines such as `layer 1 rank 0: experts 0 1 2 3 (replicated: 0), 120 tokens before`.

    """
    yield (
        f"rearrangement {record.number} after {record.step} steps, {record.seconds:.2f} s, "
        f"{len(record.layers)} layers changed"
    )
    for placement in record.layers:
        before = load_per_rank(placement.load, record.num_ranks)
        after = load_per_rank(expected_load(placement), record.num_ranks)
        yield f"layer {placement.layer}: balancedness {balancedness(before):.2f} -> {balancedness(after):.2f}"
        share = len(placement.after) // record.num_ranks
        replicas = Counter(placement.after)
        for rank in range(record.num_ranks):
            held = sorted(placement.after[rank * share : (rank + 1) * share])
            copies = sorted({expert for expert in held if replicas[expert] > 1})
            replicated = f" (replicated: {' '.join(map(str, copies))})" if copies else ""
            yield (
                f"layer {placement.layer} rank {rank}: experts {' '.join(map(str, held))}{replicated}, "
                f"{before[rank]:.0f} tokens before, {after[rank]:.0f} expected"
            )


def read_rearrangements(log: Path) -> list[Rearrangement]:
    """Read every record out of a server's log, in order.

    Several processes write to one log, and a line may be cut by another's or by the end of a killed server:
    such a record is left out. `Rearrangement.number` shows the gap.
    """
    with log.open(encoding="utf-8", errors="replace") as lines:
        return list(_records(lines))


def _records(lines: Iterable[str]) -> Iterator[Rearrangement]:
    for line in lines:
        _, mark, text = line.partition(LOG_MARK)
        if mark:
            try:
                raw = json.loads(text)
            except json.JSONDecodeError:
                continue
            raw["layers"] = [LayerPlacement(**layer) for layer in raw["layers"]]
            yield Rearrangement(**raw)
