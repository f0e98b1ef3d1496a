"""The order grid: every patch, in every order of events, on real vLLM, each cell in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from afd_shim.compat import Matrix, probe
from afd_shim.engine import Patch
from afd_shim.selection import GUARD, load_patch

CELLS = Path(__file__).with_name("activation_cells.py")
#: What every release proves; the whole grid is proven on the newest that has the patch.
CORNERS = ("import_then_activate", "activate_then_import")
ORDERS = ("twice", "deactivate_and_again", "reload", "fork", "spawn")

ROWS = Matrix.load().rows
ROW = ROWS[probe().row or ""]
#: The guard is in no row: its cells take the installed vLLM for a release without one.
PATCHES = (*ROW.patches, GUARD)
NEWEST = [row for row in ROWS.values() if "cpu" in row.lanes][-1]


def _on_newest(patch: str) -> object:
    """Mark what the newest release proves, which is every patch that it has too."""
    newest = patch == GUARD or patch in NEWEST.patches
    return pytest.param(patch, marks=pytest.mark.newest_release if newest else ())


class Grid:
    """A process that has imported what no patch touches, and forks a child for each cell."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, order: str, patch: str) -> str:
        """Run one cell; give its traceback, empty when it passed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"order": order, "patch": patch}) + "\n")
        self._process.stdin.flush()
        problems = []
        for line in self._process.stdout:
            if line.startswith("@@"):
                problems.append(json.loads(line[2:]))
                if len(problems) == (2 if order == "fork" else 1):  # The inner child reports too.
                    return "\n".join(filter(None, problems))
        return "the process that runs the cells has ended"


@pytest.fixture(scope="module")
def grid() -> Iterator[Grid]:
    """The process that runs the cells of this module."""
    with subprocess.Popen(
        [sys.executable, str(CELLS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Grid(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("order", CORNERS)
@pytest.mark.parametrize("patch", PATCHES)
def test_corners(grid: Grid, patch: str, order: str) -> None:
    """Importing the target before or after activation gives the same patched vLLM, on every release."""
    assert grid.run(order, patch) == ""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("patch", [_on_newest(patch) for patch in PATCHES])
def test_order(grid: Grid, patch: str, order: str) -> None:
    """Repeating, deactivating, reloading, forking and spawning keep one replacement on the pristine original."""
    assert grid.run(order, patch) == ""


def test_no_patch_lacks_a_binder() -> None:
    """Rebinding is proven for every module-level function that is patched: a new patch must name a binder."""
    cells = CELLS.read_text(encoding="utf-8")

    assert [name for name in ROW.patches if _is_rebound(load_patch(name)) and f'"{name}": "vllm.' not in cells] == []


def _is_rebound(patch: Patch) -> bool:
    return patch.strategy != "seam" and "." not in patch.target.qualname
