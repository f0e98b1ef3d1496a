"""One cell of the order grid, run in a process of its own; `test_activation_orders.py` drives it.

Importing vLLM costs seconds, so this script imports what no patch touches (torch, `vllm.config`) once,
then forks a child for each cell it reads from its standard input, one JSON object a line. Each child
has its own modules and patches. The outcome is a line that begins with `@@`: vLLM writes there too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import traceback
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

from afd_shim import activation, plugin
from afd_shim.compat import ReleaseState, probe
from afd_shim.engine import Outcome, Patch, Report
from afd_shim.errors import LateActivationError, UntestedVersionError
from afd_shim.selection import ALWAYS, GUARD, guard_set, load_patch, load_set

#: A module that binds the target by `from ... import`, for each patch of a module-level function.
BINDERS = {
    "moe_factory": "vllm.model_executor.models.olmoe",
    "decoder_layers": "vllm.model_executor.models.olmoe",
    "top_level": "vllm.model_executor.model_loader.base_loader",
    "weight_reads": "vllm.model_executor.model_loader.weight_utils",
    # Elsewhere only models for GPUs bind it.
    "cpu_expert_load": "vllm.model_executor.layers.fused_moe.router.base_router",
}


class Cell(NamedTuple):
    """One patch, and the set through which it is activated."""

    patch: Patch
    set_name: str

    def load(self) -> None:
        """Import the target's module, and one that binds the target by name."""
        importlib.import_module(self.patch.target.module)
        if self.patch.name in BINDERS:
            importlib.import_module(BINDERS[self.patch.name])

    def holders(self) -> list[object]:
        """Give what the owner and the binder hold now."""
        located = self.patch.target.locate()
        held = [located.value]
        if self.patch.name in BINDERS:
            held.append(vars(sys.modules[BINDERS[self.patch.name]])[located.name])
        return held

    def activate(self) -> None:
        """Do what vLLM's processes do: the plugin, then the set."""
        plugin.register()
        if self.set_name not in (ALWAYS, GUARD):
            activation.commit(self.set_name)

    def require(self) -> Report:
        """Pass the barrier; a process without a row has none, so the guard's is asked for by hand."""
        if self.set_name != GUARD:
            return activation.require(self.set_name)
        assert activation._process is not None
        return activation._process.activation.require(guard_set())

    def original(self) -> object:
        """Give what the patch replaced."""
        assert activation._process is not None
        return activation._process.activation._journal[self.patch.name].located.value

    def check(self) -> None:
        """Check that the barrier opens and every holder has the replacement, directly on upstream's own function."""
        report = self.require()
        assert {patch.outcome for patch in report.patches} == {Outcome.APPLIED}
        held = self.holders()
        assert all(value is held[0] for value in held), held
        assert getattr(held[0], "__wrapped__", None) is self.original(), held
        if self.set_name == GUARD:
            guarded: Any = self.patch.target.locate().value
            with pytest.raises(UntestedVersionError):
                guarded(SimpleNamespace(additional_config={"afd": {}}))


def hide_row() -> None:
    """Take the installed vLLM for a post-release, which has no row: the guard's realm."""
    release = replace(probe(), state=ReleaseState.POST)
    mock.patch.object(activation, "probe", return_value=release).start()


def import_then_activate(cell: Cell) -> None:
    """The target and a binder are there before us."""
    cell.load()
    before = cell.holders()
    cell.activate()
    cell.check()
    assert cell.original() is before[0]


def activate_then_import(cell: Cell) -> None:
    """We are there before the target's binder, and for `always` before the target itself."""
    cell.activate()
    cell.load()
    cell.check()


def twice(cell: Cell) -> None:
    """Two hundred more times change nothing."""
    cell.activate()
    cell.load()
    held = cell.holders()
    for _ in range(200):
        cell.activate()
    assert all(before is after for before, after in zip(held, cell.holders(), strict=True))
    cell.check()


def deactivate_and_again(cell: Cell) -> None:
    """Taking out restores by identity, and it can be done again."""
    cell.load()
    before = cell.holders()
    for _ in range(2):
        cell.activate()
        cell.check()
        activation.deactivate()
        assert all(old is new for old, new in zip(before, cell.holders(), strict=True))
    cell.activate()
    cell.check()


def reload(cell: Cell) -> None:
    """Reloading the patch keeps the original; reloading the target is noticed, and repaired by a commit."""
    cell.load()
    cell.activate()
    importlib.reload(sys.modules[f"afd_shim.patches.{cell.patch.name}"])
    cell.activate()
    cell.check()
    # Some of vLLM's modules register operators and raise when executed again, after they redefined the target.
    with contextlib.suppress(RuntimeError):
        importlib.reload(sys.modules[cell.patch.target.module])
    with pytest.raises(LateActivationError, match="reloaded"):
        cell.require()
    cell.activate()
    cell.require()


def fork(cell: Cell) -> None:
    """A forked child inherits the patches and reports them under its own process id."""
    cell.load()
    cell.activate()
    held, report = cell.holders(), cell.require()

    def in_child() -> None:
        cell.activate()
        assert all(before is after for before, after in zip(held, cell.holders(), strict=True))
        mine = cell.require()
        assert (mine.pid, mine.patches, mine.digest) == (os.getpid(), report.patches, report.digest)

    child = os.fork()
    if child == 0:
        _exit_with(in_child)
    assert os.waitpid(child, 0)[1] == 0


def _spawned(patch: str, set_name: str, answers: Any) -> None:
    if set_name == GUARD:
        hide_row()
    cell = Cell(load_patch(patch), set_name)
    cell.activate()
    cell.load()
    cell.check()
    report = cell.require()
    answers.put([report.digest, [patch.outcome.value for patch in report.patches]])


def spawn(cell: Cell) -> None:
    """A spawned child arrives at the same report and digest by itself."""
    cell.load()
    cell.activate()
    report = cell.require()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=_spawned, args=(cell.patch.name, cell.set_name, answers))
    child.start()
    answer = answers.get(timeout=120)
    child.join()
    assert child.exitcode == 0
    assert answer == [report.digest, [patch.outcome.value for patch in report.patches]]


ORDERS = {
    order.__name__: order
    for order in (import_then_activate, activate_then_import, twice, deactivate_and_again, reload, fork, spawn)
}


def _run(order: str, patch: str) -> None:
    if patch == GUARD:
        hide_row()
        ORDERS[order](Cell(load_patch(GUARD), GUARD))
        return
    row = activation._current().supported_row
    set_name = next(name for name, patches in row.sets.items() if patch in patches)
    loaded = next(known for known in load_set(row, set_name) if known.name == patch)
    ORDERS[order](Cell(loaded, set_name))


def _exit_with(call: Any, *arguments: str) -> None:
    """End this process; the last line it prints is the traceback, empty when the call returned."""
    problem = ""
    try:
        call(*arguments)
    except BaseException:  # noqa: BLE001 - shown to the parent, which fails the test
        problem = traceback.format_exc()
    print("@@" + json.dumps(problem), flush=True)  # noqa: T201 - the protocol
    os._exit(1 if problem else 0)


def _main() -> None:
    importlib.import_module("torch")
    importlib.import_module("vllm.config")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _exit_with(_run, request["order"], request["patch"])
        os.waitpid(child, 0)


if __name__ == "__main__":
    _main()
