"""The `afd-shim` command. Each command lives in a module of its own and imports what it needs when it runs."""

from __future__ import annotations

import typer

__all__ = ["app"]

app = typer.Typer(
    name="afd-shim",
    help="Attention-FFN Disaggregation for stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def main() -> None:
    """Attention-FFN Disaggregation for stock vLLM."""


def _add_commands() -> None:
    from afd_shim.cli.fingerprint import fingerprint

    app.command()(fingerprint)


_add_commands()
