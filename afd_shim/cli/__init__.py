"""The `afd-shim` command. Each command lives in a module of its own and imports what it needs when it runs."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from afd_shim.cli.demo import demo
from afd_shim.cli.doctor import doctor
from afd_shim.cli.eplb_report import eplb_report
from afd_shim.cli.explain import explain
from afd_shim.cli.fingerprint import fingerprint
from afd_shim.cli.matrix import matrix
from afd_shim.cli.verify import verify
from afd_shim.errors import AfdShimError

__all__ = ["app"]


class _Group(TyperGroup):
    """Shows an error of ours as the sentence it is, without a traceback."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer vendors click or not, depending on its version
        try:
            return super().invoke(ctx)
        except AfdShimError as error:
            typer.echo(f"afd-shim: {error}", err=True)
            raise SystemExit(1) from error


app = typer.Typer(
    name="afd-shim",
    help="Attention-FFN Disaggregation for stock vLLM.",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, doctor, explain, verify, eplb_report, fingerprint, matrix):
    app.command()(command)


@app.callback()
def main() -> None:
    """Attention-FFN Disaggregation for stock vLLM."""
