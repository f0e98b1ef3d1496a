"""The picture of `afd-shim eplb-report`: load per FFN rank before and after, and balancedness over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from afd_shim.errors import ConfigError
from afd_shim.ffn.placement import LayerPlacement, Rearrangement, balancedness, expected_load, load_per_rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

# Two hues that stay apart in grey and for colour-blind readers.
_BEFORE, _AFTER = "#D55E00", "#0072B2"

Load = Callable[[LayerPlacement], Sequence[float]]


def draw(records: Sequence[Rearrangement], out: Path) -> None:
    """Draw the records of one server into an image file.

    Raises:
        ConfigError: matplotlib is not installed.

    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("drawing needs matplotlib; run: pip install 'afd-shim[plots]'.", key="out") from None
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1)
    _bars(above, records)
    _balance(below, records)
    figure.savefig(out, dpi=150)


def _recorded(placement: LayerPlacement) -> Sequence[float]:
    return placement.load


def _share(record: Rearrangement, load: Load) -> list[float]:
    """Percent of the recorded tokens on each rank, over the layers that changed."""
    per_layer = [load_per_rank(load(placement), record.num_ranks) for placement in record.layers]
    ranks = [sum(tokens) for tokens in zip(*per_layer, strict=True)]
    total = sum(ranks) or 1.0
    return [100.0 * tokens / total for tokens in ranks]


def _bars(axes: Axes, records: Sequence[Rearrangement]) -> None:
    ranks = records[0].num_ranks
    width = 0.8 / (2 * ranks)
    for position, record in enumerate(records):
        pairs = zip(_share(record, _recorded), _share(record, expected_load), strict=True)
        for rank, (before, after) in enumerate(pairs):
            left = position - 0.4 + 2 * rank * width
            for offset, height, colour in ((0.5, before, _BEFORE), (1.5, after, _AFTER)):
                first = position == 0 and rank == 0
                label = ("recorded before" if colour == _BEFORE else "same tokens, placement after") if first else None
                axes.bar(left + offset * width, height, 0.92 * width, color=colour, label=label)
            axes.annotate(f"rank {rank}", (left + width, 0), (0, -4), textcoords="offset points", ha="center", va="top")
    even = 100.0 / ranks
    axes.axhline(even, color="0.4", linewidth=1, linestyle="--", label=f"even: {even:.0f} %")
    axes.set_xticks(
        range(len(records)), [f"\nrearrangement {record.number}\n{record.seconds * 1e3:.0f} ms" for record in records]
    )
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("% of the tokens")
    axes.set_title("Expert load per FFN rank, all MoE layers that changed")
    axes.margins(y=0.25)
    axes.legend(loc="upper right", ncols=3, frameon=False)


def _balance(axes: Axes, records: Sequence[Rearrangement]) -> None:
    layers = sorted({placement.layer for record in records for placement in record.layers})
    steps = [record.step for record in records]
    for load, colour, label in ((_recorded, _BEFORE, "recorded before"), (expected_load, _AFTER, "expected after")):
        series = {layer: _layer_balance(records, layer, load) for layer in layers}
        for layer in layers:
            axes.plot(steps, series[layer], color=colour, alpha=0.3, linewidth=1, marker=".", markersize=4)
        means = [
            _mean([value for layer in layers if not math.isnan(value := series[layer][at])]) for at in range(len(steps))
        ]
        axes.plot(steps, means, color=colour, linewidth=2, marker="o", label=f"{label} (mean of layers; thin: each)")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("served steps")
    axes.set_ylabel("balancedness (mean / max)")
    axes.legend(loc="lower right", frameon=False)


def _layer_balance(records: Sequence[Rearrangement], layer: int, load: Load) -> list[float]:
    """A layer's balancedness at each record; NaN, which is not drawn, where it did not change."""
    values: list[float] = []
    for record in records:
        found = next((placement for placement in record.layers if placement.layer == layer), None)
        values.append(math.nan if found is None else balancedness(load_per_rank(load(found), record.num_ranks)))
    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
