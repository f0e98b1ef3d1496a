"""What cannot be done soundly is refused by name, and a failure at any step leaves nothing behind."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from afd_shim.engine import Activation, PatchSet, Target
from afd_shim.engine.journal import Entry
from afd_shim.errors import EngineError, LateActivationError, PatchFailedError

HOLDERS = """
import functools
from upstream.layer import factory

class Registry:
    make = factory

def default(make=factory):
    return make

def keyword(*, make=factory):
    return make

def closure():
    kept = factory
    def inner():
        return kept
    return inner

inner = closure()
partial = functools.partial(factory, 8)
table = {"moe": factory}
listed = [factory]
"""


class SubRunner:
    """Not a subclass of what it replaces."""

    @staticmethod
    def unrelated(original: type) -> type:
        """Build a class that is no subclass."""
        return SubRunner

    @staticmethod
    def subclass(original: type) -> type:
        """Build a subclass, named like the original."""
        return type("Runner", (original,), {"__module__": original.__module__, "__qualname__": original.__qualname__})

    @staticmethod
    def local(original: Any) -> Any:
        """Build something without an importable name."""

        def unnamed(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        return unnamed

    @staticmethod
    def same(original: Any) -> Any:
        """Build nothing."""
        return original

    @staticmethod
    def number(original: Any) -> Any:
        """Build something else."""
        return 3


def identities(*places: Any) -> dict[str, dict[str, int]]:
    """Note which object every name of every namespace holds."""
    return {repr(place): {name: id(value) for name, value in vars(place).items()} for place in places}


@pytest.mark.parametrize("step", ["build", "install", "alias"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_failure_at_any_patch_restores_every_owner(
    activation: Activation, fakes: Any, model: ModuleType, layer: ModuleType, monkeypatch: pytest.MonkeyPatch,
    failing: int, step: str,
) -> None:  # fmt: skip
    """Whichever patch fails, at whichever step: namespaces are as before, the cause is chained, the report whole."""
    places = (sys.modules["upstream"], layer, layer.Runner, model)
    before = identities(*places)
    patches = list(fakes.all())
    name = patches[failing].name
    if step == "build":
        patches[failing] = fakes.patch(
            name, patches[failing].target.qualname, patches[failing].target.kind, build=fakes.refusing
        )
    else:
        install = Entry.install

        def breaking(entry: Entry) -> None:
            if step == "alias" or entry.patch.name != name:
                install(entry)
            if entry.patch.name == name:
                raise RuntimeError("not today")

        monkeypatch.setattr(Entry, "install", breaking)
    patch_set = PatchSet("all", tuple(patches))

    with pytest.raises(PatchFailedError, match=f"Patch '{name}' of set 'all' could not be applied") as caught:
        activation.commit(patch_set)

    assert identities(*places) == before
    assert isinstance(caught.value.__cause__, RuntimeError)
    report = caught.value.report
    assert report is not None
    assert not report.ok
    outcomes = [patch.outcome.value for patch in report.patches]
    assert outcomes[failing] == "failed"
    assert outcomes[:failing] == (["inert"] if step == "build" else ["rolled back"]) * failing
    assert outcomes[failing + 1 :] == ["inert"] * (2 - failing)
    monkeypatch.undo()
    activation.commit(fakes.all())


def test_interrupt_rolls_back_too(
    activation: Activation, fakes: Any, layer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a commit leaves no half set, and stays a Ctrl-C."""
    before = identities(layer)
    install = Entry.install

    def interrupted(entry: Entry) -> None:
        install(entry)
        if entry.patch.name == "skip":
            raise KeyboardInterrupt

    monkeypatch.setattr(Entry, "install", interrupted)

    with pytest.raises(KeyboardInterrupt):
        activation.commit(PatchSet("s", (fakes.patch(), fakes.skip())))
    assert identities(layer) == before


@pytest.mark.parametrize(
    ("symbol", "kind", "build", "flaw"),
    [
        ("factory", "function", SubRunner.local, "no importable name"),
        ("factory", "function", SubRunner.same, "gave the original back"),
        ("factory", "function", SubRunner.number, "cannot be called"),
        ("Runner", "class", SubRunner.unrelated, "only by a subclass"),
        ("Runner.name", "staticmethod", SubRunner.number, "only by a staticmethod"),
        ("Runner.make", "classmethod", SubRunner.number, "only by a classmethod"),
        ("Runner.gate", "property", SubRunner.number, "only by a property"),
    ],
)
def test_replacement_that_would_not_hold(
    activation: Activation, fakes: Any, layer: ModuleType, symbol: str, kind: str, build: Any, flaw: str
) -> None:
    """What pickle, isinstance or attribute lookup would trip over is refused when it is built."""
    before = identities(layer, layer.Runner)

    with pytest.raises(PatchFailedError, match=flaw):
        activation.commit(PatchSet("s", (fakes.patch("p", symbol, kind, build=build),)))
    assert identities(layer, layer.Runner) == before


def test_class_is_replaced_by_a_subclass(
    activation: Activation, fakes: Any, model: ModuleType, layer: ModuleType
) -> None:
    """A subclass takes a class' place everywhere, so that isinstance with the original still holds."""
    original = layer.Runner

    activation.commit(PatchSet("s", (fakes.patch("runner", "Runner", "class", build=SubRunner.subclass),)))

    assert model.Runner is layer.Runner is not original
    assert isinstance(layer.factory(8, 2), original)


@pytest.mark.parametrize(
    "holder",
    [
        "upstream.holders:Registry (attribute of Registry)",
        "upstream.holders:default (default argument of default)",
        "upstream.holders:keyword (default argument of keyword)",
        "upstream.holders:inner (closure of inner)",
        "upstream.holders:partial (functools.partial)",
        "upstream.holders:table (a dict's value)",
        "upstream.holders:listed (a sequence's item)",
    ],
)
def test_holder_out_of_reach_is_late(
    activation: Activation, fakes: Any, upstream: Path, layer: ModuleType, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    """Something that keeps the old function where no rebinding reaches it refuses the set, by name."""
    (upstream / "holders.py").write_text(HOLDERS, encoding="utf-8")
    importlib.import_module("upstream.holders")

    before = identities(layer)
    patch_set = PatchSet("s", (fakes.skip(), fakes.patch()))

    with pytest.raises(LateActivationError, match="comes too late") as caught:
        activation.commit(patch_set)

    assert holder in str(caught.value)
    assert identities(layer) == before
    assert caught.value.report is not None
    assert [patch.outcome.value for patch in caught.value.report.patches] == ["inert", "late"]


def test_instances_make_it_late(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """While an object of a class the patch names exists, it is neither applied nor taken out."""
    patch_set = PatchSet("s", (fakes.patch(instances=(Target("upstream.layer:Base", kind="class"),)),))
    runner = layer.Runner()

    with pytest.raises(LateActivationError, match=r"applied any more: 1 instance\(s\) of upstream.layer:Base"):
        activation.commit(patch_set)
    del runner
    activation.commit(patch_set)
    runner = layer.Runner()
    with pytest.raises(LateActivationError, match="deactivated any more"):
        activation.deactivate()
    del runner


def test_missing_target(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """A symbol or module that is not there fails the whole set and leaves no marker."""
    before = identities(layer)

    for symbol, kind in (("gone", "function"), ("Gone.forward", "method"), ("Runner.gone", "method")):
        with pytest.raises(PatchFailedError, match=r"upstream\.layer has no"):
            activation.commit(PatchSet("s", (fakes.skip(), fakes.patch("gone", symbol, kind))))
    assert identities(layer) == before


def test_errors_travel_between_processes(activation: Activation, fakes: Any, layer: ModuleType) -> None:
    """An error with its report survives pickle: EngineCore hands its workers' errors up."""
    with pytest.raises(PatchFailedError) as caught:
        activation.commit(PatchSet("s", (fakes.patch(build=fakes.refusing),)))

    copy: EngineError = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own bytes

    assert type(copy) is PatchFailedError
    assert str(copy) == str(caught.value)
    assert copy.report == caught.value.report


def test_loader_that_cannot_report_back(
    activation: Activation, fakes: Any, upstream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module whose import cannot be watched imports as usual; the barrier says why the set is not applied."""
    patch_set = PatchSet("s", (fakes.patch(),))
    activation.arm(patch_set)
    finder = sys.meta_path[0]

    class Slotted(SourceFileLoader):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name != "upstream.layer":
                return None
            loader = Slotted.__new__(Slotted)
            vars(loader).update(name=name, path=str(upstream / "layer.py"))
            return importlib.util.spec_from_loader(name, loader)

    monkeypatch.setattr(sys, "meta_path", [finder, Finder, *sys.meta_path[1:]])
    layer = importlib.import_module("upstream.layer")

    assert layer.factory(8, 2).forward(2) == 2
    with pytest.raises(PatchFailedError, match="cannot be watched"):
        activation.require(patch_set)
    monkeypatch.undo()
