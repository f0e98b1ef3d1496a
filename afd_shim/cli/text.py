"""Plain text for terminals and tickets: aligned columns, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afd_shim.cli.diagnosis import PatchLine

__all__ = ["columns", "patch_table"]


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align the cells of each column to the left; the last one is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def patch_table(patches: Sequence[PatchLine]) -> Iterator[str]:
    """Lay out one line per patch and set."""
    header = ("set", "patch", "outcome", "reason")
    return columns([header, *((line["set"], line["patch"], line["outcome"], line["reason"]) for line in patches)])
