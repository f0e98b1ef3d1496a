"""`afd-shim verify`: the static proof, for the installed vLLM or an unpacked wheel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["verify"]


def verify(
    vllm_root: Annotated[
        Path | None, typer.Option(help="An unpacked wheel or source tree; the installed vLLM when left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Compare vLLM's source with the compat matrix, importing nothing of it. Exit: 0 ready, 1 not ready, 3 drifted."""
    from afd_shim.cli.diagnosis import exit_code, patch_lines, status_of
    from afd_shim.cli.source import find_source
    from afd_shim.cli.text import columns, patch_table
    from afd_shim.compat import Matrix
    from afd_shim.selection import prove, refusal_of

    release, matrix = find_source(vllm_root), Matrix.load()
    proof = prove(release, matrix)
    status, lines = status_of(proof), patch_lines(proof)
    if as_json:
        found = {
            "status": status,
            "release": release.version,
            "state": release.state.value,
            "row": proof.row.release if proof.row else "",
            "patches": lines,
            "differences": [difference._asdict() for difference in proof.differences],
        }
        typer.echo(json.dumps(found, indent=2))
        raise typer.Exit(exit_code(status))
    compared = f"compared with row {proof.compared.release}" if proof.compared else "compared with nothing"
    typer.echo(f"vLLM {release}, {release.state}, {compared}  {release.package or ''}\n")
    for line in patch_table(lines):
        typer.echo(line)
    if proof.differences:
        typer.echo("")
        for line in columns([(difference.symbol, difference.what) for difference in proof.differences]):
            typer.echo(line)
    if status == "not ready":
        typer.echo(f"\n{refusal_of(release, matrix)}")
    typer.echo(f"\n{status}")
    raise typer.Exit(exit_code(status))
