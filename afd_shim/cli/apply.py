"""Applies every set for real, in a child process, so that the parent stays as it was.

`python -m afd_shim.cli.apply FILE` imports vLLM, commits the sets of the installed release's row and
writes what happened to FILE: vLLM itself writes to the standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from afd_shim.errors import EngineError

if TYPE_CHECKING:
    from afd_shim.cli.diagnosis import PatchLine
    from afd_shim.engine import Report

__all__ = ["apply_in_child"]


class _Applied(TypedDict):
    patches: list[PatchLine]
    problem: str


def apply_in_child() -> tuple[list[PatchLine], str]:
    """Run this module in a child process.

    Returns:
        One line per patch and set, and what went wrong (empty when nothing did).
    """
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "applied.json"
        child = subprocess.run(  # noqa: S603 - this interpreter, this module
            [sys.executable, "-m", "afd_shim.cli.apply", str(answer)], capture_output=True, text=True, check=False
        )
        if not answer.is_file():
            return [], f"the child that applies the sets ended with {child.returncode}: {child.stderr[-2000:]}"
        applied: _Applied = json.loads(answer.read_text(encoding="utf-8"))
        return applied["patches"], applied["problem"]


def _lines(reports: tuple[Report, ...]) -> list[PatchLine]:
    return [
        {
            "set": report.set_name,
            "patch": patch.patch,
            "target": patch.target,
            "outcome": patch.outcome.value,
            "reason": patch.reason,
        }
        for report in reports
        for patch in report.patches
    ]


def _apply(answer: Path) -> None:
    import importlib

    from afd_shim import activation

    problem = ""
    try:
        importlib.import_module("vllm.engine.arg_utils")
        activation.arm()
        for report in activation.report():
            activation.commit(report.set_name)
            activation.require(report.set_name)
    except EngineError as error:
        problem = str(error)
    applied: _Applied = {"patches": _lines(activation.report()), "problem": problem}
    answer.write_text(json.dumps(applied), encoding="utf-8")


if __name__ == "__main__":
    _apply(Path(sys.argv[1]))
