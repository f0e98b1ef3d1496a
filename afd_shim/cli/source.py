"""Which vLLM a command looks at: the installed one, or an unpacked tree."""

from __future__ import annotations

from pathlib import Path

import typer

from afd_shim.compat.release import Release, probe, release_of_tree

__all__ = ["find_source"]


def find_source(vllm_root: Path | None) -> Release:
    """Name the installed vLLM, or the one under `vllm_root` (the package, or the directory that holds it)."""
    if vllm_root is None:
        return probe()
    for package in (vllm_root / "vllm", vllm_root):
        if (package / "__init__.py").is_file():
            return release_of_tree(package.resolve())
    typer.echo(f"There is no vllm package in {vllm_root}. Give the directory of an unpacked wheel.", err=True)
    raise typer.Exit(2)
