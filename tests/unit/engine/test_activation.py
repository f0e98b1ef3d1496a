"""Applying, keeping, checking and taking out: one process, every order of events."""

from __future__ import annotations

import functools
import importlib
import json
import os
import pickle
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from afd_shim.engine import Activation, Outcome, PatchSet, Report
from afd_shim.engine.hooks import PostImportFinder
from afd_shim.errors import ConflictError, LateActivationError, PatchFailedError


def words(report: Report) -> list[str]:
    """Give the outcome words in order."""
    return [patch.outcome.value for patch in report.patches]


def test_every_strategy_bites(activation: Activation, fakes: Any, model: ModuleType, layer: ModuleType) -> None:
    """A replaced function, a wrapped method and a seam all run the new code."""
    report = activation.commit(fakes.all())

    assert words(report) == ["applied", "applied", "applied"]
    model.Model().experts.forward(2)
    assert fakes.calls == ["factory", "wrapped"]
    assert layer.load(["a", "x"]) == ["a"]


def test_every_module_that_imported_the_target_is_rebound(
    activation: Activation, fakes: Any, model: ModuleType
) -> None:
    """`from layer import factory` done before us gets the replacement, in every module of the package."""
    original = model.factory

    activation.commit(PatchSet("s", (fakes.patch(),)))

    package, layer = sys.modules["upstream"], sys.modules["upstream.layer"]
    assert model.factory is package.factory is layer.factory is not original
    activation.deactivate()
    assert model.factory is package.factory is layer.factory is original


def test_modules_imported_after_us_get_the_replacement(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """Import order makes no difference to the outcome."""
    report = activation.commit(PatchSet("s", (fakes.patch(),)))
    later = importlib.import_module("upstream.model")

    assert later.factory is layer.factory
    assert activation.report(PatchSet("s", (fakes.patch(),))) == report


def test_two_hundred_activations_leave_one_wrapper(activation: Activation, fakes: Any, model: ModuleType) -> None:
    """Doing it again changes nothing, by identity, and wraps nothing twice."""
    first = activation.commit(fakes.all())
    installed = model.factory

    for _ in range(200):
        assert activation.commit(fakes.all()) == first

    assert model.factory is installed
    model.Model().experts.forward(2)
    assert fakes.calls == ["factory", "wrapped"]


def test_deactivate_restores_by_identity(
    activation: Activation, fakes: Any, model: ModuleType, layer: ModuleType
) -> None:
    """Afterwards every namespace holds the very objects it held before, and it can be done again."""
    before = {place: dict(vars(place)) for place in (layer, layer.Runner, model, sys.modules["upstream"])}

    for _ in range(2):
        activation.commit(fakes.all())
        reports = activation.deactivate()

        assert {patch.outcome for patch in reports} == {Outcome.ROLLED_BACK}
        for place, names in before.items():
            assert {name: id(value) for name, value in vars(place).items()} == {
                name: id(value) for name, value in names.items()
            }
    assert words(activation.report(fakes.all())) == ["rolled back"] * 3
    assert activation.deactivate() == ()


def test_inherited_method_leaves_no_own_attribute_behind(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """A method patched on a subclass that only inherits it is deleted, not set, when restored."""
    activation.commit(PatchSet("s", (fakes.patch("inherited", "Runner.inherited", "method"),)))
    assert "inherited" in vars(layer.Runner)

    activation.deactivate()

    assert "inherited" not in vars(layer.Runner)
    assert layer.Runner().inherited() == "base"


def test_armed_set_waits_for_its_module(activation: Activation, fakes: Any, upstream: Path) -> None:
    """A set whose module is not imported is pending, never called applied, and is applied by the import."""
    patch_set = fakes.all()

    assert words(activation.arm(patch_set)) == ["pending"] * 3
    assert "upstream" not in sys.modules
    with pytest.raises(PatchFailedError, match="is pending, not applied"):
        activation.require(patch_set)
    model = importlib.import_module("upstream.model")

    assert words(activation.require(patch_set)) == ["applied"] * 3
    model.Model()
    assert fakes.calls == ["factory"]


def test_armed_set_of_an_imported_module_is_applied_at_once(
    activation: Activation, fakes: Any, layer: ModuleType
) -> None:
    """Arming before and after the import gives the same report."""
    assert words(activation.arm(fakes.all())) == ["applied"] * 3


def test_hook_leaves_the_loader_alone(activation: Activation, fakes: Any, upstream: Path) -> None:
    """An armed module keeps its own loader, so `python -m` and resources work, and the hook is gone."""
    activation.arm(fakes.all())
    layer = importlib.import_module("upstream.layer")

    assert not [finder for finder in sys.meta_path if isinstance(finder, PostImportFinder)]
    assert layer.__spec__ is not None
    loader = layer.__spec__.loader
    assert isinstance(loader, SourceFileLoader)
    assert "exec_module" not in vars(loader)
    assert loader is layer.__loader__
    assert loader.get_code("upstream.layer") is not None


def test_failure_in_a_hook_does_not_fail_the_import(activation: Activation, fakes: Any, upstream: Path) -> None:
    """The import succeeds and the original works; the barrier raises what happened, with its cause."""
    patch_set = PatchSet("s", (fakes.patch(build=fakes.refusing),))
    activation.arm(patch_set)

    model = importlib.import_module("upstream.model")

    assert model.Model().experts.forward(2) == 2
    with pytest.raises(PatchFailedError, match="RuntimeError: not today") as caught:
        activation.require(patch_set)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.report is not None
    assert words(caught.value.report) == ["failed"]


def test_import_that_fails_stays_watched(activation: Activation, fakes: Any, upstream: Path) -> None:
    """A module whose import raised is patched when a retry succeeds."""
    good = (upstream / "layer.py").read_text(encoding="utf-8")
    (upstream / "layer.py").write_text(good + "\nraise ImportError('flaky')\n", encoding="utf-8")
    activation.arm(PatchSet("s", (fakes.patch(),)))
    with pytest.raises(ImportError, match="flaky"):
        importlib.import_module("upstream.layer")
    (upstream / "layer.py").write_text(good, encoding="utf-8")
    importlib.invalidate_caches()

    importlib.import_module("upstream.layer")

    activation.require(PatchSet("s", (fakes.patch(),)))


def test_reloaded_module_is_noticed_and_patched_again(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """A reload throws the patch away: the barrier says so, and a commit puts it back on the new original."""
    patch_set = PatchSet("s", (fakes.patch(),))
    activation.commit(patch_set)
    importlib.reload(layer)

    with pytest.raises(LateActivationError, match="reloaded"):
        activation.require(patch_set)
    activation.commit(patch_set)

    activation.require(patch_set)
    layer.factory(8, 2)
    assert fakes.calls == ["factory"]


def test_redeclared_patch_keeps_the_pristine_original(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """Reloading a patch's own module makes a new, equal declaration: nothing is wrapped again."""
    original = layer.factory
    activation.commit(PatchSet("s", (fakes.patch(),)))
    activation.commit(PatchSet("s", (fakes.patch(build=fakes.skipping),)))

    layer.factory(8, 2)
    assert fakes.calls == ["factory"]
    activation.deactivate()
    assert layer.factory is original


def test_patch_shared_by_two_sets_is_applied_once(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """Two sets may name the same patch; the second finds it in place."""
    activation.commit(PatchSet("one", (fakes.patch(),)))
    report = activation.commit(PatchSet("two", (fakes.patch(), fakes.skip())))

    assert words(report) == ["applied", "applied"]
    layer.factory(8, 2)
    assert fakes.calls == ["factory"]


def test_chained_patches_of_one_target(
    activation: Activation, fakes: Any, model: ModuleType, layer: ModuleType
) -> None:
    """Two patches of one target run in the order they declare, are both applied, and both come off."""
    original = model.factory
    chain = PatchSet("s", (fakes.patch("inner"), fakes.patch("outer", after=("inner",))))

    report = activation.commit(chain)

    assert words(report) == ["applied", "applied"]
    model.factory(8, 2)
    assert fakes.calls == ["factory", "factory"]
    activation.deactivate()
    assert model.factory is layer.factory is original


def test_skipped_patch(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """An optional patch can be left out and is reported so; leaving out another refuses the set."""
    original = layer.skip
    optional = PatchSet("s", (fakes.patch(), fakes.skip(optional=True)))

    assert words(activation.commit(optional, skip={"skip"})) == ["applied", "skipped"]
    assert layer.skip is original
    activation.require(optional)
    activation.deactivate()
    with pytest.raises(ConflictError, match="stands or falls as a whole"):
        activation.commit(optional, skip={"factory"})
    assert words(activation.report(optional)) == ["rolled back", "skipped"]


def test_same_name_for_another_target(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """A patch name stands for one target in a process."""
    activation.commit(PatchSet("s", (fakes.patch(),)))

    with pytest.raises(ConflictError, match="Give the two patches different names"):
        activation.commit(PatchSet("t", (fakes.patch(symbol="skip"),)))


def test_second_owner_in_another_set(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """Another set cannot take over a target that is patched already."""
    activation.commit(PatchSet("s", (fakes.patch(),)))

    with pytest.raises(ConflictError, match="patched by 'factory' of another set"):
        activation.commit(PatchSet("t", (fakes.patch("other"),)))


def test_forked_child_inherits_the_patches(activation: Activation, fakes: Any, model: ModuleType) -> None:
    """After a fork the child reports `applied` under its own process id and wraps nothing again."""
    parent = activation.commit(fakes.all())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        report = activation.commit(fakes.all())
        model.Model()
        os.write(write, json.dumps([report.to_dict(), fakes.calls]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        report, calls = json.loads(pipe.read())
    os.waitpid(child, 0)

    assert report == {**parent.to_dict(), "pid": child}
    assert calls == ["factory"]


def test_report_has_no_truth_value(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """`if commit(...)` is a mistake, and says so."""
    report = activation.commit(fakes.all())

    with pytest.raises(TypeError, match="no truth value"):
        bool(report)
    assert report.summary() == f"all: 3/3 applied on upstream 1.0, digest d, pid {os.getpid()}"


def test_installed_functions_can_be_pickled(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """A replaced module function is found by its name, as a spawned process must."""
    activation.commit(PatchSet("s", (fakes.patch(),)))

    assert pickle.loads(pickle.dumps(layer.factory)) is layer.factory  # noqa: S301 - our own bytes


def test_nothing_is_imported_inside_a_patched_call(activation: Activation, fakes: Any, model: ModuleType) -> None:
    """After activation a patched call costs no import."""
    activation.commit(fakes.all())
    before = set(sys.modules)

    model.Model().experts.forward(2)

    assert set(sys.modules) == before


def test_wrapt_is_imported_by_wrapping_sets_only(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """A set without a wrapper does not pay for wrapt."""
    wrapt = sys.modules.pop("wrapt", None)
    activation.commit(PatchSet("s", (fakes.patch(), fakes.skip())))

    assert "wrapt" not in sys.modules
    if wrapt is not None:
        sys.modules["wrapt"] = wrapt


def foreign(function: Any) -> Any:
    """Wrap as another plugin would."""

    @functools.wraps(function)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return theirs


def test_wrapper_on_top_of_ours_is_never_removed(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """Someone's wrapper over ours is reported as shadowed, passes the barrier and survives deactivation."""
    patch_set = PatchSet("s", (fakes.forward(),))
    activation.commit(patch_set)
    layer.Runner.forward = theirs = foreign(layer.Runner.forward)

    assert words(activation.require(patch_set)) == ["shadowed"]
    assert [patch.outcome for patch in activation.deactivate()] == [Outcome.SHADOWED]
    assert vars(layer.Runner)["forward"] is theirs
    layer.Runner().forward(2)
    assert fakes.calls == ["forward"]
    layer.Runner.forward = theirs.__wrapped__
    assert [patch.outcome for patch in activation.deactivate()] == [Outcome.ROLLED_BACK]


def test_replacement_that_hides_ours(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """Something that took our place without leading to us fails the barrier, and is left alone."""
    patch_set = PatchSet("s", (fakes.forward(),))
    activation.commit(patch_set)
    layer.Runner.forward = theirs = lambda self, x: x

    with pytest.raises(LateActivationError, match="someone replaced it after us"):
        activation.require(patch_set)
    reports = activation.deactivate()
    assert vars(layer.Runner)["forward"] is theirs
    assert [(patch.outcome, patch.reason) for patch in reports] == [
        (Outcome.SHADOWED, "someone else's, left alone: Runner.forward")
    ]


def test_wrapper_below_ours(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """A target someone replaced before us is refused, naming where; a wrap, or a patch that stacks, goes on top."""
    layer.Runner.forward = foreign(layer.Runner.forward)
    with pytest.raises(ConflictError, match=r"replaced by someone else before .*test_activation\.py:\d+"):
        activation.commit(PatchSet("s", (fakes.forward(),)))

    for changes in ({"strategy": "wrap", "build": fakes.wrapper}, {"stacks": True}):
        report = activation.commit(PatchSet("s", (fakes.forward(**changes),)))
        assert "on top of" in report.patches[0].reason
        layer.Runner().forward(2)
        activation.deactivate()
    assert fakes.calls == ["wrapped", "forward"]
