"""`afd-shim eplb-report`: what expert load balancing did, drawn from an FFN server's log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["eplb_report"]


def eplb_report(
    log: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The FFN server's log.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the picture into this file.")] = None,
) -> None:
    """Tell each rearrangement of experts in words and, with --out, draw the load per rank and the balance over time."""
    from afd_shim.errors import ConfigError
    from afd_shim.ffn.placement import format_placement, read_rearrangements

    records = read_rearrangements(log)
    if not records:
        raise ConfigError(
            f'{log} records no rearrangement; start the FFN server with "log_balancedness": true in --eplb-config, '
            "and serve at least a quarter of its step_interval.",
            key="log_balancedness",
        )
    for record in records:
        for line in format_placement(record):
            typer.echo(line)
    if out is not None:
        from afd_shim.cli.eplb_picture import draw

        draw(records, out)
        typer.echo(f"{len(records)} rearrangements are drawn in {out}")
