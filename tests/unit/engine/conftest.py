"""A small package on disk stands in for vLLM: the engine is tested on its own, on every Python."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from afd_shim.engine import Activation, Patch, PatchSet, SourceTree, Target

LAYER = '''
"""A module."""


class Base:
    def inherited(self):
        return "base"


class Runner(Base):
    """Runs."""

    def forward(self, x, *, scale=1):
        """Scale."""
        return x * scale

    @staticmethod
    def name():
        return "runner"

    @classmethod
    def make(cls):
        return cls()

    @property
    def gate(self):
        return None


def factory(num_experts, top_k, *, runner_cls=None):
    """Make a runner."""
    # The default is resolved at call time.
    runner_cls = runner_cls or Runner
    return runner_cls()


def skip(name):
    return False


def load(names):
    return [name for name in names if not skip(name)]
'''

MODEL = """
from upstream.layer import Runner, factory


class Model:
    def __init__(self):
        self.experts = factory(8, top_k=2)
"""


class Fakes:
    """Builders, at class level so that they have importable names, and patches that use them."""

    calls: ClassVar[list[str]] = []

    @staticmethod
    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        """Replace a function by one that notes its name and calls it."""

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            Fakes.calls.append(original.__name__)
            return original(*args, **kwargs)

        return replacement

    @staticmethod
    def skipping(original: Callable[[str], bool]) -> Callable[[str], bool]:
        """Skip names with an x."""

        @functools.wraps(original)
        def replacement(name: str) -> bool:
            return "x" in name or original(name)

        return replacement

    @staticmethod
    def wrapper(original: object) -> Callable[..., Any]:
        """Give a wrapt wrapper that notes."""
        return Fakes.wrap

    @staticmethod
    def wrap(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note, and call on."""
        Fakes.calls.append("wrapped")
        return wrapped(*args, **kwargs)

    @staticmethod
    def refusing(original: object) -> object:
        """Refuse to build."""
        raise RuntimeError("not today")

    @staticmethod
    def patch(name: str = "factory", symbol: str = "factory", kind: Any = "function", **changes: Any) -> Patch:
        """Make a patch of `upstream.layer` with everything filled in."""
        fields: dict[str, Any] = {
            "name": name,
            "target": Target(f"upstream.layer:{symbol}", kind=kind),
            "strategy": "replace",
            "build": Fakes.noted,
            "why": "a test",
            "upstream": "upstream/layer.py, 1.0",
            "releases": ("1.0",),
            "until": "the test ends",
        }
        return Patch(**{**fields, **changes})

    @staticmethod
    def forward(**changes: Any) -> Patch:
        """Patch a method."""
        return Fakes.patch("forward", "Runner.forward", "method", **changes)

    @staticmethod
    def skip(**changes: Any) -> Patch:
        """Patch a seam."""
        return Fakes.patch("skip", "skip", **{"strategy": "seam", "build": Fakes.skipping, **changes})

    @staticmethod
    def all() -> PatchSet:
        """One patch of each strategy."""
        wrapped = Fakes.forward(strategy="wrap", build=Fakes.wrapper)
        return PatchSet("all", (Fakes.patch(), wrapped, Fakes.skip()))


@pytest.fixture
def fakes() -> type[Fakes]:
    """The builders and patches, with an empty list of calls."""
    Fakes.calls.clear()
    return Fakes


def forget() -> None:
    """Unload the package."""
    for name in [name for name in sys.modules if name == "upstream" or name.startswith("upstream.")]:
        del sys.modules[name]


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package called `upstream` on the import path, forgotten afterwards."""
    package = tmp_path / "upstream"
    package.mkdir()
    (package / "__init__.py").write_text("from upstream.layer import factory\n", encoding="utf-8")
    (package / "layer.py").write_text(LAYER, encoding="utf-8")
    (package / "model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # A file edited within a second must not look unchanged.
    importlib.invalidate_caches()
    finders = list(sys.meta_path)
    yield package
    forget()
    assert sys.meta_path == finders, "a test left an import hook behind"


@pytest.fixture
def layer(upstream: Path) -> ModuleType:
    """The imported module with the targets."""
    return importlib.import_module("upstream.layer")


@pytest.fixture
def model(upstream: Path) -> ModuleType:
    """An imported module that holds the targets by name."""
    return importlib.import_module("upstream.model")


@pytest.fixture
def activation(upstream: Path) -> Iterator[Activation]:
    """An activation of the `upstream` package, deactivated afterwards."""
    result = Activation(SourceTree(upstream), release="1.0", row="1.0", digest="d")
    yield result
    result.deactivate()
