"""`afd-shim explain`: why a patch exists, what it touches, and when it can go."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from afd_shim.compat import Matrix
    from afd_shim.engine import Patch

__all__ = ["explain"]


def explain(
    patch: Annotated[str | None, typer.Argument(help="A patch's name; all of them when left out.")] = None,
) -> None:
    """Explain one patch, or list them all."""
    from afd_shim.cli.text import columns
    from afd_shim.compat import Matrix
    from afd_shim.selection import GUARD, load_patch

    matrix = Matrix.load()
    if patch is not None:
        typer.echo("\n".join(_record(load_patch(patch), matrix)))
        return
    names = dict.fromkeys(name for row in matrix.rows.values() for name in row.patches)
    patches = [load_patch(name) for name in (*names, GUARD)]
    for line in columns([(known.name, known.target.symbol, known.why) for known in patches]):
        typer.echo(line)


def _record(patch: Patch, matrix: Matrix) -> Iterator[str]:
    sets = dict.fromkeys(
        set_name for row in matrix.rows.values() for set_name, names in row.sets.items() if patch.name in names
    )
    effect = (patch.build.__doc__ or "").strip().partition("\n")[0]
    fields = {
        "target": f"{patch.target} ({patch.target.kind})",
        "strategy": patch.strategy,
        "why": patch.why,
        "effect": effect,
        "upstream": patch.upstream,
        "until": patch.until,
        "sets": ", ".join(sets) or "only where the installed release has no row",
        "after": ", ".join(patch.after) or "-",
        "releases": ", ".join(patch.releases),
        "relies on": ", ".join(map(str, patch.relies_on)) or "-",
    }
    yield patch.name
    for name, value in fields.items():
        yield textwrap.fill(f"{name:10}{value}", width=110, initial_indent="  ", subsequent_indent=" " * 12)
    for release, row in matrix.rows.items():
        fingerprint = row.fingerprints.get(patch.target.symbol)
        if fingerprint is not None and patch.name in row.patches:
            yield f"  {release:10}{fingerprint.source}  {fingerprint.kind} ({fingerprint.parameters})"
