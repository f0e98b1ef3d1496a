"""`afd-shim doctor`: what is installed, what would be applied, what was, and what to do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from afd_shim.cli.diagnosis import Diagnosis

__all__ = ["doctor"]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, for bug reports.")] = False,  # noqa: FBT002 - a flag
    apply: Annotated[  # noqa: FBT002 - a flag
        bool,
        typer.Option(
            "--apply", help="Also import vLLM in a child process, apply every set there and show the outcome."
        ),
    ] = False,
) -> None:
    """Tell whether AFD can be served from this environment. Exit: 0 ready, 1 not ready, 3 drifted."""
    from afd_shim.cli.diagnosis import diagnose, exit_code

    found = diagnose()
    if apply and found["status"] == "ready":
        from afd_shim.cli.apply import apply_in_child

        found["patches"], problem = apply_in_child()
        if problem:
            found["problems"].append(problem)
            found["status"] = "not ready"
    typer.echo(json.dumps(found, indent=2) if as_json else _text(found))
    raise typer.Exit(exit_code(found["status"]))


def _text(found: Diagnosis) -> str:
    from afd_shim.cli.text import patch_table

    vllm = found["vllm"]
    name = f" ({vllm['distribution']})" if vllm["distribution"] not in ("", "vllm") else ""
    row = f"row {vllm['row']}{', untested' if vllm['untested'] else ''}" if vllm["row"] else "no row in the matrix"
    lines = [
        f"afd-shim  {found['afd_shim']['version']}  {found['afd_shim']['path']}",
        f"vLLM      {vllm['version']}{name}, {vllm['state']}, {row}  {vllm['path']}",
        f"device    {vllm['device'] or 'unknown'}",
        f"Python    {found['python']}; "
        + ", ".join(f"{name} {version}" for name, version in found["packages"].items()),
        f"plugin    {_plugin_words(found)}",
        f"digest    {found['digest']}",
        "",
        *patch_table(found["patches"]),
        "",
        *(f"note: {note}" for note in found["notes"]),
        *(f"problem: {problem}" for problem in found["problems"]),
        found["status"],
    ]
    return "\n".join(lines)


def _plugin_words(found: Diagnosis) -> str:
    plugins = found["plugins"]
    registered = "registered" if plugins["registered"] else "NOT registered"
    allowed = "is not set" if plugins["VLLM_PLUGINS"] is None else f"= {plugins['VLLM_PLUGINS']!r}"
    return f"{registered}; others in the group: {', '.join(plugins['others']) or 'none'}; VLLM_PLUGINS {allowed}"
