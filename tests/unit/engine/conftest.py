"""A small package on disk stands in for vLLM: the engine is tested on its own, on every Python."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from afd_shim.engine import Activation, SourceTree

Write = Callable[[str, str], Path]

LAYER = '''
"""A module."""


class Runner:
    """Runs."""

    def forward(self, x, *, scale=1):
        """Scale."""
        return x * scale

    @staticmethod
    def name():
        return "runner"


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

MODEL = '''
from upstream.layer import factory


class Model:
    def __init__(self):
        self.experts = factory(8, top_k=2)
'''


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package called `upstream` on the import path, forgotten afterwards."""
    package = tmp_path / "upstream"
    package.mkdir()
    (package / "__init__.py").write_text("from upstream.layer import factory\n")
    (package / "layer.py").write_text(dedent(LAYER))
    (package / "model.py").write_text(dedent(MODEL))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    finders = list(sys.meta_path)
    yield package
    assert sys.meta_path == finders, "a test left an import hook behind"
    for name in [name for name in sys.modules if name == "upstream" or name.startswith("upstream.")]:
        del sys.modules[name]


@pytest.fixture
def activation(upstream: Path) -> Iterator[Activation]:
    """An activation of the `upstream` package, deactivated afterwards."""
    result = Activation(SourceTree(upstream), release="1.0", row="1.0", digest="d")
    yield result
    result.deactivate()
