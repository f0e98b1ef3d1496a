"""`afd-shim fingerprint`: proposes a row of the compat matrix, for people to review."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["fingerprint"]


def fingerprint(
    write: Annotated[str, typer.Option("--write", metavar="RELEASE", help="The release whose row to write.")],
    vllm_root: Annotated[
        Path | None, typer.Option(help="An unpacked wheel or source tree; the installed vLLM when left out.")
    ] = None,
    like: Annotated[
        str | None, typer.Option(help="The row to copy the patch sets from; the nearest one when left out.")
    ] = None,
) -> None:
    """Write a release's row into the compat matrix, from its source; review the change before committing it."""
    from dataclasses import replace

    from afd_shim.cli.source import find_source
    from afd_shim.compat import Matrix, Row
    from afd_shim.engine import SourceTree
    from afd_shim.selection import load_set

    release = find_source(vllm_root)
    if release.base != write or release.package is None:
        typer.echo(f"{release.package} is vLLM {release}, not {write}. Give its root with --vllm-root.", err=True)
        raise typer.Exit(2)
    matrix = Matrix.load()
    model = matrix.rows.get(like) if like else matrix.rows.get(write) or matrix.nearest(write)
    if model is None:
        typer.echo(f"There is no row {like or write} to copy the patch sets from. Give one with --like.", err=True)
        raise typer.Exit(2)
    lanes = model.lanes if write in matrix.rows else ("static",)
    row = Row(write, release.requires_python or model.requires_python, lanes, model.sets, {}, {})
    tree = SourceTree(release.package)
    targets = {target.symbol: target for name in row.sets for patch in load_set(row, name) for target in patch.targets}
    row = replace(
        row,
        files={target.module: tree.file_hash(target.module) for target in targets.values()},
        fingerprints={symbol: tree.fingerprint(target) for symbol, target in targets.items()},
    )
    for symbol, target in targets.items():
        found = row.fingerprints[symbol]
        if found.kind != target.kind:
            typer.echo(f"{symbol} is {found.kind}; the patch declares a {target.kind}. Nothing was written.", err=True)
            raise typer.Exit(3)
        before = model.fingerprints.get(symbol)
        change = "new" if before is None else before.difference(found)
        typer.echo(f"{symbol}: {change or f'as in {model.release}'}")
    matrix.with_row(row).save()
    typer.echo(f"Row {write} is written: {len(targets)} symbols. Review it, run the tests, commit.")
